"""Processes that outlive the command that started them, and are found and ended by a later one."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsub_app.common.files import private
from fedsub_app.deployment.commands import LOOPBACK

PATIENCE_S = {signal.SIGTERM: 20.0, signal.SIGKILL: 10.0}
LOOK_S = 0.2
LISTED_S = 5.0  # at most, until ps has a command line


@dataclass(frozen=True)
class Process:
    """A process of a federation.

    ``command``: argument vector; ``pid``: its process id and group, in which what it starts stays; 0: never started.
    """

    command: list[str]
    pid: int = 0


def start(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
    """Start a command that the variables' PATH finds, in a process group of its own; returns its id.

    It returns when ps has the command line, which comes a moment after the start, or the process has ended.
    """
    with open(log, "ab", opener=private) as file:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,  # logs, database, clients' states
        )
    deadline, started = time.monotonic() + LISTED_S, {"it": Process([*command], process.pid)}
    try:
        while not running(started) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S / 10)
    except BaseException:  # such as Ctrl-C: its id is known here alone
        process.kill()
        raise
    return process.pid


def listed(*columns: str) -> list[list[str]]:
    """Return these columns of ps for every process of this machine; the last one, the command line, may lack."""
    command = ["ps", "-axww", "-o", ",".join(f"{column}=" for column in columns)]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | {"LC_ALL": "C.UTF-8"})
    return [os.fsdecode(line).split(None, len(columns) - 1) for line in done.stdout.splitlines()]


def running(processes: Mapping[str, Process], orphans: bool = False) -> dict[str, dict[int, int]]:
    """Return, of each that runs, its name -> process id -> resident memory in KiB, those it has started included.

    ``orphans``: also where it has ended itself, and what it has started has not.
    A process id may have been given to another program since: it counts only with the same command line.
    """
    for process in processes.values():
        if process.pid:
            with suppress(ChildProcessError):  # one that this process has started and that has ended is let go of
                os.waitpid(process.pid, os.WNOHANG)
    processes_of: dict[str, dict[int, int]] = {}
    named = {process.pid: (name, process.command) for name, process in processes.items() if process.pid}
    for pid, group, state, memory, *args in listed("pid", "pgid", "stat", "rss", "args"):
        name, command = named.get(int(group), ("", []))
        if not name or state.startswith("Z") or not args:
            continue
        is_own = args[0].endswith(" ".join(command))
        if is_own if pid == group else f"{os.sep}flwr-" in args[0]:
            processes_of.setdefault(name, {})[int(pid)] = int(memory)
    return {name: pids for name, pids in processes_of.items() if orphans or processes[name].pid in pids}


def stop(processes: Mapping[str, Process]) -> list[str]:
    """End processes and all that they have started; returns the names of those that ran. TimeoutError: one stays."""
    alive = running(processes, orphans=True)
    names = list(alive)
    for number, patience in PATIENCE_S.items():
        deadline = time.monotonic() + patience
        for pid in [pid for pids in alive.values() for pid in pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while alive and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            alive = running(processes, orphans=True)
    if alive:
        raise TimeoutError(f"still running: {alive}")
    return names


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Say whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
