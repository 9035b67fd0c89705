"""``fedsub federation``, ``setup`` and ``stop``: Flower on this machine."""

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedsub_app.common.errors import UserError

MAX_NODES, MAX_DAYS = 1000, 3650
app = typer.Typer(help="A SuperLink and SuperNodes on this machine; keys for several machines.", no_args_is_help=True)
Dir = Annotated[Path | None, Option(metavar="DIR", help="the federation's folder (default: $FEDSUB_RUNS/federation)")]


def _folder(folder: Path | None) -> Path:
    from fedsub_app.runs.recorded import runs_folder

    return folder or runs_folder() / "federation"


def _whole(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except RuntimeError:
        raise UserError(f"{path}: '~' is the home of no user here") from None


@app.command()
def up(
    nodes: Annotated[
        int | None, Option(metavar="N", min=0, max=MAX_NODES, help="SuperNodes on this machine (default: 2)")
    ] = None,
    partitions: Annotated[
        int | None, Option(metavar="N", min=1, max=MAX_NODES, help="SuperNodes in all (default: this machine's)")
    ] = None,
    name: Annotated[str | None, Option(help="the connection's name, for --engine (default: federation)")] = None,
    host: Annotated[
        str | None, Option(help="name or address of the door for other machines (default: no door)")
    ] = None,
    door: Annotated[
        int | None, Option(metavar="PORT", min=1, max=65535, help="port of the door for other machines (default: 8443)")
    ] = None,
    port: Annotated[
        int | None, Option(min=1, max=65535, help="the SuperLink's port, on this machine alone (default: a free one)")
    ] = None,
    listen: Annotated[
        str | None,
        Option(
            metavar="ADDRESS", help="0.0.0.0: open --port, without a door; whoever reaches it may start code on nodes"
        ),
    ] = None,
    data_dir: Annotated[
        str | None, Option(metavar="DIR", help="folder of the nodes' data (default: the setting data-dir)")
    ] = None,
    insecure: Annotated[bool, Option("--insecure", help="neither TLS nor node keys")] = False,
    dir: Dir = None,
) -> None:
    """Start a federation, or the parts of it that have ended."""
    from fedsub_app.deployment.federation import up as start

    folder = _folder(dir)
    federation = start(
        folder,
        nodes=nodes,
        partitions=partitions,
        port=port,
        door=door,
        listen=listen,
        name=name,
        host=host,
        insecure=insecure or None,
        data_dir=data_dir and str(_whole(Path(data_dir))),
    )
    where = "" if dir is None else f" --dir {shlex.quote(str(folder))}"
    print(f"fedsub run … --engine {federation.name}; fedsub federation down{where} ends it")


@app.command()
def down(dir: Dir = None) -> None:
    """End the federation; its keys, logs and database stay."""
    from fedsub_app.deployment.federation import down as end

    print(f"ended: {', '.join(end(_folder(dir))) or 'nothing ran'}")


@app.command()
def status(dir: Dir = None) -> int:
    """Say which parts of the federation run; exit code 1: some do not."""
    from fedsub_app.deployment.federation import status as look

    complete, lines = look(_folder(dir))
    print(*lines, sep="\n")
    return 0 if complete else 1


@app.command()
def node(
    superlink: Annotated[str, Option(metavar="HOST:PORT", help="the SuperLink's door")],
    partition: Annotated[int, Option(metavar="N", help="the node's place among all, from 0")],
    partitions: Annotated[int, Option(metavar="N", min=1, max=MAX_NODES, help="number of nodes in all")],
    key: Annotated[Path | None, Option(metavar="FILE", help="the node's private key")] = None,
    ca: Annotated[Path | None, Option(metavar="FILE", help="the federation's ca.crt")] = None,
    data: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            envvar="FEDSUB_DATA",  # else the run's data-dir, a path of the server, would hide it
            show_envvar=False,
            help="folder of data sets (default: $FEDSUB_DATA)",
        ),
    ] = None,
    private_data: Annotated[
        Path | None, Option(metavar="PATH", help="the node's own data: an .npz file, image folder or table")
    ] = None,
    state: Annotated[
        Path | None,
        Option(metavar="DIR", help="its clients' state (default: ~/.local/state/fedsub; for a unit /var/lib/fedsub)"),
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="port of 127.0.0.1 for the node's own processes")] = 9094,
    insecure: Annotated[bool, Option("--insecure", help="neither TLS nor a key")] = False,
    install: Annotated[bool, Option("--install", help="write a systemd unit instead of starting the node")] = False,
    user: Annotated[str, Option(help="with --install: the unit's user")] = "fedsub",
    unit: Annotated[
        Path | None, Option(metavar="FILE", help="with --install: its file (default: in /etc/systemd/system)")
    ] = None,
) -> int:
    """Start this machine's node of a federation, after a check of key, data and SuperLink."""
    from fedsub_app.deployment import node as module

    if not insecure and not (key and ca):
        raise UserError("--key and --ca: needed, unless --insecure; `fedsub federation keys` makes both")
    key, ca, data, private_data = (path and _whole(path) for path in (key, ca, data, private_data))
    home = _whole(state or Path("/var/lib/fedsub" if install else "~/.local/state/fedsub"))
    this = module.Node(superlink, partition, partitions, key, ca, data, private_data, home, port)
    this.check()
    if not install:
        return module.run(this)
    path = unit or module.UNIT
    print(path, module.install(this, user, path), sep="\n")
    return 0


@app.command()
def keys(
    folder: Annotated[Path, Argument(metavar="DIR")],
    host: Annotated[list[str] | None, Option(help="name or address of the SuperLink; may be repeated")] = None,
    nodes: Annotated[int, Option(metavar="N", min=0, max=MAX_NODES, help="key pairs for nodes")] = 0,
    days: Annotated[int, Option(metavar="N", min=1, max=MAX_DAYS, help="days for which a certificate is valid")] = 365,
    user: Annotated[list[str] | None, Option(help="name of a user who may start runs; may be repeated")] = None,
) -> None:
    """Make the certificates and keys that a federation lacks."""
    from fedsub_app.deployment.keys import make_keys

    for path in make_keys(folder, host or [], nodes, days, user or []):
        print(path)


@app.command()
def connect(
    superlink: Annotated[str, Option(metavar="HOST:PORT", help="the SuperLink's door")],
    ca: Annotated[Path, Option(metavar="FILE", help="the federation's ca.crt")],
    certificate: Annotated[
        Path, Option(metavar="FILE", help="the user's user-NAME.pem; user-NAME.key must lie beside it")
    ],
    name: Annotated[str, Option(help="name of the connection, for --engine")] = "federation",
) -> None:
    """Let this machine's user start runs on a federation elsewhere."""
    from fedsub_app.deployment import flower, node
    from fedsub_app.deployment.federation import check_name

    ca, certificate = _whole(ca), _whole(certificate)
    check_name(name)
    node.check_superlink(superlink, ca)
    for path in (certificate, certificate.with_suffix(".key")):
        if not path.is_file():
            raise UserError(f"--certificate: {path} is not there")
    before = flower.connections().get(name, {})
    if before and flower.CERTIFICATE_KEY not in before:
        raise UserError(f"--name {name}: Flower's config.toml has such a connection, to another SuperLink")
    door = {"address": superlink, "root-certificates": str(ca), flower.CERTIFICATE_KEY: str(certificate)}
    config = flower.connect(name, door)
    try:
        nodes = flower.ask("supernode", "list", name)["nodes"]
    except UserError:
        flower.connect(name, before)
        raise
    print(f"{config}: connection {name}, {len(nodes)} nodes; fedsub run … --engine {name}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def flwr(context: typer.Context) -> int:
    """Run a command of Flower's with a connection's certificate: `list federation`, `stop ID federation`."""
    from fedsub_app.deployment import flower

    return subprocess.run(flower.flwr(*context.args), env=flower.full_environment(), check=False).returncode


def setup(
    cluster: Annotated[
        int | None,
        Option(metavar="N", min=1, help="also register ray-cluster: N simulated nodes on a running Ray cluster"),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="print nothing on success")] = False,
) -> None:
    """Prepare this environment for Flower: a connection and variables; needed once, `make run` does it as well."""
    from fedsub_app.deployment import flower

    lines = flower.setup(cluster)
    if not quiet:
        print(*lines, sep="\n")


def stop() -> None:
    """Stop the SuperLink that Flower keeps running for this environment's simulations."""
    from fedsub_app.deployment import flower

    print(flower.stop())
