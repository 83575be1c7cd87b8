"""`offload-decode models`: which models are supported, and what a store keeps of them."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version
from importlib.resources import files
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE
from offload_decode.cli.options import MODEL_CONFIG, Json, argument

if TYPE_CHECKING:
    from offload_decode.hf.verify import EquivalenceCheck
    from offload_decode.types import LayerShape, ModelShape


def models(
    model: Annotated[str | None, argument("[M]", MODEL_CONFIG)] = None,
    as_json: Json = False,
) -> None:
    """Show which models are supported, and what a store keeps of them.

    Without M: the families that the test suite checks, and what a store keeps of each. With M: the
    equivalence check of this model, in which a tiny model made from its config runs behind a stored prefix,
    and must give the logits of plain generation. Exit code 1 means that it is not supported.
    """
    if model is None:
        _families(as_json)
    else:
        _one(model, as_json)


def _families(as_json: bool) -> None:
    release, families = _listed()
    if as_json:
        output.answer_json({"transformers": release, "families": families})
        return
    output.answer(
        f"{len(families)} families, checked with transformers {release}; others are supported if they "
        "pass the equivalence check: offload-decode models M"
    )
    output.answer(output.facts([(name, ", ".join(kept)) for name, kept in sorted(families.items())]))


def _listed() -> tuple[str, dict[str, list[str]]]:
    """The families of the newest known release of transformers that is not newer than the installed one."""
    from packaging.version import Version

    text = files("offload_decode.cli").joinpath("families.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, list[str]]] = json.loads(text)
    installed = Version(version("transformers"))
    older = [release for release in known if Version(release) <= installed]
    release = max(older or known, key=Version)
    return release, known[release]


def _one(model: str, as_json: bool) -> None:
    from offload_decode.common.errors import UnsupportedModel
    from offload_decode.hf.shape import claimed_shape
    from offload_decode.hf.user_cache import note
    from offload_decode.hf.verify import check_equivalence
    from offload_decode.models.checkpoint import stated_config
    from offload_decode.models.fingerprints import config_hash

    config = stated_config(model)
    shape: ModelShape | None = None
    check: EquivalenceCheck | None = None
    try:
        shape = claimed_shape(config)
        check = check_equivalence(config)
        reason = check.reason
        if check.served:
            note(config_hash(config), check.difference)
    except UnsupportedModel as error:
        reason = str(error)
    kept = [_kept(layer, count) for layer, count in Counter(shape.layers).items()] if shape else []
    difference = None if check is None or check.difference == float("inf") else check.difference
    if as_json:
        told = {"model": model, "family": config.model_type, "served": not reason, "reason": reason}
        told |= {"difference": difference, "transformers": version("transformers"), "kept": kept}
        output.answer_json(told)
    else:
        facts = [("model", model), ("family", config.model_type), ("served", "no" if reason else "yes")]
        facts += [("reason", reason)] if reason else []
        if difference is not None:
            facts.append(("difference", f"{difference:.1e} of the spread of the logits, at most"))
        output.answer(output.facts([*facts, *((one["layers"], one["keeps"]) for one in kept)]))
    if reason:
        raise typer.Exit(FAILURE)


def checked(model: str) -> str:
    from offload_decode.hf.verify import check_equivalence
    from offload_decode.models.checkpoint import stated_config

    difference = check_equivalence(stated_config(model)).difference
    spread = f"{difference:.0e} of the spread of the logits"
    return f"{model}: equivalence check passed, a tiny model equals plain generation to {spread}"


def _kept(layer: LayerShape, count: int) -> dict[str, Any]:
    """What a store keeps of `count` such layers: as text, and in numbers per token and per sequence."""
    kind = "without keys" if layer.kind == "none" else layer.kind
    if layer.states:
        kind = "recurrent" if layer.kind == "none" else f"{layer.kind} and recurrent"
    numbers = layer.key_dim if layer.latent else layer.kv_heads * (layer.key_dim + layer.value_dim)
    states = sum(prod(state.shape) for state in layer.states)
    what = f"a latent of {numbers:,} numbers" if layer.latent else f"{numbers:,} numbers of keys and values"
    window = "" if layer.window is None else f", of the last {layer.window:,}"
    kept = [f"{what} for each token{window}"] if numbers else []
    kept += [f"a state of {states:,} numbers"] if states else []
    return {
        "layers": f"{count} {kind}",
        "keeps": " and ".join(kept) or "nothing",
        "numbers_per_token": 0 if layer.window is not None else numbers * count,
        "numbers_per_sequence": count * (states + numbers * ((layer.window or 1) - 1)),
    }
