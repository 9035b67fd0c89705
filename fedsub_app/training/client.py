"""The tools of a client: its data, its network, its state between rounds, and the training of its network."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch
from fedsub_app.common.seeds import drawing, generator
from fedsub_app.common.tasks import measured
from fedsub_app.common.tensors import Tensors, brought, chosen, prefixed, unprefixed
from fedsub_app.data import LazySamples
from fedsub_app.models import Output
from fedsub_app.training import costs
from fedsub_app.training.local import crop_and_flip, epoch, evaluation_batches
from fedsub_app.training.objectives import PREVIOUS, Forward, Moon, Objective, Prox
from fedsub_app.training.optimizer import Optimizer
from fedsub_app.training.workplace import Split, Workplace

Loss = Callable[[Output, Tensor], Tensor]  # (output, labels) -> scalar
Correct = Callable[[Tensors], None]
OWN = "own/"  # prefix of the client's own model in its state
# Trains a client beside others (stacked.py); each greenlet has its own.
side_by_side: ContextVar[Callable[["Training", list[Tensor]], tuple[float, int]] | None]
side_by_side = ContextVar("side_by_side", default=None)


class ClientTools:
    """One client during one task: the base of every method's client.

    Attributes
    ----------
    place, settings, options : the process's workplace, the run's settings and the method's own.
    id, round : client id from 0, round number from 1.
    lr : learning rate of the round.
    network : the network, whose tensors are loaded before use; it is narrower after narrower tensors were loaded.
    state : the client's durable tensors as of the last round; tensors that a method assigns are saved after training.
    previous : MOON's z_p, the model at the end of the last round, in the shapes of the network; {} in the first.
    metrics : finite numbers that the client reports, by name.
    flops : FLOPs of the passes over the data so far, without the gradients of frozen tensors.
    published_flops : FLOPs of the training steps as the IST paper counts them.
    waited : seconds in which other clients computed.
    """

    def __init__(self, place: Workplace, client: int, server_round: int, state: Tensors) -> None:
        self.place = place
        self.settings = place.settings
        self.options = place.settings.options
        self.id = client
        self.round = server_round
        self.lr = place.settings.lr_at(server_round)
        self.network = place.network
        self.state = state
        self.previous = unprefixed(PREVIOUS, state)
        self.metrics: dict[str, float] = {}
        self.flops = self.published_flops = self.waited = 0.0
        self._loaded: Mapping[str, Tensor] = {}
        self._runs = itertools.count()  # each run of a training augments by a generator of its own

    @property
    def attack(self) -> str:
        """The attack that this client makes on the model (setting ``attack``), "none" for an honest client."""
        return self.settings.attack if self.id < self.settings.attackers else "none"

    # --- data and random numbers ------------------------------------------------------------------------------------

    @cached_property
    def _training_samples(self) -> tuple[Batch | LazySamples, Tensor]:
        return self.samples("train")

    @cached_property
    def x(self) -> Batch | LazySamples:
        """Training samples, float32 [n, ...], on the device; other data sets have several tensors, or tokens."""
        return self._training_samples[0]

    @cached_property
    def y(self) -> Tensor:
        """Training labels, int64 [n], on the device."""
        return self._training_samples[1]

    def samples(self, split: Split) -> tuple[Batch | LazySamples, Tensor]:
        """Return the client's samples and labels of a split; there may be none for validation."""
        place = self.place
        x, y = place.training_samples(self.id) if split == "train" else place.samples(self.id, split)
        if split == "test" and not len(y):
            raise UserError(f"client {self.id} has no test samples")
        flips = split == "train" and self.attack == "label-flip"
        return x, place.problem.data.num_classes - 1 - y if flips else y

    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.settings.seed, self.round, self.id, purpose)

    def dropout(self, purpose: str) -> AbstractContextManager[None]:
        """Seed the network's dropout by this client, the round and ``purpose``."""
        return drawing(self.place.device, self.settings.seed, self.round, self.id, f"dropout {purpose}")

    # --- models -----------------------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors into the network of their shapes; from then on they are the objective's w_global."""
        self.network = self.place.network_for(tensors)
        self.network.load(tensors)
        self._loaded = tensors

    def trained(self) -> Tensors:
        """Return a copy of the network's tensors as the client sends them, on the CPU (the next one reuses it)."""
        return self.attacked(self.network.copy())

    def attacked(self, tensors: Tensors) -> Tensors:
        """Return the network's tensors as an attacker sends them, those of an honest client unchanged."""
        if self.attack not in ("sign-flip", "scale"):
            return tensors
        factor = self.settings.attack_scale if self.attack == "scale" else -self.settings.attack_scale
        start = brought(self._loaded)
        return tensors | {n: start[n] + factor * (tensors[n] - start[n]) for n in self.network.parameters}

    @property
    def own(self) -> Tensors:
        """The client's own model, or its part that the state holds."""
        return unprefixed(OWN, self.state)

    def keep_own(self, names: Collection[str] | None = None) -> Tensors:
        """Keep the network's tensors, all or the ones in ``names``, as the client's own model; return :meth:`trained`.

        An attacker keeps what it has trained, not what it sends.
        """
        own = self.network.copy()
        self.state |= prefixed(OWN, own if names is None else chosen(own, names))
        return self.attacked(own)

    def completed(self, sent: Tensors) -> Tensors:
        """Return a whole model: the sent tensors, else the client's own ones, else the initial ones."""
        known = self.own | sent
        return known if known.keys() == self.network.tensors.keys() else self.initial() | known

    def initial(self) -> Tensors:
        """Return the initial global model, which every client can rebuild from the seed."""
        return self.place.initial()

    # --- passes over the data ---------------------------------------------------------------------------------------

    def loss(self, output: Output, y: Tensor) -> Tensor:
        return self.place.problem.task.loss(output.logits, y)

    def objective(self) -> Objective:
        """Return the objective of the settings, around the model that was loaded last."""
        settings = self.settings
        if settings.objective == "prox":
            return Prox(self.network.like(self._loaded), settings.pull)
        if settings.objective == "moon":
            previous = self.previous or self._loaded
            like = self.network.like
            return Moon(like(self._loaded), like(previous), settings.moon_mu, settings.moon_temperature)
        return Objective()

    def epochs(self, count: int | None = None, purpose: str = "batches") -> Iterator[list[Tensor]]:
        """Yield, for one pass over the training samples after the other, the list of its mini-batches, as indices.

        ``count``: number of passes; ``None``: ``local-epochs``, or ``local-steps``, which cut the last pass.
        ``purpose``: of the generator that orders the samples; a second training in a round needs another one.
        """
        settings = self.settings
        skip_single = bool(self.network.normalisations)
        draws = self.generator(purpose)
        order = partial(epoch, len(self.y), settings.batch_size, draws, skip_single, self.place.device)
        if count is not None or settings.local_steps is None:
            for _ in range(settings.local_epochs if count is None else count):
                yield order()
            return
        left = settings.local_steps
        while left and (batches := order()[:left]):
            left -= len(batches)
            yield batches

    def batches(self, epochs: int | None = None, purpose: str = "batches") -> Iterator[Tensor]:
        return itertools.chain.from_iterable(self.epochs(epochs, purpose))

    def fit(
        self, names: Collection[str] | None = None, *, epochs: int | None = None, purpose: str = "batches", **how: Any
    ) -> "Training":
        """Train all tensors, or ``names``, for some epochs with a fresh optimizer; ``how`` is :class:`Training`'s."""
        training = Training(self, names, **how)
        training.run(self.batches(epochs, purpose))
        return training

    def slopes(self, model: Mapping[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensors]:
        """Return the loss on a mini-batch (indices) and its gradient at the weights ``model``, else the network's."""
        weights = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
        self.network.take_assigned()
        others = {name: tensor.detach().clone() for name, tensor in self.network.tensors.items() if name not in weights}
        loss = self.loss(self.network(self.x[batch], others | weights), self.y[batch])
        self.flops += len(batch) * self.place.training_flops(self.network, frozenset(weights))
        return loss.detach(), Optimizer(self.settings, weights, 0).gradients(loss)

    @torch.no_grad()
    def outputs(self, split: Split = "train") -> Output:
        """Return the network's logits and features on a split, in evaluation mode."""
        x, y = self.samples(split)
        self.network.module.eval()
        batches = evaluation_batches(self.network.module, len(x), y.device)
        outputs = [self.network(x[batch]) for batch in batches]
        self.flops += len(x) * self.place.forward_flops(self.network)
        seen = torch.cat([torch.arange(len(x), device=y.device)[batch] for batch in batches])
        return Output(*(torch.cat(parts)[seen.argsort()] for parts in zip(*outputs, strict=True)))

    def score(self, split: Split) -> float:
        """Return the task's score of the network on a split: for a classification the accuracy in percent."""
        task = self.place.problem.task
        _, y = self.samples(split)
        return measured(task, task.sums(self.outputs(split).logits, y))[task.score]


class Training:
    """Training of some tensors of a client's network: the optimizer that moves them, and the step.

    Parameters
    ----------
    client : the client whose network and data these are.
    names : tensors that are trained, ``None`` for all. The others are frozen: their gradients are not computed, and a
        frozen BatchNorm uses its running statistics and does not change them.
    lr : learning rate; default: the round's.
    loss : ``(output, labels) -> scalar`` instead of the task's; the objective's term comes on top.
    step : ``(training, x, y) -> detached loss`` instead of :meth:`descend`; it counts its passes beyond ``descend``
        with :meth:`spend`.
    shift : tensors by name, added to the gradients of the trained tensors.
    correct : changes the gradients (named tensors) in place, after MOON's term, before FedProx's, shift and keep.
    keep : tensor name -> bool of its shape: the positions that are trained; a missing tensor is trained whole.
    objective : instead of the setting's; ``Objective()`` for none.
    batch_statistics : BatchNorm on batch statistics everywhere (``True``) or nowhere (``False``), instead of where its
        weights are trained.

    Attributes
    ----------
    optimizer : fresh; its ``first``, ``second``, ``steps`` may be set before the first step.
    steps, samples : optimizer steps, and samples they were computed on, so far.
    """

    def __init__(
        self,
        client: "ClientTools",
        names: Iterable[str] | None = None,
        *,
        lr: float | None = None,
        loss: Loss | None = None,
        step: "Callable[[Training, Batch, Tensor], Tensor] | None" = None,
        shift: Tensors | None = None,
        correct: Correct | None = None,
        keep: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        batch_statistics: bool | None = None,
    ) -> None:
        self.client = client
        self.network = client.network
        self.names = None if names is None else frozenset(names)
        if unknown := sorted((self.names or frozenset()) - self.network.tensors.keys()):
            raise ValueError(f"no tensor {unknown[0]!r} to train in the network")
        trained = {n: p for n, p in self.network.parameters.items() if self.names is None or n in self.names}
        self.optimizer = client.place.optimizer(client.settings, trained, client.lr if lr is None else lr)
        self.loss, self.step, self.correct = loss or client.loss, step or Training.descend, correct
        self.shift = shift or {}
        # Copied as uint8, the same bytes, which halves the time; then 0 and 1, laid out as the parameters.
        bits = {name: mask.view(torch.uint8) for name, mask in (keep or {}).items() if name in trained}
        there = brought(bits, self.network.device)
        self.factors = {name: torch.empty_like(trained[name]).copy_(mask) for name, mask in there.items()}
        self.objective = client.objective() if objective is None else objective
        self.batch_statistics = batch_statistics
        self.of_task = getattr(self.loss, "__func__", None) is ClientTools.loss  # else neither compiled nor stacked
        plain = names is None and self.of_task and not self.objective.forwards
        self.compiled = plain and client.settings.compile_steps
        self.steps = self.samples = 0

    def run(self, batches: Iterable[Tensor]) -> None:
        """Train on mini-batches (index tensors), continuing the optimizer; all may be drawn before the first step."""
        self.run_each([batches])

    def run_each(self, parts: Iterable[Iterable[Tensor]]) -> None:
        """Train as :meth:`run` does, part after part; a part is drawn when the steps of those before it are made."""
        client = self.client
        self.network.training_mode(self.names, self.batch_statistics)
        augmented = client.settings.augment != "none"
        draws = client.generator(f"augmentation {next(client._runs)}") if augmented else None
        before, device = self.samples, client.y.device
        total, seen = torch.zeros((), device=device), 0
        own = self.step is not Training.descend or not self.of_task or type(self.optimizer) is not Optimizer
        stack = None if own or self.correct or augmented else side_by_side.get()
        for part in parts:
            if stack and (waiting := list(part)):
                loss, made = stack(self, waiting)
                total, seen, part = total + loss, seen + sum(map(len, waiting[:made])), waiting[made:]
            for index in part:
                batch = index.to(device)
                x = client.x[batch]
                if draws is not None:
                    assert isinstance(x, Tensor)
                    x = crop_and_flip(x, client.place.black, draws)
                total += self.step(self, x, client.y[batch]) * len(batch)
                seen += len(batch)
        if not seen:
            return
        client.metrics["train-loss"] = float(total) / seen
        forward = client.place.forward_flops(self.network)
        step = client.place.training_flops(self.network, self.names) + self.objective.forwards * forward
        client.flops += (self.samples - before) * step
        client.published_flops += (self.samples - before) * costs.published_flops(forward, self.objective.forwards > 0)
        client.state |= self.objective.remember(self.network.tensors)

    def descend(self, x: Batch, y: Tensor, forward: Forward | None = None) -> Tensor:
        """Make a step on a mini-batch; return the loss before it, detached. ``forward`` replaces the network's call."""
        if self.compiled and forward is None and len(y) == self.client.settings.batch_size:
            loss = self.network.compiled(self.client.place.problem.task.loss)(x, y)  # type: ignore[arg-type]
        else:
            forward = forward or self.network
            output = forward(x, None)
            loss, term = self.loss(output, y), self.objective.term(x, output, forward)
            loss = loss if term is None else loss + term
        gradients = self.optimizer.gradients(loss)
        if self.correct:
            self.correct(gradients)
        self.objective.correct(gradients, self.optimizer.parameters)
        if self.shift:
            torch._foreach_add_([gradients[name] for name in self.shift], list(self.shift.values()))
        for name, factor in self.factors.items():
            gradients[name].mul_(factor)
        own = {} if type(self.optimizer) is Optimizer else self.factors  # weight decay moves one without a gradient
        before = {name: self.optimizer.parameters[name].detach().clone() for name in own}
        self.optimizer.step(gradients)
        for name, old in before.items():
            moved = self.optimizer.parameters[name].detach()
            moved.copy_(torch.where(self.factors[name].bool(), moved, old))
        self.steps += 1
        self.samples += len(y)
        return loss.detach()

    def spend(self, samples: int, names: Iterable[str]) -> None:
        """Count a forward pass on ``samples`` more, and a backward pass that computes the gradients of ``names``."""
        client, place = self.client, self.client.place
        client.flops += samples * place.training_flops(self.network, frozenset(names))
        client.published_flops += samples * costs.published_flops(place.forward_flops(self.network), False)
