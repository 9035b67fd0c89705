"""``fedsub reproduce``: the runs of a table, beside the paper's numbers."""

import argparse
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import between


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    reproduce = commands.add_parser(
        "reproduce", help="run a table's experiments over seeds, beside the paper's numbers"
    )
    reproduce.add_argument("name", help="a table, see `fedsub list tables`, or the path of a TOML file")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the table's)")
    reproduce.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting in every run"
    )
    reproduce.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: the cores)")
    reproduce.add_argument("--out", type=Path, metavar="DIR", help="default: $FEDSUB_RUNS/reproduce/<name>")
    reproduce.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this method or setting; may be given often"
    )
    reproduce.add_argument(
        "--check", type=Path, metavar="FILE", help="a table's JSON: run its keys and seeds anew and compare with it"
    )
    reproduce.add_argument("--dry-run", action="store_true", help="check every row's settings and list the runs")
    reproduce.set_defaults(command=_reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    from fedsub_app.config import parse_pairs
    from fedsub_app.studies.reproduce import reproduce

    overrides = parse_pairs(options.set)
    seeds, workers = between("--seeds", options.seeds, 1000), between("--workers", options.workers, 1000)
    arguments = (options.name, seeds, overrides, workers, options.out, options.only, options.check, options.dry_run)
    return reproduce(*arguments)
