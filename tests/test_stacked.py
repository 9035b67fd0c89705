"""Clients trained together: the same as one after the other, up to rounding."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import rounds
from safetensors.torch import load_file

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Tensors
from fedsub_app.config import resolve
from fedsub_app.data import Samples
from fedsub_app.models import Network
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
    return replace(place, network=Network(module), train_x=x, test_x=test)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    "keys",
    [
        {"partition": "iid", "momentum": 0.9, "weight_decay": 1e-3, "local_epochs": 2},
        {"partition": "iid", "optimizer": "adam", "lr": 0.01},
        {"partition": "iid", "local_steps": 3, "batch_size": 40, "lr_decay_at": "2"},
        {"partition": "iid", "dataset": "digits", "model": "fedpews-cnn", "train_per_class": 8},
    ],
)
def test_together_or_one_after_the_other_is_the_same_in_float64(keys: dict[str, Value]) -> None:
    place = in_float64(**keys)
    start = {name: tensor.clone() for name, tensor in place.network.tensors.items()}
    sizes = [len(place.partition.train[number]) for number in range(4)]
    alike = [number for number in range(4) if sizes[number] == sizes[0]]
    assert len(alike) > 1

    def client(number: int) -> Client:
        return Client(place, number, 2, {})

    sent: list[Tensors] = [{name: tensor + 0.01 * number for name, tensor in start.items()} for number in alike]
    apart = [client(number).run_training(one, {}) for number, one in zip(alike, sent, strict=True)]
    together = Client.run_together([client(number) for number in alike], sent)
    for one, other, before in zip(apart, together, sent, strict=True):
        assert one.client == other.client
        assert one.num_examples == other.num_examples
        for name in start:
            torch.testing.assert_close(other.tensors[name], one.tensors[name], rtol=1e-9, atol=1e-11)
            assert not torch.equal(one.tensors[name], before[name])
        costs = one.metrics.keys() - {"compute-seconds"}
        assert costs == other.metrics.keys() - {"compute-seconds"}
        assert {k: other.metrics[k] for k in costs} == pytest.approx({k: one.metrics[k] for k in costs}, rel=1e-5)


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
        ({"method": "fedpac"}, "clients of fedpac train in a way of their own; allowed with fedavg, "),
        ({"method": "fedprox"}, "not with objective = prox"),
        ({"method": "fedavg", "model": "lenet5-bn", "image_size": 16}, "not with model = lenet5-bn: has BatchNorm"),
        ({"method": "fedavg", "augment": "crop-flip", "model": "lenet5", "image_size": 16}, "augment = crop-flip"),
        ({"method": "fedavg", "attack": "scale", "attackers": 1}, "not with attack = scale"),
    ],
)
def test_what_cannot_be_stacked_is_refused(run_local: Run, keys: dict[str, Value], said: str) -> None:
    with pytest.raises(UserError, match=f"stack-clients = true: .*{said}"):
        run_local("run", stack_clients=True, **keys)


def test_clients_that_fail_together_say_why(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr("client_apps.base.fit_together", broken)
    with pytest.raises(Exception, match="client failed: RuntimeError: out of memory, say"):
        run_local("run", method="fedavg", stack_clients=True)
