"""The report: one HTML file with the results of some runs; it opens from a disk and fetches nothing."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import to_json, write_atomic
from fedsub_app.common.score import KINDS, kind_of
from fedsub_app.common.section import Json
from fedsub_app.reports import pictures
from fedsub_app.reports.compare import about_costs, cost_table, served_table, summary_table
from fedsub_app.reports.curves import Curve, Group, curves, kinds_of, losses_of, named
from fedsub_app.reports.export import csv_of, rows_of_rounds
from fedsub_app.reports.records import NOT_COMPARED, compared, differing_keys, named_runs
from fedsub_app.runs.config import check
from fedsub_app.runs.masks import last_masks
from fedsub_app.runs.methods import METHODS

MEANING = {
    "global": "the global model on the global test set",
    "global-local": "the global model on each client's own test set, mean over the clients",
    "personal": "each client's own model on its own test set, mean over the clients",
    "global-local-validation": "the global model on each client's validation samples, mean over the clients",
    "personal-validation": "each client's own model on its validation samples, mean over the clients",
}
MAX_CELLS = 60  # clients or classes of a table of counts, beyond which it has no numbers


def write_html(groups: Sequence[Group], target: Path, title: str, command: str, note: str = "") -> list[Path]:
    """Write the report of some runs, and its numbers beside it as CSV (a row a round) and JSON; returns the files.

    :class:`UserError`: a file of a run is damaged.

    Parameters
    ----------
    title, note : heading and first paragraph.
    command : the command that writes the same report.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    content = _content(groups, target.parent) | {"title": title, "command": command, "note": note}
    content["against_bytes"] = pictures.draw_against_bytes(groups)
    runs = dict(named_runs([record for group in groups for record in group.records]))
    made = ("commit", "code", "versions", "machine")
    numbers = [
        {"run": name, "folder": str(record.folder), "status": record.status, "command": record.command}
        | {"settings": record.settings, "dropped": record.dropped}
        | {"summary": {key: value for key, value in record.summary.items() if key != "run-dir"}}
        | {key: record.provenance.get(key) for key in made}
        for name, record in runs.items()
    ]
    files = {
        target: page.get_template("report.html").render(content),
        target.with_suffix(".csv"): csv_of(rows_of_rounds(runs)),
        target.with_suffix(".json"): to_json({"title": title, "command": command, "runs": numbers}, indent=2) + "\n",
    }
    for path, text in files.items():
        write_atomic(path, text.encode(errors="backslashreplace"))  # a folder's name may be no Unicode
    return list(files)


def _content(groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    records = [record for group in groups for record in group.records]
    rows, runs, (scores, about) = curves(groups), named(groups), about_costs(groups)
    return {
        "meaning": {kind_of(key): MEANING[kind_of(key)] for key in kinds_of(groups)},
        "styles": [(pictures.colour(k), pictures.dashes(k)) for k in range(max(len(groups), len(KINDS)))],
        "one": len(groups) == 1,
        "summary": summary_table(groups),
        "served": served_table(groups),
        "curves": [_row(title, lines, pictures.axes_of(groups)) for title, lines in rows.items()],
        "losses": [_row(title, lines, ["round"]) for title, lines in curves(groups, losses_of).items()],
        "seeds": max(len(group.records) for group in groups) > 1,
        "costs": cost_table(groups),
        "score": scores,
        "about_costs": about,
        "clients": _clients(groups),
        "subnetworks": _subnetworks(runs),
        "partitions": _partitions(runs),
        "max_cells": MAX_CELLS,
        "differing": differing_keys([group.records[0] for group in groups]),
        "settings": [(group.label, group.records[0].settings | compared(group.records[0])) for group in runs],
        "not_compared": NOT_COMPARED,
        "dropped": _dropped(runs),
        "asked": sum(len(line.get("clients", ())) for record in records for line in record.lines),
        "runs": [
            (group.label, record.settings["seed"], os.path.relpath(record.folder, folder), record)
            for group in runs
            for record in group.records
        ],
        "made": _made(runs),
    }


def _row(title: str, lines: Sequence[Curve], axes: Sequence[str]) -> dict[str, Any]:
    keys = [(line.number, name, line.label) for line, name in zip(lines, pictures.short_names(lines), strict=True)]
    return {
        "title": title,
        "pictures": [pictures.svg_of_curves(title, lines, axis) for axis in axes],
        "keys": keys if any(name != label for _, name, label in keys) else [],
        "many": len(lines) > pictures.MAX_LABELS,
    }


def _clients(groups: Sequence[Group]) -> list[str]:
    """Return a picture for each score: the clients of all seeds from the worst to the best."""
    drawn = []
    for key, score in ((key, score) for key, score in kinds_of(groups).items() if kind_of(key) != "global"):
        lines = {}
        for number, group in enumerate(groups):
            clients = [client for record in group.records for client in record.measured.values()]
            values = sorted(client[key] for client in clients if client.get(key) is not None)
            if values:
                lines[number] = (group.label, [100 * (k + 0.5) / len(values) for k in range(len(values))], values)
        if lines:
            title = score.titled(f"{kind_of(key)} {score.name}")
            drawn.append(pictures.svg_of_lines(f"clients by {title}", title, "clients, the worst first (%)", lines))
    return drawn


def _subnetworks(groups: Sequence[Group]) -> dict[str, Any]:
    drawn: list[tuple[str, str, bool]] = []  # title, picture, whether a curve is a group
    masks: list[dict[str, Any]] = []
    names = {str(group.records[0].settings["method"]) for group in groups}
    for name in names:
        with suppress(UserError):  # a method of the user's whose file is gone
            check({"method": name})
    methods = [method for name, method in METHODS.items() if name in names]
    reports = {key: about for method in methods for key, about in method.strategy.reports.items()}
    for key, about in reports.items():
        lines = {}
        for number, group in enumerate(groups):
            of_group = [line for line in group.records[0].lines if key in line]
            x = [float(line["round"]) for line in of_group]
            curves = list(zip(*(about.points(line[key]) for line in of_group), strict=True))
            scaled = [[about.scale * y for y in curve] for curve in curves]
            if scaled and about.curves:
                title = f"{group.label}: {about.title}"
                of_run = {k: (name, x, scaled[k]) for k, name in enumerate(about.curves)}
                drawn.append((title, pictures.svg_of_lines(title, about.axis, "round", of_run), False))
            elif scaled:
                lines[number] = (group.label, x, scaled[0])
        if lines:
            drawn.append((about.title, pictures.svg_of_lines(about.title, about.axis, "round", lines), True))
    for group in groups:
        try:
            if masked := last_masks(group.records[0].folder):
                masks.append({"label": group.label, "found": masked})
        except UserError as error:
            masks.append({"label": group.label, "said": str(error)})
    return {"pictures": drawn, "masks": masks}


def _partitions(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return each partition that the runs have, once: a run that has it, and the seeds and labels of all of them."""
    partitions: dict[str, dict[str, Any]] = {}
    for group in groups:
        for record in group.records:
            if counts := record.partition.get("counts"):
                entry = partitions.setdefault(json.dumps(counts), {"record": record, "seeds": {}, "labels": {}})
                entry["seeds"][record.settings["seed"]] = entry["labels"][group.label] = None
    return list(partitions.values())


def _dropped(groups: Sequence[Group]) -> dict[tuple[str, str], list[Json]]:
    """Return whose run and the reason -> the replies."""
    by_reason: dict[tuple[str, str], list[Json]] = {}
    for group in groups:
        for drop in (drop for record in group.records for drop in record.dropped):
            by_reason.setdefault((group.label, str(drop["reason"])), []).append(drop)
    return by_reason


def _made(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return what the runs were made with -> their labels."""
    by_origin: dict[str, list[str]] = {}
    for group in groups:
        for about in (record.provenance for record in group.records):
            parts = [f"commit {about.get('commit', 'unknown')}", f"code {about.get('code', 'unknown')}"]
            for key in ("versions", "machine"):
                parts += [f"{name} {value}" for name, value in dict(about.get(key) or {}).items()]
            by_origin.setdefault(", ".join(parts), []).append(group.label)
    return by_origin
