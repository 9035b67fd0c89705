"""What is printed of a run: a line a round, a table at the end, what several runs have cost."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from fedsub_app.common.progress import human_seconds
from fedsub_app.common.tensors import Json
from fedsub_app.data import Dataset
from fedsub_app.runs.cost_to_accuracy import ABOUT, COLUMNS, averages, cells, costs_to_accuracy
from fedsub_app.runs.records import COSTS, Group, names_of, read_run, summary_of
from fedsub_app.runs.rounds import ACCURACIES
from fedsub_app.settings import Settings
from strategies.base import SubnetStrategy

LOST = ("lost-state", "evaluated-without-state")  # of a round's line: clients
NAMED = ("not-waited-for", *LOST)


def human_bytes(count: float) -> str:
    """Return bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def opening(folder: Path, dataset: Dataset, strategy: SubnetStrategy) -> str:
    """Return what a run is about to do, as one line of text."""
    settings = strategy.settings
    count = sum(parameter.numel() for parameter in strategy.model.parameters())
    words = [f"run {folder}", f"{settings.method} on {settings.dataset}"]
    words += [f"{len(dataset.train_y):,} training and {len(dataset.test_y):,} test samples"]
    words += [f"{settings.model}, {count:,} parameters"]
    words += [f"{settings.num_clients} clients, {settings.sample_size} a round"]
    stages = [f"{name} in {text}" for name, text in stages_of(strategy) if name]
    words += [", ".join([f"{settings.num_rounds} rounds", *stages[:3]])]
    return "  ".join(words)


def stages_of(strategy: SubnetStrategy) -> list[tuple[str, str]]:
    """Return the parts of a run, one after the other: a part's name, "" for none, and which rounds it is."""
    most = strategy.settings.num_rounds
    parts = [(name, list(rounds)) for name, rounds in groupby(range(1, most + 1), strategy.stage)]
    if len(parts) == 1:
        return [(parts[0][0], "all of them")]
    return [(name, f"rounds {rounds[0]} to {rounds[-1]}") for name, rounds in parts]


def round_line(line: Json, settings: Settings, seconds_left: float) -> str:
    """Return one round as one line of text; ``line`` is that of rounds.jsonl."""
    words = [f"round {line['round']:>{len(str(settings.num_rounds))}}/{settings.num_rounds}"]
    words += [line["stage"]] if "stage" in line else []
    words += [f"{key.removesuffix('-accuracy')} {line[key]:.2f} %" for key in ACCURACIES if key in line]
    if line.get("train-loss") is not None:
        words.append(f"train loss {line['train-loss']:.4f}")
    dropped, others = line.get("dropped", ()), line.get("not-waited-for", ())
    words.append(f"clients {len(line['clients']) - len(dropped) - len(others)}/{len(line['clients'])}")
    if line.get("epsilon") is not None:
        words.append(f"epsilon {line['epsilon']:.3g}")
    words.append(f"down {human_bytes(line['bytes-down'])} up {human_bytes(line['bytes-up'])}")
    words.append(f"{line['seconds']:.2f} s")
    words.append(f"left {human_seconds(seconds_left)}")
    if line["status"] == "abandoned":
        words.append(f"ABANDONED: {line['abandoned']}, the model stays")
    elif "partial" in line:
        words.append(f"partial: {line['partial']}")
    words += [f"dropped client {drop['client']}: {drop['reason']}" for drop in dropped[:3]]
    if len(dropped) > 3:
        words.append(f"and {len(dropped) - 3} more dropped")
    words += [f"{key.replace('-', ' ')}: clients {', '.join(map(str, line[key]))}" for key in NAMED if line.get(key)]
    return "  ".join(words)


def summary_table(summary: Json) -> str:
    """Return the summary as aligned lines."""
    rows = [("method", f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}")]
    for key in ACCURACIES:
        if f"final-{key}" in summary:
            best = summary[f"best-{key}"]
            rows.append((key.replace("-", " "), f"{summary[f'final-{key}']:.2f} % at the end, {best:.2f} % at best"))
    if "rounds-to-target" in summary:
        rows.append(("rounds to target", str(summary["rounds-to-target"] or "not reached")))
    if summary.get("epsilon") is not None:
        rows.append(("privacy", f"epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}, of one client"))
    bad = f", {summary['abandoned-rounds']} abandoned, {summary['dropped-replies']} replies dropped"
    rows.append(("rounds", f"{summary['rounds']}{bad}"))
    for way in ("down", "up"):
        sent, formula = summary[f"total-bytes-{way}"], summary[f"total-formula-bytes-{way}"]
        rows.append((f"bytes {way}", f"{human_bytes(sent)} sent, {human_bytes(formula)} by the formula"))
    rows.append(
        ("training", f"{summary['total-flops']:.3g} FLOPs, {summary['total-subnet-flops']:.3g} in sub-networks")
    )
    rows.append(("time", f"{human_seconds(summary['total-seconds'])} in rounds"))
    folder = Path(summary["run-dir"])
    rows += [("results", str(folder)), ("learning curve", str(folder / "curve.png"))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"{name:<{width}}  {text}" for name, text in rows), ""])


def comparisons(folders: Sequence[Path]) -> str:
    """Return :func:`compare` and :func:`compare_costs` of the runs of each data set, in the order given."""
    sections: dict[str, list[Path]] = {}
    for folder in folders:
        sections.setdefault(str(read_run(folder).settings.get("dataset", "")), []).append(folder)
    texts = []
    for section, runs in sections.items():
        if len(runs) > 1:
            texts += [f"{section}:"] * (len(sections) > 1) + [compare(runs), compare_costs(runs)]
    return "\n\n".join(filter(None, texts))


def compare(folders: Sequence[Path]) -> str:
    """Return a Markdown table: each run's last accuracy beside the first run's at the same cost.

    For every accuracy that both have, and each of bytes (by the papers' formula, both ways), FLOPs and seconds; "–"
    where the first run had not been evaluated yet.
    """
    records = [read_run(folder) for folder in folders]
    first = records[0].lines
    header = (
        "run",
        "accuracy",
        "at the end (%)",
        *(text for cost in COSTS for text in (cost, "first run by then (%)")),
    )
    rows = []
    for record, name in zip(records, names_of(folders, [record.settings for record in records]), strict=True):
        lines = record.lines
        for key in ACCURACIES:
            if not any(key in line for line in first) or not any(key in line for line in lines):
                continue
            row = [name, key.removesuffix("-accuracy"), f"{[line[key] for line in lines if key in line][-1]:.2f}"]
            for cost in COSTS:
                spent = lines[-1][cost]
                by_then = [line[key] for line in first if key in line and line[cost] <= spent]
                row += [f"{spent:.1f}", f"{by_then[-1]:.2f}" if by_then else "–"]
            rows.append(row)
    return markdown(header, rows)


def compare_costs(folders: Sequence[Path]) -> str:
    """Return a Markdown table: what 90 % of the best run's accuracy has cost each run; "" where they share none.

    The accuracy is the first of those that all runs have measured.
    """
    records = [read_run(folder) for folder in folders]
    names = names_of(folders, [record.settings for record in records])
    runs = {name: record.lines for name, record in zip(names, records, strict=True)}
    key = next((key for key in ACCURACIES if all(averages(lines, key) for lines in runs.values())), None)
    if key is None:
        return ""
    threshold, costs = costs_to_accuracy(runs, key)
    table = markdown(("run", *COLUMNS), [[name, *cells([cost])] for name, cost in costs.items()])
    return f"Cost of {threshold:.2f} % {key.removesuffix('-accuracy')} accuracy. {ABOUT}\n\n{table}"


def summary_text(groups: Sequence[Group]) -> str:
    """Return what some groups came to and have cost, aligned; columns that are 0 for all are left out."""
    header, rows = summary_of(groups)
    used = [column for column in range(len(header)) if any(cells[column].text != "0" for _, cells in rows)]
    lines = [["", *(header[column] for column in used)]]
    lines += [[label, *(cells[column].text for column in used)] for label, cells in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(word.rjust(wide) for word, wide in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))
