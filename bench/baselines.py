"""What fedsub is compared with: the same training as a plain torch loop, in one process and in an ideal pool of two."""

import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch.nn import functional as F

from fedsub_app.models import build_model

IMAGE = (3, 32, 32)
CLASSES = 10
LR = 0.01

State = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


class PlainClients:
    """LeNet-5 and the data of ``clients`` clients in this process; trained one after the other, on one thread."""

    def __init__(self, clients: int, samples: int, epochs: int, batch: int, device: str) -> None:
        torch.set_num_threads(1)
        random = torch.Generator().manual_seed(0)
        self.epochs, self.batch, self.device = epochs, batch, device
        self.model = build_model("lenet5", IMAGE, CLASSES, 0).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(clients, samples, *IMAGE, generator=random).to(device)
        y = torch.randint(CLASSES, (clients, samples), generator=random).to(device)
        self.data = [(own.contiguous(memory_format=torch.channels_last), y[c]) for c, own in enumerate(x)]

    def train(self, start: State) -> list[State]:
        """Return the model of every client after its local epochs from ``start``, on the CPU."""
        return [self._train_one(start, x, y) for x, y in self.data]

    def _train_one(self, start: State, x: torch.Tensor, y: torch.Tensor) -> State:
        self.model.load_state_dict(start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, fused=True)
        for _ in range(self.epochs):
            for index in torch.randperm(len(y)).split(self.batch):
                on_device = index.to(self.device)
                optimizer.zero_grad()
                F.cross_entropy(self.model(x[on_device]), y[on_device]).backward()
                optimizer.step()
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}


def initial() -> State:
    """Return the tensors that every baseline starts from."""
    return build_model("lenet5", IMAGE, CLASSES, 0).state_dict()


def mean(states: Sequence[State]) -> State:
    """Return the plain mean of state dicts."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def loop_rounds(clients: PlainClients, rounds: int) -> list[float]:
    """Return the seconds of each round of the plain loop."""
    state, seconds = initial(), []
    for _ in range(rounds):
        start = time.perf_counter()
        state = mean(clients.train(state))
        seconds.append(time.perf_counter() - start)
    return seconds


class IdealPool:
    """Processes that are there already, with their clients' data: send the model, train, fetch, take the mean.

    Use it in a ``with`` statement. All processes get the same number of clients.
    """

    def __init__(self, workers: int, clients: int, samples: int, epochs: int, batch: int, device: str) -> None:
        context = get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            work = (clients // workers, samples, epochs, batch, device)
            process = context.Process(target=_pool_worker, args=(theirs, work), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()  # ready

    def __enter__(self) -> "IdealPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)

    def rounds(self, count: int) -> list[float]:
        """Return the wall-clock seconds of ``count`` rounds, after one that is not counted."""
        state, seconds = initial(), []
        for _ in range(count + 1):
            start = time.perf_counter()
            for pipe in self.pipes:
                pipe.send(_to_arrays(state))
            answers = [arrays for pipe in self.pipes for arrays in pipe.recv()]
            state = mean([_to_state(arrays) for arrays in answers])
            seconds.append(time.perf_counter() - start)
        return seconds[1:]


def _pool_worker(pipe: Connection, work: tuple[int, int, int, int, str]) -> None:
    clients = PlainClients(*work)
    pipe.send("ready")
    while (arrays := pipe.recv()) is not None:
        pipe.send([_to_arrays(state) for state in clients.train(_to_state(arrays))])


def _to_arrays(state: State) -> Arrays:
    """Tensors as NumPy arrays, which pickle by value (torch would put each into a shared-memory file)."""
    return {name: tensor.numpy() for name, tensor in state.items()}


def _to_state(arrays: Arrays) -> State:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
