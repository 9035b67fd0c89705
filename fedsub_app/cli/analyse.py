"""``fedsub analyse``: pictures of a run's sub-networks, activations and clients."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.errors import UserError, between


def analyse(
    folder: Annotated[Path, Argument(metavar="DIR", help="directory of a run")],
    approximation: Annotated[
        int | None,
        Option(metavar="ROUNDS", help="instead: cosine of federated and central training over so many rounds"),
    ] = None,
    starts: Annotated[
        Path | None, Option(metavar="DIR", help="with --approximation: start from this run's checkpoints")
    ] = None,
) -> None:
    """Draw a run's masks, the activations of its units and its clients' scores."""
    rounds = between("--approximation", approximation, 1_000_000)
    if starts and not rounds:
        raise UserError(f"--starts {starts}: only with --approximation ROUNDS")
    if rounds:
        from fedsub_app.analysis.approximation import approximation as compare

        paths = compare(folder, rounds, starts)
    else:
        from fedsub_app.analysis.activations import analyse as draw

        paths = draw(folder)
    for path in paths:
        print(path)
