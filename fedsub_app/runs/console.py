"""The printed lines of a run: its first line, a line a round, a table at the end."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from fedsub_app.common.progress import human_seconds
from fedsub_app.common.score import Score, kind_of
from fedsub_app.common.section import Json
from fedsub_app.common.text import human_bytes
from fedsub_app.data import Dataset
from fedsub_app.runs.recorded import resume_command
from fedsub_app.settings import Settings
from strategies.base import SubnetStrategy

NAMED = ("not-waited-for", "lost-state", "evaluated-without-state")  # keys of a round's line: clients


def opening(folder: Path, dataset: Dataset, strategy: SubnetStrategy) -> str:
    """Return a run's settings and sizes as one line of text."""
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
    """Return the stages of a run, one after the other: a stage's name, "" for none, and its rounds in words."""
    count = strategy.settings.num_rounds
    parts = [(name, list(rounds)) for name, rounds in groupby(range(1, count + 1), strategy.stage)]
    if len(parts) == 1:
        return [(parts[0][0], "all of them")]
    return [(name, f"rounds {rounds[0]} to {rounds[-1]}") for name, rounds in parts]


def round_line(line: Json, settings: Settings, score: Score, seconds_left: float) -> str:
    """Return one round as one line of text; ``line`` is its line of rounds.jsonl."""
    words = [f"round {line['round']:>{len(str(settings.num_rounds))}}/{settings.num_rounds}"]
    words.append(f"left {human_seconds(seconds_left)}")
    words += [line["stage"]] if "stage" in line else []
    words += [f"{kind_of(key)} {score.text(line[key])}" for key in score.keys if key in line]
    if (loss := line.get("train-loss")) is not None:
        words.append(f"train loss {loss:.4f}" if abs(loss) >= 0.01 else f"train loss {loss:.3g}")
    dropped, others = line.get("dropped", ()), line.get("not-waited-for", ())
    words.append(f"clients {len(line['clients']) - len(dropped) - len(others)}/{len(line['clients'])}")
    if line.get("epsilon") is not None:
        words.append(f"epsilon {line['epsilon']:.3g}")
    words.append(f"down {human_bytes(line['bytes-down'])} up {human_bytes(line['bytes-up'])}")
    words.append(f"{line['seconds']:.2f} s")
    if line["status"] == "abandoned":
        stays = "back to that of round {back-to-round}".format(**line) if "back-to-round" in line else "the model stays"
        words.append(f"ABANDONED: {line['abandoned']}, {stays}")
    elif "partial" in line:
        words.append(f"partial: {line['partial']}")
    words += _dropped(dropped)
    measured = line.get("measurement", {})
    if "abandoned" in measured:
        words.append(f"measurement ABANDONED: {measured['abandoned']}, the merged model stays")
    words += _dropped(measured.get("dropped", ()), "measurement dropped")
    words += _dropped(line.get("not-evaluated", ()), "unevaluated")
    words += [f"{key.replace('-', ' ')}: clients {', '.join(map(str, line[key]))}" for key in NAMED if line.get(key)]
    return "  ".join(words)


def _dropped(drops: Sequence[Json], what: str = "dropped") -> list[str]:
    more = [f"and {len(drops) - 3} more {what.split()[-1]}"] if len(drops) > 3 else []
    return [f"{what} client {drop['client']}: {drop['reason']}" for drop in drops[:3]] + more


def summary_table(summary: Json, score: Score) -> str:
    """Return the summary as aligned lines."""
    rows = [("method", f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}")]
    for key in score.keys:
        if f"final-{key}" in summary:
            final, best = (score.text(summary[f"{when}-{key}"]) for when in ("final", "best"))
            rows.append((key.replace("-", " "), f"{final} at the end, {best} at best"))
    if "rounds-to-target" in summary:
        reached = summary["rounds-to-target"]
        rows.append(("rounds to target", "not reached" if reached is None else str(reached)))
    if summary.get("epsilon") is not None:
        rows.append(("privacy", f"epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}, of one client"))
    bad = f", {summary['abandoned-rounds']} abandoned, {summary['dropped-replies']} replies dropped"
    rows.append(("rounds", f"{summary['rounds']}{bad}"))
    if limit := summary.get("ended-by"):
        more = f"`{resume_command(Path(summary['run-dir']))} {limit}=…` goes on with another limit, 0 with none"
        rows.append(("ended by", f"{limit}; {more}"))
    for direction in ("down", "up"):
        sent, formula = summary[f"total-bytes-{direction}"], summary[f"total-formula-bytes-{direction}"]
        rows.append((f"bytes {direction}", f"{human_bytes(sent)} sent, {human_bytes(formula)} by the formula"))
    flops = f"{summary['total-flops']:.3g} FLOPs, {summary['total-subnet-flops']:.3g} in sub-networks"
    rows.append(("training", flops))
    timed = "total-device-seconds" in summary
    clock = f", {summary['total-device-seconds']:.4g} s by the devices' clock" if timed else ""
    clock += f", {summary['total-joules']:.4g} J" if "total-joules" in summary else ""
    rows.append(("time", f"{human_seconds(summary['total-seconds'])} in rounds{clock}"))
    rows += [("results", summary["run-dir"]), ("learning curve", f"{summary['run-dir']}/curve.png")]
    for key, of in summary.get("served", {}).items():
        rows.append((f"{kind_of(key)} by", ", ".join(f"{name} {score.text(value)}" for name, value in of.items())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"{name:<{width}}  {text}" for name, text in rows), ""])
