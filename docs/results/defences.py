"""Pages that concern no paper's claim: text with fields in braces, filled with the numbers of the data files.

``{table | method | setting}`` is an accuracy, with ``| key`` another number of the row's first run.
``{matrix table}`` is a table of methods and settings, ``{adapters table}`` one of adapters.md,
``{pairs table}`` has a method without → with ``robust``,
``{settings table}`` a setting a line, ``{privacy table}`` the rows of privacy.md; ``{command table}`` repeats it.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from fedsub_app.common.tensors import Json
from fedsub_app.common.text import markdown
from fedsub_app.studies.evidence import Sample, difference, row_of, sample_of


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


def matrix(content: Json) -> str:
    """Return a table of accuracies, published ones in brackets: a line a method, a column a setting."""
    settings = _names(content, "setting")

    def cell(method: str, setting: str) -> str:
        row = row_of(content, setting, method)
        paper = row["paper"].get("final", "") if row else ""
        return _text(_sample(content, method, setting)) + f" ({paper})" * bool(paper)

    lines = [[method, *(cell(method, each) for each in settings)] for method in _names(content, "method")]
    return markdown(["method", *settings], lines)


def pairs(content: Json) -> str:
    """Return a table of accuracies without → with ``robust``: a line a method, a column a setting."""
    settings, lines = _names(content, "setting"), []
    for method in dict.fromkeys(name.rpartition(",")[0] for name in _names(content, "method")):
        both = [[_sample(content, f"{method}, robust {each}", at) for each in ("off", "on")] for at in settings]
        cost = difference(both[0][1], both[0][0])
        lines.append([method, *(f"{_text(off)} → {_text(on)}" for off, on in both), str(cost)])
    return markdown(["method", *settings, "cost with nobody, points [95 %]"], lines)


def by_setting(content: Json) -> str:
    """Return a table of accuracies: a line a setting, with the difference of its two methods."""
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


def adapters(content: Json) -> str:
    """Return a table of a setting's rows: scores, bytes sent, memory of a client, merge error."""
    parts = []
    for setting in _names(content, "setting"):
        rows = [row for row in content["rows"] if row["setting"] == setting and row["runs"]]
        lines = []
        for row in rows:
            keys = ("global", "final", "worst-source", "MB", "peak-MB", "merge-error")
            found = [sample_of(row, key) for key in keys]
            lines.append([row["method"], *("" if each is None else f"{each.mean:.3g}" for each in found)])
        header = (rows[0]["metric"].removeprefix("personal-"), "mean of the clients' own", "worst source")
        header += ("MB down and up", "peak MB of a client", "merge error")
        parts += [f"## {setting.capitalize()}", markdown(["method", *header], lines)]
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[Json], str]] = {
    "command": lambda content: content["command"],
    "matrix": matrix,
    "adapters": adapters,
    "pairs": pairs,
    "settings": by_setting,
    "privacy": privacy,
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
            return f"{row['runs'][0][key[0]]:.3g}" if row else ""
        return _text(_sample(data[table], method, setting))

    return re.sub(r"\{([^{}\n]+)\}", field, text), list(used)
