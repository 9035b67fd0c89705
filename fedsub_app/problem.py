"""What is learned, apart from how: data, network, loss and score."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from fedsub_app.data import Dataset, load_dataset
from fedsub_app.models import build_model, check_network, is_sourced
from fedsub_app.settings import Settings

Reduction = Literal["mean", "sum", "none"]


class Task(Protocol):
    """What a network's output is held against, and what is reported of it.

    Attributes
    ----------
    score : the metric that runs are compared by; it ends report keys: ``global-<score>``.
    high_is_good : whether a higher score is a better one.
    """

    score: str
    high_is_good: bool

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of a batch, differentiable: its mean, its sum, or one number a sample."""

    def sums(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Return what the metrics are computed from, as sums: those of several batches or clients are added."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of all samples in ``sums``: the score, ``loss`` (the mean), and others if any."""


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
    data : training and test samples, and what an input is.
    build : seed -> a fresh network, initialised from this seed and nothing else.
    task : loss and score.
    seed : of the initial global model.
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
            The data are not there, damaged or too few; what is wrong with the network :meth:`network` says.
        """
        network = (settings.model, settings.hidden_width, settings.model_options)
        return _named(load_dataset(settings.data), network, settings.seed)

    def network(self, seed: int | None = None) -> nn.Module:
        """Return a fresh network on the CPU: the initial global model, or that of another seed.

        Raises
        ------
        UserError
            No network has this name, or it cannot take these inputs.
        """
        return self.build(self.seed if seed is None else seed)


@lru_cache(maxsize=1)
def _named(data: Dataset, network: tuple[str, int | None, str], seed: int) -> Problem:
    model, width, options = network

    def build(of_seed: int) -> nn.Module:
        return build_model(model, data.in_shape, data.num_classes, of_seed, width, options)

    problem = Problem(data, build, Classification(), seed)
    if is_sourced(model):
        check_network(problem.network(), model, data.in_shape, data.num_classes)
    return problem
