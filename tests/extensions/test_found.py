"""Entry points of other distributions: found without importing them, used by name, refused in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

from offload_decode.common import plugins
from offload_decode.common.errors import ConfigError, ExtensionError, UnusableKind, VectorIndexError
from offload_decode.indexes import registry
from offload_decode.prefill_jobs.methods import registry as methods
from offload_decode.selectors import registry as selectors
from tests.extensions.installing import install, install_example, write

FIRST = """
import torch
from offload_decode.selectors.base import Selector
from offload_decode.types import Selection

class First(Selector):
    '''The first k tokens.'''
    name, paper, reads, holds = "first", "none", "nothing", "nothing"
    def choose(self, layer, queries, k):
        return Selection(torch.arange(k).expand(*queries.vectors.shape[:2], k))
"""


def test_what_is_installed_stands_beside_what_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = selectors.names(), registry.kinds(), methods.names()
    install_example(tmp_path, monkeypatch)
    assert selectors.names() == [*before[0], "longest-keys"]
    assert registry.kinds() == (*before[1], "sorted-keys")
    assert methods.names() == [*before[2], "evenly"]
    assert selectors.get("longest-keys").__module__ == "key_lengths.selector"
    assert registry.get("sorted-keys").name == "sorted-keys"
    assert methods.get("evenly").name == "evenly"
    assert plugins.found()[1] == ()
    assert plugins.versions() == {"key-lengths": "0.1.0"}, "which results name"


def test_names_are_known_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\n"
        "from offload_decode.selectors import registry as selectors\n"
        "from offload_decode.prefill_jobs.methods import registry as methods\n"
        "print('first' in selectors.names(), 'last' in methods.names())\n"
        "print({'torch', 'numpy', 'mine'} & {*sys.modules})"
    )
    points = {"selectors": {"first": "mine:First"}, "prefill_methods": {"last": "mine:Last"}}
    install(tmp_path, monkeypatch, "mine", points, {"mine": "1 / 0"})
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "True True\nset()\n"


def test_a_command_that_needs_no_names_does_not_look_for_them() -> None:
    code = (
        "import sys, importlib.metadata as metadata\n"
        "metadata.distributions = metadata.entry_points = None\n"
        "from offload_decode.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as ended: assert ended.code == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere", r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
        ("def (", r"cannot be imported \(SyntaxError"),
        ("import sys\nsys.exit('no GPU,\\nno job')", r"cannot be imported \(SystemExit: no GPU, no job\)"),
        ("First = 5", "mine:First is no class that inherits Selector"),
        ("class First: name = 'first'", "is no class that inherits Selector"),
        ("Last = 5", r"cannot be imported \(AttributeError"),
        (FIRST.replace('"first"', '"second"'), "First names itself 'second', which must be the name"),
        (FIRST.replace("name, paper, reads, holds", "name, paper, _, _"), "does not say its reads and holds"),
        (FIRST.replace("def choose", "def chose"), "First does not define choose"),
        (FIRST + "    options_type = dict", "has an options_type that does not inherit .*SelectorOptions"),
    ],
)
def test_one_that_is_broken_is_refused_by_its_distribution_and_breaks_no_other(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", monkeypatch, "mine", {"selectors": {"first": "mine:First"}}, {"mine": source})
    install_example(tmp_path / "b", monkeypatch)
    with pytest.raises(ExtensionError, match=f"selector 'first' of mine 0.1 cannot be used.*{said}") as told:
        selectors.get("first")
    assert "mend or uninstall mine" in str(told.value)
    assert "\n" not in str(told.value)
    assert selectors.get("longest-keys").name == "longest-keys"
    assert selectors.get("topk").name == "topk"


def test_each_group_asks_for_its_own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "offload_decode.selectors.topk:TopK"
    install(tmp_path, monkeypatch, "mine", {"indexes": {"x": value}, "prefill_methods": {"y": value}})
    with pytest.raises(UnusableKind, match="no class that inherits VectorIndex") as told:
        registry.stated("x")
    assert isinstance(told.value, VectorIndexError), (
        "whoever handles what is wrong with an index handles this"
    )
    with pytest.raises(ExtensionError, match="no class that inherits Method"):
        methods.create("y", {}, None)  # type: ignore[arg-type]
    assert "x" not in registry.usable()
    assert set(registry.BUILT_IN) <= set(registry.usable())


def test_a_name_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "a", monkeypatch, "mine", {"selectors": {"first": "mine:First"}}, {"mine": FIRST})
    install(tmp_path / "b", monkeypatch, "yours", {"selectors": {"first": "yours:First"}}, {"yours": FIRST})
    with pytest.raises(ExtensionError, match=r"'first' is brought by \w+ 0.1 and \w+ 0.1.*uninstall") as told:
        selectors.get("first")
    assert "mine 0.1" in str(told.value)
    assert "yours 0.1" in str(told.value)
    assert selectors.names().count("first") == 1


@pytest.mark.parametrize(
    ("group", "name", "get"),
    [
        ("selectors", "quest+topk", selectors.get),
        ("indexes", "flat", registry.get),
        ("prefill_methods", "dense", methods.get),
    ],
)
def test_a_built_in_name_is_not_taken(group, name, get, tmp_path: Path, monkeypatch) -> None:
    """Nor is the built-in one used in silence, where a user may have meant the other."""
    install(tmp_path, monkeypatch, "mine", {group: {name: "mine:First"}}, {"mine": FIRST})
    with pytest.raises(ExtensionError, match=r"offload-decode itself and mine 0.1.*uninstall mine"):
        get(name)


@pytest.mark.parametrize(
    "name", ["Mine", "a b", "a:b", "../a", "a.partial", "a,b", "-a", "a--b", "ä", "a" * 65]
)
def test_a_name_that_cannot_be_typed_everywhere_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "mine", {"indexes": {name: "mine:First"}}, {"mine": FIRST})
    assert name not in registry.kinds()
    with pytest.raises(UnusableKind, match=r"the index kind .* of mine 0.1 cannot be used: a name has"):
        registry.get(name)


def test_what_is_wrong_with_one_distribution_is_said_and_the_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "torn", "[offload_decode.selectors]\nno value at all\n")
    write(tmp_path, "typo", "[offload_decode.selector]\nfirst = typo:First\n")
    (tmp_path / "nameless-1.dist-info").mkdir()
    (tmp_path / "nameless-1.dist-info" / "entry_points.txt").write_text("[offload_decode.indexes]\na = b:C\n")
    (tmp_path / "bytes-1.dist-info").mkdir()
    (tmp_path / "bytes-1.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe")
    install_example(tmp_path / "b", monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    assert "longest-keys" in selectors.names()
    told = "\n".join(plugins.found()[1])
    assert "the entry points of torn in" in told
    assert "typo 0.1 has entry points of the group 'offload_decode.selector', which means nothing" in told
    assert told.count("the entry points of a distribution in") == 2
    with pytest.raises(ConfigError, match="unknown selector 'first'"):
        selectors.get("first")


def test_of_two_versions_the_first_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"selectors": {"first": "mine:First"}}
    install(tmp_path / "old", monkeypatch, "mine", points, {"mine": FIRST}, "0.1")
    install(tmp_path / "new", monkeypatch, "mine", points, {"mine": FIRST}, "0.2")
    assert [one.by for one in selectors.EXTENSIONS.installed() if one.name == "first"] == ["mine 0.2"]
    assert selectors.get("first").name == "first"
    write(tmp_path / "newer", "mine", "", "0.3")
    monkeypatch.syspath_prepend(tmp_path / "newer")
    assert "first" not in selectors.names()
