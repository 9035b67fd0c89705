"""``fedsub report``: pictures and a page of runs."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.text import link, show


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
    from fedsub_app.reports.pictures import draw_curves
    from fedsub_app.reports.records import grouped
    from fedsub_app.runs.directory import reports_folder

    groups = grouped(folders)
    out = out or (folders[0] if len(folders) == 1 else reports_folder())
    picture = out if out.suffix and not out.is_dir() else out / ("curve.png" if len(folders) == 1 else "curves.png")
    if picture.parent == out:
        out.mkdir(parents=True, exist_ok=True)
    print(link(draw_curves(groups, picture)))
    if html:
        words = ["fedsub report", *(shlex.quote(str(folder)) for folder in folders), "--html"]
        title = ", ".join(dict.fromkeys(group.section for group in groups)) + ": "
        title += ", ".join(dict.fromkeys(str(group.records[0].settings["method"]) for group in groups))
        for path in write_html(groups, picture.parent / "report.html", title, " ".join(words)):
            print(link(path))
    if len(folders) > 1:
        print("", summary_text(groups), "", sep="\n")
        if costs := cost_text(groups):
            show(costs)
