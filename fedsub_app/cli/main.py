"""The ``fedsub`` command: run, reproduce, report, list, and what Flower needs on this machine."""

import argparse
import gc
import logging
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsub_app.cli import sweep as cli_sweep
from fedsub_app.common.errors import UserError, between
from fedsub_app.deployment.command import add_federation

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C."""
    options = _parser().parse_args(arguments)
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
    finally:
        gc.unfreeze()
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedsub", description="Run, compare and deploy subnetwork federated learning."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions of fedsub and of what it runs on")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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

    reproduce = commands.add_parser(
        "reproduce", help="run a table's experiments over seeds, beside the paper's numbers"
    )
    reproduce.add_argument("name", help="a table, see `fedsub list tables`, or the path of a TOML file")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the table's)")
    reproduce.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting in every run"
    )
    reproduce.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: the cores)")
    reproduce.add_argument("--out", type=Path, metavar="DIR", help="default: $FEDSUB_RUNS/reproduce/<name>")
    reproduce.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this method or setting; may be given often"
    )
    reproduce.set_defaults(command=_reproduce)

    cli_sweep.register(commands)

    report = commands.add_parser(
        "report", help="draw and compare runs: accuracy against rounds, bytes, FLOPs and seconds"
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="directories of runs")
    report.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="the picture, or a folder for all files (default: the run's own, or a new one in $FEDSUB_RUNS/reports)",
    )
    report.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="also one HTML page with everything, and its numbers as CSV and JSON (default: report.html there)",
    )
    report.set_defaults(command=_report)

    export = commands.add_parser("export", help="print the rounds of runs, or their clients' numbers, as CSV")
    export.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="directories of runs")
    export.add_argument("--clients", action="store_true", help="a row a client and evaluation instead of one a round")
    export.add_argument("--out", type=Path, metavar="FILE", help="write it there")
    export.set_defaults(command=_export)

    analyse = commands.add_parser(
        "analyse", help="draw a run's masks, the activations of its units and its clients' accuracies"
    )
    analyse.add_argument("folder", type=Path, metavar="DIR")
    analyse.add_argument("--samples", type=int, default=256, metavar="N", help="training samples of each client")
    analyse.add_argument(
        "--approximation",
        type=int,
        metavar="ROUNDS",
        help="instead: so many rounds from each checkpoint, federated and central; the cosine of both directions",
    )
    analyse.add_argument("--starts", type=Path, metavar="DIR", help="with it: start from the checkpoints of this run")
    analyse.set_defaults(command=_analyse)

    names = commands.add_parser("list", help="methods, datasets, models, experiments, tables, settings")
    names.add_argument("what", nargs="?", choices=tuple(_LISTS), help="default: all but the settings")
    names.add_argument("--toml", action="store_true", help="settings: as pyproject.toml has to name them to Flower")
    names.set_defaults(command=_list)

    setup = commands.add_parser("setup", help="register the Flower connection local-simulation; once per machine")
    setup.add_argument(
        "--cluster",
        type=int,
        metavar="N",
        help="also ray-cluster: N simulated nodes on a Ray cluster that runs already",
    )
    setup.set_defaults(command=_setup)
    env = commands.add_parser("env", help='print what a shell needs where setup did not run: eval "$(fedsub env)"')
    env.set_defaults(command=_env)
    add_federation(commands)

    method = commands.add_parser("new-method", help="write the files of a method of your own, to be filled in")
    method.add_argument("name", metavar="NAME", help="of the setting `method`: fedfoo")
    method.set_defaults(command=_new_method)
    completion = commands.add_parser(
        "completion", help='print what completes this command in a shell: eval "$(fedsub completion bash)"'
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(command=_completion)
    return parser


class _Version(argparse.Action):
    """Print versions and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        packages = [f"{name} {version(name)}" for name in ("fedsub", "flwr", "ray", "torch")]
        print(", ".join([*packages, f"Python {platform.python_version()}"]))
        parser.exit()


def _run(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    if options.workers is not None and options.engine != "local":  # before a SuperLink is started
        raise UserError(
            f"--workers {options.workers}: of the local engine; --engine {options.engine} has its own nodes"
        )
    waking = flower.wake(options.engine) if options.engine != "local" and not options.dry_run else None
    overrides = _overrides(options)
    if options.dry_run:
        from fedsub_app.runs.directory import settings_of
        from fedsub_app.runs.plan import plan

        print(plan(settings_of(overrides)))
        return 0
    if options.engine == "local":
        return _run_local(overrides, options.workers)
    return flower.run(options.engine, overrides, waking)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the single keys that a command line of ``fedsub run`` asks for."""
    from fedsub_app.config import is_file, parse_pairs

    overrides = parse_pairs(options.set)
    if options.experiment:
        name = str(Path(options.experiment).absolute()) if is_file(options.experiment) else options.experiment
        _give(overrides, {"experiment": name}, options.experiment)
    if options.resume:
        _give(overrides, {"run-dir": str(options.resume.resolve()), "resume": True}, f"--resume {options.resume}")
    return overrides


def _give(overrides: dict[str, str | int | float | bool], values: dict[str, str | bool], said: str) -> None:
    """Set keys that have an argument of their own, ``said``."""
    for key in values.keys() & overrides.keys():
        raise UserError(f"-s {key}={overrides[key]}: not beside {said}, which sets {key}")
    overrides |= values


def _run_local(overrides: dict[str, str | int | float | bool], workers: int | None) -> int:
    gc.disable()  # what torch and Flower load is there to stay: looking through it is a tenth of the start
    from fedsub_app.engines import log_to_stdout, run_local
    from fedsub_app.runs.directory import RunFailed

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
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from fedsub_app.config import parse_pairs
    from fedsub_app.studies.reproduce import reproduce

    overrides = parse_pairs(options.set)
    seeds, workers = between("--seeds", options.seeds, 1000), between("--workers", options.workers, 1000)
    return reproduce(options.name, seeds, overrides, workers, options.out, options.only)


def _report(options: argparse.Namespace) -> int:
    from fedsub_app.reports.compare import comparisons
    from fedsub_app.reports.html import write_html
    from fedsub_app.reports.pictures import draw_curves
    from fedsub_app.reports.records import grouped
    from fedsub_app.runs.directory import reports_folder

    folders, page = options.folders, options.html
    if page and page != Path() and page.suffix not in (".html", ".htm"):
        raise UserError(f"--html {page}: must end in .html; directories of runs stand before it")
    groups = grouped(folders)
    out = options.out or (folders[0] if len(folders) == 1 else reports_folder())
    picture = out if out.suffix and not out.is_dir() else out / ("curve.png" if len(folders) == 1 else "curves.png")
    if picture.parent == out:
        out.mkdir(parents=True, exist_ok=True)
    print(draw_curves(groups, picture))
    if page is not None:
        target = picture.parent / "report.html" if page == Path() else page
        words = ["fedsub report", *(shlex.quote(str(folder)) for folder in folders), "--html"]
        title = ", ".join(dict.fromkeys(group.section for group in groups)) + ": "
        title += ", ".join(dict.fromkeys(str(group.records[0].settings["method"]) for group in groups))
        for path in write_html(groups, target, title, " ".join(words)):
            print(path)
    if compared := comparisons(folders):
        print(compared)
    return 0


def _export(options: argparse.Namespace) -> int:
    from fedsub_app.reports.records import export

    text = export(options.folders, options.clients)
    if options.out:
        options.out.write_text(text)
        print(options.out)
    else:
        print(text, end="")
    return 0


def _analyse(options: argparse.Namespace) -> int:
    rounds = between("--approximation", options.approximation, 1_000_000)
    samples = between("--samples", options.samples, 1_000_000)
    if options.starts and not rounds:
        raise UserError(f"--starts {options.starts}: only with --approximation ROUNDS")
    if rounds:
        from fedsub_app.analysis.approximation import approximation

        paths = approximation(options.folder, rounds, options.starts)
    else:
        from fedsub_app.analysis.activations import analyse

        paths = analyse(options.folder, samples or 1)
    for path in paths:
        print(path)
    return 0


def _methods() -> dict[str, str]:
    from fedsub_app.methods import METHODS

    return {name: method.about for name, method in METHODS.items()}


def _datasets() -> dict[str, str]:
    from fedsub_app.data import dataset_names

    return dataset_names()


def _models() -> dict[str, str]:
    from fedsub_app.models import model_names

    return model_names()


def _experiments() -> dict[str, str]:
    from fedsub_app.config import experiments

    return {name: _first_comment(path) for name, path in experiments().items()}


def _tables() -> dict[str, str]:
    from fedsub_app.config import tables

    return {name: _first_comment(path) for name, path in tables().items()}


def _first_comment(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("#") else ""


def _settings() -> dict[str, str]:
    from fedsub_app.config import describe

    return describe()


_LISTS = {
    "methods": _methods,
    "datasets": _datasets,
    "models": _models,
    "experiments": _experiments,
    "tables": _tables,
    "settings": _settings,
}


def _list(options: argparse.Namespace) -> int:
    if options.toml:
        if options.what != "settings":
            raise UserError("--toml: only of the settings, `fedsub list settings --toml`")
        from fedsub_app.config import as_toml

        print(as_toml(), end="")
        return 0
    for what in [options.what] if options.what else [name for name in _LISTS if name != "settings"]:
        entries = _LISTS[what]()
        print(f"{what}:")
        width = max(map(len, entries), default=0)
        for name, about in entries.items():
            print(f"  {name:<{width}}  {about}".rstrip().replace("\n", "\n" + " " * (width + 4)))
    return 0


def _setup(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    if options.cluster is not None and options.cluster < 1:
        raise UserError(f"--cluster {options.cluster}: must be at least 1")
    for line in flower.setup(options.cluster):
        print(line)
    return 0


def _env(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    for name, value in flower.environment().items():
        print(f'export {name}="${{{name}:-{value}}}"')
    return 0


def _new_method(options: argparse.Namespace) -> int:
    from fedsub_app.cli.new_method import new_method

    for path in new_method(options.name):
        print(path)
    print("left to you: the method, its paper in the heads, rows in README.md, docs/bad-input.md and CHANGELOG.md")
    return 0


def _completion(options: argparse.Namespace) -> int:
    from fedsub_app.cli.completion import completion

    print(completion(_parser(), options.shell), end="")
    return 0
