"""``fedsub predict``: a run's model on new files, as CSV."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Client = Annotated[int | None, Option(metavar="N", help="the model of this client (default: the global one)")]


def predict(
    folder: Annotated[Path, Argument(metavar="RUN", help="directory of a run")],
    files: Annotated[list[Path], Argument(metavar="FILE...", help="images, or tables with the run's columns")],
    client: Client = None,
) -> None:
    """Print a run's prediction for each image or row, as CSV."""
    from fedsub_app.analysis.prediction import predictions
    from fedsub_app.reports.export import csv_text

    print(csv_text(*predictions(folder, files, client)), end="")
