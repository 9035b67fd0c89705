"""A SuperLink of the bench's own: own FLWR_HOME, ports and workers; all that it started is stopped at the end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.deployment.flower import CLUSTER, CONNECTION, environment
from fedsub_app.deployment.processes import listed
from fedsub_app.runs.rounds import read_rounds

PROJECT = Path(__file__).resolve().parents[1]
LOOK_SECONDS = 2.0  # a look takes 20 ms of a core
STOP_SECONDS = 15.0


def run_command(engine: str, settings: Mapping[str, Value]) -> list[str]:
    """Return the command line of ``fedsub run``."""
    pairs = [word for key, value in settings.items() for word in ("-s", f"{key}={_toml(value)}")]
    return [sys.executable, "-m", "fedsub_app.cli", "run", "--engine", engine, *pairs]


def _toml(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class FlowerBox:
    """Runs of the app on Flower's simulation engine, apart from any other SuperLink of this machine.

    Parameters
    ----------
    workers : simulated SuperNodes, each with a Ray worker of its own.
    gpu : let the workers share one GPU.
    cluster : address of a running Ray cluster of so many cores, in the place of Ray on this machine.
    """

    def __init__(self, workers: int = 2, gpu: bool = False, cluster: str = "") -> None:
        self.connection = CLUSTER if cluster else CONNECTION
        self._temporary = TemporaryDirectory(prefix="fedsub-bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.peak_mb: dict[str, float] = {}
        http, control = free_ports(2)
        self.environment = environment() | os.environ
        self.environment |= {
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "RAY_worker_niceness": "0",  # Flower's default of 15 measures whatever else the machine does
        }
        cores = max(workers, os.cpu_count() or 1)
        lines = [
            f'[superlink]\ndefault = "{self.connection}"\n\n[superlink.{self.connection}]\naddress = ":local:"',
            f"options.num-supernodes = {workers}",
            f"options.backend.client-resources.num-cpus = {1 if cluster else cores // workers}",
        ]
        if cluster:
            self.environment["RAY_ADDRESS"] = cluster
        else:
            lines += [f"options.backend.init-args.num-cpus = {cores // workers * workers}"]
        if gpu:
            lines += [
                f"options.backend.client-resources.num-gpus = {1 / workers}",
                "options.backend.init-args.num-gpus = 1",
            ]
        (self.folder / "flwr").mkdir()
        (self.folder / "flwr/config.toml").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> "FlowerBox":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._temporary.cleanup()

    def run(self, settings: Mapping[str, Value]) -> list[Json]:
        """Run the app to its end; returns the lines of its rounds and keeps the peaks of memory in ``peak_mb``."""
        with TemporaryDirectory(dir=self.folder) as folder:
            over = threading.Event()
            watch = threading.Thread(target=self._watch_memory, args=(over,))
            watch.start()
            try:
                done = subprocess.run(
                    run_command(self.connection, {**settings, "run-dir": f"{folder}/run"}),
                    **self.how(),
                    check=False,
                )
            finally:
                over.set()
                watch.join()
            if done.returncode:
                raise RuntimeError(f"fedsub run ended with {done.returncode}:\n{done.stdout[-3000:]}")
            return read_rounds(Path(folder) / "run")

    def how(self) -> Json:
        """Return what every process of the box is started with."""
        return {
            "env": self.environment,
            "cwd": PROJECT,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }

    def _watch_memory(self, over: threading.Event) -> None:
        """Keep the highest peak RSS of the server's process and of one worker in ``peak_mb`` (Linux only)."""
        self.peak_mb = {}
        while not over.wait(LOOK_SECONDS):
            for pid, command in self._ours().items():
                kind = "worker" if "ray::Client" in command else "server" if "flwr-simulation" in command else ""
                if kind and (peak := memory_mb(pid, "VmHWM")):
                    self.peak_mb[kind] = max(self.peak_mb.get(kind, 0.0), peak)

    def _ours(self) -> dict[int, str]:
        """Return the box's SuperLink, known by its log file, and all its descendants: process id -> command line."""
        mark = str(self.folder / "flwr")
        links = {pid for pid, (_, command) in _processes().items() if "flower-superlink" in command and mark in command}
        return descendants(links)

    def stop(self) -> None:
        """Stop the SuperLink and wait until all that it started is gone."""
        ours = self._ours()
        for pid, command in ours.items():
            if "flower-superlink" in command:
                _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while (left := _alive(ours)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            _signal(pid, signal.SIGKILL)


def descendants(pids: set[int]) -> dict[int, str]:
    """Return these processes and all that they have started: process id -> command line."""
    table, ours = _processes(), set(pids)
    while more := {pid for pid, (parent, _) in table.items() if parent in ours} - ours:
        ours |= more
    return {pid: table[pid][1] for pid in ours & table.keys()}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _processes() -> dict[int, tuple[int, str]]:
    """Return process id -> (parent's id, command line) of all processes; a zombie's command line is empty."""
    rows = listed("pid", "ppid", "stat", "args")
    return {
        int(pid): (int(parent), "" if state.startswith("Z") else "".join(command))
        for pid, parent, state, *command in rows
    }


def _alive(known: Mapping[int, str]) -> set[int]:
    return {pid for pid, (_, command) in _processes().items() if pid in known and command}  # not a zombie


def memory_mb(pid: int | str, key: str, file: str = "status") -> float:
    """Return the number of MB that Linux has of a process under ``key``; 0 where the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) / 1024
    return 0.0
