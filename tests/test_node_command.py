"""`fedsub federation node` and `connect`: their checks, what they write and run, a real node."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import deployed, wait_for

from fedsub_app.cli.main import main
from fedsub_app.deployment import federation, flower
from fedsub_app.deployment import node as module
from fedsub_app.deployment.keys import make_keys
from fedsub_app.deployment.processes import free_port


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, nodes=1, users=["ann"])
    return folder


@pytest.fixture
def asked() -> list[object]:
    """The name in the certificate of each client that sent one to ``superlink``."""
    return []


@pytest.fixture
def superlink(keys: Path, asked: list[object]) -> Iterator[str]:
    """The address of a server that has the federation's certificate and hangs up after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    context.load_verify_locations(keys / "user-ann.pem")  # users.pem has the authority, which would join the chain
    context.verify_mode = ssl.CERT_OPTIONAL

    def serve() -> None:
        while True:
            try:
                with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                    if certificate := connection.getpeercert():
                        asked.append(dict(pair for (pair,) in certificate["subject"])["commonName"])  # type: ignore[misc]
            except ssl.SSLError:
                continue
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"localhost:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def given(superlink: str, keys: Path, **changes: object) -> module.Node:
    own = {"key": keys / "node-0", "ca": keys / "ca.crt", "data": keys, "private": None, "state": keys / "state"}
    return module.Node(**({"superlink": superlink, "partition": 0, "partitions": 2, "port": 9094} | own | changes))  # type: ignore[arg-type]


def test_what_is_right_passes(superlink: str, keys: Path) -> None:
    given(superlink, keys).check()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--partition 2", "--partition 2: must be 0 to 1, below --partitions"),
        ("--key KEYS/none", "--key KEYS/none: No such file or directory"),
        ("--key KEYS/ca.crt", "--key KEYS/ca.crt: must be a private key as `ssh-keygen -q -t ecdsa -b 384"),
        ("--data KEYS/none", "--data KEYS/none: not there, or not readable by this user"),
        ("--data KEYS/ca.crt", "--data KEYS/ca.crt: must be a folder; --private-data takes a file of this node alone"),
        ("--private-data KEYS/ca.crt", "private-data = 'KEYS/ca.crt': not there, or not an .npz file, an image folder"),
        ("--superlink https://a:1", "--superlink https://a:1: must be host:port, without https://"),
        ("--superlink localhost:CLOSED", "--superlink localhost:CLOSED: cannot be reached (ConnectionRefusedError"),
        (f"--superlink {'a' * 99}:1", f"--superlink {'a' * 99}:1: cannot be reached (UnicodeError"),
        ("--ca OTHER/ca.crt", "--superlink localhost:PORT: its certificate is refused: unable to get local issuer"),
        ("--ca KEYS/node-0", "--superlink localhost:PORT: --ca KEYS/node-0: no certificate ("),
        ("--install --user nobody-here", "--user nobody-here: no such user; `useradd --system --home-dir /var/lib/f"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: str, said: str, superlink: str, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path)
    words = {"KEYS": str(keys), "OTHER": str(tmp_path), "CLOSED": str(free_port()), "PORT": superlink.split(":")[1]}
    options = {"--superlink": superlink, "--key": "KEYS/node-0", "--ca": "KEYS/ca.crt"}
    options |= {"--partition": "0", "--partitions": "2", "--data": "KEYS"}
    parts = arguments.split()
    command = [word for pair in options.items() if pair[0] not in parts for word in pair] + parts
    for name, value in words.items():
        command, said = [word.replace(name, value) for word in command], said.replace(name, value)
    assert main(["federation", "node", *command]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {said}")


def test_a_key_that_others_may_read(keys: Path, tmp_path: Path) -> None:
    shutil.copy(keys / "node-0", tmp_path / "node")
    (tmp_path / "node").chmod(0o640)
    with pytest.raises(module.UserError, match=r"other users may read it; `chmod 600 .*node`"):
        module.check_key(tmp_path / "node")


def test_without_tls_it_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federation", "node", "--superlink", "a:1", "--partition", "0", "--partitions", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: --key and --ca: needed, unless --insecure")


def test_the_command(keys: Path) -> None:
    """It trusts the authority, has the node's key and place, and listens on 127.0.0.1 alone."""
    assert given("a:8443", keys, data=None, private=Path("/srv/a.npz"), state=Path("/s")).command == [
        "flower-supernode",
        f"--root-certificates={keys / 'ca.crt'}",
        f"--auth-supernode-private-key={keys / 'node-0'}",
        "--superlink=a:8443",
        "--host=127.0.0.1",
        "--port=9094",
        '--node-config=partition-id=0 num-partitions=2 private-data="/srv/a.npz" state-dir="/s"',
    ]


def test_the_unit_starts_the_same_node(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is read back into the node; systemd accepts it, if there is one here."""
    this = given("a:8443", keys, private=keys / "ca.crt", state=tmp_path / "state", port=9100)
    path = tmp_path / "fedsub-node.service"
    assert "systemctl enable --now fedsub-node" in module.install(this, "root", path)
    text = path.read_text()
    (command,) = (line.removeprefix("ExecStart=") for line in text.splitlines() if line.startswith("ExecStart="))
    read = []
    monkeypatch.setattr(module.Node, "check", lambda self: None)
    monkeypatch.setattr(module, "run", lambda node: read.append(node) or 0)
    assert main(command.split()[1:]) == 0
    assert read == [this]
    at_home = given("a:1", keys, state=Path("/home/ann/state"))  # which a unit sees only if it is told
    assert "ProtectHome=read-only\n" in at_home.unit("ann")
    assert {"User=root", "Restart=always", "NoNewPrivileges=yes", "ProtectSystem=strict"} <= set(text.splitlines())
    with pytest.raises(module.UserError, match="a unit takes no spaces"):
        given("a:1", keys, data=Path("/srv/my data")).unit("root")
    if shutil.which("systemd-analyze"):
        verified = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
        assert "fedsub-node" not in verified.stderr.replace(str(this.state), ""), verified.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another user installs no unit for a third one")
def test_a_unit_whose_user_cannot_read_a_file_is_not_written(keys: Path, tmp_path: Path) -> None:
    """Root, who installs it, reads all; systemd would start it again and again."""
    unit = tmp_path / "fedsub-node.service"
    with pytest.raises(module.UserError, match=r"^--key .*node-0: the unit's --user nobody cannot read it$"):
        module.install(given("a:8443", keys, state=tmp_path / "state"), "nobody", unit)
    assert not unit.exists()
    assert not (tmp_path / "state").exists()


def test_a_node_that_starts_has_no_app_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower takes an app that a full disk has cut off for a whole one, in each run of the same code."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(federation, "start", lambda *_: 1)
    monkeypatch.setattr(module.Node, "command", property(lambda _: ["true"]))
    node = given("a:1", tmp_path, state=tmp_path / "own", port=free_port())
    starting = federation.Starting(tmp_path, federation.Federation(processes={"node-0": federation.Process([])}))
    cut = [tmp_path / "own" / f"flwr-{node.port}" / "apps/fedsub", tmp_path / "node-0/apps/fedsub"]
    for app in cut:
        app.mkdir(parents=True)
    assert module.run(node) == 1
    starting.start("node-0")
    assert not any(app.exists() for app in cut)


def test_the_environments_data_are_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run names its server's folder, which counts for a node without one; and a unit has another environment."""
    read: list[module.Node] = []
    monkeypatch.setattr(module.Node, "check", lambda self: None)
    monkeypatch.setattr(module, "run", lambda node: read.append(node) or 0)
    monkeypatch.setenv("FEDSUB_DATA", str(tmp_path))
    options = ["--superlink", "a:1", "--partition", "0", "--partitions", "1", "--insecure"]
    assert main(["federation", "node", *options]) == 0
    assert f'data-dir="{tmp_path}"' in read[0].command[-1]


@pytest.mark.run
def test_a_user_presents_the_certificate_of_the_connection(
    superlink: str, keys: Path, asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's command presents it; a door that does not let it in leaves no connection."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    command = ["federation", "connect", "--superlink", superlink, "--ca", str(keys / "ca.crt"), "--name", "far"]
    assert main([*command, "--certificate", str(keys / "user-ann.pem")]) == 2
    assert asked == ["ann"]
    assert "far" not in flower.connections()
    flower.connect("far", {"address": superlink, "root-certificates": str(keys / "ca.crt")})
    with pytest.raises(module.UserError, match=r"^flwr list: "):
        flower.ask("list", "far")
    assert asked == ["ann"], "a connection without a certificate presents none"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--certificate KEYS/user-bob.pem", "--certificate: KEYS/user-bob.pem is not there"),
        ("--certificate KEYS/node-0.pub", "--certificate: KEYS/node-0.key is not there"),
        ("--name mine", "--name mine: Flower's config.toml has such a connection, to another SuperLink"),
        ("--superlink localhost", "--superlink localhost: must be host:port, without https://"),
    ],
)
def test_a_connection_that_cannot_be_is_one_line(
    arguments: str,
    said: str,
    superlink: str,
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flower.connect("mine", {"address": "127.0.0.1:1", "insecure": True})
    option, value = arguments.replace("KEYS", str(keys)).split()
    files = {"--ca": str(keys / "ca.crt"), "--certificate": str(keys / "user-ann.pem")}
    options = {"--superlink": superlink, **files} | {option: value}
    assert main(["federation", "connect", *(word for pair in options.items() for word in pair)]) == 2
    assert capsys.readouterr().err == f"error: {said.replace('KEYS', str(keys))}\n"


@pytest.mark.slow
def test_a_node_takes_part_once_its_key_is_registered(tmp_path: Path) -> None:
    """Until then the command ends with one line that says how; SIGTERM signs it off."""
    with deployed(tmp_path, "--nodes", "1", "--partitions", "2") as here:
        folder = here.folder / "keys"
        make_keys(folder, nodes=2)
        command = ["federation", "node", "--superlink", f"127.0.0.1:{here.now.port}", "--key", folder / "node-1"]
        command += ["--ca", folder / "ca.crt", "--partition", "1", "--partitions", "2", "--port", str(free_port())]
        command += ["--data", tmp_path, "--state", tmp_path / "state"]
        done = here.fedsub(*command)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: the SuperNode of 127.0.0.1:")
        assert "flwr supernode register NODE.pub federation" in done.stderr
        assert here.flwr("supernode", "register", str(folder / "node-1.pub"), here.now.name)["success"]
        node = here.begin(*command)
        try:

            def online() -> bool:
                listed = here.flwr("supernode", "list", here.now.name)["nodes"]
                return sum(one["status"] == "online" for one in listed) == 2

            wait_for(online, 60)
        finally:
            os.kill(node.pid, signal.SIGTERM)
            node.communicate(timeout=60)
        assert node.returncode == 0
