"""The pages of the site that are not files in docs/: made from README, changelog, bench, methods, settings, docstrings.

A MkDocs hook (``mkdocs.yml``). Links are those of the repository, bent to the site's pages.
"""

import html
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "docs/notebook.ipynb": "notebook.md",
}
API = {
    "What is learned": ["fedsub_app.problem", "fedsub_app.tasks"],
    "Methods on the server": ["strategies.base", "strategies.hooks", "strategies.defences"],
    "Methods on the client": ["client_apps.base", "fedsub_app.training.client", "fedsub_app.training.local"],
    "Masks, means, schedules": [
        *("fedsub_app.subnets.averaging", "fedsub_app.subnets.robust", "fedsub_app.subnets.privacy"),
        *("fedsub_app.subnets.masks", "fedsub_app.subnets.selection", "fedsub_app.subnets.pruning"),
        *("fedsub_app.subnets.schedules", "fedsub_app.subnets.norms"),
    ],
    "Messages and nodes": [
        *("fedsub_app.federation.protocol", "fedsub_app.federation.wire"),
        *("fedsub_app.federation.roll", "fedsub_app.federation.nodes"),
    ],
    "Runs": [
        *("fedsub_app.runs.directory", "fedsub_app.runs.rounds", "fedsub_app.runs.checkpoint"),
        "fedsub_app.reports.cost_to_accuracy",
    ],
}
# Which page of results/ a method's figures are on; the baselines stand beside the paper that compares with them.
RESULTS = {
    "fedpews": ["fedavg", "fedprox", "fedpews"],
    "fedselect": [
        *("fedselect", "fedavg-ft", "ditto", "fedpac", "fedper", "fedrep", "fedbabu", "lg-fedavg", "local", "fedavg"),
    ],
    "fedpart": ["fedpart", "fedavg", "fedprox", "moon"],
    "ist": ["ist", "istprox", "fednova", "fedadam", "fedavg", "fedprox", "moon"],
    "sub-fedavg": ["subfedavg", "mtl", "lg-fedavg", "fedprox", "local", "fedavg"],
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {target: bent(text_of(ROOT / source), source, target) for source, target in COPIED.items()}
    pages |= methods() | {"settings.md": settings(), "api.md": api()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def text_of(path: Path) -> str:
    """Return a page's Markdown; a notebook's cells one after the other."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Bend the links of a page that is a file in docs/."""
    path = page.file.src_uri
    return bent(markdown, f"docs/{path}", path) if (ROOT / "docs" / path).is_file() else markdown


def bent(text: str, source: str, target: str) -> str:
    """Return the text of ``source`` with its relative links as they are on the page ``target``.

    A link to a file that is no page, which must be there, becomes its path.
    """

    def bend(match: re.Match[str]) -> str:
        said, link, place = match[1], match[2], match[3] or ""
        if "://" in link:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        page = COPIED.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if page:
            return f"[{said}]({posixpath.relpath(page, posixpath.dirname(target) or '.')}{place})"
        return f"`{path}`" if (ROOT / path).is_file() else match[0]

    return LINK.sub(bend, text)


def methods() -> dict[str, str]:
    """Return a page for every method: what it is, where it leaves its paper, its settings, where its figures are."""
    from fedsub_app.config import describe
    from fedsub_app.methods import METHODS

    known, pages = describe(), {}
    rows = ["# Methods", "", "| `method` | what |", "|---|---|"]
    for name, method in METHODS.items():
        rows.append(f"| [`{name}`]({name}.md) | {method.description} |")
        parts = [f"# {name}", method.description + ".", ""]
        if method.preset:
            parts += ["Sets " + ", ".join(f"`{key} = {value!r}`" for key, value in method.preset.items()) + ".", ""]
        for side, cls in (("server", method.strategy), ("client", method.client)):
            module = sys.modules[cls.__module__]
            parts += [f"## On the {side}", f"`{cls.__module__}`", "", _prose(inspect.getdoc(module) or ""), ""]
        own = {key: text for key, text in known.items() if key.startswith(f"{name}.")}
        parts += ["## Settings", "", _settings_table(own) if own else "None of its own.", ""]
        pages_of = [page for page, names in RESULTS.items() if name in names]
        parts += ["## Figures", ""]
        parts += [f"- [{page}](../results/{page}.md): accuracy, bytes, FLOPs" for page in pages_of]
        parts += [] if pages_of else ["None yet."]
        pages[f"methods/{name}.md"] = "\n".join(parts) + "\n"
    return pages | {"methods/index.md": "\n".join(rows) + "\n"}


def settings() -> str:
    """Return the page of all settings."""
    from fedsub_app.config import describe

    about = "Every key, its default, what is allowed, what it means; made from the classes that check them."
    return f"# Settings\n\n{about}\n\n{_settings_table(describe())}\n"


def _settings_table(known: dict[str, str]) -> str:
    rows = ["| key | default and what is allowed | meaning |", "|---|---|---|"]
    for key, text in known.items():
        first, _, rest = text.partition("\n")
        first, rest = (html.escape(re.sub(r"\s+", " ", part)).replace("|", "&#124;") for part in (first, rest))
        rows.append(f"| `{key}` | <code>{first}</code> | {rest} |")
    return "\n".join(rows)


def api() -> str:
    """Return the page of docstrings."""
    parts = ["# API", ""]
    for title, modules in API.items():
        parts += [f"## {title}", ""]
        for module in modules:
            parts += [f"::: {module}", "    options:", "      heading_level: 3", ""]
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Return a docstring as Markdown: reST's double backquotes and roles, and a blank line before a list."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([^\n])\n- ", r"\1\n\n- ", text, count=1)
