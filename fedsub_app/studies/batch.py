"""Many runs on this machine, several at a time: what tables and sweeps share.

Every run has its directory, so a stopped batch goes on where it was; when a run is finished its clients' states, which
for personal models are gigabytes, are dropped.
"""

import contextlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle, islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread

import torch

from fedsub_app.common.device import VISIBLE, visible_gpus
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import read_json
from fedsub_app.common.machine import cores
from fedsub_app.common.section import Value
from fedsub_app.runs.directory import runs_folder
from fedsub_app.runs.recorded import RunFailed, settings_of
from fedsub_app.settings import Settings
from fedsub_app.studies.job import Job
from fedsub_app.studies.progress import BatchProgress
from fedsub_app.studies.slurm import SlurmPool

LOOK_SECONDS = 2.0
MANY_JOBS = 100  # of a cluster, at a time
KILLED = "not run: a process was killed (out of memory?); the same command goes on"


def gpus_of(settings: Iterable[Settings]) -> list[str]:
    """Return the GPUs on which some runs are computed; none where all are on the CPU."""
    return visible_gpus() if torch.cuda.is_available() and any(each.device != "cpu" for each in settings) else []


def run_all(
    jobs: Iterable[Job],
    total: int,
    workers: int | None = None,
    gpus: Sequence[str] = (),
    slurm: Sequence[str] = (),
) -> list[tuple[Job, str]]:
    """Run the jobs, say what is done and how long is left; returns those that failed and why.

    A process that is killed takes the others with it: what they ran has failed, and no further job is asked for.

    Parameters
    ----------
    jobs : asked for the next one whenever there is room for it, so that it may depend on those that have ended.
    total : number of jobs, or how many there are at most.
    workers : runs at a time; ``None``: as many as there are GPUs, without any as there are cores.
    gpus : each process takes one of these, in turn (:func:`gpus_of`).
    slurm : options of a cluster, whose jobs the runs are (:class:`~fedsub_app.studies.slurm.SlurmPool`)
    """
    if not total:
        return []
    workers = min(workers or (MANY_JOBS if slurm else len(gpus) or cores()), total)
    failures: list[tuple[Job, str]] = []
    waiting = iter(jobs)
    with (
        SlurmPool(workers, slurm, runs_folder() / "slurm") if slurm else _processes(workers, gpus) as pool,
        BatchProgress(total) as progress,
    ):
        running: dict[Future[str], Job] = {}
        while True:
            for job in islice(waiting, workers - len(running)):
                try:
                    running[pool.submit(run_job, job.overrides, job.folder)] = job
                except BrokenProcessPool:
                    failures.append((job, KILLED))
                    waiting = iter(())
                    break
                progress.start(job)
            if not running:
                return failures
            done, _ = wait(running, timeout=LOOK_SECONDS)
            for future in done:
                job = running.pop(future)
                error = future.exception()
                reason = KILLED if isinstance(error, BrokenProcessPool) else error or future.result()
                if reason:
                    failures.append((job, str(reason)))
                progress.end(job, failed=bool(reason))
            progress.look()


def _processes(workers: int, gpus: Sequence[str]) -> ProcessPoolExecutor:
    context = get_context("spawn")
    turns: SimpleQueue[str] = context.SimpleQueue()
    for gpu in islice(cycle(gpus), workers):
        turns.put(gpu)
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(turns if gpus else None,))


def _begin(turns: "SimpleQueue[str] | None") -> None:
    """Prepare a process that runs jobs: it sees the GPU whose turn it is, and it ends with the one that started it."""
    if turns is not None:
        os.environ[VISIBLE] = turns.get()
    _end_with_parent()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, also if that was killed. Its runs can be resumed."""
    parent = parent_process()
    assert parent

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_job(overrides: Mapping[str, Value], folder: Path) -> str:
    """Run or continue one run in this process; returns why it failed, or nothing."""
    from fedsub_app.engines import run_local

    log = logging.getLogger("fedsub")
    keys = dict(overrides)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        log.handlers[:] = [logging.FileHandler(folder.parent / f"{folder.name}.log")]
        log.setLevel(logging.INFO)
        log.propagate = False
        if (folder / "settings.json").exists():
            with contextlib.suppress(UserError):
                recorded = read_json(folder / "settings.json")["settings"]
                # A longer run is begun anew: an extended one was evaluated at its first end, between two due rounds.
                keys["resume"] = settings_of(keys | {"resume": True}).num_rounds == recorded["num-rounds"]
        if not keys.get("resume") and folder.exists():
            kept = folder.rename(folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))
            log.warning("%s: of other settings, or damaged; kept as %s", folder, kept.name)
        run_local(keys, wait=True)
        shutil.rmtree(folder / "clients", ignore_errors=True)
    except (UserError, RunFailed) as error:
        return str(error)
    return ""


def facts(command: str, seeds: Iterable[int], jobs: Sequence[Job]) -> dict[str, str]:
    """Return what stands above the table of a batch: command, commits, seeds, machine and data."""
    from fedsub_app.data import load_dataset

    def data(settings: Settings) -> str:
        notes = load_dataset(settings.data).notes
        return settings.dataset + (f" ({', '.join(notes)})" if notes else "")

    gpu = ", CUDA" if torch.cuda.is_available() else ", no GPU"
    return {
        "command": command,
        "commit": ", ".join(sorted({_commit(job) for job in jobs})),
        "seeds": ", ".join(map(str, seeds)),
        "machine": f"{platform.machine()}, {cores()} cores{gpu}; one run a core, one thread a run",
        "data": "; ".join(sorted({data(job.settings) for job in jobs})),
    }


def _commit(job: Job) -> str:
    with contextlib.suppress(UserError):
        return str(read_json(job.folder / "settings.json").get("commit", "unknown"))
    return "not run"
