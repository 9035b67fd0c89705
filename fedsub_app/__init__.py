"""fedsub: run, compare and deploy sub-network federated learning with Flower."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds
    from fedsub_app.common.section import Value
    from fedsub_app.common.tasks import Task
    from fedsub_app.reports.records import Record
    from fedsub_app.runs.methods import Method
    from fedsub_app.training.problem import Model


def run(
    settings: "Mapping[str, Value]",
    workers: int = 1,
    *,
    model: "Model | None" = None,
    data: object = None,
    task: "Task | str | None" = None,
) -> "Record":
    """Run on the local engine, as ``fedsub run`` does; returns what the run's directory then holds.

    Parameters
    ----------
    settings : single keys on top of their experiment's and the defaults, as in TOML: ``{"num-rounds": 20}``.
    workers : processes; 1: all in this one.
    model, data : a network's class, and ``(train, test)``, each a pair of tensors or a map-style torch data set of
        pairs, in the place of the data and the network that the keys name; the keys share the samples out to clients.
    task : a name, as the key's, or an object derived from ``fedsub.Task``, in the place of the task that the keys name.

    Raises
    ------
    UserError
        Bad input, before round 1: one line that names the key, the value and what is allowed.
    RunFailed
        The run could not go on; its ``folder`` may hold a checkpoint to resume from.
    """
    from fedsub_app.deployment.engines import run_local
    from fedsub_app.reports.records import read_run

    return read_run(Path(run_local(settings, workers, model, data, wait=True, task=task)["run-dir"]))


def register(name: str, method: "Method") -> None:
    """Add a method that is written in a script or notebook to this process's register, or replace it there.

    :func:`run` then takes it as ``"method": name`` and its keys as ``"name.key"``, with any number of workers where
    they are forked from this process (Linux, on the CPU). Other processes, those of the ``fedsub`` command and of
    Flower's engines, know the methods of packages and of files, ``"FILE.py:NAME"`` (docs/adding-a-method.md).

    Raises
    ------
    UserError
        The name is none, or that of a method of the package.
    """
    from fedsub_app.runs import config

    config.register(name, method)
