"""A run is a directory: settings, one JSON line a round, checkpoints, client state, summary, final model, pictures.

====================================  =================================================================================
settings.json                         settings, their digest, run id, versions
partition.json, partition.png         client × class counts
rounds.jsonl                          one line a round, written and synced before the round counts
checkpoints/round-000012.safetensors  global model and the strategy's state after that round
clients/client-000003/…               the clients' durable state (simulation; a real node keeps its own)
summary.json, model.safetensors       written when the run ends
====================================  =================================================================================

Killed at any moment and resumed, a run gives bit-identical weights and metrics on the CPU: everything random depends on
(seed, round, client, purpose), what a round needs lies in the last checkpoint, and lines after it are cut off.
"""

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import flwr
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedsub_app.common.code import code_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors, prefixed, unprefixed
from fedsub_app.config import resolve, spelled
from fedsub_app.settings import LOCATION_KEYS, Settings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RunFailed(Exception):
    """The run could not go on (too many abandoned rounds); ``folder`` holds a checkpoint to resume from."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def settings_of(overrides: Mapping[str, Value]) -> Settings:
    """Resolve a run's settings; with ``resume`` those of its directory, which the other keys must not contradict."""
    if not overrides.get("resume"):
        return resolve(overrides)
    folder = Path(str(overrides.get("run-dir", "")))
    recorded = _recorded(folder)["settings"]
    for key, value in overrides.items():
        if key not in LOCATION_KEYS and recorded.get(key) != spelled(key, value):
            raise UserError(f"{key} = {value!r}: the run to resume in {folder} has {recorded.get(key)!r}")
    location = {key: value for key, value in overrides.items() if key in LOCATION_KEYS and key != "experiment"}
    settings = resolve({key: value for key, value in recorded.items() if key != "experiment"} | location)
    return settings.model_copy(update={"experiment": recorded.get("experiment") or None})


def _recorded(folder: Path) -> Json:
    """Return what ``open_run`` wrote into a run's settings.json."""
    path = folder / "settings.json"
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: not there; run-dir must be the directory of an earlier run") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    found: Json = content if isinstance(content, dict) else {}
    if not isinstance(found.get("settings"), dict) or "run-id" not in found:
        raise UserError(f"{path}: not a run's settings (settings, run-id)")
    return found


def _lock(folder: Path) -> TextIO:
    """Lock the directory; returns the open file that holds the lock until it is closed or the process ends."""
    file = (folder / ".lock").open("w")
    if fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"run-dir = {str(folder)!r}: another process is running it") from None
        except OSError:  # a file system without locks
            pass
    return file


@dataclass(frozen=True)
class Checkpoint:
    """What a finished round leaves behind; before the first one round 0 and no tensors.

    Attributes
    ----------
    round : number of the finished round.
    model : the global model after it, named tensors.
    state : what :meth:`strategies.base.SubnetStrategy.state` returned after it.
    abandoned : how many rounds in a row, up to this one, were abandoned.
    digest : that of the settings it belongs to.
    """

    round: int = 0
    model: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    abandoned: int = 0
    digest: str = ""

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        tensors = prefixed("model/", self.model) | prefixed("state/", self.state)
        header = {"round": str(self.round), "digest": self.digest, "abandoned": str(self.abandoned)}
        # A copy of each tensor: safetensors refuses tensors that share memory.
        write_atomic(path, save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, header))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what :meth:`Checkpoint.write` wrote; the tensors are in the order of the file, not of the model.

    Raises
    ------
    UserError
        The file is truncated or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        model, state = unprefixed("model/", tensors), unprefixed("state/", tensors)
        return Checkpoint(int(header["round"]), model, state, int(header["abandoned"]), header["digest"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: checkpoint is truncated or damaged ({error}); delete it to resume from the one before"
        ) from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in the directory of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


class Run:
    """The directory of one run, locked against other processes. Use :func:`open_run`, and close it."""

    def __init__(self, folder: Path, settings: Settings, run_id: str) -> None:
        self.folder = folder
        self.settings = settings
        self.run_id = run_id
        self.lines: list[Json] = []
        self._lock = _lock(folder)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    @property
    def state_folder(self) -> Path:
        """Where clients on this machine keep their state."""
        return self.folder / "clients"

    def write_json(self, name: str, content: Json) -> None:
        """Write the file ``name`` of the run, atomically."""
        write_atomic(self.folder / name, (json.dumps(content, indent=2) + "\n").encode())

    def log_round(self, line: Json) -> None:
        """Append a round's line and wait until it is on disk."""
        self.lines.append(line)
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def checkpoint(self, server_round: int, model: Mapping[str, torch.Tensor], state: Tensors, abandoned: int) -> None:
        """Write the checkpoint of a finished round; drop the oldest beyond ``keep-checkpoints``."""
        finished = Checkpoint(server_round, dict(model), state, abandoned, self.settings.digest())
        finished.write(self.folder / "checkpoints" / f"round-{server_round:06d}.safetensors")
        keep, found = self.settings.keep_checkpoints, checkpoints(self.folder)
        for path in found[:-keep] if keep else []:
            path.unlink(missing_ok=True)

    @property
    def oldest_round(self) -> int:
        """Round of the oldest checkpoint there, from which a resume may start; 0 without one."""
        return int(found[0].stem.removeprefix("round-")) if (found := checkpoints(self.folder)) else 0

    def restore(self) -> Checkpoint:
        """Return the last checkpoint and cut off the lines of later rounds.

        Raises
        ------
        UserError
            The checkpoint is truncated or damaged, or belongs to other settings.
        """
        last = Checkpoint()
        if found := checkpoints(self.folder):
            path, wanted = found[-1], self.settings.digest()
            last = read_checkpoint(path)
            if last.digest != wanted:
                raise UserError(f"{path}: checkpoint of other settings (digest {last.digest}, this run's is {wanted})")
        self._cut_lines(last.round)
        return last

    def _cut_lines(self, last_round: int) -> None:
        lines = read_rounds(self.folder) if last_round else []  # without a checkpoint round 0 is measured again, too
        self.lines = [line for line in lines if line["round"] <= last_round]
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        write_atomic(self.folder / "rounds.jsonl", text.encode())

    def finish(self, status: str, model: Mapping[str, torch.Tensor]) -> Json:
        """Write the final model and the summary; returns the summary."""
        write_atomic(
            self.folder / "model.safetensors", save({name: tensor.contiguous() for name, tensor in model.items()})
        )
        summary = summarise(self.lines, self.settings) | {"status": status, "run-dir": str(self.folder)}
        self.write_json("summary.json", summary)
        return summary


def open_run(settings: Settings) -> Run:
    """Create the run directory, or open that of a run to resume.

    Raises
    ------
    UserError
        The directory exists and is not empty, cannot be made, or (resume) is not one of a run.
    """
    if settings.run_dir:
        folder = Path(settings.run_dir).resolve()
        if settings.resume:
            return Run(folder, settings, str(_recorded(folder)["run-id"]))
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"run-dir = {settings.run_dir!r}: exists and is not empty; resume = true continues it")
    else:
        root = Path(os.environ.get("FEDSUB_RUNS", "runs")).resolve()
        name = (settings.experiment or f"{settings.method}-{settings.dataset}").replace("/", "-").replace("+", "-")
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-seed{settings.seed}"
        folder = next(
            path
            for number in range(1, 1000)
            if not (path := root / (stamp if number == 1 else f"{stamp}-{number}")).exists()
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, no permission, read-only disk
        raise UserError(f"run-dir = {str(folder)!r}: cannot be made ({error.strerror})") from None
    run = Run(folder, settings, uuid.uuid4().hex[:12])
    run.write_json(
        "settings.json",
        {
            "run-id": run.run_id,
            "digest": settings.digest(),
            "settings": settings.flat(),
            "code": code_digest(),
            "commit": _commit(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "flwr": flwr.__version__},
            "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "system": platform.system()},
        },
    )
    return run


def _commit() -> str:
    """Return the checkout's commit, ``-dirty`` with changes; a Flower bundle has none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "not a git checkout"


def read_rounds(folder: Path) -> list[Json]:
    """Return the rounds' lines of a run; a torn last line (the machine died while writing) is left out."""
    path = folder / "rounds.jsonl"
    lines: list[Json] = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


ACCURACIES = (
    *("global-accuracy", "global-local-accuracy", "personal-accuracy"),
    *("global-local-validation-accuracy", "personal-validation-accuracy"),
)
TOTALS = (
    "bytes-down",
    "bytes-up",
    "formula-bytes-down",
    "formula-bytes-up",
    "flops",
    "published-flops",
    "subnet-flops",
    "seconds",
    "compute-seconds",
)


def used_up(lines: list[Json], settings: Settings) -> str | None:
    """Return which budget these rounds have used up: ``max-flops``, ``max-bytes`` or none."""
    spent = {
        "max-flops": (settings.max_flops, ("flops",)),
        "max-bytes": (settings.max_bytes, ("formula-bytes-down", "formula-bytes-up")),
    }
    for key, (most, counted) in spent.items():
        if most and sum(line.get(count, 0) for line in lines for count in counted) >= most:
            return key
    return None


def summarise(lines: list[Json], settings: Settings) -> Json:
    """Return final and best accuracies (percent), rounds to the target, totals of bytes, FLOPs and seconds."""
    summary: dict[str, Any] = {
        "method": settings.method,
        "dataset": settings.dataset,
        "seed": settings.seed,
        "rounds": max((line["round"] for line in lines), default=0),
        "abandoned-rounds": sum(line.get("status") == "abandoned" for line in lines),
        "dropped-replies": sum(len(line.get("dropped", ())) for line in lines),
    }
    for key in ACCURACIES:
        values = [(line["round"], line[key]) for line in lines if key in line]
        if values:
            summary[f"final-{key}"] = values[-1][1]
            summary[f"best-{key}"] = max(value for _, value in values)
            if settings.target_accuracy and key == settings.evaluations[0] + "-accuracy":
                reached = [number for number, value in values if value >= settings.target_accuracy]
                summary["rounds-to-target"] = reached[0] if reached else None
    if budget := used_up(lines, settings):
        summary["ended-by"] = budget
    return summary | {f"total-{key}": sum(line.get(key, 0) for line in lines) for key in TOTALS}
