"""Client side of every method: one client, one task. What is not overridden is FedAvg.

A method overrides :meth:`Client.train` where it sends or receives something else than a model, :meth:`Client.step`
where a mini-batch is trained differently, :meth:`Client.correct_gradients` where only the gradient changes, and
:meth:`Client.personal` where a client has a model of its own.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.models import build_model, load_tensors, tensors_of
from fedsub_app.training.local import batches, crop_and_flip, evaluate, fit
from fedsub_app.training.objectives import OBJECTIVES
from fedsub_app.training.optimizer import Optimizer
from fedsub_app.training.workplace import Workplace

PREVIOUS = "previous/"  # prefix of the client's own model in its state


class Client:
    """One client during one task.

    Attributes
    ----------
    x, y : the client's training samples (float32 [n, ...]) and labels (int64 [n]), on the device.
    state : the client's durable tensors as of the last round; what a method assigns here is saved after training.
    model, units : the process's network, to be loaded before use, and its hidden units.
    round, id : round number from 1, client id from 0.
    flops : of the training so far, those of frozen tensors' gradients left out.
    subnet_share : FLOPs of the trained sub-network over those of the whole network.
    """

    def __init__(self, place: Workplace, client: int, server_round: int, state: Tensors) -> None:
        self.place = place
        self.settings = place.settings
        self.options = place.settings.options
        self.id = client
        self.round = server_round
        self.state = state
        self.model = place.model
        self.units = place.units
        self.flops = 0.0
        self.runs = 0
        self.subnet_share = 1.0
        self.metrics: dict[str, float] = {}

    @cached_property
    def x(self) -> torch.Tensor:
        """Training samples."""
        return self.place.train_x[self.place.partition.train[self.id].to(self.place.device)]

    @cached_property
    def y(self) -> torch.Tensor:
        """Training labels."""
        return self.place.train_y[self.place.partition.train[self.id].to(self.place.device)]

    def generator(self, purpose: str) -> torch.Generator:
        """Return the generator of this client, round and purpose."""
        return generator(self.settings.seed, self.round, self.id, purpose)

    # --- what a method overrides ------------------------------------------------------------------------------------

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train what the server sent and return what it gets back: the whole model."""
        self.load(sent)
        self.fit()
        return self.trained()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One optimizer step on a mini-batch; returns the detached loss before it."""
        loss = self.loss(self.model(x), x, y)
        self.descend(loss)
        return loss.detach()

    def loss(self, output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of the model's output on a mini-batch: cross-entropy and the objective's term."""
        return F.cross_entropy(output, y) + self.objective.term(x)

    def correct_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Change the gradients, in place, before the step; they are those of ``self.optimizer.parameters``."""

    def personal(self, sent: Tensors) -> Tensors:
        """Return the client's own model; for a method without one, the global model it was sent."""
        return sent

    # --- what methods use -------------------------------------------------------------------------------------------

    def load(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Copy named tensors into the model."""
        load_tensors(self.place.tensors, sent)
        self.objective = OBJECTIVES[self.settings.objective](self)

    @property
    def previous(self) -> Tensors:
        """The client's own model at the end of its last round, where its state holds one."""
        return {n.removeprefix(PREVIOUS): t for n, t in self.state.items() if n.startswith(PREVIOUS)}

    def remember(self, names: Collection[str] | None = None) -> Tensors:
        """Keep the trained model, or some of its tensors, as the client's own, for :attr:`previous`; returns them."""
        kept = {name: tensor for name, tensor in self.trained().items() if names is None or name in names}
        self.state |= {f"{PREVIOUS}{name}": tensor for name, tensor in kept.items()}
        return kept

    def trained(self) -> Tensors:
        """Return a copy of the model's tensors (the next client reuses the model)."""
        return {name: tensor.detach().clone() for name, tensor in self.place.tensors.items()}

    def descend(self, loss: torch.Tensor) -> None:
        """One optimizer step down the (corrected) gradients of ``loss``."""
        gradients = self.optimizer.gradients(loss)
        self.objective.correct(gradients)
        self.correct_gradients(gradients)
        self.optimizer.step(gradients)

    def fit(
        self,
        passes: int = 1,
        names: Collection[str] | None = None,
        epochs: int | None = None,
        purpose: str = "batches",
    ) -> None:
        """Train with :meth:`step` and a fresh optimizer.

        Parameters
        ----------
        passes : forward and backward passes in one step, for the costs.
        names : tensors to train, ``None`` for all. The others are frozen: no gradient of theirs is computed, and the
            statistics of a frozen BatchNorm are used and stay.
        epochs : passes over the data, ``None`` for ``local-epochs``.
        purpose : of the generator that orders the batches; another one where a round fits twice.
        """
        epochs = self.settings.local_epochs if epochs is None else epochs
        if epochs:
            self.begin(names)
            self.run(self.order(epochs, purpose), passes, names)

    def begin(self, names: Collection[str] | None = None) -> None:
        """Set the model to training, but what is frozen, and make the optimizer."""
        self.model.train()
        for name, module in self._normalisations():
            module.train(names is None or f"{name}.weight" in names)
        self.optimizer = self.make_optimizer(
            [p for name, p in self.model.named_parameters() if names is None or name in names]
        )

    def order(self, epochs: int, purpose: str = "batches") -> Iterator[torch.Tensor]:
        """Return the batches of ``epochs`` passes over the data, as indices."""
        skip_single = bool(self._normalisations())
        return batches(len(self.y), self.settings.batch_size, epochs, self.generator(purpose), skip_single)

    def run(self, order: Iterable[torch.Tensor], passes: int = 1, names: Collection[str] | None = None) -> None:
        """Train on these batches with the optimizer as it is."""
        step = self.step
        if self.settings.augment == "crop-flip":
            draws = self.generator(f"augmentation {self.runs}")
            self.runs += 1

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return self.step(crop_and_flip(x, self.place.black, draws), y)

        with self.objective:
            loss, seen = fit(step, self.x, self.y, order)
        self.metrics["train-loss"] = loss
        whole = self.place.flops_per_sample
        partly = whole if names is None else self.place.flops_of(frozenset(names))
        self.flops += seen * (passes * partly + self.objective.passes * whole)

    def _normalisations(self) -> list[tuple[str, nn.Module]]:
        return [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Return a fresh optimizer of the settings."""
        return Optimizer(self.settings, parameters, self.round)

    def initial(self) -> Tensors:
        """Return the common start that the seed gives."""
        place = self.place
        return tensors_of(
            build_model(self.settings.model, place.in_shape, place.dataset.num_classes, self.settings.seed)
        )

    # --- called by the ClientApp ------------------------------------------------------------------------------------

    def run_training(self, sent: Tensors, config: Json) -> Update:
        """Train and return the update with its costs."""
        start = time.perf_counter()
        answer = self.train(sent, config)
        if self.settings.objective == "moon":
            self.remember()
        self.metrics |= {"flops": self.flops, "subnet-flops": self.flops * self.subnet_share}
        self.metrics["compute-seconds"] = time.perf_counter() - start
        return Update(self.id, answer, self.metrics, len(self.place.partition.train[self.id]))

    def run_evaluation(self, sent: Tensors, wanted: list[str]) -> Update:
        """Return the accuracies named in ``wanted`` on the client's own test and, if any, validation samples."""
        place = self.place
        train, test = (place.train_x, place.train_y), (place.test_x, place.test_y)
        validation, index = (
            part[self.id].to(place.device) for part in (place.partition.validation, place.partition.test)
        )
        if not len(index):
            raise UserError(f"client {self.id} has no test samples")
        x, y = (data[index] for data in (train if place.partition.test_pool == "train" else test))
        metrics = {}
        for name in wanted:
            load_tensors(place.tensors, self.personal(sent) if name == "personal" else sent)
            metrics[f"{name}-accuracy"], metrics[f"{name}-loss"] = evaluate(self.model, x, y)
            if len(validation):
                metrics[f"{name}-validation-accuracy"], _ = evaluate(self.model, *(data[validation] for data in train))
        return Update(self.id, {}, metrics, len(y))
