"""``fedsub run``: one run on the local engine, on Flower's simulation or on a federation."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from fedsub_app.cli.arguments import Pairs, Words, split
from fedsub_app.common.conf_files import is_file
from fedsub_app.common.errors import UserError
from fedsub_app.common.late import uncollected
from fedsub_app.common.spelling import Value, parse_pairs


def run(
    words: Words = None,
    pairs: Pairs = None,
    engine: Annotated[
        str, Option(metavar="NAME", help="local: this process; local-simulation: Flower on Ray; or a Flower connection")
    ] = "local",
    workers: Annotated[
        int | None,
        Option(metavar="N", min=1, max=1000, help="processes of the local engine (default: the cores, or GPUs)"),
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="continue the run of this directory; with num-rounds=N for more rounds")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="print settings, clients, bytes, FLOPs, memory; train nothing")
    ] = False,
) -> int:
    """Run an experiment; without arguments the quickstart, with settings alone the defaults and these settings."""
    from fedsub_app.deployment import flower
    from fedsub_app.runs.recorded import RunFailed, settings_of

    if workers is not None and engine != "local":  # before a SuperLink is started
        raise UserError(f"--workers {workers}: of the local engine; --engine {engine} has its own nodes")
    if engine != "local" and not flower.is_checkout():
        other = "an installed package has the local engine, and fedsub.client_app for a Flower app of your own"
        raise UserError(f"--engine {engine}: needs a checkout of fedsub, which Flower bundles; {other}")
    overrides = overrides_of(words, pairs, resume)
    settings = settings_of(overrides)  # bad input is said before torch is loaded
    if dry_run:
        with uncollected():
            from fedsub_app.runs.plan import plan

        print(plan(settings))
        return 0
    try:
        if engine != "local":
            return flower.run(engine, overrides)
        from fedsub_app.deployment.engines import log_lines, run_local

        log_lines()
        run_local(overrides, workers)
        return 0
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


def overrides_of(
    words: Sequence[str] | None, pairs: Sequence[str] | None = None, resume: Path | None = None
) -> dict[str, Value]:
    """Return the single keys that a command line of ``fedsub run`` asks for."""
    experiment, given = split(words, pairs)
    if not experiment and not given and not resume:
        experiment = "quickstart/digits"
    overrides = parse_pairs(given)
    if experiment:
        name = str(Path(experiment).absolute()) if is_file(experiment) else experiment
        _set_keys(overrides, {"experiment": name}, experiment)
    if resume:
        _set_keys(overrides, {"run-dir": str(resume.resolve()), "resume": True}, f"--resume {resume}")
    return overrides


def _set_keys(overrides: dict[str, Value], values: dict[str, str | bool], argument: str) -> None:
    for key in values.keys() & overrides.keys():
        raise UserError(f"-s {key}={overrides[key]}: not beside {argument}, which sets {key}")
    overrides |= values
