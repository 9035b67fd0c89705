"""``fedsub reproduce`` and ``fedsub sweep``: the runs of a table beside the paper's numbers, and of many settings."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.cli.arguments import Pairs, Slurm, Words, Workers, complete_keys, split
from fedsub_app.common.conf_files import tables
from fedsub_app.common.spelling import parse_pairs


def reproduce(
    name: Annotated[str, Argument(help="a table of `fedsub list tables`, or a TOML file", autocompletion=tables)],
    words: Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="settings of every run")] = None,
    pairs: Pairs = None,
    seeds: Annotated[
        int | None, Option(metavar="N", min=1, max=1000, help="number of seeds (default: the table's)")
    ] = None,
    workers: Workers = None,
    slurm: Slurm = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="default: $FEDSUB_RUNS/reproduce/<name>")] = None,
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help="run this method or setting only; may be repeated")
    ] = None,
    check: Annotated[
        Path | None, Option(metavar="FILE", help="a table's JSON: run its keys and seeds anew and compare with it")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="check every row's settings and list the runs")] = False,
) -> int:
    """Run a table's experiments over seeds; show them beside the paper's numbers."""
    overrides = parse_pairs([*(words or ()), *(pairs or ())])
    from fedsub_app.studies.reproduce import reproduce as run_table

    return run_table(name, seeds, overrides, workers, out, only or (), check, dry_run, slurm or ())


SearchMethod = StrEnum("SearchMethod", "GRID RANDOM OPTUNA")


def sweep(
    words: Words = None,
    pairs: Annotated[
        list[str] | None,
        Option(
            *("-s", "--set"),
            metavar="KEY=VALUES",
            help="a value, values (lr=0.01,0.1) or a range (lr=0.01..0.1, with :log on a logarithmic scale)",
            autocompletion=complete_keys,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        Option(metavar="N", min=1, max=100_000, help="settings to try (default: all, where there is no range)"),
    ] = None,
    search: Annotated[
        SearchMethod | None, Option(help="default: grid, with --trials random; optuna learns from earlier trials")
    ] = None,
    metric: Annotated[
        str | None,
        Option(
            metavar="NAME", help="final score that ranks the trials (default: the clients' score on validation data)"
        ),
    ] = None,
    seeds: Annotated[int, Option(metavar="N", min=1, max=1000, help="runs of each setting")] = 1,
    workers: Workers = None,
    slurm: Slurm = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="default: this sweep's folder in $FEDSUB_RUNS/sweeps")
    ] = None,
) -> int:
    """Run an experiment with many settings and rank them."""
    experiment, space = split(words, pairs)
    from fedsub_app.studies.sweep import sweep as run_sweep

    return run_sweep(experiment, space, trials, search, metric, seeds, workers, slurm or (), out)
