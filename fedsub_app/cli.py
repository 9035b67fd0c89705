"""The ``fedsub`` command: run, reproduce, report, list, and what Flower needs on this machine."""

import argparse
import logging
import sys
from pathlib import Path

from fedsub_app.common.errors import UserError

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 the run failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    logging.getLogger("fedsub").setLevel(logging.INFO)
    try:
        return int(options.command(options) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedsub", description="Run, compare and deploy subnetwork federated learning."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run an experiment on one of the three engines")
    run.add_argument("experiment", nargs="?", default="", help="conf/<experiment>.toml (default: none)")
    run.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    run.add_argument(
        "--engine",
        default="local",
        metavar="NAME",
        help="local: in this process (default); local-simulation: Flower on Ray; or another Flower connection",
    )
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this directory")
    run.set_defaults(command=_run)

    reproduce = commands.add_parser(
        "reproduce", help="run a table's experiments over seeds, beside the paper's numbers"
    )
    reproduce.add_argument("name", help="a table, see `fedsub list tables`")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the table's)")
    reproduce.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting in every run"
    )
    reproduce.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: the cores)")
    reproduce.add_argument("--out", type=Path, metavar="DIR", help="default: runs/reproduce/<name>")
    reproduce.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only this method or setting; may be given often"
    )
    reproduce.set_defaults(command=_reproduce)

    report = commands.add_parser(
        "report", help="draw and compare runs: accuracy against rounds, bytes, FLOPs and seconds"
    )
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    report.add_argument("--out", type=Path, default=Path("curves.png"), metavar="FILE")
    report.set_defaults(command=_report)

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
    setup.set_defaults(command=_setup)
    env = commands.add_parser("env", help='print what a shell needs where setup did not run: eval "$(fedsub env)"')
    env.set_defaults(command=_env)
    return parser


def _run(options: argparse.Namespace) -> int:
    from fedsub_app import flower

    waking = flower.wake(options.engine) if options.engine != "local" else None
    from fedsub_app.config import parse_pairs

    overrides = parse_pairs(options.set)
    if options.experiment:
        overrides["experiment"] = options.experiment
    if options.resume:
        overrides |= {"run-dir": str(options.resume.resolve()), "resume": True}
    if options.engine == "local":
        return _run_local(overrides)
    return flower.run(options.engine, overrides, waking)


def _run_local(overrides: dict[str, str | int | float | bool]) -> int:
    from fedsub_app.client_app import app
    from fedsub_app.federation.local_grid import LocalGrid
    from fedsub_app.runs.directory import RunFailed, settings_of
    from fedsub_app.server_app import log_to_stdout, run_and_report

    log_to_stdout()
    try:
        run_and_report(LocalGrid(app, overrides), settings_of(overrides))
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from fedsub_app.config import parse_pairs
    from fedsub_app.reproduce import reproduce

    overrides = parse_pairs(options.set)
    return reproduce(options.name, options.seeds, overrides, options.workers, options.out, options.only)


def _report(options: argparse.Namespace) -> int:
    from fedsub_app.runs.report import compare, compare_costs, draw_curves

    print(draw_curves(options.folders, options.out))
    if len(options.folders) > 1:
        print(compare(options.folders))
        print(f"\n{compare_costs(options.folders)}".rstrip())
    return 0


def _analyse(options: argparse.Namespace) -> int:
    if options.approximation is not None:
        from fedsub_app.runs.approximation import approximation

        if options.approximation < 1:
            raise UserError(f"--approximation {options.approximation}: must be 1 or more")
        paths = approximation(options.folder, options.approximation, options.starts)
    else:
        from fedsub_app.runs.analysis import analyse

        paths = analyse(options.folder, options.samples)
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
    from fedsub_app import flower

    for line in flower.setup():
        print(line)
    return 0


def _env(options: argparse.Namespace) -> int:
    from fedsub_app import flower

    for name, value in flower.environment().items():
        print(f'export {name}="${{{name}:-{value}}}"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
