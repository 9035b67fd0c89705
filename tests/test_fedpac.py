"""FedPAC: its quadratic program and statistics by hand and by search, and its rounds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SAME, away, merge_round, read
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_methods import made as of_digits
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import adopted, build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.collaboration import combination, feature_statistics
from strategies.fedpac import COUNTS, MEANS, FedPAC, H, V
from strategies.heterofl import HeteroFL

Run = Callable[..., tuple[Json, Path]]


def test_statistics_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    means, counts, h, variance = feature_statistics(features, torch.tensor([0, 0, 0, 2]), 3)
    assert means.tolist() == [[2.0, 0.0], [0.0, 0.0], [0.0, 2.0]]
    assert counts.tolist() == [3, 0, 1]
    assert h.tolist() == [[1.5, 0.0], [0.0, 0.0], [0.0, 0.5]]
    # 1/4 * (3/4 * (1 + 9 + 4)/3 - 9/16 * 4  +  1/4 * 4 - 1/16 * 4)
    assert variance == pytest.approx((3.5 - 2.25 + 1 - 0.25) / 4)


def test_combination_by_hand() -> None:
    """Two clients, d = 1: client 0 pays V_0 for its own head, V_1 + (h_0 - h_1)^2 for the other."""
    h = torch.tensor([[[0.0]], [[1.0]]])
    weights = combination(h, torch.tensor([0.5, 0.5]), 0)
    assert weights.tolist() == pytest.approx([1.5 / 2, 0.5 / 2], abs=1e-4)
    same = combination(torch.zeros(3, 2, 4), torch.ones(3), 1)
    assert same.tolist() == pytest.approx([1 / 3] * 3, abs=1e-4)
    far = combination(torch.tensor([[[0.0]], [[100.0]]]), torch.tensor([0.1, 0.1]), 0)
    assert far.tolist() == [1.0, 0.0]  # below 1e-3 is nothing
    alone = combination(torch.zeros(1, 2, 2), torch.zeros(1), 0)
    assert alone.tolist() == [1.0]
    # Heads at 0, 1, 2 and V = 0.1: without a bound the third weight is negative; at 0 it leaves 1 / 0.1 to 1 / 1.1.
    row = combination(torch.tensor([[[0.0]], [[1.0]], [[2.0]]]), torch.full((3,), 0.1), 0)
    assert row.tolist() == pytest.approx([11 / 12, 1 / 12, 0], abs=1e-4)
    # Equal heads count by 1 / V: 1 to 0.0015, which is above 1e-3, and 1 to 0.0007, which is not.
    for small, kept in ((0.0015, 0.0015 / 1.0015), (0.0007, 0.0)):
        weights = combination(torch.zeros(2, 1, 1), torch.tensor([1.0, small]), 1)
        assert weights.tolist() == pytest.approx([kept, 1 - kept], abs=1e-4)


def test_where_the_solver_fails_the_own_head_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scipy.optimize.minimize", lambda *_, **__: SimpleNamespace(success=False, x=np.ones(2)))
    assert combination(torch.zeros(2, 1, 1), torch.ones(2), 1).tolist() == [0.0, 1.0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 5))
def test_no_point_of_the_simplex_is_better(seed: int, clients: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    h, variances = torch.randn(clients, 3, 4, generator=draw), torch.rand(clients, generator=draw)
    weights = combination(h, variances, 0).double()
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1)
    away = (h[0] - h).flatten(1).double()
    matrix = torch.diag(variances.double()) + away @ away.T
    best = float(weights @ matrix @ weights)
    others = torch.rand(2000, clients, generator=draw, dtype=torch.float64)
    others /= others.sum(1, keepdim=True)
    assert best <= float(((others @ matrix) * others).sum(1).min()) * 1.01 + 1e-9


KEYS = {"method": "fedpac", "num_clients": 3, "partition": "iid", "evaluate": "personal", "local_epochs": 2}


def test_without_alignment_and_head_epochs_the_body_is_trained_under_a_frozen_head(run_local: Run) -> None:
    _, folder = run_local(**KEYS, fedpac__lambda=0.0, fedpac__head_epochs=0, num_rounds=1)
    start = tensors_of(build_model("feature-mlp", (1, 8, 8), 10, 0))
    model = load_file(folder / "model.safetensors")
    torch.testing.assert_close(model["fc2.weight"], start["fc2.weight"].detach())  # up to the rounding of a mean
    assert not torch.equal(model["fc1.weight"], start["fc1.weight"])
    _, babu = run_local("babu", **KEYS | {"method": "fedbabu"}, num_rounds=1)
    other = load_file(babu / "model.safetensors")
    assert away(model, other, start) < SAME


def test_it_learns_and_aligns(run_local: Run) -> None:
    keys = KEYS | {"partition": "classes", "classes_per_client": 2, "num_clients": 5}
    _, folder = run_local("aligned", **keys)
    _, free = run_local("free", **keys, fedpac__lambda=0.0)
    lines = read_rounds(folder)
    assert lines[-1]["personal-accuracy"] > 90
    assert all(sum(row) == pytest.approx(1, abs=0.01) for row in lines[-1]["combination"].values())
    left, right = (load_file(run / "model.safetensors")["fc1.weight"] for run in (folder, free))
    assert not torch.equal(left, right)


def test_a_client_is_sent_its_own_head_and_the_centroids() -> None:
    made = FedPAC(resolve({"method": "fedpac", "model": "fedpews-mlp", "dataset": "synthetic-3k", "num-clients": 2,
                           "partition": "iid"}), build_model("fedpews-mlp", (5,), 4, 0))  # fmt: skip

    def update(client: int, value: float) -> Update:
        tensors = {n: torch.full(s.shape, value) for n, s in made.expected(client).items()}
        tensors[COUNTS] = torch.tensor([1.0, 3.0, 0.0, 0.0]) if client else torch.tensor([1.0, 1.0, 0.0, 0.0])
        tensors[H] = torch.full((4, 32), 1000.0 * client)
        tensors[V] = torch.tensor([0.1])
        return Update(client, tensors, {}, int(tensors[COUNTS].sum()))

    merge_round(made, [update(0, 1.0), update(1, 2.0)])
    for client, value in ((0, 1.0), (1, 2.0)):  # far apart: each keeps its own head
        sent = made.task(client).tensors
        assert bool((sent["fc5.weight"] == value).all())
        assert bool((sent["fc1.weight"] == 1.5).all())
        assert sent["fedpac/known"].tolist() == [True, True, False, False]
        assert sent["fedpac/centroids"][:, 0].tolist() == [1.5, 1.75, 0.0, 0.0]
    alone = update(0, 4.0)
    alone.tensors[COUNTS] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    merge_round(made, [alone])
    sent = made.task(1).tensors
    assert sent["fedpac/known"].tolist() == [True, True, False, True]
    assert sent["fedpac/centroids"][:, 0].tolist() == [4.0, 1.75, 0.0, 4.0], "of a class that is not there: as before"
    again = FedPAC(made.settings, made.model)
    again.load_state(made.state())
    assert torch.equal(again.task(1).tensors["fc5.weight"], made.task(1).tensors["fc5.weight"])
    bad = update(0, 1.0)
    bad.tensors[V] = torch.tensor([-1.0])
    with pytest.raises(BadReply, match="'fedpac/v': values -1 to -1, expected 0 to inf"):
        read(made, bad)
    with pytest.raises(BadReply, match="'fedpac/counts': counts of 2 samples, num-examples = 9"):
        made.contribution(replace(update(0, 1.0), num_examples=9))
    assert MEANS in made.expected(0)
    merge_round(made, [update(1, 6.0)])
    assert [float(made.task(client).tensors["fc5.weight"][0, 0]) for client in (0, 1)] == [4.0, 6.0]


@pytest.mark.parametrize("known", [True, False])
def test_a_client_trains_its_head_then_its_body_towards_the_centroids(known: bool) -> None:
    """One step each; a class without a centroid has the mean of the received body's features, as H and V do."""
    keys = {"batch_size": 1000, "momentum": 0.0, "lr": 0.05, "fedpac__head_lr": 0.2, "fedpac__lambda": 0.5}
    strategy, client = of_digits("fedpac", **keys)
    assert isinstance(strategy, FedPAC)
    strategy.known[0], strategy.centroids[0] = known, 2.0
    worker, start = client(0, 1, {}), dict(strategy.current)
    answer = worker.run_training(dict(strategy.task(0).tensors), {}).tensors
    network, x, y, model = worker.place.network, worker.x, worker.y, dict(start)
    own, _, h, variance = feature_statistics(network(x, model).features.detach(), y, 10)
    targets = torch.where(y[:, None] == 0, 2.0, own[y])

    def step(names: list[str], lr: float, pull: float) -> None:
        leaves = {name: model[name].clone().requires_grad_() for name in names}
        output = network(x, model | leaves)
        loss = nn.functional.cross_entropy(output.logits, y) + pull * (output.features - targets).square().mean()
        slopes: tuple[Tensor, ...] = torch.autograd.grad(loss, list(leaves.values()))
        model.update({name: model[name] - lr * slope for name, slope in zip(names, slopes, strict=True)})

    step(["fc2.weight", "fc2.bias"], 0.2, 0.0)
    step([name for name in start if not name.startswith("fc2")], 0.05, 0.5 * known)
    assert away({name: answer[name] for name in start}, model, start) < SAME
    torch.testing.assert_close(answer[H], h)
    assert float(answer[V]) == pytest.approx(variance)
    torch.testing.assert_close(answer[MEANS], feature_statistics(network(x, model).features, y, 10)[0])


def test_a_head_that_is_tied_to_another_layer_is_refused() -> None:
    class Tied(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
            self[1].weight = self[0].weight

    with pytest.raises(UserError, match=r"its head '1' is frozen or tied; allowed is another head$"):
        FedPAC(resolve({"method": "fedpac"}), Tied())
    with pytest.raises(UserError, match=r": its head '1' is frozen or tied; .*masked-loss = false$"):
        HeteroFL(resolve({"method": "heterofl"}), adopted(Tied(), (4,)))


def test_a_head_whose_rows_are_not_the_classes_is_refused() -> None:
    class Halved(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, :2]

    with pytest.raises(UserError, match=r"the 4 rows of its head '1' are not the 2 classes; allowed is another head$"):
        FedPAC(resolve({"method": "fedpac"}), adopted(Halved(nn.Linear(4, 4), nn.Linear(4, 4)), (4,)))
