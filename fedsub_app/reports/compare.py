"""Several runs beside each other, as Markdown."""

from collections.abc import Sequence
from pathlib import Path

from fedsub_app.common.text import markdown
from fedsub_app.reports.cost_to_accuracy import ABOUT, COLUMNS, averages, cells, costs_to_accuracy
from fedsub_app.reports.records import COSTS, Group, read_run, run_labels, summary_table
from fedsub_app.runs.rounds import ACCURACIES


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
    """Return a Markdown table: each run's last accuracy beside the first run's at the same cost.

    For every accuracy that both have, and each of bytes (by the papers' formula, both ways), FLOPs and seconds; "–"
    where the first run had not been evaluated yet.
    """
    records = [read_run(folder) for folder in folders]
    first = records[0].lines
    header = (
        "run",
        "accuracy",
        "at the end (%)",
        *(text for cost in COSTS for text in (cost, "first run by then (%)")),
    )
    rows = []
    for record, name in zip(records, run_labels(folders, [record.settings for record in records]), strict=True):
        lines = record.lines
        for key in ACCURACIES:
            if not any(key in line for line in first) or not any(key in line for line in lines):
                continue
            row = [name, key.removesuffix("-accuracy"), f"{[line[key] for line in lines if key in line][-1]:.2f}"]
            for cost in COSTS:
                spent = lines[-1][cost]
                by_then = [line[key] for line in first if key in line and line[cost] <= spent]
                row += [f"{spent:.1f}", f"{by_then[-1]:.2f}" if by_then else "–"]
            rows.append(row)
    return markdown(header, rows)


def compare_costs(folders: Sequence[Path]) -> str:
    """Return a Markdown table: what 90 % of the best run's accuracy has cost each run; "" where they share none.

    The accuracy is the first of those that all runs have measured.
    """
    records = [read_run(folder) for folder in folders]
    names = run_labels(folders, [record.settings for record in records])
    runs = {name: record.lines for name, record in zip(names, records, strict=True)}
    key = next((key for key in ACCURACIES if all(averages(lines, key) for lines in runs.values())), None)
    if key is None:
        return ""
    threshold, costs = costs_to_accuracy(runs, key)
    table = markdown(("run", *COLUMNS), [[name, *cells([cost])] for name, cost in costs.items()])
    return f"Cost of {threshold:.2f} % {key.removesuffix('-accuracy')} accuracy. {ABOUT}\n\n{table}"


def summary_text(groups: Sequence[Group]) -> str:
    """Return the results and costs of some groups as an aligned table; columns that are 0 for all are left out."""
    header, rows = summary_table(groups)
    used = [column for column in range(len(header)) if any(cells[column].text != "0" for _, cells in rows)]
    lines = [["", *(header[column] for column in used)]]
    lines += [[label, *(cells[column].text for column in used)] for label, cells in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(word.rjust(wide) for word, wide in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )
