"""The ``fedsub`` command: its parser, a module a command, and what becomes of errors."""

import argparse
import logging
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

from fedsub_app.cli import (
    analyse,
    completion,
    export,
    federation,
    listing,
    new_method,
    report,
    reproduce,
    run,
    setup,
    sweep,
)
from fedsub_app.common.errors import UserError

EXIT_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C."""
    options = build_parser().parse_args(arguments)
    logging.getLogger("fedsub").setLevel(logging.INFO)
    try:
        return int(options.command(options) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `fedsub export … | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python's exit says it again
        return 0
    except OSError as error:  # a file that a command reads or writes; a run says so itself
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as stop:
        print(": ".join(["stopped", *map(str, stop.args)]), file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the namespace's ``command`` runs the chosen command."""
    parser = argparse.ArgumentParser(
        prog="fedsub", description="Run, compare and deploy subnetwork federated learning."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions of fedsub and of what it runs on")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for module in (run, reproduce, sweep, report, export, analyse, listing, setup, federation, new_method):
        module.register(commands)
    completion.register(commands, parser)
    return parser


class _Version(argparse.Action):
    """Print versions and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        packages = [f"{name} {version(name)}" for name in ("fedsub", "flwr", "ray", "torch")]
        print(", ".join([*packages, f"Python {platform.python_version()}"]))
        parser.exit()
