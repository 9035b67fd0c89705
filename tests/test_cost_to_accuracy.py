"""Cost to accuracy: the moving average, the threshold, what it has cost, on curves small enough to work out by hand."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsub_app.cli import main as cli
from fedsub_app.client_app import app
from fedsub_app.common import conf_files
from fedsub_app.common.score import Score
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.models import build_model
from fedsub_app.reports.cost_to_accuracy import (
    Reached,
    averages,
    best,
    cells,
    costs_to_accuracy,
    round_reached,
)
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.recorded import settings_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.studies.tables import read_table
from fedsub_app.training.costs import forward_flops, training_flops

Run = Callable[..., tuple[Json, Path]]
KEY = "global-accuracy"
ACCURACY = Score()
Curve = dict[int, float]


def lines(curve: Curve, rounds: int | None = None, **costs: float) -> list[Json]:
    """A run whose rounds cost 1, 2 and 3 GB and GFLOPs; only the rounds of ``curve`` are evaluated."""
    costs = {"formula-bytes-down": 0.4e9, "formula-bytes-up": 0.6e9, "published-flops": 2e9, "flops": 3e9} | costs
    found: list[Json] = [{"round": 0, KEY: 99.0}]  # the initial model, in no mean
    for number in range(1, 1 + (rounds or max(curve))):
        found.append({"round": number, **costs} | ({KEY: curve[number]} if number in curve else {}))
    return found


def every(values: list[float], step: int = 1) -> Curve:
    return {step * (k + 1): value for k, value in enumerate(values)}


def test_the_mean_is_of_the_last_ten_rounds() -> None:
    found = averages(lines(every([float(k) for k in range(1, 13)])), KEY)
    assert found[:3] == [(1, 1.0), (2, 1.5), (3, 2.0)]
    assert found[9:] == [(10, 5.5), (11, 6.5), (12, 7.5)]
    assert best(found, ACCURACY) == 7.5


def test_the_best_mean_is_of_ten_rounds_where_there_are_ten() -> None:
    assert best(averages(lines(every([80.0] + [10.0] * 9)), KEY), ACCURACY) == 17.0
    assert best(averages(lines(every([80.0] + [10.0] * 8)), KEY), ACCURACY) == pytest.approx(
        160 / 9
    )  # nine rounds in all


def test_with_evaluations_every_few_rounds_the_mean_is_over_those_of_ten_rounds() -> None:
    every_4 = averages(lines(every([10.0, 20.0, 30.0, 40.0], 4)), KEY)
    assert every_4 == [(4, 10.0), (8, 15.0), (12, 20.0), (16, 30.0)]  # rounds 3 to 12: 4, 8, 12; 7 to 16: 8, 12, 16
    every_20 = averages(lines(every([10.0, 20.0], 20)), KEY)
    assert every_20 == [(20, 10.0), (40, 20.0)]


@pytest.mark.parametrize(
    ("means", "step", "number"),
    [
        ([1, 5, 5, 5, 5, 5, 9], 1, 6),  # from round 2 on, held at the end of round 6
        ([5, 5, 5, 5, 5], 1, 5),
        ([5, 5, 5, 5, 4, 5, 5, 5, 5], 1, None),  # four in a row, twice
        ([5, 5, 5, 5, 4, 5, 5, 5, 5, 5], 1, 10),
        ([1, 2, 3, 4, 4.999], 1, None),
        ([5, 5, 5], 2, 6),  # evaluated in rounds 2, 4, 6: a span of five
        ([5, 5], 2, None),
        ([4, 5, 5], 5, 15),  # evaluated in rounds 5, 10, 15
        ([4, 4, 5], 5, None),  # nobody knows whether it would have held
    ],
)
def test_the_threshold_is_held_for_five_rounds(means: list[float], step: int, number: int | None) -> None:
    assert round_reached([(step * (k + 1), mean) for k, mean in enumerate(means)], 5.0, ACCURACY) == number


def test_a_comparison_by_hand() -> None:
    runs = {
        "flat": lines(dict.fromkeys(range(1, 21), 50.0)),
        "low": lines(dict.fromkeys(range(1, 21), 44.0)),
        "rising": lines({n: min(2.0 * n, 50.0) for n in range(1, 40)}, flops=7e9),
        "late": lines({n: 0.0 if n <= 16 else 100.0 for n in range(1, 21)}),
    }
    threshold, costs = costs_to_accuracy(runs, KEY, ACCURACY)
    assert threshold == 45.0
    assert costs["flat"] == (50.0, Reached(5, 5.0, 10.0, 15.0))
    assert costs["low"] == (44.0, None)
    assert costs["late"] == (40.0, None)
    # From round 10 to 25 the mean is 2n - 9, afterwards 50 - (34 - n)(35 - n) / 10: first above 45 in round 28 (45.8).
    assert costs["rising"] == (50.0, Reached(32, 32.0, 64.0, 224.0))
    assert cells([costs["rising"], costs["low"]], ACCURACY, timed=False) == [
        "50.00, 44.00",
        *(f"{n}, not reached" for n in (32, 32, 64, 224)),
    ]


def test_a_loss_below_zero_has_a_threshold_above_the_best() -> None:
    low = Score("nll", False, "", -1e9, 1e9)
    runs = {"a": lines(every([-10.0] * 12)), "b": lines(every([-9.5] * 12)), "c": lines(every([-8.0] * 12))}
    threshold, costs = costs_to_accuracy(runs, KEY, low)
    assert threshold == -9.0
    assert [cost.reached is not None for cost in costs.values()] == [True, True, False]


def test_runs_of_before_the_papers_count_was_recorded() -> None:
    old = [{k: v for k, v in line.items() if k != "published-flops"} for line in lines(every([50.0] * 5))]
    _, costs = costs_to_accuracy({"old": old}, KEY, ACCURACY)
    reached = costs["old"].reached
    assert reached is not None
    assert math.isnan(reached.published_gflops)
    assert cells([costs["old"]], ACCURACY, timed=False) == ["50.00", "5", "5", "–", "15"]


curves = st.lists(st.floats(0, 100), min_size=1, max_size=40)
steps = st.integers(1, 12)


@given(curves, steps, st.floats(0, 100), st.floats(0, 100))
@settings(deadline=None)
def test_a_higher_threshold_is_not_reached_earlier(values: list[float], step: int, one: float, other: float) -> None:
    found = averages(lines(every(values, step)), KEY)
    low, high = (round_reached(found, threshold, ACCURACY) or math.inf for threshold in sorted((one, other)))
    assert low <= high


@given(curves, steps, st.floats(0, 100))
@settings(deadline=None)
def test_what_happens_later_changes_nothing(values: list[float], step: int, threshold: float) -> None:
    found = averages(lines(every(values, step)), KEY)
    number = round_reached(found, threshold, ACCURACY)
    for longer in (values + [0.0] * 20, values + [100.0] * 20):
        after = round_reached(averages(lines(every(longer, step)), KEY), threshold, ACCURACY)
        assert after == number if number else after is None or after > len(values) * step


@given(curves, steps)
@settings(deadline=None)
def test_means_lie_between_the_evaluations(values: list[float], step: int) -> None:
    found = averages(lines(every(values, step)), KEY)
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for _, mean in found)
    assert found[0] == (step, values[0])
    assert round_reached(found, 0.0, ACCURACY) == next((n for n, _ in found if n - step >= 4), None)


@given(st.lists(curves, min_size=1, max_size=4), st.floats(0.01, 10))
@settings(deadline=None)
def test_the_best_run_sets_the_threshold_and_costs_are_sums(of_runs: list[list[float]], scale: float) -> None:
    runs = {str(k): lines(every(values)) for k, values in enumerate(of_runs)}
    threshold, costs = costs_to_accuracy(runs, KEY, ACCURACY)
    assert threshold == pytest.approx(0.9 * max(cost.best for cost in costs.values()))
    dearer = {"flops": 3e9 * scale}
    _, other = costs_to_accuracy({name: [line | dearer for line in run] for name, run in runs.items()}, KEY, ACCURACY)
    for name, cost in costs.items():
        assert (cost.reached is None) == (other[name].reached is None)
        if cost.reached:
            assert cost.reached.gigabytes == pytest.approx(cost.reached.round)
            assert other[name].reached == cost.reached._replace(gflops=pytest.approx(3 * scale * cost.reached.round))


@pytest.mark.parametrize(("method", "doubled"), [("fedavg", 1), ("fedprox", 1), ("moon", 2), ("ist", 1)])
def test_the_papers_count_of_a_round(method: str, doubled: int, run_local: Run) -> None:
    """s clients x local steps x batch x MACs of the client's network (Hu et al. 2023, B.2; MOON twice)."""
    s, steps, batch, h = 3, 4, 16, 50
    keys: dict[str, Any] = {"num_clients": 6, "clients_per_round": s, "partition": "iid", "local_steps": steps}
    width = {"ist__width": h} if method == "ist" else {}
    _, folder = run_local(method=method, batch_size=batch, num_rounds=1, **keys, **width)
    h = h if method == "ist" else 1000
    macs = 64 * h + h * 10
    line = read_rounds(folder)[1]
    assert line["published-flops"] == s * steps * batch * macs * doubled
    net = build_model("feature-mlp", (1, 8, 8), 10, 0, h)
    assert forward_flops(problem_of((1, 8, 8)), net) == 2 * macs
    step = training_flops(problem_of((1, 8, 8)), net) + (4 * macs if method == "moon" else 0)
    assert line["flops"] == s * steps * batch * step


def test_the_papers_round_of_fedavg_on_birds() -> None:
    """26.18 GFLOPs a round of ten clients and 25 steps of 32 features: what Table 1's 904 GFLOPs are 34.5 rounds of."""
    net = build_model("feature-mlp", (3072,), 200, 0)
    assert 10 * 25 * 32 * forward_flops(problem_of((3072,)), net) / 2 / 1e9 == pytest.approx(26.18, abs=0.01)


TABLE = """# A small table
title = "A small table"
seeds = 1
cost-to-accuracy = true

[[setting]]
name = "digits"
experiment = "fedpews/digits"
set = { num-rounds = 6, model = "feature-mlp", lr = 0.05, partition = "iid", train-per-class = 20 }
paper.FedAvg = { gigabytes = "1st (3)", gflops = "FAIL" }

[[method]]
label = "FedAvg"
set = { method = "fedavg" }

[[method]]
label = "nothing"
set = { method = "fedavg", local-epochs = 0 }

[[method]]
label = "alone"
set = { method = "local", evaluate = "personal", num-rounds = 1 }
"""


def test_reproduce_and_report_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = tmp_path / "conf"
    (conf / "my/tables").mkdir(parents=True)
    (conf / "fedpews").symlink_to(conf_files.conf_folder() / "fedpews")
    (conf / "my/tables/small.toml").write_text(TABLE)
    monkeypatch.setattr(conf_files, "conf_folder", lambda: conf)
    out = tmp_path / "out"
    for row in read_table("my-small").rows:  # in this process, which is faster than reproduce's own
        keys = dict(row.overrides) | {"seed": 0, "run-dir": str(out / row.slug / "seed0")}
        run_experiment(LocalGrid(app, keys), settings_of(keys))
    assert cli.main(["reproduce", "my-small", "--out", str(out)]) == 0
    header, fedavg, nothing, alone = csv.reader((out / "my-small-cost-to-accuracy.csv").open())
    folders = [out / f"digits-{name}/seed0" for name in ("fedavg", "nothing")]
    runs = {folder.parent.name: read_rounds(folder) for folder in folders}
    threshold, costs = costs_to_accuracy(runs, KEY, ACCURACY)
    row = dict(zip(header[:6], fedavg, strict=False))
    assert row["threshold (%)"] == f"{threshold:.2f}"
    assert [row[column] for column in ("best (%)", "rounds", "GB")] == cells(
        [costs["digits-fedavg"]], ACCURACY, timed=False
    )[:3]
    assert (fedavg[6], fedavg[9]) == ("1st (3)", "FAIL")
    assert nothing[4:] == [*2 * ["not reached"], "", *2 * ["not reached"], ""]
    assert alone == ["digits", "alone", *[""] * 8]  # it has not measured the global model
    assert "## Cost to accuracy" in (out / "my-small.md").read_text()
    capsys.readouterr()
    assert cli.main(["report", *map(str, folders), "--out", str(tmp_path / "curves.png")]) == 0
    text = capsys.readouterr().out
    assert "Cost to accuracy. Best: the highest mean accuracy" in text
    assert f"| {threshold:.2f} | global | {fedavg[3]} | {fedavg[4]} | {fedavg[5]} | {fedavg[7]} | {fedavg[8]} |" in text


def test_a_window_has_ten_rounds_where_not_each_is_evaluated() -> None:
    """At round 15 it has 6 to 15, so the evaluations of rounds 10 and 15: (20 + 60) / 2."""
    lines: list[Json] = [{"round": n, "global-accuracy": score} for n, score in ((5, 10.0), (10, 20.0), (15, 60.0))]
    assert averages(lines, "global-accuracy") == [(5, 10.0), (10, 15.0), (15, 40.0)]
