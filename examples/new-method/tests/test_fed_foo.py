"""fed-foo: by hand, and FedAvg where it is FedAvg."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.runs.config import resolve

Run = Callable[..., tuple[Json, Path]]


def model_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def test_a_whole_step_is_fedavg(run_local: Run) -> None:
    _, fedavg = run_local("fedavg", num_rounds=2)
    _, own = run_local("own", num_rounds=2, method="fed-foo")
    expected = model_of(fedavg)
    assert all(torch.equal(x, expected[name]) for name, x in model_of(own).items())


def test_half_a_step_is_half_of_the_way(run_local: Run) -> None:
    _, fedavg = run_local("fedavg", num_rounds=1)
    _, own = run_local("own", num_rounds=1, method="fed-foo", **{"fed-foo__step": 0.5})
    _, none = run_local("none", num_rounds=1, method="fed-foo", **{"fed-foo__step": 0.0})
    start, whole = model_of(none), model_of(fedavg)
    for name, x in model_of(own).items():
        assert torch.allclose(x, (start[name] + whole[name]) / 2, atol=1e-6)
    assert any(not torch.equal(start[name], x) for name, x in whole.items())


def test_the_experiment_is_of_this_method() -> None:
    settings = resolve({"experiment": "fed-foo/digits"})
    assert (settings.method, settings.options.step) == ("fed-foo", 0.5)
