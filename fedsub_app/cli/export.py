"""``fedsub export`` and ``fedsub predict``: the numbers of runs, the model of one, and its predictions."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.errors import UserError

Client = Annotated[int | None, Option(metavar="N", help="the model of this client (default: the global one)")]


def export(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="directories of runs")],
    clients: Annotated[bool, Option("--clients", help="a row a client and evaluation instead of one a round")] = False,
    out: Annotated[Path | None, Option(metavar="FILE", help="write it there")] = None,
    onnx: Annotated[Path | None, Option(metavar="FILE", help="write the model of one run there, as ONNX")] = None,
    adapter: Annotated[Path | None, Option(metavar="FOLDER", help="write its LoRA adapter there, for peft")] = None,
    merged: Annotated[Path | None, Option(metavar="FOLDER", help="write all its weights there")] = None,
    client: Client = None,
) -> None:
    """Print the rounds of runs, or their clients' numbers, as CSV; or write a model."""
    if onnx or adapter or merged:
        if len(folders) > 1 or clients or out:
            raise UserError("--onnx, --adapter, --merged: of one run, without --clients and --out")
        from fedsub_app.analysis.prediction import write_adapter, write_merged, write_onnx

        if onnx:
            print(onnx, write_onnx(folders[0], onnx, client), sep="\n")
        for folder, write in ((adapter, write_adapter), (merged, write_merged)):
            if folder:
                write(folders[0], folder, client)
                print(folder)
        return
    if client is not None:
        raise UserError(f"--client {client}: only with a model; --clients prints all clients' numbers")
    from fedsub_app.reports.export import csv_of, rows_of_clients, rows_of_rounds
    from fedsub_app.reports.records import named_runs, read_run

    runs = dict(named_runs([read_run(folder) for folder in folders]))
    text = csv_of(rows_of_clients(runs) if clients else rows_of_rounds(runs))
    if out:
        out.write_text(text)
        print(out)
    else:
        print(text, end="")


def predict(
    folder: Annotated[Path, Argument(metavar="RUN", help="directory of a run")],
    files: Annotated[list[Path], Argument(metavar="FILE...", help="images, or tables with the run's columns")],
    client: Client = None,
) -> None:
    """Print a run's prediction for each image or row, as CSV."""
    from fedsub_app.analysis.prediction import predictions
    from fedsub_app.reports.export import csv_text

    print(csv_text(*predictions(folder, files, client)), end="")
