"""Clients trained together: the same as one after the other, up to rounding."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import rounds
from safetensors.torch import load_file

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.data import Samples
from fedsub_app.federation.protocol import Update
from fedsub_app.models import Network, Output
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.training import stacked
from fedsub_app.training.client import Training
from fedsub_app.training.objectives import Prox
from fedsub_app.training.workplace import Workplace, workplace

Run = Callable[..., Any]
MLP: dict[str, Value] = {"dataset": "synthetic-3k", "model": "fedpews-mlp", "method": "fedavg", "num-clients": 4}


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def in_float64(**keys: Value) -> Workplace:
    """A workplace of its own whose network and samples are float64."""
    place = workplace(resolve(MLP | {name.replace("_", "-"): value for name, value in keys.items()}))
    module = place.network.module.double()
    workplace.cache_clear()
    x, test = Samples(place.train_x[:].double()), Samples(place.test_x[:].double())
    problem = replace(place.problem, data=replace(place.problem.data, train_x=x, test_x=test))
    return replace(place, network=Network(module), problem=problem)


UNEVEN: dict[str, Value] = {"partition": "dirichlet", "dirichlet_alpha": 0.3, "num_clients": 5, "local_epochs": 2}
BATCH_NORM: dict[str, Value] = {"dataset": "digits", "model": "mnist-cnn-bn", "image_size": 28, "train_per_class": 4}


@pytest.mark.run  # all of them as long as one
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    "keys",
    [
        {"partition": "iid", "momentum": 0.9, "weight_decay": 1e-3, "local_epochs": 2},
        {"partition": "iid", "optimizer": "adam", "lr": 0.01},
        {"partition": "iid", "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        {"partition": "iid", "optimizer": "rmsprop", "lr": 0.001, "momentum": 0.5},
        {"partition": "iid", "local_steps": 3, "batch_size": 40, "lr_decay_at": "2"},
        {"partition": "iid", "dataset": "digits", "model": "fedpews-cnn", "train_per_class": 8},
        {"partition": "iid", **BATCH_NORM},
        {"partition": "iid", **BATCH_NORM, "optimizer": "adam", "lr": 0.003, "local_epochs": 3, "batch_size": 8},
        UNEVEN | BATCH_NORM,
        UNEVEN | {"optimizer": "adam"},
        *(
            UNEVEN | {"method": method, "momentum": 0.5}
            for method in ("fedavg", "fedprox", "moon", "fedrep", "ist", "ditto", "fednova", "feddst", "heterofl")
        ),
        UNEVEN | {"method": "scaffold"},
        UNEVEN | {"method": "subfedavg", "validation_fraction": 0.1, "subfedavg.score": 0.0},
        UNEVEN | {"method": "fedpart", "optimizer": "adam", "fedpart.full-rounds": 1},
    ],
)
def test_together_or_one_after_the_other_is_the_same_in_float64(
    keys: dict[str, Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = in_float64(**keys)
    method, made = METHODS[place.settings.method], list[int]()
    strategy = method.strategy(place.settings, place.network.module)
    strategy.round = 2
    tasks = [strategy.task(number) for number in range(place.settings.num_clients)]
    train = stacked._train
    monkeypatch.setattr(stacked, "_train", lambda alike: (made.append(len(alike)), train(alike))[1])

    def runs() -> list[Callable[[], Update]]:
        clients = [method.client(place, number, 2, {}) for number in range(len(tasks))]
        return [partial(client.run_training, t.tensors, t.config) for client, t in zip(clients, tasks, strict=True)]

    apart, together = [run() for run in runs()], stacked.together(runs())
    assert (max(made, default=0) > 1) == (place.settings.method != "heterofl")
    for one, other in zip(apart, together, strict=True):
        assert (one.client, one.num_examples) == (other.client, other.num_examples)
        assert one.tensors.keys() == other.tensors.keys()
        for name in one.tensors:
            torch.testing.assert_close(other.tensors[name], one.tensors[name], rtol=1e-9, atol=1e-9)
        costs = one.metrics.keys() - {"compute-seconds"}
        assert costs == other.metrics.keys() - {"compute-seconds"}
        assert {k: other.metrics[k] for k in costs} == pytest.approx({k: one.metrics[k] for k in costs}, rel=1e-5)


def test_a_loss_that_a_client_overrides_is_neither_stacked_nor_compiled() -> None:
    """Both took the task's loss instead."""

    class Twice(METHODS["fedavg"].client):  # type: ignore[misc]
        def loss(self, output: Output, y: torch.Tensor) -> torch.Tensor:
            return 2 * super().loss(output, y)

    place = workplace(resolve(MLP | {"partition": "iid", "compile-steps": True}))
    clients = [Twice(place, number % 4, 1, {}) for number in range(8)]
    assert not Training(clients[0]).compiled
    runs = [partial(client.run_training, place.initial(), {}) for client in clients]
    apart, together = [run() for run in runs[:4]], stacked.together(runs[4:])
    assert [other.metrics["train-loss"] for other in together] == [one.metrics["train-loss"] for one in apart]


def test_clients_whose_steps_are_not_alike_train_apart() -> None:
    place = workplace(resolve(MLP | {"partition": "iid"}))
    client = METHODS["fedavg"].client(place, 0, 1, {})
    weights = {name: tensor for name, tensor in place.network.parameters.items() if name.endswith("weight")}

    def kind(**how: Any) -> object:
        return stacked._kind(stacked._Waiting(Training(client, **how), [torch.arange(4)], {}))

    assert kind() == kind()
    ways: list[Any] = [{"lr": 9.0}, {"names": weights}, {"batch_statistics": True}, {"shift": weights}]
    ways += [{"keep": {name: tensor > 0 for name, tensor in weights.items()}}, {"objective": Prox({}, 1.0)}]
    assert len({kind(), *(kind(**how) for how in ways)}) == 7


def test_a_run_of_unequal_clients_agrees_with_the_plain_one(run_local: Run) -> None:
    keys: dict[str, Value] = {"method": "ist", "num_clients": 9, "partition": "dirichlet", "dirichlet_alpha": 0.5}
    _, plain = run_local("plain", **keys)
    _, stacked = run_local("stacked", **keys, stack_clients=True)
    here, there = (load_file(folder / "model.safetensors") for folder in (plain, stacked))
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-4, atol=1e-5)
    costs = ("flops", "published-flops", "clients", "formula-bytes-up")
    for one, other in zip(rounds(plain)[1:], rounds(stacked)[1:], strict=True):
        assert not other["dropped"]
        assert [other[key] for key in costs] == [one[key] for key in costs]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"method": "fedavg", "augment": "crop-flip", "model": "lenet5", "image_size": 16}, "augment = crop-flip"),
        (
            {"method": "fedavg", "model": "lenet5", "image_size": 16, "trainable": "lora", "lora_dropout": 0.3},
            "model = lenet5: RuntimeError: vmap: called random operation",
        ),
        (
            {"method": "fedavg", "dataset": "python-sources", "domains": "json, email", "task": "next-token"}
            | {"partition": "source", "num_clients": 2, "model": "examples/text/net.py:Writer"},
            "task = next-token: its loss is the mean over tokens",
        ),
    ],
)
def test_what_cannot_be_stacked_is_refused(run_local: Run, keys: dict[str, Value], said: str) -> None:
    with pytest.raises(UserError, match=f"stack-clients = true: .*{said}"):
        run_local("run", stack_clients=True, **keys)


def test_clients_that_fail_together_say_why(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(stacked._Stack, "train", broken)
    with pytest.raises(Exception, match="client failed: RuntimeError: out of memory, say"):
        run_local("run", method="fedavg", stack_clients=True, partition="iid", num_clients=4)


def test_the_global_generator_is_left_as_it_was(run_local: Run) -> None:
    state = torch.get_rng_state()
    run_local("run", method="fedavg", num_clients=5, partition="iid", stack_clients=True)
    assert torch.equal(torch.get_rng_state(), state)
