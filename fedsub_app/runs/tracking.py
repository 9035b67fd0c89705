"""Rounds for an experiment tracker as well: TensorBoard, MLflow, Weights & Biases.

What counts stays in rounds.jsonl. A tracker is told the numbers of every line, the settings as parameters and the
run's folder as its name. It is asked, when a run is opened, which round it was told last: a resumed run goes on there,
without points that are there twice, and rounds that it has missed are told later.

A tracker's own environment variables say where it writes. Without them: TensorBoard's events lie in the run directory,
so that ``tensorboard --logdir runs`` shows all runs, MLflow's in ``mlflow.db`` beside it.
"""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from fedsub_app.common.errors import UserError, one_line, printable
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json

log = logging.getLogger("fedsub")
Name = Literal["none", "tensorboard", "mlflow", "wandb"]
PROJECT = "fedsub"  # MLflow's experiment, the project of Weights & Biases
LAST = "round"  # a number of every round, which is told last


class Tracker(Protocol):
    """What is asked of a tracker."""

    def last_round(self) -> int:
        """Return the last round that it was told; -1 without one."""

    def tell(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a round."""

    def end(self, completed: bool) -> None:
        """The run is over."""


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._last = self._read(folder)
        self._writer = SummaryWriter(str(folder))
        if self._last < 0:
            for summary in hparams(dict(settings), {}):
                self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    @staticmethod
    def _read(folder: Path) -> int:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        return max((event.step for event in events.Scalars(LAST)), default=-1) if LAST in events.scalars.Keys() else -1

    def last_round(self) -> int:
        """Return the last round in the event files."""
        return self._last

    def tell(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, server_round)
        self._writer.flush()

    def end(self, completed: bool) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run of the experiment ``fedsub``; it has the run's id as the tag ``fedsub.run-id``."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
        self._client = MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if self._client.get_experiment_by_name(name) is None:
            artifacts = (folder.parent / "mlflow-artifacts").as_uri() if place.startswith("sqlite:") else None
            with suppress(MlflowException):  # another run has made it meanwhile
                self._client.create_experiment(name, artifacts)
        experiment = self._client.get_experiment_by_name(name)
        assert experiment, f"{place}: the experiment {name} cannot be made"
        found = self._client.search_runs([experiment.experiment_id], f"tags.`fedsub.run-id` = '{run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"fedsub.run-id": run_id, "fedsub.folder": str(folder)}
        run = self._client.create_run(experiment.experiment_id, tags=tags, run_name=_name(folder))
        self._id = run.info.run_id
        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # MLflow's limit
            self._client.log_batch(self._id, params=params[start : start + 100])

    def last_round(self) -> int:
        """Return the last round in the store."""
        return max((metric.step for metric in self._client.get_metric_history(self._id, LAST)), default=-1)

    def tell(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write a metric for each number, in one batch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(key, value, now, server_round) for key, value in numbers.items()])

    def end(self, completed: bool) -> None:
        """Say how the run has ended."""
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


class Wandb:
    """A run of Weights & Biases; what it was told last stands in the run directory: offline it cannot be asked."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=_name(folder),
            config=dict(settings),
            resume="allow",
            id=run_id,
            dir=str(folder),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._told = folder / ".wandb-told"

    def last_round(self) -> int:
        """Return the round in the file."""
        return int(self._told.read_text()) if self._told.exists() else -1

    def tell(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers as a step."""
        self._wandb.log(dict(numbers), step=server_round)
        self._told.write_text(str(server_round))

    def end(self, completed: bool) -> None:
        """End the run."""
        self._wandb.finish()


def check_tracker(name: Name) -> None:
    """Refuse a tracker whose package is missing.

    Raises
    ------
    UserError
        It says what to install.
    """
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"track = {name!r}: needs its package; `pip install -e '.[{name}]'` in the checkout")


class Tracking:
    """Tells a tracker the rounds of a run; where it fails, the run goes on without it.

    Parameters
    ----------
    folder : the run directory.
    settings : all keys in TOML spelling.

    Raises
    ------
    UserError
        The tracker cannot be opened.
    """

    def __init__(self, name: Name, folder: Path, run_id: str, settings: Mapping[str, Value]) -> None:
        self._tracker: Tracker | None = None
        self._name = name
        try:
            if name == "tensorboard":
                self._tracker = TensorBoard(folder, run_id, settings)
            elif name == "mlflow":
                self._tracker = MLflow(folder, run_id, settings)
            elif name != "none":
                self._tracker = Wandb(folder, run_id, settings)
            self._last = self._tracker.last_round() if self._tracker else -1
        except Exception as error:  # whatever a tracker raises: no server, no key, a full disk
            raise UserError(f"track = {name!r}: {printable(one_line(error))}") from None

    def follow(self, lines: Sequence[Json]) -> None:
        """Tell the rounds that are new; ``lines``: those of rounds.jsonl so far."""
        new = list(takewhile(lambda line: line["round"] > self._last, reversed(lines)))
        for line in reversed(new):
            self._try(partial(_tell, line))
            self._last = line["round"]

    def end(self, completed: bool) -> None:
        """The run is over."""
        self._try(lambda tracker: tracker.end(completed))

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            self._tracker = None
            said = "track = %r: %s; the run goes on without it, rounds.jsonl has every round"
            log.warning(said, self._name, printable(one_line(error)))


def _tell(line: Json, tracker: Tracker) -> None:
    tracker.tell(line["round"], numbers_of(line))


def numbers_of(line: Json) -> dict[str, float]:
    """Return the numbers of a round's line; the round itself comes last, and of refused replies how many there were."""
    numbers = {
        key: float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    numbers["dropped"] = float(len(line.get("dropped", ())))
    numbers[LAST] = numbers.pop(LAST)
    return numbers


def _name(folder: Path) -> str:
    """Return how a tracker names a run: by its folder; the folder of a seed of a table with the row's."""
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("seed") else folder.name
