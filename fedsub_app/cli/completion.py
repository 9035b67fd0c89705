"""``fedsub completion``: a shell's completion, by Typer; each word is asked of the command itself."""

import os
from enum import StrEnum
from typing import Annotated

from click import Command
from typer import Argument
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script
from typer.completion import shell_complete

VARIABLE = "_FEDSUB_COMPLETE"


class Shell(StrEnum):
    """Shells that are completed."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, Argument()]) -> None:
    """Print what completes this command in a shell: eval "$(fedsub completion bash)"."""
    print(get_completion_script(prog_name="fedsub", complete_var=VARIABLE, shell=shell))


def answer(command: Command) -> int:
    """Print the words that complete what the shell has passed in its variables."""
    completion_init()
    return shell_complete(command, {}, "fedsub", VARIABLE, os.environ[VARIABLE])
