"""``fedsub export``: the numbers of runs as CSV, the model of one as ONNX, as an adapter or whole."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.cli.predict import Client
from fedsub_app.common.errors import UserError


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
    from fedsub_app.reports.export import export as table

    text = table(folders, clients)
    if out:
        out.write_text(text)
        print(out)
    else:
        print(text, end="")
