"""``fedsub help``: a method, or a command."""

from typing import Annotated

import click
from typer import Argument, Context

from fedsub_app.cli.arguments import _starting
from fedsub_app.cli.listing import cells_of
from fedsub_app.cli.names import known
from fedsub_app.common.errors import UserError
from fedsub_app.common.spelling import near
from fedsub_app.common.text import markdown, show


def _topics(incomplete: str) -> list[str]:
    return _starting(known()["methods"], incomplete)


def explain(
    context: Context,
    topic: Annotated[str | None, Argument(help="a method or a command", autocompletion=_topics)] = None,
) -> None:
    """Explain a method (idea, paper, settings, example) or a command."""
    parent = context.find_root()
    group = parent.command
    assert isinstance(group, click.Group)
    command = group.get_command(parent, topic) if topic else group
    if command:
        with command.make_context(
            f"fedsub {topic}" if topic else "fedsub", ["--help"], parent=parent if topic else None
        ):
            return
    if topic not in known()["methods"]:
        hint = near(str(topic), [*known()["methods"], *group.commands], "`fedsub list methods` shows the methods")
        raise UserError(f"help {topic}: no such method or command; {hint}")
    show(about_method(str(topic)))


def about_method(name: str) -> str:
    """Return a method's idea, paper, settings and an example, as Markdown."""
    method = known()["methods"][name]
    rows = [[key, *cells_of(text)] for key, text in known()["settings"].items() if key.startswith(f"{name}.")]
    keys = markdown(("key", "default", "allowed", "meaning"), rows) if rows else "It has no settings of its own."
    preset = ", ".join(f"`{key} = {value}`" for key, value in method["preset"].items())
    parts = [f"# {name}", f"{method['paper']}.", method["about"].replace("``", "`")]
    parts += [f"It sets {preset}."] if preset else []
    return "\n\n".join([*parts, keys, f"    fedsub run quickstart/digits method={name}"])
