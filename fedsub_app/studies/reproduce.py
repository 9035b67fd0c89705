"""A paper's table with one command: its experiments over seeds, on the local engine, several at a time.

A table is a file of settings and methods (``tables.py``), its runs a batch (``batch.py``).
"""

import csv
import io
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsub_app.common.code import code_digest
from fedsub_app.common.conf_files import is_file
from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.files import write_atomic
from fedsub_app.common.score import ON_TEST_DATA, Score
from fedsub_app.common.section import Json, Value
from fedsub_app.common.text import link, markdown
from fedsub_app.reports.compare import costs_of_groups, served_table, summary_text, verdicts
from fedsub_app.reports.cost_to_accuracy import about, columns
from fedsub_app.reports.curves import Group, as_argument
from fedsub_app.reports.html import write_html
from fedsub_app.reports.pictures import draw_against_bytes
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import applicable_keys
from fedsub_app.runs.recorded import runs_folder
from fedsub_app.studies.batch import Job, facts, gpus_of, run_all
from fedsub_app.studies.evidence import check, difference, read_evidence, row_of, run_entry, sample_of, write_evidence
from fedsub_app.studies.tables import Row, Table, read_table

TABLE_KEYS = {"experiment", "method", "seed", "run-dir", "resume"}  # keys that a table sets itself
PAGE = ("report.html", "report.csv", "report.json")
Runs = list[tuple[Row, list[Job]]]  # a table's rows, each with one run a seed


def job_of(row: Row, seed: int, folder: Path) -> Job:
    keys = dict(row.overrides) | {"seed": seed, "run-dir": str(folder)}
    return Job(f"{row.setting}  {row.label}  seed {seed}", keys, folder)


def reproduce(
    name: str,
    seeds: int | None,
    overrides: Mapping[str, Value],
    workers: int | None,
    out: Path | None,
    only: Sequence[str] = (),
    against: Path | None = None,
    dry_run: bool = False,
    slurm: Sequence[str] = (),
) -> int:
    """Run a table's rows over its seeds; write ``<name>.md``, .csv and .json, report.html; returns the exit code.

    The arguments are the command's options. ``against``: a table's JSON file. Its keys and seeds are run anew, in a
    folder of this code, and compared with it (:func:`~fedsub_app.studies.evidence.check`).
    """
    table, named = read_table(name), shlex.quote(name)
    if against:
        kept = read_evidence(against)
        overrides, seeds = {**kept.get("set", {}), **overrides}, seeds or kept.get("seeds")
        out = out or runs_folder() / "check" / f"{against.stem}-{code_digest()}"
    for key in TABLE_KEYS & overrides.keys():
        raise UserError(f"-s {key}: the table sets it; allowed are the other keys, and --seeds, --out, --only")
    name = Path(name).stem if is_file(name) else name
    if name == "report":
        raise UserError(f"table {named}: report.csv and report.json are files of its page; name the table otherwise")
    rows = table.rows
    known = dict.fromkeys([*(row.setting for row in rows), *(row.label for row in rows)])
    if unknown := [word for word in only if word not in known]:
        raise UserError(f"--only {unknown[0]!r}: allowed are {', '.join(map(repr, known))}")
    for names in ({row.setting for row in rows} & {*only}, {row.label for row in rows} & {*only}):
        rows = [row for row in rows if not names or names & {row.setting, row.label}]
    rows = [row for row in rows if not against or row_of(kept, row.setting, row.label)]
    if not rows:
        raise UserError(f"--check {against}: has none of these rows of {named}")
    out = out or runs_folder() / "reproduce" / name
    numbers = range(table.first_seed, table.first_seed + (seeds or table.seeds))
    rows = [Row(row.setting, row.label, applicable_keys({**row.overrides, **overrides}), row.paper) for row in rows]
    for key, value in overrides.items():
        if not any(key in row.overrides for row in rows):
            raise UserError(f"{key} = {shown(value)}: does nothing: no row of the table runs that method")
    runs = [(row, [job_of(row, s, (out / row.slug / f"seed{s}").resolve()) for s in numbers]) for row in rows]
    jobs = [job for of_seed in zip(*(mine for _, mine in runs), strict=True) for job in of_seed]
    for job in jobs:
        _ = job.settings  # bad input is reported before the first run starts
        if dry_run:
            what = f"{job.settings.num_clients} clients, {job.settings.num_rounds} rounds"
            print(f"{job.name}: {job.settings.method} on {job.settings.dataset}, {what}")
    if dry_run:
        return 0
    todo = [job for job in jobs if job.summary() is None]
    failures = run_all(todo, len(todo), workers, gpus_of(job.settings for job in jobs), slurm)
    words = [f"-s {shlex.quote(f'{key}={as_argument(key, value)}')}" for key, value in overrides.items()]
    words += [f"--seeds {seeds}"] if seeds else []
    words += [f"--only {shlex.quote(word)}" for word in only]
    command = " ".join([f"fedsub reproduce {named}", *words])
    reference = table.reference or table.methods[0].label
    content: Json = {"table": named, "title": table.title, "command": command, "set": dict(overrides)}
    content |= {"seeds": len(numbers), "reference": reference, "rows": [_entry(row, mine) for row, mine in runs]}
    _write(out, name, table, facts(command, numbers, jobs), runs, content)
    write_evidence(out / f"{name}.json", content)
    if groups := _groups(runs):
        page, *_ = write_html(groups, out / "report.html", table.title, command, table.about)
        print("", summary_text(groups), *_differences(content, runs), "", *verdicts(groups), "", sep="\n")
        picture = out / f"{name}.png"
        print(*map(link, [page, picture] if draw_against_bytes(groups, picture) else [page]), sep="\n")
    print(link(out / f"{name}.md"))
    for command in _next(rows):
        print(f"next: {command}")
    for failed, reason in failures:
        print(f"failed: {' '.join(failed.name.split())}: {reason}", file=sys.stderr)
    return 1 if failures or (against and not _agrees(kept, content)) else 0


def _entry(row: Row, mine: Sequence[Job]) -> Json:
    """Return what the table's JSON file holds of a row."""
    settings = mine[0].settings
    metric = f"{settings.evaluations[0]}-{settings.score.name}"
    entry: Json = {"setting": row.setting, "method": row.label, "paper": row.paper.model_dump(exclude_defaults=True)}
    entry |= {"metric": metric, "rounds": settings.num_rounds, "dataset": settings.dataset}
    return entry | {"runs": [run_entry(job.folder, metric) for job in mine if job.summary()]}


def compared(content: Json, row: Json) -> str:
    """Return a row's difference to its setting's reference, with its 95 % interval; "" without one of its metric."""
    other = row_of(content, row["setting"], content["reference"])
    first, second = sample_of(row), other and sample_of(other)
    alike = other and other is not row and other.get("metric") == row.get("metric")
    found = difference(first, second) if alike and first and second else None
    return f"{found} ({found.n})" if found else ""


def _points(runs: Runs) -> str:
    return ", points" if runs[0][1][0].settings.score.unit == "%" else ""


def _differences(content: Json, runs: Runs) -> list[str]:
    """Return the text of all differences to the reference, over several seeds."""
    lines = [(f"{row['setting']}: {row['method']}", compared(content, row)) for row in content["rows"]]
    text = [f"{name}  {words}" for name, words in lines if "[" in words]
    title = f"Paired difference to {content['reference']}{_points(runs)} [95 % interval] (seeds)"
    return ["", title, *text] if text else []


def _agrees(kept: Json, new: Json) -> bool:
    """Print how a table's runs compare with those of its file; returns whether no row is different."""
    lines = check(kept, new)
    print("\n".join([""] + [f"{word}: {row}: {text}" for word, row, text in lines]))
    counts = Counter(word for word, *_ in lines)
    print(", ".join(f"{counts[word]} {word}" for word in ("equal", "within seed noise", "different")))
    return bool(lines) and not counts["different"]


def _next(rows: Sequence[Row]) -> list[str]:
    """Return commands to go on with: one run of the last row with a line a round, and what its method is."""
    if len(rows) < 2:
        return []
    keys = dict(rows[-1].overrides)
    method, experiment = str(keys.get("method", "")), str(keys.pop("experiment", ""))
    words = [experiment, *(f"{key}={as_argument(key, value)}" for key, value in keys.items())]
    commands = [["run", *filter(None, words)], *([["help", method]] if method else [])]
    return [shlex.join(["fedsub", *command]) for command in commands]


def _groups(runs: Runs, finished: bool = False) -> list[Group]:
    """Return the runs of each row that have begun, or have finished."""
    groups = []
    for row, mine in runs:
        begun = [job for job in mine if job.begun()]
        records = tuple(read_run(job.folder) for job in begun if not finished or job.summary())
        groups += [Group(row.label, records, row.setting)] if records else []
    return groups


AT_BUDGET = {"round": "last round within it", "final": "score", "spent": "spent in the end"}


def table_header(score: Score) -> tuple[str, ...]:
    return (
        *("setting", "method", "rounds to target", "paper: rounds", score.titled(f"final {score.name}")),
        *("paper: final", "difference (95 %)", *(score.titled(f"final {kind}") for kind in ON_TEST_DATA)),
        *(score.titled("on validation data"), "epsilon", "MB down", "MB up", "GFLOPs", "minutes", "device seconds"),
    )


SPREADS = {"deviation": "mean ± standard deviation", "range": "median (minimum to maximum)"}
# Costs and their unit; the last one is of runs with devices.
COSTS = (("formula-bytes-down", 1e6), ("formula-bytes-up", 1e6), ("flops", 1e9), ("seconds", 60), ("device-seconds", 1))


def _cells(row: Row, mine: list[Job], spread: str, apart: str) -> list[str]:
    summaries = [job.summary() for job in mine]
    good = [summary for summary in summaries if summary]
    if not good:
        unknown = [""] * (len(ON_TEST_DATA) + 3 + len(COSTS))
        return [row.setting, row.label, "failed", row.paper.rounds, "failed", row.paper.final, *unknown]
    score, first = mine[0].settings.score, mine[0].settings.evaluations[0]

    def over(kind: str) -> str:
        return _over_seeds(good, f"final-{kind}-{score.name}", score, spread)

    final, validation = over(first), over(f"{first}-validation")
    others = ["" if kind == first else over(kind) for kind in ON_TEST_DATA]
    final += f" ({len(good)} of {len(summaries)} seeds)" * (len(good) < len(summaries))
    epsilon = f"{max(summary['epsilon'] for summary in good):.3g}" if "epsilon" in good[0] else ""
    targets = [summary["rounds-to-target"] for summary in good if "rounds-to-target" in summary]
    rounds = ", ".join("×" if at is None else str(at) for at in targets)
    totals = [([summary[key] for summary in good if (key := f"total-{cost}") in summary], unit) for cost, unit in COSTS]
    costs = [f"{statistics.mean(each) / unit:.1f}" if each else "" for each, unit in totals]
    before = [row.setting, row.label, rounds, row.paper.rounds, final, row.paper.final, apart]
    return [*before, *others, validation, epsilon, *costs]


def _over_seeds(summaries: Sequence[Json], key: str, score: Score, spread: str) -> str:
    values = [summary[key] for summary in summaries if key in summary]
    if not values:
        return ""
    if len(values) == 1:
        return score.number(values[0])
    if spread == "range":
        middle, low, high = map(score.number, (statistics.median(values), min(values), max(values)))
        return f"{middle} ({low} to {high}; {len(values)})"
    return f"{score.number(statistics.mean(values))} ± {score.number(statistics.stdev(values))} ({len(values)})"


def _cost_table(runs: Runs) -> tuple[Sequence[str], list[list[str]]]:
    """Return header and rows of the costs to accuracy: compared among the finished runs, beside the paper's."""
    first, timed = runs[0][1][0].settings, any(job.settings.devices for _, mine in runs for job in mine)
    score, groups = first.score, _groups(runs, finished=True)
    names = columns(score, timed)
    gb, gflops = "paper: GB", "paper: GFLOPs"
    header = ("setting", "method", score.titled("threshold"), *names[:3], gb, *names[3:5], gflops, *names[5:])
    costs = costs_of_groups(groups, f"{first.evaluations[0]}-{score.name}", timed) if groups else []
    of_row = {(group.section, group.label): texts for group, texts in zip(groups, costs, strict=True)}
    cells = []
    for row, _ in runs:
        texts = of_row.get((row.setting, row.label), ["failed", *[""] * len(names)])
        cells += [[row.setting, row.label, *texts[:4], row.paper.gigabytes, *texts[4:6], row.paper.gflops, *texts[6:]]]
    return header, cells


def _write(out: Path, name: str, table: Table, made: Mapping[str, str], runs: Runs, content: Json) -> None:
    spread, score = table.spread, runs[0][1][0].settings.score
    entries = zip(runs, content["rows"], strict=True)
    of_rows = [_cells(row, mine, spread, compared(content, entry)) for (row, mine), entry in entries]
    if len({entry["metric"] for entry in content["rows"]}) > 1:
        for texts, entry in zip(of_rows, content["rows"], strict=True):
            texts[4] += f" {entry['metric']}"
    tables: dict[str, tuple[Sequence[str], list[list[str]]]] = {name: (table_header(score), of_rows)}
    lines = [f"# {table.title}", "", *(f"- {key}: {value}" for key, value in made.items()), ""]
    lines += [
        f"Rounds to target: per seed, × = not reached. {score.name.capitalize()} at the end: {SPREADS[spread]} over (n)"
        " seeds.",
        f"Difference: to {content['reference']} of the same setting and seed{_points(runs)} [95 % t-interval] (seeds).",
        "MB by the papers' formula, GFLOPs (closed weights and mask learning included) and minutes are per run.",
        "",
        filled_columns(*tables[name]),
        "",
    ]
    if table.cost_to_accuracy:
        costs = tables[f"{name}-cost-to-accuracy"] = _cost_table(runs)
        lines += [f"## Cost to {score.name}", "", f"Per seed, among the methods of this table. {about(score)}", ""]
        lines += [filled_columns(*costs), ""]
    budgets = [
        [row["setting"], row["method"], str(run["seed"]), budget, *(f"{at[key]:.4g}" for key in AT_BUDGET)]
        for row in content["rows"]
        for run in row["runs"]
        for budget, at in run.get("budgets", {}).items()
    ]
    if budgets:
        columns = ("setting", "method", "seed", "budget", *AT_BUDGET.values())
        lines += ["## At equal budgets", "", markdown(columns, budgets), ""]
    groups = _groups(runs)
    names, served = served_table(groups)
    if served:
        both = zip(groups, served, strict=True)
        shown = [[group.section, group.label, *(cell.text for cell in row)] for group, (_, row) in both]
        tables[f"{name}-served"] = (("setting", "method", *names), shown)
        lines += ["## Who is served", "", filled_columns(*tables[f"{name}-served"]), ""]
    files = {f"{name}.md": "\n".join(lines)}
    for file_name, (header, cells) in tables.items():
        text = io.StringIO(newline="")
        csv.writer(text).writerows([header, *cells])  # as it is: csv_text would quote "+1.2 [0.3, 2.1]"
        files[f"{file_name}.csv"] = text.getvalue()
    for former in (f"{name}-cost-to-accuracy.csv", f"{name}-served.csv", f"{name}.png", *PAGE):
        (out / former).unlink(missing_ok=True)  # of other rows, where these have none
    for file_name, written in files.items():
        write_atomic(out / file_name, written.encode())


def filled_columns(header: Sequence[str], cells: list[list[str]]) -> str:
    """Return a Markdown table of the columns in which any row has something."""
    used = [column for column in range(len(header)) if any(row[column] for row in cells)]
    return markdown([header[column] for column in used], [[row[column] for column in used] for row in cells])
