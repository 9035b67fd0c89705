"""Tables of rounds and clients, and their CSV text."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import escaped
from fedsub_app.common.section import Json
from fedsub_app.reports.curves import COSTS, RunData

DROPS = ("dropped", "not-evaluated")


def rows_of_rounds(runs: Mapping[str, RunData]) -> list[Json]:
    """Return a row a round: the numbers and words of every round of some runs, by name.

    Lists of numbers are one text, other lists their length; clients' numbers are in :func:`rows_of_clients`.
    """
    return [{"run": name} | _flat(line) for name, record in runs.items() for line in record.lines]


def _flat(line: Json) -> Json:
    flat: Json = {}
    for key, value in line.items():
        if isinstance(value, list):
            counted = key in DROPS or any(isinstance(each, Mapping) for each in value)
            flat[key] = len(value) if counted else " ".join(map(str, value))
        elif key == "served":
            flat |= {f"{score}, {name}": each for score, of in value.items() for name, each in of.items()}
        elif not isinstance(value, dict) and key not in COSTS:
            flat[key] = value
    return flat


def rows_of_clients(runs: Mapping[str, RunData]) -> list[Json]:
    """Return a row a client and round in which it was evaluated."""
    return [
        {"run": name, "round": line["round"], "client": int(client)} | numbers
        for name, record in runs.items()
        for line in record.lines
        for client, numbers in line.get("evaluated", {}).items()
    ]


def csv_of(rows: Sequence[Json]) -> str:
    """Return rows as CSV, with a column for each key of any row."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text(header, [[row.get(key, "") for key in header] for row in rows])


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV. A text that a spreadsheet would compute gets a ``'`` before it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in row] for row in (header, *rows))
    return text.getvalue()


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    path.write_text(csv_text(header, rows), "utf-8")
    return path


def _cell(value: Any) -> Any:
    """Return the value of a cell; numbers stay, also those that begin with a minus sign."""
    if not isinstance(value, str) or value[:1] not in tuple("=+-@"):
        return value if not isinstance(value, str) else escaped(value)
    with suppress(ValueError):
        float(value)
        return value
    return f"'{escaped(value)}"
