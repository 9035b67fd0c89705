"""The steps of docs/deploy.md on three machines with addresses of their own, and what may befall them.

The machines are network namespaces, so it takes Linux, root, iproute2, nginx and OpenSSH.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from federations import NAME, Deployed, back, deployed, ended, pairs, so_far, wait_for
from helpers import fedsub, rounds
from test_private_data import Private, images

SERVER, DOOR = "10.77.0.1", 8443
TOOLS = ("ip", "nginx", "ssh-keygen")
KEYS: dict[str, object] = {
    "num-clients": 2,
    "robust": "on",
    "num-rounds": 3,
    "round-timeout": 200,
    "evaluate": "global",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]


@dataclass
class Host:
    """A machine: its network namespace, its address, a folder for what is its own."""

    name: str
    address: str
    folder: Path

    @property
    def inside(self) -> list[str]:
        """The command that runs another one on this machine."""
        return ["ip", "netns", "exec", self.name]

    def link(self, state: str) -> None:
        """Plug its cable in ("up") or out ("down")."""
        _do("ip", "-n", self.name, "link", "set", "eth0", state)


def _do(*command: str | Path) -> None:
    with TemporaryFile("w+") as said:  # no pipe: nginx stays, and would hold its end
        code = subprocess.run(list(map(str, command)), stdout=said, stderr=said).returncode
        said.seek(0)
        assert code == 0, f"{command}: {said.read()}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """The server and two nodes, on one network."""
    folder = tmp_path_factory.mktemp("hosts")
    names = [f"fedsub-{os.getpid()}-{number}" for number in range(3)]
    found = [Host(name, f"10.77.0.{number + 1}", folder / str(number)) for number, name in enumerate(names)]
    server, *nodes = found
    try:
        for host in found:
            host.folder.mkdir()
            _do("ip", "netns", "add", host.name)
            _do("ip", "-n", host.name, "link", "set", "lo", "up")
        _do("ip", "-n", server.name, "link", "add", "eth0", "type", "bridge")
        for number, node in enumerate(nodes):
            peer = ["peer", "name", f"port{number}", "netns", server.name]
            _do("ip", "link", "add", "eth0", "netns", node.name, "type", "veth", *peer)
            _do("ip", "-n", server.name, "link", "set", f"port{number}", "master", "eth0", "up")
        for host in found:
            _do("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            host.link("up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def here(hosts: list[Host]) -> Iterator[Deployed]:
    """Steps 1 to 4: the SuperLink, the door, and the nodes' keys."""
    server, *nodes = hosts
    steps = ["--nodes", "0", "--partitions", "2", "--host", SERVER, "--port", "8000"]
    own = {"FEDSUB_DATA": str(server.folder)}
    with deployed(server.folder, *steps, inside=server.inside, **own) as found:
        for node in nodes:
            _do("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", node.folder / "node")
            answer = found.flwr("supernode", "register", str(node.folder / "node.pub"), NAME)
            assert answer["success"], answer
        yield found


class Node:
    """Step 5: a SuperNode that is started again whenever it ends."""

    def __init__(self, here: Deployed, host: Host, number: int, data: str) -> None:
        trust = ["--ca", here.folder / "keys/ca.crt", "--key", host.folder / "node"]
        place = ["--partition", number, "--partitions", 2, *data.split("="), "--state", host.folder / "state"]
        command = ["fedsub", "federation", "node", "--superlink", f"{SERVER}:{DOOR}", *trust, *place]
        loop = f"while sleep 2; do {shlex.join(map(str, command))}; done"
        variables = here.variables | {"FLWR_HOME": str(host.folder)}
        variables.pop("FEDSUB_DATA", None)
        self.log = host.folder / "supernode.log"
        with self.log.open("a") as log:
            command = [*host.inside, "bash", "-c", loop]
            self.loop = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        """``kill -9`` of the SuperNode; the loop starts it again."""
        _do("pkill", "-KILL", "-f", f"bin/flower-supernode.*{self.log.parent}/")  # it has a process group of its own

    def end(self) -> None:
        """End the loop and the SuperNode, which signs off."""
        os.kill(self.loop.pid, signal.SIGKILL)
        self.loop.wait()
        subprocess.run(["pkill", "-TERM", "-g", str(self.loop.pid)], check=False)
        wait_for(lambda: subprocess.run(["pgrep", "-g", str(self.loop.pid)], capture_output=True).returncode, 60)


@pytest.fixture
def nodes(here: Deployed, hosts: list[Host], request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """Both nodes, each with the ``--node-config`` of its data."""
    found = [Node(here, host, number, request.param(host)) for number, host in enumerate(hosts[1:])]
    try:
        yield found
    finally:
        for node in found:
            node.end()


def data_dir(host: Host) -> str:
    """A folder of the node's own with the common data set."""
    images(host.folder / "pictures.npz", 200)
    return f"--data={host.folder}"


def private_data(host: Host) -> str:
    """A data set that the node alone has."""
    path = images(host.folder / "own.npz", 50, seed=int(host.address[-1]))
    return f"--private-data={path}"


def finished(process: "subprocess.Popen[str]", here: Deployed, nodes: Sequence[Node]) -> None:
    """Wait for a run; it has to end well."""
    done = ended(process, 600)
    logs = "".join(node.log.read_text()[-3000:] for node in nodes)
    assert done.returncode == 0, done.stdout + done.stderr + here.logs() + logs


@pytest.mark.parametrize("nodes", [data_dir], indirect=True)
def test_nodes_are_cut_off_killed_and_come_back(
    here: Deployed, hosts: list[Host], nodes: list[Node], tmp_path: Path
) -> None:
    """In one run; then it is stopped by Flower's command, and the server's certificate is renewed."""
    images(hosts[0].folder / "pictures.npz", 200)
    keys = KEYS | {"dataset": "pictures"}
    folder = tmp_path / "run"
    process = here.run(*pairs(keys | {"num-rounds": 500, "run-dir": folder}))
    try:
        wait_for(lambda: process.poll() is not None or len(so_far(folder)) >= 2, 300)
        assert process.poll() is None, ended(process).stderr + here.logs()
        hosts[2].link("down")
        wait_for(lambda: so_far(folder)[-1]["dropped"], 300)
        hosts[2].link("up")
        cut, seconds = back(folder, 1)
        print(f"cut off until it was dropped: {cut} rounds, back {seconds:.0f} s after the cable was")
        nodes[1].kill()
        killed, seconds = back(folder, 1, cut)
        print(f"killed: {killed} rounds, back after {seconds:.0f} s")
        running = [run for run in here.flwr("list", NAME)["runs"] if run["status"].startswith("running")]
        print(f"flwr list: {running}")
        assert here.flwr("stop", str(running[0]["run-id"]), NAME)["success"]
    finally:
        if process.poll() is None and not so_far(folder):
            process.send_signal(signal.SIGINT)
        done = ended(process)
    print(f"flwr stop: exit code {done.returncode}, {done.stderr.strip()[-300:]!r}")
    assert done.returncode == 1
    assert all(line["status"] == "ok" for line in so_far(folder)), "the other node's rounds count"

    certificate = here.folder / "keys/server.pem"
    before = certificate.read_bytes()
    certificate.unlink()
    _do(sys.executable, "-m", "fedsub_app.cli", "federation", "keys", here.folder / "keys", "--host", SERVER)
    assert certificate.read_bytes() != before
    assert here.federation("down").returncode == 0
    here.up()
    finished(here.run(*pairs(keys | {"run-dir": tmp_path / "renewed"})), here, nodes)
    local = fedsub(tmp_path, "run", *pairs(keys | {"run-dir": tmp_path / "local", "data-dir": hosts[0].folder}))
    assert local.code == 0, local.err
    assert rounds(tmp_path / "renewed") == rounds(tmp_path / "local")


@pytest.mark.parametrize("nodes", [private_data], indirect=True)
def test_data_that_a_node_alone_has(
    here: Deployed, hosts: list[Host], nodes: list[Node], tmp_path: Path, run_local
) -> None:
    """The model is that of the same data in one process, bit for bit; the server has no file of theirs."""
    paths = [host.folder / "own.npz" for host in hosts[1:]]
    named = {"robust": "on", "num_clients": 2, "num_rounds": 2, "private_examples": 60, "evaluate": "global"}
    _, local = run_local("local", grid=lambda _, keys: Private(keys, paths), **named)
    settings = json.loads((local / "settings.json").read_text())["settings"]
    finished(here.run(*pairs(settings | {"run-dir": tmp_path / "run", "node-timeout": 200.0})), here, nodes)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (local / "model.safetensors").read_bytes()
