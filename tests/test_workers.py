"""The local engine's processes: the same numbers as in one, and what is left when one of them, or all, are killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import METHOD_KEYS, PATIENCE, fedsub, result, rounds

import fedsub_app.runs.node
from fedsub_app.federation import workers
from fedsub_app.federation.wire import pack, unpack
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.training.client_state import ClientState
from fedsub_app.training.local import sums_of

APP = "fedsub_app.client_app"
FEW = ("fedavg", "fedpart", "fedpews", "ist", "subfedavg")  # the others are slow tests


@pytest.fixture
def grids() -> Iterator[Callable[..., Any]]:
    """Makes what ``run_local`` takes as its grid: one with so many workers, which is closed at the end."""
    made: list[WorkerGrid] = []

    def grid(count: int, start: str = "fork") -> Callable[..., WorkerGrid]:
        def make(_: Any, overrides: Any) -> WorkerGrid:
            made.append(WorkerGrid(APP, overrides, count, start))
            return made[-1]

        return make

    yield grid
    for one in made:
        processes = [worker.process for worker in one._workers.values()]
        one.close()
        assert not any(process.is_alive() for process in processes)


def children(pid: int) -> list[int]:
    """The processes that this one has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in METHOD_KEYS]
)
def test_any_number_of_workers_gives_the_same_bits(method, run_local, grids):
    """And messages of any number of clients: one, seven, all. tests/test_methods.py has each method on two workers."""
    keys = {"num_clients": 9, "clients_per_round": 8, "evaluate": "global,personal", "method": method}
    keys |= METHOD_KEYS[method]
    _, alone = run_local("alone", **keys)
    for count, clients in ((2, 1), (3, 7)):
        _, folder = run_local(f"workers-{count}", grid=grids(count), message_clients=clients, **keys)
        assert result(folder) == result(alone)


@pytest.mark.parametrize("model", ["lenet5-bn", "feature-mlp"])  # the second one's batches are drawn at random
def test_workers_test_the_global_model(model, run_local, grids, monkeypatch):
    """Batch by batch, and the numbers are those of one process; a batch that is not answered is the server's."""
    monkeypatch.setattr("fedsub_app.training.local.EVALUATION_BATCH", 100)  # four batches of 359 samples
    keys = {"num_clients": 4, "model": model, "image_size": 32, "num_rounds": 2}
    _, alone = run_local("alone", **keys)
    here: list[int] = []
    server = os.getpid()

    def counted(task: Any, network: Any, x: Any, y: Any) -> dict[str, float]:
        if os.getpid() == server:
            here.append(len(y))
        elif lost:
            raise RuntimeError("lost")
        return sums_of(task, network, x, y)

    for module in ("fedsub_app.runs.node", "fedsub_app.runs.evaluation"):
        monkeypatch.setattr(f"{module}.sums_of", counted)
    for count, lost in ((2, False), (3, False), (2, True)):
        here.clear()
        _, folder = run_local(f"{count}-{lost}", grid=grids(count), message_clients=count, **keys)
        assert result(folder) == result(alone)
        assert len(here) == (12 if lost else 4), "those of round 0, before the workers are there"


def test_spawned_workers_give_the_same_bits(run_local, grids):
    """Where forking is not safe, each process imports the app and loads its own data."""
    _, alone = run_local("alone", num_clients=4)
    _, folder = run_local("spawned", grid=grids(2, "spawn"), num_clients=4)
    assert result(folder) == result(alone)


def test_a_small_answer_that_waits_holds_no_descriptor():
    """A simulation of many clients holds hundreds of them, and may open 1024 files."""
    ours, theirs = socket.socketpair()

    def sent(count: int) -> Any:
        workers._send(ours, {"error": ""}, pack({}, [({"client": 0}, {"w": torch.arange(count)})]))
        ((_, tensors),) = unpack(workers._receive(theirs)[1])[1]
        assert torch.equal(tensors["w"], torch.arange(count))
        return tensors

    with ours, theirs:
        before = os.listdir("/proc/self/fd")
        held = [sent(1000) for _ in range(5)]
        assert os.listdir("/proc/self/fd") == before
        held += [sent(1 << 18)]
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1, "a large one is not copied"


def once(marker: Path) -> bool:
    """Say yes to the first process that asks."""
    with contextlib.suppress(FileExistsError):
        marker.touch(exist_ok=False)
        return True
    return False


@pytest.mark.parametrize("moment", ["mid-client", "mid-answer"])
def test_a_killed_worker_costs_its_clients_round_and_is_replaced(moment, run_local, grids, tmp_path, monkeypatch):
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if moment == "mid-client":
        save = ClientState.save

        def saved(self: ClientState, round_: int, *more: Any) -> None:
            if round_ == 2 and once(tmp_path / "killed"):
                (tmp_path / "client").write_text(self.folder.name.removeprefix("client-"))
                die()
            save(self, round_, *more)

        monkeypatch.setattr(ClientState, "save", saved)
    else:
        answer, started = workers.answer, []

        def answered(run: Any, message: Any, context: Any) -> Any:
            reply = answer(run, message, context)
            started.append(message)
            if len(started) == 2 and once(tmp_path / "killed"):
                monkeypatch.setattr(workers.socket, "send_fds", lambda *_: die())  # the file is written, not sent
            return reply

        monkeypatch.setattr(workers, "answer", answered)
    summary, folder = run_local(grid=grids(2), method="fedper", num_clients=4)
    lines = rounds(folder)
    assert [line["status"] for line in lines[1:]] == ["ok"] * 3
    lost = [entry for line in lines[1:] for entry in line["dropped"]]
    assert 1 <= len(lost) < 4
    assert all("worker process" in entry["reason"] and "SIGKILL" in entry["reason"] for entry in lost)
    if moment == "mid-client":
        assert int((tmp_path / "client").read_text()) in [entry["client"] for entry in lost]
    assert lines[-1]["dropped"] == []
    assert summary["status"] == "completed"


def test_an_exception_in_a_worker_is_one_line(run_local, grids, monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(fedsub_app.runs.node, "update_part", broken)
    with pytest.raises(Exception, match="node failed: RuntimeError: no memory left"):
        run_local(grid=grids(2), num_clients=4)


SLOW = ("-s", "model=feature-mlp", "-s", "method=ditto", "-s", "num-clients=4", "-s", "num-rounds=30", "-s", "lr=0.05")


def begin(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a run with two workers and wait for its third round."""
    command = [sys.executable, "-m", "fedsub_app.cli", "run", *SLOW, "--workers", "2", "-s", f"run-dir={folder}"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = folder / "rounds.jsonl"
    wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 3, "no third round")
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_run_that_goes_on_where_it_was(how, tmp_path):
    process = begin(tmp_path / "killed")
    ours = children(process.pid)
    assert len(ours) == 2
    if how == signal.SIGINT:  # Ctrl-C reaches the workers, too
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    code = process.wait(PATIENCE)
    assert code == (130 if how == signal.SIGINT else -how)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ours), f"still there: {ours}")
    assert len(rounds(tmp_path / "killed")) < 31
    if how == signal.SIGKILL:
        for folder, more in (("killed", ("--resume", str(tmp_path / "killed"))), ("whole", SLOW)):
            run_dir = () if folder == "killed" else ("-s", f"run-dir={tmp_path / folder}")
            assert fedsub(tmp_path / "scratch", "run", *more, *run_dir, "--workers", "2").code == 0
        assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "0"), "Invalid value for '--workers': 0 is not in the range 1<=x<=1000."),
        (("--engine", "local-simulation", "--workers", "2"), "--workers 2: of the local engine"),
    ],
)
def test_workers_that_cannot_be(arguments, said, tmp_path):
    finished = fedsub(tmp_path, "run", *arguments)
    assert finished.code == 2
    assert said in finished.err
    assert json.dumps(finished.err).count("\\n") == 1
