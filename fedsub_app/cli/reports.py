"""Commands on finished runs: ``fedsub report``, ``analyse``, ``export`` and ``predict``."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.errors import UserError
from fedsub_app.common.text import link, show

Client = Annotated[int | None, Option(metavar="N", help="the model of this client (default: the global one)")]


def report(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="directories of runs")],
    out: Annotated[
        Path | None,
        Option(metavar="PATH", help="the picture, or a folder for all files (default: the run's, or a new one)"),
    ] = None,
    html: Annotated[bool, Option("--html", help="also one page, report.html, and its numbers as CSV and JSON")] = False,
) -> None:
    """Draw and compare runs: score against rounds, bytes, FLOPs and seconds."""
    from fedsub_app.reports.compare import cost_text, summary_text
    from fedsub_app.reports.html import write_html
    from fedsub_app.reports.pictures import figure_of_curves, write_picture
    from fedsub_app.reports.records import grouped, unlike
    from fedsub_app.runs.recorded import new_path, runs_folder

    groups = grouped(folders)
    drawing = figure_of_curves(groups)  # before a folder is made: there may be nothing to draw
    out = out or (folders[0] if len(folders) == 1 else new_path(runs_folder() / "reports"))
    picture = out if out.suffix and not out.is_dir() else out / ("curve.png" if len(folders) == 1 else "curves.png")
    if picture.parent == out:
        out.mkdir(parents=True, exist_ok=True)
    print(link(write_picture(drawing, picture)))
    if html:
        words = ["fedsub report", *(shlex.quote(str(folder)) for folder in folders), "--html"]
        title = ", ".join(dict.fromkeys(group.section for group in groups)) + ": "
        title += ", ".join(dict.fromkeys(str(group.records[0].settings["method"]) for group in groups))
        for path in write_html(groups, picture.parent / "report.html", title, " ".join(words)):
            print(link(path))
    if len(folders) > 1:
        print("", summary_text(groups), "", sep="\n")
        if keys := unlike(groups):
            print(f"These runs differ in their data: {', '.join(keys)}\n")
        if costs := cost_text(groups):
            show(costs)


def analyse(
    folder: Annotated[Path, Argument(metavar="DIR", help="directory of a run")],
    approximation: Annotated[
        int | None,
        Option(
            metavar="ROUNDS",
            min=1,
            help="draw instead the cosine of federated and central training over this many rounds",
        ),
    ] = None,
    starts: Annotated[
        Path | None, Option(metavar="DIR", help="with --approximation: start from this run's checkpoints")
    ] = None,
) -> None:
    """Draw a run's masks, the activations of its units and its clients' scores."""
    if starts and not approximation:
        raise UserError(f"--starts {starts}: only with --approximation ROUNDS")
    if approximation:
        from fedsub_app.analysis.approximation import approximation as compare

        paths = compare(folder, approximation, starts)
    else:
        from fedsub_app.analysis.activations import analyse as draw

        paths = draw(folder)
    for path in paths:
        print(path)


def export(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="directories of runs")],
    clients: Annotated[
        bool, Option("--clients", help="a row for each client and evaluation, not for each round")
    ] = False,
    out: Annotated[Path | None, Option(metavar="FILE", help="write the CSV there")] = None,
    onnx: Annotated[Path | None, Option(metavar="FILE", help="write the model of one run there, as ONNX")] = None,
    adapter: Annotated[
        Path | None, Option(metavar="FOLDER", help="write the model's LoRA adapter there, for peft")
    ] = None,
    merged: Annotated[Path | None, Option(metavar="FOLDER", help="write all weights of the model there")] = None,
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
    if not (rows := rows_of_clients(runs) if clients else rows_of_rounds(runs)) and clients:
        raise UserError("--clients: no client was evaluated; the key evaluate must name global-local or personal")
    text = csv_of(rows)
    if out:
        out.write_text(text, "utf-8")
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
