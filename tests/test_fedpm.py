"""FedPM: a slow reference of Algorithms 1 and 2, the counts by hand, a bit a weight up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import SAME, away, merge_round
from safetensors.torch import load_file
from test_methods import made
from test_parts import BODY, HEAD, KEYS, initial, model_of
from test_personal import Slow
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.federation.protocol import Update
from fedsub_app.models import build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from strategies.direction import agreeing
from strategies.fedpm import FedPM, signed_constants
from strategies.merging import Valid

Run = Callable[..., tuple[Json, Path]]
MASKED = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
OTHERS = ("bn1.weight", "bn1.bias")
FAST = KEYS | {"method": "fedpm", "evaluate": "global", "lr": 5.0, "batch_size": 64}


def reference(r: Slow) -> tuple[Tensors, Tensors]:
    """Algorithms 1 and 2 in float64; returns the last theta, and the tensors without masks."""
    w = {
        n: torch.where(t < 0, -1.0, 1.0) * (2 / (64 if n.startswith("fc1") else 1000)) ** 0.5
        for n, t in r.start.items()
    }
    theta = {n: torch.full_like(w[n], 0.5) for n in MASKED}
    x_g = {n: r.start[n] for n in OTHERS}
    ones, seen = {n: torch.zeros_like(w[n]) for n in MASKED}, 0
    for t in (1, 2, 3):
        if (t - 1) % r.s.options.reset_every == 0:
            ones, seen = {n: torch.zeros_like(w[n]) for n in MASKED}, 0
        trained = []
        for i in r.clients:
            scores, rest = {n: torch.log(p / (1 - p)) for n, p in theta.items()}, dict(x_g)
            draws = generator(r.s.seed, t, i, "masks")

            def draw(scores: Tensors, draws: torch.Generator = draws) -> Tensors:
                return {
                    n: (torch.rand(s.shape, generator=draws) < torch.sigmoid(s)).double() for n, s in scores.items()
                }

            for batch in (batch for epoch in r.batches(i, t) for batch in epoch):
                mask = draw(scores)
                slope = r.gradient(rest | {n: w[n] * mask[n] for n in MASKED}, batch)
                for n in MASKED:
                    p = torch.sigmoid(scores[n])
                    scores[n] = scores[n] - r.s.lr * slope[n] * w[n] * p * (1 - p)
                rest = {n: rest[n] - r.s.lr * slope[n] for n in OTHERS}
            final, seen = draw(scores), seen + 1
            ones = {n: ones[n] + final[n] for n in MASKED}
            trained.append(rest)
        theta = {n: (ones[n] / seen).clamp(0.01, 0.99) for n in MASKED}
        x_g = r.mean(trained, OTHERS)
    return theta, x_g


@pytest.mark.parametrize("reset_every", [1, 2])
def test_it_follows_the_algorithm(reset_every: int, run_local: Run) -> None:
    """A score that rounding moves past a random number changes a bit: a few in 10,000."""
    keys = FAST | {"fedpm__reset_every": reset_every}
    _, folder = run_local(**keys)
    ours = unprefixed("state/theta/", load_file(max((folder / "checkpoints").glob("round-*"))))
    settings = resolve({k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()})
    theta, others = reference(Slow(settings))
    assert away({n: model_of(folder)[n] for n in OTHERS}, others, {n: initial()[n] for n in OTHERS}) < SAME
    for name, expected in theta.items():
        assert float(((ours[name] - expected).abs() > 1e-6).double().mean()) < 1e-3, name
        assert float((expected - 0.5).abs().mean()) > 0.1


def test_the_counts_by_hand() -> None:
    """Three masks, then three more twice: 1/3, 3/6 and 4/9; then the counts begin anew."""
    strategy, client = made("fedpm", fedpm__reset_every=3)
    assert strategy.current["fc1.bias"].div(strategy.signed["fc1.bias"]).unique().tolist() == [0, 1], "a drawn mask"
    tensors = client(0, 1, {}).run_training(dict(strategy.task(0).tensors), {}).tensors

    def play(number: int, *bits: bool) -> float:
        strategy.round = number
        masks = {n: torch.zeros_like(t) for n, t in tensors.items() if n.startswith("mask/")}
        updates = []
        for k, bit in enumerate(bits):
            own = {n: t.clone() for n, t in masks.items()}
            own["mask/fc1.bias"][0] = bit
            updates.append(Update(k, tensors | own, {}, 1))
        merge_round(strategy, updates)
        assert float(strategy.theta["fc1.bias"][1]) == pytest.approx(0.01)
        return float(strategy.theta["fc1.bias"][0])

    assert play(1, True, False, False) == pytest.approx(1 / 3)
    assert play(2, True, True, False) == pytest.approx(1 / 2)
    assert play(3, True, False, False) == pytest.approx(4 / 9)
    assert play(4, True, True, True) == pytest.approx(0.99)


def test_the_random_network_stays(run_local: Run) -> None:
    """Constants with the signs of the initial weights, or 0."""
    _, folder = run_local(**FAST | {"num_rounds": 1})
    model = model_of(folder)
    signed = signed_constants(build_model("feature-mlp", (1, 8, 8), 10, 0), initial())
    assert set(signed) == set(MASKED)
    assert set(model) == set(HEAD + BODY)
    for name, weights in signed.items():
        assert bool(((model[name] == weights) | (model[name] == 0)).all())
        assert bool((weights.sign() == torch.where(initial()[name] < 0, -1, 1)).all())
    assert float(signed["fc2.weight"].abs().max()) == pytest.approx((2 / 1000) ** 0.5)


@pytest.mark.parametrize("given", [{"start_from": "runs/A"}, {"model_options": "pretrained = True"}, {}])
def test_that_trained_weights_count_by_their_signs_is_said(given: Json) -> None:
    settings = resolve({"model": "feature-mlp", "method": "fedpm"}).model_copy(update=given)
    strategy = FedPM(settings, build_model("feature-mlp", (1, 8, 8), 10, 0))
    assert strategy.warning.startswith("fedpm takes only the signs") == bool(given)


def test_the_constants_of_gpt2s_layers_are_of_their_inputs() -> None:
    """Their weights are [in, out]."""
    network = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 8), nn.Linear(3, 2))
    signed = signed_constants(network, {name: tensor.detach() for name, tensor in tensors_of(network).items()})
    assert [float(signed[f"{k}.weight"].abs().max()) for k in (0, 1)] == pytest.approx([(2 / 8) ** 0.5, (2 / 3) ** 0.5])


def test_a_sign_flipper_sends_the_complement_of_its_mask() -> None:
    sent = []
    for more in ({}, {"attack": "sign-flip", "attackers": 1}):
        strategy, client = made("fedpm", **more)
        sent.append(client(0, 1, {}).run_training(dict(strategy.task(0).tensors), {}).tensors)
    for name in MASKED:
        assert torch.equal(sent[1][f"mask/{name}"], ~sent[0][f"mask/{name}"])


def test_with_robust_the_complement_of_the_others_masks_is_opposed() -> None:
    strategy, _ = made("fedpm", num_clients=6)
    strategy.round = 1
    draws = torch.Generator().manual_seed(0)
    mask = {n: torch.rand(w.shape, generator=draws) < 0.5 for n, w in strategy.signed.items()}
    updates = []
    for client in range(6):  # honest ones differ from the common mask at an eighth of the positions
        own = {n: m ^ (torch.rand(m.shape, generator=draws) < 1 / 8) for n, m in mask.items()}
        bits = {f"mask/{n}": ~m if client == 2 else m for n, m in own.items()}
        update = Update(client, {n: strategy.current[n] for n in OTHERS} | bits, {}, 1)
        updates.append(Valid(update, strategy.contribution(update), {}))
    kept, (opposed,), _ = agreeing(strategy, updates)
    assert (opposed.client, [valid.update.client for valid in kept]) == (2, [0, 1, 3, 4, 5])
    alike = (2 * 7 / 8 - 1) ** 2  # cosine of two honest masks; the first round counts half
    cosine = 5 * alike / (5 + 5 * 4 * alike) ** 0.5
    assert opposed.reason.endswith(f"{-cosine / 2:.2f}")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"server_lr": 0.5}, "server-lr = 0.5: must be 1 with fedpm, whose server counts masks"),
        ({"attack": "scale"}, "attack = 'scale': must be sign-flip or label-flip with fedpm, whose clients send bits"),
    ],
)
def test_a_key_that_would_not_reach_the_masks_is_refused(keys: Json, said: str) -> None:
    with pytest.raises(UserError) as raised:
        made("fedpm", **keys)
    assert str(raised.value) == said


def test_a_bit_a_weight_travels_up(run_local: Run) -> None:
    _, folder = run_local(**FAST | {"num_rounds": 2, "model": "lenet5-bn", "image_size": 32, "train_per_class": 20})
    tensors = tensors_of(network := build_model("lenet5-bn", (1, 32, 32), 10, 0))
    masked = signed_constants(network, tensors)
    bits = sum(-(-tensor.numel() // 8) for tensor in masked.values())
    others = sum(4 * tensor.numel() for name, tensor in tensors.items() if name not in masked)
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-up"] == 3 * (bits + others)
        assert line["formula-bytes-down"] == 3 * sum(4 * tensor.numel() for tensor in tensors.values())


def test_masks_count_alike() -> None:
    with pytest.raises(UserError, match=r"^weighting = 'examples': must be 'uniform' with method = 'fedpm'$"):
        made("fedpm", weighting="examples")
