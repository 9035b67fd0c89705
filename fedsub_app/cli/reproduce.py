"""``fedsub reproduce``: the runs of a table, beside the paper's numbers."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.cli.arguments import Pairs, Slurm, Workers, checked, complete_tables
from fedsub_app.common.errors import between


def reproduce(
    name: Annotated[
        str, Argument(help="a table of `fedsub list tables`, or a TOML file", autocompletion=complete_tables)
    ],
    words: Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="settings of every run")] = None,
    pairs: Pairs = None,
    seeds: Annotated[int | None, Option(metavar="N", help="number of seeds (default: the table's)")] = None,
    workers: Workers = None,
    slurm: Slurm = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="default: $FEDSUB_RUNS/reproduce/<name>")] = None,
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help="run this method or setting only; may be given often")
    ] = None,
    check: Annotated[
        Path | None, Option(metavar="FILE", help="a table's JSON: run its keys and seeds anew and compare with it")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="check every row's settings and list the runs")] = False,
) -> int:
    """Run a table's experiments over seeds, beside the paper's numbers."""
    overrides = checked([*(words or ()), *(pairs or ())])
    seeds, workers = between("--seeds", seeds, 1000), between("--workers", workers, 1000)
    from fedsub_app.studies.reproduce import reproduce as run_table

    return run_table(name, seeds, overrides, workers, out, only or (), check, dry_run, slurm or ())
