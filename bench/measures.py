"""The measures. Each returns its value and the spread of what it was made of; none of them judges."""

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Message, MessageType

from bench.baselines import CLASSES, IMAGE, LR, IdealPool, loop_rounds, random_clients
from bench.flower_box import PROJECT, FlowerBox, memory_mb, run_command
from fedsub_app.common.machine import keep_freed_memory
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.deployment.flower import CONNECTION
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.wire import HEADER
from fedsub_app.federation.workers import local_grid
from fedsub_app.models import build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution, masked_mean

CLIENTS, SAMPLES, BATCH, WORKERS = 10, 500, 10, 2
POOL_EPOCHS = 5
MANY_CLIENTS = 1000
TESTED = 10_000
UPDATES = 10
DATASET = "random-images"
# Settings with which a short run shows all phases of a method, and its variants that send different things.
VARIANTS: dict[str, list[dict[str, Value]]] = {
    "fedpews": [{"fedpews.masks": masks, "fedpews.warmup-rounds": 2} for masks in ("learned", "fixed")],
    "fedpart": [
        {"optimizer": "adam", "fedpart.momentum": momentum, "fedpart.full-rounds": 1, "fedpart.rounds-per-group": 1}
        for momentum in ("none", "mean")
    ],
    "subfedavg": [{"local-epochs": 2, "validation-fraction": 0.1}],
}


T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How often things are repeated."""

    repeats: int
    rounds: int  # counted ones, of a run


FULL, QUICK = Effort(3, 4), Effort(1, 3)


@dataclass
class Result:
    """A measure's value (or why it failed), the spread of its sides, and what else came out of it."""

    value: Any = None
    spread: Json | None = None
    settings: Json | None = None
    memory: Json | None = None
    extra_mb: float | None = None
    error: str = ""


def spread(seconds: Sequence[float]) -> Json:
    """Return minimum, median and maximum."""
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds), "n": len(seconds)}


def ratio(upper: Sequence[float], lower: Sequence[float], names: tuple[str, str]) -> tuple[float, Json]:
    """Return the ratio of the medians, and the spread of both sides with the ratio of the minima."""
    sides: Json = {names[0]: spread(upper), names[1]: spread(lower)}
    return statistics.median(upper) / statistics.median(lower), sides | {"ratio-of-minima": min(upper) / min(lower)}


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function`` in a fresh process of its own: memory, thread counts and Flower's globals start anew."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def commit() -> str:
    """Return the checkout's commit, ``-dirty`` where the files differ from it; "" where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_images(folder: Path, train: int, test: int = 100, shape: tuple[int, int, int] = IMAGE) -> None:
    """Write random images, of CIFAR's shape unless another one is given, as ``random-images.npz``."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", train), ("test", test)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % CLASSES
    np.savez(folder / f"{DATASET}.npz", allow_pickle=False, **arrays)


def experiment(folder: Path, clients: int, epochs: int, rounds: int, device: str) -> dict[str, Value]:
    """Return the settings of a FedAvg run of LeNet-5 on the images in ``folder``; evaluation is off the clock."""
    return {
        "method": "fedavg",
        "model": "lenet5",
        "dataset": DATASET,
        "data-dir": str(folder),
        "partition": "iid",
        "num-clients": clients,
        "batch-size": BATCH,
        "lr": LR,
        "local-epochs": epochs,
        "num-rounds": rounds,
        "eval-every": 1000,
        "device": device,
    }


def shown(settings: dict[str, Value]) -> Json:
    """Return the settings without the folders, which are temporary."""
    return {key: value for key, value in settings.items() if key not in ("data-dir", "run-dir")}


def run_local(
    settings: dict[str, Value], grid: Callable[..., LocalGrid] = LocalGrid, nodes: int = 1
) -> tuple[list[Json], Any]:
    """Run an experiment on the local engine, here; returns its rounds' lines and the closed grid."""
    from fedsub_app.client_app import app
    from fedsub_app.runs.loop import run_experiment

    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        overrides = {**settings, "run-dir": f"{folder}/run"}
        engine = grid(app, overrides, nodes)
        try:
            run_experiment(engine, resolve(overrides))
        finally:
            engine.close()
        return read_rounds(Path(folder) / "run"), engine


def counted(lines: list[Json], skip: int) -> list[Json]:
    """Return the lines of the rounds after the first ``skip``, all of which must have gone well."""
    rounds = [line for line in lines if line["round"] > skip]
    if not rounds or any(line["status"] != "ok" or line["dropped"] for line in rounds):
        raise RuntimeError(f"a round went wrong: {rounds}")
    return rounds


# --- local_over_loop --------------------------------------------------------------------------------------------------


def local_over_loop(effort: Effort, device: str) -> Result:
    """Round on the local engine over the plain loop that does the same training; in turn, in one process."""
    return apart(_over_loop, effort, device, 1)


def workers_over_loop(effort: Effort, device: str) -> Result:
    """Round on the local engine with two workers over the plain one-thread loop that does the same training."""
    return apart(_over_loop, effort, device, WORKERS)


def _over_loop(effort: Effort, device: str, workers: int) -> Result:
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), CLIENTS * SAMPLES)
        settings = experiment(Path(folder), CLIENTS, 1, effort.rounds + 1, device)
        plain = random_clients(CLIENTS, SAMPLES, 1, BATCH, device)
        loop_rounds(plain, 1)
        engine, loop = [], []
        for _ in range(effort.repeats):
            lines, _ = run_local(settings, worker_grid, workers)
            engine += [line["seconds"] for line in counted(lines, skip=1)]
            loop += loop_rounds(plain, effort.rounds)
    value, sides = ratio(engine, loop, (f"local, {workers} workers", "loop"))
    return Result(value, sides, shown(settings) | {"samples-per-client": SAMPLES})


def worker_grid(_: Any, overrides: Any, workers: int) -> Any:
    """Return the local engine's grid with so many processes, as ``run_local`` wants it."""
    return local_grid("fedsub_app.client_app", overrides, workers, fork=overrides["device"] != "cuda")


# --- evaluated_over_pool ----------------------------------------------------------------------------------------------


def evaluated_over_pool(effort: Effort, device: str) -> Result:
    """Round and test on 10,000 images with two workers over half of what one takes: LeNet-5, ten clients; in turn."""
    return apart(_evaluated_over_pool, effort, device)


def _evaluated_over_pool(effort: Effort, device: str) -> Result:
    seconds: dict[int, list[float]] = {WORKERS: [], 1: []}
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), CLIENTS * SAMPLES, TESTED)
        settings = experiment(Path(folder), CLIENTS, 1, effort.rounds + 1, device) | {"eval-every": 1}
        for _ in range(effort.repeats):
            for workers, found in seconds.items():
                lines, _ = run_local(settings, worker_grid, workers)
                found += [line["seconds"] + line["evaluate-seconds"] for line in counted(lines, skip=1)]
    value, sides = ratio(seconds[WORKERS], [one / WORKERS for one in seconds[1]], ("two workers", "half of one"))
    return Result(value, sides, shown(settings) | {"samples-per-client": SAMPLES, "test-samples": TESTED})


# --- stacked_over_loop ------------------------------------------------------------------------------------------------


def stacked_over_loop(effort: Effort, device: str) -> Result:
    """Round of ten clients of FedPeWS's MLP that train together over one where they train one after the other."""
    return apart(_stacked_over_loop, effort, device)


def _stacked_over_loop(effort: Effort, device: str) -> Result:
    settings: dict[str, Value] = {
        "method": "fedavg",
        "model": "fedpews-mlp",
        "dataset": "synthetic-3k",
        "partition": "iid",
        "num-clients": CLIENTS,
        "batch-size": 8,  # as conf/fedpews/table2-3k-eta-0.1.toml
        "num-rounds": effort.rounds + 1,
        "eval-every": effort.rounds + 1,
        "device": device,
    }
    value, sides = _with_and_without("stack-clients", settings, effort, ("together", "one after the other"))
    return Result(value, sides, shown(settings))


def _with_and_without(
    key: str,
    settings: dict[str, Value],
    effort: Effort,
    names: tuple[str, str],
    values: tuple[Value, Value] = (True, False),
) -> tuple[float, Json]:
    """Return the ratio of rounds on the local engine with a setting to those without, in turn, and both sides."""
    seconds: dict[Value, list[float]] = {value: [] for value in values}
    for _ in range(effort.repeats):
        for on, found in seconds.items():
            lines, _ = run_local(settings | {key: on})
            found += [line["seconds"] for line in counted(lines, skip=1)]
    return ratio(seconds[values[0]], seconds[values[1]], names)


# --- graph_over_eager -------------------------------------------------------------------------------------------------


def graph_over_eager(effort: Effort, device: str) -> Result:
    """Round of LeNet-5 on ten clients with compile-steps, a captured CUDA graph, over one without; needs a GPU."""
    return apart(_graph_over_eager, effort, device) if device == "cuda" else Result()


def _graph_over_eager(effort: Effort, device: str) -> Result:
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), CLIENTS * SAMPLES)
        settings = experiment(Path(folder), CLIENTS, 1, effort.rounds + 1, device)
        value, sides = _with_and_without("compile-steps", settings, effort, ("graph", "eager"))
    return Result(value, sides, shown(settings))


# --- flwr_over_pool ---------------------------------------------------------------------------------------------------


def flwr_over_pool(effort: Effort, device: str) -> Result:
    """Round of a ``flwr run`` on two workers over a round of an ideal pool of two processes; in turn."""
    flower: list[float] = []
    pool: list[float] = []
    with FlowerBox(WORKERS, gpu=device == "cuda") as box:
        write_images(box.folder, CLIENTS * SAMPLES)
        settings = experiment(box.folder, CLIENTS, POOL_EPOCHS, effort.rounds + 1, device)
        each = partial(random_clients, CLIENTS // WORKERS, SAMPLES, POOL_EPOCHS, BATCH, device)
        with IdealPool([each] * WORKERS) as ideal:
            for _ in range(max(2, effort.repeats)):
                pool += ideal.rounds(effort.rounds)
                flower += [line["seconds"] for line in counted(box.run(settings), skip=1)]
        value, sides = ratio(flower, pool, ("flwr", "pool"))
        memory = {f"{CLIENTS}-clients": dict(box.peak_mb)}
    return Result(value, sides, shown(settings) | {"samples-per-client": SAMPLES, "workers": WORKERS}, memory)


# --- overhead_1000_clients_s ------------------------------------------------------------------------------------------


def overhead_1000_clients_s(effort: Effort, device: str) -> Result:
    """Seconds of a ``flwr run`` round in which 1,000 clients get LeNet-5, do not train it and send it back."""
    with FlowerBox(WORKERS, gpu=device == "cuda") as box:
        write_images(box.folder, 5 * MANY_CLIENTS)
        settings = experiment(box.folder, MANY_CLIENTS, 0, 2 * effort.rounds + 2, device)
        lines = counted(box.run(settings), skip=2)
        memory = {f"{MANY_CLIENTS}-clients": dict(box.peak_mb)}
    parts = {key: spread([line[key] for line in lines]) for key in ("seconds", "merge-seconds", "compute-seconds")}
    return Result(parts["seconds"]["median"], parts, shown(settings) | {"workers": WORKERS}, memory)


# --- robust_over_plain ------------------------------------------------------------------------------------------------


def robust_over_plain(effort: Effort, device: str) -> Result:
    """Round of 1,000 clients with 60 images of MNIST's size each with ``robust`` on over one with it off; in turn."""
    return apart(_robust_over_plain, effort, device)


def _robust_over_plain(effort: Effort, device: str) -> Result:
    found = []
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 60 * MANY_CLIENTS, shape=(1, 28, 28))
        for epochs in (1, 0):
            settings = experiment(Path(folder), MANY_CLIENTS, epochs, effort.rounds + 1, device)
            # An attacker that changes nothing: else simulated nodes take means, with which real ones are not trusted.
            settings |= {"weighting": "uniform", "attack": "scale"}
            found.append(_with_and_without("robust", settings, effort, ("on", "off"), ("on", "off")))
    (value, sides), (_, unchanged) = found
    return Result(value, sides | {"without training": unchanged}, shown(settings | {"local-epochs": 1}))


# --- wire_over_formula ------------------------------------------------------------------------------------------------


class CountingGrid(LocalGrid):
    """Counts the JSON headers of the training phase, which the formula does not have."""

    header_bytes = 0

    def push_messages(self, messages: Any) -> Any:
        """Answer every message, and count."""
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message, message_id in zip(messages, ids, strict=True):
            if message.metadata.message_type == MessageType.TRAIN:
                self.header_bytes += sum(map(_header_bytes, (message, self._replies[message_id])))
        return ids


def _header_bytes(message: Message) -> int:
    return 0 if message.has_error() else len(message.content.config_records[HEADER]["json"])  # type: ignore[arg-type]


def wire_over_formula(effort: Effort, device: str) -> Result:
    """Bytes sent over the bytes of the papers' formula, one client a node, of the method where it is the most."""
    return apart(_wire_over_formula, device)


def _wire_over_formula(device: str) -> Result:
    from fedsub_app.runs.methods import METHODS

    clients, rounds, found = 4, 4, {}
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 20 * clients)
        base = experiment(Path(folder), clients, 1, rounds, device)
        for method in METHODS:
            for variant in VARIANTS.get(method, [{}]):
                lines, grid = run_local({**base, "method": method, **variant}, CountingGrid, clients)
                sent, formula = (
                    sum(line[f"{prefix}bytes-down"] + line[f"{prefix}bytes-up"] for line in counted(lines, skip=0))
                    for prefix in ("", "formula-")
                )
                if formula:
                    name = " ".join([method, *(str(value) for value in variant.values() if isinstance(value, str))])
                    bare = (sent - grid.header_bytes) / formula
                    found[name] = {"ratio": sent / formula, "ratio-without-headers": bare, "formula-bytes": formula}
    worst = max(entry["ratio"] for entry in found.values())
    return Result(worst, found, shown(base) | {"nodes": clients, "samples-per-client": 20})


# --- averaging_over_bandwidth -----------------------------------------------------------------------------------------


def averaging_over_bandwidth(effort: Effort, device: str) -> Result:
    """Masked mean of ten ResNet-18 over the time to copy them once; and the memory it takes besides its result."""
    return apart(_averaging_over_bandwidth, effort)


def _averaging_over_bandwidth(effort: Effort) -> Result:
    torch.set_num_threads(1)  # as the server does
    keep_freed_memory()
    old = {name: t.detach().clone() for name, t in tensors_of(build_model("resnet18", IMAGE, CLASSES, 0)).items()}
    masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in old.items()}
    updates = [
        Contribution({name: t + i for name, t in old.items()}, {n: m.clone() for n, m in masks.items()})
        for i in range(10)
    ]
    pairs = [(t, torch.empty_like(t)) for x, m, *_ in updates for part in (x, m or {}) for t in part.values()]
    for source, target in pairs:  # touch all pages
        target.copy_(source)
    extra_mb = peak_above_now_mb(lambda: masked_mean(old, updates)) - sum(t.nbytes for t in old.values()) / 2**20
    averaging, moving = [], []
    for _ in range(3 * effort.repeats):
        start = time.perf_counter()
        masked_mean(old, updates)
        middle = time.perf_counter()
        for source, target in pairs:
            target.copy_(source)
        averaging.append(middle - start)
        moving.append(time.perf_counter() - middle)
    value, sides = ratio(averaging, moving, ("masked-mean", "copy"))
    size = sum(t.numel() for t in old.values())
    return Result(
        value, sides, {"updates": UPDATES, "elements": size, "masks": "all ones", "threads": 1}, None, extra_mb
    )


def peak_above_now_mb(action: Callable[[], object]) -> float:
    """Return by how much the peak of resident memory during ``action`` is above the memory before it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present
    before = memory_mb("self", "VmRSS")
    action()
    return memory_mb("self", "VmHWM") - before


# --- population -------------------------------------------------------------------------------------------------------

POPULATIONS, SHARES, PARTICIPANTS = (100, 1000, 10_000), (0.02, 0.06), 20


def population(effort: Effort, device: str) -> Result:
    """A round of IST with 20 participants of 10,000 clients over one of 100; and both shares of the paper of each.

    Local engine; 30 units for each participant, a tenth of the paper's, so that 600 fit into memory.
    """
    few, many = POPULATIONS[0], POPULATIONS[-1]
    same: dict[int, list[Json]] = {few: [], many: []}
    for _ in range(effort.repeats):
        for clients, runs in same.items():
            runs.append(apart(_ist_rounds, clients, PARTICIPANTS, effort.rounds, device))
    seconds = {clients: [s for run in runs for s in run["seconds"]] for clients, runs in same.items()}
    peaks = {clients: statistics.median(run["extra-mb"] for run in runs) for clients, runs in same.items()}
    names = (f"{PARTICIPANTS} of {many}", f"{PARTICIPANTS} of {few}")
    time_ratio, sides = ratio(seconds[many], seconds[few], names)
    sides["extra-mb"] = dict(zip(names, (peaks[many], peaks[few]), strict=True))
    for share in SHARES:
        for clients in POPULATIONS:
            participants = round(share * clients)
            run = apart(_ist_rounds, clients, participants, effort.rounds, device)
            found = spread(run["seconds"])
            each = {"ms": 1000 * found["median"] / participants, "extra-mb": run["extra-mb"] / participants}
            sides[f"{participants} of {clients}"] = found | {"extra-mb": run["extra-mb"], "each": each}
    value = {"time": time_ratio, "extra_mb": peaks[many] - peaks[few]}
    return Result(value, sides, shown(_ist(Path(), few, PARTICIPANTS, effort.rounds, device)))


def _ist(folder: Path, clients: int, participants: int, rounds: int, device: str) -> dict[str, Value]:
    """Return the settings of a run of IST as in the paper's Table 1, on random images of 3,072 pixels."""
    own: dict[str, Value] = {
        "method": "ist", "model": "feature-mlp", "ist.width": 30, "clients-per-round": participants, "momentum": 0.9,
        "partition": "dirichlet", "dirichlet-alpha": 100.0, "samples-per-client": SAMPLES, "batch-size": 32,
        "local-steps": 1, "checkpoint-every": 1000,
    }  # fmt: skip
    return experiment(folder, clients, 1, rounds + 1, device) | own


def _ist_rounds(clients: int, participants: int, rounds: int, device: str) -> Json:
    """Return the seconds of a run's rounds without the first, and the peak of memory above that of the imports."""
    import fedsub_app.client_app
    import fedsub_app.server_app  # noqa: F401

    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), CLIENTS * SAMPLES)
        lines: list[Json] = []
        settings = _ist(Path(folder), clients, participants, rounds, device)
        extra_mb = peak_above_now_mb(lambda: lines.extend(run_local(settings)[0]))
    return {"seconds": [line["seconds"] for line in counted(lines, skip=1)], "extra-mb": extra_mb}


# --- startup_s --------------------------------------------------------------------------------------------------------


def startup_s(effort: Effort, device: str) -> Result:
    """Seconds from the command to the first round of the default experiment (its start), for both engines.

    ``flwr`` has no SuperLink to begin with; ``flwr-again``, in the spread, finds the one that it started.
    """
    found: dict[str, list[float]] = {"local": [], "flwr": [], "flwr-again": []}
    training: dict[str, list[float]] = {f"{name}: round 1 itself": [] for name in found}
    for _ in range(effort.repeats):
        with FlowerBox(WORKERS, gpu=device == "cuda") as box:
            for name, engine in (("local", "local"), ("flwr", CONNECTION), ("flwr-again", CONNECTION)):
                until, inside = _first_round(box, engine, box.folder / f"run-of-{name}", device)
                found[name].append(until - inside)
                training[f"{name}: round 1 itself"].append(inside)
    spreads = {name: spread(seconds) for name, seconds in (found | training).items()}
    value = {name: spreads[name]["median"] for name in ("local", "flwr")}
    return Result(value, spreads, {"experiment": "pyproject's defaults", "num-rounds": 1, "workers": WORKERS})


def _first_round(box: FlowerBox, engine: str, folder: Path, device: str) -> tuple[float, float]:
    """Return the seconds until round 1 is written, and how many of them are the round itself with its evaluation."""
    settings: dict[str, Value] = {"num-rounds": 1, "fedpews.warmup-rounds": 1, "device": device}
    settings["run-dir"] = str(folder)
    start = time.perf_counter()
    output = box.folder / "startup.log"  # a pipe that nobody reads would stop the run
    with output.open("w") as log:
        process = subprocess.Popen(run_command(engine, settings), **{**box.how(), "stdout": log})
    while True:
        over = process.poll() is not None
        seconds = time.perf_counter() - start
        first = [line for line in read_rounds(folder) if line["round"] == 1]
        if first or over:
            break
        time.sleep(0.01)
    process.wait()
    if not first:
        said = output.read_text()[-3000:]
        raise RuntimeError(f"fedsub run on {engine} ended with {process.returncode} before round 1:\n{said}")
    return seconds, first[0]["seconds"] + first[0].get("evaluate-seconds", 0.0)


MEASURES: dict[str, Callable[[Effort, str], Result]] = {
    measure.__name__: measure
    for measure in (
        local_over_loop,
        workers_over_loop,
        evaluated_over_pool,
        stacked_over_loop,
        graph_over_eager,
        flwr_over_pool,
        overhead_1000_clients_s,
        robust_over_plain,
        wire_over_formula,
        averaging_over_bandwidth,
        population,
        startup_s,
    )
}
