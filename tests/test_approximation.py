"""Directions of federated and central training from the same model."""

import csv
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers import tree
from torch import Tensor
from torch.nn import functional as F

from client_apps.base import Client
from fedsub_app.analysis.approximation import approximation, cosine, pooled, train_centrally
from fedsub_app.cli import main as cli
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.recorded import settings_of
from fedsub_app.training.workplace import workplace

Run = Callable[..., tuple[Json, Path]]
ALL: dict[str, Any] = {"keep_checkpoints": 0, "partition": "iid", "train_per_class": 12, "batch_size": 16}


def similarities(folder: Path) -> list[float]:
    header, *rows = csv.reader((folder / "approximation.csv").open())
    assert header == ["checkpoint", "rounds", "similarity", "mean of ten"]
    found = [float(row[2]) for row in rows]
    means = [fmean(found[max(0, k - 9) : k + 1]) for k in range(len(found))]
    assert [float(row[3]) for row in rows] == pytest.approx(means, abs=1e-6)
    return found


def test_cosine_by_hand() -> None:
    start = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]])}
    moved = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([[6.0]])}  # by (3, 0, 4)
    other = {"a": torch.tensor([1.0, 6.0]), "b": torch.tensor([[14.0]])}  # by (0, 5, 12)
    assert cosine(start, moved, other) == pytest.approx(48 / (5 * 13))
    assert cosine(start, moved, moved) == pytest.approx(1)
    back = {name: 2 * tensor - moved[name] for name, tensor in start.items()}
    assert cosine(start, moved, back) == pytest.approx(-1)
    assert math.isnan(cosine(start, moved, start))


@pytest.mark.parametrize("keys", [{"local_steps": 5, "momentum": 0.9}, {"method": "ist", "ist__width": 40}])
def test_one_client_is_central_training(keys: dict[str, Any], run_local: Run) -> None:
    _, folder = run_local(num_clients=3, clients_per_round=1, **ALL | keys)
    assert len(checkpoints(folder)) == 3
    before = tree(folder)
    approximation(folder, 2)
    assert similarities(folder) == pytest.approx([1.0] * 3, abs=1e-4)
    after = tree(folder)
    assert after.pop("approximation.png")[:4] == b"\x89PNG"
    after.pop("approximation.csv")
    assert after == before


def test_one_small_step_is_the_gradient_of_the_same_samples(run_local: Run) -> None:
    """Without BatchNorm, whose statistics are of another mini-batch; the larger the step, the less alike they are."""
    keys: dict[str, Any] = ALL | {"num_clients": 4, "local_steps": 1, "model": "fedpews-mlp", "num_rounds": 1}
    found = []
    for lr in (1e-3, 2.0):
        _, folder = run_local(f"lr {lr}", lr=lr, **keys)
        approximation(folder, 1)
        found += similarities(folder)
    assert found[0] > 0.999
    assert found[1] < 0.99


def by_hand(start: dict[str, Tensor], batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """SGD in float64 on feature-mlp, written out."""
    w = {name: tensor.double() for name, tensor in start.items()}
    for x, y in batches:
        w = {name: tensor.detach().requires_grad_() for name, tensor in w.items()}
        h = x.double().flatten(1) @ w["fc1.weight"].T + w["fc1.bias"]
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
        h = torch.relu(h * w["bn1.weight"] + w["bn1.bias"])
        loss = F.cross_entropy(h @ w["fc2.weight"].T + w["fc2.bias"], y)
        gradients = torch.autograd.grad(loss, list(w.values()))
        w = {name: tensor.detach() - 0.05 * g for (name, tensor), g in zip(w.items(), gradients, strict=True)}
    return w


def test_two_rounds_against_a_reference_in_float64(run_local: Run) -> None:
    _, folder = run_local(num_clients=2, num_rounds=1, local_steps=3, **ALL)
    place = workplace(settings_of({"run-dir": str(folder), "resume": True}))
    start = {name: tensor.double() for name, tensor in read_checkpoint(checkpoints(folder)[0]).model.items()}
    federated = central = start
    for number in (2, 3):
        workers = [Client(place, client, number, {}) for client in (0, 1)]
        ends = [by_hand(federated, [(w.x[index], w.y[index]) for index in w.batches()]) for w in workers]
        federated = {name: (ends[0][name] + ends[1][name]) / 2 for name in start}
        x, y, batches = pooled(place, number, [0, 1])
        central = by_hand(central, [(x[index], y[index]) for index in batches])
    approximation(folder, 2)
    assert similarities(folder) == pytest.approx([cosine(start, federated, central)], abs=1e-3)
    assert 0.1 < similarities(folder)[0] < 0.999


def test_what_is_pooled_are_the_clients_mini_batches(run_local: Run) -> None:
    _, folder = run_local(num_clients=3, num_rounds=1, local_steps=4, **ALL)
    place = workplace(settings_of({"run-dir": str(folder), "resume": True}))
    x, y, batches = pooled(place, 7, [0, 2])
    of_clients = [Client(place, client, 7, {}) for client in (0, 2)]
    taken = [list(client.batches()) for client in of_clients]
    assert len(batches) == 8
    for step in range(4):
        ours = torch.cat(batches[2 * step : 2 * step + 2])
        theirs = [client.x[own[step]] for client, own in zip(of_clients, taken, strict=True)]
        assert [len(part) for part in batches[2 * step : 2 * step + 2]] == [
            part.numel() for part in torch.arange(len(ours)).tensor_split(2)
        ]
        assert sorted(x[ours].flatten(1).tolist()) == sorted(torch.cat(theirs).flatten(1).tolist())
        labels = [client.y[own[step]] for client, own in zip(of_clients, taken, strict=True)]
        assert y[ours].bincount(minlength=10).tolist() == torch.cat(labels).bincount(minlength=10).tolist()


def test_central_training_is_honest_and_draws_its_own_dropout(run_local: Run, tmp_path: Path) -> None:
    """The same in every call, and where the first client attacks the model."""
    layers = "nn.Flatten(), nn.Linear(64, 16), nn.Dropout(), nn.Linear(16, 10)"
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\ndef net():\n    return nn.Sequential({layers})\n")
    ends = []
    for keys in ({}, {"attack": "sign-flip", "attackers": 1}):
        network = {"model": f"{tmp_path / 'net.py'}:net", "num_clients": 2, "num_rounds": 1}
        _, folder = run_local(f"attackers {len(keys)}", **ALL | network | keys)
        place = workplace(settings_of({"run-dir": str(folder), "resume": True}))
        ends += [train_centrally(place, place.initial(), 1, [0, 1]) for _ in range(2)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


def test_a_methods_own_states_are_those_of_the_checkpoint(run_local: Run) -> None:
    """SCAFFOLD's clients have the variates of that round, and refuse to train without."""
    _, folder = run_local(method="scaffold", num_clients=2, **ALL)
    approximation(folder, 2)
    whole = similarities(folder)
    assert len(whole) == 3
    (folder / "rounds.jsonl").unlink()
    shutil.rmtree(folder / "clients")
    with pytest.raises(UserError, match=r"round 2 from checkpoint 1 was abandoned: .* client failed: .*lost its"):
        approximation(folder, 2)


def test_adapters_over_the_runs_base(run_local: Run) -> None:
    _, folder = run_local(method="fedavg", num_clients=2, num_rounds=1, trainable="lora", **ALL)
    approximation(folder, 1)
    assert 0.5 < similarities(folder)[0] <= 1


@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_a_rate_that_hangs_on_the_run_is_refused(schedule: str, run_local: Run) -> None:
    """By its scores, or by its end, behind which a cosine would rise again."""
    _, folder = run_local(method="fedavg", num_clients=2, **ALL | {"lr_schedule": schedule})
    with pytest.raises(UserError, match=rf"^lr-schedule = '{schedule}' of .*: must be 'step' for an approximation"):
        approximation(folder, 1)


def test_starts_of_a_run_that_has_a_start_itself(run_local: Run) -> None:
    """Ditto's clients begin with the model that start-from named."""
    _, central = run_local("central", num_clients=1, num_rounds=1, **ALL)
    _, folder = run_local("ditto", method="ditto", start_from=str(central), num_clients=2, num_rounds=1, **ALL)
    approximation(folder, 1, central)
    assert len(similarities(folder)) == 1


def test_starts_of_central_training(run_local: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, central = run_local("central", num_clients=1, **ALL)
    _, folder = run_local("federated", num_clients=4, num_rounds=1, **ALL)
    assert cli.main(["analyse", str(folder), "--approximation", "1", "--starts", str(central)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / f"approximation.{end}") for end in ("csv", "png")]
    assert len(similarities(folder)) == 3  # the central run's checkpoints, not its own one
    _, wide = run_local("wide", method="ist", ist__width=20, num_clients=1, num_rounds=1, **ALL)
    assert cli.main(["analyse", str(folder), "--approximation", "1", "--starts", str(wide)]) == 2
    path = checkpoints(wide)[0]
    assert capsys.readouterr().err == f"error: {path}: a model of another network than that of {folder}\n"
    assert cli.main(["analyse", str(folder), "--approximation", "0"]) == 2
    assert capsys.readouterr().err == "error: Invalid value for '--approximation': 0 is not in the range x>=1.\n"
    shutil.rmtree(folder / "checkpoints")
    assert cli.main(["analyse", str(folder), "--approximation", "1"]) == 2
    assert "no checkpoint to start from" in capsys.readouterr().err
