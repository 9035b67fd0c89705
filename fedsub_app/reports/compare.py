"""Several runs beside each other, as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fedsub_app.common.score import Score, kind_of
from fedsub_app.common.text import markdown
from fedsub_app.reports.cost_to_accuracy import about, averages, cells, columns, costs_to_accuracy
from fedsub_app.reports.records import (
    OPTIONAL,
    Group,
    Record,
    costs_of,
    kinds_of,
    named_runs,
    read_run,
    summary_table,
)


def comparisons(folders: Sequence[Path]) -> str:
    """Return :func:`compare` and the costs to accuracy of the runs of each data set, in the order given."""
    sections: dict[str, list[Record]] = {}
    for record in map(read_run, folders):
        sections.setdefault(str(record.settings.get("dataset", "")), []).append(record)
    texts = []
    for section, records in sections.items():
        if len(records) > 1:
            runs = named_runs(records)
            texts += [f"{section}:"] * (len(sections) > 1) + [compare(runs)]
            if costs := cost_table([Group(name, (record,)) for name, record in runs]):
                score, rows = records[0].score, [[name, *texts] for name, texts in costs.rows]
                texts.append(f"Cost to {score.name}. {about(score)}\n\n{markdown(('run', *costs.header), rows)}")
    return "\n\n".join(texts)


def compare(runs: Sequence[tuple[str, Record]]) -> str:
    """Return a Markdown table: each run's last score beside the first run's at the same cost.

    For every score that both have, and each of bytes (by the papers' formula, both ways), FLOPs and seconds; "–"
    where the first run had not been evaluated yet.
    """
    first, score, axes = runs[0][1].lines, runs[0][1].score, costs_of(record for _, record in runs)
    header = (
        "run",
        score.name,
        score.titled("at the end"),
        *(text for cost in axes for text in (cost, score.titled("first run by then"))),
    )
    rows = []
    for name, record in runs:
        lines = record.lines
        for key in score.keys:
            if not any(key in line for line in first) or not any(key in line for line in lines):
                continue
            row = [name, kind_of(key), score.number([line[key] for line in lines if key in line][-1])]
            for cost in axes:
                spent = lines[-1][cost]
                by_then = [line[key] for line in first if key in line and line[cost] <= spent]
                row += [f"{spent:.1f}", score.number(by_then[-1]) if by_then else "–"]
            rows.append(row)
    return markdown(header, rows)


class CostTable(NamedTuple):
    """A table of costs: its header, and a label and cells for each row."""

    header: tuple[str, ...]
    rows: list[tuple[str, list[str]]]


def cost_table(groups: Sequence[Group]) -> CostTable | None:
    """Return what 90 % of the best run's score has cost, in each section by itself; ``None`` for less than two rows."""
    rows, timed = [], OPTIONAL in costs_of(record for group in groups for record in group.records)
    for section in dict.fromkeys(group.section for group in groups):
        mine = [group for group in groups if group.section == section]
        runs = {f"{k} {i}": r.lines for k, group in enumerate(mine) for i, r in enumerate(group.records)}
        for key, score in shared_scores([record for group in mine for record in group.records]).items():
            threshold, costs = costs_to_accuracy(runs, key, score)
            for k, group in enumerate(mine):
                label = f"{section}: {group.label}" if len(groups) > len(mine) else group.label
                texts = cells([costs[f"{k} {i}"] for i in range(len(group.records))], score, timed)
                rows.append((label, [score.number(threshold), kind_of(key), *texts]))
    score = groups[0].records[0].score
    return CostTable((score.titled("threshold"), score.name, *columns(score, timed)), rows) if len(rows) > 1 else None


def shared_scores(records: Sequence[Record]) -> dict[str, Score]:
    """Return the scores that all of some runs have measured after round 0, by the key of the line."""
    return {k: score for k, score in kinds_of(records).items() if all(averages(run.lines, k) for run in records)}


def summary_text(groups: Sequence[Group]) -> str:
    """Return the results and costs of some groups as an aligned table.

    Columns that are 0 for all are left out, and of several rows the seeds, rounds and status that all share.
    """
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
    """Return a sentence for each score: which group is within 90 % of the best one at the fewest bytes.

    Groups of several sections (data sets) are not compared: no sentence.
    """
    if len(groups) < 2 or len({group.section for group in groups}) > 1:
        return []
    sentences = []
    for key, kind in kinds_of(record for group in groups for record in group.records).items():
        scores = {group.label: fmean(group.last(key)) for group in groups if group.last(key)}
        spent = {
            group.label: [fmean(group.cost(cost)) for cost in ("MB by formula", "GFLOPs")]
            for group in groups
            if group.label in scores
        }
        best = min(scores, key=lambda label: -scores[label] if kind.high_is_good else scores[label])
        limit = NEAR * scores[best] if kind.high_is_good else scores[best] / NEAR
        near = [label for label, score in scores.items() if kind.reached(score, limit)]
        cheap = min(near, key=lambda label: spent[label])
        if cheap == best or not spent[best][0]:
            cost = "without sending a byte" if not spent[best][0] else f"with {spent[best][0]:.3g} MB"
            sentences.append(f"{best} has the best {kind_of(key)} {kind.name}, {kind.text(scores[best])}, {cost}.")
            continue
        share = f"{100 * scores[cheap] / scores[best]:.0f} % of {best}'s {kind_of(key)} {kind.name}"
        sent, flops = (100 * mine / theirs for mine, theirs in zip(spent[cheap], spent[best], strict=True))
        sentences.append(f"{cheap} reaches {share} with {sent:.0f} % of its bytes and {flops:.0f} % of its FLOPs.")
    return sentences
