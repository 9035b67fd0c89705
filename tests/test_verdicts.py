"""Statistics over seeds, verdicts by the rule, and a table's file: numbers by hand."""

import json
import math
import sys
from pathlib import Path

import pytest

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.runs.rounds import to_line
from fedsub_app.studies.evidence import (
    Estimate,
    Sample,
    check,
    difference,
    half_width,
    pooled,
    read_evidence,
    row_of,
    run_entry,
    sample,
    sample_of,
    t_interval,
    write_evidence,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs/results"))
from rule import judged, relative


def test_t_interval_of_three_numbers() -> None:
    """Mean 2, standard deviation 1; t of 2 degrees of freedom is 4.3027: 4.3027 / √3 = 2.4842."""
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.half == pytest.approx(2.4842, abs=1e-4)
    assert str(found) == "+2 [-0.484, +4.48]"
    assert t_interval([5.0]) == Estimate(5.0, math.inf, 1)
    assert str(t_interval([5.0])) == "+5"


def test_seeds_are_paired_where_both_rows_have_them() -> None:
    first, second = sample({0: 3.0, 1: 5.0, 2: 4.0}), sample({0: 2.0, 1: 3.0, 2: 1.0, 7: 99.0})
    assert difference(first, second) == t_interval([1.0, 2.0, 3.0])  # the fourth seed has no partner
    ratios = difference(first, second, relative)
    assert ratios is not None
    assert ratios.mean == pytest.approx((50 + 200 / 3 + 300) / 3)
    assert difference(sample({0: 1.0}), sample({1: 2.0})) is None


def test_without_the_runs_it_is_welch() -> None:
    """Variances 4/4 and 9/9: error √2, freedom 2² / (1/3 + 1/8) = 8.727; t of that is 2.2731."""
    found = difference(Sample(10.0, 2.0, 4), Sample(7.0, 3.0, 9))
    assert found is not None
    assert (found.mean, found.n) == (3.0, 4)
    assert found.half == pytest.approx(2.2731 * math.sqrt(2), abs=2e-3)


@pytest.mark.parametrize(
    ("found", "effect", "keys", "verdict"),
    [
        (Estimate(2.0, 1.0, 3), 2.5, {}, "reproduced"),
        (Estimate(-2.0, 1.0, 3), -2.5, {}, "reproduced"),
        (Estimate(2.0, 1.0, 3), 9.0, {}, "direction only"),  # much smaller than in the paper
        (Estimate(20.0, 1.0, 3), 9.0, {}, "direction only"),  # much larger
        (Estimate(0.5, 1.0, 3), 9.0, {}, "not reproduced"),
        (Estimate(-2.0, 1.0, 3), 2.5, {}, "not reproduced"),
        (Estimate(0.5, 1.0, 3), 1.2, {}, "undecided"),
        (Estimate(-0.5, 1.0, 3), 0.4, {}, "undecided"),
        (Estimate(2.0, 1.0, 3), 1.0, {"stated": False}, "reproduced"),  # the paper has a picture and no number
        (Estimate(0.5, 1.0, 3), 9.0, {"stated": False}, "undecided"),
        (Estimate(-2.0, 1.0, 3), 1.0, {"stated": False}, "not reproduced"),
        (Estimate(6.0, math.inf, 1), 5.0, {"sd": 1.0}, "reproduced"),  # one seed, six of the paper's sd
        (Estimate(6.0, math.inf, 1), 12.0, {"sd": 1.0}, "direction only"),
        (Estimate(-6.0, math.inf, 1), 5.0, {"sd": 1.0}, "not reproduced"),
        (Estimate(4.0, math.inf, 1), 30.0, {"sd": 1.0}, "undecided"),  # one seed below five sd decides nothing
        (Estimate(60.0, math.inf, 1), 50.0, {}, "undecided"),  # the paper states no sd
        (Estimate(-75.0, math.inf, 1), -75.04, {"exact": 0.1}, "reproduced"),
        (Estimate(-36.0, math.inf, 1), -25.0, {"exact": 0.1}, "direction only"),
        (Estimate(0.0, 0.0, 3), 1.0, {}, "not reproduced"),  # every seed the same
    ],
)
def test_the_rule(found: Estimate, effect: float, keys: dict[str, float], verdict: str) -> None:
    assert judged(found, effect, **keys)[0] == verdict  # type: ignore[arg-type]


def test_noise_of_several_rows_together() -> None:
    """Variances 1 with 2 degrees of freedom and 4 with 1: (2 · 1 + 1 · 4) / 3 = 2; one seed adds nothing."""
    sd, freedom = pooled([Sample(0, 1.0, 3), Sample(9, 2.0, 2), Sample(5, 0.0, 1)])
    assert (sd, freedom) == (pytest.approx(math.sqrt(2)), 3)
    assert pooled([Sample(5, 0.0, 1)]) == (0.0, 0)
    assert half_width(1.0, 3) == pytest.approx(3.1824, abs=1e-4)
    assert half_width(1.0, 3, intervals=5) == pytest.approx(5.8409, abs=1e-4)  # t of 3, 0.5 % on each side


def made(finals: dict[str, list[float]]) -> Json:
    """Return a table's file by hand: its methods' finals over seeds."""
    totals = {"formula-bytes-down": 5_000_000, "formula-bytes-up": 1_000_000, "flops": 2e9, "seconds": 60.0}
    return {
        "rows": [
            {
                "setting": "here",
                "method": method,
                "runs": [
                    {"seed": seed, "final": final, "rounds": 9, "totals": totals, "curve": {"round": [9]}}
                    for seed, final in enumerate(values)
                ],
            }
            for method, values in finals.items()
        ]
    }


def test_a_later_run_is_equal_within_noise_or_different() -> None:
    """Each row of the file has the variance 1: freedom 4; of two intervals t is 3.4954, times √(1/3 + 1) is 4.036."""
    kept = made({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    new = made({"a": [1.0], "b": [9.0], "c": [0.0]})
    new["rows"].pop()
    assert [word for word, *_ in check(kept, new)] == ["equal", "within seed noise"]  # 4 is within 4.036
    new["rows"][1]["runs"][0]["final"] = 9.1
    ((_, _, _), (word, name, text)) = check(kept, new)
    assert (word, name) == ("different", "here, b")
    assert text == "9.1 (1), in the file 5 ± 1 (3), noise 4.04"
    new["rows"][0]["runs"][0]["curve"] = {"round": [8]}
    assert check(kept, new)[0][0] == "within seed noise"  # the same end, another way to it
    assert [word for word, *_ in check(made({"a": [1.0]}), made({"a": [1.1]}))] == ["different"]  # no noise is known


def test_a_row_of_other_rounds_data_or_metric_is_different() -> None:
    """Two rounds of the same end as ten in the file were equal or within seed noise."""
    kept, new = made({"a": [1.0, 3.0]}), made({"a": [1.0]})
    new["rows"][0] |= {"rounds": 2, "metric": "personal-accuracy"}
    assert check(kept, new)[0][0] == "equal"  # the file does not say how many it had
    kept["rows"][0] |= {"rounds": 10, "metric": "personal-accuracy"}
    ((word, _, text),) = check(kept, new)
    assert word == "different"
    assert text.endswith("; rounds = 2, in the file 10")


def test_a_run_that_ended_without_a_number_is_different_from_one_with_it() -> None:
    """A final of null was the number of rounds; a row without a final in the new runs was in no line: exit code 0."""
    kept, new = made({"a": [1.0], "b": [9.0]}), made({"a": [1.0], "b": [9.0]})
    kept["rows"][1]["runs"][0]["final"] = None
    assert sample_of(kept["rows"][1]) is None
    words = [("equal", "1 (1), in the file 1 (1), noise 0.00"), ("different", "9 (1), in the file no number")]
    assert [(word, text) for word, _, text in check(kept, new)] == words
    assert check(new, kept)[1][::2] == ("different", "no number, in the file 9 (1)")
    del new["rows"][1]["runs"][0]["final"]
    assert check(kept, new)[1][::2] == ("equal", "no number, in the file no number")


def test_metrics_of_a_row() -> None:
    content = made({"a": [1.0, 3.0]})
    (row,) = content["rows"]
    assert sample_of(row) == Sample(2.0, math.sqrt(2), 2, {0: 1.0, 1: 3.0})
    assert sample_of(row, "MB") == Sample(6.0, 0.0, 2, {0: 6.0, 1: 6.0})
    assert sample_of(row, "GFLOPs") == Sample(2.0, 0.0, 2, {0: 2.0, 1: 2.0})
    assert sample_of(row, "rounds-to-target") is None
    row["runs"][0]["rounds-to-target"], row["runs"][1]["rounds-to-target"] = 5, None
    assert sample_of(row, "rounds-to-target") == sample({0: 5, 1: 9})  # not reached: its last round
    summary = {"runs": [{"seed": 0}], "over-seeds": {"final": {"mean": 7.0, "sd": 2.0, "n": 3}}}
    assert sample_of(summary) == Sample(7.0, 2.0, 3)
    summary["over-seeds"]["final"] = {"mean": 2.0, "sd": 1.0, "n": 3}  # 1, 2, 3
    summary["runs"] += [{"seed": 3, "final": 4.0}, {"seed": 4, "final": 5.0}]
    five = sample_of(summary)
    assert five == Sample(3.0, pytest.approx(math.sqrt(2.5)), 5)
    summary["runs"][0] |= {"final": 6.0}  # each run has its own number: the summary is of earlier ones
    assert sample_of(summary) == sample({0: 6.0, 3: 4.0, 4: 5.0})
    assert row_of(content, "here", "b") is None


def test_a_run_becomes_an_entry_of_the_file(tmp_path: Path) -> None:
    settings = {"method": "fedavg", "seed": 3}
    (tmp_path / "settings.json").write_text(json.dumps({"settings": settings, "commit": "abc", "versions": {"x": "1"}}))
    lines: list[Json] = [{"round": 0, "global-accuracy": 10.0}, {"round": 1}, {"round": 2, "global-accuracy": 30.0}]
    for line in lines[1:]:
        line |= {"formula-bytes-down": 1_500_000, "formula-bytes-up": 500_000, "flops": 1e9, "seconds": 2.0}
    (tmp_path / "rounds.jsonl").write_text("".join(f"{to_line(line)}\n" for line in lines))
    totals = {"total-formula-bytes-down": 3_000_000, "total-formula-bytes-up": 1_000_000, "total-flops": 2e9}
    summary = {"rounds": 2, "final-global-accuracy": 30.0, "rounds-to-target": None, "total-seconds": 4.0} | totals
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    entry = run_entry(tmp_path, "global-accuracy")
    assert entry == {
        "seed": 3,
        "commit": "abc",
        "versions": {"x": "1"},
        "rounds": 2,
        "final": 30.0,
        "rounds-to-target": None,
        "totals": {key.removeprefix("total-"): value for key, value in (totals | {"total-seconds": 4.0}).items()},
        "curve": {"round": [0, 2], "global-accuracy": [10.0, 30.0], "MB by formula": [0.0, 4.0], "GFLOPs": [0.0, 2.0]},
    }
    rows = [{"setting": "a", "method": "b", "runs": [entry]}]
    path = write_evidence(tmp_path / "table.json", {"rows": rows})
    assert '"global-accuracy": [10.0, 30.0]' in path.read_text()  # a curve is a line
    assert read_evidence(path) == {"rows": rows}
    for wrong in ({}, {"rows": [{}]}, {"rows": 1}, {"rows": rows, "set": 3}, {"rows": rows, "seeds": "x"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"table\.json: not the file of a table"):
            read_evidence(path)


def test_a_file_that_no_run_can_be_compared_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for keys in ({"seeds": 0}, {"seeds": -1}, {"seeds": 1001}):
        path.write_text(json.dumps(made({"a": [1.0]}) | keys))
        with pytest.raises(UserError, match=r"table\.json: not the file of a table"):
            read_evidence(path)
    for wrong in ({"final": "abc"}, {"final": [1.0]}, {"final": 1e308}, {"final": 10**400}, {"totals": 3}):
        content = made({"a": [1.0, 2.0]})
        content["rows"][0]["runs"][0] |= wrong
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"table\.json: not the file of a table"):
            read_evidence(path)
    path.write_text(json.dumps({"rows": [{"setting": "here", "method": "a", "runs": [], "over-seeds": 3}]}))
    with pytest.raises(UserError, match=r"table\.json: not the file of a table"):
        read_evidence(path)


def test_other_costs_than_those_of_the_file_are_said() -> None:
    """Twice the bytes and the same end were "within seed noise" without a word about the bytes."""
    kept, new = made({"a": [1.0, 3.0]}), made({"a": [1.0, 3.0]})
    for run in new["rows"][0]["runs"]:
        run["totals"] = run["totals"] | {"formula-bytes-up": 7_000_000}
    ((word, _, text),) = check(kept, new)
    assert word == "within seed noise"
    assert text.endswith("; 12 ± 0 (2) MB, in the file 6 ± 0 (2)")


def test_costs_of_other_seeds_are_not_compared() -> None:
    """A file of two seeds whose bytes differ, run anew with one of them: the row is equal, without a word on bytes."""
    kept, new = made({"a": [1.0, 1.0]}), made({"a": [1.0]})
    kept["rows"][0]["runs"][1]["totals"] = kept["rows"][0]["runs"][1]["totals"] | {"formula-bytes-up": 7_000_000}
    ((word, _, text),) = check(kept, new)
    assert word == "equal"
    assert " MB" not in text
