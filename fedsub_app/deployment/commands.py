"""The commands of a federation's processes, the same on one machine and in docker/compose.yml.

Process isolation: SuperLink and SuperNodes pass messages on, and run no code of an app. A SuperExec beside each of them
starts the app's processes, flwr-serverapp and flwr-clientapp; it asks for work over the loopback interface, so that a
SuperNode listens to nobody else.
"""

import shutil
from pathlib import Path

LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"
NO_INSTALLATION = "--disable-runtime-dependency-installation"  # else: `uv sync` with torch, minutes a run


def superlink(port: int, database: str, keys: Path | None, host: str = LOOPBACK) -> list[str]:
    """Return the SuperLink's command; without keys anybody is a node; ``database``: a file or ":flwr-in-memory:"."""
    trust = ["--insecure"]
    if keys:
        trust = [f"--ssl-ca-certfile={keys / 'ca.crt'}", f"--ssl-certfile={keys / 'server.pem'}"]
        trust += [f"--ssl-keyfile={keys / 'server.key'}", "--enable-supernode-auth", _secret(keys, "superlink")]
    address = ["--isolation=process", f"--host={host}", f"--port={port}"]
    return ["flower-superlink", *trust, *address, NO_INSTALLATION, f"--database={database}"]


def server_superexec(port: int, keys: Path | None) -> list[str]:
    """Return the command of the SuperExec that starts the SuperLink's flwr-serverapp."""
    trust = [f"--root-certificates={keys / 'ca.crt'}", _secret(keys, "superlink")] if keys else ["--insecure"]
    return ["flower-superexec", *trust, f"--runtime-api-address={LOOPBACK}:{port}"]


def nginx() -> str | None:
    """Return the path of nginx, None where it is not installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def door(folder: Path) -> list[str]:
    """Return the command of the door, whose settings are ``door.conf`` in a federation's folder."""
    return [nginx() or "nginx", "-c", str(folder / "door.conf"), "-g", "daemon off;"]


def supernode(address: str, number: int, partitions: int, port: int, keys: Path | None) -> list[str]:
    trust = ["--insecure"]
    if keys:
        trust = [f"--root-certificates={keys / 'ca.crt'}", f"--auth-supernode-private-key={keys / node(number)}"]
        trust.append(_secret(keys, node(number)))
    here = ["--isolation=process", f"--host={LOOPBACK}", f"--port={port}"]
    config = f"--node-config=partition-id={number} num-partitions={partitions}"
    return ["flower-supernode", *trust, f"--superlink={address}", *here, config]


def node_superexec(number: int, port: int, keys: Path | None) -> list[str]:
    """Return the command of the SuperExec that starts a SuperNode's flwr-clientapp."""
    secret = [_secret(keys, node(number))] if keys else []
    return ["flower-superexec", "--insecure", *secret, f"--runtime-api-address={LOOPBACK}:{port}"]


def node(number: int) -> str:
    """Return the name of a node, also of its key."""
    return f"node-{number}"


def _secret(keys: Path, owner: str) -> str:
    return f"--superexec-auth-secret-file={keys / f'{owner}.secret'}"
