"""FedNova, FedAdam, FedYogi, FedAdagrad: by hand, against slow references, and where they are FedAvg."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, merge_round, too_large
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.training.workplace import workplace
from strategies.base import SubnetStrategy
from strategies.fednova import authors_normaliser, normaliser
from strategies.fedopt import FedAdagrad

Run = Callable[..., tuple[Json, Path]]


def made(method: str, **keys: Any) -> SubnetStrategy:
    """A strategy of one parameter ``weight`` of two numbers and a buffer-like BatchNorm statistic."""
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    keys = {"method": method, "batch-size": 2, "local-epochs": 1} | keys
    strategy = METHODS[method].strategy(resolve(keys), net)
    strategy.round = 1
    return strategy


def update(client: int, weight: list[float], steps: int = 1, mean: float = 0.0) -> Update:
    tensors = {"0.weight": torch.tensor([weight]), "1.running_mean": torch.tensor([mean])}
    tensors["1.running_var"] = torch.ones(1)
    return Update(client, tensors, {}, 2 * steps)


# --- FedNova ----------------------------------------------------------------------------------------------------------


def test_fednova_by_hand() -> None:
    """One and three plain steps, weights 1/4 and 3/4: a = 1 and 3, tau_eff = 1/4 + 9/4 = 5/2."""
    strategy = made("fednova", weighting="examples")
    strategy.current["0.weight"] = torch.tensor([[1.0, 0.0]])
    merge_round(strategy, [update(0, [2.0, 4.0], 1, mean=4.0), update(1, [4.0, 0.0], 3, mean=8.0)])
    # sum_i p_i d_i = 1/4 * (1, 4) / 1 + 3/4 * (3, 0) / 3 = (1, 1)
    torch.testing.assert_close(strategy.current["0.weight"], torch.tensor([[1 + 2.5, 2.5]]))
    torch.testing.assert_close(strategy.current["1.running_mean"], torch.tensor([7.0]))  # the mean of 4 and 3 x 8


@pytest.mark.parametrize(
    ("keys", "normalisers", "effective"),
    [
        ({"objective": "prox"}, (1.0, 1.9), 1.5),  # 0.9 * 1 + 1
        ({"momentum": 0.5}, (1.0, 2.5), 1.75),  # 1 + 1.5
        ({"objective": "prox", "momentum": 0.5}, (1.9, 4.06), 1.5),  # 0.9 * 1 + 1, 0.9 * (1.9 + 1.5) + 1
    ],
)
def test_fednova_with_the_authors_normalisation_by_hand(
    keys: dict[str, Any], normalisers: tuple[float, float], effective: float
) -> None:
    """With a proximal term tau_eff is the mean number of steps, else the mean of the normalisers."""
    strategy = made("fednova", **{"lr": 0.1, "prox-mu": 1.0, "fednova.normalisation": "authors", **keys})
    strategy.current["0.weight"] = torch.zeros(1, 2)
    one, two = normalisers
    merge_round(strategy, [update(0, [one, 0.0], 1), update(1, [0.0, two], 2)])
    torch.testing.assert_close(strategy.current["0.weight"], effective * torch.tensor([[0.5, 0.5]]))


def test_the_pull_is_that_of_the_rounds_learning_rate() -> None:
    """Two steps go 1 + (1 - eta mu); eta is halved in round 3."""
    strategy = made("fednova", **{"lr": 0.1, "lr-decay-at": 3, "lr-decay": 0.5, "objective": "prox", "prox-mu": 4.0})
    for number, expected in ((2, 1 + 0.6), (3, 1 + 0.8)):
        strategy.round = number
        assert strategy.distance_of_steps(update(0, [0.0, 0.0], 2)) == pytest.approx(expected)
    published = made("fednova", **{"objective": "prox", "prox": "authors", "prox-mu": 4.0, "lr": 0.1})
    assert published.distance_of_steps(update(0, [0.0, 0.0], 2)) == 2.0  # FedPart's term has a gradient of 0
    adam = made("fednova", **{"optimizer": "adam", "objective": "prox", "prox-mu": 4.0, "lr": 0.1})
    assert adam.distance_of_steps(update(0, [0.0, 0.0], 2)) == 2.0


@pytest.mark.parametrize(
    ("steps", "momentum", "pull", "expected"),
    [(7, 0.0, 0.0, 7.0), (3, 0.5, 0.0, 1 + 1.5 + 1.75), (3, 0.0, 0.5, 1 + 0.5 + 0.25)],
)
def test_the_normaliser_is_the_papers(steps: int, momentum: float, pull: float, expected: float) -> None:
    """The sums over k of (1 - rho^k) / (1 - rho), and of (1 - eta mu)^k."""
    assert normaliser(steps, momentum, pull) == pytest.approx(expected)


@settings(deadline=None)
@given(steps=st.integers(1, 30), momentum=st.floats(0, 0.95), pull=st.floats(0, 0.3))
def test_the_normaliser_is_how_far_sgd_goes(steps: int, momentum: float, pull: float) -> None:
    """torch's SGD on a gradient of 1 and the proximal term's."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=momentum)
    for _ in range(steps):
        w.grad = 1 + pull / 0.1 * w.detach()
        optimizer.step()
    assert normaliser(steps, momentum, pull) == pytest.approx(-w.item() / 0.1, rel=1e-9, abs=1e-9)


def test_the_authors_normaliser_counts_momentum_and_term() -> None:
    """Their five steps at 0.9 and 0.01 * 0.2: a server's step of a quarter to a third."""
    assert authors_normaliser(5, 0.9) == pytest.approx(normaliser(5, 0.9))
    assert authors_normaliser(5, 0.0, 0.2) == pytest.approx(normaliser(5, 0.0, 0.2))
    assert 0.25 < 5 / authors_normaliser(5, 0.9, 0.002) < 0.31


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9, "server_lr": 0.5}, {"objective": "prox", "momentum": 0.9}])
def test_fednova_with_equal_steps_is_fedavg(keys: dict[str, Any], run_local: Run) -> None:
    """Bit for bit, whatever the steps count."""
    keys = {"num_clients": 3, "partition": "iid", "local_steps": 3, "weighting": "examples"} | keys
    _, nova = run_local("nova", method="fednova", **keys)
    _, fedavg = run_local("fedavg", method="fedavg", **keys)
    assert (nova / "model.safetensors").read_bytes() == (fedavg / "model.safetensors").read_bytes()


@pytest.mark.parametrize("objective", ["none", "prox"])
def test_fednova_against_a_slow_reference(objective: str, run_local: Run) -> None:
    """Two rounds with clients of unequal size, their coefficients of the gradients summed one by one, in float64."""
    keys: dict[str, Any] = {
        "method": "fednova", "model": "feature-mlp", "num_clients": 3, "partition": "dirichlet", "train_per_class": 20,
        "batch_size": 8, "lr": 0.05, "weighting": "examples", "num_rounds": 2, "prox_mu": 0.5, "objective": objective,
        "momentum": 0.0 if objective == "prox" else 0.9,
    }  # fmt: skip
    _, folder = run_local(**keys)
    place = workplace(resolve({key.replace("_", "-"): value for key, value in keys.items()}))
    start = tensors_of(build_model("feature-mlp", place.problem.data.in_shape, 10, 0))
    w = {name: tensor.detach().clone() for name, tensor in start.items()}
    unequal = set()
    for number in (1, 2):
        changes, ways, counts = [], [], []
        for client in range(3):
            worker = Client(place, client, number, {})
            answer = worker.train({name: t.float() for name, t in w.items()}, {})
            steps = -(-len(worker.y) // 8) - (len(worker.y) % 8 == 1)
            unequal.add(steps)
            if objective == "prox":
                coefficients = [(1 - 0.05 * 0.5) ** (steps - 1 - k) for k in range(steps)]
            else:
                coefficients = [(1 - 0.9 ** (steps - k)) / (1 - 0.9) for k in range(steps)]
            ways.append(sum(coefficients))
            changes.append({name: answer[name].double() - w[name] for name in w})
            counts.append(len(worker.y))
        p = [count / sum(counts) for count in counts]
        effective = sum(share * a for share, a in zip(p, ways, strict=True))
        w = {
            name: w[name] + effective * sum(share / a * d[name] for share, a, d in zip(p, ways, changes, strict=True))
            for name in w
        }
    assert len(unequal) > 1
    assert away(load_file(folder / "model.safetensors"), w, start) < SAME


def test_a_change_that_its_steps_do_not_explain() -> None:
    """It is divided by them: as far as the others with a thousandth of their steps would count a thousand times."""
    strategy = made("fednova")
    honest, liar = (update(client, [1.0, 1.0], steps) for client, steps in ((0, 1000), (1, 1)))
    norms = [strategy.norms(said, strategy.contribution(said)) for said in (honest, honest, honest, liar)]
    (reason,) = too_large(norms, 100, 0.1).values()
    assert reason.startswith("update a step of norm ")


@given(st.integers(1, 20), st.floats(0, 0.95), st.floats(0, 1))
def test_the_normaliser_is_above_0_with_a_pull_of_at_most_1(steps: int, momentum: float, pull: float) -> None:
    assert min(normaliser(steps, momentum, pull), authors_normaliser(steps, momentum, pull)) > 0
    assert normaliser(2, 0.0, 2.0) == 0


def test_a_pull_of_more_than_1_is_refused() -> None:
    keys = {"objective": "prox", "lr": 0.05}
    for more in ({"prox-mu": 20.0}, {"prox-mu": 40.0, "optimizer": "adam"}, {"prox-mu": 40.0, "prox": "authors"}):
        made("fednova", **keys, **more)
    said = r"^prox-mu = 40: lr \* prox-mu is 2, must be at most 1 with method = 'fednova'$"
    with pytest.raises(UserError, match=said):
        made("fednova", **keys, **{"prox-mu": 40.0})


def test_more_steps_than_can_be_counted_are_refused() -> None:
    strategy = made("fednova")
    with pytest.raises(BadReply, match=r"^num-examples = 2000002: 1000001 steps, at most 1000000$"):
        strategy.contribution(update(0, [0.0, 0.0], 1_000_001))


# --- FedAdam and its like ---------------------------------------------------------------------------------------------


def slow(method: str, start: list[float], means: list[list[float]]) -> list[float]:
    """Algorithm 2 of Reddi et al., number by number, with b1 0.9 (FedAdagrad 0), b2 0.99, tau 0.01, eta 0.1."""
    result, b1 = [], 0.0 if method == "fedadagrad" else 0.9
    for k, value in enumerate(start):
        x, m, v = value, 0.0, 0.0
        for mean in means:
            d = mean[k] - x
            m = b1 * m + (1 - b1) * d
            if method == "fedadagrad":
                v = v + d**2
            elif method == "fedyogi":
                v = v - 0.01 * d**2 * math.copysign(1.0, v - d**2)
            else:
                v = 0.99 * v + 0.01 * d**2
            x = x + 0.1 * m / (math.sqrt(v) + 0.01)
        result.append(x)
    return result


@pytest.mark.parametrize("method", ["fedadam", "fedyogi", "fedadagrad"])
def test_against_the_papers_lines(method: str) -> None:
    """Three rounds, one of them abandoned, the state saved and restored between them."""
    keys: dict[str, Any] = {f"{method}.lr": 0.1}
    strategy = made(method, **keys)
    strategy.current["0.weight"] = torch.tensor([[0.5, -2.0]])
    answers = [([1.0, 3.0], [2.0, -5.0]), ([0.0, 0.1], [0.2, 0.1]), ([-4.0, 1.0], [-2.0, 2.0])]
    for number, (one, other) in enumerate(answers):
        if number == 1:
            merge_round(strategy, [])
        merge_round(strategy, [update(0, one), update(1, other, mean=2.0)])
        left = {name: tensor.clone() for name, tensor in reversed(strategy.state().items())}
        model, strategy = strategy.current, made(method, **keys)
        strategy.load_state(left)
        strategy.current = model
    means = [[(a + b) / 2 for a, b in zip(one, other, strict=True)] for one, other in answers]
    expected = slow(method, [0.5, -2.0], means)
    torch.testing.assert_close(strategy.current["0.weight"], torch.tensor([expected]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(strategy.current["1.running_mean"], torch.tensor([1.0]))  # the plain mean


def test_a_quarter_of_a_step_of_the_server() -> None:
    whole, quarter = made("fedadam"), made("fedadam", **{"server-lr": 0.25})
    for strategy in (whole, quarter):
        strategy.current["0.weight"] = torch.zeros(1, 2)
        merge_round(strategy, [update(0, [1.0, -1.0], mean=4.0)])
    for name in ("0.weight", "1.running_mean"):  # both began at 0
        torch.testing.assert_close(quarter.current[name], whole.current[name] / 4)


def test_a_very_adaptive_fedadam_moves_by_its_rate_alone() -> None:
    """First round, tau near 0: 0.1 D / (0.1 |D|)."""
    strategy = made("fedadam", **{"fedadam.tau": 1e-9, "fedadam.lr": 0.25})
    strategy.current["0.weight"] = torch.zeros(1, 2)
    merge_round(strategy, [update(0, [1e-3, -50.0])])
    torch.testing.assert_close(strategy.current["0.weight"], torch.tensor([[0.25, -0.25]]), rtol=1e-4, atol=0)


def test_the_moments_are_of_parameters() -> None:
    strategy = made("fedyogi")
    assert isinstance(strategy, FedAdagrad)
    assert strategy.first.keys() == strategy.second.keys() == {"0.weight"}


# --- local-steps ------------------------------------------------------------------------------------------------------


def batches(**keys: Any) -> tuple[list[list[Tensor]], int]:
    general = {"model": "feature-mlp", "partition": "iid", "num-clients": 3, "train-per-class": 9, "batch-size": 8}
    place = workplace(resolve(general | keys))
    worker = Client(place, 0, 1, {})
    return [list(found) for found in worker.epochs()], len(worker.y)


def test_local_steps_are_the_first_of_the_passes() -> None:
    """30 samples, batches of 8: four a pass."""
    passes, count = batches(**{"local-epochs": 3})
    assert (count, [len(found) for found in passes]) == (30, [4, 4, 4])
    for steps, lengths in ((1, [1]), (4, [4]), (5, [4, 1]), (10, [4, 4, 2])):
        taken, _ = batches(**{"local-steps": steps, "local-epochs": 0})
        assert [len(found) for found in taken] == lengths
        for mine, theirs in zip(taken, passes, strict=False):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=False))


def test_batches_that_cannot_be_trained_on_do_not_hang() -> None:
    assert batches(**{"local-steps": 5, "batch-size": 1})[0] == []


@pytest.mark.parametrize("method", ["fedavg", "fedselect", "ditto", "fedpac", "ist"])
def test_local_steps_of_a_run(method: str, run_local: Run) -> None:
    """Whoever trains by local-epochs trains by local-steps; two rounds of one step are not those of a pass."""
    keys = {"method": method, "num_clients": 3, "partition": "iid", "num_rounds": 2, "batch_size": 32}
    _, folder = run_local("steps", **keys, local_steps=1)
    _, other = run_local("epochs", **keys)
    steps, epochs = (sum(line["flops"] for line in read_rounds(f)[1:]) for f in (folder, other))
    assert 0 < steps < epochs
    assert read_rounds(folder)[-1]["dropped"] == []


def test_as_many_steps_as_a_pass_is_the_pass(run_local: Run) -> None:
    keys = {"num_clients": 3, "partition": "iid", "train_per_class": 9, "batch_size": 8}
    _, steps = run_local("steps", local_steps=8, **keys)
    _, epochs = run_local("epochs", local_epochs=2, **keys)
    assert (steps / "model.safetensors").read_bytes() == (epochs / "model.safetensors").read_bytes()
