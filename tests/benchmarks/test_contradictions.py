"""Contradicting documents differ in the fact that is asked for, and those that agree do not."""

from benchmarks.contradictions import KINDS, cases, write_documents


def test_documents_contradict_each_other_where_they_should(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("One line of another text.\n" * 60)
    write_documents(tmp_path, tmp_path / "out", 5000, 4)
    texts = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    every = list(cases(5000, 4))
    assert [kind for kind, *_ in every] == [*KINDS] * 4
    for number, (kind, article, fact, other) in enumerate(every):
        own, name = article.facts[fact], f"{number:03}"
        assert own != other
        assert own in texts[f"{name}a"]
        assert (f"{name}b" in texts) == (kind != "alone")
        if kind != "alone":
            assert ((own in texts[f"{name}b"]), (other in texts[f"{name}b"])) == (
                (True, False) if kind == "agree" else (False, True)
            )
