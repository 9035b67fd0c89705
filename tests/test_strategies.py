"""FedAvg, FedProx and local training: numbers by hand, invariants, evaluation as it is named."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import merge_round
from safetensors.torch import load_file

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.models import build_model
from fedsub_app.runs.config import resolve
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.runs.rounds import read_rounds
from strategies.base import SubnetStrategy

Run = Callable[..., tuple[Json, Path]]


def same_model(left: Path, right: Path) -> bool:
    a, b = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("weighting", "server_lr", "expected"),
    [
        ("uniform", 1.0, [2.0, 4.0, 0.0]),
        ("examples", 1.0, [2.5, 5.0, 0.5]),  # weights 1 and 3
        ("uniform", 0.5, [1.5, 2.5, 0.5]),
    ],
)
def test_mean_of_three_numbers(weighting: str, server_lr: float, expected: list[float]) -> None:
    settings = resolve({"method": "fedavg", "weighting": weighting, "server-lr": server_lr})
    strategy = SubnetStrategy(settings, build_model("fedpews-mlp", (5,), 4, 0))
    strategy.current = {"w": torch.ones(3)}
    updates = [
        Update(0, {"w": torch.tensor([1.0, 2.0, -1.0])}, {}, 10),
        Update(1, {"w": torch.tensor([3.0, 6.0, 1.0])}, {}, 30),
    ]
    merge_round(strategy, updates)
    torch.testing.assert_close(strategy.current["w"], torch.tensor(expected))


@pytest.mark.parametrize(
    ("keys", "weight"),
    [
        ({"method": "fedavg"}, 30.0),
        ({"method": "fedprox"}, 30.0),
        ({"method": "moon"}, 30.0),
        ({"method": "fedavg", "weighting": "uniform"}, 1.0),
        ({"method": "fedavg", "mean": "median"}, 1.0),  # a client's number of samples is its own word
        ({"method": "fedavg", "clip-norm": 1.0, "dp-noise-multiplier": 1.0}, 1.0),  # and private
        ({"method": "fedselect"}, 1.0),
        ({"method": "fednova", "weighting": "examples"}, 30.0),
    ],
)
def test_a_clients_weight_by_default(keys: dict[str, Any], weight: float) -> None:
    strategy = SubnetStrategy(resolve(keys), build_model("fedpews-mlp", (5,), 4, 0))
    assert strategy.weight(Update(1, {}, {}, 30)) == weight


@pytest.mark.parametrize(("method", "objective"), [("fedprox", "prox"), ("moon", "moon"), ("fedavg", "none")])
def test_a_run_records_its_objective(method: str, objective: str, run_local: Run) -> None:
    _, folder = run_local(method=method, num_rounds=1)
    assert json.loads((folder / "settings.json").read_text())["settings"]["objective"] == objective


def test_fedprox_without_its_term_is_fedavg_bit_for_bit(run_local: Run) -> None:
    _, fedavg = run_local("fedavg")
    _, fedprox = run_local("fedprox", method="fedprox", prox_mu=0.0)
    _, pulled = run_local("pulled", method="fedprox", prox_mu=1.0)
    _, authors = run_local("authors", method="fedprox", prox_mu=1.0, prox="authors")
    assert same_model(fedavg, fedprox)
    assert same_model(fedavg, authors)  # the published term of FedPart has no gradient where it acts
    assert not same_model(fedavg, pulled)


def test_fedprox_gradient_is_the_terms_derivative(run_local: Run) -> None:
    """A strong pull keeps the model near where it started."""

    def moved(folder: Path) -> float:
        start = build_model("feature-mlp", (1, 8, 8), 10, 0).state_dict()
        end = load_file(folder / "model.safetensors")
        return sum(float((end[name] - start[name]).norm()) for name in end)

    _, weak = run_local("weak", method="fedprox", prox_mu=0.01, local_epochs=5)
    _, strong = run_local("strong", method="fedprox", prox_mu=10.0, local_epochs=5)
    assert moved(strong) < 0.5 * moved(weak)


def test_local_training_sends_nothing_and_keeps_its_own_models(run_local: Run) -> None:
    summary, folder = run_local(method="local", evaluate="personal", client_test="labels")
    assert summary["total-formula-bytes-down"] == summary["total-formula-bytes-up"] == 0
    rounds = [line["personal-accuracy"] for line in read_rounds(folder) if "personal-accuracy" in line]
    assert rounds[-1] > 80  # five classes a client, evaluated on these
    assert len(list((folder / "clients").glob("client-*"))) == 2


def test_one_client_makes_local_and_fedavg_the_same(run_local: Run) -> None:
    one = {"num_clients": 1, "partition": "iid", "evaluate": "personal", "momentum": 0.0}
    _, fedavg = run_local("fedavg", **one)
    _, local = run_local("local", method="local", **one)
    left, right = (
        [line["personal-accuracy"] for line in read_rounds(folder) if line["round"]] for folder in (fedavg, local)
    )
    assert left == right


def test_evaluations_are_what_they_are_named(run_local: Run) -> None:
    _, folder = run_local(evaluate="global,global-local,personal", eval_every=2)
    lines = read_rounds(folder)
    assert ["global-accuracy" in line for line in lines] == [True, False, True, True]  # round 0, 2 and the last
    last = lines[-1]
    own = last["evaluated"]
    assert set(own) == {"0", "1"}
    assert last["global-local-accuracy"] == pytest.approx(sum(v["global-local-accuracy"] for v in own.values()) / 2)
    assert last["personal-accuracy"] == last["global-local-accuracy"]  # FedAvg has no model but the global one


def test_seeds_decide_and_nothing_else(run_local: Run) -> None:
    torch.manual_seed(1)
    _, first = run_local("first")
    torch.manual_seed(2)
    _, second = run_local("second")
    _, third = run_local("third", seed=1)
    assert same_model(first, second)
    assert not same_model(first, third)


def test_partial_participation_trains_only_the_sampled(run_local: Run) -> None:
    _, folder = run_local(num_clients=6, partition="iid", participation=0.5, num_rounds=4)
    groups = [tuple(line["clients"]) for line in read_rounds(folder) if line["round"]]
    assert all(len(group) == 3 for group in groups)
    assert len(set(groups)) > 1


def test_arrays_and_tensors_convert_both_ways() -> None:
    tensors = {"w": torch.randn(3, 2), "b": torch.tensor(1.5)}
    back = to_tensors(to_arrays(tensors))
    assert all(torch.equal(tensors[name], back[name]) for name in tensors)


def test_values_whose_sum_overflows_leave_the_model_alone(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is finite."""
    monkeypatch.setattr(
        Client, "trained", lambda self: {k: torch.full_like(v, 3e38) for k, v in self.network.tensors.items()}
    )
    with pytest.raises(
        RunFailed, match=r"fewer than min-replies = 1 valid replies; update of norm inf: more than max-"
    ):
        run_local(num_rounds=5)


def blown_up(monkeypatch: pytest.MonkeyPatch, factor: float, clients: set[int], number: int) -> None:
    """In one round what these clients have trained is multiplied."""
    trained = Client.trained

    def blow(self: Client) -> Tensors:
        by = factor if self.id in clients and self.round == number else 1.0
        return {name: tensor * by for name, tensor in trained(self).items()}

    monkeypatch.setattr(Client, "trained", blow)


def test_a_model_that_has_diverged_is_not_merged(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last good one stays, and what the method remembers of that round; the next round starts from them."""
    blown_up(monkeypatch, 1e5, {0, 1}, 2)
    keys: dict[str, Any] = {"num_clients": 2, "num_rounds": 3, "max_update_norm": 1e6, "method": "scaffold"}
    _, folder = run_local(**keys)
    start, first, second, third = read_rounds(folder)
    assert [line["status"] for line in (first, second, third)] == ["ok", "abandoned", "ok"]
    assert second["abandoned"].startswith("diverged: the merged model's loss is ")
    assert second["global-loss"] == first["global-loss"] != third["global-loss"]
    assert third["train-loss"] < first["train-loss"] < start["global-loss"] * 2


def test_two_clients_are_held_against_the_model(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    blown_up(monkeypatch, 1e8, {1}, 2)
    _, folder = run_local(num_clients=2, num_rounds=3)
    (dropped,) = read_rounds(folder)[2]["dropped"]
    assert dropped["client"] == 1
    said = r"update of norm \S+e\+09: more than max-update-norm = 100 times the model's own \S+"
    assert re.fullmatch(said, dropped["reason"])


def test_a_tight_norm_is_the_users(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the way of the others passes 100 medians and not 3; what was measured stands in the line."""
    train = Client.train

    def further(self: Client, sent: Tensors, config: Json) -> Tensors:
        trained = train(self, sent, config)
        return {n: sent[n] + 10 * (t - sent[n]) for n, t in trained.items()} if self.id == 1 else trained

    monkeypatch.setattr(Client, "train", further)
    keys: dict[str, Any] = {"num_clients": 4, "num_rounds": 1, "partition": "iid"}
    line = read_rounds(run_local("loose", **keys)[1])[1]
    assert not line["dropped"]
    assert 8 < line["largest-update-norm"] / line["update-norm"] < 12
    line = read_rounds(run_local("tight", max_update_norm=3.0, **keys)[1])[1]
    assert [drop["client"] for drop in line["dropped"]] == [1]
    assert line["largest-update-norm"] < 2 * line["update-norm"]


def test_where_training_diverges_on_most_clients_the_others_are_not_the_mean(
    run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    blown_up(monkeypatch, math.nan, {0, 1, 2}, 2)
    _, folder = run_local(num_clients=5, num_rounds=3)
    lines = read_rounds(folder)
    assert [line["status"] for line in lines[1:]] == ["ok", "abandoned", "ok"]
    assert lines[2]["abandoned"] == "training diverged on 3 of 5 clients"
    assert lines[2]["global-loss"] == lines[1]["global-loss"]


def test_a_client_that_exits_is_dropped_like_one_that_raises(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Client.train

    def leave(self: Client, sent: Tensors, config: Json) -> Tensors:
        if self.id == 1:
            raise SystemExit(3)
        return train(self, sent, config)

    monkeypatch.setattr(Client, "train", leave)
    _, folder = run_local()
    reason = f"client failed: SystemExit: 3 (test_strategies.py:{leave.__code__.co_firstlineno + 2})"
    assert read_rounds(folder)[1]["dropped"] == [{"client": 1, "reason": reason}]


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "None"), ({"w": 1.0}, r"{'w': 1.0}"), (torch.ones(1), r"tensor([1.])")]
)
def test_an_answer_that_is_no_tensors_is_its_clients_failure_alone(
    answer: Any, said: str, run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients share a reply. A metric may be a tensor of one number."""
    train = Client.train

    def instead(self: Client, sent: Tensors, config: Json) -> Any:
        trained = train(self, sent, config)
        self.metrics["train-loss"] = torch.tensor(self.metrics["train-loss"])  # type: ignore[assignment]
        return answer if self.id == 1 else trained

    monkeypatch.setattr(Client, "train", instead)
    _, folder = run_local(num_rounds=1)
    (dropped,) = read_rounds(folder)[1]["dropped"]
    assert dropped["client"] == 1
    reason = f"client failed: TypeError: Client answers {said}: must be tensors by name"
    assert dropped["reason"].startswith(reason)


def test_a_state_a_metric_or_an_own_model_that_is_no_tensors_is_named(
    run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Client.train

    def instead(self: Client, sent: Tensors, config: Json) -> Any:
        trained = train(self, sent, config)
        if self.id == 1:
            self.metrics["train-loss"] = "low"  # type: ignore[assignment]
        else:
            self.state = {"w": torch.ones(2), "rounds": 3}  # type: ignore[dict-item]
        return trained

    monkeypatch.setattr(Client, "train", instead)
    monkeypatch.setattr(Client, "personal", lambda self, sent, config: None)
    with pytest.raises(RunFailed) as failed:
        run_local(num_rounds=1, evaluate="personal, global")
    line = read_rounds(failed.value.folder)[1]
    state, metric = (drop["reason"] for drop in line["dropped"])
    assert state.startswith(
        "client failed: TypeError: Client keeps as its state {'rounds': 3}: must be tensors by name"
    )
    assert metric.startswith(
        "client failed: UserError: Client.metrics has 'train-loss' as 'low' (ValueError: could not"
    )
    for drop in line["not-evaluated"]:
        assert drop["reason"].startswith("client failed: TypeError: Client has as its own model None: must be tensors")
