"""The learning problem, independent of the method: data, network, loss and score."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.seeds import derive
from fedsub_app.data import Dataset, load_dataset, own_dataset
from fedsub_app.models import adopted, build_model, check_network, is_sourced, unit_groups, with_head, with_logits
from fedsub_app.settings import Settings

Reduction = Literal["mean", "sum", "none"]
Model = Callable[[], nn.Module]  # a network's class, or a function that makes one
Loss = Callable[[Tensor, Tensor], Tensor]  # (output, y) -> the mean of a batch


class Task(Protocol):
    """The loss of a network's output, and the metrics that are reported of it.

    Attributes
    ----------
    score : the metric by which runs are compared; report keys end with it: ``global-<score>``.
    high_is_good : whether a higher score is a better one.
    """

    score: str
    high_is_good: bool

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of a batch, differentiable: its mean, its sum, or one number a sample."""

    def sums(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Return the sums from which the metrics are computed; sums of several batches or clients can be added."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of all samples in ``sums``: the score, ``loss`` (the mean), and any others."""


class Classification:
    """Cross-entropy of the logits [n, classes] with int64 labels [n]; the score is the accuracy in percent."""

    score = "accuracy"
    high_is_good = True

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of a batch."""
        return F.cross_entropy(output, y, reduction=reduction)

    def sums(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Return ``correct`` and ``count`` of the samples, and the sum of their ``loss``."""
        correct = int((output.argmax(1) == y).sum())
        return {"correct": correct, "loss": float(self.loss(output, y, "sum")), "count": len(y)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``accuracy`` in percent and the mean ``loss``."""
        return {"accuracy": 100.0 * sums["correct"] / sums["count"], "loss": sums["loss"] / sums["count"]}


@dataclass(frozen=True, eq=False)
class Problem:
    """One learning problem; frozen, and made once a process.

    Parameters
    ----------
    data : training and test samples, with the shape of an input.
    build : seed -> a fresh network, initialised from this seed and nothing else.
    task : loss and score.
    seed : seed of the initial global model.
    head : name of the network's head; "": its last Linear.
    """

    data: Dataset
    build: Callable[[int], nn.Module]
    task: Task
    seed: int = 0
    head: str = ""

    @staticmethod
    def of(settings: Settings) -> "Problem":
        """Return the problem that the settings name.

        Raises
        ------
        UserError
            The data are missing, damaged or too few; :meth:`network` checks the network.
        """
        network = (settings.model, settings.hidden_width, settings.model_options)
        return _named(load_dataset(settings.data), network, settings.seed, settings.head)

    @staticmethod
    def own(
        model: Model, data: object, settings: Settings, task: Task | None = None, traced: bool = False
    ) -> "Problem":
        """Return the problem of a user's network and ``(train, test)``; by default a classification.

        ``traced``: layers and units are those of the network's graph. The server must see the same ones; in a Flower
        app of one's own it does not know the shape of an input.

        Raises
        ------
        UserError
            What the data or the network are, and what they must be.
        """
        if settings.hidden_width:
            raise UserError(f"{settings.method}.width: must be 0 with a network of your own, whose width is its own")
        dataset = own_dataset(data, partial(classes_of, built(model)(settings.seed)))
        build = built(model, dataset.in_shape if traced else ())
        return Problem(dataset, build, task or Classification(), settings.seed, settings.head)

    def network(self, seed: int | None = None) -> nn.Module:
        """Return a fresh network on the CPU: the initial global model, or another seed's model.

        Raises
        ------
        UserError
            No network has this name, or it cannot take these inputs.
        """
        return with_named_head(self.build(self.seed if seed is None else seed), self.head)


class OwnLoss(Classification):
    """A loss of one's own; the score stays the accuracy.

    Parameters
    ----------
    mean : (output, y) -> the differentiable mean of a batch.
    """

    def __init__(self, mean: Loss) -> None:
        self.mean = mean

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of a batch; ValueError for one number a sample, which only a mean is known of."""
        if reduction == "none":
            raise ValueError("loss=: gives the mean of a batch, not one number a sample")
        return self.mean(output, y) * (len(y) if reduction == "sum" else 1)


def with_named_head(model: nn.Module, head: str) -> nn.Module:
    """Return the network with the head that the key ``head`` names; :class:`UserError` where there is none such."""
    try:
        return with_head(model, head) if head else model
    except ValueError as error:
        raise UserError(f"head = {head!r}: {error}") from None


def built(model: Model, in_shape: tuple[int, ...] = ()) -> Callable[[int], nn.Module]:
    """Return a function from a seed to a fresh network of a user's factory, on the CPU.

    The global generators are left as they were. With ``in_shape`` the network has layers and units by its graph, but
    for a Sequential that is read like those listed.
    """

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, "model"))
            module = model()
        if not isinstance(module, nn.Module):
            raise UserError(f"model = {shown(model)}: returned a {type(module).__name__}, must be a torch.nn.Module")
        with suppress(TypeError):
            if not in_shape or (isinstance(module, nn.Sequential) and unit_groups(module)):
                return with_logits(module)
        return adopted(module, in_shape)

    return build


def classes_of(module: nn.Module, in_shape: tuple[int, ...]) -> int:
    """Return how many classes a network tells apart; :class:`UserError` where it does not return [n, classes].

    Two samples go through it on the "meta" device, which computes nothing.
    """
    try:
        with torch.no_grad():
            output = copy.deepcopy(module).to("meta").eval()(torch.empty(2, *in_shape, device="meta"))
    except Exception as error:  # whatever a user's network raises
        reason = one_line(error)[:200]
        raise UserError(
            f"model = {type(module).__name__}: cannot take samples of shape {in_shape} ({reason})"
        ) from error
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        what = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"model = {type(module).__name__}: returns {what} for two samples, must be [2, classes]")
    return output.shape[1]


@lru_cache(maxsize=1)
def _named(data: Dataset, network: tuple[str, int | None, str], seed: int, head: str) -> Problem:
    model, width, options = network

    def build(of_seed: int) -> nn.Module:
        return build_model(model, data.in_shape, data.num_classes, of_seed, width, options)

    problem = Problem(data, build, Classification(), seed, head)
    if is_sourced(model):
        check_network(problem.network(), model, data.in_shape, data.num_classes)
    return problem
