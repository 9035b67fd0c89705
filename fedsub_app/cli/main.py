"""The ``fedsub`` command: its groups of commands, a module a command, and what becomes of errors."""

import atexit
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import distributions, version
from typing import Annotated

import click
import typer
from typer.main import get_command

from fedsub_app.cli import federation, listing, new_method, reports, run, studies
from fedsub_app.common.errors import UserError

EXIT_BAD_INPUT = 2
COMPLETE = "_FEDSUB_COMPLETE"  # by it a shell asks for the words that complete a line
GROUPS: dict[str, dict[str, Callable[..., object]]] = {
    "Run": {"run": run.run, "reproduce": studies.reproduce, "sweep": studies.sweep},
    "Look at runs": {"report": reports.report, "analyse": reports.analyse, "export": reports.export},
    "Use a model": {"predict": reports.predict},
    "Learn": {"list": listing.list_names, "help": listing.explain, "cp": listing.copy},
    "This machine": {"setup": federation.setup, "stop": federation.stop},
    "Extend": {"new-method": new_method.new_method},
}
app = typer.Typer(
    help="Run, compare and deploy sub-network federated learning.",
    epilog="`fedsub run` without a name is the quickstart. `fedsub COMMAND --help` shows a command's options.",
    suggest_commands=False,  # click suggests them
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group, commands in GROUPS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=group)(command)
app.add_typer(federation.app, name="federation", rich_help_panel="Deploy")


def _print_version(wanted: bool) -> None:
    if wanted:
        installed = {name.metadata["Name"] for name in distributions(name="ray")}  # a node has none
        packages = [f"{name} {version(name)}" for name in ("fedsub", "flwr", *installed, "torch")]
        print(", ".join([*packages, f"Python {platform.python_version()}"]))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the versions of fedsub and its packages"
        ),
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C."""
    command = get_command(app)
    if COMPLETE in os.environ:
        command.main(prog_name="fedsub")  # answers the shell and exits
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - a shell's `>&-` leaves none
    logging.getLogger("fedsub").setLevel(logging.INFO)
    code = 0
    try:
        with command.make_context("fedsub", words or ["--help"]) as context:
            code = int(command.invoke(context) or 0)
            print(end="", flush=True)  # the last lines may find the pipe closed or the disk full
            return code
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.ctx.get_help())
        return EXIT_BAD_INPUT
    except (UserError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"error: {message}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:  # a package of an extra; one of ours is a fault
        if (error.name or "fedsub_app").partition(".")[0] in ("fedsub", "fedsub_app", "strategies", "client_apps"):
            raise
        print(f"error: needs the package {error.name}: `pip install 'fedsub[run]'`", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `fedsub export … | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python's exit says it again
        return code
    except OSError as error:  # a file that a command reads or writes; a run says so itself
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as stop:
        while not stop.args and isinstance(stop.__context__, KeyboardInterrupt):  # the first Ctrl-C says what goes on
            stop = stop.__context__
        print(": ".join(["stopped", *map(str, stop.args)]), file=sys.stderr)
        return 130


def process() -> None:
    """Run :func:`main` as a process, and end it: Python would take all of torch apart first, for 0.6 s."""
    with suppress(AttributeError):  # a shell's `>&-` leaves none
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # its locale may lack letters
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more Ctrl-C ends it without a traceback
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError):  # main has said it
        print(end="", flush=True)
    os._exit(code)
