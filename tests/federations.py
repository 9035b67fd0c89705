"""What the tests on a real federation share: SuperLink and SuperNodes on this machine, each its own process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import PATIENCE

from fedsub_app.common.tensors import Json
from fedsub_app.deployment.federation import Federation, read
from fedsub_app.deployment.flower import PROJECT

NAME = "test"


class Deployed:
    """The federation in ``folder / "federation"``, and the shell of its user, who has a Flower home of his own.

    ``inside``: a command that runs another one on the machine of the SuperLink.
    """

    def __init__(self, folder: Path, inside: Sequence[str] = (), **more: str) -> None:
        self.folder = folder / "federation"
        self.inside = list(inside)
        (folder / "user").mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        own = {"FLWR_HOME": str(folder / "user"), "PATH": path, "FEDSUB_RUNS": str(folder / "runs")}
        self.variables = os.environ | own | more

    def begin(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start ``fedsub <arguments>``."""
        command = [*self.inside, sys.executable, "-m", "fedsub_app.cli", *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=PROJECT, env=self.variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def fedsub(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run ``fedsub <arguments>``."""
        return ended(self.begin(*arguments))

    def federation(self, what: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ``fedsub federation <what> <arguments>`` on it."""
        return self.fedsub("federation", what, "--dir", self.folder, *arguments)

    def up(self, *arguments: str) -> None:
        """Start it, or what has ended of it."""
        done = self.federation("up", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()

    def run(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start ``fedsub run <arguments>`` on it."""
        return self.begin("run", *arguments, "--engine", NAME)

    def flwr(self, *arguments: str) -> Json:
        """Run one of Flower's commands; returns its answer."""
        command = [*self.inside, str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=PATIENCE)
        answer: Json = json.loads(done.stdout[done.stdout.index("{") :])
        return answer

    @property
    def now(self) -> Federation:
        """What was started last."""
        found = read(self.folder)
        assert found
        return found

    def pid(self, name: str) -> int:
        """Return the id of one of its processes."""
        return self.now.processes[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill one of its processes and what it has started, at once."""
        os.killpg(self.pid(name), number)

    def logs(self, most: int = 2000) -> str:
        """Return the end of every log."""
        return "".join(f"--- {log.name}\n{log.read_text()[-most:]}" for log in sorted(self.folder.glob("*.log")))


def ended(process: "subprocess.Popen[str]", patience: float = PATIENCE) -> "subprocess.CompletedProcess[str]":
    """Wait for a process; one that hangs fails the test."""
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate()
        pytest.fail(
            f"{' '.join(map(str, process.args))}: still running after {patience} s\n{out[-3000:]}\n{err[-3000:]}"
        )
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def deployed(folder: Path, *arguments: str, inside: Sequence[str] = (), **variables: str) -> Iterator[Deployed]:
    """A federation that is up, and that leaves no process behind."""
    here = Deployed(folder, inside, **variables)
    here.up("--name", NAME, *arguments)
    try:
        yield here
    finally:
        done = here.federation("down")
        assert done.returncode == 0, done.stderr
        assert not left(here.folder)


def left(folder: Path) -> list[str]:
    """Return the command lines of processes that have to do with a federation's folder or its app."""
    listed = subprocess.run(["ps", "-axww", "-o", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line and "fedsub_app.cli" not in line]


def wait_for(what: Callable[[], object], patience: float = PATIENCE) -> float:
    """Wait until something is true; returns the seconds that it took."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < patience, "it never came true"
        time.sleep(0.2)
    return time.monotonic() - start


def pairs(values: Mapping[str, object]) -> list[str]:
    """Return settings as ``-s key=value``, in TOML."""
    return [word for key, value in values.items() for word in ("-s", f"{key}={json.dumps(value, default=str)}")]


def so_far(folder: Path) -> list[Json]:
    """The rounds that are over."""
    path = folder / "rounds.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")][1:]


def why(line: Json, client: int) -> str:
    """Why a client was dropped from a round; "": it was not."""
    return next((str(drop["reason"]) for drop in line["dropped"] if drop["client"] == client), "")


def back(folder: Path, client: int, before: int = 0) -> tuple[int, float]:
    """Wait until a client is dropped and takes part again.

    Returns the rounds that it lost, besides those it had lost before, and the seconds until it was back.
    """

    def lost() -> int:
        return sum(bool(why(line, client)) for line in so_far(folder)) - before

    seconds = wait_for(lambda: lost() > 0, 400)
    seconds += wait_for(lambda: not why(so_far(folder)[-1], client), 400)
    return lost(), seconds
