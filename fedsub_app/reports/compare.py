"""Several runs beside each other, as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedsub_app.common.score import Score
from fedsub_app.common.text import markdown
from fedsub_app.reports.cost_to_accuracy import about, averages, cells, columns, costs_to_accuracy
from fedsub_app.reports.records import COSTS, Group, Record, kinds_of, read_run, run_labels, short, summary_table


def comparisons(folders: Sequence[Path]) -> str:
    """Return :func:`compare` and :func:`compare_costs` of the runs of each data set, in the order given."""
    sections: dict[str, list[Path]] = {}
    for folder in folders:
        sections.setdefault(str(read_run(folder).settings.get("dataset", "")), []).append(folder)
    texts = []
    for section, runs in sections.items():
        if len(runs) > 1:
            texts += [f"{section}:"] * (len(sections) > 1) + [compare(runs), compare_costs(runs)]
    return "\n\n".join(filter(None, texts))


def compare(folders: Sequence[Path]) -> str:
    """Return a Markdown table: each run's last score beside the first run's at the same cost.

    For every score that both have, and each of bytes (by the papers' formula, both ways), FLOPs and seconds; "–"
    where the first run had not been evaluated yet.
    """
    records = [read_run(folder) for folder in folders]
    first, score = records[0].lines, records[0].score
    header = (
        "run",
        score.name,
        score.titled("at the end"),
        *(text for cost in COSTS for text in (cost, score.titled("first run by then"))),
    )
    rows = []
    for record, name in zip(records, run_labels(folders, [record.settings for record in records]), strict=True):
        lines = record.lines
        for key in score.keys:
            if not any(key in line for line in first) or not any(key in line for line in lines):
                continue
            row = [name, short(key), score.number([line[key] for line in lines if key in line][-1])]
            for cost in COSTS:
                spent = lines[-1][cost]
                by_then = [line[key] for line in first if key in line and line[cost] <= spent]
                row += [f"{spent:.1f}", score.number(by_then[-1]) if by_then else "–"]
            rows.append(row)
    return markdown(header, rows)


def compare_costs(folders: Sequence[Path]) -> str:
    """Return what 90 % of the best run's score has cost each run: a Markdown table for each score of all runs."""
    records = [read_run(folder) for folder in folders]
    names = run_labels(folders, [record.settings for record in records])
    runs = {name: record.lines for name, record in zip(names, records, strict=True)}
    texts: list[str] = []
    for key, score in shared_scores(records).items():
        threshold, costs = costs_to_accuracy(runs, key, score)
        table = markdown(("run", *columns(score)), [[name, *cells([cost], score)] for name, cost in costs.items()])
        words = f"Cost of {score.text(threshold)} {short(key)} {score.name}.{'' if texts else ' ' + about(score)}"
        texts.append(f"{words}\n\n{table}")
    return "\n\n".join(texts)


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
        spent = {group.label: [fmean(group.cost(cost)) for cost in COSTS] for group in groups if group.label in scores}
        best = min(scores, key=lambda label: -scores[label] if kind.high_is_good else scores[label])
        limit = NEAR * scores[best] if kind.high_is_good else scores[best] / NEAR
        near = [label for label, score in scores.items() if kind.reached(score, limit)]
        cheap = min(near, key=lambda label: spent[label])
        if cheap == best or not spent[best][0]:
            cost = "without sending a byte" if not spent[best][0] else f"with {spent[best][0]:.3g} MB"
            sentences.append(f"{best} has the best {short(key)} {kind.name}, {kind.text(scores[best])}, {cost}.")
            continue
        share = f"{100 * scores[cheap] / scores[best]:.0f} % of {best}'s {short(key)} {kind.name}"
        sent, flops, *_ = (100 * mine / theirs for mine, theirs in zip(spent[cheap], spent[best], strict=True))
        sentences.append(f"{cheap} reaches {share} with {sent:.0f} % of its bytes and {flops:.0f} % of its FLOPs.")
    return sentences
