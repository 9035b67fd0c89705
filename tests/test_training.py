"""Local training: the optimizer is torch's, bit for bit; MOON's term is its formula."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import pairs
from helpers import SAME, away, ends_as_if_never_stopped, fedsub
from helpers import rounds as lines_of
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, StepLR

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.models import Network, build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.runs.rounds import plateau_lr
from fedsub_app.training.local import crop_and_flip, epoch
from fedsub_app.training.objectives import Moon
from fedsub_app.training.optimizer import Optimizer
from fedsub_app.training.workplace import workplace


@pytest.mark.parametrize("network", ["lenet5-bn", "fedpews-mlp"])
@pytest.mark.parametrize(
    "keys",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight-decay": 1e-2},
        {"lr": 1e-3, "optimizer": "adam", "weight-decay": 1e-2},
        {"lr": 1e-3, "optimizer": "adamw", "weight-decay": 1e-2},
        {"lr": 1e-3, "optimizer": "rmsprop", "weight-decay": 1e-2},
        {"lr": 1e-3, "optimizer": "rmsprop", "momentum": 0.9},
    ],
)
def test_the_optimizer_is_torchs_bit_for_bit(network: str, keys: dict[str, Value]) -> None:
    settings = resolve(keys)
    shape = (5,) if network == "fedpews-mlp" else (3, 32, 32)
    ours, theirs = (build_model(network, shape, 4, 0) for _ in range(2))
    x, y = torch.randn(5, 16, *shape), torch.randint(4, (5, 16))
    if len(shape) == 3:
        ours, theirs = (m.to(memory_format=torch.channels_last) for m in (ours, theirs))  # type: ignore[call-overload]
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (5, 16))
    optimizer = Optimizer(settings, dict(ours.named_parameters()), settings.lr)
    kind: Any = {
        "sgd": partial(torch.optim.SGD, momentum=settings.momentum, fused=True),
        "adam": partial(torch.optim.Adam, fused=True),
        "adamw": partial(torch.optim.AdamW, fused=True),
        "rmsprop": partial(torch.optim.RMSprop, momentum=settings.momentum),
    }[settings.optimizer]
    reference: torch.optim.Optimizer = kind(theirs.parameters(), settings.lr, weight_decay=settings.weight_decay)
    for features, labels in zip(x, y, strict=True):
        optimizer.step(optimizer.gradients(F.cross_entropy(ours(features), labels)))
        reference.zero_grad()
        F.cross_entropy(theirs(features), labels).backward()
        reference.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(mine, torchs) for mine, torchs in pairs)


def test_sparse_gradients_of_an_embedding_are_its_dense_ones() -> None:
    x, gradients = torch.tensor([1, 1, 4]), []
    for sparse in (False, True):
        layer = torch.nn.Embedding.from_pretrained(torch.arange(10.0).view(5, 2), freeze=False, sparse=sparse)
        gradients.append(Optimizer(resolve({}), {"w": layer.weight}, 0).gradients(layer(x).square().sum())["w"])
    assert torch.equal(*gradients)


def test_the_learning_rate_falls_at_its_rounds() -> None:
    settings = resolve({"lr": 0.1, "lr-decay-at": "200, 400", "lr-decay": 0.1})
    rates = [settings.lr_at(server_round) for server_round in (1, 199, 200, 399, 400)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    parameter = torch.nn.Parameter(torch.ones(1))
    Optimizer(settings, {"w": parameter}, settings.lr_at(200)).step({"w": torch.ones(1)})
    assert parameter.item() == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("keys", "torchs"),
    [
        ({"lr-schedule": "cosine", "num-rounds": 30}, partial(CosineAnnealingLR, T_max=30)),
        ({"lr-decay-every": 4, "lr-decay": 0.7}, partial(StepLR, step_size=4, gamma=0.7)),
        ({"lr-decay-at": "3, 9", "lr-decay": 0.7}, partial(MultiStepLR, milestones=[2, 8], gamma=0.7)),
    ],
)
def test_a_schedule_of_rounds_is_torchs(keys: dict[str, Value], torchs: Any) -> None:
    settings = resolve({"lr": 0.1, **keys})
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    schedule = torchs(optimizer)
    for server_round in range(1, 30):
        assert settings.lr_at(server_round) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_plateau_follows_the_first_score_in_its_direction() -> None:
    """By hand: one evaluation without a better score passes, the second one halves lr."""
    keys: dict[str, Value] = {"lr": 0.1, "lr-schedule": "plateau", "lr-patience": 1, "lr-decay": 0.5}
    scores = [10.0, 20.0, 15.0, None, 19.0, 21.0, 21.0, 5.0]
    rates = [0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025]
    lines: list[Json] = [{"round": n} | ({} if x is None else {"global-accuracy": x}) for n, x in enumerate(scores)]
    assert [plateau_lr(lines[:count], resolve(keys)) for count in range(9)] == rates
    low = resolve(keys | {"task": "regression", "evaluate": "personal"})
    errors: list[Json] = [{"round": 1, "personal-rmse": x, "global-rmse": 1.0 - x} for x in (0.9, 0.8, 0.85, 0.8, 0.1)]
    assert [plateau_lr(errors[:count], low) for count in range(6)] == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]


@pytest.mark.parametrize("high", [True, False])
def test_plateau_falls_on_scores_below_0(high: bool, tmp_path: Path) -> None:
    """Of a task of one's own; a score that stays is no better one."""
    code = f"class Own(Classification):\n    score, high_is_good, low, others = 'gain', {high}, -100.0, ()\n"
    (tmp_path / "own.py").write_text(f"from fedsub_app.common.tasks import Classification\n\n\n{code}")
    keys: dict[str, Value] = {"lr": 0.1, "lr-schedule": "plateau", "lr-patience": 1, "lr-decay": 0.5}
    settings = resolve(keys | {"task": f"{tmp_path / 'own.py'}:Own"})
    lines: list[Json] = [{"round": number, "global-gain": -10.0} for number in range(5)]
    assert [plateau_lr(lines[:count], settings) for count in range(6)] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"lr-schedule": "cosine", "lr-decay-at": "3"}, "^lr-decay-at: does nothing with lr-schedule = 'cosine'$"),
        (
            {"lr-schedule": "plateau", "lr-decay-every": 3},
            "^lr-decay-every: does nothing with lr-schedule = 'plateau'$",
        ),
        ({"lr-schedule": "plateau", "lr-decay": 1.0}, "^lr-decay = 1: must be below 1 with lr-schedule = 'plateau'$"),
    ],
)
def test_keys_of_another_schedule_are_refused(keys: dict[str, Value], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve(keys)


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_a_run_on_a_plateau_is_resumed_and_shared_out(
    run_local: Callable[..., tuple[Json, Path]], tmp_path: Path, method: str
) -> None:
    """The server of these methods computes with lr as well; it falls, for no score gets better."""
    keys: dict[str, Value] = {"method": method, "num_rounds": 4, "keep_checkpoints": 0, "lr": 3e-6, "lr_decay": 0.5}
    keys |= {"lr_schedule": "plateau", "lr_patience": 0}
    keys |= {"objective": "prox"} if method == "fednova" else {}
    ends_as_if_never_stopped(run_local, tmp_path, keys)
    lines = lines_of(tmp_path / "whole")
    falls = [plateau_lr(lines[:number], resolve(settings_in(tmp_path / "whole"))) for number in range(1, 5)]
    assert [line["lr"] for line in lines[1:]] == falls
    assert falls[0] > falls[-1]
    assert not any(line["dropped"] for line in lines[1:])
    given = settings_in(tmp_path / "whole") | {"run-dir": str(tmp_path / "two")}
    done = fedsub(tmp_path, "run", *pairs(given), "--workers", "2")
    assert done.code == 0, done.err
    assert (tmp_path / "two/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_the_evaluation_of_the_last_round_is_no_step_of_a_longer_runs_plateau() -> None:
    """A run of 5 rounds that is resumed with more of them, as if it had had them from the start."""
    made = resolve({"lr-schedule": "plateau", "lr-patience": 1, "lr-decay": 0.5, "lr": 0.1, "eval-every": 4})
    lines: list[Json] = [{"round": number, "global-accuracy": 50.0} for number in (0, 4, 8)]
    resumed = sorted([*lines, {"round": 5, "global-accuracy": 50.0}], key=lambda line: line["round"])
    for last in (5, 8):
        falls = [plateau_lr([line for line in of if line["round"] <= last], made) for of in (lines, resumed)]
        assert falls[0] == falls[1] == {5: 0.1, 8: 0.05}[last]


def settings_in(folder: Path) -> dict[str, Value]:
    settings: dict[str, Value] = json.loads((folder / "settings.json").read_text())["settings"]
    return settings


def test_a_run_along_a_cosine_gets_no_more_rounds(run_local: Callable[..., tuple[Json, Path]]) -> None:
    _, folder = run_local(method="fedavg", lr_schedule="cosine", num_rounds=2)
    assert [line["lr"] for line in lines_of(folder)[1:]] == pytest.approx([0.05, 0.025])
    with pytest.raises(UserError, match=r"^num-rounds = 3: the run to resume in .* has a cosine that ends at 2$"):
        settings_of({"run-dir": str(folder), "resume": True, "num-rounds": 3})


def test_moons_term_is_its_formula_and_its_gradient() -> None:
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(4, (6,))
    nets = [build_model("fedpews-mlp", (5,), 4, seed).double() for seed in (0, 1, 2)]
    model, received, previous = nets
    network = Network(model)
    moon = Moon(tensors_of(received), tensors_of(previous), mu=3.0, temperature=0.5)
    output = network(x)
    loss = F.cross_entropy(output.logits, y) + moon.term(x, output, network)
    got = torch.autograd.grad(loss, list(model.parameters()))
    z, z_g, z_p = (net[:-1](x) for net in nets)  # type: ignore[index]
    near, far = (torch.exp(F.cosine_similarity(z, other.detach()) / 0.5) for other in (z_g, z_p))
    want = F.cross_entropy(model(x), y) - 3 * torch.log(near / (near + far)).mean()
    torch.testing.assert_close(loss, want)
    for left, right in zip(got, torch.autograd.grad(want, list(model.parameters())), strict=True):
        torch.testing.assert_close(left, right)


def test_moon_needs_a_previous_model_and_keeps_it(run_local: Callable[..., tuple[Json, Path]]) -> None:
    """Without a model of its own a client's term is constant: one round of MOON is FedAvg, two rounds are not."""

    def model(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "model.safetensors")

    start = tensors_of(build_model("feature-mlp", (1, 8, 8), 10, 0))
    for rounds in (1, 2):
        _, plain = run_local(f"fedavg{rounds}", num_rounds=rounds)
        _, moon = run_local(f"moon{rounds}", method="moon", num_rounds=rounds, moon_mu=5.0)
        _, without = run_local(f"without{rounds}", method="moon", num_rounds=rounds, moon_mu=0.0)
        assert away(model(without), model(plain), start) < SAME
        assert (away(model(moon), model(plain), start) < SAME) == (rounds == 1)
    state = load_file(moon / "clients/client-000000/round-000002.safetensors")
    assert {name.removeprefix("previous/") for name in state} == model(moon).keys()


@pytest.mark.parametrize(
    ("objective", "method"),
    [("prox", "fedavg"), ("prox", "local"), ("prox", "fedpews"), ("moon", "fedavg"), ("moon", "fedpews")],
)
def test_methods_take_an_objective(objective: str, method: str, run_local: Callable[..., tuple[Json, Path]]) -> None:
    keys = {"method": method, "fedpews__warmup_rounds": 1, "num_rounds": 3, "evaluate": "personal"}
    _, plain = run_local("plain", **keys)
    _, changed = run_local("changed", **keys, objective=objective, prox_mu=1.0, moon_mu=5.0)
    finals = [(folder / "rounds.jsonl").read_text().splitlines()[-1] for folder in (plain, changed)]
    losses = [line.split('"train-loss": ')[1].split(",")[0] for line in finals]
    assert losses[0] != losses[1]


def test_a_pass_leaves_out_a_last_batch_of_one_sample_but_not_the_only_one() -> None:
    """A client of one sample fails, with BatchNorm's reason, instead of sending an untrained network."""

    def sizes(count: int, skip_single: bool) -> list[int]:
        return [len(batch) for batch in epoch(count, 4, torch.Generator(), skip_single, torch.device("cpu"))]

    assert [sizes(9, False), sizes(9, True), sizes(6, True), sizes(1, True)] == [[4, 4, 1], [4, 4], [4, 2], [1]]


def test_crop_and_flip_makes_shifted_and_mirrored_images() -> None:
    x = torch.arange(1.0, 2 * 3 * 8 * 8 + 1).view(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    black = torch.tensor([-1.0, -2.0, -3.0])
    padded = F.pad(x, (4, 4, 4, 4), value=math.nan)
    padded = torch.where(padded.isnan(), black.view(1, 3, 1, 1), padded)
    seen = set()
    for seed in range(60):
        out = crop_and_flip(x, black, torch.Generator().manual_seed(seed))
        assert out.shape == x.shape
        assert out.is_contiguous(memory_format=torch.channels_last)
        for image, source in zip(out, padded, strict=True):
            found = [
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (False, True)
                if torch.equal(image.flip(2) if flip else image, source[:, top : top + 8, left : left + 8])
            ]
            assert len(found) == 1
            seen.add(found[0])
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flip for _, _, flip in seen} == {False, True}
    again = [crop_and_flip(x, black, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*again)


def test_augmentation_changes_training_alone(run_local: Callable[..., tuple[Json, Path]]) -> None:
    keys = {"model": "lenet5", "image_size": 32, "train_per_class": 20, "evaluate": "global,personal"}
    kinds = ("crop-flip", "crop-flip", "none")
    runs = [run_local(str(k), **keys, augment=kind) for k, kind in enumerate(kinds)]
    models = [load_file(folder / "model.safetensors")["conv1.weight"] for _, folder in runs]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    with pytest.raises(UserError, match="augment = 'crop-flip': needs images; samples of synthetic-3k have no height"):
        run_local("flat", dataset="synthetic-3k", model="fedpews-mlp", augment="crop-flip")


def test_each_training_of_a_client_has_crops_of_its_own() -> None:
    keys: dict[str, Value] = {"model": "lenet5", "image-size": 16, "train-per-class": 10, "augment": "crop-flip"}
    client, purposes = Client(workplace(resolve(keys | {"dataset": "digits"})), 0, 1, {}), []
    usual = client.generator

    def generator(purpose: str) -> torch.Generator:
        purposes.append(purpose)
        return usual(purpose)

    client.generator = generator  # type: ignore[method-assign]
    client.load(client.initial())
    for purpose in ("batches", "second"):
        client.fit(epochs=1, purpose=purpose)
    crops = [purpose for purpose in purposes if purpose.startswith("augmentation")]
    assert len(crops) == len({*crops}) == 2


def test_each_client_has_dropout_of_its_own_in_each_round() -> None:
    place, drawn = workplace(resolve({"dataset": "digits"})), []
    for number, server_round, purpose in ((0, 1, "training"), (1, 1, "training"), (0, 2, "training"), (0, 1, "other")):
        with Client(place, number, server_round, {}).dropout(purpose):
            drawn.append(torch.rand(3))
    assert len({tuple(each.tolist()) for each in drawn}) == 4
    with Client(place, 0, 1, {}).dropout("training"):
        assert torch.equal(torch.rand(3), drawn[0])


def test_one_sample_that_batch_norm_cannot_evaluate_is_named(
    run_local: Callable[..., tuple[Json, Path]], tmp_path: Path
) -> None:
    """One test sample of all; of clients one validation sample each."""
    said = "one sample to be evaluated: BatchNorm without running statistics needs at least 2"
    for tests in (1, 9):
        rows = [f"{'test' if n < tests else 'train'},{n},{n % 2}" for n in range(33)]
        (tmp_path / f"{tests}.csv").write_text("\n".join(["split,a,y", *rows]))
    keys: dict[str, Any] = {"label": "y", "partition": "iid", "num_clients": 2, "num_rounds": 1}
    with pytest.raises(UserError, match=f"^{said}$"):
        run_local("all", dataset=f"csv:{tmp_path / '1.csv'}", **keys)
    keys |= {"dataset": f"csv:{tmp_path / '9.csv'}", "evaluate": "personal", "validation_fraction": 0.1}
    with pytest.raises(RunFailed, match=f"^no client was evaluated in any round; last reason: .* {said}; checkpoint"):
        run_local("clients", **keys)
    lost = lines_of(tmp_path / "clients")[-1]["not-evaluated"]
    assert [drop["reason"] for drop in lost] == [f"client failed: UserError: {said}"] * 2
