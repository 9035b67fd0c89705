"""Tables of runs beside each other: results, costs, who is served, in words."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fedsub_app.common.score import Score, kind_of
from fedsub_app.common.section import Json
from fedsub_app.common.text import markdown, three_digits
from fedsub_app.reports.cost_to_accuracy import Cost, about, averages, cells, columns, costs_to_accuracy
from fedsub_app.reports.curves import OPTIONAL, Group, costs_of, deviation, kinds_of, named
from fedsub_app.runs.rounds import OF_DEVICES

TOTALS = {  # a column of the summary: key of the rounds' lines, unit
    "MB down": ("formula-bytes-down", 1e6),
    "MB up": ("formula-bytes-up", 1e6),
    "GFLOPs": ("flops", 1e9),
    "seconds": ("seconds", 1),
    OPTIONAL: ("device-seconds", 1),
    "joules": ("joules", 1),
}


class Cell(NamedTuple):
    text: str
    value: float | str
    best: bool = False


Rows = list[tuple[str, list[Cell]]]  # a label and cells for each group


def _scored(values: Sequence[float], score: Score) -> Cell:
    if not values:
        return Cell("–", -1.0)
    mean, spread = fmean(values), f" ± {score.number(deviation(values))}" if len(values) > 1 else ""
    return Cell(f"{score.number(mean)}{spread}", mean)


def _amount(values: Sequence[float]) -> Cell:
    mean, spread = fmean(values), deviation(values)
    return Cell(f"{three_digits(mean)} ± {three_digits(spread)}" if spread else three_digits(mean), mean)


def summary_table(groups: Sequence[Group]) -> tuple[list[str], Rows]:
    """Return the results and costs of some groups: the header, and rows."""
    records = [record for group in groups for record in group.records]
    scores = kinds_of(groups)
    spent = {key for record in records for line in record.lines for key in OF_DEVICES if line.get(key)}
    totals = {name: (key, unit) for name, (key, unit) in TOTALS.items() if key not in OF_DEVICES or key in spent}
    alone = all(score.unit and score.name == next(iter(scores.values())).name for score in scores.values())
    titles = [score.titled(kind_of(key) if alone else f"{kind_of(key)} {score.name}") for key, score in scores.items()]
    rows = []
    for group in named(groups):
        lines = [record.lines for record in group.records]
        dropped = sum(len(record.dropped) for record in group.records)
        abandoned = sum(line.get("status") == "abandoned" for of in lines for line in of)
        states = Counter(record.status for record in group.records)
        status = ", ".join(f"{count} {state}" if len(lines) > 1 else state for state, count in states.items())
        row = [Cell(str(len(lines)), len(lines))]
        row += [_scored(group.last(key), score) for key, score in scores.items()]
        row += [_amount([of[-1]["round"] for of in lines if of] or [0])]
        sums = ([sum(line.get(key) or 0 for line in of) / unit for of in lines] for key, unit in totals.values())
        row += map(_amount, sums)
        row += [Cell(str(dropped), dropped), Cell(str(abandoned), abandoned), Cell(status, status)]
        rows.append((group.label, row))
    for column, score in enumerate(scores.values(), 1) if len(rows) > 1 else ():
        best = score.best(float(row[column].value) for _, row in rows if row[column].text != "–")
        for _, row in rows:
            row[column] = row[column]._replace(best=row[column].value == best)
    return ["seeds", *titles, "rounds", *totals, "replies dropped", "rounds abandoned", "status"], rows


def served_table(groups: Sequence[Group]) -> tuple[list[str], Rows]:
    """Return the last scores by width, device class and so on: header and rows, both empty where no run has any."""
    last: list[list[Json]] = [
        [next((line["served"] for line in reversed(record.lines) if "served" in line), {}) for record in group.records]
        for group in groups
    ]
    score_of = kinds_of(groups)
    every = ((key, name) for of in last for served in of for key in served for name in served[key])
    places = {(key, name): score_of.get(key, Score()) for key, name in every}
    rows = []
    for group, of in zip(named(groups), last, strict=True):
        values = ([served[key][name] for served in of if name in served.get(key, {})] for key, name in places)
        rows.append((group.label, [*map(_scored, values, places.values())]))
    return [score.titled(f"{kind_of(key)}, {name}") for (key, name), score in places.items()], rows if places else []


def costs_of_groups(groups: Sequence[Group], key: str, timed: bool) -> list[list[str]]:
    """Return the threshold and its costs of each group, by section and seed; "" where ``key`` is not measured."""
    score = kinds_of(groups).get(key, Score())
    found: list[list[tuple[float, Cost]]] = [[] for _ in groups]
    runs = [(k, group.section, record) for k, group in enumerate(groups) for record in group.records]
    for place in dict.fromkeys((section, record.settings["seed"]) for _, section, record in runs):
        mine = [(k, record) for k, section, record in runs if (section, record.settings["seed"]) == place]
        lines = {f"{k} {record.folder}": record.lines for k, record in mine if averages(record.lines, key)}
        threshold, costs = costs_to_accuracy(lines, key, score) if lines else (0.0, {})
        for name, cost in costs.items():
            found[int(name.partition(" ")[0])].append((threshold, cost))
    return [
        [", ".join(score.number(threshold) for threshold, _ in of), *cells([cost for _, cost in of], score, timed)]
        for of in found
    ]


def cost_table(groups: Sequence[Group]) -> tuple[list[str], list[tuple[str, list[str]]]] | None:
    """Return what 90 % of the best run's score has cost: the header, and rows; ``None`` for less than two of them."""
    timed, rows, scores = OPTIONAL in costs_of(groups), [], _scores(groups)
    for key, score in kinds_of(groups).items():
        kind = f"{kind_of(key)} {score.name}" if len(scores) > 1 else kind_of(key)
        for group, texts in zip(named(groups), costs_of_groups(groups, key, timed), strict=True):
            rows += [(group.label, [texts[0], kind, *texts[1:]])] if texts[0] else []
    score = scores[0] if len(scores) == 1 else Score("score", unit="")
    return ([score.titled("threshold"), score.name, *columns(score, timed)], rows) if len(rows) > 1 else None


def _scores(groups: Sequence[Group]) -> list[Score]:
    return list(dict.fromkeys(kinds_of(groups).values()))


def about_costs(groups: Sequence[Group]) -> tuple[str, str]:
    """Return the names of the scores in :func:`cost_table`, and what its columns mean."""
    scores = _scores(groups)
    return " and ".join(score.name for score in scores), " ".join(map(about, scores))


def cost_text(groups: Sequence[Group]) -> str:
    """Return :func:`cost_table` as Markdown, "" where there is none."""
    if not (costs := cost_table(groups)):
        return ""
    rows = [[label, *texts] for label, texts in costs[1]]
    return f"Cost to {'. '.join(about_costs(groups))}\n\n{markdown(('run', *costs[0]), rows)}"


def summary_text(groups: Sequence[Group]) -> str:
    """Return results and costs as an aligned table, without columns that are 0 or, of several rows, all the same."""
    header, rows = summary_table(groups)
    used = []
    for column, name in enumerate(header):
        texts = {cells[column].text for _, cells in rows}
        shared = len(rows) > 1 and len(texts) == 1 and (name in ("seeds", "rounds") or texts == {"completed"})
        used += [column] if texts != {"0"} and not shared else []
    lines = [["", *(header[column] for column in used)]]
    lines += [[label, *(cells[column].text for column in used)] for label, cells in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(word.rjust(wide) for word, wide in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )


NEAR = 0.9  # of the best score, or the best over it: a run that reaches it is worth its savings


def verdicts(groups: Sequence[Group]) -> list[str]:
    """Return a sentence a score: which group of one section is within 90 % of the best one at the fewest bytes."""
    if len(groups) < 2 or len({group.section for group in groups}) > 1:
        return []
    sentences = []
    for key, kind in kinds_of(groups).items():
        measured = [group for group in groups if group.last(key)]
        scores = {group.label: fmean(group.last(key)) for group in measured}
        spent = {group.label: [fmean(group.cost(cost)) for cost in ("MB by formula", "GFLOPs")] for group in measured}
        best = min(scores, key=lambda label: -scores[label] if kind.high_is_good else scores[label])
        limit = NEAR * scores[best] if kind.high_is_good else scores[best] / NEAR
        near = [label for label, score in scores.items() if kind.reached(score, limit)]
        cheap = min(near, key=lambda label: spent[label], default=best)  # none where a negative score is the best
        if cheap == best or scores[best] <= 0 or not all(spent[best]):
            cost = "without sending a byte" if not spent[best][0] else f"with {spent[best][0]:.3g} MB"
            sentences.append(f"{best} has the best {kind_of(key)} {kind.name}, {kind.text(scores[best])}, {cost}.")
            continue
        share = f"{100 * scores[cheap] / scores[best]:.0f} % of {best}'s {kind_of(key)} {kind.name}"
        sent, flops = (100 * mine / theirs for mine, theirs in zip(spent[cheap], spent[best], strict=True))
        sentences.append(f"{cheap} reaches {share} with {sent:.0f} % of its bytes and {flops:.0f} % of its FLOPs.")
    return sentences
