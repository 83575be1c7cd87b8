"""The fast forward pass computes what transformers does; a far key counts as many tokens as it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training import network
from training.curriculum import side_by_side
from training.forward import Trainee, attend, banded, of_queries, unbanded
from training.guidance import LED, LONGER, SINKS

LENGTH = 256
WORDS = 64


def small(name: str) -> Any:
    settings = network.config(name, WORDS, 0, 1, 2)
    settings.hidden_size, settings.intermediate_size = 32, 32
    torch.manual_seed(0)
    return network.create(settings)


def arguments(far: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(3, WORDS, (2, LENGTH)),
        "places": torch.arange(LENGTH).expand(2, -1),
        "picked": torch.randint(0, LENGTH, (2, 40)),
        "targets": torch.randint(3, WORDS, (2, 40)),
        "weights": torch.rand(2, 40),
        "others": torch.full((2, 40, 3), -1),
        "guided": torch.ones(2, 40),
        "hints": torch.full((2, 40, 2), -1),
        "opens": torch.zeros(2, LENGTH, dtype=torch.long),
        "ends": torch.zeros(2, LENGTH, dtype=torch.long),
        "origins": torch.full((2, LENGTH), -1),
        "so_far": torch.zeros(2, LENGTH, dtype=torch.long),
        "counted": torch.zeros(2, 5, dtype=torch.long),
        "bound": torch.full((2, 4, 3), -1),
        "crowd": torch.zeros(2, LENGTH),
        "branches": torch.zeros(2, LENGTH, dtype=torch.long),
        "far_index": torch.arange(far),
        "far_places": torch.zeros(far, dtype=torch.long),
        "far_bias": torch.full((2, far), float("-inf")),
        "softening": torch.tensor(1.0),
        "eos": 1,
    }


@pytest.mark.parametrize("name", network.MODELS)
def test_it_gives_the_loss_of_transformers(name: str) -> None:
    model = small(name)
    given = arguments()
    with torch.no_grad():
        loss, *_, right = Trainee(model)(**given)
        logits = model(given["tokens"]).logits
    logits = logits.gather(1, given["picked"][:, :, None].expand(-1, -1, WORDS))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given["targets"].flatten(), reduction="none"
    )
    weights = given["weights"].flatten()
    torch.testing.assert_close(loss, (losses * weights).sum() / weights.sum())
    assert torch.equal(right, logits.argmax(-1) == given["targets"])


@pytest.mark.parametrize("name", network.MODELS)
def test_branches_are_as_if_each_stood_alone_behind_what_all_see(name: str) -> None:
    model, given = small(name), arguments()
    stem, first, second = 200, 30, 26
    branches = torch.zeros(2, LENGTH, dtype=torch.long)
    branches[:, stem:] = torch.tensor([1] * first + [2] * second)
    given["branches"] = branches
    given["places"] = torch.as_tensor(side_by_side(given["places"].numpy(), branches.numpy()))
    given["picked"] = torch.arange(stem, stem + 40).expand(2, -1)
    with torch.no_grad():
        trainee = Trainee(model)
        names = ("tokens", "places", "picked", "crowd", "branches", "far_index", "far_places", "far_bias")
        states, *_ = trainee.states(*(given[name] for name in names), given["softening"])
        logits = trainee.logits(states)
        # transformers' windows count places by index: what follows stands where it is looked for.
        alone = torch.cat([given["tokens"][:, :stem], given["tokens"][:, stem + first :]], 1)
        true = model(given["tokens"][:, : stem + first]).logits[:, stem:]
        torch.testing.assert_close(logits[:, :first], true, rtol=1e-4, atol=1e-4)
        # A window ends where that of the row does, by index: the second branch sees less of the stem.
        if all(window is None for window in trainee.windows):
            true = model(alone).logits[:, stem : stem + 40 - first]
            torch.testing.assert_close(logits[:, first:], true, rtol=1e-4, atol=1e-4)


def test_a_token_as_right_as_the_target_counts_as_right() -> None:
    """With one other accepted token, the loss is that of the two probabilities together."""
    model = small("demo")
    given = arguments()
    given["others"][:, :, 0] = (given["targets"] + 1) % WORDS
    with torch.no_grad():
        loss, *_, right = Trainee(model)(**given)
        logits = model(given["tokens"]).logits
    logits = logits.gather(1, given["picked"][:, :, None].expand(-1, -1, WORDS))
    accepted = torch.stack([given["targets"], given["others"][:, :, 0]], 2)
    probability = logits.softmax(-1).gather(2, accepted).sum(2)
    torch.testing.assert_close(loss, -(probability.log() * given["weights"]).sum() / given["weights"].sum())
    assert torch.equal(right, (logits.argmax(-1, keepdim=True) == accepted).any(2))


@pytest.mark.parametrize("name", network.MODELS)
def test_far_keys_that_stand_for_nothing_change_nothing(name: str) -> None:
    trainee = Trainee(small(name))
    with torch.no_grad():
        near, *_ = trainee(**arguments())
        with_far, *_ = trainee(**arguments(8))
        counted, *_ = trainee(**arguments(8) | {"far_bias": torch.zeros(2, 8)})
    torch.testing.assert_close(near, with_far)
    assert not torch.allclose(near, counted)


def test_a_token_of_the_row_stands_for_many_in_the_last_layer_alone() -> None:
    trainee = Trainee(small("demo"))
    given = arguments()
    crowd = torch.zeros(2, LENGTH)
    crowd[:, 3] = 2.0
    places = [given[name] for name in ("tokens", "places", "picked")]
    behind = [given[name] for name in ("branches", "far_index", "far_places", "far_bias", "softening")]
    with torch.no_grad():
        _, paid, _ = trainee.states(*places, torch.zeros_like(crowd), *behind)
        _, more, _ = trainee.states(*places, crowd, *behind)
    for layer in range(len(paid) - 1):
        torch.testing.assert_close(paid[layer], more[layer])
    seen = (given["picked"] >= 3)[:, None].expand(-1, paid[-1].shape[1], -1)
    grown = paid[-1] * crowd.exp()[:, None, None]
    torch.testing.assert_close(more[-1][seen], (grown / grown.sum(-1, keepdim=True))[seen])


def test_a_key_that_stands_for_many_counts_as_many() -> None:
    torch.manual_seed(2)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    bias = torch.zeros(1, 3, 5)
    bias[..., 4] = torch.log(torch.tensor(7.0))
    many = [torch.cat([x, x[:, :, 4:].expand(-1, -1, 6, -1)], 2) for x in (key, value)]
    once, paid = attend(query, key, value, bias)
    often, each = attend(query, *many, torch.zeros(1, 3, 11))
    torch.testing.assert_close(once, often)
    torch.testing.assert_close(paid[..., 4], each[..., 4:].sum(-1))


def led(name: str, found: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return found[1][LED.index(name)]


def test_guidance_falls_as_attention_is_paid_to_what_is_copied() -> None:
    """The same answer costs less guidance where more of the attention goes to its source."""
    model = small("demo")
    given = arguments() | {"tokens": torch.randint(3, WORDS, (2, LENGTH))}
    given["tokens"][:, LENGTH // 2 :] = given["tokens"][:, : LENGTH - LENGTH // 2]
    given["picked"] = torch.arange(LENGTH // 2, LENGTH - 4).expand(2, -1)
    given["targets"] = given["tokens"].gather(1, given["picked"] + 1)
    given["weights"] = torch.ones_like(given["targets"], dtype=torch.float32)
    given["guided"] = torch.ones_like(given["weights"])
    given["hints"] = torch.full((*given["targets"].shape, 2), -1)
    given["others"] = torch.full((*given["targets"].shape, 3), -1)
    given["origins"] = given["tokens"]
    last = model.model.layers[-1].self_attn
    trainee = Trainee(model)
    before = led("copied", trainee(**given))
    before.backward()
    with torch.no_grad():
        last.q_proj.weight.sub_(0.1 * last.q_proj.weight.grad / last.q_proj.weight.grad.norm())
        after = led("copied", trainee(**given))
        nothing = led("copied", trainee(**given | {"guided": torch.zeros_like(given["weights"])}))
    assert after < before
    assert nothing == 0


@pytest.fixture(params=network.MODELS)
def eager(request: pytest.FixtureRequest) -> Any:
    """A model whose attention transformers tells."""
    model = small(request.param)
    model.set_attn_implementation("eager")
    return model


def attention(model: Any, layer: int, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        paid: torch.Tensor = model(given["tokens"], output_attentions=True).attentions[layer]
    return paid


def test_the_layer_before_the_last_is_led_to_each_part_that_a_list_has_said(eager: Any) -> None:
    """-log of what its heads pay, as transformers computes it, averaged over the parts that were said."""
    given = arguments()
    given["opens"][0, [200, 210, 220]] = 1
    given["opens"][1, [180, 230]] = 2
    given["picked"][:] = 100
    given["picked"][0, :3], given["picked"][1, :2] = torch.tensor([199, 209, 219]), torch.tensor([179, 229])
    with torch.no_grad():
        remembrance = led("said", Trainee(eager)(**given))
    paid = attention(eager, -2, given).sum(1).clamp(1e-6, 1)
    weights = given["weights"]
    places = {(0, 1): [200], (0, 2): [200, 210], (1, 1): [180]}
    worth = torch.stack([weights[at] for at in places])
    logs = torch.stack(
        [paid[row, given["picked"][row, i], said].log().mean() for (row, i), said in places.items()]
    )
    torch.testing.assert_close(remembrance, -(logs * worth).sum() / worth.sum().clamp(min=1))


def test_the_layer_before_the_last_is_led_from_a_value_to_the_name_that_it_belongs_to(eager: Any) -> None:
    given = arguments()
    given["bound"][0, 1] = torch.tensor([150, 120, 123])
    given["bound"][1, 3] = torch.tensor([40, 30, 30])
    with torch.no_grad():
        missed = led("named", Trainee(eager)(**given))
    paid = attention(eager, -2, given).sum(1).clamp(1e-6, 1)
    mass = torch.stack([paid[0, 150, 120:124].sum().clamp(max=1), paid[1, 40, 30]])
    torch.testing.assert_close(missed, -mass.log().mean())


def test_heads_are_led_to_pay_a_word_as_much_as_it_has_come(eager: Any) -> None:
    """Kullback-Leibler divergence from n / (n + sink), n being how often the word has ended so far: the last
    head with the first of SINKS and, in Cohere's model, the one before it with the second, both added.

    Of the rest, what does not go to the first token counts LONGER times.
    """
    given = arguments()
    given["so_far"][0, [10, 30, 50]] = 3
    given["so_far"][0, 40] = 8
    given["so_far"][1, [20, 21]] = 3
    given["counted"][0, :3] = torch.tensor([50, 40, 10])
    given["counted"][1, 0] = 21
    with torch.no_grad():
        missed = led("counted", Trainee(eager)(**given))
    every = attention(eager, -3, given)
    together = torch.tensor(0.0)
    sinks = SINKS if eager.config.model_type == "cohere2" else SINKS[:1]
    for head, sink in zip((-1, -2), sinks, strict=False):
        paid = every[:, head]
        mass = torch.stack(
            [paid[0, 50, [10, 30, 50]].sum(), paid[0, 40, 40], paid[0, 10, 10], paid[1, 21, 20:22].sum()]
        )
        first = torch.stack([paid[0, 50, 0], paid[0, 40, 0], paid[0, 10, 0], paid[1, 21, 0]])
        mass = mass / (mass + first + LONGER * (1 - mass - first))
        share = torch.tensor([n / (n + sink) for n in (3, 1, 1, 2)])
        apart = torch.nn.functional.kl_div(
            torch.stack([mass, 1 - mass]).log(), torch.stack([share, 1 - share]), reduction="none"
        )
        together += apart.sum(0).mean()
    torch.testing.assert_close(missed, together)


def test_what_is_read_where_a_word_ends_is_led_to_its_first_token(eager: Any) -> None:
    """By the heads of the first KV head, if both pay all of their attention to that place of transformers'
    own values."""
    given = arguments()
    given["ends"][0, [30, 50]], given["ends"][1, 20] = 3, 8
    given["origins"][0, [30, 50]], given["origins"][1, 20] = 7, 9
    given["counted"][0, :2], given["counted"][1, 0] = torch.tensor([50, 30]), 20
    values = []
    last = eager.model.layers[-1].self_attn
    hook = last.v_proj.register_forward_hook(lambda *called: values.append(called[2]))
    with torch.no_grad():
        eager(given["tokens"])
        hook.remove()
        missed = led("read", Trainee(eager)(**given))
        dim = eager.config.head_dim
        held = values[0][..., :dim]
        out = torch.cat([held, held, torch.zeros_like(held), torch.zeros_like(held)], 2)
        logits = eager.model.norm(out @ last.o_proj.weight.T) @ eager.model.embed_tokens.weight.T
    logs = logits.log_softmax(-1)
    said = torch.stack([logs[0, 50, 7], logs[0, 30, 7], logs[1, 20, 9]])
    torch.testing.assert_close(missed, -said.mean())


@pytest.mark.parametrize("length", [8, 16, 48])
def test_attention_in_a_window_is_told_by_token(length: int) -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(2, 4, length, 8), *torch.randn(2, 2, 2, length, 8)
    out, paid = banded(query, key, value, 16, torch.zeros(len(query), length, dtype=torch.long))
    picked = torch.stack([torch.randperm(length)[:7], torch.randint(0, length, (7,))])
    whole = unbanded(of_queries(paid, picked), picked, length)
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 7))
    each = value.repeat_interleave(2, 1)
    for row in range(2):
        torch.testing.assert_close((whole @ each)[row], out[row][:, picked[row]])
