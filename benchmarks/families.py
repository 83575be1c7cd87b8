"""Which families are served, and how exactly? `python -m benchmarks.families [FAMILY...]`.

A tiny instance of each family that the installed transformers has (random weights, float32) answers from a
store of 45 tokens with k = N and is compared with transformers alone: the logits of a question of one token,
of nine, and of a second turn behind a greedy answer, and whether greedy answers, beams and a batch of ragged
questions are the same. `difference` is the largest of all logits, `control` what the logits differ by where
the prefix is left out. What is kept is that of the tiny instance: how many of its layers keep numbers for
each token, a window, or a state.

`--checked` instead writes what `offload-decode models` lists for the installed transformers: every class that
passes the equivalence check, and what is kept of its layers.
"""

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from transformers import __version__
from transformers.utils import logging

from offload_decode import cli
from offload_decode.common.errors import OffloadDecodeError, UnsupportedModel
from offload_decode.hf.verify import shape_of
from offload_decode.types import LayerShape, ModelShape
from tests.exactness import NEW, Case
from tests.families import FAMILIES, config_of

CLOSE = 1e-4
CHECKED = Path(cli.__file__).with_name("families.json")
HEADS = ["family", "class", "served", "difference", "control", "what is kept"]


def kept(shape: ModelShape) -> str:
    """Of each layer, in words."""
    layers, told = len(shape.layers), []
    if full := shape.full_layers:
        numbers = shape.kv_heads * (shape.head_dim + (0 if shape.layers[full[0]].latent else shape.value_dim))
        what = "latents" if shape.layers[full[0]].latent else "keys and values"
        told.append(f"{what} of {len(full)} of {layers} layers, {numbers} numbers each a token")
    if local := [shape.layers[index] for index in shape.local_layers]:
        kinds = " and ".join(sorted({f"{own.kind} {own.window}" for own in local}))
        told.append(f"a window of {len(local)} ({kinds})")
    if shape.state_layers:
        held = [prod(state.shape) for index in shape.state_layers for state in shape.layers[index].states]
        told.append(f"a state of {len(shape.state_layers)} ({sum(held)} numbers in all)")
    return ", ".join(told)


def differences(case: Case) -> tuple[float, float, list[str]]:
    """The largest difference, that of the control, and what else is not the same."""
    asked, wrong = case.question(0, 9), []
    plain = case.plain_logits(case.whole(asked))[:, case.prefix :]
    worst = max(largest(case.logits(asked), plain), largest(case.logits(asked[:, :1]), plain[:, :1]))
    control = largest(case.plain_logits(asked, first=case.prefix), plain)

    turn = case.engine.fork()
    first = list(turn.generate(turn.extend(asked), NEW))
    so_far = case.whole(asked, torch.tensor([first]), case.question(9, 7))
    worst = max(worst, largest(turn.extend(case.question(9, 7)), case.plain_logits(so_far)[0, -1]))
    if case.answer(asked) != case.plain_answer(case.whole(asked)):
        wrong.append("a greedy answer differs")
    if case.beams(asked) != case.plain_beams(case.whole(asked)):
        wrong.append("beams differ")
    rows = [case.question(3 * row, length) for row, length in enumerate([9, 1, 4])]
    if case.ragged_answers(rows) != [case.plain_answer(case.whole(row)) for row in rows]:
        wrong.append("a ragged batch differs")
    return worst, control, wrong


def largest(ours: Tensor, plain: Tensor) -> float:
    """Largest difference; infinite where one is not a number."""
    found = float((ours - plain).abs().max())
    return found if found == found else float("inf")


def row(family: str, folder: Path) -> list[str]:
    """A line of the table."""
    name = FAMILIES[family].model_type
    try:
        shape_of(config_of(family))
        case = Case(family, folder)
        worst, control, wrong = differences(case)
    except OffloadDecodeError as error:
        return [family, name, "no", "", "", " ".join(str(error).split())]
    shape = case.engine.loaded.shape
    exact = worst <= CLOSE < control and not wrong
    told = kept(shape) if exact else "; ".join(wrong) or "the logits differ"
    return [family, name, "yes" if exact else "no", f"{worst:.0e}", f"{control:.1f}", told]


def stored(layer: LayerShape) -> set[str]:
    """What is kept of a layer, in words that hold for any size."""
    kinds = {"full": "keys and values", "sliding": "a window", "chunked": "a chunk"}
    words = ["latents" if layer.latent else kinds.get(layer.kind, ""), "states" if layer.states else ""]
    return {" and ".join(filter(None, words))} - {""}


def write_checked() -> None:
    """Beside what other releases of transformers have."""
    found: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        with suppress(UnsupportedModel):
            for layer in shape_of(config_of(name)).layers:
                found.setdefault(family.model_type, set()).update(stored(layer))
    known = json.loads(CHECKED.read_text())
    known[__version__] = {name: sorted(words) for name, words in found.items()}
    CHECKED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--checked", action="store_true", help=f"write {CHECKED.name}")
    arguments = parser.parse_args()
    if arguments.checked:
        write_checked()
        return 0
    logging.set_verbosity_error()
    rows = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(family, Path(folder)))
    served = [line for line in rows if line[2] == "yes"]
    classes = len({line[1] for line in served})
    print(f"transformers {__version__}, torch {torch.__version__}, on the CPU: ", end="")
    print(f"{classes} classes of models are served exactly, in {len(served)} of {len(rows)} configurations")
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    for line in [HEADS, ["-" * width for width in widths[:-1]] + ["-" * len(HEADS[-1])], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
