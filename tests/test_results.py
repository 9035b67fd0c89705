"""The pages of docs/results/: made from claims and data files, and not older than these."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedsub_app.runs.rounds import to_line

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """docs/results/pages.py, which is no package."""
    spec = importlib.util.spec_from_file_location("results_pages", ROOT / "docs/results/pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("57.14 (56.42 to 57.89)", (57.14, pytest.approx(1.47 / 1.693))),
        ("99.94 ± 0.05", (99.94, 0.05)),
        ("75.83 ± 0.88 (best λ, τ)", (75.83, 0.88)),
        ("199 (one seed)", (199.0, 0.0)),
        ("1,140", (1140.0, 0.0)),
        ("×", None),
        ("2nd (64.0)", None),
        ("", None),
    ],
)
def test_a_papers_number(pages: ModuleType, text: str, number: tuple[float, float] | None) -> None:
    assert pages.stated(text) == number


def test_a_claim_is_judged_by_its_rows(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows over three seeds: differences 1, 2, 3 have the interval 2 ± 2.48; the paper's is 58.63 - 57.14."""

    def row(method: str, finals: list[float], rounds: int = 18) -> dict[str, object]:
        runs = [{"seed": seed, "final": final, "rounds": rounds} for seed, final in enumerate(finals)]
        return {"setting": "CIFAR-10, IID", "method": method, "metric": "global-accuracy", "paper": {}, "runs": runs}

    rows = [row("FedAvg", [50.0, 51.0, 52.0]), row("FedPartAvg", [51.0, 53.0, 55.0])]
    monkeypatch.setattr(pages, "data", lambda: {"fedpart-table1": {"rows": rows}})
    keys = {"table": "fedpart-table1", "setting": "CIFAR-10, IID", "rows": ["FedPartAvg", "FedAvg"], "metric": "final"}
    keys |= {"rounds": 18, "data": "", "words": "", "item": ""}

    def judged(**more: object) -> object:
        claim = pages.Claim(1, keys | more)
        claim.judge()
        return claim

    claim = judged()
    assert (claim.verdict, claim.found.mean, claim.due) == ("undecided", 2.0, True)
    assert claim.effect == pytest.approx(1.49)
    assert claim.sd == pytest.approx(((1.47 / 1.693) ** 2 + (1.26 / 1.693) ** 2) ** 0.5)
    assert claim.cells[2:5] == ["+1.49 ± 1.1 points", "53 ± 2 (3) against 51 ± 1 (3)", "+2 [-0.484, +4.48] points"]
    assert judged(effect=9.0).verdict == "not reproduced"
    assert judged(rounds=19).verdict == "undecided"  # shorter than the paper's, whatever the numbers
    assert (judged(rounds=19).whole, judged(rounds=19).due) == (False, False)
    assert judged(rows=["FPAM", "FedAvg"]).verdict == "not run"
    assert judged(missing="no data").verdict == "data missing"
    assert claim.cells[6] == "**undecided**"
    rows[1] = row("FedPartAvg", [60.0])
    assert judged().cells[6] == "**direction only**, one seed"  # 10 ± 5 of the paper's standard deviations
    rows[1] = row("FedPartAvg", [52.0, 53.1, 54.0])
    assert judged().verdict == "direction only"  # 2.03 ± 0.14
    assert judged(direction=1).verdict == "reproduced"  # a picture without numbers
    assert judged(direction=-1).verdict == "not reproduced"


@pytest.mark.parametrize("name", ["fedpart", "fedpews", "fedselect", "sub-fedavg", "ist"])
def test_a_set_up_names_the_key_by_which_clients_take_part(pages: ModuleType, name: str) -> None:
    """``participation`` is 1.0 and does nothing where ``clients-per-round`` is set."""
    paper = tomllib.loads((ROOT / f"docs/results/claims/{name}.toml").read_text())
    if pages.resolve({"experiment": paper["experiment"]}).clients_per_round:
        assert "clients-per-round" in paper["setup"]
        assert "participation" not in paper["setup"]


def test_a_target_that_one_seed_of_the_papers_reached_has_an_effect_of_its_own(pages: ModuleType) -> None:
    """Its round alone is no mean over seeds, of which the others count as the last round."""
    claims = pages.tomllib.loads((ROOT / "docs/results/claims/fedpews.toml").read_text())["claim"]
    few = [keys for keys in claims if keys.get("metric") == "rounds-to-target"]
    few = [k for k in few if "one seed" in pages.papers_numbers(k["table"])[k["setting"], k["rows"][1]].rounds]
    assert [keys["effect"] for keys in few] == [182 - (199 + 2 * 250) / 3, 301 - round((371 + 2 * 500) / 3)] * 2


def test_finished_runs_are_put_into_the_tables_file(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a row, one of which has not ended; then the first again, with another end."""
    monkeypatch.setattr(pages, "HERE", tmp_path)
    (tmp_path / "data").mkdir()
    keys = {"method": "fedavg", "dataset": "cifar10-jpeg-full", "lr": 0.001}
    for seed, status, final in ((1, "completed", 56.5), (2, "failed", 10.0), (1, "completed", 57.5)):
        folder = tmp_path / f"runs/fedpart-table1/cifar-10-iid-fedavg/seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps({"settings": keys | {"seed": seed}, "commit": "abc"}))
        lines = [to_line({"round": number, "global-accuracy": final}) + "\n" for number in range(1, 19)]
        (folder / "rounds.jsonl").write_text("".join(lines))
        totals = {f"total-{cost}": 0 for cost in ("formula-bytes-down", "formula-bytes-up", "flops", "seconds")}
        summary = {"status": status, "rounds": 18, "final-global-accuracy": final}
        (folder / "summary.json").write_text(json.dumps(summary | totals))
        pages.add(tmp_path / "runs")
    content = json.loads((tmp_path / "data/fedpart-table1.json").read_text())
    assert content["command"] == "fedsub reproduce fedpart-table1 -s dataset=cifar10-jpeg-full"
    (row,) = content["rows"]
    assert (row["method"], row["paper"]) == ("FedAvg", {"final": "57.14 (56.42 to 57.89)"})
    assert [(run["seed"], run["final"], run["commit"]) for run in row["runs"]] == [(1, 57.5, "abc")]


@pytest.mark.run
def test_pages_are_not_older_than_their_data(pages: ModuleType) -> None:
    for path, text in pages.rendered().items():
        kept = path.read_text() if path.exists() else ""
        if path.suffix == ".svg":  # matplotlib's versions draw differently: its label names what it is drawn from
            text, kept = (
                match[1] if (match := re.search(r'aria-label="([^"]*)"', each)) else "" for each in (text, kept)
            )
        assert kept == text, f"{path.relative_to(ROOT)} is older than its claims or data: make results"


def test_fields_of_a_page_are_filled_with_numbers_of_the_data(pages: ModuleType) -> None:
    """``robust`` costs seeds 1 and 2 one point and three: 2 points, t(1) = 12.71 standard errors of 1 wide."""
    finals = {"A, robust off": (90.0, 94.0), "A, robust on": (89.0, 91.0)}
    rows = [
        {"setting": "none", "method": method, "metric": "global-accuracy", "runs": runs}
        for method, numbers in finals.items()
        for runs in [[{"seed": seed, "final": final, "refused": 3} for seed, final in enumerate(numbers, 1)]]
    ]
    data = {"t": {"table": "t", "command": "fedsub reproduce t", "rows": rows}}
    text = "{command t}: {t | A, robust off | none}, {t | A, robust on | none | refused} {pairs t}"
    page, used = pages.filled(text, data)
    assert page.startswith("fedsub reproduce t: 92.0 ± 2.8, 3 |")
    assert page.endswith("| A | 92.0 ± 2.8 → 90.0 ± 1.4 | -2 [-14.7, +10.7] |")
    assert used == ["t"]
    with pytest.raises(KeyError, match="t: no 'B' with 'none'"):
        pages.filled("{t | B | none}", data)


def test_a_table_of_adapters(pages: ModuleType) -> None:
    """The worst source has the lowest mean of five clients' accuracies, or the highest of their errors."""
    for score, worst in (("accuracy", 30.0), ("rmse", 35.0)):
        measured = {str(k): {f"personal-{score}": 30.0 + 5 * (k > 4)} for k in (*range(5, 10), *range(5))}
        summary, lines = {f"final-global-{score}": 40.0}, [{"merge-error": 0.5}]
        run = pages.of_sources(SimpleNamespace(lines=lines, summary=summary, measured=measured))
        assert run == {"merge-error": 0.5, "global": 40.0, "worst-source": worst}
        totals = {"formula-bytes-down": 1e6, "formula-bytes-up": 2e6}
        row = {"setting": "rating", "method": "A", "metric": f"personal-{score}", "peak-MB": 79}
        data = {"t": {"rows": [row | {"runs": [{"seed": 0, "final": 32.5, "totals": totals} | run]}]}}
        page, _ = pages.filled("{adapters t}", data)
        assert page.startswith(f"## Rating\n\n| method | {score} | ")
        assert page.endswith(f"| A | 40 | 32.5 | {worst:.3g} | 3 | 0.5 | 79 |")


def test_scores_at_equal_budgets_by_hand(pages: ModuleType) -> None:
    """Two seeds of A; B had spent half of its budget by its last round and has no widths."""
    at = [{"round": 4 + 2 * k, "final": 80.0 + k, "spent": 1.1, "served": {"global-accuracy": {"width 1": 70.0 + k}}}
          for k in (0, 1)]  # fmt: skip
    alone = at[0] | {"spent": 0.5, "served": {}}
    runs_of = {"A": [{"budgets": {"75 MB": of}} for of in at], "B": [{"budgets": {"75 MB": alone}}]}
    rows = [
        {"setting": "S", "method": method, "runs": [run | {"seed": seed} for seed, run in enumerate(runs)]}
        for method, runs in runs_of.items()
    ]
    page, _ = pages.filled("{budgets t}", {"t": {"rows": rows}})
    title, _, header, _, first, second = page.splitlines()
    assert (title, header) == ("S, 2 seeds:", "| method | 75 MB | width 1, 75 MB |")
    assert first == "| A | 80.5 ± 0.7, round 5 | 70.5 |"
    assert second == "| B | 80.0, round 4 (50%) |  |"
