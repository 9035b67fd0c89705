"""What a table's runs measured, as one file: ``<table>.json``, from which pages and verdicts are made.

It holds of every run the seed, commit, versions, machine, the metric in every evaluated round and the costs. A later
run of the same table is checked against it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json, to_json, write_atomic
from fedsub_app.common.tensors import Json
from fedsub_app.reports.records import COSTS, read_run
from fedsub_app.studies.verdicts import Sample, half_width, pooled, sample

COSTS_OF_A_RUN = ("formula-bytes-down", "formula-bytes-up", "flops", "seconds")
SAME = ("formula-bytes-down", "formula-bytes-up", "flops")  # costs that do not depend on the machine
MEASURED = ("seed", "commit", "versions", "machine", "device")


def run_entry(folder: Path, metric: str) -> Json:
    """Return what the file holds of one finished run.

    Parameters
    ----------
    metric : such as ``global-accuracy``.
    """
    record = read_run(folder)
    summary, kept = record.summary, record.provenance | {"seed": record.settings["seed"]}
    lines = [line for line in record.lines if metric in line]
    kind, _, score = metric.rpartition("-")
    validation = f"{kind}-validation-{score}"
    entry = {key: kept[key] for key in MEASURED if key in kept} | {
        "rounds": summary["rounds"],
        "final": summary[f"final-{metric}"],
        "totals": {cost: summary[f"total-{cost}"] for cost in COSTS_OF_A_RUN},
        "curve": {"round": [line["round"] for line in lines], metric: [line[metric] for line in lines]}
        | {cost: [float(f"{line[cost]:.6g}") for line in lines] for cost in COSTS if "second" not in cost},
    }
    optional = {"validation": f"final-{validation}", "rounds-to-target": "rounds-to-target", "epsilon": "epsilon"}
    return entry | {name: summary[key] for name, key in optional.items() if key in summary}


def write_evidence(path: Path, content: Json) -> Path:
    """Write a table's file, a list of numbers on one line; returns its path."""
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", to_json(content, indent=1))
    write_atomic(path, f"{text}\n".encode())
    return path


def read_evidence(path: Path) -> Json:
    """Return the content of a table's file.

    Raises
    ------
    UserError
        It cannot be read, or is not such a file.
    """
    content = read_json(path)
    if not isinstance(content.get("rows"), list):
        raise UserError(f"{path}: not the file of a table, which `fedsub reproduce` writes (no rows)")
    return content


def row_of(content: Json, setting: str, method: str) -> Json | None:
    """Return the row of a setting and a method; ``None`` where the file has none."""
    return next((row for row in content["rows"] if (row["setting"], row["method"]) == (setting, method)), None)


def sample_of(row: Json, metric: str = "final") -> Sample | None:
    """Return a row's metric over seeds; ``None`` where no run has it.

    Parameters
    ----------
    metric : ``final`` (percent), ``rounds-to-target`` (a target that was not reached counts as the last round), ``MB``
        (both ways, by the papers' formula), ``GFLOPs``, or another key of a run.
    """
    values: dict[int, float] = {}
    for run in row["runs"]:
        totals: Mapping[str, float] = run.get("totals", {})
        if metric == "MB" and SAME[0] in totals:
            values[run["seed"]] = (totals[SAME[0]] + totals[SAME[1]]) / 1e6
        elif metric == "GFLOPs" and "flops" in totals:
            values[run["seed"]] = totals["flops"] / 1e9
        elif metric in run:
            values[run["seed"]] = run["rounds"] if run[metric] is None else run[metric]
    if values:
        return sample(values)
    kept = row.get("over-seeds", {}).get(metric)
    return Sample(kept["mean"], kept["sd"], kept["n"]) if kept else None


def _equal(run: Json, other: Json) -> bool:
    """Say whether two runs have the same end and, where both kept them, evaluated rounds and costs."""
    if run["final"] != other["final"] or not ("curve" in run and "curve" in other):
        return bool(run["final"] == other["final"])
    return bool(run["curve"] == other["curve"]) and all(run["totals"][key] == other["totals"][key] for key in SAME)


def check(kept: Json, new: Json) -> list[tuple[str, str, str]]:
    """Compare a table's runs with those of its file, row by row.

    Returns
    -------
    Of each row that both have: ``equal`` (every evaluated round and cost of each common seed), ``within seed noise`` or
    ``different``; the row; the two results. Seed noise: the difference of the means is inside its 95 % interval by the
    standard deviation over seeds of all rows of the file together, corrected for the number of rows (Bonferroni).
    """
    sd, freedom = pooled([each for row in kept["rows"] if (each := sample_of(row))])
    lines = []
    for row in new["rows"]:
        old = row_of(kept, row["setting"], row["method"])
        before, after = old and sample_of(old), sample_of(row)
        if not old or not before or not after:
            continue
        error = sd * math.sqrt(1 / before.n + 1 / after.n)
        limit = half_width(error, freedom, len(new["rows"])) if freedom else 0.0
        runs = {run["seed"]: run for run in old["runs"]}
        both = [_equal(run, runs[run["seed"]]) for run in row["runs"] if run["seed"] in runs]
        near = abs(after.mean - before.mean) <= limit
        word = "equal" if both and all(both) else "within seed noise" if near else "different"
        lines.append((word, f"{row['setting']}, {row['method']}", f"{after}, in the file {before}, noise {limit:.2f}"))
    return lines
