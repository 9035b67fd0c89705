"""Budgets end a run as complete, after the round that uses them up."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import rounds

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_json
from fedsub_app.common.tensors import Json
from fedsub_app.reports.records import Record
from fedsub_app.runs.config import resolve
from fedsub_app.runs.recorded import _allows_more, settings_of
from fedsub_app.runs.rounds import ended_by, read_rounds
from fedsub_app.studies.evidence import at_budgets

Run = Callable[..., tuple[Json, Path]]


@pytest.mark.parametrize(
    ("key", "counted"), [("max_flops", ("flops",)), ("max_bytes", ("formula-bytes-down", "formula-bytes-up"))]
)
@pytest.mark.parametrize(("share", "last"), [(0.1, 1), (2.0, 2), (2.5, 3), (3.5, 4)])
def test_the_round_that_uses_it_up_is_the_last(
    key: str, counted: tuple[str, ...], share: float, last: int, run_local: Run
) -> None:
    _, whole = run_local("whole", num_rounds=4, eval_every=9)
    costs = [sum(line[count] for count in counted) for line in read_rounds(whole)[1:]]
    assert len(set(costs)) == 1
    keys = {"num_rounds": 4, "eval_every": 9, "checkpoint_every": 9, "evaluate": "global,personal"}
    summary, folder = run_local("budget", **keys, **{key: share * costs[0]})
    assert (summary["status"], summary["rounds"]) == ("completed", last)
    assert summary["ended-by"] == key.replace("_", "-")
    line = read_rounds(folder)[-1]
    assert "global-accuracy" in line  # the last round is evaluated, on the clients too, and has a checkpoint
    assert "personal-accuracy" in line
    assert (folder / f"checkpoints/round-{last:06d}.safetensors").exists()


ALL: Json = {"max-flops": 2e9, "max-bytes": 6e6, "all-budgets": True}
SECONDS: Json = ALL | {"max-device-seconds": 40.0}


def lines_by_hand() -> list[Json]:
    """Rounds of 1 GFLOP, 1 MB and 10 seconds of devices; rounds 2 and 4 are evaluated, which takes 1 MB more each."""
    lines: list[Json] = [{"round": 0, "global-accuracy": 10.0}]
    for number in range(1, 6):
        lines += [
            {"round": number, "flops": 1e9, "formula-bytes-down": 4e5, "formula-bytes-up": 6e5, "device-seconds": 10}
        ]
    for number in (2, 4):
        lines[number]["formula-bytes-up"] += 1e6
        lines[number] |= {"measurement": {"formula-bytes-up": 1e6}, "global-accuracy": 10.0 * number}
    return lines


def test_with_all_budgets_the_last_ends_the_run_and_earlier_evaluations_cost_nothing() -> None:
    lines, settings = lines_by_hand(), resolve(ALL | {"max-bytes": 4.5e6})
    assert [ended_by(lines[:n], settings) for n in (3, 4, 5)] == [None, None, "max-bytes"]
    assert ended_by(lines[:3], resolve(ALL | {"all-budgets": False})) == "max-flops"
    assert ended_by(lines, resolve(ALL)) is None


def test_the_budget_that_was_used_up_last_has_ended_the_run() -> None:
    """Not the last one of their list: that one may have been used up long before, and more of it changes nothing."""
    settings = resolve(ALL | {"max-bytes": 1e6, "max-flops": 3e9})
    assert [ended_by(lines_by_hand()[:n], settings) for n in (3, 4)] == [None, "max-flops"]


def test_static_batch_norm_is_measured_where_a_budget_ends_the_run(run_local: Run) -> None:
    """Between two evaluations as after ``num-rounds``: the scores are those of the run that ends there."""
    keys: dict[str, Any] = {"method": "heterofl", "model": "lenet5-bn", "image_size": 16, "eval_every": 10}
    _, whole = run_local("whole", **keys, num_rounds=3)
    used = sum(line["flops"] - line.get("measurement", {}).get("flops", 0) for line in read_rounds(whole)[1:])
    summary, folder = run_local("budget", **keys, num_rounds=9, max_flops=used)
    assert (summary["rounds"], summary["ended-by"]) == (3, "max-flops")
    assert rounds(folder) == rounds(whole)


def test_a_run_is_read_at_each_budget() -> None:
    """The last evaluation that costs no more, with its own measurement."""
    record = Record(Path(), {"settings": SECONDS}, lines_by_hand())
    assert at_budgets(record, "global-accuracy") == {
        "2 GFLOPs": {"round": 2, "final": 20.0, "spent": 2.5},
        "6 MB": {"round": 4, "final": 40.0, "spent": 5 / 6},
        "40 device seconds": {"round": 4, "final": 40.0, "spent": 1.25},
    }


def test_a_budget_that_the_first_evaluation_exceeds_has_no_reading() -> None:
    lines = lines_by_hand()
    del lines[0]["global-accuracy"]  # personal scores have no round 0
    found = at_budgets(Record(Path(), {"settings": SECONDS | {"max-bytes": 1e5}}, lines), "global-accuracy")
    assert list(found) == ["2 GFLOPs", "40 device seconds"]


def test_a_score_that_is_no_number_reaches_nothing() -> None:
    assert ended_by([{"round": 1, "global-accuracy": math.nan}], resolve({"stop-at-score": 1.0})) is None


def test_all_budgets_without_a_budget_is_refused() -> None:
    with pytest.raises(UserError, match="all-budgets = true: needs max-flops, max-bytes or max-device-seconds"):
        resolve({"all-budgets": True})
    assert resolve({"all-budgets": True, "devices": "phones", "max-device-seconds": 1.0}).all_budgets


def test_without_reaching_it_a_run_goes_on(run_local: Run) -> None:
    summary, _ = run_local(max_flops=1e18, max_bytes=1e18)
    assert summary["rounds"] == 3
    assert "ended-by" not in summary


def test_a_run_that_is_over_stays_over(run_local: Run, tmp_path: Path) -> None:
    """Resumed from its end nothing is trained; resumed before it ends where it did."""
    _, plain = run_local("plain", num_rounds=1)
    keys = {"num_rounds": 9, "max_flops": 3 * read_rounds(plain)[1]["flops"], "keep_checkpoints": 0}
    _, folder = run_local("budget", **keys)
    assert len(read_rounds(folder)) == 1 + 3
    before = rounds(folder)
    part = Path(shutil.copytree(folder, tmp_path / "part"))
    run_local("budget", **keys, resume=True)
    assert rounds(folder) == before
    for name in ("summary.json", "checkpoints/round-000003.safetensors"):
        (part / name).unlink()
    run_local("part", **keys, resume=True)
    assert rounds(part) == before
    assert json.loads((part / "summary.json").read_text())["ended-by"] == "max-flops"
    assert (part / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("evaluate", ["global", "personal,global"])
def test_a_run_ends_with_an_accuracy(evaluate: str, run_local: Run) -> None:
    """With the first evaluated round that reaches it, of the first accuracy that is evaluated."""
    keys = {"num_rounds": 6, "evaluate": evaluate, "eval_every": 2, "checkpoint_every": 9}
    key = evaluate.partition(",")[0] + "-accuracy"
    _, whole = run_local("whole", **keys)
    found = {line["round"]: line[key] for line in read_rounds(whole) if key in line and line["round"]}
    assert list(found) == [2, 4, 6]
    assert found[4] > found[2] + 0.1
    summary, folder = run_local("stopped", **keys, stop_at_score=found[4])
    assert (summary["status"], summary["rounds"], summary["ended-by"]) == ("completed", 4, "stop-at-score")
    assert rounds(folder) == rounds(whole)[: len(read_rounds(folder))]
    assert (folder / "checkpoints/round-000004.safetensors").exists()
    before = (folder / "model.safetensors").read_bytes()
    run_local("stopped", **keys, stop_at_score=found[4], resume=True)  # and stays so
    assert read_rounds(folder)[-1]["round"] == 4
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_budget_is_raised_on_resume(run_local: Run) -> None:
    """Then the run goes on, and is the whole run; a smaller budget is refused, 0 is none."""
    keys = {"num_rounds": 3}
    _, whole = run_local("whole", **keys)
    costs = read_rounds(whole)[1]["flops"]
    summary, folder = run_local("part", **keys, max_flops=1.5 * costs)
    assert (summary["rounds"], summary["ended-by"]) == (2, "max-flops")
    for wrong in (0.5 * costs, -1.0):
        with pytest.raises(UserError, match="max-flops"):
            run_local("part", resume=True, max_flops=wrong)
    summary, _ = run_local("part", resume=True, max_flops=2.5 * costs)
    assert (summary["rounds"], "ended-by" in summary) == (3, True)
    assert rounds(folder) == rounds(whole)
    run_local("part", resume=True)  # as it is recorded now
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("key", "old", "value", "task", "more"),
    [
        ("max-bytes", 10.0, 0.0, "classification", True),
        ("max-bytes", 0.0, 10.0, "classification", False),
        ("stop-at-score", 90.0, 95.0, "classification", True),
        ("stop-at-score", 90.0, 80.0, "classification", False),
        ("stop-at-score", 5.0, 4.0, "regression", True),
        ("num-rounds", 5, 4, "classification", False),
        ("num-rounds", 5, 5, "classification", False),
        ("max-bytes", 10.0, 10.0, "classification", False),
        ("max-bytes", 10.0, "", "classification", False),
        ("stop-at-score", None, 1.0, "classification", False),
    ],
)
def test_what_is_more(key: str, old: float, value: float, task: str, more: bool) -> None:
    assert _allows_more(key, value, old, {"task": task}) is more


@pytest.mark.parametrize(
    ("task", "key", "old", "value", "has"),
    [("regression", "stop-at-score", 70.0, 75.0, "70.0"), ("classification", "max-bytes", 0.0, 1e6, "0.0, no limit")],
)
def test_a_tighter_limit_is_refused(task: str, key: str, old: float, value: float, has: str, tmp_path: Path) -> None:
    settings = resolve({"task": task, "partition": "iid", key: old}).flat()
    write_json(tmp_path / "settings.json", {"run-id": "0" * 12, "settings": settings})
    with pytest.raises(UserError) as refused:
        settings_of({"run-dir": str(tmp_path), "resume": True, key: value})
    said = f"{key} = {value}: the run to resume in {tmp_path} has {has}; it can only go further"
    assert str(refused.value) == said
