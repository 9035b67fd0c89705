"""The baselines of the bench: the same training as a plain torch loop, in one process and in an ideal pool of two."""

import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedsub_app.models import build_model

IMAGE = (3, 32, 32)
CLASSES = 10
LR = 0.01

State = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]
Data = tuple[torch.Tensor, torch.Tensor]  # samples and labels


class PlainClients:
    """A network and the samples of each client in this process; trained one after the other, on one thread."""

    def __init__(self, data: Sequence[Data], epochs: int, batch: int, device: str, model: str = "lenet5") -> None:
        torch.set_num_threads(1)
        self.epochs, self.batch, self.device = epochs, batch, device
        self.model = build_model(model, IMAGE, CLASSES, 0).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = [(x.to(device).contiguous(memory_format=torch.channels_last), y.to(device)) for x, y in data]
        self.steps = 0
        self.state = initial(model)  # the global model

    def train(self, start: State) -> list[State]:
        """Return the model of every client after its local epochs from ``start``, on the CPU."""
        return [self._train_one(start, x, y) for x, y in self.data]

    def mean(self, states: Sequence[State]) -> State:
        """Return the next global model."""
        return mean(states)

    def after_step(self) -> None:
        """Do what a method does after each step: nothing."""

    def _train_one(self, start: State, x: torch.Tensor, y: torch.Tensor) -> State:
        self.model.load_state_dict(start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, fused=True)
        for _ in range(self.epochs):
            for index in torch.randperm(len(y)).split(self.batch):
                on_device = index.to(self.device)
                optimizer.zero_grad()
                F.cross_entropy(self.model(x[on_device]), y[on_device]).backward()
                optimizer.step()
                self.after_step()
                self.steps += 1
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}


class MaskedClients(PlainClients):
    """Clients that train all in the first round, then the weights that were the larger half of their layer's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.masks: list[dict[str, torch.Tensor]] = []  # a client's, by the weight's name
        self.off: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights and masks of the client that trains

    def train(self, start: State) -> list[State]:
        """Return the model of every client; its weights that are off are 0."""
        states = []
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.dim() > 1}
        for masks, (x, y) in zip(self.masks or [{} for _ in self.data], self.data, strict=True):
            self.off = [(weights[name], mask) for name, mask in masks.items()]
            states.append(self._train_one(masked(start, masks), x, y))
        if not self.masks:
            self.masks = [
                {name: state[name].abs() > state[name].abs().median() for name in weights} for state in states
            ]
        return list(map(masked, states, self.masks))

    def after_step(self) -> None:
        """Switch the weights off again."""
        with torch.no_grad():
            for weight, mask in self.off:
                weight.mul_(mask)

    def mean(self, states: Sequence[State]) -> State:
        """Return the mean over the clients that have a weight; the old one where nobody has."""
        new = super().mean(states)
        for name in self.masks[0]:
            having = torch.stack([masks[name] for masks in self.masks]).sum(0)
            total = torch.stack([state[name] for state in states]).sum(0)
            new[name] = torch.where(having > 0, total / having.clamp(min=1), self.state[name])
        return new


def masked(state: State, masks: State) -> State:
    """Return a model with the weights that are off as 0."""
    return {name: tensor * masks[name] if name in masks else tensor for name, tensor in state.items()}


def random_clients(clients: int, samples: int, epochs: int, batch: int, device: str) -> PlainClients:
    """Return clients of LeNet-5 with noise and random labels."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(clients, samples, *IMAGE, generator=random)
    y = torch.randint(CLASSES, (clients, samples), generator=random)
    return PlainClients(list(zip(x, y, strict=True)), epochs, batch, device)


def initial(model: str = "lenet5") -> State:
    """Return the tensors that every baseline starts from."""
    return build_model(model, IMAGE, CLASSES, 0).state_dict()


def mean(states: Sequence[State]) -> State:
    """Return the plain mean of state dicts."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def loop_rounds(clients: PlainClients, rounds: int) -> list[float]:
    """Return the seconds of each round of the plain loop."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        clients.state = clients.mean(clients.train(clients.state))
        seconds.append(time.perf_counter() - start)
    return seconds


class IdealPool:
    """Processes that are there already, with their clients' data: send the model, train, fetch, take the mean.

    Use it in a ``with`` statement. Each of ``makers`` returns the clients of a process, in it.
    """

    def __init__(self, makers: Sequence[Callable[[], PlainClients]], model: str = "lenet5") -> None:
        self.state = initial(model)
        context = get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for make in makers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_pool_worker, args=(theirs, make), daemon=True)
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
        seconds = []
        for _ in range(count + 1):
            start = time.perf_counter()
            for pipe in self.pipes:
                pipe.send(_to_arrays(self.state))
            answers = [arrays for pipe in self.pipes for arrays in pipe.recv()]
            self.state = mean([_to_state(arrays) for arrays in answers])
            seconds.append(time.perf_counter() - start)
        return seconds[1:]


def _pool_worker(pipe: Connection, make: Callable[[], PlainClients]) -> None:
    clients = make()
    pipe.send("ready")
    while (arrays := pipe.recv()) is not None:
        pipe.send([_to_arrays(state) for state in clients.train(_to_state(arrays))])


def _to_arrays(state: State) -> Arrays:
    """Tensors as NumPy arrays, which pickle by value (torch would put each into a shared-memory file)."""
    return {name: tensor.numpy() for name, tensor in state.items()}


def _to_state(arrays: Arrays) -> State:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
