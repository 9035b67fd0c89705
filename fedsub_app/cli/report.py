"""``fedsub report``: pictures and a page of runs."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    report = commands.add_parser(
        "report", help="draw and compare runs: accuracy against rounds, bytes, FLOPs and seconds"
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="directories of runs")
    report.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="the picture, or a folder for all files (default: the run's own, or a new one in $FEDSUB_RUNS/reports)",
    )
    report.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="also one HTML page with everything, and its numbers as CSV and JSON (default: report.html there)",
    )
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from fedsub_app.reports.compare import comparisons
    from fedsub_app.reports.html import write_html
    from fedsub_app.reports.pictures import draw_curves
    from fedsub_app.reports.records import grouped
    from fedsub_app.runs.directory import reports_folder

    folders, page = options.folders, options.html
    if page and page != Path() and page.suffix not in (".html", ".htm"):
        raise UserError(f"--html {page}: must end in .html; directories of runs stand before it")
    groups = grouped(folders)
    out = options.out or (folders[0] if len(folders) == 1 else reports_folder())
    picture = out if out.suffix and not out.is_dir() else out / ("curve.png" if len(folders) == 1 else "curves.png")
    if picture.parent == out:
        out.mkdir(parents=True, exist_ok=True)
    print(draw_curves(groups, picture))
    if page is not None:
        target = picture.parent / "report.html" if page == Path() else page
        words = ["fedsub report", *(shlex.quote(str(folder)) for folder in folders), "--html"]
        title = ", ".join(dict.fromkeys(group.section for group in groups)) + ": "
        title += ", ".join(dict.fromkeys(str(group.records[0].settings["method"]) for group in groups))
        for path in write_html(groups, target, title, " ".join(words)):
            print(path)
    if compared := comparisons(folders):
        print(compared)
    return 0
