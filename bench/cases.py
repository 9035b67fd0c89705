"""The cases of ``bench/peers.py``: what every peer computes, and how its rounds are counted."""

import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from bench.baselines import CLASSES, IMAGE, Data, State
from bench.measures import BATCH, experiment
from fedsub_app.common.section import Value
from fedsub_app.models import build_model
from fedsub_app.runs.config import resolve

NETWORKS = {"lenet5": 5000, "fedpews-cnn": 1000, "resnet18-gn": 200}  # samples in all, but at least a batch a client


class Case(NamedTuple):
    """The size of a run; ``rounds`` are the counted ones."""

    network: str
    clients: int
    rounds: int
    folder: Path  # of the images
    device: str = "cpu"

    @property
    def samples(self) -> int:
        """Each client's."""
        return max(BATCH, NETWORKS[self.network] // self.clients)

    def settings(self) -> dict[str, Value]:
        """Return fedsub's."""
        about = experiment(self.folder, self.clients, 1, self.rounds + 1, self.device)
        return about | {"model": self.network, "run-dir": str(self.folder / "run")}

    def model(self) -> torch.nn.Module:
        """Return the network that all start from; it counts its steps of training."""
        model = build_model(self.network, IMAGE, CLASSES, 0)
        model.register_forward_pre_hook(count)
        return model

    def data(self) -> list[Data]:
        """Return the samples and labels of each client, as fedsub shares them out."""
        from fedsub_app.runs.loop import prepare

        torch.set_num_threads(1)
        problem, partition, _ = prepare(resolve(self.settings()))
        assert partition
        x, y = cast(Any, problem.data.train_x), problem.data.train_y
        return [
            (x[own].contiguous(memory_format=torch.channels_last), y[own])
            for own in map(torch.as_tensor, partition.train)
        ]


SEEN = {"steps": 0, "samples": 0}


def count(model: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    """Count a step of training and its samples."""
    if model.training:
        SEEN["steps"] += 1
        SEEN["samples"] += len(arguments[0])


class Done(NamedTuple):
    """Seconds of the counted rounds, steps and samples of all where they were counted, the last global model."""

    seconds: list[float]
    steps: int | None
    samples: int | None
    state: State


class Clock:
    """The seconds between calls of :meth:`tick`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def tick(self, *_: object, **__: object) -> None:
        """Note the time, when the GPU has done all that it was given."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def done(self, model: torch.nn.Module) -> Done:
        """Return the rounds after the first one, and what was seen."""
        seconds = [end - begin for begin, end in zip(self.times[1:], self.times[2:], strict=False)]
        return Done(seconds, SEEN["steps"], SEEN["samples"], model.state_dict())
