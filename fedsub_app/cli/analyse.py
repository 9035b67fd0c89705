"""``fedsub analyse``: pictures of a run's sub-networks, activations and clients."""

import argparse
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError, between


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    analyse = commands.add_parser(
        "analyse", help="draw a run's masks, the activations of its units and its clients' accuracies"
    )
    analyse.add_argument("folder", type=Path, metavar="DIR")
    analyse.add_argument("--samples", type=int, default=256, metavar="N", help="training samples of each client")
    analyse.add_argument(
        "--approximation",
        type=int,
        metavar="ROUNDS",
        help="instead: so many rounds from each checkpoint, federated and central; the cosine of both directions",
    )
    analyse.add_argument("--starts", type=Path, metavar="DIR", help="with it: start from the checkpoints of this run")
    analyse.set_defaults(command=_analyse)


def _analyse(options: argparse.Namespace) -> int:
    rounds = between("--approximation", options.approximation, 1_000_000)
    samples = between("--samples", options.samples, 1_000_000)
    if options.starts and not rounds:
        raise UserError(f"--starts {options.starts}: only with --approximation ROUNDS")
    if rounds:
        from fedsub_app.analysis.approximation import approximation

        paths = approximation(options.folder, rounds, options.starts)
    else:
        from fedsub_app.analysis.activations import analyse

        paths = analyse(options.folder, samples or 1)
    for path in paths:
        print(path)
    return 0
