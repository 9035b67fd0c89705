"""``fedsub run``: one run on the local engine, on Flower's simulation or on a federation."""

import argparse
import gc
import logging
import sys
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError, between

EXIT_FAILED = 1


def register(commands: Any) -> None:
    """Add the command to those of argparse."""
    run = commands.add_parser("run", help="run an experiment on one of the three engines")
    run.add_argument(
        "experiment",
        nargs="?",
        default="",
        help="conf/<experiment>.toml, or the path of a TOML file (default: none)",
    )
    run.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    run.add_argument(
        "--engine",
        default="local",
        metavar="NAME",
        help="local: in this process (default); local-simulation: Flower on Ray; or another Flower connection",
    )
    run.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of the local engine (default: the cores that this process may use; the GPUs where they train)",
    )
    run.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue the run in this directory; with -s num-rounds=N for more rounds",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="say what the run would be: settings, clients, bytes, FLOPs, memory"
    )
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    if options.workers is not None and options.engine != "local":  # before a SuperLink is started
        raise UserError(
            f"--workers {options.workers}: of the local engine; --engine {options.engine} has its own nodes"
        )
    waking = flower.wake(options.engine) if options.engine != "local" and not options.dry_run else None
    overrides = overrides_of(options)
    if options.dry_run:
        from fedsub_app.runs.plan import plan
        from fedsub_app.runs.recorded import settings_of

        print(plan(settings_of(overrides)))
        return 0
    if options.engine == "local":
        return _run_local(overrides, options.workers)
    return flower.run(options.engine, overrides, waking)


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the single keys that a command line of ``fedsub run`` asks for."""
    from fedsub_app.common.conf_files import is_file
    from fedsub_app.config import parse_pairs

    overrides = parse_pairs(options.set)
    if options.experiment:
        name = str(Path(options.experiment).absolute()) if is_file(options.experiment) else options.experiment
        _set_keys(overrides, {"experiment": name}, options.experiment)
    if options.resume:
        _set_keys(overrides, {"run-dir": str(options.resume.resolve()), "resume": True}, f"--resume {options.resume}")
    return overrides


def _set_keys(overrides: dict[str, str | int | float | bool], values: dict[str, str | bool], argument: str) -> None:
    """Set the keys that a command-line argument stands for."""
    for key in values.keys() & overrides.keys():
        raise UserError(f"-s {key}={overrides[key]}: not beside {argument}, which sets {key}")
    overrides |= values


def _run_local(overrides: dict[str, str | int | float | bool], workers: int | None) -> int:
    gc.disable()  # what torch and Flower load is there to stay: looking through it is a tenth of the start
    from fedsub_app.engines import log_to_stdout, run_local
    from fedsub_app.runs.recorded import RunFailed

    gc.freeze()
    gc.enable()
    log_to_stdout()
    try:
        run_local(overrides, between("--workers", workers, 1000))
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        for handler in logging.getLogger("fedsub").handlers:
            handler.close()  # which takes a live line away, before anything is said on stderr
        gc.unfreeze()
    return 0
