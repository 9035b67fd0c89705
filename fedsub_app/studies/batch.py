"""Many runs on this machine, several at a time: what tables and sweeps share.

Every run has its directory, so a stopped batch goes on where it was; when a run is finished its clients' states, which
for personal models are gigabytes, are dropped.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from filelock import FileLock, Timeout

from fedsub_app.common.device import VISIBLE, visible_gpus
from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.files import read_json
from fedsub_app.common.machine import cores
from fedsub_app.common.progress import LINE_SECONDS, human_seconds
from fedsub_app.common.section import Json, Value
from fedsub_app.common.spelling import parse_pairs
from fedsub_app.data import own_digest
from fedsub_app.runs.config import resolve
from fedsub_app.runs.directory import DATA, changed_file
from fedsub_app.runs.recorded import RunFailed, read_recorded, runs_folder, settings_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import Settings

LOOK_SECONDS = 2.0
MANY_JOBS = 100  # of a cluster, at a time
KILLED = "not run: a process was killed (out of memory?); the same command goes on"


@dataclass(frozen=True)
class Job:
    """One run: its name, its single keys (``run-dir`` among them), its directory."""

    name: str
    overrides: Mapping[str, Value]
    folder: Path

    @cached_property
    def settings(self) -> Settings:
        return resolve(self.overrides)

    def summary(self) -> Json | None:
        """Return the summary of a complete run of these settings."""
        with contextlib.suppress(UserError):
            summary = read_json(self.folder / "summary.json")
            if self.begun() and summary.get("status") == "completed":
                return summary
        return None

    @property
    def last_round(self) -> int:
        """The last round on disk; 0 where there is none of these settings, or a line is damaged."""
        with contextlib.suppress(UserError):
            if self.begun() and (lines := read_rounds(self.folder)):
                return int(lines[-1]["round"])
        return 0

    def begun(self) -> bool:
        """Say whether a run of these settings and the user's files is on disk; a key that it lacks has its default."""
        with contextlib.suppress(UserError):
            if settings_of({"run-dir": str(self.folder), "resume": True}).digest() == self.settings.digest():
                recorded = read_recorded(self.folder)
                same_data = own_digest(self.settings.data) in ("", recorded.get(DATA, ""))
                return same_data and not changed_file(self.settings, recorded, self.folder)
        return False


def say(line: str) -> None:
    """Print a line at once, if anybody still reads: after ``| head`` the runs go on."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


def gpus_of(settings: Iterable[Settings]) -> list[str]:
    """Return the GPUs on which some runs are computed; none where all are on the CPU."""
    return visible_gpus() if torch.cuda.is_available() and any(each.device != "cpu" for each in settings) else []


def run_all(
    jobs: Iterable[Job], total: int, workers: int | None = None, gpus: Sequence[str] = (), slurm: Sequence[str] = ()
) -> list[tuple[Job, str]]:
    """Run the jobs, say what is done and how long is left; returns those that failed and why.

    A process that is killed takes the others with it: what they ran has failed, and no further job is asked for. Ctrl-C
    ends them at once.

    ``jobs``: asked for the next one whenever there is room for it, so that it may depend on those that have ended.
    ``total``: number of jobs, or how many there are at most. ``workers``: runs at a time; ``None``: as many as there
    are GPUs, without any as there are cores. ``gpus``: each process takes one of these, in turn (:func:`gpus_of`).
    ``slurm``: options of a cluster, whose jobs the runs are (:class:`SlurmPool`).
    """
    if not total:
        return []
    workers = min(workers or (MANY_JOBS if slurm else len(gpus) or cores()), total)
    failures: list[tuple[Job, str]] = []
    waiting, progress = iter(jobs), BatchProgress(total)
    made = SlurmPool(workers, slurm, runs_folder() / "slurm") if slurm else _processes(workers, gpus)
    with made as pool, _ended_by_ctrl_c():
        running: dict[Future[str], Job] = {}
        while True:
            for job in islice(waiting, workers - len(running)):
                try:
                    with contextlib.nullcontext() if slurm else _ctrl_c_later():  # submitit cancels jobs by SIGINT
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
                said = one_line(error) if error else future.result()
                if reason := KILLED if isinstance(error, BrokenProcessPool) else said:
                    failures.append((job, reason))
                progress.end(job, failed=bool(reason))
            progress.look()


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End this process's own ones on Ctrl-C, without which a pool waits until their runs have ended."""
    try:
        yield
    except KeyboardInterrupt:
        for child in active_children():
            child.terminate()
        raise KeyboardInterrupt("the same command goes on") from None


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Hold Ctrl-C back, and for good from the processes that begin here: while they import it would be a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _processes(workers: int, gpus: Sequence[str]) -> ProcessPoolExecutor:
    context = get_context("spawn")
    turns: SimpleQueue[str] = context.SimpleQueue()
    for gpu in islice(cycle(gpus), workers):
        turns.put(gpu)
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(turns if gpus else None,))


def _begin(turns: "SimpleQueue[str] | None") -> None:
    """Prepare a process that runs jobs: it sees the GPU whose turn it is, and ends with its parent alone."""
    if turns is not None:
        os.environ[VISIBLE] = turns.get()
    parent = parent_process()
    assert parent

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_job(overrides: Mapping[str, Value], folder: Path) -> str:
    """Run or continue one run in this process; returns why it failed, or nothing."""
    from fedsub_app.deployment.engines import log_lines, run_local

    log = logging.getLogger("fedsub")
    keys = dict(overrides)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        log_lines(folder.parent / f"{folder.name}.log")
        # A longer run is begun anew: an extended one was evaluated at its first end, between two due rounds.
        if Job(folder.name, overrides, folder).begun():
            keys["resume"] = True
            keys.pop("experiment", None)  # the same settings, perhaps by another name
        elif folder.exists():
            with contextlib.suppress(NotADirectoryError), FileLock(folder / ".lock", timeout=0):
                pass  # a run of another command, which would go on in the folder of this one
            kept = folder.rename(folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))
            log.warning("%s: of other settings or code, or damaged; kept as %s", folder, kept.name)
        run_local(keys, wait=True)
        states = folder / "clients"
        had_states = any(states.glob("client-*"))
        shutil.rmtree(states, ignore_errors=True)
        if had_states:
            states.mkdir()  # empty: the run cannot get more rounds
    except (UserError, RunFailed) as error:
        return str(error)
    except Timeout:
        return f"{folder}: another process is running it, with other settings"
    return ""


def facts(command: str, seeds: Iterable[int], jobs: Sequence[Job]) -> dict[str, str]:
    """Return what stands above the table of a batch: command, commits, seeds, machines and data."""
    from fedsub_app.data import load_dataset

    def data(settings: Settings) -> str:
        notes = load_dataset(settings.data).notes
        return settings.dataset + (f" ({', '.join(notes)})" if notes else "")

    done = [job for job in jobs if job.summary()] or jobs  # the data of others may be missing, for which they failed
    return {
        "command": command,
        "commit": ", ".join(sorted({_commit(job) for job in jobs})),
        "seeds": ", ".join(map(str, seeds)),
        "machine": f"{'; '.join(sorted({_machine(job) for job in jobs}))}; one thread a run",
        "data": "; ".join(sorted({data(job.settings) for job in done})),
    }


def _commit(job: Job) -> str:
    with contextlib.suppress(UserError):
        return str(read_json(job.folder / "settings.json").get("commit", "unknown"))
    return "not run"


def _machine(job: Job) -> str:
    """Return in words the machine that computed a run, perhaps another than this one."""
    with contextlib.suppress(UserError, KeyError):
        recorded = read_json(job.folder / "settings.json")
        machine, gpu = recorded["machine"], recorded["device"].get("name", "no GPU")
        return f"{machine.get('model', machine['processor'])}, {machine['cpus']} cores, {gpu}"
    return "unknown"


class SlurmPool(ThreadPoolExecutor):
    """A thread a run, which waits for its job; jobs that have not ended are cancelled when this process is stopped.

    ``workers``: jobs at a time. ``options``: ``key=value``, keys of ``submitit.AutoExecutor``, such as ``timeout_min``
    and ``slurm_partition``; ``cluster=local`` starts the jobs on this machine. ``folder``: where submitit writes its
    scripts, pickles and logs: a folder that all machines of the cluster see.
    """

    def __init__(self, workers: int, options: Sequence[str], folder: Path) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError("--slurm: needs the package submitit; `pip install 'fedsub[slurm]'`") from None
        super().__init__(workers)
        keys: dict[str, Any] = parse_pairs(options)
        cluster = keys.pop("cluster", "slurm")
        if cluster == "slurm" and not keys.keys() & {"timeout_min", "slurm_time"}:
            raise UserError("--slurm: timeout_min is missing, the minutes that a run may take (submitit has 5)")
        try:
            self._cluster = submitit.AutoExecutor(folder, cluster=cluster)
            self._cluster.update_parameters(**keys)
        except (NameError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"--slurm {' '.join(options)}: {str(error).splitlines()[0]}") from None
        self._stopped = Event()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the jobs would outlive us

    def submit(self, run: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        """Return the future of ``run(*arguments)``, which a job of the cluster computes."""
        return super().submit(self._wait_for, run, *arguments, **named)

    def _wait_for(self, run: Any, *arguments: Any, **named: Any) -> Any:
        job = self._cluster.submit(run, *arguments, **named)
        while not job.done():
            if self._stopped.wait(1):
                job.cancel(check=False)  # the cluster may refuse: it has ended, or nobody answers
                return KILLED
        return job.result()

    def __exit__(self, kind: Any, *details: Any) -> None:
        if kind:
            self._stopped.set()
            self.shutdown(wait=False, cancel_futures=True)
        super().__exit__(kind, *details)


class BatchProgress:
    """Says how far several runs, at most ``total``, are: a line for each that ends and, now and then, one about all."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun: dict[str, tuple[Job, int]] = {}  # and the round in which it did
        self._ended: set[str] = set()
        self._start = self._last = time.monotonic()

    def start(self, job: Job) -> None:
        self._begun[job.name] = (job, job.last_round)

    def end(self, job: Job, failed: bool) -> None:
        self._ended.add(job.name)
        say(f"{'FAILED' if failed else 'done'}  {job.name}")

    def look(self) -> None:
        """Print how far all runs are, unless the last such line is too recent."""
        now = time.monotonic()
        if len(self._begun) == len(self._ended) or now - self._last <= LINE_SECONDS:
            return
        self._last = now
        jobs = [job for job, _ in self._begun.values()]
        known = [job.settings.num_rounds for job in jobs]
        done = sum(n if job.name in self._ended else job.last_round for job, n in zip(jobs, known, strict=True))
        total = self._total * sum(known) / len(known)
        # A resumed run first goes back to its last checkpoint.
        rate = (done - sum(first for _, first in self._begun.values())) / (now - self._start)
        left = human_seconds((total - done) / rate) if rate > 0 else "unknown"
        to_go = self._total - len(self._ended)
        say(f"{done} of {total:.0f} rounds, {to_go} runs to go, left {left}")
