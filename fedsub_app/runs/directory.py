"""A run is a directory: settings, one JSON line a round, checkpoints, client state, summary, final model, pictures.

docs/outputs.md lists its files. A line of rounds.jsonl is written and synced before its round counts.

Killed at any moment and resumed, a run gives bit-identical weights and metrics on the CPU: everything random depends on
(seed, round, client, purpose), the last checkpoint holds all that the next round needs, and later lines are cut off.
"""

import hashlib
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fedsub_app.common.code import code_digest, versions
from fedsub_app.common.device import device_facts
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import sweep, write_atomic, write_json
from fedsub_app.common.machine import machine_facts
from fedsub_app.common.own_code import OWN, code_file, state_of
from fedsub_app.common.score import Score
from fedsub_app.common.tensor_files import round_file, round_files, write_tensors
from fedsub_app.common.tensors import CPU, Json, Tensors
from fedsub_app.data import READERS, data_folder, matching
from fedsub_app.models import check_base
from fedsub_app.runs.audit import append
from fedsub_app.runs.checkpoint import Checkpoint, checkpoints, read_checkpoint, start_file
from fedsub_app.runs.methods import BUILT_IN, installed
from fedsub_app.runs.recorded import (
    EXTENDED,
    OWN_CODE,
    RunFailed,
    new_folder,
    own_code,
    read_recorded,
    resume_command,
    settings_of,
)
from fedsub_app.runs.rounds import ROUNDS, from_line, read_rounds, summarise, to_line
from fedsub_app.settings import Settings, digest

DATA = "samples"  # key of settings.json: digest of the samples
BASE = "base"  # key of settings.json: digest of the network's frozen base
ENDING_SECONDS = 2  # a killed command's processes may take so long to end


class Run:
    """The directory of one run, locked against other processes. Use :func:`open_run`, and close it.

    ``continuation``: the command or call that resumes the run, for the messages of a failure. ``at_close``: what ends
    with the run, however it ends.
    """

    def __init__(self, folder: Path, settings: Settings, run_id: str) -> None:
        self.folder = folder
        self.settings = settings
        self.run_id = run_id
        self.lines: list[Json] = []
        self.last_round = 0
        self.continuation = resume_command(folder)
        method = settings.method
        named = ":" in method or method in BUILT_IN or method in installed().names
        if OWN in (settings.dataset, settings.task.partition(":")[0]) or not named:
            self.continuation = f"fedsub.run({{'run-dir': {str(folder)!r}, 'resume': True}}, …)"
        self.at_close = ExitStack()
        self._lock = FileLock(folder / ".lock", timeout=ENDING_SECONDS, mode=0o600)
        try:
            self._lock.acquire()
        except Timeout:
            raise UserError(f"run-dir = {str(folder)!r}: another process is running it") from None
        except OSError as error:
            raise UserError(f"run-dir = {str(folder)!r}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        self.at_close.close()
        self._lock.release()

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """Turn an error in writing a file of the run into :class:`RunFailed`, one line."""
        path = self.folder / name
        try:
            if not (self.folder / "settings.json").exists():
                raise RunFailed(f"{self.folder}: the run directory, or its settings.json, was deleted", self.folder)
            yield path
        except OSError as error:
            reason = f"{path}: cannot be written ({error.strerror})"
            raise RunFailed(f"{reason}; when it can, `{self.continuation}` goes on", self.folder) from None

    def write_json(self, name: str, content: Json) -> None:
        """Write the file ``name`` of the run, atomically."""
        with self._writing(name) as path:
            write_json(path, content)

    def audit(self, log: Path, event: str, **about: object) -> None:
        with self._writing(str(log)):
            append(log, event, run=self.run_id, **about)

    def log_round(self, line: Json) -> None:
        """Append a round's line and wait until it is on disk."""
        text = to_line(line)
        self.lines.append(from_line(text))
        self.last_round = line["round"]
        with self._writing(ROUNDS) as path, path.open("a") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())

    def extend(self, recorded: Json) -> None:
        """Write the limits that allow more than those of settings.json, ``recorded``, into it, where there are any.

        The summary is deleted first: if the process is killed in between, the run counts as not ended.
        """
        flat, before = self.settings.flat(), recorded["settings"]
        changed = before | {key: flat[key] for key in EXTENDED if key in before}
        if changed == before:
            return
        with self._writing("summary.json") as path:
            path.unlink(missing_ok=True)
        self.write_json("settings.json", recorded | {"settings": changed, "digest": digest(changed)})

    def reopen(self) -> None:
        """Delete the outcome of an earlier end: rounds follow, and until the next end the last checkpoint counts."""
        for name in ("summary.json", "model.safetensors"):
            with self._writing(name) as path:
                path.unlink(missing_ok=True)

    def checkpoint(self, server_round: int, model: Mapping[str, torch.Tensor], state: Tensors, abandoned: int) -> None:
        """Write the checkpoint of a finished round; drop the oldest beyond ``keep-checkpoints``."""
        finished = Checkpoint(server_round, dict(model), state, abandoned, self.run_id)
        with self._writing("checkpoints") as folder:
            finished.write(round_file(folder, server_round))
            keep, files = self.settings.keep_checkpoints, checkpoints(self.folder)
            for path in files[:-keep] if keep else []:
                path.unlink(missing_ok=True)

    @property
    def checkpoint_rounds(self) -> list[int]:
        """Rounds of the checkpoints on disk, from which a resume may start."""
        return list(round_files(self.folder / "checkpoints"))

    def restore(self) -> Checkpoint:
        """Return the last checkpoint; cut off the lines of later rounds and delete a killed writer's files."""
        last = Checkpoint()
        if files := checkpoints(self.folder):
            last = read_checkpoint(files[-1])
            if last.run not in ("", self.run_id):
                raise UserError(f"{files[-1]}: checkpoint of another run ({last.run}, this one is {self.run_id})")
        lines = read_rounds(self.folder) if last.round else []  # without a checkpoint round 0 is measured again, too
        self.lines, self.last_round = [line for line in lines if line["round"] <= last.round], last.round
        sweep(self.folder)
        with self._writing(ROUNDS) as path:
            write_atomic(path, "".join(f"{to_line(line)}\n" for line in self.lines).encode())
        return last

    def is_best(self, line: Json) -> bool:
        """Say whether a round's line has a better score, the first of ``evaluate``, than all before it."""
        score = self.settings.score
        key = f"{self.settings.evaluations[0]}-{score.name}"
        before = [other[key] for other in self.lines if key in other]
        return math.isfinite(line.get(key, math.nan)) and all(score.better(line[key], other) for other in before)

    def keep_best(self, model: Mapping[str, torch.Tensor]) -> None:
        with self._writing("model-best.safetensors") as path:
            write_tensors(path, model)

    def finish(self, status: str, model: Mapping[str, torch.Tensor]) -> Json:
        """Write the final model and the summary; returns the summary."""
        with self._writing("model.safetensors") as path:
            write_tensors(path, model)
        summary = summarise(self.lines, self.settings) | {"status": status, "run-dir": str(self.folder)}
        if missing := sorted(set(range(1, self.last_round + 1)) - {line["round"] for line in self.lines}):
            summary["missing-rounds"] = missing  # their lines were deleted: the totals are without them
        self.write_json("summary.json", summary)
        return summary


def open_run(settings: Settings, device: torch.device = CPU, base: str = "", data: str = "") -> Run:
    """Create the run directory, or open the directory of a run to resume.

    ``device``: the device that computes it; ``base``, ``data``: digests of the network's frozen base, of the samples.

    :class:`UserError`: the directory exists and is not empty, or cannot be made. With ``resume``: the directory has no
    run, or its run was computed on another kind of device and the settings do not name this one.
    """
    folder = Path(settings.run_dir or new_folder(settings)).expanduser().resolve()
    if settings.resume:
        recorded = read_recorded(folder)
        before, now = recorded.get("device", {}).get("type", device.type), device.type
        if settings.device == "auto" and before != now:
            here = f"here it would be {now}, with other rounding; device = {now} goes on with it"
            raise UserError(f"device = 'auto': the run in {folder} was computed on {before}, {here}")
        if said := changed_file(settings, recorded, folder):
            raise UserError(said)
        check_base(settings.model, base, recorded.get(BASE, ""), "the run's")
        if recorded.get(DATA, data) != data:
            raise UserError(f"dataset = {settings.dataset!r}: the samples have changed since the run in {folder} began")
        run = Run(folder, settings, recorded["run-id"])
        run.extend(recorded)
        return run
    content: Json = {
        "run-id": uuid.uuid4().hex[:12],
        "digest": settings.digest(),
        "settings": settings.flat(),
        "score": dict(zip(Score._fields, settings.score[:3], strict=False)),  # pages read it without the task's code
        "code": code_digest(),
        "commit": _commit(),
        "versions": versions("numpy", "torchvision"),
        "device": device_facts(device),
        "machine": machine_facts() | {"capability": torch.backends.cpu.get_cpu_capability()},
        OWN_CODE: _own_digests(settings),
        BASE: base,
        DATA: data,
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, no permission, read-only disk
        raise UserError(f"run-dir = {str(folder)!r}: cannot be made ({error.strerror})") from None
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"run-dir = {settings.run_dir!r}: exists and is not empty; resume = true continues it")
    run = Run(folder, settings, content["run-id"])
    try:
        write_json(folder / "settings.json", content)
    except OSError as error:
        run.close()
        raise UserError(f"run-dir = {str(folder)!r}: cannot be written ({error.strerror})") from None
    return run


def changed_file(settings: Settings, recorded: Json, folder: Path) -> str:
    """Say which file of the user has changed since the run in ``folder`` was recorded; "" if there is none."""
    then = recorded.get(OWN_CODE, {})
    for key, now in _own_digests(settings).items():
        if now and then.get(key, now) != now:
            return f"{key} = {settings.flat()[key]!r}: the file has changed since the run in {folder} began"
    return ""


def settings_in(folder: Path) -> Settings:
    """Return the settings of the run in a directory; a note on stderr names a file that has changed since."""
    settings = settings_of({"run-dir": str(folder), "resume": True})
    if said := changed_file(settings, read_recorded(folder), folder):
        print(f"note: {said}", file=sys.stderr)
    return settings


def _own_digests(settings: Settings) -> dict[str, str]:
    """Return the digests of the user's files that settings name, by key; "" of one that is gone."""
    digests = {key: state_of(text) for key, text in own_code(settings.flat()).items() if code_file(text)}
    kind, _, name = settings.dataset.partition(":")
    if kind in READERS and (tables := matching(name, data_folder(settings.data_dir))):
        digests["dataset"] = _digest_of(tables)
    if settings.start_from and start_file(settings).is_file():
        digests["start-from"] = _digest_of([start_file(settings)])
    return digests


def _digest_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of files, one behind the other."""
    checksum = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: checksum)
    return checksum.hexdigest()


@cache
def _commit() -> str:
    """Return the checkout's commit at the first call, ``-dirty`` with changes; a Flower bundle has none."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    only = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}  # of a repository around an installed package
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=only)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "not a git checkout"
