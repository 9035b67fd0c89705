"""``make results``: the pages of this folder, made from the claims (claims/*.toml) and the runs' numbers (data/*.json).

``make results RUNS=$FEDSUB_RUNS/reproduce`` first puts finished runs into data/. Nothing here holds a measured number.
The module writes README.md with every claim's verdict, one page per paper, and learning curves as SVG.
"""

import hashlib
import math
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from defences import filled, repeated, seeds_of  # noqa: E402
from rule import SIGMAS, VERDICTS, judged, relative  # noqa: E402

from fedsub_app.common.conf_files import tables  # noqa: E402
from fedsub_app.common.tensors import Json  # noqa: E402
from fedsub_app.common.text import markdown  # noqa: E402
from fedsub_app.reports.curves import Curve, deviation  # noqa: E402
from fedsub_app.reports.pictures import as_text, colour, draw_lines, figure, limits_of, svg  # noqa: E402
from fedsub_app.reports.records import NOT_COMPARED, Record, read_run  # noqa: E402
from fedsub_app.runs.config import resolve  # noqa: E402
from fedsub_app.studies.evidence import (  # noqa: E402
    Estimate,
    difference,
    read_evidence,
    row_of,
    run_entry,
    sample_of,
    write_evidence,
)
from fedsub_app.studies.reproduce import compared, filled_columns  # noqa: E402
from fedsub_app.studies.tables import Paper, read_table  # noqa: E402

PAPERS = ("fedpart", "fedpews", "fedselect", "sub-fedavg", "ist")
UNITS = {"final": "points", "rounds-to-target": "rounds", "MB": "% of bytes", "GFLOPs": "% of FLOPs"}
MADE = "<!-- made by `make results` of claims/* and data/*.json; edit those -->"
RULE = f"""The difference of two rows has its 95 % t-interval over seeds. The interval is paired by seed, or Welch's
where only the runs' mean and standard deviation were kept. A target that was not reached counts as the last round. With
one seed the interval is ± {SIGMAS} of the paper's standard deviations of that difference; where the paper gives three
runs as minimum to maximum, a row's standard deviation is their range / 1.693. Where the paper states no deviation, one
seed decides nothing. Where no seed changes bytes by the formula or FLOPs, their interval is the paper's
rounding.

- *reproduced*: the interval lies on the paper's side of 0, and holds the paper's effect if the paper states a number.
- *direction only*: the interval lies on the paper's side of 0 and excludes the paper's effect, which is smaller or
  larger here.
- *not reproduced*: the interval lies on the other side of 0, or it holds 0 and excludes the paper's effect.
- *undecided*: the interval holds 0, and the paper's effect if the paper states a number; or the runs are shorter than
  the paper's or otherwise reduced; or there is one seed, and the difference is below {SIGMAS} of the paper's standard
  deviations.
- *not run*: one of the rows has no run in data/. *data missing*: the paper's data could not be had.

Further seeds: where a run takes minutes, both rows of a full-length claim that three seeds leave undecided get seeds 3
and 4, once, whatever they show. This was fixed before those runs. No interval is widened for that second look."""


def stated(text: str) -> tuple[float, float] | None:
    """Return the number and standard deviation (0: none) of a paper's ``57.1 (56.4 to 57.9)`` or ``99.9 ± 0.1``."""
    found = re.match(r"(\d[\d.,]*)(?![\d.,a-z])(?: ± ([\d.]+))?(?: \(([\d.]+) to ([\d.]+)\))?", text)
    if not found:
        return None
    sd = float(found[2] or 0) or (float(found[4]) - float(found[3])) / 1.693 if found[2] or found[3] else 0.0
    return float(found[1].replace(",", "")), sd


@cache
def papers_numbers(table: str) -> dict[tuple[str, str], Paper]:
    """Return the paper's numbers of a table's rows; none where there is no such table."""
    return {(row.setting, row.label): row.paper for row in read_table(table).rows} if table in tables() else {}


def stated_of(table: str, setting: str, method: str, metric: str) -> tuple[float, float] | None:
    """Return the paper's number of a row and its standard deviation, as the table's file in conf/ has it."""
    paper = papers_numbers(table).get((setting, method), Paper())
    return stated(paper.rounds if metric == "rounds-to-target" else paper.final)


@dataclass
class Claim:
    """A claim of a paper: what it says, and what the runs say of it."""

    number: int
    keys: Json
    effect: float | None = None
    sd: float = 0.0
    verdict: str = "not run"
    found: Estimate | None = None
    rows: str = ""
    rounds: int = 0  # of the shortest run
    hours: float = 0.0  # of the longest run
    whole: bool = False  # the runs are as long as the paper's

    @property
    def unit(self) -> str:
        """The unit of the difference."""
        return UNITS[self.keys["metric"]]

    @property
    def side(self) -> float:
        """1.0 where the paper's difference is above 0, else -1.0."""
        return math.copysign(1.0, self.keys.get("direction", 1) if self.effect is None else self.effect)

    def judge(self) -> None:
        """Read the paper's effect and the runs' numbers, and fill in the verdict."""
        keys, metric = self.keys, self.keys["metric"]
        table, relatively = data().get(keys.get("data-of", keys["table"])), metric in ("MB", "GFLOPs")
        rows = [table and row_of(table, keys["setting"], method) for method in keys["rows"]]
        numbers = [stated_of(keys["table"], keys["setting"], method, metric) for method in keys["rows"]]
        if "effect" in keys:
            self.effect, self.sd = keys["effect"], keys.get("sd", 0.0)
        elif all(numbers) and "direction" not in keys:
            self.effect = numbers[0][0] - numbers[1][0]  # type: ignore[index]
            self.sd = math.hypot(*(number[1] for number in numbers if number))
        samples = [sample_of(row, metric) if row else None for row in rows]
        if "missing" in keys:
            self.verdict = "data missing"
        elif all(samples):
            first, second = samples
            assert first
            assert second
            self.rows = " against ".join(f"{each.mean:.4g}" if relatively else str(each) for each in (first, second))
            runs = [run for row in rows if row for run in row["runs"]]
            self.rounds = min(run["rounds"] for run in runs)
            self.hours = max(run.get("totals", {}).get("seconds", 0) for run in runs) / 3600
            self.found = difference(first, second, *([relative] if relatively else []))
            self.verdict = "undecided"
            if self.found and self.rounds >= keys["rounds"] and "reduced" not in keys:
                self.whole, exact = True, keys.get("rounding") if relatively else None
                effect = self.side if self.effect is None else self.effect
                self.verdict, self.found = judged(self.found, effect, self.effect is not None, self.sd, exact)

    @property
    def due(self) -> bool:
        """By the rule the claim's rows get seeds 3 and 4."""
        few = self.whole and self.verdict == "undecided" and self.hours < 1
        return few and bool(self.found and 3 <= self.found.n < 5)

    @property
    def size(self) -> str:
        """How much of the paper's experiment was run."""
        if "missing" in self.keys:
            return str(self.keys["missing"])
        rounds = f"{self.rounds} of {self.keys['rounds']} rounds; " if self.found else ""
        return rounds + "; ".join(filter(None, (self.keys.get("reduced"), self.keys["data"])))

    @property
    def cells(self) -> list[str]:
        """The claim's row of a table."""
        effect = ("above" if self.side > 0 else "below") + " 0" if self.effect is None else f"{self.effect:+.3g}"
        effect += f" ± {self.sd:.2g}" if self.sd else ""
        found = f"{self.found} {self.unit}" if self.found else ""
        words = f"{self.keys['words']} ({self.keys['item']}: {' against '.join(self.keys['rows'])})"
        single = ", one seed" * bool(self.found and self.found.n == 1 and "rounding" not in self.keys)
        verdict = f"**{self.verdict}**{single}"
        return [str(self.number), words, f"{effect} {self.unit}", self.rows, found, self.size, verdict]


COST = """A run has one core. Its hours are wall-clock time, so the machine's other work lengthens them. Each page has
its files' hours, commits and machines. The runs of history.md are not counted."""
BESIDES = """These pages concern no paper's claim: [attackers and means](attacks.md), [privacy of a client](privacy.md),
[devices](devices.md), [sparse methods](sparse.md),
[adapters](adapters.md), [PFLlib's table](pfllib.md), [faults](faults.md), [a sweep](sweep.md). Speed and memory:
[bench/README.md](../../bench/README.md). Readings, earlier runs and measurements whose files were not kept:
[history](history.md)."""
CLAIM_HEADER = ("", "claim (item: rows)", "paper", "here, mean ± sd (seeds)", "difference", "size", "verdict")


@cache
def data() -> dict[str, Json]:
    """Return the tables' files by name."""
    return {path.stem: read_evidence(path) for path in sorted((HERE / "data").glob("*.json"))}


def papers() -> dict[str, Json]:
    """Return each paper's file of claims, the claims judged and numbered over all papers."""
    number, content = 0, {}
    for name in PAPERS:
        with (HERE / "claims" / f"{name}.toml").open("rb") as file:
            content[name] = paper = tomllib.load(file)
        claims = [paper.get("every", {}) | keys for keys in paper.get("claim", [])]
        paper["claims"] = [Claim(number + place, keys) for place, keys in enumerate(claims, 1)]
        number += len(claims)
        for claim in paper["claims"]:
            claim.judge()
    return content


def counts_of(claims: Sequence[Claim]) -> str:
    """Return how many claims have each verdict."""
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def table_of(name: str) -> str:
    """Return a data file's table: one line per row, with expected, obtained and their difference."""
    content, lines = data()[name], []
    for row in content["rows"]:
        ours, paper = sample_of(row), stated(row["paper"].get("final", ""))
        apart = f"{ours.mean - paper[0]:+.2f}" if ours and paper else ""
        reached = [run.get("rounds-to-target", 0) for run in row["runs"]]
        rounds = ", ".join("×" if number is None else str(number) for number in reached) if any(reached) else ""
        costs = [f"{each.mean:.0f}" if (each := sample_of(row, cost)) else "" for cost in ("MB", "GFLOPs")]
        last = [row["paper"].get("rounds", ""), rounds, *costs]
        cells = [row["setting"], row["method"], row["paper"].get("final", ""), str(ours or ""), apart]
        lines.append([*cells, compared(content, row), *last])
    header = ["setting", "method", "expected (%)", "obtained (%), mean ± sd (seeds)", "Δ"]
    header += [f"to {content['reference']} [95 %] (seeds)", "expected rounds", "rounds, by seed", "MB", "GFLOPs"]
    return filled_columns(header, lines)


def curves_of(content: Json, setting: str) -> tuple[list[Curve], list[float | None]]:
    """Return the learning curves of a setting's rows whose rounds were kept, and the paper's final numbers."""
    lines: list[Curve] = []
    ends: list[float | None] = []
    for row in content["rows"]:
        curves = [run["curve"] for run in row["runs"] if "curve" in run]
        kept = [dict(zip(each["round"], each[row["metric"]], strict=True)) for each in curves]
        if row["setting"] == setting and kept:
            rounds = sorted(set.intersection(*map(set, kept)))
            points = [[values[number] for values in kept] for number in rounds]
            mean, spread = [statistics.fmean(at) for at in points], [deviation(at) for at in points]
            low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
            lines.append(Curve(f"{row['method']} ({len(kept)})", len(lines), {"round": rounds}, mean, low, high))
            paper = stated(row["paper"].get("final", ""))
            ends.append(paper and paper[0])
    return lines, ends


def picture(title: str, draw: Any, width: float, height: float, source: str) -> str:
    """Return an SVG file's text; its label ends with the digest of what it is drawn from."""
    with as_text():
        drawing = figure(width, height)
        draw(drawing.subplots())
        text = svg(drawing, f"{title} [{hashlib.sha256(source.encode()).hexdigest()[:12]}]")
    return text.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)  # svg() keeps the other one


def draw_table(axes: Any, lines: Sequence[Curve], ends: Sequence[float | None], names: Sequence[str]) -> None:
    """Draw curves with their bands, the paper's final numbers dotted in the same colours; ``names``: of both axes."""
    low, high = limits_of(lines)
    high = max([high, *(end + 1 for end in ends if end)])
    draw_lines(axes, lines, "round", (low, high))
    for number, end in enumerate(ends):
        if end is not None:
            axes.axhline(end, color=colour(number), linestyle=":", linewidth=0.8)
    axes.set(xlabel=names[0], ylabel=names[1])


def curves(table: str) -> tuple[list[str], dict[Path, str]]:
    """Return the learning curves of a table's settings whose rounds were kept: lines of a page, and the pictures."""
    content, links, drawn = data()[table], [], {}
    names = content.get("axes", ("round", "accuracy (%)"))
    for place, setting in enumerate(dict.fromkeys(row["setting"] for row in content["rows"]), 1):
        lines, ends = curves_of(content, setting)
        if any(len(line.mean) > 2 for line in lines):
            file, draw = f"pictures/{table}-{place}.svg", partial(draw_table, lines=lines, ends=ends, names=names)
            shown = names[1] if "axes" in content else "learning curves"
            shown += " with one standard deviation" + "; dotted: the paper" * any(ends)
            links.append(f"![{setting}: {shown}]({file})")
            source = repr([(line.label, line.x, line.mean, line.low) for line in lines] + ends)
            drawn[HERE / file] = picture(f"{table}, {setting}", draw, 7, 3.6, source)
    return links, drawn


def draw_forest(axes: Any, claims: Sequence[Claim]) -> None:
    """Draw one line per claim, in units of the paper's effect: the diamond at 1 is the paper's, the bar is ours."""
    left, right = -3.0, 8.0
    tones = dict(zip(("reproduced", "not reproduced", "direction only"), map(colour, range(3)), strict=True))
    for place, claim in enumerate(claims):
        value, half = (claim.side * number / abs(claim.effect or 1) for number in (claim.found.mean, claim.found.half))
        tone, half = tones.get(claim.verdict, "#888888"), abs(half)
        ends = [min(right, max(left, end)) for end in (value - half, value + half)]
        axes.plot(ends, [place, place], color=tone, linewidth=2)
        marker = "<" if value < left else ">" if value > right else "s"
        axes.plot([min(right, max(left, value))], [place], marker, color=tone, markersize=4, clip_on=False)
        axes.plot([1], [place], "D", color="none", markeredgecolor="black", markersize=6)
    names = [f"{claim.number}  {' against '.join(claim.keys['rows'])}, {claim.keys['metric']}" for claim in claims]
    axes.set_yticks(range(len(claims)), names)
    axes.set(xlim=(left, right), ylim=(len(claims) - 0.5, -0.5))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("difference / the paper's (◇)")
    for verdict, tone in (tones | {"undecided": "#888888"}).items():
        axes.plot([], [], "s", color=tone, markersize=4, label=verdict)
    axes.legend(fontsize="small")


def cost_of(names: Sequence[str]) -> str:
    """Return what the runs of some data files cost, and where they were made."""
    lines = []
    for name in names:
        runs = [run for row in data()[name]["rows"] for run in row["runs"]]
        hours = sum(run.get("totals", {}).get("seconds", 0) for run in runs) / 3600
        machines = [run.get("machine", {}) for run in runs]
        facts = (
            [run["commit"] for run in runs],
            [" ".join(filter(None, (m.get("model") or m.get("processor"), m.get("capability")))) for m in machines],
            [run.get("versions", {}).get("torch") for run in runs],
        )
        cells = [f"[{name}](data/{name}.json)", str(len(runs)), f"{hours:.1f}" if hours else "not kept"]
        lines.append([*cells, *(", ".join(sorted(set(filter(None, each)))) for each in facts)])
    return markdown(("data", "runs", "core-hours", "commits", "processor", "torch"), lines)


def hours_of(names_of: Mapping[str, Sequence[str]]) -> str:
    """Return the core-hours of each paper's data files, and of the other files, as a table."""
    others = [name for name in data() if not any(name in names for names in names_of.values())]
    lines, totals = [], [0, 0, 0.0]
    for title, names in {**names_of, "The other pages": others}.items():
        runs = [run for name in names for row in data()[name]["rows"] for run in row["runs"]]
        seconds = [run["totals"]["seconds"] for run in runs if run.get("totals", {}).get("seconds")]
        numbers = [len(runs), len(runs) - len(seconds), sum(seconds) / 3600]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        lines.append([title, *map(str, numbers[:2]), f"{numbers[2]:.1f}"])
    lines.append(["all", *map(str, totals[:2]), f"{totals[2]:.1f}"])
    return markdown(("", "runs", "of these without their time", "core-hours of the others"), lines)


def page_of(name: str, paper: Json) -> dict[Path, str]:
    """Return a paper's page and its pictures."""
    claims, settings = paper["claims"], resolve({"experiment": paper["experiment"]}).flat()
    setup = [[f"`{key}`", f"`{settings[key]}`", source] for key, source in paper["setup"].items()]
    results, pictures = [], {}
    for table in paper["tables"]:
        content = data()[table]
        results += [f"### {content['title']}: {table}", f"    {repeated(content)}", table_of(table)]
        if content["table"] in tables() and (more := len(read_table(content["table"]).rows) - len(content["rows"])):
            rows = "row, which was" if more == 1 else "rows, which were"
            results += [f"The command has {more} further {rows} not run; `--only` leaves them out."]
        results += [f"Source: {content['source']}."] if "source" in content else []
        links, drawn = curves(table)
        results += links
        pictures |= drawn
    beyond = []
    for table, setting, method in paper["beyond"].get("rows", []):
        if (row := row_of(data()[table], setting, method)) and (final := sample_of(row)):
            costs = [f"{each.mean:.0f}" if (each := sample_of(row, cost)) else "" for cost in ("MB", "GFLOPs")]
            beyond.append([method, setting, table, str(final), *costs])
    parts = [
        *(MADE, f"# {paper['title']}", "## Summary", paper["summary"].strip()),
        f"{len(claims)} claims: {counts_of(claims)}. [The rule](README.md#the-rule) gives the verdicts; "
        "earlier runs and readings are in [history](history.md).",
        *("## Scope", markdown(CLAIM_HEADER, [claim.cells for claim in claims])),
        "\n".join(f"- *{word}*: {paper['scope'][word]}" for word in ("covered", "reduced", "missing", "impossible")),
        *("## Set-up", f"`conf/{paper['experiment']}.toml` has the settings; a table's file says what a row changes."),
        markdown(("key", "value", "from"), setup),
        *("## Results", *(results or ["None: no run's numbers were kept as a file."])),
        *("## Beyond the paper", paper["beyond"]["text"].strip()),
        *([markdown(("method", "setting", "data", "final (%)", "MB", "GFLOPs"), beyond)] if beyond else []),
        *("## What was easy, hard, open", *(f"*{word}*: {text.strip()}" for word, text in paper["notes"].items())),
        *("## Cost and provenance", cost_of(paper["tables"])),
        "Each file holds the seed, commit, versions and machine of every run, where the run recorded them.",
    ]
    return pictures | {HERE / f"{name}.md": "\n\n".join(parts) + "\n"}


def overview(content: Mapping[str, Json]) -> dict[Path, str]:
    """Return README.md and its forest plot."""
    claims = [claim for paper in content.values() for claim in paper["claims"]]
    drawn = [claim for claim in claims if claim.whole and claim.effect and not math.isinf(claim.found.half)]
    decided = sum(claim.verdict in VERDICTS[:3] for claim in claims)
    due = [str(claim.number) for claim in claims if claim.due]
    parts = [
        *(MADE, "# Results"),
        "Five papers were run again. This page lists what each claims, and judges every claim by one rule on the "
        "runs of this repository. A paper's page has its set-up, every row, the commands and the cost.",
        f"**{len(claims)} claims, {decided} decided: {counts_of(claims)}.**",
        "![One line per claim: the paper's effect, and ours with its interval](pictures/forest.svg)",
        "## The rule",
        f"{RULE} Claims with runs of less than an hour that lack these seeds: {', '.join(due) or 'none'}.",
    ]
    for name, paper in content.items():
        parts += [f"## [{paper['title']}]({name}.md)", f"{counts_of(paper['claims'])}."]
        parts += [markdown(CLAIM_HEADER, [claim.cells for claim in paper["claims"]])]
    parts += ["## Cost", COST, hours_of({paper["title"]: paper["tables"] for paper in content.values()})]
    parts += ["## Besides", BESIDES]
    source, draw = repr([claim.cells for claim in drawn]), partial(draw_forest, claims=drawn)
    forest = picture("forest plot of the claims", draw, 7.5, 1.2 + 0.24 * len(drawn), source)
    return {HERE / "pictures/forest.svg": forest, HERE / "README.md": "\n\n".join(parts) + "\n"}


def rendered() -> dict[Path, str]:
    """Return every page and picture that is made here, by path."""
    content = papers()
    pages = overview(content)
    for name, paper in content.items():
        pages |= page_of(name, paper)
    for name in ("attacks", "privacy", "devices", "sparse", "adapters", "pfllib"):
        text = (HERE / f"claims/{name}.txt").read_text()
        for table in re.findall(r"{curves (.+)}", text):
            links, drawn = curves(table)
            text, pages = text.replace(f"{{curves {table}}}", "\n\n".join(links)), pages | drawn
        text, used = filled(text, data())
        pages[HERE / f"{name}.md"] = "\n\n".join((MADE, text + "\n## Cost and provenance", cost_of(used))) + "\n"
    return pages


def besides(record: Record) -> Json:
    """Return how many answers were refused, and for three rounds an update's median norm and the clipped updates."""
    lines = [line for line in record.lines if line["round"]]
    chosen = [lines[0], lines[len(lines) // 2 - 1], lines[-1]]
    keys = [key for key in ("update-norm", "clipped-updates") if all(key in line for line in chosen)]
    several = {key: [line[key] for line in chosen] for key in keys}
    return several | {"refused": sum(len(line.get("dropped", ())) for line in lines)}


def of_sources(record: Record) -> Json:
    """Return the global score, the worst mean over five clients of a source, and the last merge error."""
    kept: Json = {key: record.lines[-1][key] for key in ("merge-error",) if key in record.lines[-1]}
    for score, worst in (("accuracy", min), ("rmse", max)):
        if f"final-global-{score}" in record.summary:
            kept["global"] = record.summary[f"final-global-{score}"]
            own = [
                numbers[f"personal-{score}"] for _, numbers in sorted(record.measured.items(), key=lambda e: int(e[0]))
            ]
            means = [statistics.fmean(own[first : first + 5]) for first in range(0, len(own), 5)]
            kept |= {"worst-source": worst(means)} if len(own) > 5 else {}
    return kept


def add(runs: Path) -> None:
    """Put the finished runs of ``<runs>/<table>/<row>/seed<n>`` into the tables' files.

    A run replaces the file's run of the same seed. In a new file ``set`` has what the first run sets unlike its row.
    """
    for name in tables():
        folders = sorted((runs / name).glob("*/seed*/summary.json"))
        if not folders:
            continue
        table, file = read_table(name), HERE / f"data/{name}.json"
        reference = table.reference or table.methods[0].label
        content = read_evidence(file) if file.exists() else {"table": name, "title": table.title, "rows": []}
        for row in table.rows:
            known, settings = row_of(content, row.setting, row.label), resolve(row.overrides)
            keys = settings.flat()
            for record in (read_run(path.parent) for path in folders if path.parent.parent.name == row.slug):
                if record.status != "completed":
                    continue
                if not known:
                    metric = f"{str(keys['evaluate']).split(',')[0]}-{settings.score.name}"
                    known = {"setting": row.setting, "method": row.label, "metric": metric, "runs": []}
                    known |= {"paper": row.paper.model_dump(exclude_defaults=True)}
                    content["rows"].append(known)
                own = record.settings.items()
                changed = {
                    key: value for key, value in own if key not in NOT_COMPARED and keys.get(key, value) != value
                }
                command = " ".join(
                    [f"fedsub reproduce {name}", *(f"-s {key}={value}" for key, value in changed.items())]
                )
                for key, value in (("command", command), ("set", changed), ("reference", reference)):
                    content.setdefault(key, value)
                entry = run_entry(record.folder, known["metric"]) | (
                    besides(record) if name.startswith("attacks-") else {}
                )
                entry |= of_sources(record) if name.startswith("sentiment-") else {}
                others = [run for run in known["runs"] if run["seed"] != entry["seed"]]
                known["runs"] = sorted([*others, entry], key=lambda run: run["seed"])
        order = [(row.setting, row.label) for row in table.rows]
        content["rows"].sort(key=lambda row: order.index((row["setting"], row["method"])))
        content["seeds"] = seeds_of(content)
        write_evidence(file, content)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        add(Path(folder))
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(HERE))
