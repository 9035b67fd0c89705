"""The same settings give the same metrics on the local engine and on Flower's simulation, and the exit code is honest.

One SuperLink of its own serves this module; it is stopped at the end.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import federations
import numpy as np
import pytest
from helpers import METHOD_KEYS, PATIENCE, fedsub, free_port, result, rounds, run_flower

from fedsub_app.common.conf_files import experiments
from fedsub_app.common.tensors import Json
from fedsub_app.deployment import flower as deployment
from fedsub_app.deployment.flower import PROJECT, environment
from fedsub_app.federation.blocks import MANY
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds

KEYS = {
    "model": "feature-mlp",
    "method": "fedpews",
    "lr": "0.05",
    "train-per-class": "40",
    "num-clients": "3",
    "num-rounds": "2",
    "fedpews.warmup-rounds": "1",
    "evaluate": "global,global-local",
    "node-timeout": "90.0",
}

ONE_WORKER = """
[superlink.one-worker]
address = ":local:"
options.num-supernodes = 1
options.backend.client-resources.num-cpus = 1
options.backend.init-args.num-cpus = 1
"""

END_OF_A_WORKER = """
train = Client.run_training


def run_training(self, *arguments):
    if (self.round, self.id) == (2, 1):
        __import__("os")._exit(1)
    return train(self, *arguments)


Client.run_training = run_training
"""
HALF_OF_THE_FLOPS = """
train = Client.run_training


def half(self, *arguments):
    update = train(self, *arguments)
    update.metrics["flops"] /= 2
    return update


Client.run_training = half
"""


def pairs(**more: str | Path) -> list[str]:
    values = KEYS | {name.replace("_", "-"): str(value) for name, value in more.items()}
    return [part for key, value in values.items() for part in ("-s", f"{key}={value}")]


@contextlib.contextmanager
def own_flower(home: Path, python: str, base: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a Flower of its own: home, port, connections; what it started is stopped."""
    variables = {
        **base,
        **environment(),
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "RAY_worker_niceness": "0",
    }
    # The connection alone: the defaults of this environment are those of the checkout that it was set up from.
    setup = (
        f"from fedsub_app.deployment import flower; flower.sysconfig.get_path = lambda _: {str(home)!r}; flower.setup()"
    )
    subprocess.run([python, "-c", setup], env=variables, check=True, timeout=PATIENCE, cwd=home)
    with (home / "config.toml").open("a") as config:  # as its user may write one; Flower warns of its options
        config.write(ONE_WORKER)
    try:
        yield variables
    finally:
        stop(home)


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """That of this checkout."""
    with own_flower(tmp_path_factory.mktemp("flwr"), sys.executable, os.environ) as variables:
        yield variables


def stop(home: Path) -> None:
    """End the SuperLink of this FLWR_HOME (its log lies there) and all processes that it started, and theirs."""
    ours: list[int] = []
    for pid, parent, command in processes():
        if parent in ours or ("flower-superlink" in command and str(home) in command):
            ours.append(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 15
        while ours and time.monotonic() < deadline:
            running = {pid for pid, _, command in processes() if "<defunct>" not in command}
            ours = [pid for pid in ours if pid in running]
            time.sleep(0.1)
    assert not ours


def processes() -> list[tuple[int, int, str]]:
    """Pid, parent and command line of all processes, a parent before its children as far as pids tell."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    found = [line.split(None, 2) for line in listed.splitlines()]
    return sorted((int(pid), int(parent), " ".join(command)) for pid, parent, *command in found)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """The rounds of the local engine."""
    folder = tmp_path_factory.mktemp("local")
    done = fedsub(folder, "run", *pairs(run_dir=folder / "run"))
    assert done.code == 0, done.err
    return rounds(folder / "run")


def tracked() -> str:
    return subprocess.run(
        ["git", "status", "--porcelain", "--", "pyproject.toml", "conf", "README.md"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("connection", ["local-simulation", pytest.param("one-worker", marks=pytest.mark.slow)])
def test_flowers_simulation_is_the_local_engine(
    connection: str, flower: dict[str, str], local: list[Json], tmp_path: Path
) -> None:
    """With two Ray workers and with one: all metrics but seconds and bytes as sent."""
    done = run_flower(flower, "--engine", connection, *pairs(run_dir=tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert rounds(tmp_path / "run") == local
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_a_superlink_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own command gives it 15 s and kills it."""
    late = tmp_path / "bin/flower-superlink"
    late.parent.mkdir()
    late.write_text(f'#!/bin/sh\nsleep 17\nexec "{Path(sys.executable).parent}/flower-superlink" "$@"\n')
    late.chmod(0o755)
    with own_flower(tmp_path, sys.executable, os.environ) as variables:
        path = os.pathsep.join((str(late.parent), str(Path(sys.executable).parent), variables["PATH"]))
        monkeypatch.setattr(deployment, "full_environment", lambda: variables | {"PATH": path})
        assert deployment.ask("list", "local-simulation")["runs"] == []


@pytest.mark.slow
@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="not a git checkout")
def test_a_run_that_fails_says_so_and_changes_no_tracked_file(flower: dict[str, str], tmp_path: Path) -> None:
    """``flwr run`` itself exits 0."""
    before = (PROJECT / "pyproject.toml").read_bytes(), tracked()
    keys = pairs(run_dir=tmp_path / "run", data_dir=tmp_path, dataset="nowhere")
    done = run_flower(flower, "--engine", "local-simulation", *keys)
    assert done.returncode != 0
    assert "dataset = 'nowhere': no such name" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^failed: run \d+ is finished:failed", done.stderr, re.MULTILINE)
    assert ((PROJECT / "pyproject.toml").read_bytes(), tracked()) == before
    assert not (tmp_path / "run").exists()


# Image sets of this test's own, in place of those that need files.
SOURCES = {"cifar10": "left", "cifar-mnist": "left+right", "path-oct-tissue": "left+middle+right"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in sorted(experiments()) if name.startswith("fedpews/")])
def test_every_experiment_is_the_same_on_both_engines_and_when_killed_and_resumed(
    name: str, flower: dict[str, str], tmp_path: Path
) -> None:
    """Its own settings, but two rounds, the first of them warm-up, few samples and not 200 clients."""
    settings = resolve({"experiment": name})
    for source in ("left", "middle", "right"):
        random = np.random.default_rng(len(source))
        images = random.integers(0, 256, (2, 400, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(400) % 10
        np.savez(
            tmp_path / f"{source}.npz",
            train_images=images[0],
            train_labels=labels,
            test_images=images[1],
            test_labels=labels,
        )
    small = {
        "experiment": name,
        "dataset": SOURCES.get(settings.dataset, settings.dataset),
        "num-clients": str(min(settings.num_clients, 20)),
        "data-dir": str(tmp_path),
        "train-per-class": "40",
        "test-per-class": "4",
        "num-rounds": "2",
        "fedpews.warmup-rounds": "1",
        "eval-every": "1",
        "checkpoint-every": "1",
        "node-timeout": "90.0",
    }

    def keys(folder: str) -> list[str]:
        values = small | {"run-dir": str(tmp_path / folder)}
        return [part for key, value in values.items() for part in ("-s", f"{key}={value}")]

    done = fedsub(tmp_path, "run", *keys("whole"))
    assert done.code == 0, done.err
    simulated = run_flower(flower, "--engine", "local-simulation", *keys("simulated"))
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    assert rounds(tmp_path / "simulated") == rounds(tmp_path / "whole")
    assert fedsub(tmp_path, "run", *keys("killed"), die=("line written", 2)).code == -signal.SIGKILL
    assert fedsub(tmp_path, "run", "--resume", str(tmp_path / "killed")).code == 0
    assert result(tmp_path / "killed") == result(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "many", "clients"),
    [
        *((method, 9, 7) for method in METHOD_KEYS),
        *((method, 67, clients) for method in ("fedavg", "fedrep") for clients in (1, 7, 128)),
    ],
)
def test_every_method_is_the_same_on_ray(
    method: str,
    many: int,
    clients: int,
    flower: dict[str, str],
    run_local: Callable[..., tuple[Json, Path]],
    tmp_path: Path,
) -> None:
    """The metrics and the model of the local engine. tests/test_workers.py has each method's messages of any size."""
    keys = {"num_clients": many, "clients_per_round": many - 1, "evaluate": "global,personal", "method": method}
    keys |= {"partition": "iid"} if many > MANY else {}  # nodes take means of blocks
    _, alone = run_local("alone", **keys | METHOD_KEYS[method])
    settings = json.loads((alone / "settings.json").read_text())["settings"]
    own = settings | {"message-clients": clients, "run-dir": str(tmp_path / "sent"), "node-timeout": 90.0}
    done = run_flower(flower, "--engine", "local-simulation", *federations.pairs(own))
    assert done.returncode == 0, done.stdout + done.stderr
    assert rounds(tmp_path / "sent") == rounds(alone)
    assert (tmp_path / "sent/model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_secure_aggregation_is_the_same_on_ray(
    flower: dict[str, str], run_local: Callable[..., tuple[Json, Path]], tmp_path: Path
) -> None:
    """Any process may have a client's next message: its secrets are in the run's folder."""
    keys = {"num_clients": 6, "secure_aggregation": True, "message_clients": 1, "train_per_class": 20}
    _, alone = run_local("alone", **keys)
    settings = json.loads((alone / "settings.json").read_text())["settings"]
    own = settings | {"run-dir": str(tmp_path / "ray"), "node-timeout": 90.0}
    done = run_flower(flower, "--engine", "local-simulation", *federations.pairs(own))
    assert done.returncode == 0, done.stdout + done.stderr
    assert rounds(tmp_path / "ray") == rounds(alone)
    assert (tmp_path / "ray" / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_devices_clock_is_the_same_on_ray(
    flower: dict[str, str], run_local: Callable[..., tuple[Json, Path]], tmp_path: Path
) -> None:
    keys = {"method": "heterofl", "devices": "phones", "num_clients": 8, "clients_per_round": 4, "deadline": 5.0}
    keys |= {"heterofl__masked_loss": False, "evaluate": "global,global-local", "held_out_clients": 1}
    _, alone = run_local("alone", **keys)
    settings = json.loads((alone / "settings.json").read_text())["settings"]
    folder = tmp_path / "ray"
    own = settings | {"run-dir": str(folder), "node-timeout": 90.0}
    done = run_flower(flower, "--engine", "local-simulation", *federations.pairs(own))
    assert done.returncode == 0, done.stdout + done.stderr
    assert rounds(folder) == rounds(alone)
    assert all("device-seconds" in line for line in rounds(folder)[1:])


@pytest.fixture
def other_checkout(tmp_path: Path) -> Callable[[str], Path]:
    """Copies this checkout; in the copy client_apps/base.py has a text at its end."""

    def copied(end: str) -> Path:
        project = tmp_path / "project"
        for name in ("fedsub", "fedsub_app", "strategies", "client_apps", "conf"):
            shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
            shutil.copy(PROJECT / name, project / name)
        with (project / "client_apps/base.py").open("a") as base:
            base.write(end)
        return project

    return copied


@pytest.mark.slow
def test_each_run_has_the_code_of_its_checkout(
    flower: dict[str, str], local: list[Json], other_checkout: Callable[[str], Path], tmp_path: Path
) -> None:
    """The SuperLink's folder is the first one's, and stays so; in the other one, clients report half of their FLOPs."""
    for folder, project, share in (
        (tmp_path / "here", PROJECT, 1),
        (tmp_path / "there", other_checkout(HALF_OF_THE_FLOPS), 2),
    ):
        done = run_flower(flower, "--engine", "local-simulation", *pairs(run_dir=folder), project=project)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [share * line["flops"] for line in rounds(folder)[1:]] == [line["flops"] for line in local[1:]]


@pytest.mark.slow
def test_a_killed_ray_worker_is_named_and_replaced(
    flower: dict[str, str], other_checkout: Callable[[str], Path], tmp_path: Path
) -> None:
    """Client 1 takes its Ray worker down in round 2: that round is abandoned, as min-replies says, and no other one."""
    project = other_checkout(END_OF_A_WORKER)
    folder = tmp_path / "run"
    keys = pairs(run_dir=folder, num_rounds=4, min_replies=3, max_abandoned=2, round_timeout=60.0)
    done = run_flower(flower, "--engine", "local-simulation", *keys, project=project)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = rounds(folder)
    assert [line["status"] for line in lines] == ["ok", "ok", "abandoned", "ok", "ok"]
    reasons = {drop["client"]: drop["reason"] for drop in lines[2]["dropped"]}
    assert 1 in reasons
    assert all(reason.startswith(("node failed: ", "no reply within")) for reason in reasons.values())
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"


@pytest.fixture
def long_run(flower: dict[str, str], tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A run on Flower's simulation that has come to round 3 of very many, and its directory."""
    folder = tmp_path / "run"
    keys = pairs(run_dir=folder, num_rounds=100_000)
    command = [sys.executable, "-m", "fedsub_app.cli", "run", "--engine", "local-simulation", *keys]
    process = subprocess.Popen(
        command,
        cwd=PROJECT,
        env=flower,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (folder / "rounds.jsonl").exists() or len(read_rounds(folder)) < 4:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process, folder
    finally:
        process.kill()
        process.communicate()


def stands_still(folder: Path) -> bool:
    """Whether the run ends within some seconds."""
    for _ in range(30):
        before = (folder / "rounds.jsonl").stat().st_size
        time.sleep(2)
        if (folder / "rounds.jsonl").stat().st_size == before:
            return True
    return False


@pytest.mark.slow
def test_ctrl_c_stops_a_flower_run(long_run: tuple["subprocess.Popen[str]", Path]) -> None:
    process, folder = long_run
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    goes_on = f"once it has ended, `fedsub run --resume {folder} --engine local-simulation` goes on"
    assert re.search(rf"^stopped: run \d+ is finished:stopped; {re.escape(goes_on)}$", said, re.MULTILINE)
    assert stands_still(folder)


@pytest.mark.slow
def test_a_killed_superlink_leaves_a_run_that_can_be_stopped(
    long_run: tuple["subprocess.Popen[str]", Path], flower: dict[str, str]
) -> None:
    process, folder = long_run
    home = flower["FLWR_HOME"]
    for pid, _, command in processes():
        if "flower-superlink" in command and home in command:
            os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    found = re.search(
        rf"^failed: run (\d+) is running; `flwr stop \1 local-simulation` stops it; once it has ended, "
        rf"`fedsub run --resume {re.escape(str(folder))} --engine local-simulation` goes on$",
        said,
        re.MULTILINE,
    )
    assert found, said
    stop = [str(Path(sys.executable).parent / "flwr"), "stop", found[1], "local-simulation"]
    subprocess.run(stop, env=flower, check=True, timeout=PATIENCE)
    assert stands_still(folder)
