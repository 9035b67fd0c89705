"""GPUs: on a pretended one every method gives the CPU's numbers; what is refused, written down and shared out.

With a GPU, ``pytest -m gpu`` checks on it what docs/gpu.md promises.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import METHOD_KEYS, result, rounds
from pretended_gpu import Counts, pretended_gpu
from safetensors.torch import load_file

from fedsub_app.common.device import VISIBLE, device_facts, pick_device, visible_gpus
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.runs import directory
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.training.workplace import workplace

Run = Callable[..., Any]
FEW = ("fedavg", "fedpews", "fedselect", "fedpac", "ist")
CONVOLUTIONS: dict[str, Value] = {"model": "fedpews-cnn", "train_per_class": 10, "test_per_class": 5, "batch_size": 16}
BATCH_NORM: dict[str, Value] = CONVOLUTIONS | {"model": "lenet5-bn", "image_size": 16, "augment": "crop-flip"}


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """torch's switches as they were, and no network left on a device that is not there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    workplace.cache_clear()
    yield
    workplace.cache_clear()
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = flags
    if variable is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def both(run_local: Run, **keys: Value) -> Counts:
    """Run on the CPU and on the pretended GPU: rounds and model must be the same, bit for bit."""
    _, cpu = run_local("cpu", **keys)
    workplace.cache_clear()
    with pretended_gpu() as counts:
        _, gpu = run_local("gpu", **keys)
    assert rounds(gpu) == rounds(cpu)
    assert not any(line.get("dropped") for line in rounds(gpu))
    here, there = (load_file(folder / "model.safetensors") for folder in (cpu, gpu))
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert json.loads((gpu / "settings.json").read_text())["device"]["name"] == "a pretended GPU"
    return counts


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in METHOD_KEYS]
)
def test_a_method_computes_the_same_on_a_gpu(run_local: Run, method: str) -> None:
    keys = CONVOLUTIONS | {"num_clients": 3, "validation_fraction": 0.2, "evaluate": "global,global-local,personal"}
    counts = both(run_local, method=method, **keys | METHOD_KEYS[method])
    assert counts["operations"] > 1000  # it did compute there


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fedavg", "moon", "fedpart", "fedrep", "fedselect", "fedpac", "fedpews", "scaffold", "heterofl"]
)
def test_batch_norm_and_augmentation_compute_the_same_on_a_gpu(run_local: Run, method: str) -> None:
    both(run_local, method=method, **BATCH_NORM | {"num_clients": 3} | METHOD_KEYS[method])


def copies(run_local: Run, folder: str, **keys: Value) -> tuple[int, int]:
    workplace.cache_clear()
    gc.collect()  # else the data of the run before may still be there
    with pretended_gpu() as counts:
        run_local(folder, num_clients=2, num_rounds=1, **keys)
    return counts["to"], counts["from"]


@pytest.mark.parametrize(
    "keys",
    [
        CONVOLUTIONS | {"method": "fedavg"},
        CONVOLUTIONS | {"method": "fedpews", "fedpews__warmup_rounds": 1},
        CONVOLUTIONS | {"method": "fedavg", "augment": "crop-flip"},
    ],
)
def test_copies_that_are_waited_for_do_not_grow_with_the_steps(run_local: Run, keys: dict[str, Value]) -> None:
    few, many = (copies(run_local, str(count), **keys | {"local_epochs": count}) for count in (1, 5))
    steps = 4 * 2 * -(-50 // 16)  # four more epochs of two clients with 50 samples in batches of 16
    per_step = [(more - less) / steps for less, more in zip(few, many, strict=True)]
    assert per_step[1] == 0
    assert per_step[0] <= 0.25 + ("augment" in keys)  # one an epoch of four; crops are drawn batch by batch


COPIED = ("fedavg", "fedprox", "ditto", "fedper", "fedselect", "scaffold", "subfedavg")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in COPIED]
)
def test_a_model_is_copied_as_one_whatever_its_tensors(run_local: Run, method: str) -> None:
    keys = CONVOLUTIONS | {"image_size": 16, "method": method} | METHOD_KEYS[method]
    few, many = (copies(run_local, model, **keys | {"model": model}) for model in ("fedpews-cnn", "lenet5-bn"))
    assert few == many


def test_a_gpu_is_made_repeatable_unless_told_otherwise() -> None:
    with pretended_gpu():
        assert pick_device("cpu") == torch.device("cpu")
        assert pick_device("auto").type == "cuda"
        cudnn = torch.backends.cudnn
        assert torch.are_deterministic_algorithms_enabled()
        assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == (True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        assert device_facts(pick_device("cuda", exact=False))["name"] == "a pretended GPU"
        assert not torch.are_deterministic_algorithms_enabled()
        assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == (False, True, True)


def test_a_run_goes_on_on_another_device_only_when_told_so(run_local: Run) -> None:
    with pretended_gpu():
        run_local("run", num_rounds=1, method="fedavg", max_flops=1.0)
    workplace.cache_clear()
    with pytest.raises(UserError, match=r"computed on cuda, here it would be cpu.*; device = cpu goes on with it"):
        run_local("run", resume=True, method="fedavg", max_flops=1.0, num_rounds=1)
    summary, _ = run_local("run", resume=True, method="fedavg", max_flops=1.0, num_rounds=1, device="cpu")
    assert summary["status"] == "completed"


def test_a_simulated_node_that_sees_no_gpu_is_refused(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu():
        monkeypatch.setattr("fedsub_app.runs.node.sees_gpu", lambda: False)
        with pytest.raises(UserError, match="it sees no GPU, the server uses one: its connection needs a share"):
            run_local("run", method="fedavg")


def test_workers_take_the_gpus_in_turn(run_local: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b")
    assert visible_gpus() == ["GPU-a", "GPU-b"]
    made: list[WorkerGrid] = []
    seen: dict[int, str] = {}

    def grid(_: Any, overrides: Any) -> WorkerGrid:
        made.append(WorkerGrid("fedsub_app.client_app", overrides, 3, "spawn"))
        return made[-1]

    try:
        run_local("run", grid, method="fedavg", num_rounds=1, device="cpu")
        for node, worker in made[0]._workers.items():
            text = Path(f"/proc/{worker.process.pid}/environ").read_text()
            seen[node] = next(part for part in text.split("\0") if part.startswith(VISIBLE)).partition("=")[2]
    finally:
        made[0].close()
    assert seen == {2: "GPU-a", 3: "GPU-b", 4: "GPU-a"}
    assert os.environ[VISIBLE] == "GPU-a,GPU-b"


REAL: dict[str, Value] = CONVOLUTIONS | {"num_clients": 3, "validation_fraction": 0.2, "device": "cuda"}
REAL |= {"evaluate": "global,global-local,personal"}


def real_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a GPU."""
    for mark in (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")):
        test = mark(test)
    return test


def agree(one: Path, other: Path) -> None:
    """Two runs have the same model up to rounding, which Adam's first steps enlarge; none dropped a client."""
    assert not any(line.get("dropped") for folder in (one, other) for line in rounds(folder))
    here, there = (load_file(folder / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)


@real_gpu
@pytest.mark.parametrize("method", METHOD_KEYS)
def test_a_real_gpu_gives_the_same_bits_twice(run_local: Run, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = REAL | {"method": method} | METHOD_KEYS[method]
    _, once = run_local("once", **keys)
    log_round = directory.Run.log_round

    def stopped(run: directory.Run, line: Json) -> None:
        log_round(run, line)
        if line["round"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory.Run, "log_round", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_local("again", **keys)
    workplace.cache_clear()
    _, again = run_local("again", **keys, resume=True)
    assert result(once) == result(again)
    assert not any(line.get("dropped") for line in rounds(once))


@real_gpu
@pytest.mark.parametrize("method", METHOD_KEYS)
def test_a_real_gpu_agrees_with_the_cpu(run_local: Run, method: str) -> None:
    keys = REAL | {"method": method} | METHOD_KEYS[method]
    _, gpu = run_local("gpu", **keys)
    workplace.cache_clear()
    _, cpu = run_local("cpu", **keys | {"device": "cpu"})
    agree(cpu, gpu)


@real_gpu
@pytest.mark.parametrize("method", FEW)
def test_workers_that_share_a_real_gpu_compute_the_same(run_local: Run, method: str) -> None:
    keys = REAL | BATCH_NORM | {"method": method} | METHOD_KEYS[method]
    _, alone = run_local("alone", **keys)
    with ExitStack() as stack:

        def two(_: Any, overrides: Any) -> WorkerGrid:
            return stack.enter_context(closing(WorkerGrid("fedsub_app.client_app", overrides, 2, "spawn")))

        _, shared = run_local("shared", two, **keys)
    assert result(alone) == result(shared)


@real_gpu
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ist", "moon", "fedrep"])
def test_clients_train_together_on_a_real_gpu(run_local: Run, method: str) -> None:
    keys = REAL | {"method": method, "num_clients": 5} | METHOD_KEYS[method]
    _, apart = run_local("apart", **keys)
    workplace.cache_clear()
    _, together = run_local("together", **keys, stack_clients=True)
    agree(apart, together)


@real_gpu
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "scaffold", "model": "feature-mlp"},
        {"method": "fedprox", "model": "lenet5-bn", "image_size": 16},
        {"method": "fedavg", "model": "lenet5", "image_size": 16, "optimizer": "adam", "lr": 0.002},
    ],
)
def test_compiled_steps_are_graphs_on_a_real_gpu(run_local: Run, keys: dict[str, Value]) -> None:
    keys = REAL | {"local_epochs": 2} | keys
    _, eager = run_local("eager", **keys)
    workplace.cache_clear()
    _, compiled = run_local("compiled", **keys, compile_steps=True)
    agree(eager, compiled)


@real_gpu
def test_a_real_gpu_may_compute_faster_and_not_repeatably(run_local: Run) -> None:
    keys = REAL | BATCH_NORM | {"method": "fedavg", "optimizer": "adam"}
    _, exact = run_local("exact", **keys)
    workplace.cache_clear()
    _, fast = run_local("fast", **keys, gpu_exact=False)
    assert torch.backends.cudnn.allow_tf32
    for one, other in zip(rounds(exact), rounds(fast), strict=True):
        assert other["global-accuracy"] == pytest.approx(one["global-accuracy"], abs=15)


@real_gpu
def test_a_real_gpu_without_memory_ends_the_run(run_local: Run) -> None:
    keys = REAL | {"method": "fedavg", "model": "resnet18-gn", "image_size": 32}
    torch.cuda.set_per_process_memory_fraction(1e-4)  # some megabytes
    try:
        with pytest.raises(RunFailed, match=r"out of memory: OutOfMemoryError: .*--resume .* goes on"):
            run_local("run", **keys)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    summary, _ = run_local("run", **keys, resume=True)
    assert summary["status"] == "completed"
