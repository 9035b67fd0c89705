"""``fedsub list``, ``help`` and ``cp``: names and settings, a method or a command, an experiment of one's own."""

import ast
import re
import shlex
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import click
from typer import Argument, Context

from fedsub_app.cli.arguments import complete_experiments, complete_methods
from fedsub_app.common.conf_files import experiments, tables
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.spelling import near
from fedsub_app.common.text import markdown, show

SETTING = ("key", "default", "allowed", "meaning")
Kind = StrEnum("Kind", "METHODS DATASETS MODELS EXPERIMENTS TABLES SETTINGS")


def list_names(what: Annotated[Kind | None, Argument(help="default: all but the settings")] = None) -> None:
    """List methods, datasets, models, experiments, tables or settings."""
    texts = []
    for kind in [what] if what else list(Kind)[:-1]:
        header = SETTING if kind is Kind.SETTINGS else (kind[:-1], "about")
        rows = [[name, *columns] for name, columns in _entries(kind).items()]
        texts.append(f"## {kind.capitalize()}\n\n{markdown(header, rows)}")
    show("\n\n".join(texts))


def _entries(kind: Kind) -> dict[str, list[str]]:
    """Return the names of a kind, each with its cells; these packages are loaded without torch, but on demand."""
    match kind:
        case Kind.METHODS:
            from fedsub_app.runs.config import register_installed
            from fedsub_app.runs.methods import METHODS

            register_installed()
            return {name: [method.description] for name, method in METHODS.items()}
        case Kind.MODELS:
            from fedsub_app.models import model_names

            return {name: [about] for name, about in model_names().items()}
        case Kind.SETTINGS:
            from fedsub_app.runs.config import describe

            return {key: [*cells] for key, cells in describe().items()}
        case Kind.DATASETS:
            from fedsub_app.data import dataset_names

            return {name: [about] for name, about in dataset_names().items()}
    files = experiments() if kind is Kind.EXPERIMENTS else tables()
    return {name: [path.read_text("utf-8").partition("\n")[0].strip("# ")] for name, path in files.items()}


def copy(
    name: Annotated[str, Argument(help="an experiment or a table", autocompletion=complete_experiments)],
    target: Annotated[Path, Argument(metavar="FILE", help="a new file, such as my.toml")],
) -> None:
    """Copy an experiment or a table to a file that you can change and run."""
    files = experiments() | tables()
    if name not in files:
        hint = near(name, files, "`fedsub list experiments` and `fedsub list tables` show the names")
        raise UserError(f"cp {name}: {hint}")
    if target.suffix != ".toml":
        raise UserError(f"cp {name} {target}: the file's name must end in .toml")
    if target.exists():
        raise UserError(f"{target}: there already")
    # An experiment that extends its neighbour names it in full, so that it is found from anywhere.
    paper = files[name].parent.name
    text = re.sub(r'(?m)^extends = "([^"/]+)"', rf'extends = "{paper}/\1"', files[name].read_text("utf-8"))
    write_atomic(target, text.encode())
    print(f"fedsub {'run' if name in experiments() else 'reproduce'} {shlex.quote(str(target))}")


def explain(
    context: Context,
    topic: Annotated[
        str | None, Argument(help="a method, a setting or a command", autocompletion=complete_methods)
    ] = None,
) -> None:
    """Explain a method (idea, paper, settings, example), a setting or a command."""
    from fedsub_app.runs.config import check
    from fedsub_app.runs.methods import METHODS

    parent = context.find_root()
    group = parent.command
    assert isinstance(group, click.Group)
    command = group.get_command(parent, topic) if topic else group
    if command:
        with command.make_context(topic or "fedsub", ["--help"], parent=parent if topic else None):
            return
    check({"method": str(topic)})
    settings = _entries(Kind.SETTINGS)
    if topic in METHODS:
        text = about_method(str(topic))
    elif topic in settings:
        text = markdown(SETTING, [[str(topic), *settings[topic]]])
    else:
        hint = near(str(topic), [*METHODS, *group.commands, *settings], "`fedsub list` shows methods and other names")
        raise UserError(f"help {topic}: no such method, setting or command; {hint}")
    show(text)


def about_method(name: str) -> str:
    """Return a method's idea, paper, settings and an example, as Markdown."""
    from fedsub_app.common.own_code import section_of
    from fedsub_app.runs.config import describe
    from fedsub_app.runs.methods import METHODS

    method = METHODS[name]
    rows = [[key, *cells] for key, cells in describe(f"{section_of(name)}.").items()]
    keys = markdown(SETTING, rows) if rows else "It has no settings of its own."
    preset = ", ".join(f"`{key} = {value}`" for key, value in method.preset.items())
    place = vars(method)["strategy"]  # its module is not imported for its docstring: that would load torch
    spec = find_spec(f"strategies.{place.partition(':')[0]}" if isinstance(place, str) else place.__module__)
    assert spec
    head = ast.get_docstring(ast.parse(Path(str(spec.origin)).read_text("utf-8"))) or ""
    parts = [f"# {name}", f"{method.description}.", head.replace("``", "`")]
    parts += [f"It sets {preset}."] if preset else []
    return "\n\n".join([*parts, keys, f"    fedsub run quickstart/digits method={name} {method.needs}".rstrip()])
