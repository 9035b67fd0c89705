"""``fedsub federation``: its arguments, and what it prints."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError, between

MAX_NODES, MAX_DAYS = 1000, 3650


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    about = "a SuperLink and SuperNodes on this machine; keys for those on several"
    federation = commands.add_parser("federation", help=about).add_subparsers(required=True, metavar="COMMAND")
    up = federation.add_parser("up", help="start a federation, or what has ended of one")
    up.add_argument("--nodes", type=int, metavar="N", help="SuperNodes of this machine (default: 2)")
    up.add_argument("--partitions", type=int, metavar="N", help="SuperNodes in all (default: those of this machine)")
    up.add_argument("--name", help="of the connection to it, for fedsub run --engine (default: federation)")
    up.add_argument("--host", help="name or address under which other machines reach its door (default: none does)")
    up.add_argument("--door", type=int, metavar="PORT", help="of the door for nodes of other machines (default: 8443)")
    up.add_argument("--port", type=int, help="of the SuperLink, on this machine alone (default: a free one)")
    up.add_argument(
        "--listen", metavar="ADDRESS", help="0.0.0.0: no door; whoever reaches --port may start code on nodes"
    )
    up.add_argument("--data-dir", metavar="DIR", help="the nodes' data (default: as the setting data-dir)")
    up.add_argument("--insecure", action="store_true", default=None, help="neither TLS nor node keys")
    up.set_defaults(command=_up)
    down = federation.add_parser("down", help="end it; its keys, logs and database stay")
    down.set_defaults(command=_down)
    status = federation.add_parser("status", help="say what runs of it; exit code 1: not all")
    status.set_defaults(command=_status)
    for command in (up, down, status):
        command.add_argument("--dir", type=Path, metavar="DIR", help="its folder (default: $FEDSUB_RUNS/federation)")
    keys = federation.add_parser("keys", help="make what is missing of a federation's certificates and keys")
    keys.add_argument("folder", type=Path, metavar="DIR")
    keys.add_argument(
        "--host", action="append", default=[], help="name or address of the SuperLink; may be given often"
    )
    keys.add_argument("--nodes", type=int, default=0, metavar="N", help="key pairs of nodes (default: 0)")
    keys.add_argument("--days", type=int, default=365, metavar="N", help="of the server's certificate (default: 365)")
    keys.set_defaults(command=_keys)


def _folder(options: argparse.Namespace) -> Path:
    if sys.platform == "win32":
        raise UserError("fedsub federation: not on Windows: it finds its processes by ps and process groups")
    return options.dir or Path(os.environ.get("FEDSUB_RUNS") or "runs") / "federation"


def _up(options: argparse.Namespace) -> int:
    from fedsub_app.deployment.federation import up

    folder = _folder(options)
    federation = up(
        folder,
        print,
        nodes=between("--nodes", options.nodes, MAX_NODES, minimum=0),
        partitions=between("--partitions", options.partitions, MAX_NODES),
        port=between("--port", options.port, 65535),
        door=between("--door", options.door, 65535),
        listen=options.listen,
        name=options.name,
        host=options.host,
        insecure=options.insecure,
        data_dir=options.data_dir and str(Path(options.data_dir).expanduser().resolve()),
    )
    where = "" if options.dir is None else f" --dir {folder}"
    print(f"fedsub run … --engine {federation.name}; fedsub federation down{where} ends it")
    return 0


def _down(options: argparse.Namespace) -> int:
    from fedsub_app.deployment.federation import down

    print(f"ended: {', '.join(down(_folder(options))) or 'nothing ran'}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from fedsub_app.deployment.federation import status

    complete, lines = status(_folder(options))
    print(*lines, sep="\n")
    return 0 if complete else 1


def _keys(options: argparse.Namespace) -> int:
    from fedsub_app.deployment.keys import make_keys

    nodes = between("--nodes", options.nodes, MAX_NODES, minimum=0) or 0
    days = between("--days", options.days, MAX_DAYS) or 1
    for path in make_keys(options.folder, options.host, nodes, days):
        print(path)
    return 0
