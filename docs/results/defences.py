"""Pages that concern no paper's claim: text with fields in braces, filled with the numbers of the data files.

``{table | method | setting}`` is an accuracy; with ``| key`` it is the mean of another number over the row's runs.
``{matrix table}`` is a table of methods and settings, ``{adapters table}`` one of adapters.md,
``{pairs table}`` has each method's accuracies without → with ``robust``,
``{settings table}`` one line per setting, ``{privacy table}`` the rows of privacy.md, ``{variants table}`` a column per
variant of a method; ``{command table}`` is the command that repeats the table.
``{budgets table}`` has a table for each setting: scores of runs with ``all-budgets`` at each budget, and by width.
"""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from fedsub_app.common.conf_files import tables
from fedsub_app.common.tensors import Json
from fedsub_app.common.text import markdown
from fedsub_app.studies.evidence import Sample, difference, row_of, sample, sample_of
from fedsub_app.studies.tables import read_table


def _names(content: Json, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in content["rows"]))


def _sample(content: Json, method: str, setting: str) -> Sample:
    row = row_of(content, setting, method)
    found = row and sample_of(row)
    if not found:
        raise KeyError(f"{content['table']}: no {method!r} with {setting!r}")
    return found


def _text(found: Sample) -> str:
    return f"{found.mean:.1f}" + f" ± {found.sd:.1f}" * (found.n > 1)


def seeds_of(content: Json) -> int:
    """Return the number of seeds, from the table's first one on, that repeats every run of a file."""
    first = read_table(content["table"]).first_seed if content["table"] in tables() else 0
    return 1 + max(run["seed"] for row in content["rows"] for run in row["runs"]) - first


def repeated(content: Json) -> str:
    """Return the command that repeats every run of a file."""
    command = content["command"]
    return command if "--seeds" in command or "seeds" not in content else f"{command} --seeds {content['seeds']}"


def matrix(content: Json) -> str:
    """Return a table of accuracies, published ones in brackets: one line per method, one column per setting."""
    settings = _names(content, "setting")

    def cell(method: str, setting: str) -> str:
        if not (row := row_of(content, setting, method)):
            return ""
        paper = row["paper"].get("final", "")
        return _text(_sample(content, method, setting)) + f" ({paper})" * bool(paper)

    lines = [[method, *(cell(method, each) for each in settings)] for method in _names(content, "method")]
    return markdown(["method", *settings], lines)


def pairs(content: Json) -> str:
    """Return a table of accuracies without → with ``robust``: one line per method, one column per setting."""
    settings, lines = _names(content, "setting"), []
    for method in dict.fromkeys(name.rpartition(",")[0] for name in _names(content, "method")):
        both = [[_sample(content, f"{method}, robust {each}", at) for each in ("off", "on")] for at in settings]
        cost = difference(both[0][1], both[0][0])
        lines.append([method, *(f"{_text(off)} → {_text(on)}" for off, on in both), str(cost)])
    return markdown(["method", *settings, "cost with nobody, points [95 %]"], lines)


def by_setting(content: Json) -> str:
    """Return a table of accuracies: one line per setting, with the difference of its two methods."""
    first, second = _names(content, "method")
    lines = []
    for setting in _names(content, "setting"):
        row = row_of(content, setting, second)
        kind = row["metric"].removesuffix("-accuracy") if row else ""
        off, on = (_sample(content, method, setting) for method in (first, second))
        refused = [str(run["refused"]) for run in row["runs"] if "refused" in run] if row else []
        lines.append([setting, kind, _text(off), _text(on), str(difference(on, off)), ", ".join(refused)])
    return markdown(["experiment", "accuracy", first, second, "difference, points", "answers refused"], lines)


def privacy(content: Json) -> str:
    """Return the table of privacy.md: accuracy, epsilon, median norms of updates, clipped updates."""
    lines = []
    for row in content["rows"]:
        run = row["runs"][0]
        norms, clipped = (", ".join(map(str, run.get(key, ()))) for key in ("update-norm", "clipped-updates"))
        lines.append(
            [row["method"], f"{run['final']:.2f}", f"{run.get('epsilon', ''):.3g}" if "epsilon" in run else "none"]
        )
        lines[-1] += [norms, clipped]
    header = ("row", "final (%)", "epsilon at delta 1e-5", "median norm of an update", "clipped, of 500")
    return markdown(header, lines)


def variants(content: Json) -> str:
    """Return a table of a setting's accuracies: one line per method, one column per variant ("method, variant")."""
    (setting,) = _names(content, "setting")
    names = [name.rpartition(", ") for name in _names(content, "method")]
    kinds = list(dict.fromkeys(kind for _, _, kind in names))

    def cell(method: str, kind: str) -> str:
        row = row_of(content, setting, f"{method}, {kind}")
        found = row and sample_of(row)
        return _text(found) if found else ""

    methods = dict.fromkeys(method for method, _, _ in names)
    return markdown(["method", *kinds], [[method, *(cell(method, kind) for kind in kinds)] for method in methods])


def budgets(content: Json) -> str:
    """Return for each setting a table of scores at equal budgets and, at the first of them, by width.

    A cell has the mean score at the last evaluated round within the budget. Where the runs ended below 95 % of the
    budget, the share that they had spent follows in brackets.
    """
    parts = []
    for setting in _names(content, "setting"):
        rows = [row for row in content["rows"] if row["setting"] == setting]
        names = list(rows[0]["runs"][0]["budgets"])
        by_width = [[_widths(run, names[0]) for run in row["runs"]] for row in rows]
        widths = sorted({width for runs in by_width for run in runs for width in run})
        lines = []
        for row, runs in zip(rows, by_width, strict=True):
            means = [[run[width] for run in runs if width in run] for width in widths]
            last = [f"{statistics.fmean(each):.1f}" if each else "" for each in means]
            lines.append([row["method"], *(_at(row, name) for name in names), *last])
        seeds = max(len(row["runs"]) for row in rows)
        parts.append(f"{setting}, {seeds} seed{'s' * (seeds > 1)}:")
        parts.append(markdown(["method", *names, *(f"{width}, {names[0]}" for width in widths)], lines))
    return "\n\n".join(parts)


def _widths(run: Json, budget: str) -> Json:
    return run["budgets"][budget].get("served", {}).get("global-accuracy", {})  # type: ignore[no-any-return]


def _at(row: Json, budget: str) -> str:
    runs = {run["seed"]: run["budgets"][budget] for run in row["runs"]}
    number, used = (statistics.fmean(run[key] for run in runs.values()) for key in ("round", "spent"))
    text = f"{_text(sample({seed: run['final'] for seed, run in runs.items()}))}, round {number:.0f}"
    return text + f" ({used:.0%})" * (used < 0.95)


def adapters(content: Json) -> str:
    """Return a table of a setting's rows: scores, bytes sent, memory of a client, merge error."""
    parts = []
    for setting in _names(content, "setting"):
        rows = [row for row in content["rows"] if row["setting"] == setting and row["runs"]]
        lines = []
        for row in rows:
            found = [sample_of(row, key) for key in ("global", "final", "worst-source", "MB", "merge-error")]
            cells = ["" if each is None else f"{each.mean:.3g}" + f" ± {each.sd:.2g}" * (each.sd > 0) for each in found]
            lines.append([row["method"], *cells, str(row.get("peak-MB", ""))])
        header = (rows[0]["metric"].removeprefix("personal-"), "mean of the clients' own", "worst source")
        header += ("MB down and up", "merge error", "peak MB of a client")
        parts += [f"## {setting.capitalize()}", markdown(["method", *header], lines)]
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[Json], str]] = {
    "command": repeated,
    "matrix": matrix,
    "budgets": budgets,
    "adapters": adapters,
    "pairs": pairs,
    "settings": by_setting,
    "privacy": privacy,
    "variants": variants,
}


def filled(text: str, data: Mapping[str, Json]) -> tuple[str, Sequence[str]]:
    """Return a page's text with its fields filled, and the names of the data files that it used."""
    used: dict[str, None] = {}

    def field(match: re.Match[str]) -> str:
        name, *parts = (part.strip() for part in match[1].split("|"))
        word, _, table = name.rpartition(" ")
        used[table] = None
        if word:
            return TABLES[word](data[table])
        method, setting, *key = parts
        if key:
            row = row_of(data[table], setting, method)
            return f"{statistics.fmean(run[key[0]] for run in row['runs']):.3g}" if row else ""
        return _text(_sample(data[table], method, setting))

    return re.sub(r"\{([^{}\n]+)\}", field, text), list(used)
