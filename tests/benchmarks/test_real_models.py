"""The tables of real models: every selector by its divergence, every task with its interval, perplexities."""

import json

from benchmarks.real_models import MODELS, Measurement, Runner, measurements, tables
from tests.evals.made_up import write_likelihoods, write_run


def write_fidelity(folder, text, divergences):
    entries = [
        {"selector": name, "label": name, "agreement": {"kl_mean": kl}}
        for budget in range(3)
        for name, each in divergences.items()
        for kl in [each[budget]]
    ]
    path = folder / f"fidelity-qwen-{text}-8K" / "fidelity.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"entries": entries}))


def test_selectors_are_ordered_by_their_divergence_at_the_middle_budget(tmp_path):
    write_fidelity(
        tmp_path, "code", {"quest": (0.3, 0.2, 0.1), "topk": (0.01, 0.004, 0.5), "dense": (0, 0, 0)}
    )
    write_fidelity(tmp_path, "prose", {"topk": (0.02, 0.005, 0.0003)})
    shown = tables(tmp_path)
    assert shown.index("`topk`") < shown.index("`quest`")
    assert "0.01, 0.004, 0.5 | 0.02, 0.005, 0.0003" in shown
    assert "0.3, 0.2, 0.1" in shown
    assert "`dense`" not in shown


def test_tasks_and_perplexities_stand_beside_their_intervals(tmp_path):
    write_run(tmp_path / "ruler-qwen-vt-4K.jsonl", lambda task, length, way: 1.0, tasks=("vt",), questions=8)
    write_likelihoods(tmp_path / "perplexity-qwen-dense-8K.jsonl")
    shown = tables(tmp_path)
    assert "qwen `vt`" in shown
    assert "100 (68-100)" in shown  # Wilson, 8 of 8
    assert "qwen 2K, dense prefill" in shown


def test_what_was_measured_is_not_measured_again(tmp_path):
    runner = Runner(tmp_path, tmp_path, tmp_path)
    one = next(one for one in measurements(8) if one.kind == "perplexity")
    assert not runner.finished(one)
    write_likelihoods(tmp_path / f"{one.name}.jsonl")
    assert runner.finished(one)
    fidelity = Measurement("fidelity", MODELS[0], "code", "8K", ())
    assert not runner.finished(fidelity)
    write_fidelity(tmp_path, "code", {})
    assert runner.finished(fidelity)
    assert len({one.name for one in measurements(8)}) == len(list(measurements(8)))
