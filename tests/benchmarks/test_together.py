"""Documents hold what is asked for, questions do not, and the table counts what was said."""

from benchmarks.together import KINDS, REFUSAL, asked, rows, write_documents


def test_documents_hold_the_facts_that_questions_ask_for(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.rst").write_text("One line of another text.\n" * 60)
    write_documents(tmp_path, tmp_path / "out", 8, 600)
    texts = [(tmp_path / "out" / f"{number:03}.txt").read_text() for number in range(8)]
    of_kind = {kind: [one for own, one in asked(8, 4, KINDS) if own == kind] for kind in KINDS}
    assert [len(found) for found in of_kind.values()] == [4, 4, 4]
    for one in of_kind[KINDS[0]]:
        assert one.answer in texts[one.needed[0]]
    for one in of_kind[KINDS[1]]:
        first, second = one.needed
        assert one.answer in texts[second]
        assert one.answer not in texts[first]
    assert not any(one.answer in one.question for found in of_kind.values() for one in found)


def test_a_row_counts_right_answers_and_refusals():
    said = [(KINDS[0], "Riwa"), (KINDS[0], "Furzou"), (KINDS[2], f"It is {REFUSAL}."), (KINDS[2], "Riwa")]
    lines = [
        {
            "way": "mixture 4",
            "kind": kind,
            "question": str(number),
            "answer": "Riwa",
            "said": text,
            "ms": 10.0 + number,
            "grounded": (0.9, 0.4, 0.2, 0.6)[number],
        }
        for number, (kind, text) in enumerate(said)
    ]
    counts = "1 of 2", "0 of 0", "1 of 2", "12"
    assert list(rows(lines)) == [["mixture 4", *counts, "0.75", "1 of 2", "1 of 2"]]
    assert list(rows([line | {"grounded": None} for line in lines])) == [["mixture 4", *counts, "", "", ""]]
