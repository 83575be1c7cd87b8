"""What stands between the marks of reasoning is told apart, however the text is cut."""

import pytest

from offload_decode.server.reasoning import ReasoningParser

CASES = [
    ("<think>\nI see.\n</think>\n\nAda.", False, "I see.", "Ada."),
    (" \n<think></think>Ada.", False, "", "Ada."),
    ("I see.\n</think>\n\nAda.", True, "I see.", "Ada."),
    ("I see. </thin", True, "I see. </thin", ""),
    ("<think>I see", False, "I see", ""),
    ("Ada <think>wrote</think> it.", False, "", "Ada <think>wrote</think> it."),
    ("<thin air>", False, "", "<thin air>"),
    ("<thi", False, "", "<thi"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "shown"), CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_is_told_apart_however_it_is_cut(text, inside, reasoning, shown, size):
    parser = ReasoningParser(inside)
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(parser.push("", last=True))
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (reasoning, shown)
