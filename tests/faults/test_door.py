"""The door of a real federation: nginx asks users for a certificate, and nodes come in without one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from federations import NAME, Deployed, deployed, ended, pairs, so_far, wait_for
from helpers import free_port

from fedsub_app.deployment import commands
from fedsub_app.deployment.keys import make_keys
from fedsub_app.deployment.node import Node

KEYS = {"num-rounds": 1, "train-per-class": 40, "evaluate": "global", "round-timeout": 200, "node-timeout": 120}
ASKED = "the door asks for the certificate of a user"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not commands.nginx(), reason="needs nginx")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A SuperLink behind its door, node 0, the keys of node 1 and of the user ann."""
    arguments = ["--nodes", "1", "--partitions", "2", "--host", "localhost", "--door", str(free_port())]
    with deployed(tmp_path_factory.mktemp("door"), *arguments) as found:
        change_users(found, "--nodes", "2", "--user", "ann")
        yield found


def change_users(here: Deployed, *arguments: str) -> None:
    done = here.fedsub("federation", "keys", here.folder / "keys", *arguments)
    assert done.returncode == 0, done.stderr
    os.kill(here.pid("door"), signal.SIGHUP)


def connected(here: Deployed, home: Path, certificate: Path) -> tuple[Deployed, "subprocess.CompletedProcess[str]"]:
    """The shell of a user on a machine of her own, and what `fedsub federation connect` said there."""
    user = Deployed(home)
    arguments = ["--superlink", f"localhost:{here.now.door}", "--ca", here.folder / "keys/ca.crt", "--name", NAME]
    return user, user.fedsub("federation", "connect", *arguments, "--certificate", certificate)


@contextmanager
def second_node(here: Deployed, home: Path, *more: str) -> Iterator[Path]:
    """Node 1, which comes in through the door; its log."""
    keys, home = here.folder / "keys", home / "node-1"
    home.mkdir(parents=True)
    files = (keys / "node-1", keys / "ca.crt", None, None, home)
    node = Node(f"localhost:{here.now.door}", 1, 2, *files, free_port())
    node.check()
    program, *words = node.command
    with (home / "log").open("w") as log:
        command = [str(Path(sys.executable).parent / program), *words, *more]
        process = subprocess.Popen(
            command, env=here.variables | {"FLWR_HOME": str(home)}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(lambda: process.poll() is not None or len(online(here)) == 2)
        yield home / "log"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
        wait_for(lambda: len(online(here)) == 1)


def online(here: Deployed) -> list[str]:
    return [node["node-id"] for node in here.flwr("supernode", "list", NAME)["nodes"] if node["status"] == "online"]


def last_run(here: Deployed) -> Path:
    """The folder of the last run; it is on the server, whoever started it."""
    return max((here.folder.parent / "runs").rglob("rounds.jsonl"), key=lambda path: path.stat().st_mtime).parent


def test_a_user_needs_a_certificate_and_a_node_does_not(here: Deployed, tmp_path: Path) -> None:
    keys = here.folder / "keys"
    for name in ("user-ann.pem", "user-ann.key"):
        shutil.copy(keys / name, tmp_path)
    ann, done = connected(here, tmp_path / "ann", tmp_path / "user-ann.pem")
    assert done.returncode == 0, done.stderr
    done = ann.fedsub("federation", "flwr", "supernode", "register", keys / "node-1.pub", NAME)
    assert done.returncode == 0, done.stdout + done.stderr
    with second_node(here, tmp_path) as log:
        done = ended(ann.run("fedpews/digits", *pairs(KEYS)))
        assert done.returncode == 0, done.stdout + done.stderr + here.logs() + log.read_text()
        (line,) = so_far(last_run(here))
        assert line["dropped"] == []
        assert line["clients"] == [0, 1]

    # A certificate of the same name that the federation did not make; then none at all.
    make_keys(tmp_path / "theirs", users=["ann"])
    _, done = connected(here, tmp_path / "eve", tmp_path / "theirs/user-ann.pem")
    assert done.returncode == 2
    assert ASKED in done.stderr
    bob = Deployed(tmp_path / "bob")
    table = {"address": f"localhost:{here.now.door}", "root-certificates": str(keys / "ca.crt")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    config = Path(bob.variables["FLWR_HOME"]) / "config.toml"
    config.write_text("\n".join(["[superlink]", f'default = "{NAME}"', f"[superlink.{NAME}]", *lines, ""]))
    done = ended(bob.run("fedpews/digits", *pairs(KEYS)))
    assert done.returncode == 2
    assert ASKED in done.stderr

    log_of_door = (here.folder / "door.log").read_text()
    assert '200 /v1/control/start-run "CN=ann"' in log_of_door
    assert log_of_door.count("/v1/control/start-run") == 2
    assert '403 /v1/control/start-run "-"' in log_of_door

    (keys / "user-ann.pem").unlink()
    change_users(here)
    done = ann.fedsub("federation", "flwr", "list", NAME)
    assert done.returncode
    assert ASKED in done.stdout + done.stderr
    change_users(here, "--user", "ann")


def test_a_node_of_trusted_entities_runs_nothing_of_ours(here: Deployed, tmp_path: Path) -> None:
    """Flower's --trusted-entities: the app that `fedsub run` sends has no signature of its hub."""
    key = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    trusted = tmp_path / "trusted.yaml"
    trusted.write_text(f"fpk_ours: {key.decode()}\n")
    here.flwr("supernode", "register", str(here.folder / "keys/node-1.pub"), NAME)  # or it is already
    with second_node(here, tmp_path, "--trusted-entities", str(trusted)) as log:
        done = ended(here.run("fedpews/digits", *pairs(KEYS | {"min-nodes": 1, "node-timeout": 120})))
        print(done.stdout[-3000:], log.read_text()[-3000:])
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()
        assert "The FAB could not be verified" in log.read_text()
