"""The learning problem, independent of the method: data, network, loss and score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from fedsub_app.data import Dataset, load_dataset
from fedsub_app.models import build_model
from fedsub_app.settings import Settings

Reduction = Literal["mean", "sum", "none"]


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
    """

    data: Dataset
    build: Callable[[int], nn.Module]
    task: Task
    seed: int = 0

    @staticmethod
    def of(settings: Settings) -> "Problem":
        """Return the problem that the settings name.

        Raises
        ------
        UserError
            The data are missing, damaged or too few; :meth:`network` checks the network.
        """
        return _named(load_dataset(settings.data), settings.model, settings.hidden_width, settings.seed)

    def network(self, seed: int | None = None) -> nn.Module:
        """Return a fresh network on the CPU: the initial global model, or another seed's model.

        Raises
        ------
        UserError
            No network has this name, or it cannot take these inputs.
        """
        return self.build(self.seed if seed is None else seed)


@lru_cache(maxsize=1)
def _named(data: Dataset, model: str, width: int | None, seed: int) -> Problem:
    def build(of_seed: int) -> nn.Module:
        return build_model(model, data.in_shape, data.num_classes, of_seed, width)

    return Problem(data, build, Classification(), seed)
