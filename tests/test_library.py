"""The methods in a Flower app of one's own: keywords, connection, own network and data, and the same numbers."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp.strategy import FedAvg
from helpers import METHOD_KEYS, forget
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedsub
from client_apps.base import Client
from fedsub_app.common.tasks import TASKS, Regression
from fedsub_app.data import PartitionSettings, load_dataset, make_partition, own_dataset
from fedsub_app.data.partition import whole_set
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.wire import to_tensors
from fedsub_app.library.keywords import keywords, title
from fedsub_app.models import mlp, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.evaluation import GlobalTest
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import MethodSettings
from fedsub_app.training.problem import Problem

KEYS = {"num-clients": 4, "train-per-class": 40, "test-per-class": 10, "validation-fraction": 0.2}
DATA = load_dataset(resolve(KEYS).data)
PARTITION = make_partition(DATA, resolve(KEYS | {"validation-fraction": 0.0}).partitioning)
X, Y = torch.zeros(6, 1, 8, 8), torch.arange(6)
RUN = {"dataset": "digits", "model": "feature-mlp", "num-rounds": 2, "batch-size": 64}


class Net(nn.Module):
    """A network of one's own, with running statistics and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def wide() -> nn.Module:
    """The network that ``feature-mlp`` names."""
    return mlp(64, 10, [1000], batch_norm=True)


def load(context: Context) -> Any:
    """The samples of the client whose number is the context's partition."""
    client, count = (context.node_config[key] for key in ("partition-id", "num-partitions"))
    assert count == len(PARTITION.train)
    train, test = PARTITION.train[int(client)], PARTITION.test[int(client)]
    return (DATA.train_x[train], DATA.train_y[train]), (DATA.test_x[test], DATA.test_y[test])


def grid(nodes: int = 1, **how: Any) -> LocalGrid:
    return LocalGrid(fedsub.client_app(**{"model": Net, "data": load} | how), {}, nodes)


def arrays(module: nn.Module | None = None) -> ArrayRecord:
    return ArrayRecord((module or Net()).state_dict())


def pythonic(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a run as keywords."""
    names = {key: name for method in METHODS for name, key in keywords(method).items()}
    return {names[key.replace("__", ".").replace("_", "-")]: value for key, value in keys.items()}


def sequential() -> nn.Module:
    return mlp(64, 10, [16, 12])


class Largest(Regression):
    """A task of one's own, with a name of its own for the score."""

    score = "worst"

    def metrics(self, sums: Any) -> dict[str, float]:
        found = super().metrics(sums)
        return {"worst": found["rmse"], "mae": found["mae"], "loss": found["loss"]}


# --- keywords ---------------------------------------------------------------------------------------------------------


def test_every_method_has_a_class_of_its_name() -> None:
    names = {method: title(method) for method in METHODS}
    assert len(set(names.values())) == len(METHODS)
    written = (
        "FedAvg FedProx MOON Scaffold FedNova FedAdam FedAvgFT FedPer FedSelect SubFedAvg IST ISTProx FedPart FedPeWS"
    )
    assert set(written.split()) <= set(names.values()) <= set(dir(fedsub))
    assert fedsub.FedSelect is fedsub.FedSelect
    assert fedsub.FedSelect.__name__ == "FedSelect"
    with pytest.raises(AttributeError, match="no attribute 'FedFoo'"):
        _ = fedsub.FedFoo


def test_a_method_that_is_registered_has_one_too() -> None:
    about = METHODS["fedavg"]
    fedsub.register("half-way", fedsub.Method("a test", MethodSettings, about.strategy, about.client))
    try:
        assert fedsub.HalfWay().method == "half-way"
        about = METHODS["fedselect"]  # again, with keys of its own
        fedsub.register("half-way", fedsub.Method("a test", about.settings, about.strategy, about.client))
        assert fedsub.HalfWay(alpha=0.1).keys["half-way.alpha"] == 0.1
    finally:
        forget("half-way")


def test_keywords_are_the_keys() -> None:
    own = keywords("fedselect")
    assert own["alpha"] == "fedselect.alpha"
    assert own["lr_decay_at"] == "lr-decay-at"
    assert keywords("ditto")["lambda_"] == "ditto.lambda"
    both = keywords("fedadam")
    assert (both["lr"], both["fedadam_lr"]) == ("lr", "fedadam.lr")
    assert not {"dataset", "partition", "num_clients", "run_dir", "method"} & own.keys()
    shown = inspect.signature(fedsub.FedSelect).parameters
    assert shown["lr"].default == 0.05
    assert shown["clients_per_node"].default == 1
    assert fedsub.FedAvg(task=None, lr=None).keys == fedsub.FedAvg().keys


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("FedSelect", {"alpha": 2.0}, r"^fedselect.alpha = 2.0: must be less than or equal to 1$"),
        ("FedSelect", {"lr": "fast"}, r"^lr = 'fast': must be a number$"),
        ("FedSelect", {"alhpa": 0.3}, r"^alhpa = 0.3: no keyword of fedselect; did you mean alpha\?$"),
        ("FedAvg", {"momentum": 0.9, "optimizer": "adam"}, r"^momentum = 0.9: allowed with optimizer = 'sgd' or 'rms"),
        ("ISTProx", {"objective": "moon"}, r"^objective = 'moon': must be 'prox' with method = 'istprox'$"),
        ("MOON", {"objective": "prox"}, r"^objective = 'prox': must be 'moon' with method = 'moon'$"),
        ("FedAvg", {"clients_per_node": 0}, r"^clients_per_node = 0: must be an integer from 1 on$"),
        ("FedAvg", {"max_examples": 2.5}, r"^max_examples = 2.5: must be an integer from 0 on$"),
        ("IST", {"in_shape": 8, "model": Net}, "^in_shape = 8: must be positive integers, with model=$"),
        ("IST", {"in_shape": (1, 0), "model": Net}, r"^in_shape = \(1, 0\): must be positive integers, with model=$"),
        ("IST", {"in_shape": (1, 8, 8)}, r"^in_shape = \(1, 8, 8\): must be positive integers, with model=$"),
        ("FedAvg", {"task": Largest}, r"^task = <class '.*Largest'>: must be one of .*, or an object derived"),
        ("FedAvg", {"lr_decay_at": (0, 3)}, r"^lr-decay-at = '0, 3': must be rounds from 1 on"),
    ],
)
def test_wrong_keywords_are_one_line(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(fedsub.UserError, match=said):
        getattr(fedsub, name)(**given)


def test_devices_that_cannot_hold_the_network_are_refused_as_in_a_run() -> None:
    said = r"^devices: class e holds width 0.0625, method = 'fedavg' trains the whole network; allowed are min-width"
    with pytest.raises(fedsub.UserError, match=said):
        fedsub.FedAvg(devices="heterofl", clients_per_node=20).start(grid(), arrays(), 1)
    with pytest.raises(fedsub.UserError, match=r"^model_width = 0.5: no keyword of fedavg"):
        fedsub.FedAvg(model_width=0.5)


def test_defences_that_do_not_protect_the_method_are_refused_as_in_a_run() -> None:
    said = r"^model = 'own': not with dp-noise-multiplier above 0: 'body.2.running_mean' is a statistic"
    with pytest.raises(fedsub.UserError, match=said):
        fedsub.FedAvg(clip_norm=1.0, dp_noise_multiplier=1.0, clients_per_node=4).start(grid(), arrays(), 1)


def test_what_needs_the_number_of_clients_waits_for_the_roll_call() -> None:
    strategy = fedsub.FedAvg(clients_per_round=5, clients_per_node=2)
    with pytest.raises(fedsub.UserError, match=r"^clients-per-round = 5: at most num-clients = 4$"):
        strategy.start(grid(2), arrays(), 1)
    strategy = fedsub.FedPeWS(shares=(0.5, 0.5), masks="fixed", model=sequential, clients_per_node=2)
    assert strategy.keys["fedpews.shares"] == "0.5, 0.5"


def test_the_roll_call_waits_for_the_nodes_of_the_keywords() -> None:
    app = grid(4)
    del app.contexts[5]
    with pytest.raises(fedsub.UserError, match=r"^node-timeout = 0.05: 3 nodes there, missing: nodes with partition"):
        fedsub.FedAvg(node_timeout=0.05).start(app, arrays(), 1)
    strategy = fedsub.FedAvg(min_nodes=3)
    strategy.start(app, arrays(), 1)
    assert strategy.connected.settings.num_clients == 4  # also those of the node that is away


# --- Flower's own loop ------------------------------------------------------------------------------------------------


@pytest.mark.run
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_flowers_loop(method: str) -> None:
    """On two nodes of two clients each; what it remembers of the start is the initial model, which no seed gives."""
    given = dict(METHOD_KEYS.get(method, {}))
    strategy = getattr(fedsub, title(method))(model=sequential, clients_per_node=2, **pythonic(given))
    seen: list[int] = []

    def evaluate(server_round: int, found: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"norm": float(sum(t.norm() for t in to_tensors(found).values()))})

    first = arrays(sequential())
    found = strategy.start(grid(2, model=sequential), first, 2, evaluate_fn=evaluate)
    assert seen == [0, 1, 2] == list(found.evaluate_metrics_serverapp)
    assert strategy.connected.phase.dropped == []
    assert strategy.connected.settings.num_rounds == 2
    assert {1, 2} == found.train_metrics_clientapp.keys() == found.evaluate_metrics_clientapp.keys()
    assert found.train_metrics_clientapp[2]["train-loss"] < 20
    assert 0 <= found.evaluate_metrics_clientapp[2]["personal-accuracy"] <= 100
    assert list(found.arrays) == list(first)


def load_as(settings: PartitionSettings) -> Callable[[Context], Any]:
    """A loader that orders a client's samples so that the app sets aside the run's validation samples.

    A run draws them before it sorts the client's samples, an app by their places in what it is given.
    """
    partition = make_partition(DATA, settings)

    def loaded(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        samples = torch.cat((partition.train[client], partition.validation[client]))
        split = whole_set(SimpleNamespace(train_y=samples, test_y=samples), settings, client)  # type: ignore[arg-type]
        order = samples.clone()
        order[torch.cat((split.train[0], split.validation[0]))] = samples
        return (DATA.train_x[order], DATA.train_y[order]), load(context)[1]

    return loaded


# One method for each way in which an app of one's own differs from a run: FedAvg's initial arrays, data and seeds;
# FedSelect's state and own models on the nodes; FedPart's layers of model= and parts of it in messages; PruneFL's first
# masks, which cut weights of those arrays. The other methods add mathematics, which is the same code in both.
EACH_WAY = ("fedavg", "fedselect", "fedpart", "prunefl")


@pytest.mark.run
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in EACH_WAY else pytest.mark.slow) for name in METHODS]
)
def test_the_same_bits_as_a_run(method: str, tmp_path: Path) -> None:
    given = METHOD_KEYS.get(method, {})
    keys = {key.replace("_", "-"): value for key, value in given.items() if "__" not in key}
    own = {key.replace("__", "."): value for key, value in given.items() if "__" in key}
    own = {key.replace("_", "-"): value for key, value in own.items()}
    data = {"num-clients": 4, "train-per-class": 40, "test-per-class": 10, "evaluate": "personal"}
    record = fedsub.run({**RUN, **data, **keys, **own, "method": method, "run-dir": str(tmp_path / "run")})
    strategy = getattr(fedsub, title(method))(model=wide, clients_per_node=4, batch_size=64, **pythonic(keys | own))
    start = Problem.of(resolve({**RUN, **data})).network()
    same_data = load_as(resolve({**RUN, **data, **keys, **own, "method": method}).partitioning)
    found = strategy.start(grid(model=wide, data=same_data), arrays(start), 2)
    expected = load_file(record.folder / "model.safetensors")
    ours = to_tensors(found.arrays)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    for line in record.lines[1:]:
        assert found.train_metrics_clientapp[line["round"]]["train-loss"] == line["train-loss"]
        assert found.evaluate_metrics_clientapp[line["round"]]["personal-accuracy"] == line["personal-accuracy"]


def test_statistics_that_are_measured_after_the_merge_are_those_of_the_data() -> None:
    """Of HeteroFL's BatchNorm; the step before has moved them from 0 and 1 by a tenth of the way."""

    def network() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))

    train = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([0, 1, 0])
    strategy = fedsub.HeteroFL(model=network, widths=(1.0,))
    found = strategy.start(grid(model=network, data=lambda _: (train, train)), arrays(network()), 1)
    assert [float(t) for name, t in to_tensors(found.arrays).items() if "running" in name] == [3, 7]


def test_the_arrays_are_those_of_the_network() -> None:
    """Integers, which no client sends, come back, so that ``load_state_dict`` takes the result."""
    found = fedsub.FedAvg(clients_per_node=4).start(grid(), arrays(), 1)
    Net().load_state_dict(found.arrays.to_torch_state_dict())


class Tied(nn.Module):
    """A weight of two names, and a layer in two places: in the arrays under each of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight, self.again = self.first.weight, self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.second(self.first(x.flatten(1)))))


def test_tied_weights_travel_once_and_come_back_under_all_their_names() -> None:
    first = arrays(Tied())
    strategy = fedsub.FedAvg(clients_per_node=4, model=Tied)
    found = strategy.start(grid(model=Tied), first, 2)
    assert strategy.connected.phase.dropped == []
    assert [*strategy.connected.current] == [*dict(Tied().named_parameters())]
    assert list(found.arrays) == list(first)
    ours = to_tensors(found.arrays)
    assert torch.equal(ours["first.weight"], ours["second.weight"])
    assert not torch.equal(ours["again.weight"], to_tensors(first)["again.weight"])
    other = ArrayRecord({**Tied().state_dict(), "again.bias": torch.zeros(64)})
    with pytest.raises(
        fedsub.UserError, match=r"^initial_arrays: 'again.bias' is not 'first.bias', to which Tied ties"
    ):
        fedsub.FedAvg(clients_per_node=4, model=Tied).start(grid(model=Tied), other, 1)


def test_tied_weights_need_the_network() -> None:
    """The arrays have them under each of their names, and do not tell that they are one."""
    strategy = fedsub.FedAvg(clients_per_node=4)
    said = "model = 'Tied': 'again.bias' is tied to 'first.bias'; give model= to the strategy"
    with pytest.raises(fedsub.RunFailed, match=said):
        strategy.start(grid(model=Tied), arrays(Tied()), 1)


@pytest.mark.parametrize("method", ["flora", "fedex-lora"])
def test_adapters_of_tied_weights_are_refused(method: str) -> None:
    """A method that adds to the weights would add what one adapter lacks to the other's too."""
    said = r"^lora-targets = '': model = 'Tied': 'second.base_layer.weight' is tied, the method moves the weights"
    with pytest.raises(fedsub.UserError, match=said):
        fedsub.run({"method": method, "trainable": "lora", "num-clients": 1}, model=Tied, data=((X, Y), (X, Y)))


def test_adapters_of_a_layer_in_two_places_are_refused() -> None:
    """The adapter is at its first place, the weight at both."""
    said = r"^lora-targets = 'first': model = 'Tied': 'first.base_layer.weight' is tied, the method moves"
    keys = {"method": "flora", "trainable": "lora", "lora-targets": "first", "num-clients": 1}
    with pytest.raises(fedsub.UserError, match=said):
        fedsub.run(keys, model=Tied, data=((X, Y), (X, Y)))


def test_a_last_batch_of_one_is_no_step_where_arrays_tell_of_a_batch_norm(caplog: pytest.LogCaptureFixture) -> None:
    """The server counts a client's steps as the client does: 100 samples in batches of 33 are three."""
    keys: dict[str, Any] = {"clients_per_node": 4, "batch_size": 33}
    strategy = fedsub.Scaffold(max_examples=100, **keys)
    strategy.start(grid(), arrays(), 2)
    assert strategy.connected.phase.dropped == []
    assert "dropped" not in caplog.text


class Counting(nn.Module):
    """Counts its steps in a buffer: of integers, not saved, assigned anew, or made in the first step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        steps = torch.zeros((), dtype=torch.int64 if kind == "integers" else torch.float32)
        if kind != "added":
            self.register_buffer("steps", None if kind == "none yet" else steps, persistent=kind != "not saved")
        self.kind, self.head = kind, nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "steps", None) is None:
            self.register_buffer("steps", torch.zeros(()))
        if self.training and self.kind == "assigned":
            self.steps = self.steps + 1
        elif self.training:
            self.steps += 1
        return self.head(x.flatten(1)) / (1 + self.steps)


@pytest.mark.parametrize("kind", ["integers", "not saved", "assigned", "none yet", "added"])
def test_a_client_begins_with_buffers_of_its_own(kind: str) -> None:
    """Two clients of the same samples in one process train as one does."""
    keys: dict[str, Any] = {"batch_size": 6, "local_epochs": 2}
    same: dict[str, Any] = {"model": lambda: Counting(kind), "data": lambda context: ((X, Y), (X, Y))}
    first = arrays(Counting(kind))
    one, two = (
        to_tensors(fedsub.FedAvg(clients_per_node=count, **keys).start(grid(**same), first, 1).arrays)
        for count in (1, 2)
    )
    torch.testing.assert_close(two["head.bias"], one["head.bias"])
    assert [float(t) for n, t in two.items() if n == "steps"] == {"integers": [0], "assigned": [2]}.get(kind, [])


@pytest.mark.parametrize("kind", ["integers", "not saved"])
def test_each_test_of_the_global_model_begins_with_buffers_as_built(kind: str) -> None:
    """Else the loss of the same model is another one in the next round, and in a resumed run."""
    problem = Problem.own(lambda: Counting(kind), ((X, Y), (X, Y)), resolve({"method": "fedavg"}))
    test, model = GlobalTest(problem, torch.device("cpu")), ArrayRecord(dict(tensors_of(problem.network())))
    first = test(model)
    test.quick_loss(to_tensors(model))
    assert test(model) == first


@pytest.mark.parametrize("method", ["moon", "apfl", "per-fedavg", "fiarse"])
def test_a_buffer_that_is_assigned_anew_is_sent(method: str) -> None:
    """Also where a step runs the network with the tensors of other models: as many steps as batches are counted."""
    keys = pythonic(METHOD_KEYS[method]) | {"model": lambda: Counting("assigned"), "batch_size": 3, "local_epochs": 2}
    app = grid(model=lambda: Counting("assigned"), data=lambda context: ((X, Y), (X, Y)))
    found = getattr(fedsub, title(method))(**keys).start(app, arrays(Counting("assigned")), 1)
    assert float(to_tensors(found.arrays)["steps"]) == 4


def test_a_buffer_that_is_assigned_anew_is_kept_in_apfls_own_model(tmp_path: Path) -> None:
    """As many steps of the mixture as batches."""
    keys: dict[str, Any] = {"model": lambda: Counting("assigned"), "batch_size": 3, "local_epochs": 2}
    app = grid(model=lambda: Counting("assigned"), data=lambda context: ((X, Y), (X, Y)))
    first = arrays(Counting("assigned"))
    fedsub.start(fedsub.APFL(**keys), app, initial_arrays=first, num_rounds=1, run_dir=tmp_path / "run")
    state = load_file(tmp_path / "run/clients/client-000000/round-000001.safetensors")
    assert float(state["own/steps"]) == 4


@pytest.mark.parametrize("kind", ["integers", "not saved", "assigned"])
def test_clients_with_buffers_of_their_own_are_not_stacked(kind: str) -> None:
    keys = {"method": "fedavg", "num-clients": 2, "partition": "iid", "stack-clients": True}
    with pytest.raises(fedsub.UserError, match=r"^stack-clients = true: not with model = .*: its buffer 'steps', "):
        fedsub.run(keys, model=lambda: Counting(kind), data=((X, Y), (X, Y)))


@pytest.mark.parametrize(("value", "now"), [(torch.zeros(1), r"\(1,\)"), (None, "None")])
def test_a_buffer_that_changes_its_shape_is_refused(value: Any, now: str) -> None:
    class Longer(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.steps = value
            return self.head(x.flatten(1))

    with pytest.raises(
        fedsub.UserError, match=rf"^model = '<lambda>': its buffer 'steps' has shape \(\), after a step {now}$"
    ):
        Problem.own(lambda: Longer("assigned"), ((X, Y), (X, Y)), resolve({})).check_start()


def test_a_network_that_changes_its_inputs_in_place_is_refused() -> None:
    """An evaluation's inputs are the data themselves: the next one would be on other samples."""

    def active() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), *sequential())

    with pytest.raises(fedsub.UserError, match=r"^model = 'active': changes its inputs in place; must copy"):
        Problem.own(active, ((X - 1, Y), (X, Y)), resolve({})).check_start()
    assert "changes its inputs in place" in dropped({}, model=active, data=lambda _: ((X - 1, Y), (X, Y)))


def frozen() -> nn.Module:
    network = sequential()
    network.fc1.requires_grad_(False)
    return network


@pytest.mark.parametrize("method", ["fedpart", "fedpews"])
def test_a_layer_that_is_frozen(method: str) -> None:
    """FedPart's round of it has no moments; FedPeWS learns which of its units count."""
    strategy = getattr(fedsub, title(method))(model=frozen, clients_per_node=4, **pythonic(METHOD_KEYS[method]))
    dropped: list[Any] = []
    merge = strategy.aggregate_train
    strategy.aggregate_train = lambda *of: (merge(*of), dropped.extend(strategy.connected.phase.dropped))[0]
    first = arrays(frozen())
    found = strategy.start(grid(model=frozen), first, 3)
    assert dropped == []
    moved = [n for n, t in to_tensors(found.arrays).items() if not torch.allclose(t, to_tensors(first)[n], atol=1e-6)]
    assert moved
    assert "fc1.weight" not in moved


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tensors_of_another_type_are_refused(dtype: torch.dtype) -> None:
    """Else the first merge makes float32 of them, and every answer of the second round is refused."""

    def other() -> nn.Module:
        network = Net()
        network.register_buffer("scale", torch.ones(1, dtype=dtype))
        return network

    said = r"'scale' is torch.float\d\d; allowed is torch.float32, but for a frozen base and integer buffers$"
    with pytest.raises(fedsub.UserError, match=f"^initial_arrays: {said}"):
        fedsub.FedAvg(clients_per_node=4).start(grid(model=other), arrays(other()), 1)
    with pytest.raises(fedsub.UserError, match=f"^model = 'other': {said}"):
        fedsub.run({"num-clients": 2, "num-rounds": 1}, model=other, data=((X, Y), (X, Y)))
    said = f"'.*weight' is {dtype}; allowed is torch.float32, but for a frozen base and integer buffers$"
    with pytest.raises(fedsub.UserError, match=f"^model = Net: {said}"):  # whose inputs are float32
        fedsub.run({"num-clients": 2, "num-rounds": 1}, model=lambda: Net().to(dtype), data=((X, Y), (X, Y)))


def test_values_that_no_message_may_hold_are_refused_before_round_1() -> None:
    """Such as the mask of an attention: else every answer is refused in every round."""

    def masked() -> nn.Module:
        network = Net()
        network.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        return network

    said = "'mask' has NaN or infinite values; only a buffer with persistent=False may$"
    with pytest.raises(fedsub.UserError, match=f"^initial_arrays: {said}"):
        fedsub.FedAvg(clients_per_node=4).start(grid(model=masked), arrays(masked()), 1)
    with pytest.raises(fedsub.UserError, match=f"^model = 'masked': {said}"):
        Problem.own(masked, ((X, Y), (X, Y)), resolve({})).check_start()


def test_flowers_loop_fails_where_every_round_was_abandoned() -> None:
    """It ended as if all were well, with the initial model."""

    def broken(context: Context) -> Any:
        raise OSError("no such disk")

    said = "^all 2 rounds were abandoned; last reason: fewer than min-replies = 1 valid replies; .*no such disk"
    strategy = fedsub.FedAvg(clients_per_node=4)
    for _ in range(2):
        with pytest.raises(fedsub.RunFailed, match=said):
            strategy.start(grid(data=broken), arrays(), 2)
    assert strategy.start(grid(data=broken), arrays(), 0).train_metrics_clientapp == {}


def test_arrays_of_another_serialisation_are_one_line() -> None:
    other = ArrayRecord({"head.bias": Array("float32", (10,), "my.raw", bytes(40))})
    with pytest.raises(fedsub.UserError, match=r"^initial_arrays: TypeError: Unsupported serialization type"):
        fedsub.FedAvg(clients_per_node=4).start(grid(), other, 1)


def test_own_models_start_from_the_initial_arrays() -> None:
    """Not from the network of the seed: without training, LOCAL's models are the global one."""
    start = Net()
    with torch.no_grad():
        start.head.bias[3] = 1e3  # every sample is a three
    strategy = fedsub.Local(clients_per_node=4, local_epochs=0)
    found = strategy.start(grid(), arrays(start), 1)
    shares = [float((load(_context(k))[1][1] == 3).float().mean()) for k in range(4)]
    expected = 100 * sum(shares) / 4
    assert found.evaluate_metrics_clientapp[1]["personal-accuracy"] == pytest.approx(expected)
    fedpac, _ = fedsub.FedPAC(model=Net).build(resolve({"method": "fedpac", "num-clients": 2}), arrays(start))
    assert fedpac.heads["head.bias"][:, 3].tolist() == [1e3, 1e3]  # type: ignore[attr-defined]


class Flat(nn.Linear):
    """A network that is one layer: its weight has no layer's name before its own."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def test_the_weight_of_a_network_of_one_layer() -> None:
    keys: dict[str, Any] = {"model": Flat, "clients_per_node": 4}
    selects = fedsub.FedSelect(**keys)
    selects.start(grid(model=Flat), arrays(Flat()), 1)
    assert [int(masks["weight"].sum()) for masks in selects.connected.masks] == [160] * 4
    prunes = fedsub.SubFedAvg(**keys, local_epochs=2, validation_fraction=0.2, score=-1.0, distance=0.0, lr=0.5)
    prunes.start(grid(model=Flat), arrays(Flat()), 1)
    assert prunes.connected.fractions.max() > 0


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 10)))


def test_a_network_without_a_weight_to_prune() -> None:
    keys: dict[str, Any] = {"model": normed, "clients_per_node": 4, "local_epochs": 2, "validation_fraction": 0.2}
    with pytest.raises(fedsub.UserError, match=r"^subfedavg.pruning = 'unstructured': model .*: no convolution or "):
        fedsub.SubFedAvg(**keys).start(grid(model=normed), arrays(normed()), 1)
    fedsub.SubFedAvg(**keys, target=0.0).start(grid(model=normed), arrays(normed()), 1)


def pretrained(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def test_a_frozen_base_stays_on_the_nodes() -> None:
    """The head alone is sent and trained; what the server returns is whole; a node with another base is dropped."""
    start = arrays(pretrained())
    strategy = fedsub.FedAvg(clients_per_node=4, model=pretrained, trainable="head", lr=0.1)
    app = grid(model=pretrained)
    found = strategy.start(app, start, 2).arrays.to_torch_state_dict()
    assert [*strategy.connected.current] == ["head.weight", "head.bias"]
    again = fedsub.FedAvg(clients_per_node=4, model=pretrained)
    again.start(app, start, 1)  # the process's network is this run's
    assert again.connected.phase.dropped == []
    assert [*found] == [*start.to_torch_state_dict()]
    moved = [name for name, tensor in start.to_torch_state_dict().items() if not torch.equal(tensor, found[name])]
    assert moved == ["head.weight", "head.bias"]
    with pytest.raises(
        fedsub.RunFailed, match="client failed: UserError: model = '<lambda>': the frozen base has SHA-"
    ):
        strategy.start(grid(model=lambda: pretrained(1)), start, 1)
    with pytest.raises(fedsub.UserError, match=r"^trainable = 'head': in a Flower app of your own needs model=$"):
        fedsub.FedAvg(clients_per_node=4, trainable="head").start(grid(), start, 1)
    with pytest.raises(fedsub.UserError, match=r"^trainable = 'lora': .* give a network of the package peft$"):
        fedsub.FedAvg(clients_per_node=4, model=Net, trainable="lora").start(grid(), start, 1)


def tuned() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["head"])
    network: nn.Module = peft.get_peft_model(pretrained(), config)
    return network


@pytest.mark.parametrize("method", [fedsub.FedIT, fedsub.FLoRA])
def test_the_base_of_a_network_of_peft_stays_on_the_nodes(method: Any) -> None:
    """What peft trains is sent, and the weight that FLoRA moves."""
    start = arrays(tuned()).to_torch_state_dict()
    strategy = method(clients_per_node=4, model=tuned, trainable="lora", lr=0.1)
    found = strategy.start(grid(model=tuned), arrays(tuned()), 2).arrays.to_torch_state_dict()
    moved = {name for name, tensor in start.items() if not torch.equal(tensor, found[name])}
    layer, head = "base_model.model.body.1", "base_model.model.head.modules_to_save.default"
    trained = {f"{layer}.lora_{part}.default.weight" for part in "AB"} | {f"{head}.weight", f"{head}.bias"}
    trained |= {f"{layer}.base_layer.weight"} if method is fedsub.FLoRA else set()
    assert {*strategy.connected.current} == trained
    assert moved | {f"{layer}.lora_B.default.weight"} == trained  # FLoRA's B begins at zero again


def _context(client: int) -> Context:
    from flwr.app import RecordDict

    return Context(1, 2, {"partition-id": client, "num-partitions": 4}, RecordDict(), {})


def test_a_strategy_can_be_started_again() -> None:
    strategy, first = fedsub.Scaffold(clients_per_node=4), arrays()
    once, again = (to_tensors(strategy.start(grid(), first, 2).arrays) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_settings_of_flowers_start_are_refused() -> None:
    """``lr`` in it replaced the strategy's, and other keys did nothing."""
    strategy, config = fedsub.FedAvg(lr=0.05), ConfigRecord({"lr": 0.1})
    said = "train_config = {'lr': 0.1}: must be empty: the settings are keywords of the strategy, such as lr and "
    with pytest.raises(fedsub.UserError, match=f"^{said}"):
        strategy.start(grid(4), arrays(), 1, train_config=config)
    with pytest.raises(fedsub.UserError, match=f"^evaluate_config{said[12:]}"):
        strategy.start(grid(4), arrays(), 1, 60.0, ConfigRecord(), config)


def test_layers_need_a_model() -> None:
    with pytest.raises(fedsub.UserError, match=r"^model = None: .* give model=$"):
        fedsub.FedPart(clients_per_node=4).start(grid(), arrays(), 1)
    with pytest.raises(fedsub.UserError, match=r"^initial_arrays: 'fc1.weight': no such tensor; model = Sequential"):
        fedsub.FedPart(clients_per_node=4, model=sequential).start(grid(), arrays(), 1)


def numbers(context: Context) -> Any:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(int(context.node_config["partition-id"])))
    return (x[:30], x[:30].sum(1)), (x[30:], x[30:].sum(1))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1))


def test_the_strategy_names_the_task_and_the_app_adds_metrics() -> None:
    largest = lambda output, y: {"largest": float(output.abs().max())}  # noqa: E731
    app = grid(model=linear, data=numbers, metrics=largest)
    found = fedsub.FedAvg(clients_per_node=4, task="regression").start(app, arrays(linear()), 3)
    measured = [found.evaluate_metrics_clientapp[number] for number in (1, 3)]
    assert measured[0].keys() == {f"personal-{name}" for name in ("rmse", "mae", "loss", "largest")}
    assert measured[1]["personal-rmse"] < measured[0]["personal-rmse"]
    tripled = lambda output, y: 3 * TASKS["regression"].loss(output, y)  # noqa: E731
    first, still = arrays(linear()), fedsub.FedAvg(clients_per_node=4, task="regression", local_epochs=0)
    plain, triple = (
        still.start(grid(model=linear, data=numbers, metrics=largest, loss=loss), first, 1).evaluate_metrics_clientapp[
            1
        ]
        for loss in (None, tripled)
    )
    assert triple["personal-loss"] == pytest.approx(3 * plain["personal-loss"])


def test_a_regression_of_large_numbers_trains() -> None:
    """Losses up to the square of the largest score that a client may report are no divergence."""
    far = lambda context: [(x, y + 9e8) for x, y in numbers(context)]  # noqa: E731
    assert dropped({"task": "regression", "lr": 1e-9}, data=far, model=linear, start=linear()) == "[]"


def test_a_loss_of_ones_own_may_be_negative() -> None:
    """As the logarithm of a density is."""
    below = lambda output, y: (output - y).square().mean() - 999  # noqa: E731
    assert dropped({"task": "regression"}, data=numbers, model=linear, start=linear(), loss=below) == "[]"


def test_a_client_that_is_not_evaluated_is_named(caplog: pytest.LogCaptureFixture) -> None:
    app = grid(model=linear, data=numbers, metrics=lambda output, y: {"top-5": 1.0})
    found = fedsub.FedAvg(clients_per_node=4, task="regression").start(app, arrays(linear()), 1)
    assert 1 not in found.evaluate_metrics_clientapp
    assert "client 3 was not evaluated: metric 'personal-top-5' was not asked for" in caplog.text


def test_a_score_out_of_the_tasks_range_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(Largest):
        high = 1.0

        def metrics(self, sums: Any) -> dict[str, float]:
            return super().metrics(sums) | {"worst": 1.5}

    app = grid(task=(task := Wide()), model=linear, data=numbers)
    found = fedsub.FedAvg(clients_per_node=4, task=task).start(app, arrays(linear()), 1)
    assert 1 not in found.evaluate_metrics_clientapp
    assert "client 3 was not evaluated: metric 'personal-worst' = 1.5: must be a number from 0 to 1" in caplog.text


@pytest.mark.parametrize("ours", [True, False])
def test_a_methods_warning_is_said_once(ours: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = fedsub.FedRep(clients_per_node=4, local_epochs=5, model=Net)
    if ours:
        fedsub.start(strategy, grid(), initial_arrays=arrays(), num_rounds=2, run_dir=tmp_path / "app")
    else:
        strategy.start(grid(), arrays(), 2)
    assert caplog.text.count("local-epochs = 5: does nothing with fedrep") == 1


@pytest.mark.parametrize("test", [(X[:0], Y[:0]), TensorDataset(X[:0], Y[:0])])
def test_a_client_without_test_samples_trains(test: Any, tmp_path: Path) -> None:
    """A run's one test set must have samples."""

    def data(context: Context) -> Any:
        train, own = load(context)
        return train, test if context.node_config["partition-id"] == 1 else own

    strategy = fedsub.FedAvg(clients_per_node=4)
    fedsub.start(strategy, grid(data=data), initial_arrays=arrays(), num_rounds=1, run_dir=tmp_path / "app")
    line = read_rounds(tmp_path / "app")[-1]
    assert not line["dropped"]
    assert line["not-evaluated"] == [{"client": 1, "reason": "client failed: UserError: client 1 has no test samples"}]
    with pytest.raises(fedsub.UserError, match=r"^dataset = 'own': no test samples$"):
        fedsub.run({"client-test": "holdout", "run-dir": str(tmp_path / "run")}, model=Net, data=((X, Y), test))


def test_a_task_of_ones_own_is_given_to_both() -> None:
    task, own = Largest(), {"model": linear, "data": numbers}
    found = fedsub.FedAvg(clients_per_node=4, task=task).start(grid(task=task, **own), arrays(linear()), 1)
    assert 0 < found.evaluate_metrics_clientapp[1]["personal-worst"] < 9
    with pytest.raises(fedsub.RunFailed, match="the ClientApp's is 'own:Largest'; give the strategy task= as well"):
        fedsub.FedAvg(clients_per_node=4).start(grid(task=task, **own), arrays(linear()), 1)


def test_collate_makes_the_batches() -> None:
    def rows(context: Context) -> Any:
        (x, y), test = load(context)
        return [{"image": one, "digit": int(label)} for one, label in zip(x, y, strict=True)], test

    def collate(items: list[Any]) -> Any:
        return torch.stack([item["image"] for item in items]), torch.tensor([item["digit"] for item in items])

    initial = arrays()
    plain, collated = (
        fedsub.FedAvg(clients_per_node=4).start(grid(**how), initial, 1).train_metrics_clientapp[1]
        for how in ({}, {"data": rows, "collate": collate})
    )
    assert plain["train-loss"] == collated["train-loss"]


def test_a_loss_of_ones_own() -> None:
    seen: list[int] = []

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return nn.functional.cross_entropy(logits, y, label_smoothing=0.1)

    initial = arrays()
    plain, smooth, again = (
        fedsub.FedAvg(clients_per_node=4).start(grid(loss=chosen), initial, 1).train_metrics_clientapp[1]
        for chosen in (None, loss, None)
    )
    assert seen
    assert plain["train-loss"] == again["train-loss"] != smooth["train-loss"]


def test_a_loss_with_parameters_is_refused() -> None:
    """No step would train them; weights of classes are a buffer."""
    with pytest.raises(fedsub.UserError, match=r"^loss = PReLU: no step trains its parameters; the model must"):
        grid(loss=nn.PReLU())
    assert dropped({}, loss=nn.CrossEntropyLoss(torch.ones(10))) == "[]"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": ((X, Y), (X, Y))}, r"^data = \(\(tensor\(.*: must be a function$"),
        ({"data": None}, "^data = None: must be a function$"),
        ({"optimizer": "adam"}, "^optimizer = 'adam': must be a function$"),
        ({"optimizer": torch.optim.SGD(Net().parameters(), 0.1)}, r"^optimizer = SGD \(.*: must be a function$"),
        ({"metrics": ["f1"]}, r"^metrics = \['f1'\]: must be a function$"),
        ({"model": Net()}, r"^model = Net\(…\): is a network already; must be a class or a function"),
    ],
)
def test_what_is_no_function_is_refused_where_the_app_is_made(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fedsub.UserError, match=said):
        grid(**given)


def test_units_of_a_network_that_is_no_sequential() -> None:
    """The server finds them with in_shape, and the clients with it."""
    with pytest.raises(fedsub.UserError, match=r"^model = 'own': not with .* 'ist': units of a Net are found with"):
        fedsub.IST(clients_per_node=4, model=Net).start(grid(), arrays(), 1)
    strategy = fedsub.IST(clients_per_node=4, model=Net, in_shape=(1, 8, 8))
    found = strategy.start(grid(), arrays(), 1)
    assert strategy.connected.phase.dropped == []
    assert strategy.connected.units[0].size == 16
    assert list(found.arrays) == list(arrays())
    with_other = {"model": Net, "in_shape": (1, 4, 16)}
    assert "in_shape = (1, 4, 16) of the strategy: samples of client 0 have (1, 8, 8)" in dropped(with_other)


@pytest.mark.parametrize("name", ["FedPer", "FedPart", "IST"])
def test_a_shape_that_the_network_cannot_take_is_one_line(name: str) -> None:
    said = r"^in_shape = \(3, 4, 4\): model = Net: cannot take inputs of shape \(3, 4, 4\): RuntimeError: "
    with pytest.raises(fedsub.UserError, match=said):
        getattr(fedsub, name)(clients_per_node=4, model=Net, in_shape=(3, 4, 4)).start(grid(), arrays(), 1)


@pytest.mark.parametrize("in_shape", [(), (1, 8, 8)])
def test_lazy_layers_of_a_strategys_network_are_one_line(in_shape: tuple[int, ...]) -> None:
    strategy = fedsub.FedAvg(clients_per_node=4, model=lambda: nn.Sequential(nn.LazyLinear(10)), in_shape=in_shape)
    with pytest.raises(fedsub.UserError, match=r"^model = Sequential: '0.weight' has no values yet; a factory of lazy"):
        strategy.start(grid(), arrays(), 1)


def test_the_head_of_ones_own_network() -> None:
    """With FedPer the layer ``body.1`` stays with the clients, whose client_app may name it as well."""
    start = arrays()
    found = fedsub.FedPer(clients_per_node=4, model=Net, head="body.1").start(grid(head="body.1"), start, 1)
    same = {n for n, t in to_tensors(found.arrays).items() if torch.equal(t, to_tensors(start)[n])}
    assert {n for n in same if n.startswith(("head", "body.1"))} == {"body.1.weight", "body.1.bias"}
    assert "head = 'head' of client_app: the strategy's is 'body.1'" in dropped({"head": "body.1"}, head="head")
    other, usual = (
        fedsub.MOON(clients_per_node=4, model=Net).start(grid(**how), start, 2) for how in ({"head": "body.1"}, {})
    )
    assert not torch.equal(*(to_tensors(found.arrays)["head.weight"] for found in (other, usual)))
    with pytest.raises(fedsub.UserError, match=r"^head = 'tail': 'tail' is no layer"):
        fedsub.FedPer(model=Net, head="tail").start(grid(), arrays(), 1)


class Backwards(Net):
    """Its head is defined first."""

    def __init__(self) -> None:
        super().__init__()
        body = self.body
        del self.body
        self.body = body


def test_layers_that_run_in_another_order_than_they_are_defined_in() -> None:
    """The server, without a sample's shape, would take the body's last Linear for the head."""
    first, own = arrays(Backwards()), {"model": Backwards}
    assert next(iter(first)) == "head.weight"
    said = "its layers run in another order than they are defined in; give in_shape=(1, 8, 8) to the strategy"
    strategy = fedsub.FedPer(clients_per_node=4, **own)
    with pytest.raises(fedsub.RunFailed, match=re.escape(said)):
        strategy.start(grid(**own), first, 1)
    found = fedsub.FedPer(clients_per_node=4, in_shape=(1, 8, 8), **own).start(grid(**own), first, 2)
    moved = {n for n, t in to_tensors(found.arrays).items() if not torch.equal(t, to_tensors(first)[n])}
    assert {n for n in moved if not n.startswith("body")} == set()
    for head in ("", "head"):
        strategy = fedsub.FedAvg(clients_per_node=4, head=head, **own)  # which does not ask for layers
        strategy.start(grid(**own), first, 1)
        assert strategy.connected.phase.dropped == []


def test_a_head_that_is_not_defined_last_is_named_where_in_shape_cannot_tell_the_samples() -> None:
    """FedPer would keep a layer of the body."""

    class Two(Backwards):
        def forward(self, x: Tensor, again: Tensor) -> Tensor:
            return super().forward(x)

    app = grid(model=Two, data=lambda context: [((x, x), y) for x, y in load(context)])
    said = "its head 'head' runs last and is not defined last; give head='head' to the strategy"
    with pytest.raises(fedsub.RunFailed, match=re.escape(said)):
        fedsub.FedPer(clients_per_node=4, model=Two).start(app, arrays(Two()), 1)
    strategy = fedsub.FedPer(clients_per_node=4, model=Two, head="head")
    strategy.start(app, arrays(Two()), 1)
    assert strategy.connected.phase.dropped == []


class Unused(Net):
    """Its last layer does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def test_a_head_that_does_not_run_is_named() -> None:
    own = {"model": Unused}
    said = r"UserError: head = 'spare': the layer was not run; head= names another one, in_shape= finds the last"
    with pytest.raises(fedsub.RunFailed, match=said):
        fedsub.FedAvg(clients_per_node=4, **own).start(grid(**own), arrays(Unused()), 1)
    for how in ({"in_shape": (1, 8, 8)}, {"head": "head"}):
        strategy = fedsub.FedAvg(clients_per_node=4, **own, **how)
        strategy.start(grid(**own), arrays(Unused()), 1)
        assert strategy.connected.phase.dropped == []


def test_the_clock_of_devices_is_in_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "dev.toml").write_text(
        "[[class]]\nname = 'phone'\nshare = 1\nflops-per-second = 1e6\ndown-mbps = 1\nup-mbps = 1\nwatts = 2\n"
    )
    strategy = fedsub.FedAvg(clients_per_node=4, devices=str(tmp_path / "dev.toml"))
    (metrics,) = strategy.start(grid(), arrays(), 1).train_metrics_clientapp.values()
    assert metrics["joules"] == pytest.approx(4 * 2 * metrics["device-seconds"], rel=0.2)  # four devices of 2 watts


@pytest.mark.parametrize(
    "key", [{"lr_schedule": "plateau"}, {"max_flops": 1e9}, {"stop_at_score": 9.0}, {"track": "wandb"}]
)
def test_flowers_loop_refuses_the_keys_of_our_own(key: dict[str, Any]) -> None:
    name, value = next((name.replace("_", "-"), value) for name, value in key.items())
    with pytest.raises(fedsub.UserError, match=rf"^{name} = {value!r}: needs fedsub.start; Flower's own loop does not"):
        fedsub.FedAvg(clients_per_node=4, evaluate="global", **key).start(grid(), arrays(), 1)
    fedsub.FedAvg(clients_per_node=4, checkpoint_every=1).start(grid(), arrays(), 1)  # the default changes nothing


@pytest.mark.parametrize(("given", "timeout", "waited"), [({}, 9.0, 9.0), ({"round_timeout": 7.0}, 9.0, 7.0)])
def test_flowers_loop_waits_for_replies_as_long_as_both_timeouts_allow(
    given: dict[str, Any], timeout: float, waited: float
) -> None:
    """The keyword did nothing."""
    seen: list[Any] = []

    class Watched(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            seen.append(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    strategy = fedsub.FedAvg(clients_per_node=4, **given)
    strategy.start(Watched(fedsub.client_app(model=Net, data=load), {}), arrays(), 1, timeout)
    assert seen == [waited] * 2  # train, evaluate


def test_a_plateau_needs_the_scores_of_fedsubs_start(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients_per_node": 4, "lr_schedule": "plateau", "lr_patience": 0, "evaluate": "global"}
    for key in (keys, *({name: 60.0, "evaluate": "global"} for name in ("stop_at_score", "target_score"))):
        with pytest.raises(fedsub.UserError, match=r": needs the score global-accuracy, which evaluate_fn measures$"):
            fedsub.start(fedsub.FedAvg(**{"clients_per_node": 4} | key), grid(), initial_arrays=arrays())
    said = "^evaluate_fn: returned accuracy; lr-schedule needs 'global-accuracy'$"
    misnamed: dict[str, Any] = {"initial_arrays": arrays(), "evaluate_fn": lambda *_: {"accuracy": 50.0}}
    with pytest.raises(fedsub.UserError, match=said):
        fedsub.start(fedsub.FedAvg(**keys), grid(), **misnamed, run_dir=tmp_path / "other")
    same, folder = {"global-accuracy": 50.0}, tmp_path / "run"
    first = {"initial_arrays": arrays(), "num_rounds": 3, "run_dir": folder}
    fedsub.start(fedsub.FedAvg(lr=0.1, **keys), grid(), **first, evaluate_fn=lambda *_: same)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line.get("lr") for line in lines] == [None, 0.1, pytest.approx(0.01), pytest.approx(0.001)]


def test_an_optimizer_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    """Adam as torch has it is the Adam of the key."""
    start, adam = arrays(), lambda parameters, lr: torch.optim.Adam(parameters, lr, fused=True)
    ours = fedsub.FedAvg(clients_per_node=4, optimizer="adam", lr=0.01).start(grid(), start, 2)
    own = fedsub.FedAvg(clients_per_node=4, lr=0.01).start(grid(optimizer=adam), start, 2)
    assert all(torch.equal(t, to_tensors(ours.arrays)[n]) for n, t in to_tensors(own.arrays).items())
    for key, value in {"momentum": 0.9, "weight_decay": 0.1, "optimizer": "rmsprop"}.items():
        said = f"{key.replace('_', '-')} = {value!r}: must be "
        assert said in dropped({key: value}, optimizer=adam)
    with pytest.raises(fedsub.RunFailed):
        fedsub.FedAvg(clients_per_node=4).start(grid(optimizer=lambda parameters, lr: None), start, 1)
    assert "returned a NoneType, must be a torch.optim.Optimizer" in caplog.text
    dropped({}, optimizer=torch.optim.LBFGS)
    assert "LBFGS.step: missing a required argument: 'closure'; allowed are optimizers that need no clos" in caplog.text
    other = Net()
    dropped({}, optimizer=lambda parameters, lr: torch.optim.SGD(other.parameters(), lr))
    assert "optimizer= of client_app: moves other tensors than the parameters that it was given" in caplog.text
    said = dropped({}, fedsub.Scaffold, optimizer=adam)
    assert "optimizer= of client_app: not with method = 'scaffold', which computes with SGD's steps" in said


@pytest.mark.parametrize("method", ["apfl", "fedpm"])
def test_an_optimizer_of_ones_own_moves_what_a_method_trains_beside_the_network(method: str) -> None:
    start, adam = arrays(sequential()), lambda parameters, lr: torch.optim.Adam(parameters, lr, fused=True)
    keys: dict[str, Any] = {"clients_per_node": 4, "model": sequential, "lr": 0.01}
    ours = getattr(fedsub, title(method))(optimizer="adam", **keys).start(grid(model=sequential), start, 2)
    own = getattr(fedsub, title(method))(**keys).start(grid(model=sequential, optimizer=adam), start, 2)
    assert all(torch.equal(t, to_tensors(ours.arrays)[n]) for n, t in to_tensors(own.arrays).items())
    assert ours.evaluate_metrics_clientapp[2] == own.evaluate_metrics_clientapp[2]


def test_positions_that_a_mask_holds_do_not_decay() -> None:
    """FedSelect, which refuses weight-decay for it: each position is trained in one of the two passes of a round."""
    decay = lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=1.0)  # noqa: E731
    first, still = arrays(sequential()), lambda output, y: output.sum() * 0
    strategy = fedsub.FedSelect(clients_per_node=4, model=sequential, local_epochs=1, lr=0.1, alpha=0.5)
    found = strategy.start(grid(model=sequential, optimizer=decay, loss=still), first, 2)
    left = [to_tensors(found.arrays)[n] / t for n, t in to_tensors(first).items()]  # 100 samples: four steps a round
    assert min(float(ratio.min()) for ratio in left) == pytest.approx(0.9**8)


@pytest.mark.parametrize(("bound", "said"), [(99, "num-examples = 100: must be an integer from 1 to 99"), (100, "")])
def test_samples_beyond_the_bound_are_refused(bound: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(fedsub.RunFailed) if said else nullcontext():
        fedsub.FedAvg(clients_per_node=4, max_examples=bound).start(grid(), arrays(), 1)
    assert said in caplog.text
    assert ("dropped client" in caplog.text) == bool(said)


def test_an_output_with_logits_is_taken_for_its_logits() -> None:
    class Answer(Net):
        def forward(self, x: Tensor) -> Tensor:
            return {"logits": super().forward(x)}

    assert dropped({}, model=Answer) == "[]"


# --- our loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.run
def test_start_with_checkpoints_goes_on(tmp_path: Path) -> None:
    first = arrays()
    measured: Callable[..., Any] = lambda number, found: {"global-accuracy": float(number)}  # noqa: E731
    keys = {"initial_arrays": first, "evaluate_fn": measured}
    whole = fedsub.start(fedsub.FedSelect(clients_per_node=4), grid(), num_rounds=3, run_dir=tmp_path / "whole", **keys)
    assert whole["final-global-accuracy"] == 3.0
    fedsub.start(fedsub.FedSelect(clients_per_node=4), grid(), num_rounds=2, run_dir=tmp_path / "part", **keys)
    other = keys | {"initial_arrays": arrays(Net())}  # it goes on from its own
    with pytest.raises(fedsub.UserError, match="exists and is not empty"):
        fedsub.start(fedsub.FedSelect(clients_per_node=4), grid(), num_rounds=3, run_dir=tmp_path / "part", **other)
    again = fedsub.FedSelect(clients_per_node=4)
    fedsub.start(again, grid(), num_rounds=3, run_dir=tmp_path / "part", resume=True, **other)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert models[0] == models[1]
    (tmp_path / "part/initial.safetensors").write_bytes(b"damaged")
    with pytest.raises(fedsub.UserError, match=r"part/initial.safetensors: "):
        fedsub.start(again, grid(), num_rounds=4, run_dir=tmp_path / "part", resume=True, **other)
    with pytest.raises(fedsub.UserError, match=r"^lr = 0.1: the run to resume in .* has 0.05$"):
        fedsub.start(
            fedsub.FedSelect(clients_per_node=4, lr=0.1), grid(), run_dir=tmp_path / "part", resume=True, **keys
        )


def test_a_failure_says_how_start_goes_on(tmp_path: Path) -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        raise MemoryError

    one = lambda context: ((X, Y), (X, Y))  # noqa: E731
    for name, how in (("run", {"loss": loss, "data": one}), ("data", {"data": lambda _: loss(X, Y)})):
        said = rf"`fedsub.start\(…, run_dir='.*/{name}', resume=True\)` goes on$"
        with pytest.raises(fedsub.RunFailed, match=said):
            fedsub.start(fedsub.FedAvg(), grid(**how), initial_arrays=arrays(), run_dir=tmp_path / name)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"acc": np.float32(3.5)}, ""),
        ({"acc": torch.tensor(3.5)}, ""),
        (None, ""),
        ({"acc": "high"}, r"^evaluate_fn: returned .*; must be numbers by name$"),
        (3.5, r"^evaluate_fn: returned 3.5; must be numbers by name$"),
        ({"round": 7}, r"^evaluate_fn: returned 'round', which the round's line has of its own; name it otherwise$"),
        ({"train-loss": 7}, r"^evaluate_fn: returned 'train-loss', which the round's line has of its own; name it"),
        (
            {"personal-accuracy": 7},
            r"^evaluate_fn: returned 'personal-accuracy', which the round's line has of its own",
        ),
    ],
)
def test_what_evaluate_fn_returns_is_numbers(found: Any, said: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"initial_arrays": arrays(), "num_rounds": 1, "run_dir": tmp_path / "run"}
    strategy = fedsub.FedAvg(clients_per_node=4)
    if said:
        with pytest.raises(fedsub.UserError, match=said):
            fedsub.start(strategy, grid(), **how, evaluate_fn=lambda *_: found)
        return

    def measured(server_round: int, whole: ArrayRecord) -> Any:
        assert [*whole] == [*how["initial_arrays"]]  # with the integer buffer
        return found

    fedsub.start(strategy, grid(), **how, evaluate_fn=measured)
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert [line.get("acc") for line in lines] == [3.5 if found else None] * 2


@pytest.mark.parametrize("start", [fedsub.start, fedsub.FedAvg.start])
def test_a_state_dict_is_no_array_record(start: Callable[..., Any], tmp_path: Path) -> None:
    """Flower's loop ended in a TypeError of its own log."""
    run = {"run_dir": tmp_path / "run"} if start is fedsub.start else {}
    with pytest.raises(fedsub.UserError, match=r"^initial_arrays = OrderedDict: must be an ArrayRecord, such as Arr"):
        start(fedsub.FedAvg(), grid(), initial_arrays=Net().state_dict(), **run)
    assert not [*tmp_path.iterdir()]


def test_wrong_arrays_leave_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = arrays(nn.Linear(2, 2))
    with pytest.raises(fedsub.UserError, match=r"^initial_arrays: "):
        fedsub.start(fedsub.FedAvg(model=Net), grid(), initial_arrays=wrong, run_dir=tmp_path / "run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(fedsub.UserError, match=r"^track = 'wandb': needs its package; "):
        fedsub.start(fedsub.FedAvg(track="wandb"), grid(), initial_arrays=arrays(), run_dir=tmp_path / "run")
    with pytest.raises(fedsub.UserError, match=r"^strategy = FedAvg: must be one of fedsub's, such as fedsub.FedAvg"):
        fedsub.start(FedAvg(), grid(), initial_arrays=arrays())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


# --- data and networks ------------------------------------------------------------------------------------------------


def dropped(keywords: dict[str, Any], kind: Any = None, start: nn.Module | None = None, **how: Any) -> str:
    """Why the client of a node is dropped, or "[]"."""
    strategy = (kind or fedsub.FedAvg)(clients_per_node=4, **keywords)
    with suppress(fedsub.RunFailed):
        strategy.start(grid(**how), arrays(start), 1)
    return str(strategy.connected.phase.dropped)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((X, Y), r"^train = a Tensor: must be \(x, y\)"),
        (((X, Y), "mnist"), "^test = 'mnist': must be .*map-style data set"),
        (((X.byte(), Y), (X, Y)), "^train: x of dtype torch.uint8: must be floating-point, or int64 or bool"),
        (((X, Y.float()), (X, Y)), r"^train: y of shape \(6,\), torch.float32: must be \[n\], integers"),
        (((X, Y + 9), (X, Y)), "^train: label 10: must be 0 to 9, the network has 10 outputs$"),
        (((X, Y), (X, Y - 1)), "^test: label -1: must be 0 to 9"),
        (((X, Y), (X[:, :, :4], Y)), r"^test: samples of shape \(1, 4, 8\): the training samples' is \(1, 8, 8\)$"),
        (((X[:, :, :4], Y), (X[:, :, :4], Y)), r"^model = Net: cannot take inputs of shape \(1, 4, 8\): "),
        (7, r"^data = 7: must be \(train, test\)"),
    ],
)
def test_data_that_do_not_fit_are_one_line(data: Any, said: str) -> None:
    with pytest.raises(fedsub.UserError, match=said) as error:
        Problem.own(Net, data, resolve({}))
    assert "\n" not in str(error.value)


def test_a_torch_dataset_is_as_its_tensors() -> None:
    lazily = own_dataset((TensorDataset(X, Y), TensorDataset(X, Y)), TASKS["classification"])
    assert torch.equal(lazily.train_x[:], X)
    assert torch.equal(lazily.train_y, Y)
    assert lazily.in_shape == (1, 8, 8)


def test_a_network_that_is_none_is_one_line() -> None:
    data = ((X, Y), (X, Y))
    wanted = r"^model = <class '.*Linear'>: missing a required argument: 'in_features'; must be a class or a function"
    with pytest.raises(fedsub.UserError, match=wanted):
        Problem.own(nn.Linear, data, resolve({}))
    with pytest.raises(fedsub.UserError, match=r"^model = Linear\(…\): is a network already; must be a class or a"):
        Problem.own(nn.Linear(64, 10), data, resolve({}))
    with pytest.raises(fedsub.UserError, match=r"^model = <class 'dict'>: returned a dict, must be a torch.nn.Module$"):
        Problem.own(dict, data, resolve({}))  # type: ignore[arg-type]
    with pytest.raises(fedsub.UserError, match=r"^model = Flatten: returns \(2, 1, 64\) for two samples, must be"):
        Problem.own(lambda: nn.Flatten(2), data, resolve({}))
    same, body = Net(), nn.Linear(64, 10)
    for one in (lambda: same, lambda: nn.Sequential(nn.Flatten(), body)):
        with pytest.raises(
            fedsub.UserError, match=r"^model = '<lambda>': '.*weight' is one tensor in all networks that"
        ):
            Problem.own(one, data, resolve({}))  # its training would move the initial model
    Problem.own(lambda: nn.Sequential(nn.Flatten(), body, nn.Linear(10, 10)), data, resolve({"trainable": "head"}))
    with pytest.raises(fedsub.UserError, match=r"^ist.width: must be 0 with a network of your own"):
        Problem.own(Net, data, resolve({"method": "ist", "ist.width": 10, "model": "feature-mlp"}))


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda net: net.requires_grad_(False), "'<lambda>': has no parameters to train; allowed are floating"),
        (lambda net: net.to(torch.complex64), "Net: '.*weight' is torch.complex64; allowed is torch.float32"),
    ],
)
def test_a_network_without_anything_to_train_is_refused(change: Any, wanted: str) -> None:
    with pytest.raises(fedsub.UserError, match=f"^model = {wanted}"):
        Problem.own(lambda: change(Net()), ((X, Y), (X, Y)), resolve({})).check_start()


def test_a_complex_parameter_beside_others_is_refused() -> None:
    """Else no step moves it, or with an optimizer of one's own the process's next client begins with it."""

    class Wave(Net):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.ones(10, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.wave.real

    with pytest.raises(fedsub.UserError, match=r"^model = 'Wave': 'wave' is torch.complex64; allowed is torch.float32"):
        Problem.own(Wave, ((X, Y), (X, Y)), resolve({})).check_start()


def test_a_client_whose_data_fail_is_dropped() -> None:
    def broken(context: Context) -> Any:
        raise FileNotFoundError("/data/ward-3.csv")

    said = dropped({}, data=broken)
    assert "data of client 0: FileNotFoundError: /data/ward-3.csv" in said


def test_data_are_asked_for_with_the_nodes_context_and_the_clients_number() -> None:
    seen: list[Context] = []
    app = grid(data=lambda context: (seen.append(context), load(context))[1])
    app.contexts[2].run_config["name"] = "x"
    fedsub.FedAvg(clients_per_node=4).start(app, arrays(), 1)
    assert [context.node_config["partition-id"] for context in seen] == [0, 1, 2, 3]
    assert {(context.node_id, context.run_config["name"]) for context in seen} == {(2, "x")}


def test_a_nodes_own_file_is_one_such_function(tmp_path: Path) -> None:
    """``private-data`` of its configuration, which no other node sees."""
    x, y = np.arange(20 * 64, dtype=np.uint8).reshape(20, 8, 8), np.arange(20) % 10
    np.savez(tmp_path / "ward.npz", train_images=x, train_labels=y, test_images=x[:10], test_labels=y[:10])
    own = grid(data=fedsub.private_data)
    for context in own.contexts.values():
        context.node_config["private-data"] = str(tmp_path / "ward.npz")
        assert [len(y) for _, y in fedsub.private_data(context)] == [20, 10]
    strategy = fedsub.FedAvg()
    strategy.start(own, arrays(), 1)
    assert strategy.connected.phase.dropped == []
    assert "private-data = '.': not there, or not an .npz file" in dropped({}, data=fedsub.private_data)


@pytest.mark.run
@pytest.mark.parametrize("method", ["fedpart", "fedpac", "fedpews", "heterofl", "ist", "moon", "subfedavg"])
def test_run_takes_a_method_that_asks_for_layers_or_units(method: str) -> None:
    keys = {key.replace("__", ".").replace("_", "-"): value for key, value in METHOD_KEYS[method].items()}
    data = (DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y)
    record = fedsub.run({**keys, "method": method, "num-rounds": 1}, model=Net, data=data)
    assert (record.lines[1]["status"], record.lines[1]["dropped"]) == ("ok", [])


@pytest.mark.run
@pytest.mark.parametrize("workers", [1, 2])
def test_run_with_a_network_and_data(workers: int, tmp_path: Path) -> None:
    """The same bits as the names of the same network and data."""
    keys = {"method": "fedavg", "num-rounds": 2, "num-clients": 4, "batch-size": 64}
    data = (DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y)
    own = fedsub.run({**keys, "run-dir": str(tmp_path / "own")}, workers, model=wide, data=data)
    named = fedsub.run({**RUN, **keys, "train-per-class": 40, "test-per-class": 10, "run-dir": str(tmp_path / "named")})
    assert (own.folder / "model.safetensors").read_bytes() == (named.folder / "model.safetensors").read_bytes()
    assert own.lines[-1]["global-accuracy"] == named.lines[-1]["global-accuracy"]
    assert own.settings["dataset"] == "own"


def test_a_run_of_objects_says_what_it_lacks(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"num-clients": 2, "num-rounds": 1, "partition": "iid", "run-dir": str(tmp_path / "run")}
    data = (DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y)
    record = fedsub.run(keys, model=wide, data=data)
    again = {"run-dir": str(record.folder), "resume": True, "num-rounds": 2}
    for use in (record.model, lambda: fedsub.run(again)):
        with pytest.raises(fedsub.UserError, match=r"^dataset = 'own': an object of .*; resume with model= and data="):
            use()

    def other() -> nn.Module:
        return mlp(64, 10, [100], batch_norm=True)

    other.__name__ = "wide"
    with pytest.raises(fedsub.UserError, match=r"its model is another network's: 'fc1.weight' has shape \(1000"):
        fedsub.run(again, model=other, data=data)


@pytest.mark.run
@pytest.mark.parametrize("objects", ["model", "task", "method"])
def test_a_run_of_objects_says_how_it_is_resumed(objects: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has neither network nor data, nor a task or method of the program."""

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "train", stopped)
    about, data = METHODS["fedavg"], ((DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y))
    fedsub.register("half-way", fedsub.Method("a test", MethodSettings, about.strategy, about.client))
    keys: dict[str, Any] = {"num-clients": 2, "partition": "iid", "run-dir": str(tmp_path / "run"), "method": "fedavg"}
    named = {"model": "feature-mlp", "dataset": "diabetes" if objects == "task" else "digits"}
    keys |= named if objects != "model" else {}
    keys |= {"method": "half-way"} if objects == "method" else {}
    how: dict[str, Any] = {"task": {"task": Largest()}, "model": {"model": wide, "data": data}}.get(objects, {})
    try:
        with pytest.raises(
            KeyboardInterrupt, match=r"^`fedsub.run\({'run-dir': '.*/run', 'resume': True}, …\)` goes on$"
        ):
            fedsub.run(keys, **how)
    finally:
        forget("half-way")


@pytest.mark.run
def test_runs_in_threads_are_as_one_after_the_other(tmp_path: Path) -> None:
    """Dropout and initial weights are drawn from the one global generator of the process."""

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    data = (DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y)
    keys: dict[str, Any] = {"num-clients": 4, "num-rounds": 4, "partition": "iid", "batch-size": 4}

    def model(name: str) -> bytes:
        record = fedsub.run({**keys, "run-dir": str(tmp_path / name)}, model=dropping, data=data)
        return (record.folder / "model.safetensors").read_bytes()

    with ThreadPoolExecutor() as pool:
        assert len({model("alone"), *pool.map(model, ("a", "b"))}) == 1


@pytest.mark.run
@pytest.mark.run
def test_a_tensor_may_be_empty(tmp_path: Path) -> None:
    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.zeros(0))

    keys = {"method": "fedavg", "num-clients": 2, "num-rounds": 1, "partition": "iid", "run-dir": str(tmp_path / "run")}
    record = fedsub.run(keys, model=Empty, data=((X, Y), (X, Y)))
    assert load_file(record.folder / "model.safetensors")["weights"].shape == (0,)


def test_a_parameter_may_have_any_name(tmp_path: Path) -> None:
    """FedPeWS's replies have a mask and probabilities of their own."""

    def losses(name: str) -> list[float]:
        class Scaled(Net):
            def __init__(self) -> None:
                super().__init__()
                self.register_parameter(name, nn.Parameter(torch.ones(10)))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * getattr(self, name)

        keys = {"method": "fedpews", "fedpews.others": "mean", "num-clients": 4, "num-rounds": 2, "partition": "iid"}
        record = fedsub.run({**keys, "run-dir": str(tmp_path / name)}, model=Scaled, data=data)
        return [line["train-loss"] for line in record.lines[1:]]

    data = (DATA.train_x[:], DATA.train_y), (DATA.test_x[:], DATA.test_y)
    assert losses("scale") == losses("mask") == losses("theta")


@pytest.mark.parametrize(
    ("change", "value", "usual"),
    [(torch.set_default_device, "meta", "cpu"), (torch.set_default_dtype, torch.float64, torch.float32)],
)
def test_defaults_of_torch_that_a_program_has_changed(change: Any, value: Any, usual: Any) -> None:
    """Generators and masks are made on the CPU, numbers are float32: torch's errors would not name the reason."""
    try:
        change(value)
        said = rf"torch\.{change.__name__}: {value}: must be .*; the key device names a GPU"
        with pytest.raises(fedsub.UserError, match=f"^{said}$"):
            fedsub.run({}, model=Net, data=((X, Y), (X, Y)))
        if value != "meta":  # in a test the server is in the same process
            change(usual)
            assert "torch.set_default_dtype: torch.float64: must be" in dropped({}, data=lambda _: change(value))
    finally:
        change(usual)


def test_run_wants_both() -> None:
    with pytest.raises(fedsub.UserError, match=r"^model=: model= and data= go together$"):
        fedsub.run({}, model=Net)
    for key, value in (("dataset", "mnist"), ("train-per-class", 5), ("model-options", "width=3")):
        with pytest.raises(fedsub.UserError, match=f"^{key} = {value!r}: not with model= and data=$"):
            fedsub.run({key: value}, model=Net, data=((X, Y), (X, Y)))


# --- the package ------------------------------------------------------------------------------------------------------


def test_the_import_loads_neither_torch_nor_flower() -> None:
    code = "import fedsub, sys; print({'torch', 'flwr', 'numpy'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_secure_aggregation_in_an_app_of_ones_own(weighting: str) -> None:
    """The phases after a training go over the app's own grid; the mean is the plain one but for its rounding."""
    first = arrays()
    plain, secure = (
        fedsub.FedAvg(lr=0.05, weighting=weighting, secure_aggregation=on)
        .start(grid(4), first, num_rounds=1)
        .arrays.to_torch_state_dict()
        for on in (False, True)
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(secure[name], tensor, rtol=1e-5, atol=1e-6)
