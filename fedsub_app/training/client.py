"""The tools of a client: its data, its network, its state between rounds, and passes over the data."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors, brought, prefixed, unprefixed
from fedsub_app.models import Output
from fedsub_app.training.local import Training, epoch, evaluation_batches
from fedsub_app.training.objectives import PREVIOUS, Moon, Objective, Prox
from fedsub_app.training.workplace import Workplace

OWN = "own/"  # prefix of the client's own model in its state
Split = Literal["train", "validation", "test"]


class ClientTools:
    """One client during one task: the base of every method's client.

    Attributes
    ----------
    place, settings, options : the process's workplace, the run's settings and the method's own.
    id, round : client id from 0, round number from 1.
    network : the network, to be loaded before use: the whole one, or a narrower one after such tensors were loaded.
    state : the client's durable tensors as of the last round; tensors that a method assigns are saved after training.
    previous : MOON's z_p, the model at the end of the last round, in the shapes of the network; {} in the first.
    metrics : finite numbers that the client reports, by name.
    flops : FLOPs of the passes over the data so far, without the gradients of frozen tensors.
    published_flops : FLOPs of the training steps as the IST paper counts them.
    """

    def __init__(self, place: Workplace, client: int, server_round: int, state: Tensors) -> None:
        self.place = place
        self.settings = place.settings
        self.options = place.settings.options
        self.id = client
        self.round = server_round
        self.network = place.network
        self.state = state
        self.previous = unprefixed(PREVIOUS, state)
        self.metrics: dict[str, float] = {}
        self.flops = self.published_flops = 0.0
        self._loaded: Mapping[str, Tensor] = {}
        self._runs = itertools.count()

    @property
    def attack(self) -> str:
        """The attack that this client makes on the model (setting ``attack``), "none" for an honest client."""
        return self.settings.attack if self.id < self.settings.attackers else "none"

    # --- data and random numbers ------------------------------------------------------------------------------------

    @cached_property
    def _training_samples(self) -> tuple[Tensor, Tensor]:
        return self.samples("train")

    @cached_property
    def x(self) -> Tensor:
        """Training samples, float32 [n, ...], on the device."""
        return self._training_samples[0]

    @cached_property
    def y(self) -> Tensor:
        """Training labels, int64 [n], on the device."""
        return self._training_samples[1]

    def samples(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the client's samples and labels of a split; there may be none for validation."""
        place = self.place
        index = getattr(place.partition, split)[self.id].to(place.device)
        in_test_set = split == "test" and place.partition.test_pool == "test"
        x, y = (place.test_x, place.test_y) if in_test_set else (place.train_x, place.train_y)
        if split == "test" and not len(index):
            raise UserError(f"client {self.id} has no test samples")
        if split == "train" and self.attack == "label-flip":
            return x[index], place.problem.data.num_classes - 1 - y[index]
        return x[index], y[index]

    def generator(self, purpose: str) -> torch.Generator:
        """Return the generator of this client, round and purpose."""
        return generator(self.settings.seed, self.round, self.id, purpose)

    def augmentation(self) -> torch.Generator | None:
        """Return the generator of the next run's augmentation, ``None`` without any."""
        if self.settings.augment == "none":
            return None
        return self.generator(f"augmentation {next(self._runs)}")

    # --- models -----------------------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy named tensors into the network of their shapes; from then on they are the objective's w_global."""
        self.network = self.place.network_for(tensors)
        self.network.load(tensors)
        self._loaded = tensors

    def trained(self) -> Tensors:
        """Return a copy of the network's tensors, on the CPU (the next client reuses the network)."""
        tensors = self.network.copy()
        if self.attack in ("sign-flip", "scale"):
            factor = self.settings.attack_scale if self.attack == "scale" else -self.settings.attack_scale
            start = brought(self._loaded)
            for name in self.network.parameters:
                tensors[name] = start[name] + factor * (tensors[name] - start[name])
        return tensors

    @property
    def own(self) -> Tensors:
        """The client's own model, or its part that the state holds."""
        return unprefixed(OWN, self.state)

    def keep_own(self, names: Collection[str] | None = None) -> Tensors:
        """Keep the network's tensors, all or the ones in ``names``, as the client's own model; returns them."""
        kept = {name: tensor for name, tensor in self.trained().items() if names is None or name in names}
        self.state |= prefixed(OWN, kept)
        return kept

    def initial(self) -> Tensors:
        """Return the initial global model, which every client can rebuild from the seed."""
        return self.place.initial()

    # --- passes over the data ---------------------------------------------------------------------------------------

    def loss(self, output: Output, y: Tensor) -> Tensor:
        """Return the task's loss of a mini-batch, a scalar."""
        return self.place.problem.task.loss(output.logits, y)

    def objective(self) -> Objective:
        """Return the objective of the settings, around the model that was loaded last."""
        settings = self.settings
        if settings.objective == "prox":
            return Prox(self.network.like(self._loaded), settings.prox_mu)
        if settings.objective == "moon":
            previous = self.previous or self._loaded
            like = self.network.like
            return Moon(like(self._loaded), like(previous), settings.moon_mu, settings.moon_temperature)
        return Objective()

    def epochs(self, count: int | None = None, purpose: str = "batches") -> Iterator[list[Tensor]]:
        """Yield the mini-batches, as indices, of one pass over the training samples after the other.

        Parameters
        ----------
        count : number of passes; ``None`` for ``local-epochs``, or for ``local-steps``, which cut the last pass.
        purpose : purpose of the generator that orders the samples; another one where a round trains twice.
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
        """Yield the mini-batches of all :meth:`epochs`, one after the other."""
        return itertools.chain.from_iterable(self.epochs(epochs, purpose))

    def fit(
        self,
        names: Collection[str] | None = None,
        *,
        epochs: int | None = None,
        purpose: str = "batches",
        **how: Any,
    ) -> Training:
        """Train all tensors, or ``names``, for some epochs with a fresh optimizer; ``how`` is :class:`Training`'s."""
        training = Training(self, names, **how)
        training.run(self.batches(epochs, purpose))
        return training

    @torch.no_grad()
    def outputs(self, split: Split = "train") -> Output:
        """Return the network's logits and features on a split, in evaluation mode."""
        x, _ = self.samples(split)
        self.network.module.eval()
        batches = evaluation_batches(self.network.module, len(x), x.device)
        outputs = [self.network(x[batch]) for batch in batches]
        self.flops += len(x) * self.place.forward_flops(self.network)
        seen = torch.cat([torch.arange(len(x), device=x.device)[batch] for batch in batches])
        return Output(*(torch.cat(parts)[seen.argsort()] for parts in zip(*outputs, strict=True)))

    def score(self, split: Split) -> float:
        """Return the task's score of the network on a split: for a classification the accuracy in percent."""
        task = self.place.problem.task
        _, y = self.samples(split)
        return task.metrics(task.sums(self.outputs(split).logits, y))[task.score]
