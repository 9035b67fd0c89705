"""Measures of the local engine's processes: time over an ideal share of the work, peak of memory.

``python -m bench.workers`` prints the curves of docs/scale.md: a round of clients that do not train, by their number
and by the size of the model, on the local engine and by ``flwr run``.
"""

import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.flower_box import FlowerBox, memory_mb
from bench.measures import (
    WORKERS,
    Effort,
    Result,
    apart,
    counted,
    experiment,
    ratio,
    run_local,
    shown,
    spread,
    worker_grid,
    write_images,
)
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json

BIG_MODEL, BIG_CLIENTS, FEW_CLIENTS = "resnet18", 100, 20
UNEVEN_CLIENTS, UNEVEN_SAMPLES = 100, 20_000
LOOK_SECONDS = 0.02


def uneven_over_pool(effort: Effort, device: str) -> Result:
    """Round of clients of very different sizes over their computing seconds shared out evenly to two workers."""
    return apart(_uneven_over_pool, effort, device)


def _uneven_over_pool(effort: Effort, device: str) -> Result:
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), UNEVEN_SAMPLES)
        own: dict[str, Value] = {"partition": "dirichlet", "dirichlet-alpha": 0.1}
        settings = experiment(Path(folder), UNEVEN_CLIENTS, 1, effort.rounds + 1, device) | own
        rounds, ideal = [], []
        for _ in range(effort.repeats):
            lines, _ = run_local(settings, worker_grid, WORKERS)
            for line in counted(lines, skip=1):
                rounds.append(line["seconds"])
                ideal.append(line["compute-seconds"] / WORKERS)
    value, sides = ratio(rounds, ideal, ("round", "ideal"))
    return Result(value, sides, shown(settings) | {"samples": UNEVEN_SAMPLES, "workers": WORKERS})


def resnet18(effort: Effort, device: str) -> Result:
    """Round of 100 clients of ResNet-18 (11 million) that do not train, two workers: seconds, and memory beside 20's.

    Memory: the highest sum of the proportional set sizes (PSS) of all processes.
    """
    found = {count: _idle(BIG_MODEL, count, WORKERS, effort.rounds, device) for count in (FEW_CLIENTS, BIG_CLIENTS)}
    big = found[BIG_CLIENTS]
    value = {
        "seconds": big["seconds"]["median"],
        "memory_mb": big["peak-mb"],
        "memory_over_20": big["peak-mb"] / found[FEW_CLIENTS]["peak-mb"],
    }
    return Result(value, {str(count): one["seconds"] for count, one in found.items()}, {"workers": WORKERS})


def _idle(model: str, clients: int, workers: int, rounds: int, device: str) -> Json:
    """Return seconds a round and peak of memory where clients get the model, do not train it and send it back.

    The peak is that of another run, because to look at the memory takes a core.
    """
    case = (model, clients, workers, rounds, device)
    return apart(_idle_here, *case, False) | {"peak-mb": apart(_idle_here, *case, True)["peak-mb"]}


def _idle_here(model: str, clients: int, workers: int, rounds: int, device: str, watched: bool) -> Json:
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 2 * clients)
        settings = experiment(Path(folder), clients, 0, rounds + 1, device) | {"model": model, "checkpoint-every": 1000}
        over, peak = threading.Event(), [0.0]
        watch = threading.Thread(target=_watch, args=(over, peak), daemon=True)
        if watched:
            watch.start()
        try:
            lines, _ = run_local(settings, worker_grid, workers)
            seconds = [line["seconds"] for line in counted(lines, skip=1)]
        finally:
            over.set()
            if watched:
                watch.join()
    return {"seconds": spread(seconds), "peak-mb": peak[0]}


def _watch(over: threading.Event, peak: list[float]) -> None:
    """Keep the highest sum of the PSS of this process and those that it has started (Linux)."""
    while not over.wait(LOOK_SECONDS):
        peak[0] = max(peak[0], sum(memory_mb(pid, "Pss:", "smaps_rollup") for pid in ("self", *_children())))


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _idle_flower(model: str, clients: int, rounds: int) -> Json:
    """Return the same of ``flwr run``; the memory is that of the largest process, server or worker, its own peak."""
    with FlowerBox(WORKERS) as box:
        write_images(box.folder, 2 * clients)
        settings = experiment(box.folder, clients, 0, rounds + 2, "cpu") | {"model": model, "checkpoint-every": 1000}
        seconds = [line["seconds"] for line in counted(box.run(settings), skip=2)]
        return {"seconds": spread(seconds), "peak-mb": max(box.peak_mb.values())}


def main() -> int:
    """Print the curves, as rows of a Markdown table."""
    print(
        "| model | clients | local engine: s a round | MB in all | `flwr run`: s a round | MB of the largest process |"
    )
    print("|---|---|---|---|---|---|")
    for model, counts in (("lenet5", (10, 100, 1000, 10_000)), ("resnet18", (10, 20, 100, 300))):
        for clients in counts:
            local = _idle(model, clients, WORKERS, 3, "cpu")
            flower = _idle_flower(model, clients, 3)
            both = (f"{one['seconds']['median']:.2f} | {one['peak-mb']:.0f}" for one in (local, flower))
            print(f"| {model} | {clients:,} | {' | '.join(both)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
