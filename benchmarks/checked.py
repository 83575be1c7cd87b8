"""Writes what `offload-decode models` lists for the installed transformers: `python -m benchmarks.checked`.

Every family of the test suite that passes the equivalence check, with the kinds of layers that its tiny
config has and what is kept of them.
"""

import json
from contextlib import suppress
from pathlib import Path

from transformers import __version__

from offload_decode import cli
from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.verify import shape_of
from offload_decode.types import LayerShape
from tests.families import FAMILIES, config_of

PLACE = Path(cli.__file__).with_name("families.json")


def stored(layer: LayerShape) -> set[str]:
    """What is kept of a layer, in words that hold for any size."""
    kinds = {"full": "keys and values", "sliding": "a window", "chunked": "a chunk"}
    words = ["latents" if layer.latent else kinds.get(layer.kind, ""), "states" if layer.states else ""]
    return {" and ".join(filter(None, words))} - {""}


def checked() -> dict[str, list[str]]:
    """What is kept of the layers of each family that passes the equivalence check."""
    found: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        with suppress(UnsupportedModel):
            for layer in shape_of(config_of(name)).layers:
                found.setdefault(family.model_type, set()).update(stored(layer))
    return {name: sorted(words) for name, words in sorted(found.items())}


def main() -> None:
    known = json.loads(PLACE.read_text()) if PLACE.exists() else {}
    known[__version__] = checked()
    PLACE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
