"""`offload-decode selectors`: the methods that choose stored tokens."""

from dataclasses import asdict
from typing import Any

from offload_decode.cli import output
from offload_decode.cli.errors import sentence
from offload_decode.cli.options import Json


def selectors(as_json: Json = False) -> None:
    """List the methods that choose stored tokens.

    For each: its paper, what it reads in a step to choose, what it keeps in memory (for each layer and KV
    head, with N stored tokens of D dimensions and a budget of k), and its options with their defaults.
    Attention then reads k values, and k keys unless choosing has already given their exact scores.
    """
    from offload_decode.selectors.registry import names

    kinds = [_about(name) for name in names()]
    if as_json:
        output.answer_json({"selectors": kinds})
        return
    for about in kinds:
        if "problem" in about:
            output.answer(f"{about['name']}: cannot be used\n  {about['problem']}")
            continue
        options = " ".join(f"{key}={value}" for key, value in about.pop("options").items())
        output.answer(f"{about.pop('name')}: {about.pop('method')}")
        if about.pop("remembers"):
            output.answer("  keeps state in a conversation; each question starts afresh")
        facts = {**about, "options": options}
        output.answer(output.facts([(f"  {key}", text) for key, text in facts.items()]))


def _about(name: str) -> dict[str, Any]:
    """A selector's declaration, with the distribution of an extension, or why it cannot be used."""
    from offload_decode.common.errors import ExtensionError
    from offload_decode.selectors.registry import EXTENSIONS, declared, declared_by

    claims = [one.by for one in EXTENSIONS.installed() if one.name == name]
    if not claims:
        return asdict(declared(name))
    try:
        found = EXTENSIONS.get(name)
    except ExtensionError as error:
        return {"name": name, "problem": sentence(error)}
    assert found is not None, "it was installed a moment ago"
    return {**asdict(declared_by(found)), "from": claims[0]}
