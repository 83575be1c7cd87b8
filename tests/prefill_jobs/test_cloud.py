"""The cloud recipes say what the commands, the package and the shell understand."""

import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import shell_lines, understood

ROOT = Path(__file__).parents[2]
CLOUD = ROOT / "prefill_jobs" / "cloud"
README = (CLOUD / "README.md").read_text(encoding="utf-8")
DOCKERFILE = (CLOUD / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    return yaml.safe_load((CLOUD / "skypilot.yaml").read_text(encoding="utf-8"))


def our_commands(lines: list[list[str]]) -> list[list[str]]:
    """The arguments of `offload-decode` in commands, be it a program or the name of an image that runs it."""
    return [
        words[words.index("offload-decode") + 1 :]
        for words in lines
        if "offload-decode" in words and words[:2] != ["docker", "build"]
    ]


def run_body(task: dict[str, Any], home: Path, **env: str) -> list[str]:
    """The arguments that the task's `run` gives to `offload-decode`: a stand-in notes them."""
    program = home / "offload-decode" / "bin" / "offload-decode"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\npwd > "$HOME/where"\nprintf "%s\\0" "$@" > "$HOME/arguments"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    given = {name: value for name, value in task["envs"].items() if value is not None} | env
    subprocess.run(
        ["bash", "-c", task["run"]],
        env=given | {"HOME": str(home), "PATH": os.environ["PATH"]},
        check=True,
        timeout=20,
    )
    return (home / "arguments").read_text().split("\0")[:-1]


def test_the_shell_reads_the_scripts(task: dict[str, Any]) -> None:
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True, timeout=20)
        assert task[part].startswith("set -euo pipefail\n"), "a step that fails ends the job"


def test_run_is_a_prefill_that_the_command_line_understands(task: dict[str, Any], tmp_path: Path) -> None:
    arguments = run_body(task, tmp_path, OUT="s3://bucket/a name.kv")
    parsed = understood(arguments)
    assert parsed["command"] == "prefill"
    assert list(parsed["corpora"]) == [str(tmp_path / "corpus")]
    assert parsed["staging"] == tmp_path / "staging"
    assert parsed["model"] == task["envs"]["MODEL"]
    assert arguments[arguments.index("--out") + 1] == "s3://bucket/a name.kv"
    assert parsed["method"] == "quoka"
    assert parsed["options"] == ["budget=25%"]
    assert (tmp_path / "where").read_text().strip() == str(tmp_path / "staging")


def test_run_uses_the_given_staging_folder_and_no_other_options(task: dict[str, Any], tmp_path: Path) -> None:
    volume = tmp_path / "a volume"
    arguments = run_body(task, tmp_path, OUT="gs://bucket/name.kv", PREFILL_OPTIONS="", STAGING=str(volume))
    assert understood(arguments)["method"] == "dense"
    assert (tmp_path / "where").read_text().strip() == str(volume)


def test_options_are_not_expanded_by_the_shell(task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "budget=1").touch()
    arguments = run_body(task, tmp_path, OUT="s3://b/n.kv", PREFILL_OPTIONS="--method quoka -o budget=*")
    assert arguments[-1] == "budget=*"


def test_the_task_names_its_resources_and_returns_its_machine(task: dict[str, Any]) -> None:
    assert [name for name, value in task["envs"].items() if value is None] == ["CORPUS", "OUT"]
    assert all(value is None or isinstance(value, str) for value in task["envs"].values())
    assert task["file_mounts"] == {"~/corpus": "${CORPUS}"}
    assert task["workdir"] == "."
    assert task["resources"]["autostop"]["down"] is True
    assert task["resources"]["use_spot"] is False


def test_every_variable_of_the_scripts_is_declared(task: dict[str, Any]) -> None:
    declared = {*task["envs"], *task["secrets"], "HOME", "PATH"}
    for part in ("setup", "run"):
        used = set(re.findall(r"\$\{?([A-Z_]+)", task[part]))
        assert used <= declared, f"{used - declared} in {part}"


@pytest.mark.parametrize("arguments", our_commands(shell_lines(README)), ids=" ".join)
def test_the_readmes_commands_are_understood(arguments: list[str]) -> None:
    understood(arguments)


def test_the_readme_sets_only_variables_that_the_task_has(task: dict[str, Any]) -> None:
    launches = [words for words in shell_lines(README) if words[:3] == ["sky", "jobs", "launch"]]
    assert launches
    for words in launches:
        assert (ROOT / words[3]).is_file()
        values = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
        unknown = {value.partition("=")[0] for value in values} - {*task["envs"], "AWS_REGION"}
        assert not unknown
        assert {"CORPUS", "OUT"} <= {value.partition("=")[0] for value in values}
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", README, flags=re.MULTILINE))
    assert table == set(task["envs"])


def test_both_recipes_install_extras_that_exist(task: dict[str, Any]) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for recipe in (task["setup"], DOCKERFILE):
        (named,) = re.findall(r"'\.\[([a-z,]+)\]'", recipe)
        assert named == "gpu,buckets,quant"
        assert set(named.split(",")) <= set(extras)


def test_the_image_copies_the_whole_package() -> None:
    copied = {
        name
        for line in re.findall(r"^COPY (.+)$", DOCKERFILE, flags=re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert all((ROOT / name).exists() for name in copied)
    rooms = {file.resolve().name for file in (ROOT / "offload_decode").iterdir() if file.is_symlink()}
    assert {"offload_decode", *rooms} <= copied
    files = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    assert files <= copied, "setuptools reads them"


def test_the_image_runs_the_command_and_not_as_root() -> None:
    assert re.search(r'^ENTRYPOINT \["offload-decode"\]$', DOCKERFILE, flags=re.MULTILINE)
    assert "offload-decode" in PROJECT["project"]["scripts"]
    users = re.findall(r"^USER (.+)$", DOCKERFILE, flags=re.MULTILINE)
    assert users == ["offload"]
    assert DOCKERFILE.index("USER offload") > DOCKERFILE.rindex("RUN "), "what is installed belongs to root"


def test_the_volumes_of_docker_run_are_folders_of_the_image() -> None:
    (run,) = [words for words in shell_lines(README) if words[:2] == ["docker", "run"]]
    volumes = [run[i + 1].split(":")[1] for i, word in enumerate(run) if word == "--volume"]
    made = re.search(r"install --directory --owner offload --group offload (.+)$", DOCKERFILE, re.MULTILINE)
    assert made
    assert volumes == ["/corpus", *made[1].split()]
    assert "ENV HF_HOME=/models" in DOCKERFILE
    assert "WORKDIR /staging" in DOCKERFILE
