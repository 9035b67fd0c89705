"""``fedsub report``: pictures and a page of runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedsub_app.common.errors import UserError
from fedsub_app.common.text import link, show


def with_default_page(words: Sequence[str]) -> list[str]:
    """Return the words with ``--html`` alone as ``--html=``: its value may be left out, which Typer does not know."""
    pairs = zip(words, [*words[1:], "-"], strict=False)
    return ["--html=" if word == "--html" and following.startswith("-") else word for word, following in pairs]


def report(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="directories of runs")],
    out: Annotated[
        Path | None,
        Option(metavar="PATH", help="the picture, or a folder for all files (default: the run's, or a new one)"),
    ] = None,
    html: Annotated[
        Path | None,
        Option(metavar="[FILE]", help="also one HTML page, and its numbers as CSV and JSON (default: report.html)"),
    ] = None,
) -> None:
    """Draw and compare runs: score against rounds, bytes, FLOPs and seconds."""
    from fedsub_app.reports.compare import cost_text, summary_text
    from fedsub_app.reports.html import write_html
    from fedsub_app.reports.pictures import draw_curves
    from fedsub_app.reports.records import grouped
    from fedsub_app.runs.directory import reports_folder

    if html and html != Path() and html.suffix not in (".html", ".htm"):
        raise UserError(f"--html {html}: must end in .html; directories of runs stand before it")
    groups = grouped(folders)
    out = out or (folders[0] if len(folders) == 1 else reports_folder())
    picture = out if out.suffix and not out.is_dir() else out / ("curve.png" if len(folders) == 1 else "curves.png")
    if picture.parent == out:
        out.mkdir(parents=True, exist_ok=True)
    print(link(draw_curves(groups, picture)))
    if html is not None:
        target = picture.parent / "report.html" if html == Path() else html
        words = ["fedsub report", *(shlex.quote(str(folder)) for folder in folders), "--html"]
        title = ", ".join(dict.fromkeys(group.section for group in groups)) + ": "
        title += ", ".join(dict.fromkeys(str(group.records[0].settings["method"]) for group in groups))
        for path in write_html(groups, target, title, " ".join(words)):
            print(link(path))
    if len(groups) > 1:
        print("", summary_text(groups), "", sep="\n")
        show(cost_text(groups))
