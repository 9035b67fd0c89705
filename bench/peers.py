"""Rounds by other frameworks and by fedsub: seconds of a round, over those of a plain torch loop.

::

    python -m bench.peers install FOLDER    # BlazeFL, fluke, pfl and FL-bench, each into a folder of its own
    python -m bench.peers run FOLDER [--network NAME…] [--clients N…] [--peers NAME…] [--rounds 4] [--repeats 3]
                                     [--device cuda]
    python -m bench.peers table

All peers do the same training: images of CIFAR's shape that a class has in common and noise, shared out to the clients
once; batches of 10, SGD, one thread a process, no evaluation. A run is a process of its own, the peers take turns, and
the first round does not count. The steps and samples that were counted are compared with the loop's, and the loss must
fall as the loop's does (``same``). Each run is a line of bench/out/peers.jsonl; a run that is there is not repeated.

FedAvg has one epoch. Sub-FedAvg (fedsub) and the masked loop have two; the first round ends with each client's smaller
half of each layer's weights switched off. The frameworks of the others are in ``bench/frameworks.py``.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench import frameworks
from bench.baselines import CLASSES, IMAGE, IdealPool, MaskedClients, PlainClients, loop_rounds
from bench.cases import NETWORKS, Case, Done
from bench.flower_box import PROJECT
from bench.measures import BATCH, DATASET, WORKERS, commit, counted, worker_grid
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.models import build_model
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds

OUT = PROJECT / "bench/out/peers.jsonl"
# Beside the packages that fedsub has. BlazeFL asks for Python 3.12, and none of them gets a torch of its own.
INSTALL = {
    "BlazeFL": "blazefl==2.0.3",
    "fluke": "fluke-fl==0.8.1 torchmetrics lightning-utilities cerberus omegaconf antlr4-python3-runtime==4.9.3"
    " hydra-core diskcache opacus opt_einsum clearml wandb",
    "pfl": "pfl==0.6.0 prv_accountant dp_accounting multiprocess dill",
    "FL-bench": "hydra-core omegaconf antlr4-python3-runtime==4.9.3 nvidia-ml-py",
}
CLONES = {"FL-bench": ("https://github.com/KarhouTam/FL-bench", "06e658bca5af6ce732e25bb7c0f8be321e14a85e")}
SUBFEDAVG: dict[str, Value] = {  # each client prunes half in the first round, whatever the accuracy
    "method": "subfedavg", "local-epochs": 2, "subfedavg.share": 0.5, "subfedavg.target": 0.5,
    "subfedavg.distance": 0.0, "subfedavg.score": -1.0, "subfedavg.gate-data": "test",
}  # fmt: skip
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python", "--target")


def loop(case: Case, kind: type[PlainClients] = PlainClients, epochs: int = 1) -> Done:
    """One client after the other in one process."""
    clients = kind(case.data(), epochs, BATCH, case.device, case.network)
    seconds = loop_rounds(clients, case.rounds + 1)[1:]
    return Done(seconds, clients.steps, clients.steps * BATCH, clients.state)


def share(case: Case, worker: int) -> PlainClients:
    """Return the clients of one of the pool's processes."""
    return PlainClients(case.data()[worker::WORKERS], 1, BATCH, case.device, case.network)


def pool(case: Case) -> Done:
    """Two processes that have their clients' data, and nothing to check."""
    with IdealPool([partial(share, case, worker) for worker in range(WORKERS)], case.network) as ideal:
        seconds = ideal.rounds(case.rounds)
        return Done(seconds, None, (case.rounds + 1) * case.clients * case.samples, ideal.state)


def fedsub(case: Case, workers: int, keys: dict[str, Value] | None = None) -> Done:
    """The local engine."""
    from fedsub_app.runs.loop import run_experiment
    from fedsub_app.training.costs import training_flops
    from fedsub_app.training.problem import Problem

    settings = case.settings() | (keys or {})
    prunes = settings["method"] == "subfedavg"
    grid = worker_grid(None, settings, workers)
    run_experiment(grid, resolve(settings))
    grid.close()
    folder = case.folder / "run"
    lines, model = read_rounds(folder), read_run(folder).model()
    if prunes and lines[-1]["pruned-fraction"] < 0.49:
        raise RuntimeError("not all clients have pruned")
    problem = Problem.of(resolve(settings))
    each = training_flops(problem, build_model(case.network, IMAGE, CLASSES, 0))
    flops = sum(line.get("flops", 0.0) for line in lines)
    samples = None if prunes else round(flops / each)  # pruned networks have FLOPs of their own
    return Done([line["seconds"] for line in counted(lines, 1)], None, samples, model.state_dict())


def peers() -> dict[str, Callable[[Case], Done]]:
    """Return all, by name; those behind a comma have two processes."""
    return {
        "loop": loop,
        "fedsub": partial(fedsub, workers=1),
        "fedsub, stacked": partial(fedsub, workers=1, keys={"stack-clients": True}),
        "fedsub, compiled": partial(fedsub, workers=1, keys={"compile-steps": True}),
        "BlazeFL": frameworks.blazefl,
        "fluke": frameworks.fluke,
        "pfl": frameworks.pfl,
        "FL-bench": frameworks.flbench,
        "ideal pool, two": pool,
        "fedsub, two": partial(fedsub, workers=WORKERS),
        "fedsub, four": partial(fedsub, workers=4),
        "Flower, two": frameworks.flower,
        "masked loop": partial(loop, kind=MaskedClients, epochs=2),
        "Sub-FedAvg": partial(fedsub, workers=1, keys=SUBFEDAVG),
        "Sub-FedAvg, two": partial(fedsub, workers=WORKERS, keys=SUBFEDAVG),
    }


def write_images(case: Case) -> None:
    """Write images in which those of a class have a picture in common, so that all networks learn."""
    random = np.random.default_rng(0)
    y = np.arange(case.clients * case.samples) % CLASSES
    channels, height, width = IMAGE
    common = random.integers(0, 192, (CLASSES, height, width, channels), dtype=np.uint8)
    x = common[y] + random.integers(0, 64, (len(y), height, width, channels), dtype=np.uint8)
    arrays: dict[str, Any] = {"train_images": x, "train_labels": y, "test_images": x[:100], "test_labels": y[:100]}
    np.savez(case.folder / f"{DATASET}.npz", allow_pickle=False, **arrays)


def measure(name: str, network: str, clients: int, rounds: int, device: str) -> Json:
    """Return a run's line of the file."""
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        case = Case(network, clients, rounds, Path(folder), device)
        write_images(case)
        torch.manual_seed(0)
        done = peers()[name](case)
        model, samples = build_model(network, IMAGE, CLASSES, 0), case.data()
        losses = []
        for state in (model.state_dict(), done.state):
            model.load_state_dict(state)
            with torch.no_grad():
                losses.append(float(np.mean([F.cross_entropy(model(x), y).item() for x, y in samples[:100]])))
    versions = {}
    for package in ("torch", "flwr", "blazefl", "fluke-fl", "pfl"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    about = {"network": network, "clients": clients, "device": device, "each": case.samples, "rounds": rounds}
    about["commit"] = commit()
    return about | done._asdict() | {"peer": name, "loss": losses, "versions": versions, "state": None}


def main() -> int:
    """Install, run or print; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    install, run = commands.add_parser("install"), commands.add_parser("run")
    commands.add_parser("table")
    for one in (install, run):
        one.add_argument("folder", type=Path)
    names = list(peers())
    run.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    run.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help="; ".join(names))
    run.add_argument("--clients", nargs="+", type=int, default=[10])
    for option, default in (("rounds", 4), ("repeats", 3)):
        run.add_argument(f"--{option}", type=int, default=default)
    one = commands.add_parser("one")  # a run, in a process that sees one peer's packages
    one.add_argument("name")
    one.add_argument("network")
    one.add_argument("clients", type=int)
    one.add_argument("rounds", type=int)
    for part in (run, one):
        part.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.command == "one":
        print(json.dumps(measure(options.name, options.network, options.clients, options.rounds, options.device)))
    elif options.command == "install":
        for name, (url, revision) in CLONES.items():
            if not (options.folder / name).exists():
                subprocess.run(["git", "clone", "--quiet", url, str(options.folder / name)], check=True)
            subprocess.run(["git", "-C", str(options.folder / name), "checkout", "--quiet", revision], check=True)
        for name, packages in INSTALL.items():
            command = [sys.executable, *PIP, str(options.folder / name), *packages.split()]
            subprocess.run(command, check=True)
    else:
        if options.command == "run":
            run_all(options)
        print(table(read()))
    return 0


def read() -> list[Json]:
    """Return the runs of the file."""
    lines = OUT.read_text().splitlines() if OUT.exists() else []
    return [{"device": "cpu"} | json.loads(line) for line in lines]


def run_all(options: argparse.Namespace) -> None:
    """Make the runs that are not in the file yet, the peers in turn."""
    OUT.parent.mkdir(exist_ok=True)
    for network in options.network:
        for clients in options.clients:
            for number in range(options.repeats):
                for name in options.peers:
                    about = (network, clients, name)
                    keys = ("network", "clients", "peer", "device")
                    there = [run for run in read() if tuple(run[key] for key in keys) == (*about, options.device)]
                    if len(there) <= number:
                        _run(options, *about)


def _run(options: argparse.Namespace, network: str, clients: int, name: str) -> None:
    path = os.pathsep.join(str(folder) for folder in ((options.folder / name).resolve(), PROJECT))
    command = [sys.executable, "-m", "bench.peers", "one", name, network, str(clients), str(options.rounds)]
    command += ["--device", options.device]
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:  # what a framework writes
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment["RAY_worker_niceness"] = "0"  # as of the bench's own runs on Flower's engine
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    print(f"{network}, {clients} clients, {name}: ", end="", flush=True)
    if done.returncode:
        print("not run:", *done.stderr.strip().splitlines()[-1:])
        return
    line = json.loads(done.stdout.strip().splitlines()[-1])
    print(", ".join(f"{seconds:.3f}" for seconds in line["seconds"]), flush=True)
    with OUT.open("a") as file:
        file.write(json.dumps(line) + "\n")


def table(runs: Sequence[Json]) -> str:
    """Return the minima of all rounds as a Markdown table; ``same``: steps, samples and loss are like the loop's."""
    cases: dict[tuple[str, int, str], dict[str, list[Json]]] = {}
    for run in runs:
        case = run["network"], run["clients"], run["device"]
        cases.setdefault(case, {}).setdefault(run["peer"], []).append(run)
    rows = [
        "| network | clients x samples | device | | seconds a round, minimum | over its loop | loss | same |",
        "|---" * 8 + "|",
    ]
    for (network, clients, device), each in cases.items():
        for name in (known for known in peers() if known in each):
            masked = name == "masked loop" or name.startswith("Sub-FedAvg")
            own, least = each[name], min(second for run in each[name] for second in run["seconds"])
            usual = each.get("masked loop" if masked else "loop", [])
            over = f"{least / min(second for run in usual for second in run['seconds']):.2f}" if usual else ""
            same = "yes" if usual and all(alike(run, usual[0]) for run in own) else "no"
            first, last = own[0]["loss"]
            size = f"{clients:,} x {own[0]['each']}"
            loss = f"{first:.2f} to {last:.2f}"
            rows.append(f"| {network} | {size} | {device} | {name} | {least:.3f} | {over} | {loss} | {same} |")
    return "\n".join(rows)


def alike(run: Json, loop: Json) -> bool:
    """Say whether a run had the steps and samples of the loop's rounds, and its loss fell by about as much."""
    fell, usual = (first - last for first, last in (run["loss"], loop["loss"]))
    rounds = (loop["rounds"] + 1) / (run["rounds"] + 1)
    counts = [(run[key], loop[key]) for key in ("samples", "steps") if run[key] is not None]
    return all(rounds * own == other for own, other in counts) and 0.5 < fell / usual < 2


if __name__ == "__main__":
    from bench.peers import main as importable  # Ray's processes find what is in a module

    sys.exit(importable())
