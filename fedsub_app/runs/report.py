"""What is printed and drawn of a run: a line a round, a table at the end, learning curves."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json
from fedsub_app.common.tensors import Json
from fedsub_app.runs.cost_to_accuracy import ABOUT, COLUMNS, averages, cells, costs_to_accuracy
from fedsub_app.runs.directory import ACCURACIES, read_rounds
from fedsub_app.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOST = ("lost-state", "evaluated-without-state")  # of a round's line: clients

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

# what a run has cost by the end of a round: the sum of these keys of its lines, over the unit
COSTS = {
    "MB by formula": (("formula-bytes-down", "formula-bytes-up"), 1e6),
    "GFLOPs": (("flops",), 1e9),
    "seconds in rounds": (("seconds",), 1),
}


def human_bytes(count: float) -> str:
    """Return bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_seconds(seconds: float) -> str:
    """Return a duration: ``42 s``, ``3:07 min``, ``1:02 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def round_line(line: Json, settings: Settings, seconds_left: float) -> str:
    """Return one round as one line of text; ``line`` is that of rounds.jsonl."""
    words = [f"round {line['round']:>{len(str(settings.num_rounds))}}/{settings.num_rounds}"]
    words += [f"{key.removesuffix('-accuracy')} {line[key]:.2f} %" for key in ACCURACIES if key in line]
    if line.get("train-loss") is not None:
        words.append(f"train loss {line['train-loss']:.4f}")
    dropped = line.get("dropped", ())
    words.append(f"clients {len(line['clients']) - len(dropped)}/{len(line['clients'])}")
    if line.get("epsilon") is not None:
        words.append(f"epsilon {line['epsilon']:.3g}")
    words.append(f"down {human_bytes(line['bytes-down'])} up {human_bytes(line['bytes-up'])}")
    words.append(f"{line['seconds']:.2f} s")
    words.append(f"left {human_seconds(seconds_left)}")
    if line["status"] == "abandoned":
        words.append(f"ABANDONED: {line['abandoned']}, the model stays")
    words += [f"dropped client {drop['client']}: {drop['reason']}" for drop in dropped[:3]]
    if len(dropped) > 3:
        words.append(f"and {len(dropped) - 3} more dropped")
    words += [f"{key.replace('-', ' ')}: clients {', '.join(map(str, line[key]))}" for key in LOST if key in line]
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


def figure(width: float, height: float) -> "Figure":
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure  # on demand: it costs 0.3 s of every start

    return Figure(figsize=(width, height), layout="constrained")


def draw_partition(folder: Path) -> Path:
    """Draw client × class counts of the run's partition.json as circles; returns the picture."""
    content = read_json(folder / "partition.json")
    counts = content["counts"]
    clients, classes = len(counts), len(counts[0])
    drawing = figure(min(16.0, 4 + 0.3 * clients), min(12.0, 1.5 + 0.25 * classes))
    axes = drawing.subplots()
    axes.locator_params(integer=True)
    most = max(max(row) for row in counts) or 1
    points = [(c, k, 180 * row[k] / most) for c, row in enumerate(counts) for k in range(classes) if row[k]]
    axes.scatter(*zip(*points, strict=True), color=COLOURS[0])
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    axes.set_title(f"training samples: the largest circle is {most}", fontsize="medium")
    drawing.savefig(folder / "partition.png", dpi=120)
    return folder / "partition.png"


def draw_run(folder: Path) -> None:
    """Draw one run's partition and, where anything was evaluated, its learning curves into its directory."""
    draw_partition(folder)
    if any(key in line for line in read_rounds(folder) for key in ACCURACIES):
        draw_curves([folder], folder / "curve.png")


def draw_curves(folders: Sequence[Path], target: Path) -> Path:
    """Draw accuracy against rounds, bytes, FLOPs and seconds, one line per run and accuracy; returns the picture.

    Raises
    ------
    UserError
        A folder is not the directory of a run, or holds no evaluated round.
    """
    drawing = figure(15, 4)
    panels = drawing.subplots(1, 4, sharey=True)
    drawn = 0
    for folder, name in zip(folders, _names(folders), strict=True):
        lines = _with_costs(folder)
        for key in ACCURACIES:
            points = [line for line in lines if key in line]
            if not points:
                continue
            label = f"{name}: {key.removesuffix('-accuracy')}"
            for panel, cost in zip(panels, ("round", *COSTS), strict=True):
                accuracy = [point[key] for point in points]
                colour = COLOURS[drawn % len(COLOURS)]
                panel.plot([point[cost] for point in points], accuracy, color=colour, label=label, linewidth=1.3)
            drawn += 1
    if not drawn:
        raise UserError(f"{', '.join(map(str, folders))}: no evaluated round to draw")
    for panel, label in zip(panels, ("round", *COSTS), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy (%)")
    panels[0].locator_params(axis="x", integer=True)
    panels[0].legend(fontsize="small")
    try:
        drawing.savefig(target, dpi=120)
    except ValueError as error:  # a suffix that matplotlib does not know; its message lists those that it does
        raise UserError(f"{target}: {error}") from None
    return target


def compare(folders: Sequence[Path]) -> str:
    """Return a Markdown table: each run's last accuracy beside the first run's at the same cost.

    For every accuracy that both have, and each of bytes (by the papers' formula, both ways), FLOPs and seconds; "–"
    where the first run had not been evaluated yet.
    """
    first = _with_costs(folders[0])
    header = (
        "run",
        "accuracy",
        "at the end (%)",
        *(text for cost in COSTS for text in (cost, "first run by then (%)")),
    )
    rows = []
    for folder, name in zip(folders, _names(folders), strict=True):
        lines = _with_costs(folder)
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
    runs = {name: read_rounds(folder) for folder, name in zip(folders, _names(folders), strict=True)}
    key = next((key for key in ACCURACIES if all(averages(lines, key) for lines in runs.values())), None)
    if key is None:
        return ""
    threshold, costs = costs_to_accuracy(runs, key)
    table = markdown(("run", *COLUMNS), [[name, *cells([cost])] for name, cost in costs.items()])
    return f"Cost of {threshold:.2f} % {key.removesuffix('-accuracy')} accuracy. {ABOUT}\n\n{table}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a label for each run: method and seed or, where two runs have the same, the folder."""
    settings = [_settings(folder) for folder in folders]
    names = [f"{content['method']}, seed {content['seed']}" for content in settings]
    if len(set(names)) < len(names):
        whole = [folder.resolve() for folder in folders]
        names = [os.path.relpath(folder, os.path.commonpath(whole)) for folder in whole]
    return names


def _with_costs(folder: Path) -> list[Json]:
    """Return the lines of a run's rounds, each with what the run has cost by its end."""
    lines = read_rounds(folder)
    for cost, (keys, unit) in COSTS.items():
        total = 0.0
        for line in lines:
            total += sum(line.get(key) or 0 for key in keys) / unit
            line[cost] = total
    return lines


def _settings(folder: Path) -> Json:
    path = folder / "settings.json"
    if not path.is_file():
        raise UserError(f"{folder}: not the directory of a run (no readable settings.json)")
    content = read_json(path).get("settings")
    if not isinstance(content, dict) or not {"method", "seed"} <= content.keys():
        raise UserError(f"{path}: not a run's settings")
    return content
