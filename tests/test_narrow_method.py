"""A method whose clients train smaller networks: strategies/sliced.py and nothing else.

Every hidden layer's units are dealt to the round's clients in turn; each receives, trains and returns the network that
has only its units. The client side is FedAvg's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, merge_round, read
from safetensors.torch import load_file
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import build_model, narrowed, unit_groups
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS, Method
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import MethodSettings
from fedsub_app.subnets.masks import expand
from fedsub_app.subnets.slices import take
from fedsub_app.training.costs import training_flops
from fedsub_app.training.workplace import workplace
from strategies.rounds import check_defences
from strategies.sliced import Sliced

Run = Callable[..., tuple[Json, Path]]


class Slices(Sliced):
    """Client c owns the units j of each hidden layer with ``j mod num-clients == c``."""

    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return the units that a client owns."""
        return {g.name: torch.arange(g.size) % self.settings.num_clients == client for g in self.units}


class Levels(Sliced):
    """HeteroFL's family: an even client has the first half of each hidden layer's units, an odd one has all."""

    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return the units of the client's level."""
        return {g.name: torch.arange(g.size) < (g.size if client % 2 else g.size // 2) for g in self.units}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "slices", Method("a test", MethodSettings, Slices, Client))
    monkeypatch.setitem(METHODS, "levels", Method("a test", MethodSettings, Levels, Client))


NETWORKS: dict[str, dict[str, Any]] = {
    "lenet5": {"image-size": 32},
    "lenet5-bn": {"image-size": 32},
    "feature-mlp": {},
    "resnet18": {"image-size": 32, "num-rounds": 1},
}
KEYS: dict[str, Any] = {
    "method": "slices", "num-clients": 3, "partition": "iid", "train-per-class": 6, "test-per-class": 5,
    "num-rounds": 2, "batch-size": 8, "lr": 0.05, "evaluate": "global,personal", "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("model", NETWORKS)
def test_a_whole_run_trains_and_sends_slices(model: str, run_local: Run) -> None:
    keys = KEYS | NETWORKS[model] | {"model": model}
    _, folder = run_local(**{key.replace("-", "_"): value for key, value in keys.items()})
    lines = read_rounds(folder)[1:]
    place = workplace(resolve({**keys, "run-dir": str(folder)}))
    strategy = Slices(place.settings, place.network.module)
    bytes_ = flops = 0
    for client in range(3):
        units = strategy.units_of(client)
        bytes_ += sum(4 * tensor.numel() for tensor in take(strategy.current, strategy.units, units).values())
        widths = {name: int(mask.sum()) for name, mask in units.items()}
        small = narrowed(place.network.module, strategy.units, widths)
        flops += training_flops(place.problem, small) * len(place.partition.train[client])
    for line in lines:
        assert line["dropped"] == []
        assert line["formula-bytes-down"] == line["formula-bytes-up"] == bytes_
        assert line["flops"] == flops
    start, end = place.initial(), load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in start.items()}
    covered = [expand(strategy.units, strategy.units_of(client), shapes) for client in range(3)]
    for name, tensor in start.items():
        anybody = torch.stack([masks[name] for masks in covered]).any(0)
        assert torch.equal(end[name][~anybody], tensor.detach()[~anybody])  # cross blocks keep their value
        if name.endswith("weight"):
            assert not torch.equal(end[name], tensor.detach())


def test_a_slice_is_trained_as_the_network_that_it_is() -> None:
    """Against plain SGD on a network built narrow; slices of two widths in one process, one after the other."""
    settings = resolve(KEYS | {"model": "feature-mlp", "num-clients": 3, "local-epochs": 1})
    place = workplace(settings)
    strategy = Slices(settings, place.network.module)
    strategy.round = 1
    for client in range(3):
        sent = strategy.task(client).tensors
        worker = Client(place, client, 1, {})
        answer = worker.train(dict(sent), {})
        small = build_model("feature-mlp", place.problem.data.in_shape, 10, 0)
        small = narrowed(small, unit_groups(small), {"fc1": len(sent["fc1.bias"])}).double()
        with torch.no_grad():
            for name, parameter in small.named_parameters():
                parameter.copy_(sent[name])
        optimizer = torch.optim.SGD(small.parameters(), settings.lr)
        for batches in Client(place, client, 1, {}).epochs():
            for batch in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(small(worker.x[batch].double()), worker.y[batch]).backward()
                optimizer.step()
        expected = {name: parameter.detach() for name, parameter in small.named_parameters()}
        assert away(answer, expected, sent) < SAME
        assert worker.network is not place.network


def test_slices_of_three_numbers_are_averaged_where_they_were_taken() -> None:
    strategy = Slices(resolve(KEYS | {"model": "feature-mlp"}), torch.nn.Sequential(
        torch.nn.Linear(1, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False)))  # fmt: skip
    strategy.current = {"0.weight": torch.tensor([[1.0], [2.0], [3.0]]), "2.weight": torch.tensor([[4.0, 5.0, 6.0]])}
    updates = []
    for client in range(2):  # the third one does not answer: its unit stays
        tensors = {name: tensor * 10 for name, tensor in strategy.task(client).tensors.items()}
        updates.append(Update(client, tensors, {}, 1))
    merge_round(strategy, updates)
    assert strategy.current["0.weight"].flatten().tolist() == [10, 20, 3]
    assert strategy.current["2.weight"].flatten().tolist() == [40, 50, 6]


def test_a_slice_of_the_wrong_width_is_refused() -> None:
    settings = resolve(KEYS | {"model": "feature-mlp"})
    strategy = Slices(settings, workplace(settings).network.module)
    update = Update(0, strategy.task(1).tensors, {"train-loss": 0.0}, 1)  # another client's slice: 333 units, not 334
    with pytest.raises(BadReply, match=r"tensor 'fc1.weight': shape \(333, 64\), expected \(334, 64\)"):
        read(strategy, update)


def test_slices_that_overlap_are_averaged_by_weight() -> None:
    strategy = Levels(resolve(KEYS | {"model": "feature-mlp", "weighting": "examples"}), torch.nn.Sequential(
        torch.nn.Linear(1, 4, bias=False), torch.nn.ReLU(), torch.nn.Linear(4, 1)))  # fmt: skip
    strategy.current = {
        "0.weight": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "2.weight": torch.tensor([[5.0, 6.0, 7.0, 8.0]]),
        "2.bias": torch.tensor([9.0]),
    }
    answers = [{name: tensor * factor for name, tensor in strategy.task(client).tensors.items()}
               for client, factor in ((0, 10), (1, 2))]  # fmt: skip
    merge_round(strategy, [Update(client, answer, {}, (1, 3)[client]) for client, answer in enumerate(answers)])
    assert strategy.current["0.weight"].flatten().tolist() == [4, 8, 6, 8]  # (10 + 3 * 2) / 4 of the first two
    assert strategy.current["2.weight"].flatten().tolist() == [20, 24, 14, 16]
    assert strategy.current["2.bias"].tolist() == [36]


def test_equal_slices_travel_once_a_message(run_local: Run) -> None:
    """Down, for training and for the evaluation of each client's own model, as FedAvg's model does."""
    keys = {key.replace("-", "_"): value for key, value in KEYS.items()} | {"num_clients": 6, "model": "feature-mlp"}
    _, folder = run_local("levels", **keys | {"method": "levels"})
    strategy = Levels(resolve(KEYS | {"model": "feature-mlp"}), workplace(resolve(KEYS | {
        "model": "feature-mlp"})).network.module)  # fmt: skip
    small, whole = (sum(t.nbytes for t in strategy.task(client).tensors.values()) for client in (0, 1))
    assert small < whole / 1.9
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-down"] == 3 * (small + whole)
        assert small + whole - 40 <= line["bytes-down"] < small + whole + 8000  # the output bias is one object
    first, second = (strategy.task(client).tensors for client in (0, 2))
    assert all(first[name] is second[name] for name in first)
    assert all(first[name] is tensor for name, tensor in strategy.personal_download(4).items())
    strategy.current = {name: tensor + 1 for name, tensor in strategy.current.items()}
    assert not any(first[name] is tensor for name, tensor in strategy.task(0).tensors.items())


def test_a_small_clients_own_model_is_its_own_network(run_local: Run) -> None:
    keys = {key.replace("-", "_"): value for key, value in KEYS.items()} | {"model": "feature-mlp"}
    _, folder = run_local(**keys | {"method": "levels", "num_rounds": 1})
    evaluated = read_rounds(folder)[1]["evaluated"]
    place = workplace(resolve({**KEYS, "method": "levels", "model": "feature-mlp", "run-dir": str(folder)}))
    strategy = Levels(place.settings, place.network.module)
    strategy.current = load_file(folder / "model.safetensors")
    for client in range(3):
        worker = Client(place, client, 1, {})
        worker.load(strategy.network_of(client))
        assert worker.score("test") == evaluated[str(client)]["personal-accuracy"]
        assert (worker.network is place.network) == (client == 1)


@pytest.mark.parametrize(
    "keys", [{"mean": "krum", "byzantine-clients": 0}, {"clip-norm": 1.0, "dp-noise-multiplier": 1.0}]
)
def test_defences_of_whole_updates_are_refused(keys: dict[str, Any]) -> None:
    settings = resolve(KEYS | keys | {"method": "levels", "model": "fedpews-mlp"})
    with pytest.raises(UserError, match="not with method = 'levels': its clients cover different positions"):
        check_defences(Levels(settings, workplace(settings).network.module))
