"""The lines of a run's rounds.jsonl, one a round with its checksum, and their summary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.files import CHECKSUM, checksum, to_json
from fedsub_app.common.score import kind_of
from fedsub_app.common.section import Json
from fedsub_app.settings import Settings

ROUNDS = "rounds.jsonl"
TOTALS = (
    *("bytes-down", "bytes-up", "formula-bytes-down", "formula-bytes-up"),
    *("flops", "published-flops", "subnet-flops", "seconds", "compute-seconds"),
)
OF_DEVICES = ("device-seconds", "joules")  # totals of runs with devices
# Limits of a run: what each counts, and the unit of tables.
BUDGETS = {
    "max-flops": (("flops",), 1e9, "GFLOPs"),
    "max-bytes": (("formula-bytes-down", "formula-bytes-up"), 1e6, "MB"),
    "max-device-seconds": (("device-seconds",), 1, "device seconds"),
}


def to_line(line: Json) -> str:
    """Return a round's line with, at its end, the checksum of the line without it."""
    return to_json(line | {CHECKSUM: checksum(line)})


def from_line(text: str) -> Json:
    """Return what :func:`to_line` was given, without what is null, a number that was none.

    ValueError: no round's line, or changed after it was written.
    """
    line = json.loads(text)
    if not isinstance(line, dict) or line.pop(CHECKSUM, "") != checksum(line) or type(line.get("round")) is not int:
        raise ValueError("not a round's line, or its checksum is of another one")
    return {key: value for key, value in line.items() if value is not None}


def read_rounds(folder: Path) -> list[Json]:
    """Return a run's lines without a torn last one; :class:`UserError`: another is damaged, or not in order."""
    path = folder / ROUNDS
    try:
        texts = path.read_bytes().split(b"\n")[:-1]  # behind the last line break there is nothing, or a torn line
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    lines: list[Json] = []
    for number, text in enumerate(texts, 1):
        try:
            line = from_line(text.decode())
            if lines and line["round"] <= lines[-1]["round"]:
                raise ValueError(f"round {line['round']} after round {lines[-1]['round']}")
        except (ValueError, RecursionError) as error:
            reason = f"line {number} is damaged ({one_line(error)})"
            raise UserError(f"{path}: {reason}; delete that line to go on without its round") from None
        lines.append(line)
    return lines


def dropped(lines: Sequence[Json]) -> list[Json]:
    """Return the refused and missing replies, of trainings, measurements and evaluations: round, client, reason."""
    found: list[Json] = []
    for line in lines:
        phases = (line, "dropped"), (line.get("measurement", {}), "dropped"), (line, "not-evaluated")
        found += [{"round": line["round"], **drop} for of, key in phases for drop in of.get(key, ())]
    return found


def spent(lines: list[Json], budget: str, last_evaluation: bool = False) -> float:
    """Return what rounds cost of a key of ``BUDGETS``; ``last_evaluation``: without measurements for earlier ones."""
    earlier = [line.get("measurement", {}) for line in lines[:-1]] if last_evaluation else []
    whole, left_out = (sum(of.get(key) or 0 for of in each for key in BUDGETS[budget][0]) for each in (lines, earlier))
    return whole - left_out


def ended_by(lines: list[Json], settings: Settings) -> str | None:
    """Return the setting that ends a run after these rounds, before ``num-rounds``; None where the run continues.

    ``BUDGETS``: the first is used up or, with ``all-budgets``, the last. ``stop-at-score``: it is reached.
    """
    limits = {key: limit for key in BUDGETS if (limit := getattr(settings, key.replace("-", "_")))}
    used = [key for key in limits if spent(lines, key, settings.all_budgets) >= limits[key]]
    if used and (len(used) == len(limits) or not settings.all_budgets):
        return max(used, key=lambda key: _used_up(lines, key, limits[key])) if settings.all_budgets else used[0]
    score, enough = settings.score, settings.stop_at_score
    measured = [line.get(f"{settings.evaluations[0]}-{score.name}") for line in lines]
    over = enough and any(value is not None and score.reached(value, enough) for value in measured)
    return "stop-at-score" if over else None


def _used_up(lines: list[Json], budget: str, limit: float) -> int:
    """Return the number of lines that use up a budget of several, which counts the last evaluation alone."""
    return next(n for n in range(len(lines) + 1) if spent(lines[:n], budget, last_evaluation=True) >= limit)


def summarise(lines: list[Json], settings: Settings) -> Json:
    """Return final and best scores, rounds to the target, totals of bytes, FLOPs and seconds."""
    summary: dict[str, Any] = {
        "method": settings.method,
        "dataset": settings.dataset,
        "seed": settings.seed,
        "rounds": max((line["round"] for line in lines), default=0),
        "abandoned-rounds": sum(line.get("status") == "abandoned" for line in lines),
        "dropped-replies": len(dropped(lines)),
    }
    score = settings.score
    for key in score.keys:
        evaluated = [line for line in lines if key in line or f"{kind_of(key)}-loss" in line]
        values = [(line["round"], line[key]) for line in evaluated if key in line]
        if values:
            if key in evaluated[-1]:  # else that round's score is no number
                summary[f"final-{key}"] = values[-1][1]
            summary[f"best-{key}"] = score.best(value for _, value in values)
            if settings.target_score and key == f"{settings.evaluations[0]}-{score.name}":
                reached = [number for number, value in values if score.reached(value, settings.target_score)]
                summary["rounds-to-target"] = reached[0] if reached else None
    if spent := [line for line in lines if "epsilon" in line]:
        summary |= {"epsilon": spent[-1]["epsilon"], "delta": spent[-1]["delta"]}
    if reason := ended_by(lines, settings):
        summary["ended-by"] = reason
    if served := [line["served"] for line in lines if "served" in line]:
        summary["served"] = served[-1]
    totals = [*TOTALS, *(key for key in OF_DEVICES if any(key in line for line in lines))]
    return summary | {f"total-{key}": sum(line.get(key) or 0 for line in lines) for key in totals}


def plateau_lr(lines: Sequence[Json], settings: Settings) -> float:
    """Return the learning rate of ``plateau`` behind some lines, by their scores alone: the same after a resume.

    The evaluation that a run's last round has beside ``eval-every`` does not count where the run gets more rounds.
    """
    from torch import zeros
    from torch.optim import SGD
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    optimizer = SGD([zeros(1)], settings.lr)
    mode: Literal["max", "min"] = "max" if settings.score.high_is_good else "min"
    threshold = 1e-4 if settings.score.low >= 0 else 0.0  # a part of the best score: below 0 in the wrong direction
    schedule = ReduceLROnPlateau(optimizer, mode, settings.lr_decay, settings.lr_patience, threshold)
    key = f"{settings.evaluations[0]}-{settings.score.name}"
    for line in lines:
        if key in line and line["round"] % settings.eval_every == 0:
            schedule.step(line[key])
    return float(optimizer.param_groups[0]["lr"])
