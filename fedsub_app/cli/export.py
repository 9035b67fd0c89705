"""``fedsub export``: the numbers of runs as CSV."""

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    export = commands.add_parser("export", help="print the rounds of runs, or their clients' numbers, as CSV")
    export.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="directories of runs")
    export.add_argument("--clients", action="store_true", help="a row a client and evaluation instead of one a round")
    export.add_argument("--out", type=Path, metavar="FILE", help="write it there")
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    from fedsub_app.reports.records import export

    text = export(options.folders, options.clients)
    if options.out:
        options.out.write_text(text)
        print(options.out)
    else:
        print(text, end="")
    return 0
