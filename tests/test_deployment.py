"""A real federation on this machine: SuperLink and two SuperNodes, each its own process, home and client state."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import PATIENCE, fedsub, free_port, rounds, run_flower

from fedsub_app.flower import environment

BIN = Path(sys.executable).parent
CONNECTION = "test-deployment"
KEYS = ["-s", "num-rounds=3", "-s", "fedpews.warmup-rounds=2", "-s", "train-per-class=40"]


def serve(stack: ExitStack, log: Path, variables: dict[str, str], *command: str) -> "subprocess.Popen[bytes]":
    """Start a server with a log; it and its children end with ``stack``."""

    def stop() -> None:
        for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(process.pid, number)
                process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        env=variables,
        stdout=stack.enter_context(log.open("wb")),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stack.callback(stop)
    return process


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody who uses a SuperLink with two SuperNodes, as docs and FLOWER.md start them."""
    port = free_port()
    shared = os.environ | environment() | {"PATH": os.pathsep.join((str(BIN), os.environ["PATH"]))}
    with ExitStack() as stack:

        def own(name: str) -> dict[str, str]:
            (tmp_path / name).mkdir()
            return shared | {"FLWR_HOME": str(tmp_path / name), "FEDSUB_STATE": str(tmp_path / name / "state")}

        address = f"127.0.0.1:{port}"
        link = ["--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
        database = ["--database", str(tmp_path / "state.db")]
        server = serve(stack, tmp_path / "superlink.log", own("superlink"), "flower-superlink", *link, *database)
        for number in range(2):
            node = ["--insecure", "--superlink", address, "--port", str(free_port())]
            config = ["--node-config", f"partition-id={number} num-partitions=2"]
            name = f"node{number}"
            serve(stack, tmp_path / f"{name}.log", own(name), "flower-supernode", *node, *config)
        user = own("user")
        (tmp_path / "user" / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{address}"\ninsecure = true\n'
        )
        deadline = time.monotonic() + PATIENCE
        while not answers(port):
            assert server.poll() is None, (tmp_path / "superlink.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "superlink.log").read_text()
            time.sleep(0.1)
        yield user


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_deployment_is_the_local_engine(deployment: dict[str, str], tmp_path: Path) -> None:
    """Same metrics round by round; mask scores stay on the nodes."""
    run = ["fedpews/digits", *KEYS]
    local = fedsub(tmp_path, "run", *run, "-s", f"run-dir={tmp_path / 'local'}")
    assert local.code == 0, local.err
    done = run_flower(deployment, *run, "--engine", CONNECTION, "-s", f"run-dir={tmp_path / 'run'}")
    logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert rounds(tmp_path / "run") == rounds(tmp_path / "local")
    theirs, ours = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "local"))
    assert theirs["final-global-accuracy"] == ours["final-global-accuracy"]
    assert theirs["status"] == "completed"
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "local" / "model.safetensors"
    ).read_bytes()
    assert not (tmp_path / "run" / "clients").exists()
    for number in range(2):
        run_id = json.loads((tmp_path / "run" / "settings.json").read_text())["run-id"]
        states = tmp_path / f"node{number}" / "state" / run_id
        assert [path.name for path in states.iterdir()] == [f"client-{number:06d}"]
