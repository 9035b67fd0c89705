"""``fedsub completion``: a shell's completion by shtab from the parser, with names of experiments, tables and keys."""

import argparse
from collections.abc import Iterable
from typing import Any

from fedsub_app.common.errors import UserError

# For both shells, of arguments by their dest: names from here, or a file of one's own.
BASH = """
_fedsub_{what}() {{ compgen -W "{names}" -- "$1"; {files} }}
"""
ZSH = """
_fedsub_{what}() {{ _alternative 'names:{what}:({names})'{files}; }}
"""


def register(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command to those of ``parser``, which it completes."""
    command = commands.add_parser(
        "completion", help='print what completes this command in a shell: eval "$(fedsub completion bash)"'
    )
    command.add_argument("shell", choices=("bash", "zsh"))
    command.set_defaults(command=lambda options: print(completion(parser, options.shell), end=""))


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes ``fedsub`` in ``"bash"`` or ``"zsh"``.

    Raises
    ------
    UserError
        The package shtab, an optional extra, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UserError(
            "completion: needs the package shtab; `pip install -e '.[completion]'` in the checkout"
        ) from None
    from fedsub_app.common.conf_files import experiments, tables
    from fedsub_app.config import defaults

    names: dict[str, Iterable[str]] = {
        "experiment": experiments(),
        "name": tables(),
        "set": [f"{key}=" for key in defaults()],
    }
    preamble = ""
    for what, words in names.items():
        files = what != "set"
        preamble += (BASH if shell == "bash" else ZSH).format(
            what=what,
            names=" ".join(words),
            files={"bash": "compgen -f -X '!*.toml' -- \"$1\";", "zsh": " 'files:file:_files -g \"*.toml\"'"}[shell]
            if files
            else "",
        )
    for command, action in _actions(parser):
        if (command, action.dest) == ("new-method", "name"):
            continue
        if action.dest in names:
            action.complete = {shell: f"_fedsub_{action.dest}"}  # type: ignore[attr-defined]
        elif action.dest in ("folders", "folder", "resume", "starts", "out", "dir"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell, preamble=preamble))


def _actions(parser: argparse.ArgumentParser, command: str = "") -> Iterable[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _actions(below, name)
        else:
            yield command, action
