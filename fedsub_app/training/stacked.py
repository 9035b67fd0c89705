"""Clients that train side by side: a step of several of them is one operation on weights stacked ``[clients, ...]``.

A step of a small network takes as long as its many operations take to start, on a CPU and more so on a GPU. Each client
runs as a greenlet up to its next training. Then those whose steps are alike (:func:`_kind`) make them together; clients
with more steps than all others, and those that are like no other, train alone.

Sums are taken in another order than one client after the other: the numbers agree up to float rounding, and depend on
the clients that are trained together. Therefore it needs the setting ``stack-clients``.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedsub_app.common.errors import one_line
from fedsub_app.common.inputs import Batch, blank, joined
from fedsub_app.common.tensors import Tensors
from fedsub_app.models import Network, Output
from fedsub_app.settings import Settings
from fedsub_app.training.client import Training, side_by_side
from fedsub_app.training.problem import FIRST_SAMPLES, Problem

T = TypeVar("T")
MOMENTS = ("first", "second")  # of an optimizer
LEAST_STACKED = 4  # clients together: a joint step of a small network takes as long as three of one client
MAX_STACKED = 64  # clients together; beyond it a step is bound by arithmetic, and memory grows


def unstackable(settings: Settings, network: Network, problem: Problem) -> str:
    """Return the setting that ``stack-clients`` excludes, as "key = value: reason", or "".

    The network's running statistics are left as they were: they are stacked copies.
    """
    if settings.augment != "none":
        return f"augment = {settings.augment}: drawn client by client"
    if settings.task == "next-token":
        return f"task = {settings.task}: its loss is the mean over tokens, of which samples have unequally many"
    if any(layer.momentum is None for layer in network.normalisations.values()):
        return f"model = {settings.model}: a BatchNorm with momentum = None, which counts one client's batches"
    task, count = problem.task, len(problem.data.train_y)
    some = torch.linspace(0, count - 1, min(count, FIRST_SAMPLES)).long()  # evenly: they may be sorted by class
    with torch.no_grad():
        output, y = network.module.eval()(problem.data.train_x[some]), problem.data.train_y[some]
        mean = task.loss(output, y)
        try:
            losses = task.loss(output, y, "none")
        except Exception as error:  # code of the user
            return f"task = {settings.task}: {one_line(error)[:100]}"
    if losses.numel() != len(y):
        given = f"{losses.numel()} numbers for {len(y)} samples"
        return f"task = {settings.task}: its loss with reduction = 'none' gives {given}"
    if not math.isclose(float(losses.mean()), float(mean), rel_tol=1e-4, abs_tol=1e-6):
        return f"task = {settings.task}: its mean loss is not the mean of the samples' losses"
    if name := _counting(network, problem.data.train_x[some]):
        return f"model = {settings.model}: its buffer {name!r}, which is one client's"
    stacked = {name: torch.stack([tensor.detach()] * 2) for name, tensor in network.tensors.items()}
    x = joined([blank(2, problem.data.in_shape, network.device)] * 2, torch.stack)
    network.training_mode()
    try:
        vmap(network.module_with)(stacked, x)
    except Exception as error:  # code of others; dropout, whose draws are one client's
        return f"model = {settings.model}: {one_line(error)[:100]}"
    return ""


def _counting(network: Network, x: Batch) -> str:
    """Return the name of a buffer that a step assigns anew, or moves though it is not sent, or ""."""
    copied = copy.deepcopy(network.module).train()
    batches = {f"{name}.num_batches_tracked" for name in network.normalisations}
    with torch.no_grad(), torch.random.fork_rng():
        copied(x)  # which fills caches
        before = {name: (buffer, buffer._version) for name, buffer in copied.named_buffers() if name not in batches}
        copied(x)
    for name, buffer in copied.named_buffers():
        same, version = before.get(name, (None, 0))
        if name not in batches and (buffer is not same or (name not in network.tensors and buffer._version > version)):
            return name
    return ""


def together(runs: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions, each of which runs one client; returns their results. Their trainings are stacked."""
    parts = [runs[start : start + MAX_STACKED] for start in range(0, len(runs), MAX_STACKED)]
    # Each client seeds the global generators and puts them back, but not in the reverse order of the others.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        return [result for part in parts for result in _side_by_side(part)]


@dataclass
class _Waiting:
    """A client that waits to train: its mini-batches, its network's tensors, and what it has computed."""

    training: Training
    batches: Sequence[Tensor]
    tensors: Tensors
    loss: float = 0.0  # sum over the samples
    steps: int = 0
    seconds: float = 0.0
    error: Exception | None = None


def _side_by_side(runs: Sequence[Callable[[], T]]) -> list[T]:
    """Run clients to their ends: each goes on when all have come to their next training."""
    waiting: list[_Waiting] = []

    def client(run: Callable[[], T]) -> T:
        side_by_side.set(partial(_meet, waiting))  # this greenlet's own
        return run()

    clients = [greenlet(partial(client, run)) for run in runs]
    results: dict[greenlet, T] = {}
    while alive := [one for one in clients if not one.dead]:
        waiting.clear()
        results |= {one: one.switch() for one in alive}
        kinds: dict[object, list[_Waiting]] = {}
        for one in waiting:
            kinds.setdefault(_kind(one), []).append(one)
        for alike in kinds.values():
            _train(alike)
    return [results[one] for one in clients]


def _meet(waiting: list[_Waiting], training: Training, batches: Sequence[Tensor]) -> tuple[float, int]:
    """Wait for others; returns the sum of the samples' losses and the number of steps that were made."""
    start = time.perf_counter()
    own = {name: tensor.detach().clone() for name, tensor in training.network.tensors.items()}
    waiting.append(one := _Waiting(training, batches, own))
    getcurrent().parent.switch()
    training.client.waited += time.perf_counter() - start - one.seconds
    if one.error:
        raise one.error
    training.network.load(one.tensors)
    training.network.training_mode(training.names, training.batch_statistics)
    return one.loss, one.steps


def _kind(waiting: _Waiting) -> object:
    """Return what clients that train together have in common."""
    training, optimizer = waiting.training, waiting.training.optimizer
    alike = (training.network, training.names, training.batch_statistics, type(training.objective), optimizer.lr)
    taken = tuple(steps.item() for steps in optimizer.steps.values())
    # Adam's are counted: where small batches are steps apart (_Stack), all clients have to make them at once.
    lengths = tuple(map(len, waiting.batches)) if taken and training.network.normalisations else None
    return (*alike, frozenset(training.factors), frozenset(training.shift), taken, lengths)


def _train(alike: list[_Waiting]) -> None:
    """Let clients make their steps together, as long as there are enough of them."""
    start = time.perf_counter()
    try:
        if len(alike) >= LEAST_STACKED:
            _Stack(alike).train()
    except Exception as error:  # where one operation fails, all these clients fail
        for one in alike:
            one.error = error
    for one in alike:
        one.seconds = (time.perf_counter() - start) / len(alike)


class _Stack:
    """Clients whose steps are alike, those with most joint steps first; their tensors are stacked ``[clients, ...]``.

    All steps are joint ones, in which smaller batches are padded. Padding would change the statistics of a BatchNorm:
    there the joint steps are those of the largest batch, and each client makes the others alone in between.
    """

    def __init__(self, clients: Sequence[_Waiting]) -> None:
        width = max(len(batch) for one in clients for batch in one.batches)
        partly = not clients[0].training.network.normalisations

        def joint(one: _Waiting) -> list[int]:
            return [number for number, batch in enumerate(one.batches) if partly or len(batch) == width]

        clients = sorted(clients, key=lambda one: len(joint(one)), reverse=True)
        self.joint, self.width = [joint(one) for one in clients], width
        trainings = [one.training for one in clients]
        self.clients, self.first = clients, trainings[0]
        self.network, self.task = self.first.network, self.first.client.place.problem.task
        self.tensors = _stacked([one.tensors for one in clients])
        self.factors = _stacked([each.factors for each in trainings])
        self.shift = _stacked([each.shift for each in trainings])
        self.others = [_stacked(alike) for alike in zip(*(each.objective.others for each in trainings), strict=True)]
        self.moments = [_stacked([getattr(each.optimizer, kind) for each in trainings]) for kind in MOMENTS]
        self.begun = self.first.optimizer.steps  # Adam's counts, as all these clients begin
        self.taken = {name: steps.clone() for name, steps in self.begun.items()}
        self.moving = range(0)
        self.losses = torch.zeros(len(clients), device=self.network.device)

    def train(self) -> None:
        """Make the joint steps of at least ``LEAST_STACKED`` clients."""
        self.network.training_mode(self.first.names, self.first.batch_statistics)
        x = joined([one.training.client.x[:] for one in self.clients], torch.cat)
        labels = [one.training.client.y for one in self.clients]
        y, begins = torch.cat(labels), list(accumulate(map(len, labels), initial=0))
        sizes = [[len(batch) for batch in one.batches] for one in self.clients]
        blank = labels[0].new_zeros(self.width, dtype=torch.int64)  # the width to which all batches are padded
        padded = [pad_sequence([*one.batches, blank], True)[:-1] for one in self.clients]
        index = [batches + begin for batches, begin in zip(padded, begins, strict=False)]
        joint = pad_sequence([rows[places] for rows, places in zip(index, self.joint, strict=True)], True)

        def step(clients: range, before: int, batch: Tensor, counts: Sequence[int]) -> None:
            batch = batch[:, : max(counts)]
            self._move(clients)
            for name, begun in self.begun.items():
                self.taken[name].copy_(begun + before)
            self._step(x[batch], y[batch], counts)

        made = [0] * len(self.clients)
        for number in range(len(self.joint[LEAST_STACKED - 1])):
            moving = range(sum(len(places) > number for places in self.joint))
            places = [self.joint[k][number] for k in moving]
            for k in moving:
                for place in range(made[k], places[k]):
                    step(range(k, k + 1), place, index[k][place : place + 1], [sizes[k][place]])
                made[k] = places[k] + 1
            step(moving, places[0], joint[: len(moving), number], [sizes[k][places[k]] for k in moving])
        for k, (one, loss) in enumerate(zip(self.clients, self.losses.tolist(), strict=True)):
            one.loss, one.steps = loss, made[k]
            one.tensors = {name: stack[k].detach() for name, stack in self.tensors.items()}
            training, optimizer = one.training, one.training.optimizer
            training.steps, training.samples = training.steps + one.steps, training.samples + sum(sizes[k][: made[k]])
            for kind, stacks in zip(MOMENTS, self.moments, strict=True):
                for name, moment in getattr(optimizer, kind).items():
                    moment.copy_(stacks[name][k])
            for taken in optimizer.steps.values():
                taken += one.steps

    def _move(self, clients: range) -> None:
        """Let these clients make the next steps: by views of the stacks."""
        if clients == self.moving:
            return
        self.moving, some = clients, slice(clients.start, clients.stop)

        def rows(stacks: Tensors) -> Tensors:
            return {name: stack[some] for name, stack in stacks.items()}

        optimizer, self.objective = copy.copy(self.first.optimizer), copy.copy(self.first.objective)
        moved = {name: self.tensors[name][some].detach().requires_grad_() for name in optimizer.parameters}
        optimizer.parameters, optimizer.steps = moved, self.taken
        optimizer.first, optimizer.second = map(rows, self.moments)
        self.objective.others = tuple(map(rows, self.others))
        self.optimizer, self.now = optimizer, rows(self.tensors) | moved
        self.change, self.factor, self.sums = rows(self.shift), rows(self.factors), self.losses[some]

    def _forward(self, x: Batch, tensors: Mapping[str, Tensor] | None) -> Output:
        """Run all clients' networks; returns the outputs of their samples one after the other."""
        if self.objective.forwards:
            return Output(*(part.flatten(0, 1) for part in vmap(self.network)(x, tensors or self.now)))
        logits = vmap(self.network.module_with)(self.now, x).flatten(0, 1)
        return Output(logits, logits)  # no term needs its features

    def _step(self, x: Batch, y: Tensor, counts: Sequence[int]) -> None:
        """Make a step, as :meth:`Training.descend` does; ``counts`` of each client's samples are no padding."""
        output = self._forward(x, None)
        losses = self.task.loss(output.logits, y.flatten(0, 1), "none")
        term = self.objective.term(x, output, self._forward, "none")
        losses = (losses if term is None else losses + term).view(len(counts), -1)
        means = losses.mean(1)
        if min(counts) < max(counts):
            sizes = torch.tensor(counts, device=losses.device)
            losses = losses * (torch.arange(max(counts), device=losses.device) < sizes[:, None])
            means = losses.sum(1) / sizes
        gradients = self.optimizer.gradients(means.sum())  # a client's weights move only its own loss
        self.objective.correct(gradients, self.optimizer.parameters)
        for name, change in self.change.items():
            gradients[name].add_(change)
        for name, factor in self.factor.items():
            gradients[name].mul_(factor)
        self.optimizer.step(gradients)
        self.sums += losses.detach().sum(1)


def _stacked(tensors: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([each[name].detach() for each in tensors]) for name in tensors[0]}
