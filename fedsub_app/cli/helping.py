"""``fedsub help``: a method, or a command."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import click
from typer import Argument, Context

from fedsub_app.cli.arguments import complete_methods
from fedsub_app.common.errors import UserError
from fedsub_app.common.spelling import near
from fedsub_app.common.text import markdown, show


def explain(
    context: Context,
    topic: Annotated[str | None, Argument(help="a method or a command", autocompletion=complete_methods)] = None,
) -> None:
    """Explain a method (idea, paper, settings, example) or a command."""
    from fedsub_app.config import check
    from fedsub_app.methods import METHODS

    parent = context.find_root()
    group = parent.command
    assert isinstance(group, click.Group)
    command = group.get_command(parent, topic) if topic else group
    if command:
        with command.make_context(
            f"fedsub {topic}" if topic else "fedsub", ["--help"], parent=parent if topic else None
        ):
            return
    check({"method": str(topic)})
    if topic not in METHODS:
        hint = near(str(topic), [*METHODS, *group.commands], "`fedsub list methods` shows the methods")
        raise UserError(f"help {topic}: no such method or command; {hint}")
    show(about_method(str(topic)))


def about_method(name: str) -> str:
    """Return a method's idea, paper, settings and an example, as Markdown."""
    from fedsub_app.common.own_code import section_of
    from fedsub_app.config import describe
    from fedsub_app.methods import METHODS

    method = METHODS[name]
    rows = [[key, *cells] for key, cells in describe().items() if key.startswith(f"{section_of(name)}.")]
    keys = markdown(("key", "default", "allowed", "meaning"), rows) if rows else "It has no settings of its own."
    preset = ", ".join(f"`{key} = {value}`" for key, value in method.preset.items())
    place = vars(method)["strategy"]  # its module is not imported for its docstring: that would load torch
    spec = find_spec(f"strategies.{place.partition(':')[0]}" if isinstance(place, str) else place.__module__)
    assert spec
    head = ast.get_docstring(ast.parse(Path(str(spec.origin)).read_text())) or ""
    parts = [f"# {name}", f"{method.description}.", head.replace("``", "`")]
    parts += [f"It sets {preset}."] if preset else []
    return "\n\n".join([*parts, keys, f"    fedsub run quickstart/digits method={name}"])
