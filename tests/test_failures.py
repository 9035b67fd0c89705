"""The machine fails, not a client: memory used up or a GPU lost, on simulated nodes and on real ones."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from helpers import result, rounds

import fedsub_app.common.failures
import fedsub_app.runs.node
from fedsub_app.cli import main as cli
from fedsub_app.common.failures import MachineFailed, machine_failure
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation import workers
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed

Run = Callable[..., Any]
PETABYTE = 1 << 50


def no_gpu_memory() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "torch on the CPU": (lambda: torch.empty(PETABYTE // 4), "RuntimeError: .*can't allocate memory"),
    "torch on a GPU": (no_gpu_memory, "OutOfMemoryError: CUDA out of memory"),
    "NumPy": (lambda: np.empty(PETABYTE, np.uint8), "MemoryError: Unable to allocate"),
}


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has client 1 of a method call something in round 2, before it trains or is evaluated."""

    def change(method: str, what: Callable[[], object], phase: str = "train") -> None:
        class Spoiled(METHODS[method].client):  # type: ignore[name-defined, misc]
            def train(self, sent: Tensors, config: Json) -> Tensors:
                if phase == "train" and (self.round, self.id) == (2, 1):
                    what()
                return super().train(sent, config)  # type: ignore[no-any-return]

            def run_evaluation(self, sent: Tensors, config: Json, wanted: list[str]) -> Update:
                if phase == "evaluate" and (self.round, self.id) == (2, 1):
                    what()
                return super().run_evaluation(sent, config, wanted)  # type: ignore[no-any-return]

        monkeypatch.setitem(METHODS, method, replace(METHODS[method], client=Spoiled))

    return change


class Workers(contextlib.ExitStack):
    """Makes the local engine's grid with two worker processes, which end when this is closed."""

    def grid(self, _: Any, overrides: Any) -> WorkerGrid:
        return self.enter_context(contextlib.closing(WorkerGrid("fedsub_app.client_app", overrides, 2, "fork")))


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers() as made:
        yield made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_used_up_memory_ends_the_run_which_goes_on_with_less(
    case: str, phase: str, run_local: Run, two: Workers, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"method": "fedper", "num_clients": 4, "evaluate": "personal"}
    _, whole = run_local("whole", **keys)
    what, said = CASES[case]
    spoil("fedper", what, phase)
    line = rf"client 1: out of memory: .*{said}.*; fewer --workers or message-clients take less.*--resume .*goes on"
    with pytest.raises(RunFailed, match=line) as failure:
        run_local("run", two.grid if phase == "train" else LocalGrid, **keys)
    two.close()
    assert "\n" not in str(failure.value)
    assert [line["round"] for line in rounds(failure.value.folder)] == [1]
    monkeypatch.undo()
    summary, folder = run_local("run", resume=True, message_clients=1, **keys)
    assert summary["status"] == "completed"
    assert result(folder) == result(whole)


@pytest.mark.parametrize("what", ["write_tensors", "files.flush"])
def test_a_disk_that_is_full_for_a_clients_state_ends_the_run(
    what: str, run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round counted without the clients whose state had no room."""
    keys = {"method": "ditto", "num_clients": 3, "checkpoint_every": 2}
    _, whole = run_local("whole", **keys)
    real, calls = resolve_name(f"fedsub_app.training.client_state.{what}"), iter(range(9))

    def full(*of: Any, **how: Any) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*of, **how)

    monkeypatch.setattr(f"fedsub_app.training.client_state.{what}", full)
    with pytest.raises(RunFailed, match=r"OSError: \[Errno 28\] No space left on device; `.*--resume .*` goes on$"):
        run_local("run", **keys)
    monkeypatch.undo()
    _, folder = run_local("run", resume=True, **keys)
    assert result(folder) == result(whole)


@pytest.mark.parametrize("where", ["this process", "a worker"])
@pytest.mark.parametrize(
    ("number", "what", "said"),
    [
        (errno.EMFILE, "_send", r"worker processes: OSError: \[Errno 24\] Too many open files;"),
        (errno.ENOSPC, "_send", r"OSError: \[Errno 28\] No space left on device;"),
        (errno.ENOMEM, "_send", "out of memory: OSError: .*; fewer --workers or message-clients take less, "),
        (errno.EMFILE, "_receive", r"worker processes: OSError: \[Errno 24\] Too many open files;"),
    ],
)
def test_a_message_that_this_machine_has_no_room_for_ends_the_run(
    where: str, number: int, what: str, said: str, run_local: Run, two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply is taken for that of another message."""
    real, process, calls = getattr(workers, what), os.getpid(), iter(range(100))
    here, call = (True, 5) if where == "this process" else (False, 2)

    def full(*of: Any) -> Any:
        if (os.getpid() == process) is here and next(calls) == call:
            raise OSError(number, os.strerror(number))
        return real(*of)

    monkeypatch.setattr(workers, what, full)
    with pytest.raises(RunFailed, match=rf"^{said}.*--resume .* goes on$") as failure:
        run_local("run", two.grid, num_clients=4, message_clients=1)
    assert "\n" not in str(failure.value)
    assert not [line["dropped"] for line in rounds(failure.value.folder)[1:] if line["dropped"]]


def test_a_descriptor_that_this_process_has_no_room_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"m")
        with pytest.raises(OSError, match="Too many open files"):
            workers._receive(theirs)


def test_clients_trained_together_run_out_of_memory_together(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsub_app.training.stacked._Stack.train", lambda *_: torch.empty(PETABYTE // 4))
    with pytest.raises(RunFailed, match=r"client 0: out of memory: .* a smaller batch-size or stack-clients = false; "):
        run_local(stack_clients=True, partition="iid", num_clients=4)


def test_the_servers_own_memory(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsub_app.runs.evaluation.sums_of", lambda *_: torch.empty(PETABYTE // 4))
    with pytest.raises(RunFailed, match=r"^out of memory: .* goes on$"):
        run_local()


def test_the_command_fails_with_one_line(
    spoil: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil("fedavg", CASES["NumPy"][0])
    pairs = [f"run-dir={tmp_path / 'run'}", "method=fedavg", "model=feature-mlp", "num-clients=2", "num-rounds=3"]
    command = ["run", "--workers", "1", *(word for pair in pairs for word in ("-s", pair))]
    assert cli.main(command) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("failed: client 1: out of memory: ")
    assert last.endswith(f"`fedsub run --resume {tmp_path / 'run'}` goes on")
    monkeypatch.undo()
    assert cli.main(["run", "--workers", "1", "--resume", str(tmp_path / "run"), "-s", "message-clients=1"]) == 0


def test_on_a_real_node_it_is_that_clients_loss(
    run_local: Run, spoil: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSUB_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(fedsub_app.runs.node, "simulated", lambda: False)
    spoil("fedavg", no_gpu_memory)
    summary, folder = run_local(method="fedavg", num_clients=3)
    assert summary["status"] == "completed"
    where = f"(test_failures.py:{no_gpu_memory.__code__.co_firstlineno + 1})"
    reason = f"client failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {where}"
    assert [line["dropped"] for line in rounds(folder)[1:]] == [[], [{"client": 1, "reason": reason}], []]


def test_a_real_node_cannot_end_the_run(run_local: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSUB_STATE", str(tmp_path / "state"))
    content = fedsub_app.runs.node._content
    monkeypatch.setattr(fedsub_app.runs.node, "simulated", lambda: False)

    def failing(header: Json, parts: Any, stamp: Json, *rest: Any) -> Any:
        failure = stamp | {"error": "out of memory, says it", "fatal": True}
        return fedsub_app.runs.node.pack(failure, []) if header["round"] == 2 else content(header, parts, stamp, *rest)

    monkeypatch.setattr(fedsub_app.runs.node, "_content", failing)
    _, folder = run_local(method="fedavg", num_clients=2)
    assert [line["status"] for line in rounds(folder)[1:]] == ["ok", "abandoned", "ok"]
    assert rounds(folder)[2]["dropped"][0]["reason"] == "node failed: out of memory, says it"


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Breaks the GPU of the process that calls it, once: there is none, so what would be asked of it is replaced."""
    lost: list[bool] = []

    def lose() -> None:
        with contextlib.suppress(FileExistsError):
            (tmp_path / "lost").touch(exist_ok=False)
            lost.append(True)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for module in (fedsub_app.common.failures, workers):
        monkeypatch.setattr(module, "gpu_lost", lambda: bool(lost))
    return lose


def test_a_worker_that_lost_its_gpu_is_replaced(run_local: Run, two: Workers, spoil: Any, losing: Any) -> None:
    spoil("fedper", losing)
    summary, folder = run_local("run", two.grid, method="fedper", num_clients=4, message_clients=1)
    assert summary["status"] == "completed"
    reason = "node failed: client 1: the GPU failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [line["dropped"] for line in rounds(folder)[1:]] == [[], [{"client": 1, "reason": reason}], []]


def test_a_process_that_cannot_be_replaced_ends_the_run(run_local: Run, spoil: Any, losing: Any) -> None:
    spoil("fedper", losing)
    with pytest.raises(RunFailed, match=r"^client 1: the GPU failed: RuntimeError: CUDA error: .* --resume .* goes on"):
        run_local(method="fedper", num_clients=4)


def test_a_gpu_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    assert not fedsub_app.common.failures.gpu_lost()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not fedsub_app.common.failures.gpu_lost()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert fedsub_app.common.failures.gpu_lost()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "OSError: [Errno 28] full"),
        (OSError(errno.EDQUOT, "quota"), "OSError: [Errno 122] quota"),
        (OSError(errno.ENOMEM, "fork"), "out of memory: OSError: [Errno 12] fork"),
        (RuntimeError("CUDA error: out of memory"), "out of memory: RuntimeError: CUDA error: out of memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "out of memory: RuntimeError: CUBLAS_STATUS_ALLOC_FAILED"),
        (MachineFailed("client 1: the GPU failed: lost"), "client 1: the GPU failed: lost"),
        (OSError(errno.EACCES, "not yours"), ""),
        (RuntimeError("shapes differ"), ""),
    ],
    ids=str,
)
def test_the_errors_of_a_machine(error: Exception, said: str) -> None:
    assert machine_failure(error) == said
