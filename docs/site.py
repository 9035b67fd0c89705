"""The pages of the site that are not files in docs/: made from README, changelog, bench, methods, settings, commands.

A MkDocs hook (``mkdocs.yml``). Links are those of the repository, bent to the site's pages.
"""

# ruff: noqa: RUF001 - the equations' signs
import html
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "bench.md",
    "docs/notebook.ipynb": "notebook.md",
    "docs/fine-tuning.ipynb": "fine-tuning-notebook.md",
}
PUBLIC = {
    "In a Flower app": ["fedsub_app.library.client.client_app", "fedsub_app.library.loop.start"],
    "Runs from Python": ["fedsub_app.run", "fedsub_app.register"],
    "Finished runs": [
        *(
            "fedsub_app.reports.records.read_run",
            "fedsub_app.reports.records.Record",
            "fedsub_app.reports.curves.RunData",
        ),
        *("fedsub_app.reports.records.grouped", "fedsub_app.reports.html.write_html"),
        *(
            "fedsub_app.analysis.clients.client_of",
            "fedsub_app.models.networks.load_tensors",
            "fedsub_app.runs.config.resolve",
            "fedsub_app.training.problem.Problem",
        ),
    ],
    "Errors": ["fedsub_app.common.errors.UserError", "fedsub_app.runs.directory.RunFailed"],
}
SHORT = {name: f"fedsub.{name.rpartition('.')[2]}" for name in PUBLIC["In a Flower app"]}  # as a user imports them
INTERNAL = {
    "What is learned": ["fedsub_app.training.problem", "fedsub_app.common.tasks"],
    "Methods on the server": ["strategies.base", "strategies.hooks", "strategies.server", "strategies.defences"],
    "Methods on the client": ["client_apps.base", "fedsub_app.training.client", "fedsub_app.training.local"],
    "Masks, means": [
        *("fedsub_app.subnets.averaging", "fedsub_app.subnets.robust", "fedsub_app.subnets.privacy"),
        *("fedsub_app.subnets.masks", "fedsub_app.subnets.sparsity", "fedsub_app.subnets.pruning"),
        "fedsub_app.subnets.norms",
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
FAMILIES = {
    "Sub-networks": (
        "fedpews fedselect fedpart subfedavg ist istprox heterofl fedrolex feddrop fjord fiarse fedpm ssfl feddst "
        "prunefl fedtiny fedrts"
    ),
    "Personal models": (
        "local fedavg-ft ditto fedper fedrep fedbabu lg-fedavg fedpac fedbn apfl fedala per-fedavg pfedme mtl"
    ),
    "One global model": "fedavg fedprox moon scaffold fednova fedadam fedyogi fedadagrad",
}
# Page of results/ -> methods whose figures it has; the baselines stand beside the paper that compares with them.
RESULTS = {
    "fedpews": "fedavg fedprox fedpews",
    "fedselect": "fedselect fedavg-ft ditto fedpac fedper fedrep fedbabu lg-fedavg local fedavg",
    "fedpart": "fedpart fedavg fedprox moon",
    "ist": "ist istprox fednova fedadam fedavg fedprox moon",
    "sub-fedavg": "subfedavg mtl lg-fedavg fedprox local fedavg",
}
SYMBOLS = "w is the global model, w_i client i's model, F_i its loss, m_i its mask, ⊙ a product position by position."
EQUATIONS = {
    "fedavg": "w ← Σ_i (n_i / n) w_i",
    "fedprox": "g_i = ∇F_i(w_i) + mu (w_i - w)",
    "moon": "loss = F_i - mu log[a / (a + b)],  a = e^(cos(z, z_global) / tau),  b = e^(cos(z, z_previous) / tau)",
    "scaffold": "w_i ← w_i - lr (∇F_i(w_i) - c_i + c)        c ← c + mean_i(c_i_new - c_i)",
    "fednova": "w ← w - tau_eff Σ_i p_i (w - w_i) / tau_i",
    "fedadam": "v ← beta2 v + (1 - beta2) d²        w ← w + eta m / (√v + tau),  d = mean_i(w_i - w)",
    "fedyogi": "v ← v - (1 - beta2) d² sign(v - d²)        w ← w + eta m / (√v + tau),  d = mean_i(w_i - w)",
    "fedadagrad": "v ← v + d²        w ← w + eta m / (√v + tau),  d = mean_i(w_i - w)",
    "fedavg-ft": "w_i = w after a few local epochs, for the evaluation alone",
    "ditto": "v_i ← v_i - lr (∇F_i(v_i) + lambda (v_i - w))",
    "fedbn": "w_i = (mean of all other tensors, own BatchNorm)",
    "apfl": "personal model = alpha_i v_i + (1 - alpha_i) w",
    "fedala": "start_i = w_i + (w - w_i) ⊙ W_i,  W_i learned in [0, 1]",
    "per-fedavg": "w_i ← w_i - beta ∇F_i(w_i - alpha ∇F_i(w_i))",
    "pfedme": "theta_i = argmin F_i(theta) + lambda/2 |theta - w_i|²        w_i ← w_i - eta lambda (w_i - theta_i)",
    "fedper": "w_i = (shared body w, own head h_i), trained together",
    "fedrep": "first h_i with w fixed, then w with h_i fixed; w is averaged",
    "fedbabu": "w is trained and averaged, the head stays as it was initialised; for the evaluation all is fine-tuned",
    "lg-fedavg": "w_i = (own body, shared head w)",
    "fedpac": "loss = F_i + lambda |z - mean z of its class|²        h_i ← Σ_j a_ij h_j",
    "fedselect": "m_i ← m_i ∪ positions of the largest |w_i - w_i_before|        w = mean of the others",
    "subfedavg": "m_i ← m_i without the smallest |w_i|        w = Σ_i m_i ⊙ w_i / Σ_i m_i",
    "fedpm": "m_i ~ Bernoulli(sigmoid(s_i)), weights fixed at random        theta = mean_i m_i",
    "ssfl": "one mask m by the clients' mean |w ⊙ ∇F_i|, before round 1        w = mean_i(m ⊙ w_i)",
    "feddst": "m ← m without the smallest |w|, plus the largest |∇F|        w = Σ_i m_i ⊙ w_i / Σ_i m_i",
    "prunefl": "m ← argmax Σ_j m_j mean_i(g_ij²) / (c + Σ_j m_j)        w = mean_i(m ⊙ w_i)",
    "fedtiny": "m = the candidate of least Σ_i F_i, then m without the smallest |w|, plus the largest |mean_i ∇F_i|",
    "fedrts": "m ← the largest draws of Beta(a, b)        a += trust o,  b += trust (1 - o),  o by |w|, |w_i|, ∇F_i",
    "mtl": "loss = F_i + c (|w_i|² + |w_i - mean_j w_j|²)",
    "local": "w_i ← w_i - lr ∇F_i(w_i), and nothing is sent",
    "ist": "hidden units are dealt out: U_1 ∪ … ∪ U_k = all        w[U_i] ← w_i",
    "istprox": "as IST, with g_i = ∇F_i(w_i) + mu (w_i - w[U_i])",
    "heterofl": "w_i = the first r_i of each layer's units        w = Σ_i w_i / clients of a position",
    "fedrolex": "as HeteroFL, with a window of units that moves on by one a round",
    "feddrop": "as HeteroFL, with random units of each layer, drawn for each client and round",
    "fjord": "a mini-batch trains the first p units, p ~ U{p ≤ r_i}; distilled: loss = F(w_r_i) + KL(w_p, w_r_i)",
    "fiarse": "g_i = M ⊙ ∇F_i(w_i ⊙ M) ⊙ (1 + 2 theta |w_i| / (|w_i| + theta)²),  M = |w_i| ≥ theta",
    "fedpart": "round t trains layer group p(t) alone        w[p(t)] = mean_i w_i[p(t)]",
    "fedpews": "warm-up: client i trains w ⊙ m_i        then w = mean_i w_i",
}
SIZE = {"B": 1e-6, "kB": 1e-3, "MB": 1.0}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {target: bent(text_of(ROOT / source), source, target) for source, target in COPIED.items()}
    pages |= methods() | {"settings.md": settings(), "commands.md": commands()}
    pages |= {"api.md": api("API", PUBLIC), "internals.md": api("Internals", INTERNAL)}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def text_of(path: Path) -> str:
    """Return a page's Markdown; a notebook's cells one after the other, each with its outputs."""
    if path.suffix != ".ipynb":
        return path.read_text()
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f'<img alt="Its picture" src="data:image/png;base64,{"".join(picture).strip()}">')
            elif said := "".join(output.get("text", output.get("data", {}).get("text/plain", ""))):
                parts.append(f"```text\n{said.rstrip()}\n```")
    return "\n\n".join(parts)


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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the methods' pages to the menu, a group a family; a method without a family is in the last one."""
    from fedsub_app.runs.methods import METHODS

    groups = {family: names.split() for family, names in FAMILIES.items()}
    named = {name for names in groups.values() for name in names}
    groups[next(reversed(groups))] += [name for name in METHODS if name not in named]
    entries: list[Any] = [{family: [{_title(n): f"methods/{n}.md"} for n in names]} for family, names in groups.items()]
    for entry in config.nav or ():
        if "Methods" in entry:
            entry["Methods"] = [*entry["Methods"], *entries]
    return config


def on_page_content(content: str, **_: Any) -> str:
    """Turn the roles of docstrings, ``:meth:`` and others, into plain code."""
    return re.sub(r":\w+:<code>~?([^<]+)</code>", r"<code>\1</code>", content)


def _title(name: str) -> str:
    from fedsub_app.library.keywords import title

    return title(name)


class Described(griffe.Extension):
    """Read ``name : text`` of our docstrings as a parameter and its meaning; its type is that of the signature."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the text on a line of its own."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^(\w[\w, ]*) : (.+)$", r"\1\n    \2", obj.docstring.value)


def methods() -> dict[str, str]:
    """Return a page for every method: idea, cost, settings, result, deviations from its paper."""
    from fedsub_app.runs.config import describe
    from fedsub_app.runs.methods import METHODS

    known, pages = describe(), {}
    families = {name: family for family, names in FAMILIES.items() for name in names.split()}
    rows = ["# Methods", "", "| method | `method` | family | source |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        rows.append(f"| [{_title(name)}]({name}.md) | `{name}` | {families.get(name, '')} | {method.description} |")
        parts = [f"# {_title(name)}", "", f"{method.description}.", ""]
        parts += [f"    {EQUATIONS[name]}", "", SYMBOLS, ""] if name in EQUATIONS else []
        parts += [f"    fedsub run quickstart/digits method={name} {method.needs}".rstrip(), ""]
        if method.preset:
            parts += ["It sets " + ", ".join(f"`{key} = {value!r}`" for key, value in method.preset.items()) + ".", ""]
        for side, cls in (("server", method.strategy), ("client", method.client)):
            module = sys.modules[cls.__module__]
            parts += [f"## On the {side}", "", f"`{cls.__module__}`", "", _prose(inspect.getdoc(module) or ""), ""]
        parts += ["## Cost", "", _cost(name), "", "## Settings", ""]
        own = {key: text for key, text in known.items() if key.startswith(f"{name}.")}
        parts += [_settings_table(own) if own else "It has no settings of its own.", "", "## Results", ""]
        pages_of = [page for page, names in RESULTS.items() if name in names.split()]
        parts += [f"- [{page}](../results/{page}.md): accuracy, bytes, FLOPs" for page in pages_of]
        parts += [] if pages_of else ["No table of its paper has been run."]
        pages[f"methods/{name}.md"] = "\n".join(parts) + "\n"
    return pages | {"methods/index.md": "\n".join(rows) + "\n"}


def _cost(name: str) -> str:
    """Return a method's bytes and FLOPs on the quickstart, as ``--dry-run`` counts them, or why it cannot run."""
    from fedsub_app.common.errors import UserError
    from fedsub_app.runs.config import resolve
    from fedsub_app.runs.plan import plan

    try:
        text = plan(resolve({"experiment": "quickstart/digits", "method": name}))
    except UserError as error:
        return f"The quickstart does not run it as it is: `{error}`."
    lines = [line.split("  ", 1) for line in text.splitlines() if line.startswith("round ")]
    about = "On the quickstart (ten clients, 77,010 parameters; FedAvg: 3.08 MB down and up), by `--dry-run`:"
    rows = [f"| {what} | {amount.strip()} |" for what, amount in lines]
    return "\n".join([about, "", "| round | sent |", "|---|---|", *rows, "", _sent(lines)])


def _sent(lines: list[list[str]]) -> str:
    """Return a picture of what each kind of round sends; the frame is FedAvg's 3.08 MB."""
    rows = []
    for number, (what, amount) in enumerate(lines):
        for place, (value, unit) in enumerate(re.findall(r"([\d.,]+) (B|kB|MB)\b", amount)[:2]):
            part, y = min(1.1, float(value.replace(",", "")) * SIZE[unit] / 3.08), 44 * number + 18 * place + 4
            name = f"{what.strip()}, {('down', 'up')[place]}"
            rows.append(f'<text x="0" y="{y + 11}">{html.escape(name)}</text>')
            rows.append(f'<rect x="170" y="{y}" width="300" height="13" fill="none" stroke="currentColor"/>')
            rows.append(f'<rect x="170" y="{y}" width="{300 * part:.1f}" height="13" fill="#0072B2"/>')
            rows.append(f'<text x="510" y="{y + 11}">{100 * part:.0f} % of FedAvg</text>')
    size = f'viewBox="0 0 640 {44 * len(lines)}" style="max-width: 640px; font-size: 12px" fill="currentColor"'
    return f'<svg role="img" aria-label="Bytes of a round beside FedAvg\'s" {size}>{"".join(rows)}</svg>'


def settings() -> str:
    """Return the page of all settings: a section a class of keys, then one a method."""
    from fedsub_app.runs.config import describe
    from fedsub_app.settings import Settings

    known = describe()
    sections: dict[str, dict[str, tuple[str, str, str]]] = {}
    for field_name, field in Settings.model_fields.items():
        if not field.exclude:
            home = next(base for base in reversed(Settings.__mro__) if field_name in getattr(base, "model_fields", ()))
            heading = (home.__doc__ or "").partition("\n")[0].rstrip(".")
            sections.setdefault(heading, {})[str(field.alias)] = known[str(field.alias)]
    for key, described in known.items():
        if "." in key:
            sections.setdefault(_title(key.partition(".")[0]), {})[key] = described
    parts = ["# Settings", "", "Every key with its default, its allowed values and its meaning.", ""]
    for heading, keys in sections.items():
        parts += [f"## {heading}", "", _settings_table(keys), ""]
    return "\n".join(parts)


def _settings_table(known: dict[str, tuple[str, str, str]]) -> str:
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, described in known.items():
        words = (re.sub(r"\s+", " ", part).strip() for part in described)
        default, allowed, rest = (html.escape(part, quote=False).replace("|", "&#124;") for part in words)
        rest = re.sub("`([^`]+)`", r"<code>\1</code>", _prose(rest))  # in Markdown's own code nothing is escaped
        rows.append(f'| <code id="{key}">{key}</code> | <code>{default}</code> | {allowed} | {rest} |')
    return "\n".join(rows)


def commands() -> str:
    """Return the page of the command, as Typer writes it."""
    import click
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from fedsub_app.cli.main import app

    root = get_command(app)
    groups: list[Any] = [root]
    for group in groups:
        for command in group.commands.values():
            command.short_help = (command.help or "").split("\n\n")[0]  # Typer's own is cut after 45 characters
            groups += [command] if hasattr(command, "commands") else []
    text = get_docs_for_click(obj=root, ctx=click.Context(root, info_name="fedsub"), name="fedsub")
    return text.replace("# `fedsub`", "# Commands", 1)


def api(title: str, modules_of: dict[str, list[str]]) -> str:
    """Return a page of docstrings."""
    parts = [f"# {title}", ""]
    for heading, names in modules_of.items():
        parts += [f"## {heading}", ""]
        for name in names:
            parts += [f"::: {name}", "    options:", "      heading_level: 3"]
            parts += [f"      heading: {SHORT[name]}"] if name in SHORT else []
            parts.append("")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Return a docstring as Markdown: reST's double backquotes and roles, and a blank line before a list."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([^\n])\n- ", r"\1\n\n- ", text, count=1)
