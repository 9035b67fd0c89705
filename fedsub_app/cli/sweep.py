"""``fedsub sweep``: runs of an experiment with many settings."""

import argparse
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import between


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    sweep = commands.add_parser("sweep", help="run an experiment with many settings and compare them")
    sweep.add_argument("experiment", nargs="?", default="", help="conf/<experiment>.toml (default: none)")
    sweep.add_argument(
        *("-s", "--set"),
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="one value, values to try (lr=0.01,0.1) or a range (lr=0.01..0.1, with :log on a logarithmic scale)",
    )
    sweep.add_argument(
        "--trials", type=int, metavar="N", help="settings to try (default: with lists alone all of them)"
    )
    sweep.add_argument(
        "--search",
        choices=("grid", "random", "optuna"),
        help="default: grid; with --trials random; optuna chooses by what the trials before came to",
    )
    sweep.add_argument(
        "--metric",
        metavar="NAME",
        help="accuracy at the end that decides (default: validation accuracy, global-local or personal as evaluated); "
        "global, global-local and personal are of test data",
    )
    sweep.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each setting (default: 1)")
    sweep.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: the GPUs, else the cores)")
    sweep.add_argument(
        "--out", type=Path, metavar="DIR", help="default: a folder of this very sweep in $FEDSUB_RUNS/sweeps"
    )
    sweep.set_defaults(command=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    trials = between("--trials", options.trials, 100_000)
    seeds, workers = between("--seeds", options.seeds, 1000), between("--workers", options.workers, 1000)
    from fedsub_app.studies.sweep import sweep

    return sweep(
        options.experiment,
        options.set,
        trials=trials,
        method=options.search,
        metric=options.metric,
        seeds=seeds or 1,
        workers=workers,
        out=options.out,
    )
