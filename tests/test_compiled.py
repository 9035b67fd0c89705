"""Compiled steps: the same numbers as eager ones up to rounding. On a CPU they are no graphs; none here needs a GPU."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from helpers import rounds
from safetensors.torch import load_file

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.models import Network
from fedsub_app.training.workplace import workplace

Run = Callable[..., Any]
CONVOLUTIONS: dict[str, Value] = {"image_size": 16, "train_per_class": 10, "test_per_class": 5, "batch_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "scaffold", "model": "feature-mlp"},
        {"method": "fedprox", "model": "lenet5-bn"},
        {"method": "fedavg", "model": "lenet5", "optimizer": "adam", "lr": 0.002},
        {"method": "fedavg", "model": "bench.networks:vit"},
    ],
)
def test_compiled_steps_agree_with_eager_ones(
    keys: dict[str, Value], run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = CONVOLUTIONS | {"num_rounds": 2, "num_clients": 2, "local_epochs": 2} | keys
    _, eager = run_local("eager", **keys)
    compiled = Network.compiled.func  # type: ignore[attr-defined]
    shapes: list[tuple[int, ...]] = []

    def counting(network: Network) -> Any:
        made = compiled(network)

        def of_loss(loss: Any) -> Any:
            def called(x: torch.Tensor, y: torch.Tensor) -> Any:
                shapes.append(tuple(x.shape))
                return made(loss)(x, y)

            return called

        return of_loss

    counted = cached_property(counting)
    counted.__set_name__(Network, "compiled")
    monkeypatch.setattr(Network, "compiled", counted)
    workplace.cache_clear()
    _, folder = run_local("compiled", **keys, compile_steps=True)
    workplace.cache_clear()
    assert len(shapes) >= 2 * 2 * 2 * 3  # rounds, clients, epochs, full mini-batches
    assert {shape[0] for shape in shapes} == {16}
    here, there = (load_file(path / "model.safetensors") for path in (eager, folder))
    for name, tensor in here.items():  # by norm: a value at ReLU's kink may round to either side, which moves one unit
        assert (there[name] - tensor).float().norm() <= 1e-3 * tensor.float().norm(), name
    for one, other in zip(rounds(eager)[1:], rounds(folder)[1:], strict=True):
        assert not other["dropped"]
        assert other["flops"] == one["flops"]


def test_clients_trained_together_are_not_compiled(run_local: Run) -> None:
    with pytest.raises(UserError, match="compile-steps = true: not with stack-clients = true"):
        run_local(compile_steps=True, stack_clients=True)
