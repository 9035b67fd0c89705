"""``fedsub export``: the numbers of runs as CSV."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def export(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="directories of runs")],
    clients: Annotated[bool, Option("--clients", help="a row a client and evaluation instead of one a round")] = False,
    out: Annotated[Path | None, Option(metavar="FILE", help="write it there")] = None,
) -> None:
    """Print the rounds of runs, or their clients' numbers, as CSV."""
    from fedsub_app.reports.export import export as table

    text = table(folders, clients)
    if out:
        out.write_text(text)
        print(out)
    else:
        print(text, end="")
