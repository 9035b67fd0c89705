"""The measurements of a table's runs, as one file, ``<table>.json``, and statistics over its seeds.

It holds of every run the seed, commit, versions, machine, the metric in every evaluated round and the costs. A later
run of the same table is checked against it.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json, to_json, write_atomic
from fedsub_app.common.tensors import Json
from fedsub_app.reports.curves import COSTS, deviation
from fedsub_app.reports.records import Record, read_run
from fedsub_app.runs.rounds import BUDGETS, spent

COSTS_OF_A_RUN = ("formula-bytes-down", "formula-bytes-up", "flops", "seconds", "device-seconds")
SAME = ("formula-bytes-down", "formula-bytes-up", "flops")  # costs that do not depend on the machine
MEASURED = ("seed", "commit", "versions", "machine", "device")
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Sample:
    """A row's metric over ``n`` seeds; ``sd`` is 0 with one; ``values``: seed -> number, empty where none were kept."""

    mean: float
    sd: float
    n: int
    values: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.mean:.4g} (1)" if self.n == 1 else f"{self.mean:.4g} ± {self.sd:.2g} ({self.n})"


def sample(values: Mapping[int, float]) -> Sample:
    """Return the sample of some seeds' numbers, at least one."""
    numbers = list(values.values())
    return Sample(statistics.fmean(numbers), deviation(numbers), len(numbers), values)


@dataclass(frozen=True)
class Estimate:
    """A difference with its 95 % interval, ``mean`` ∓ ``half``; ``half`` is infinite for one seed."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        inside = "" if math.isinf(self.half) else f" [{self.mean - self.half:+.3g}, {self.mean + self.half:+.3g}]"
        return f"{round(self.mean, 9) + 0:+.3g}{inside}"  # no -5e-15 where differences cancel


def half_width(error: float, freedom: float, intervals: int = 1) -> float:
    """Return half of a t-interval from a standard error; of several, all hold together with 95 % (Bonferroni)."""
    from scipy.stats import t  # on demand: it costs half a second

    return float(t.ppf(1 - 0.025 / intervals, freedom)) * error


def t_interval(values: Sequence[float]) -> Estimate:
    n, mean = len(values), statistics.fmean(values)
    return Estimate(mean, half_width(statistics.stdev(values) / math.sqrt(n), n - 1) if n > 1 else math.inf, n)


def difference(one: Sample, other: Sample, of: Callable[[float, float], float] = lambda a, b: a - b) -> Estimate | None:
    """Return the difference of two rows: paired over their common seeds, else Welch's; ``None`` where neither is."""
    if seeds := sorted(one.values.keys() & other.values.keys()):
        return t_interval([of(one.values[seed], other.values[seed]) for seed in seeds])
    parts = [each.sd**2 / each.n for each in (one, other)]
    if min(one.n, other.n) < 2 or not sum(parts):
        return None
    freedom = sum(parts) ** 2 / sum(part**2 / (each.n - 1) for part, each in zip(parts, (one, other), strict=True))
    return Estimate(one.mean - other.mean, half_width(math.sqrt(sum(parts)), freedom), min(one.n, other.n))


def pooled(samples: Sequence[Sample]) -> tuple[float, int]:
    """Return the standard deviation over seeds of several rows together, and its degrees of freedom."""
    freedom = sum(each.n - 1 for each in samples)
    return (math.sqrt(sum((each.n - 1) * each.sd**2 for each in samples) / freedom) if freedom else 0.0), freedom


def run_entry(folder: Path, metric: str) -> Json:
    """Return what the file holds of one finished run; ``metric``: such as ``global-accuracy``."""
    record = read_run(folder)
    summary, kept = record.summary, record.provenance | {"seed": record.settings["seed"]}
    lines = [line for line in record.lines if metric in line]
    kind, _, score = metric.rpartition("-")
    validation = f"{kind}-validation-{score}"
    entry = {key: kept[key] for key in MEASURED if key in kept} | {
        "rounds": summary["rounds"],
        **({"final": summary[last]} if (last := f"final-{metric}") in summary else {}),
        "totals": {cost: summary[key] for cost in COSTS_OF_A_RUN if (key := f"total-{cost}") in summary},
        "curve": {"round": [line["round"] for line in lines], metric: [line[metric] for line in lines]}
        | {cost: [float(f"{line[cost]:.6g}") for line in lines] for cost in COSTS if "second" not in cost},
    }
    entry |= {"served": summary["served"]} if "served" in summary else {}
    entry |= {"budgets": at_budgets(record, metric)} if record.settings.get("all-budgets") else {}
    optional = {"validation": f"final-{validation}", "rounds-to-target": "rounds-to-target", "epsilon": "epsilon"}
    return entry | {name: summary[key] for name, key in optional.items() if key in summary}


def at_budgets(record: Record, metric: str) -> Json:
    """Return the last evaluated round in each budget: "150 MB" -> its numbers; ``spent``: fraction of it by the run."""
    found, lines = {}, record.lines
    evaluated = [number for number, line in enumerate(lines) if metric in line]
    for key in [key for key in BUDGETS if record.settings.get(key)]:
        limit, (_, unit, name) = float(record.settings[key]), BUDGETS[key]
        within = [n for n in evaluated if spent(lines[: n + 1], key, last_evaluation=True) <= limit]
        if within:  # else the first evaluation is beyond it
            last = lines[within[-1]]
            at: Json = {key: last[key] for key in ("round", "served") if key in last}
            found[f"{limit / unit:g} {name}"] = at | {"final": last[metric], "spent": spent(lines, key, True) / limit}
    return found


def write_evidence(path: Path, content: Json) -> Path:
    """Write a table's file, a list of numbers on one line; returns its path."""
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", to_json(content, indent=1))
    write_atomic(path, f"{text}\n".encode())
    return path


def read_evidence(path: Path) -> Json:
    """Return a table's file; :class:`UserError`: it is none, or :func:`check` could not compare a run with it."""
    content = read_json(path)
    with suppress(ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        rows = [(row["setting"], row["method"], *(int(run["seed"]) for run in row["runs"])) for row in content["rows"]]
        check(content, content)
        seeds = content.get("seeds", 1)
        if rows and isinstance(content.get("set", {}), dict) and type(seeds) is int and 1 <= seeds <= MAX_SEEDS:
            return content
    raise UserError(
        f"{path}: not the file of a table, which `fedsub reproduce` writes (its rows, set or seeds cannot be read)"
    )


def row_of(content: Json, setting: str, method: str) -> Json | None:
    """Return the row of a setting and a method; ``None`` where the file has none."""
    return next((row for row in content["rows"] if (row["setting"], row["method"]) == (setting, method)), None)


def sample_of(row: Json, metric: str = "final") -> Sample | None:
    """Return a row's metric over seeds; ``None`` where no run has a number of it.

    ``metric``: ``final`` (percent), ``rounds-to-target`` (a target that was not reached counts as the last round),
    ``MB`` (both ways, by the papers' formula), ``GFLOPs``, or another key of a run. ``over-seeds`` has the mean and
    deviation of the runs whose numbers were not kept singly; runs that have one are added to them.
    """
    values: dict[int, float] = {}
    for run in row["runs"]:
        totals: Mapping[str, float] = run.get("totals", {})
        if metric == "MB" and SAME[0] in totals:
            values[run["seed"]] = (totals[SAME[0]] + totals[SAME[1]]) / 1e6
        elif metric == "GFLOPs" and "flops" in totals:
            values[run["seed"]] = totals["flops"] / 1e9
        elif run.get(metric) is not None:
            values[run["seed"]] = run[metric]
        elif metric == "rounds-to-target" and metric in run:
            values[run["seed"]] = run["rounds"]
    kept = row.get("over-seeds", {}).get(metric)
    if not kept or 0 < len(row["runs"]) == len(values):
        return sample(values) if values else None
    n, numbers = kept["n"] + len(values), list(values.values())
    mean = (kept["n"] * kept["mean"] + sum(numbers)) / n
    squares = (kept["n"] - 1) * kept["sd"] ** 2 + kept["n"] * (kept["mean"] - mean) ** 2
    squares += sum((number - mean) ** 2 for number in numbers)
    return Sample(mean, math.sqrt(squares / max(n - 1, 1)), n)


def _equal(run: Json, other: Json) -> bool:
    """Say whether two runs have the same end and, where both kept them, evaluated rounds and costs."""
    if run.get("final") != other.get("final") or not ("curve" in run and "curve" in other):
        return bool(run.get("final") == other.get("final"))
    costs, others = run["totals"], other["totals"]
    return bool(run["curve"] == other["curve"]) and all(costs.get(key) == others.get(key) for key in SAME)


def check(kept: Json, new: Json) -> list[tuple[str, str, str]]:
    """Compare a table's runs with those of its file; returns for each row that both have a word, the row, both results.

    ``equal``: in every evaluated round and cost of each common seed; ``within seed noise``; ``different``. Seed noise:
    the difference of the means is inside its 95 % interval by the standard deviation over seeds of all rows of the file
    together, corrected for the number of rows (Bonferroni). A row that has a number on one side alone is different.
    """
    sd, freedom = pooled([each for row in kept["rows"] if (each := sample_of(row))])
    lines = []
    for row in new["rows"]:
        old = row_of(kept, row["setting"], row["method"])
        before, after = old and sample_of(old), sample_of(row)
        if not old or not row["runs"] or not (before or old["runs"]):
            continue
        runs = {run["seed"]: run for run in old["runs"]}
        both = [(run, runs[run["seed"]]) for run in row["runs"] if run["seed"] in runs]
        near, noise = False, ""
        if before and after:
            error = sd * math.sqrt(1 / before.n + 1 / after.n)
            limit = half_width(error, freedom, len(new["rows"])) if freedom else 0.0
            near, noise = abs(after.mean - before.mean) <= limit, f", noise {limit:.2f}"
        word = "equal" if both and all(_equal(*pair) for pair in both) else "within seed noise" if near else "different"
        text = f"{after or 'no number'}, in the file {before or 'no number'}{noise}"
        for cost in ("MB", "GFLOPs"):  # of the same seeds: a mask may differ from one seed to the next
            here, there = (sample_of({"runs": [pair[side] for pair in both]}, cost) for side in (0, 1))
            if here and there and f"{here.mean:.4g}" != f"{there.mean:.4g}":
                text += f"; {here} {cost}, in the file {there}"
        if unlike := [key for key in ("dataset", "metric", "rounds") if old.get(key, row.get(key)) != row.get(key)]:
            word, text = "different", f"{text}; {unlike[0]} = {row[unlike[0]]}, in the file {old[unlike[0]]}"
        lines.append((word, f"{row['setting']}, {row['method']}", text))
    return lines
