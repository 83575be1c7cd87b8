"""The table of families: an exact one with what is kept, and one that is not served with the reason."""

from benchmarks.families import row


def test_a_served_family_says_what_is_kept(tmp_path):
    family, name, served, difference, control, told = row("gemma3", tmp_path)
    assert (family, name, served) == ("gemma3", "gemma3_text", "yes")
    assert float(difference) < 1e-4 < float(control)
    assert told == "keys and values of 1 of 3 layers, 64 numbers each a token, a window of 2 (sliding 7)"


def test_a_family_that_is_not_served_says_why(tmp_path):
    *_, served, _, _, told = row("falcon", tmp_path)
    assert served == "no"
    assert "falcon" in told
