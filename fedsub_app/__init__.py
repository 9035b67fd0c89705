"""fedsub: run, compare and deploy sub-network federated learning with Flower."""

from collections.abc import Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds
    from fedsub_app.common.section import Value
    from fedsub_app.common.tasks import Task
    from fedsub_app.reports.records import Record
    from fedsub_app.runs.methods import Method
    from fedsub_app.training.problem import Model

_ONE = RLock()


def run(
    settings: "Mapping[str, Value]",
    workers: int = 1,
    *,
    model: "Model | None" = None,
    data: object = None,
    task: "Task | str | None" = None,
) -> "Record":
    """Run on the local engine, as ``fedsub run`` does; return the record that is read from the run's directory.

    Threads that call it take turns, because all draw from torch's global generator.

    Parameters
    ----------
    settings : keys as in TOML, ``{"num-rounds": 20}``; they override their experiment's keys and the defaults.
    workers : number of processes; 1: everything runs in this process.
    model, data : a network's class, and ``(train, test)``, each a pair of tensors or a map-style torch data set of
        pairs. The keys still partition the samples; a key that names a network or data is refused beside them.
    task : a name, as in the key ``task``, or an object derived from ``fedsub.Task``; it replaces the keys' task.

    Raises
    ------
    UserError
        Bad input, before round 1: one line that names the key, the value and what is allowed.
    RunFailed
        The run could not go on; its ``folder`` may hold a checkpoint to resume from.
    """
    from fedsub_app.deployment.engines import run_local
    from fedsub_app.reports.records import read_run

    with _ONE:
        return read_run(Path(run_local(settings, workers, model, data, wait=True, task=task)["run-dir"]))


def register(name: str, method: "Method") -> None:
    """Register a method that a script or notebook defines, in this process; a method of the same name is replaced.

    :func:`run` then takes the method as ``"method": name`` and its keys as ``"name.key"``. Any number of workers know
    it if they are forked from this process (Linux, on the CPU). Other processes, those of the ``fedsub`` command and of
    Flower's engines, know the methods of packages and of files, ``"FILE.py:NAME"`` (docs/adding-a-method.md).

    Raises
    ------
    UserError
        The name is not valid, or a method of the package has it.
    """
    from fedsub_app.runs import config

    config.register(name, method)
