"""The report of runs: its groups, curves, page and tables, read back by other programs than ours."""

import csv
import io
import json
import re
import shlex
import shutil
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsub_app.cli import main as cli
from fedsub_app.client_app import app
from fedsub_app.common.conf_files import experiments
from fedsub_app.common.score import SCORES, Score
from fedsub_app.common.section import Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.common.tensors import Json
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.reports.compare import costs_of_groups, served_table, summary_table, summary_text, verdicts
from fedsub_app.reports.curves import Group, RunData, costs_of, curve
from fedsub_app.reports.html import write_html
from fedsub_app.reports.pictures import (
    DASHES,
    _against_bytes,
    colour,
    dashes,
    draw_against_bytes,
    figure_of_curves,
    spread_out,
    svg_of_lines,
)
from fedsub_app.reports.records import Record, grouped, read_run
from fedsub_app.runs.config import applicable_keys, resolve
from fedsub_app.runs.loop import run_experiment
from fedsub_app.runs.recorded import settings_of
from fedsub_app.runs.rounds import read_rounds, summarise

KEYS: dict[str, Value] = {
    "model": "feature-mlp",
    "num-rounds": 2,
    "num-clients": 3,
    "classes-per-client": 4,
    "evaluate": "global, personal",
}
BROWSER = next((path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if path.exists()), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four runs: FedAvg with two seeds, FedSelect, FedPeWS."""
    root = tmp_path_factory.mktemp("runs")
    for name, method, seed in (("a0", "fedavg", 0), ("a1", "fedavg", 1), ("b", "fedselect", 0), ("c", "fedpews", 0)):
        keys = applicable_keys(KEYS | {"method": method, "seed": seed, "fedpews.warmup-rounds": 1})
        keys |= {"run-dir": str(root / name)}
        run_experiment(LocalGrid(app, keys), settings_of(keys))
    return {path.name: path for path in sorted(root.iterdir())}


class Page(HTMLParser):
    """Everything in a page that a browser would fetch, its ids, its headings and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        for key in ("src", "href", "xlink:href", "data", "poster"):
            if key in found and not found[key].startswith("#"):
                self.fetched.append(found[key])

    def handle_data(self, data: str) -> None:
        self.text += data


def test_seeds_are_one_group(runs: dict[str, Path]) -> None:
    groups = grouped(list(runs.values()))
    assert [(group.label, len(group.records)) for group in groups] == [("fedavg", 2), ("fedselect", 1), ("fedpews", 1)]


def test_a_run_made_twice_is_no_second_seed(runs: dict[str, Path], tmp_path: Path) -> None:
    again = shutil.copytree(runs["a0"], tmp_path / "again")
    groups = grouped([again, runs["a0"], runs["a1"]])
    assert [(group.label, len(group.records)) for group in groups] == [("fedavg", 2), ("fedavg (2)", 1)]


def test_a_label_names_what_differs(runs: dict[str, Path]) -> None:
    def with_lr(lr: float) -> Record:
        record = read_run(runs["a0"])
        return replace(record, provenance=record.provenance | {"settings": record.settings | {"lr": lr}})

    from fedsub_app.reports import records

    with pytest.MonkeyPatch.context() as patch:
        made = {Path("/x"): with_lr(0.1), Path("/y"): with_lr(0.2)}
        patch.setattr(records, "read_run", lambda folder: made[folder])
        assert [group.label for group in grouped(list(made))] == ["fedavg lr=0.1", "fedavg lr=0.2"]
        del made[Path("/y")].provenance["settings"]["lr"]  # of an earlier version
        assert [group.label for group in grouped(list(made))] == ["fedavg lr=0.1", "fedavg lr=–"]


def test_a_curve_is_mean_and_deviation_over_seeds(runs: dict[str, Path]) -> None:
    (group,) = grouped([runs["a0"], runs["a1"]])
    found = curve(group, "global-accuracy", "x", 0, Score())
    assert found
    lines = [read_rounds(runs[name]) for name in ("a0", "a1")]
    for place in range(3):  # rounds 0, 1, 2
        values = [of[place]["global-accuracy"] for of in lines]
        assert found.mean[place] == pytest.approx(sum(values) / 2)
        assert found.high[place] - found.mean[place] == pytest.approx(statistics.stdev(values))
        spent = [sum(line.get("flops", 0) for line in of[: place + 1]) / 1e9 for of in lines]
        assert found.x["GFLOPs"][place] == pytest.approx(sum(spent) / 2)
    assert found.x["round"] == [0, 1, 2]
    begun = replace(group, records=(*group.records, RunData(Path(), {}, [])))  # a third seed without a round
    assert curve(begun, "global-accuracy", "x", 0, Score()) == found


def test_device_seconds_are_a_cost_where_a_run_has_some() -> None:
    without, spent = (RunData(Path(), {}, [{"device seconds": seconds}]) for seconds in (0.0, 3.0))
    one, both = Group("a", (without,)), Group("b", (without, spent))
    assert costs_of([one]) == ["MB by formula", "GFLOPs", "seconds in rounds"]
    assert costs_of([one, both]) == [*costs_of([one]), "device seconds"]


def test_runs_of_two_tasks_are_judged_by_their_own_score() -> None:
    def group(task: str, key: str, last: float) -> Group:
        about = {
            "settings": {"method": "fedavg", "seed": 0},
            "score": dict(zip(Score._fields, SCORES[task], strict=False)),
        }
        lines = [{"round": k, key: last, "flops": 1e9, "served": {key: {"half": last}}} for k in range(8)]
        return Group(f"{last:g}", (RunData(Path(task), about, lines),), task)

    ends = {"global-accuracy": (90.0, 50.0), "global-rmse": (1.0, 9.0)}
    tasks = {"global-accuracy": "classification", "global-rmse": "regression"}
    groups = [group(tasks[key], key, last) for key, pair in ends.items() for last in pair]
    assert [texts[0] for texts in costs_of_groups(groups, "global-rmse", False)] == ["", "", "1.111", "1.111"]
    assert [texts[2] == "not reached" for texts in costs_of_groups(groups, "global-rmse", False)[2:]] == [False, True]
    titles, rows = served_table(groups)
    assert titles == ["global, half (%)", "global, half"]
    assert [[cell.text for cell in cells] for _, cells in rows][2:] == [["–", "1"], ["–", "9"]]


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=12), st.floats(0.001, 0.08))
def test_labels_do_not_touch(places: list[float], gap: float) -> None:
    found = spread_out(places, gap)
    order = sorted(range(len(places)), key=lambda index: places[index])
    assert all(found[high] - found[low] >= gap - 1e-9 for low, high in pairwise(order))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)
    wide = sorted(places)
    if all(high - low >= gap for low, high in pairwise(wide)) and wide[0] >= 0 and wide[-1] <= 1:
        assert found == places


def test_no_two_of_28_curves_look_alike() -> None:
    assert len({(colour(number), dashes(number)) for number in range(28)}) == 28
    assert len(set(DASHES)) == 4


def test_the_page_has_everything_and_fetches_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    groups = grouped(list(runs.values()))
    page, table, numbers = write_html(groups, tmp_path / "r.html", "A title", "fedsub report x")
    text = page.read_text()
    found = Page(text)
    assert found.fetched == []
    assert "in percent." not in text  # a regression's score is none; a column of percentages has (%) in its title
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("svg") >= 2 * 4 + 1 + 2 + 3  # curves, clients, sub-networks, swatches
    for heading in ("Summary", "Learning curves", "Cost to accuracy", "Spread over the clients", "Sub-networks"):
        assert heading in found.text
    for said in ("hidden units covered by", "Personal part of the model", "fedsub report x", "A title"):
        assert said in found.text
    # every class count of every partition
    counts = json.loads((runs["a0"] / "partition.json").read_text())["counts"]
    for count in {number for row in counts for number in row if number}:
        assert f">{count}</td>" in text
    finals = [json.loads((runs[name] / "summary.json").read_text())["final-global-accuracy"] for name in ("a0", "a1")]
    assert f"{statistics.mean(finals):.2f} ± {statistics.stdev(finals):.2f}" in found.text
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 4 * 3
    lines = read_rounds(runs["b"])
    mine = [row for row in rows if row["run"] == "fedselect, seed 0"]
    for row, line in zip(mine, lines, strict=True):
        assert float(row["global-accuracy"]) == line["global-accuracy"]
        assert row["flops"] == str(line.get("flops", ""))
    read = json.loads(numbers.read_text())
    assert [run["run"] for run in read["runs"]] == [
        "fedavg, seed 0",
        "fedavg, seed 1",
        "fedselect, seed 0",
        "fedpews, seed 0",
    ]
    again = write_html(groups, tmp_path / "again" / "r.html", "A title", "fedsub report x")[0].read_text()
    depth = lambda body: re.sub(r"in <code>[^<]*", "", body)  # noqa: E731 - the directories, from where the page lies
    assert depth(again) == depth(text)


def test_what_others_say_is_text(runs: dict[str, Path], tmp_path: Path) -> None:
    record = read_run(runs["a0"])
    bad = {"client": 1, "reason": "<script>alert(1)</script> $x^2$"}
    lines = [line | ({"dropped": [bad]} if line["round"] else {}) for line in record.lines]
    group = Group("</svg><b>$\\frac$", (replace(record, lines=lines),))
    page = write_html([group, Group("b", (record,))], tmp_path / "r.html", "<i>", "x \udcff")[0].read_text()
    assert r"x \udcff" in page  # a byte of a folder's name that is no Unicode
    assert "<script>alert" not in page
    assert "</svg><b>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $x^2$" in page
    assert Page(page).tags.count("script") == 1
    assert ">2</td><td>1, 2</td><td>1</td>" in page  # twice, in rounds 1 and 2, client 1


def test_every_part_of_the_page_says_of_which_section_a_run_is(runs: dict[str, Path], tmp_path: Path) -> None:
    record = read_run(runs["a0"])
    lines = [
        line | {"dropped": [{"client": 1, "reason": "late"}], "served": {"x": {"slow": 1.0}}} for line in record.lines
    ]
    groups = [Group("FedAvg", (replace(record, lines=lines),), section) for section in ("digits", "birds")]
    page = write_html(groups, tmp_path / "r.html", "title", "x")[0].read_text()
    for name in ("digits: FedAvg", "birds: FedAvg"):
        assert f'<th scope="row">{name}</th><td class="text">late</td>' in page
        assert f'<th scope="row">{name}</th><td>1.00</td></tr>' in page  # of the clients that are served
        assert f"All settings of {name}</summary>" in page
        assert f"<li>{name}, seed 0, in " in page


@pytest.mark.parametrize("name", ["", *experiments()])
def test_the_command_repeats_the_run(name: str) -> None:
    for changes in (
        {},
        {"method": "fedprox", "lr": 0.125, "evaluate": "personal"},
        {"method": "fedavg", "lr-decay-at": "7"},
    ):
        asked: dict[str, Value] = ({"experiment": name} if name else {}) | changes
        settings = resolve(applicable_keys(asked))
        command = Record(Path(), {"settings": settings.flat()}, []).command
        words = shlex.split(command)[2:]
        named = {"experiment": words.pop(0)} if words and words[0] != "-s" else {}
        again = resolve(named | parse_pairs([word for word in words if word != "-s"]))
        assert again.flat() == settings.flat()
        assert len(words) <= 2 * (len(changes) + 1)


def test_the_command_of_an_experiment_with_a_blank_is_one_word(tmp_path: Path) -> None:
    name = str(tmp_path / "mein Läufer's.toml")
    Path(name).write_text("lr = 0.2\n")
    settings = resolve({"experiment": name})
    assert shlex.split(Record(Path(), {"settings": settings.flat()}, []).command) == ["fedsub", "run", name]


def test_a_report_of_nothing_leaves_no_folder(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = [tmp_path / name for name in "ab"]
    for folder in begun:
        folder.mkdir()
        shutil.copy(runs["a0"] / "settings.json", folder)
    assert cli.main(["report", *map(str, begun), "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"error: {begun[0]}, {begun[1]}: no evaluated round to draw\n"
    assert not (tmp_path / "new").exists()


def test_report_writes_what_it_says_and_nothing_here(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    two = [str(runs["a0"]), str(runs["b"])]
    commands = (
        [str(runs["a0"])],
        [*two, "--html"],
        [*two, "--out", "mine"],
        [str(runs["a0"]), "--out", "mine/x.svg", "--html"],
    )
    for command in commands:
        assert cli.main(["report", *command]) == 0
        said = [
            Path(line)
            for line in capsys.readouterr().out.splitlines()
            if line.endswith((".png", ".svg", ".html", ".csv", ".json"))
        ]
        assert said
        assert all(path.stat().st_size for path in said)
        folder = runs["a0"] if len(command) == 1 else tmp_path / ("mine" if "--out" in command else "runs/reports")
        assert all(path.resolve().is_relative_to(folder) for path in said)
        assert len(said) == (4 if "--html" in command else 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "runs"]


def test_runs_on_other_data_are_rows_of_their_own(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b", "c"):
        content = json.loads((shutil.copytree(runs[name], tmp_path / name) / "settings.json").read_text())
        del content["crc32"]
        content["settings"]["dataset"] = "other"
        (tmp_path / name / "settings.json").write_text(json.dumps(content))
    folders = [tmp_path / "b", runs["a0"], tmp_path / "c", runs["a1"]]
    assert cli.main(["report", *map(str, folders), "--out", str(tmp_path / "curves.png")]) == 0
    said = capsys.readouterr().out
    assert summary_text(grouped(folders)) in said
    for label in ("other: fedselect", "other: fedpews", "digits: fedavg"):
        assert f"\n{label} " in said
        assert f"\n| {label} | " in said


def test_export(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(runs["c"])]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    lines = read_rounds(runs["c"])
    assert [float(row["global-accuracy"]) for row in rows] == [line["global-accuracy"] for line in lines]
    assert [row["clients"] for row in rows] == ["", "0 1 2", "0 1 2"]
    assert rows[1]["units-covered-by"] == " ".join(map(str, lines[1]["units-covered-by"]))
    assert [row["dropped"] for row in rows] == ["", "0", "0"]
    assert cli.main(["export", str(runs["c"]), str(runs["b"]), "--clients", "--out", str(tmp_path / "x.csv")]) == 0
    found = {(row["run"], row["round"], row["client"]): row for row in csv.DictReader((tmp_path / "x.csv").open())}
    assert len(found) == 2 * 2 * 3
    told: Json = lines[2]["evaluated"]["1"]
    assert float(found["fedpews, seed 0", "2", "1"]["personal-accuracy"]) == told["personal-accuracy"]
    keys = KEYS | {"method": "fedavg", "num-rounds": 1, "evaluate": "global", "run-dir": str(tmp_path / "d")}
    run_experiment(LocalGrid(app, keys), settings_of(keys))
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "d"), "--clients"]) == 2
    assert capsys.readouterr().err.startswith("error: --clients: no client was evaluated; ")


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [400, 1600])
def test_in_a_browser(runs: dict[str, Path], tmp_path: Path, width: int) -> None:
    """No error, nothing fetched, nothing wider than the window, headings that sort, rows that show their curves."""
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    many = grouped(list(runs.values()))
    groups = many + [replace(many[0], label=f"fedavg {number}") for number in range(7)]
    page_file = write_html(groups, tmp_path / "r.html", "Many", "fedsub report x")[0]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(BROWSER), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        said: list[str] = []
        fetched: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        letters = page.evaluate(
            "[...document.querySelectorAll('.pictures svg text')].map(text => text.getBoundingClientRect().height)"
        )
        assert min(letters) >= 9  # pixels of a line of text
        rows = page.locator("#runs tbody tr")
        column = "[...document.querySelectorAll('#runs tbody tr')].map(row => row.cells[2].dataset.value)"
        page.locator("#runs thead button").nth(2).click()
        values = [float(value) for value in page.evaluate(column)]
        assert values == sorted(values)
        page.locator("#runs thead button").nth(2).click()
        assert [float(value) for value in page.evaluate(column)] == sorted(values, reverse=True)
        rows.first.click()
        chosen = rows.first.get_attribute("data-run")
        assert page.locator(f".of-runs .run{chosen}.faded").count() == 0
        assert page.locator(".of-runs .faded").count() > 0
        rows.first.click()
        page.mouse.move(0, 0)
        assert page.locator(".faded").count() == 0
        browser.close()
    assert said == []
    assert fetched == [page_file.as_uri()]


def group(label: str, lines: list[tuple[float, float, float, float]], section: str = "") -> Group:
    """A group of one run: global and personal accuracy, MB and GFLOPs after each round."""
    named = ("global-accuracy", "personal-accuracy", "MB by formula", "GFLOPs")
    rounds = [
        {"round": k + 1, "seconds in rounds": 1.0} | dict(zip(named, line, strict=True)) for k, line in enumerate(lines)
    ]
    return Group(label, (Record(Path(label), {"settings": {"method": "fedavg"}}, rounds),), section)


def test_what_a_comparison_means() -> None:
    """Of the runs within 90 % of the best, the one with the fewest bytes: by hand."""
    groups = [
        group("Local", [(8.0, 98.0, 0.0, 2.5)]),
        group("FedAvg", [(50.0, 60.0, 60.0, 1.0), (96.0, 83.0, 120.0, 2.5)]),
        group("IST", [(90.0, 76.0, 12.0, 0.25)]),
        group("Weak", [(86.0, 70.0, 1.0, 0.1)]),
    ]
    assert verdicts(groups) == [
        "IST reaches 94 % of FedAvg's global accuracy with 10 % of its bytes and 10 % of its FLOPs.",
        "Local has the best personal accuracy, 98.00 %, without sending a byte.",
    ]
    assert verdicts(groups[1:2]) == []
    for best, worse in ((0.0, 0.0), (-0.5, -2.0)):  # of a score of one's own
        ends = [group("IST", [(worse, 1.0, 1.0, 0.25)]), group("FedAvg", [(best, 9.0, 9.0, 0.25)])]
        assert "has the best" in verdicts(ends)[0]
    assert verdicts([groups[1], group("IST", [(90.0, 76.0, 12.0, 0.25)], "other data")]) == []
    assert verdicts(groups[2:]) == [
        "Weak reaches 96 % of IST's global accuracy with 8 % of its bytes and 40 % of its FLOPs.",
        "Weak reaches 92 % of IST's personal accuracy with 8 % of its bytes and 40 % of its FLOPs.",
    ]


def test_a_method_that_sends_nothing_is_a_line_of_the_picture(tmp_path: Path) -> None:
    """On a logarithmic axis 0 bytes have no place; a single group has no picture."""
    groups = [
        group("Local", [(8.0, 98.0, 0.0, 2.5)]),
        group("FedAvg", [(50.0, 60.0, 60.0, 1.0), (96.0, 83.0, 120.0, 2.5)]),
    ]
    panels = _against_bytes(groups).axes  # type: ignore[union-attr]
    assert [panel.get_ylabel() for panel in panels] == ["global accuracy (%)", "personal accuracy (%)"]
    lines = {line.get_gid(): line.get_xydata().tolist() for line in panels[0].lines if len(line.get_xdata()) > 1}  # type: ignore[union-attr,arg-type]
    assert lines == {"run0": [[60.0, 8.0], [120.0, 8.0]], "run1": [[60.0, 50.0], [120.0, 96.0]]}
    assert draw_against_bytes(groups[:1], tmp_path / "x.png") == ""
    assert draw_against_bytes(groups, tmp_path / "x.png").startswith("<svg")
    assert (tmp_path / "x.png").exists()


def test_a_page_can_read_values_off_its_curves() -> None:
    """The plot's box and spans in a picture lead from the ends of its drawn line back to the curve's points."""
    x, y = [0.0, 5.0, 20.0], [10.0, 80.0, 95.5]
    text = svg_of_lines("a title", "accuracy (%)", "round", {3: ('IST "x", α\\1', x, y)})
    root = ElementTree.fromstring(text.replace("xlink:", ""))
    assert json.loads(root.get("data-labels", "")) == {"3": 'IST "x", α\\1'}
    (left, top, wide, high), (x0, x1), (y0, y1) = (
        map(float, root.get(f"data-{name}", "").split()) for name in ("box", "x", "y")
    )
    width, height = map(float, root.get("viewBox", "").split()[2:])
    (path,) = re.findall(r'<g class="run3">\s*<path d="(M[^"]*)"[^>]*style="fill: none', text)[:1]
    points = [(float(a), float(b)) for a, b in re.findall(r"[ML] (\S+) (\S+)", path)]
    for (px, py), wanted_x, wanted_y in zip((points[0], points[-1]), (x[0], x[-1]), (y[0], y[-1]), strict=True):
        assert x0 + (px / width - left) / wide * (x1 - x0) == pytest.approx(wanted_x, abs=1e-3)
        assert y1 - (py / height - top) / high * (y1 - y0) == pytest.approx(wanted_y, abs=1e-3)


def test_the_best_score_is_marked_and_one_runs_curve_is_drawn_once(shared_run, tmp_path: Path) -> None:
    first, second = shared_run(evaluate="global"), shared_run(evaluate="global", lr=0.001)
    table = summary_table(grouped([first, second]))[1]
    assert [row[1].best for _, row in table] == [row[1].value == max(r[1].value for _, r in table) for _, row in table]
    assert sum(row[1].best for _, row in table) == 1
    assert not any(cell.best for _, row in summary_table(grouped([first]))[1] for cell in row)
    assert [axes.get_xlabel() for axes in read_run(first).plot().axes] == ["round", "round"]  # score and loss
    assert len(figure_of_curves(grouped([first, second])).axes) == 4
    picture = read_run(first)._repr_png_()
    assert picture
    assert picture.startswith(b"\x89PNG")
    network, table_of = read_run(first).model(), read_run(first).to_pandas()
    assert not network.training
    assert list(table_of.index) == [0, 1, 2, 3]


def test_the_summary_and_a_report_count_the_same_replies(tmp_path: Path) -> None:
    """Also those of evaluations and of a phase after the merge."""
    drop = [{"client": 1, "reason": "lost"}]
    lines = [{"round": 1, "status": "ok", "dropped": drop, "measurement": {"dropped": drop}, "not-evaluated": drop * 2}]
    record = RunData(tmp_path, {}, lines)
    assert len(record.dropped) == summarise(lines, resolve({}))["dropped-replies"] == 4


def test_a_verdict_of_a_low_score_has_its_limit_above_the_best() -> None:
    """1.1 is within the lowest, 1, over 0.9; the bytes are 4 of 20 MB, the FLOPs 1 of 2."""
    settings, score = {"method": "fedavg"}, {"name": "rmse", "high_is_good": False, "unit": ""}
    groups = [
        Group(label, (Record(Path(label), {"settings": settings, "score": score}, [line]),))
        for label, line in (
            ("A", {"round": 1, "global-rmse": 1.0, "MB by formula": 20.0, "GFLOPs": 2.0}),
            ("B", {"round": 1, "global-rmse": 1.1, "MB by formula": 4.0, "GFLOPs": 1.0}),
        )
    ]
    assert verdicts(groups) == ["B reaches 110 % of A's global rmse with 20 % of its bytes and 50 % of its FLOPs."]
