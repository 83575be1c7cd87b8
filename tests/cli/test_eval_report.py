"""`eval report` writes one page, and `eval compare` says what changed; both refuse what is no run."""

import json

from tests.cli.conftest import done, refused, run
from tests.evals.made_up import write_run


def test_a_page_is_written_and_not_written_over(tmp_path):
    runs = [write_run(tmp_path / f"{name}.jsonl", 0.9, questions=2) for name in ("one", "two")]
    out = tmp_path / "new" / "report.html"
    ran = run("eval", "report", *runs, "--out", out)
    assert (ran.code, ran.out, ran.err) == (0, "", f"{out}\n")
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "one.jsonl" in text
    assert "two.jsonl" in text
    assert "exists already" in refused(2, "eval", "report", runs[0], "--out", out)
    assert out.read_text() == text
    done("eval", "report", runs[0], "--out", out, "--force", "-q")
    assert "two.jsonl" not in out.read_text()


def test_what_is_no_run_makes_no_page(tmp_path):
    out = tmp_path / "report.html"
    assert "there are no results at" in refused(2, "eval", "report", tmp_path / "none", "--out", out)
    (tmp_path / "text").write_text("some text")
    assert "is no file of an evaluation" in refused(2, "eval", "report", tmp_path / "text", "--out", out)
    assert not out.exists()


def test_a_comparison_is_a_table_and_json(tmp_path):
    runs = [write_run(tmp_path / f"{share}.jsonl", share, questions=40) for share in (0.2, 0.9)]
    ran = done("eval", "compare", *runs)
    lines = ran.out.splitlines()
    assert lines[1].startswith("mean of 3 tasks")
    assert len(lines) == 1 + 10 + 30
    assert all(line.endswith("more than noise") for line in lines[1:])
    assert "bytes moved a token: 1 times as many" in ran.err
    told = run("eval", "compare", *runs, "--json", "-q")
    assert told.err == ""
    found = json.loads(told.out)
    assert (len(found["means"]), len(found["changes"])) == (10, 30)
    assert "there are no results at" in refused(2, "eval", "compare", runs[0], tmp_path / "none.jsonl")
