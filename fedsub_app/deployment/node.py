"""One SuperNode of this machine: checked before it starts, in the foreground or as a systemd unit.

Flower's SuperNode starts a flwr-clientapp for every message; both belong to the user that starts this command.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.data.names import private_name
from fedsub_app.deployment import commands, flower, processes

UNIT = Path("/etc/systemd/system/fedsub-node.service")
CONNECT_S = 10.0
# Reasons of the codes with which a SuperNode ends, by Flower; each is a line of its log.
REASONS = {
    302: "--key: not the private key of a node",
    305: "the SuperLink refuses the key: `flwr supernode register NODE.pub federation` on the server registers it; "
    "it is also refused while another node has it, and for up to 60 s after a crash",
    606: "the server runs another version of Flower",
}


@dataclass(frozen=True)
class Node:
    """A SuperNode's configuration: the options of ``fedsub federation node``.

    ``key`` and ``ca`` are both None without TLS; ``port`` is that of 127.0.0.1 where its processes find each other.
    """

    superlink: str
    partition: int
    partitions: int
    key: Path | None
    ca: Path | None
    data: Path | None
    private: Path | None
    state: Path
    port: int

    def check(self) -> None:
        """Raise :class:`UserError` with what would keep the node from taking part: place, key, data, SuperLink."""
        if not 0 <= self.partition < self.partitions:
            raise UserError(f"--partition {self.partition}: must be 0 to {self.partitions - 1}, below --partitions")
        if (self.key is None) != (self.ca is None):
            raise UserError("--key and --ca go together: the node's private key and the federation's ca.crt")
        if self.key:
            check_key(self.key)
        for option, path in (("--data", self.data), ("--private-data", self.private)):
            if path and not os.access(path, os.R_OK):
                raise UserError(f"{option} {path}: not there, or not readable by this user")
        if self.data and not self.data.is_dir():
            raise UserError(f"--data {self.data}: must be a folder; --private-data takes a file of this node alone")
        if self.private:
            private_name(self.private)
        check_superlink(self.superlink, self.ca)

    @property
    def files(self) -> dict[str, Path]:
        """The files that it reads, by option."""
        named = {"--key": self.key, "--ca": self.ca, "--data": self.data, "--private-data": self.private}
        return {option: path for option, path in named.items() if path}

    @property
    def command(self) -> list[str]:
        """The command of its SuperNode, which starts its own flwr-clientapp."""
        trust = [f"--root-certificates={self.ca}", f"--auth-supernode-private-key={self.key}"]
        place: dict[str, Any] = {"partition-id": self.partition, "num-partitions": self.partitions}
        folders = {"data-dir": self.data, "private-data": self.private, "state-dir": self.state}
        place |= {key: f'"{path}"' for key, path in folders.items() if path}
        config = " ".join(f"{key}={value}" for key, value in place.items())
        where = [f"--superlink={self.superlink}", f"--host={commands.LOOPBACK}", f"--port={self.port}"]
        return ["flower-supernode", *(trust if self.key else ["--insecure"]), *where, f"--node-config={config}"]

    def unit(self, user: str) -> str:
        """Return a systemd unit that runs the node as a user, and starts it again whatever it ends with."""
        paths = self.files | {"--state": self.state}
        for option, path in paths.items():
            if re.search(r"[\s\"'\\%$]", str(path)):
                raise UserError(f"{option} {path}: a unit takes no spaces, quotes, % and $")
        program, python = Path(sys.executable).parent / "fedsub", Path(sys.executable).resolve()
        homes = [
            path.is_relative_to(home) for path in (program, python, *paths.values()) for home in ("/home", "/root")
        ]
        options = {"--superlink": self.superlink, "--partition": self.partition, "--partitions": self.partitions}
        options |= paths | {"--port": self.port}
        words = [program, "federation", "node", *(word for pair in options.items() for word in pair)]
        command = " ".join(map(str, words if self.key else [*words, "--insecure"]))
        home = "read-only" if any(homes) else "yes"
        text = (Path(__file__).parent / UNIT.name).read_text()
        return text.format(place=self.partition, user=user, command=command, state=self.state, home=home)


def check_key(path: Path) -> None:
    """Raise :class:`UserError` where a file is no private key of a node, or others may read it."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"a key of another kind, {type(key).__name__}")
    except OSError as error:
        raise UserError(f"--key {path}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        made = 'ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f node'
        raise UserError(f"--key {path}: must be a private key as `{made}` makes it ({one_line(error)[:100]})") from None
    if path.stat().st_mode & 0o077:
        raise UserError(f"--key {path}: other users may read it; `chmod 600 {path}`")


def check_superlink(address: str, ca: Path | None) -> None:
    """Raise :class:`UserError` where nobody answers at ``host:port``, or not with a certificate of the authority."""
    match = re.fullmatch(r"\[?([^\s\]/]+)\]?:(\d{1,5})", address)
    if not match:
        raise UserError(f"--superlink {address}: must be host:port, without https://")
    try:
        context = ssl.create_default_context(cafile=ca) if ca else None
        with socket.create_connection((match[1], int(match[2])), CONNECT_S) as connection:
            if context:
                context.wrap_socket(connection, server_hostname=match[1]).close()
    except ssl.SSLCertVerificationError as error:
        raise UserError(f"--superlink {address}: its certificate is refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        where = f"--ca {ca}: no certificate" if "PEM" in str(error) or "X509" in str(error) else "it does not speak TLS"
        raise UserError(f"--superlink {address}: {where} ({error.reason})") from None
    except (OSError, OverflowError, UnicodeError) as error:
        reason = (
            f"{ca}: {error.strerror}" if isinstance(error, FileNotFoundError | PermissionError) else one_line(error)
        )
        raise UserError(f"--superlink {address}: cannot be reached ({reason})") from None


def install(node: Node, user: str, path: Path) -> str:
    """Write the unit, make the state's folder, and return the commands that start it."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        made = f"useradd --system --home-dir {node.state} --shell /usr/sbin/nologin {user}"
        raise UserError(f"--user {user}: no such user; `{made}` makes one") from None
    text = node.unit(user)
    own = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": os.getgrouplist(user, account.pw_gid)}
    read = node.files | {"python": Path(sys.executable)}
    for option, file in read.items() if os.geteuid() == 0 else ():  # root reads all of it
        if subprocess.run(["test", "-r", file], check=False, **own).returncode:  # type: ignore[call-overload]
            raise UserError(f"{option} {file}: the unit's --user {user} cannot read it")
    node.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(node.state, account.pw_uid, account.pw_gid)
    path.write_text(text)
    return f"systemctl daemon-reload && systemctl enable --now {path.stem}; journalctl -u {path.stem} shows its log"


def run(node: Node) -> int:
    """Run the SuperNode until it ends, streaming its log; returns the exit code, 0 after SIGTERM or Ctrl-C."""
    if processes.answers(node.port):
        raise UserError(f"--port {node.port}: another program listens there; each node of a machine needs its own")
    node.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = node.state / f"flwr-{node.port}"  # of this node alone: Flower installs an app in place, and never again
    shutil.rmtree(home, ignore_errors=True)  # where a full disk or a crash has left a part of it
    folders = {"FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    variables = {"FEDSUB_CACHE": str(node.state / "cache")} | flower.full_environment() | folders
    code, ended = 0, False
    options: dict[str, Any] = {"stdout": -1, "stderr": -2, "text": True, "umask": 0o077, "start_new_session": True}
    with subprocess.Popen(node.command, env=variables, **options) as process:

        def end(*_: object) -> None:
            nonlocal ended
            ended = True
            process.terminate()

        def end_others() -> None:  # the SuperExec that a SuperNode leaves behind would hold the pipe, and the port
            process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

        threading.Thread(target=end_others, daemon=True).start()
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := re.search(r"Exit Code: (\d+)", line):
                code = int(match[1])
    if ended:
        return 0
    why = REASONS.get(code, "the lines above say why")
    print(f"error: the SuperNode of {node.superlink} has ended: {why}", file=sys.stderr)
    return process.returncode or 1
