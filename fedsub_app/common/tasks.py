"""Tasks: the loss of a network's output, the metrics that are reported of it, and the one that is the score."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.own_code import named_code
from fedsub_app.common.score import OWN, SCORES, Score, further_metrics

Reduction = Literal["mean", "sum", "none"]
Loss = Callable[[Tensor, Tensor], Tensor]  # (output, y) -> the mean of a batch
Metrics = Callable[[Tensor, Tensor], Mapping[str, float]]  # (output, y) -> means of a batch by name
Sums = dict[str, float | Tensor]
BINS, LARGEST, FINE = 4000, 1000.0, 0.05  # for areas under ROC curves logits are counted in bins of asinh
IGNORED = -100  # the target of a position that does not count, as in torch


class Task(ABC):
    """A task. Your own class derives from it and defines :meth:`loss`, :meth:`sums`, :meth:`metrics` and attributes.

    Attributes
    ----------
    score : the metric by which models are compared, one word; report keys end with it: ``global-<score>``.
    high_is_good : whether a higher score is a better one.
    unit : ``"%"``, or "" for a number without a unit.
    low, high : least and greatest score that a client may report.
    others : names of the further metrics besides the score and ``loss``.
    losses : range of the loss; a model with a larger one has diverged.
    classes : whether y is one class a sample, int64 [n], as methods with class means need it.
    """

    score = "score"
    high_is_good = True
    unit = ""
    low, high = -1e9, 1e9
    others: tuple[str, ...] = ()
    losses: tuple[float, float] = (-1e12, 1e12)
    classes = False

    @property
    def about(self) -> Score:
        """The score with its unit and direction."""
        return Score(self.score, self.high_is_good, self.unit, self.low, self.high, self.others, self.losses)

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of a batch, differentiable: its mean, its sum, or one number a sample."""

    @abstractmethod
    def sums(self, output: Tensor, y: Tensor) -> Mapping[str, float | Tensor]:
        """Return the sums from which the metrics are computed; sums of several batches or clients can be added."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return the metrics of all samples in ``sums``: the score, ``loss`` (the mean), and the others."""

    def count(self, y: Tensor) -> int:
        """Return the number of terms whose mean is the loss: by default the samples."""
        return len(y)

    def outputs(self, y: Tensor) -> int:
        """Return the number of outputs that a network needs for y: by default the numbers that y has for a sample."""
        return math.prod(y.shape[1:])

    def output(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        """Return the shape of a network's output for one sample, from all y and the number of its outputs."""
        return (outputs,)

    def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
        """Return y in the dtype that the loss takes, checked against the shape of a network's output for one sample.

        ValueError: what y is and what it must be.
        """
        return y


class Classification(Task):
    """Cross-entropy of the logits [n, classes] with int64 labels [n]; the score is the accuracy in percent."""

    score, high_is_good, unit, low, high, others, losses = SCORES["classification"]
    classes = True

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        return F.cross_entropy(output, y, reduction=reduction)

    def sums(self, output: Tensor, y: Tensor) -> Sums:
        correct = int((output.argmax(-1) == y).sum())
        return {"correct": correct, "loss": float(self.loss(output, y, "sum")), "count": self.count(y)}

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        return {"accuracy": float(100.0 * sums["correct"] / sums["count"]), "loss": _mean(sums)}

    def outputs(self, y: Tensor) -> int:
        if y.is_floating_point():
            raise ValueError(f"y of {y.dtype}: must be integers")
        return max(int(y.max()) if y.numel() else 0, 0) + 1

    def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
        if y.is_floating_point() or y.ndim != 1:
            raise ValueError(f"y of shape {tuple(y.shape)}, {y.dtype}: must be [n], integers")
        return _in_range(y.long(), output, low=0)


class FurtherMetrics(Classification):
    """A classification that also reports metrics named in the setting ``metrics``, each in percent.

    ``auc``: area under the ROC curve of a class against the others, the mean over the classes; ``f1``: the mean over
    the classes that are labels or predictions; ``balanced_accuracy``: mean recall of the classes that are labels.
    """

    def __init__(self, others: Sequence[str]) -> None:
        self.others = tuple(others)

    def sums(self, output: Tensor, y: Tensor) -> Sums:
        classes = output.shape[1]
        pairs = torch.bincount(y * classes + output.argmax(1), minlength=classes**2).view(classes, classes)
        sums: Sums = super().sums(output, y) | {"pairs": pairs}
        if "auc" in self.others:
            sums |= rank_counts(_against_others(output.double()), F.one_hot(y, classes).bool())
        return sums

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        pairs = torch.as_tensor(sums["pairs"]).double()
        hits, labels, both = pairs.diagonal(), pairs.sum(1), pairs.sum(0) + pairs.sum(1)
        values = {
            "f1": lambda: 100.0 * float((2 * hits / both)[both > 0].mean()),
            "balanced_accuracy": lambda: 100.0 * float((hits / labels)[labels > 0].mean()),
            "auc": lambda: mean_area(sums),
        }
        return super().metrics(sums) | {name: values[name]() for name in self.others}


class MultiLabel(Task):
    """Binary cross-entropy of the logits [n, labels] with y [n, labels] of 0 and 1.

    The score is the area under the ROC curve in percent, the mean over the labels that have positive and negative
    samples; 50 without such a label. Logits are counted in bins, narrow around 0, up to ±1000, so that the counts of
    batches add up. ``f1`` (percent): of all labels together, at the logit 0.
    """

    score, high_is_good, unit, low, high, others, losses = SCORES["multi-label"]

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _reduced(F.binary_cross_entropy_with_logits(output, y, reduction="none").mean(1), reduction)

    def sums(self, output: Tensor, y: Tensor) -> Sums:
        true, said = y.bool(), output > 0
        hits, wrong = int((said & true).sum()), int((said != true).sum())
        loss = float(self.loss(output, y, "sum"))
        return {**rank_counts(output, true), "hits": hits, "wrong": wrong, "loss": loss, "count": len(y)}

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        f1 = 2 * float(sums["hits"]) / max(2 * float(sums["hits"]) + float(sums["wrong"]), 1)
        return {"auroc": mean_area(sums), "f1": 100.0 * f1, "loss": _mean(sums)}

    def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
        if tuple(y.shape[1:]) != output:
            raise ValueError(f"y of shape {tuple(y.shape)}: must be [n, {output[-1]}], a column an output")
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(f"y from {float(y.min()):g} to {float(y.max()):g}: must be 0 or 1")
        return y.float()


class Regression(Task):
    """Squared error between the outputs [n, k] and numbers [n, k], or [n] for one output.

    The score is the root of the mean squared error; lower is better. ``mae`` is the mean absolute error.
    """

    score, high_is_good, unit, low, high, others, losses = SCORES["regression"]

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        return _reduced(F.mse_loss(output, y, reduction="none").flatten(1).mean(1), reduction)

    def sums(self, output: Tensor, y: Tensor) -> Sums:
        errors = (output - y).flatten(1).double()
        squares, sizes = float(errors.square().mean(1).sum()), float(errors.abs().mean(1).sum())
        return {"squares": squares, "sizes": sizes, "loss": float(self.loss(output, y, "sum")), "count": len(y)}

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        count = float(sums["count"])
        root = math.sqrt(float(sums["squares"]) / count)
        return {"rmse": root, "mae": float(sums["sizes"]) / count, "loss": _mean(sums)}

    def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
        y = y.float().view(-1, 1) if y.ndim == 1 else y.float()
        if tuple(y.shape[1:]) != output:
            raise ValueError(f"y of shape {tuple(y.shape)}: must be [n, {', '.join(map(str, output))}] as the outputs")
        if not bool(y.isfinite().all()):
            raise ValueError("y: must be finite numbers")
        return y


class NextToken(Classification):
    """Cross-entropy of the logits [n, length, tokens] with the next tokens, int64 [n, length]; -100 does not count.

    The score is the accuracy of the next token in percent; ``perplexity`` is e to the mean loss, at most e^20.
    """

    score, high_is_good, unit, low, high, others, losses = SCORES["next-token"]
    classes = False

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy over all tokens that count, with ``"none"`` each sample's mean over its own."""
        flat = F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="none")
        each = flat.view(len(y), -1)
        if reduction == "sum":
            return each.sum()
        counted = (y != IGNORED).view(len(y), -1)
        if reduction == "none":
            return each.sum(1) / counted.sum(1).clamp(min=1)
        return each.sum() / counted.sum().clamp(min=1)

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        count = max(float(sums["count"]), 1.0)
        loss = float(sums["loss"]) / count
        return {"accuracy": 100.0 * float(sums["correct"]) / count, "perplexity": math.exp(min(loss, 20)), "loss": loss}

    def count(self, y: Tensor) -> int:
        return int((y != IGNORED).sum())

    def output(self, y: Tensor, outputs: int) -> tuple[int, ...]:
        return (*y.shape[1:], outputs)

    def targets(self, y: Tensor, output: tuple[int, ...]) -> Tensor:
        if y.is_floating_point() or tuple(y.shape[1:]) != output[:-1]:
            raise ValueError(f"y of shape {tuple(y.shape)}, {y.dtype}: must be [n, {output[0]}], integers")
        return _in_range(y.long(), output, low=IGNORED)


def are_next(x: Tensor, y: Tensor) -> bool:
    """Say whether the labels of tokens [n, length] are the next tokens, and not others such as parts of speech."""
    if x.shape != y.shape:
        return False
    known = (y[:, :-1] != IGNORED) & (y[:, 1:] != IGNORED)  # behind a text's last token x is padding
    return torch.equal(x[:, 1:][known], y[:, :-1][known].to(x.dtype))


def rank_counts(scores: Tensor, true: Tensor) -> Sums:
    """Return counts of positive and negative samples, int64 [labels, bins]; ``scores`` [n, labels], bins to ±1000."""
    offsets = torch.arange(true.shape[1], device=true.device) * BINS
    places = torch.asinh(scores.double() / FINE) / math.asinh(LARGEST / FINE)  # a sure network's logits are large
    bins = ((places + 1) / 2 * BINS).long().clamp(0, BINS - 1) + offsets

    def counts(which: Tensor) -> Tensor:
        return torch.bincount(bins[which], minlength=offsets.numel() * BINS).view(-1, BINS)

    return {"positive": counts(true), "negative": counts(~true)}


def _against_others(logits: Tensor) -> Tensor:
    """Return the logit of each class against all others, [n, classes]; it is 0 at chance, where bins are narrow.

    It is exact even if a probability rounds to 1.
    """
    log_p = logits.log_softmax(1)
    first = F.one_hot(logits.argmax(1), logits.shape[1]).bool()
    rest = log_p.masked_fill(first, -math.inf).logsumexp(1, keepdim=True).clamp(min=-LARGEST)
    chance = math.log(max(logits.shape[1] - 1, 1))
    return log_p - torch.where(first, rest, torch.log1p(-log_p.exp().clamp(max=0.5))) + chance


def mean_area(sums: Mapping[str, float | Tensor]) -> float:
    """Return the area under the ROC curve in percent, the mean over labels with samples of both kinds; 50 without."""
    positive, negative = (torch.as_tensor(sums[name]).double() for name in ("positive", "negative"))
    below = negative.cumsum(1) - negative / 2
    pairs = positive.sum(1) * negative.sum(1)
    areas = ((positive * below).sum(1) / pairs)[pairs > 0]
    return 100.0 * float(areas.mean()) if len(areas) else 50.0


def _reduced(each: Tensor, reduction: Reduction) -> Tensor:
    return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each


def _mean(sums: Mapping[str, float | Tensor]) -> float:
    return float(sums["loss"] / sums["count"])


def _in_range(y: Tensor, output: tuple[int, ...], low: int) -> Tensor:
    outputs = output[-1]
    wrong = y[((y < 0) & (y != low)) | (y >= outputs)]
    if len(wrong):
        label = int(wrong.flatten()[0])
        raise ValueError(f"label {label}: must be 0 to {outputs - 1}, the network has {outputs} outputs")
    return y


TASKS: dict[str, Task] = dict(zip(SCORES, (Classification(), MultiLabel(), Regression(), NextToken()), strict=True))
KEPT: list[Task] = []  # objects of the program, also those that others have replaced: no other one gets their id


def numbers(who: str, found: Any) -> dict[str, float]:
    """Return what a user's function returned, numbers by name of Python, NumPy or torch, as floats."""
    try:
        return {str(name): float(value) for name, value in dict(found).items()}
    except (TypeError, ValueError) as error:
        raise UserError(f"{who}: returned {shown(found)[:100]}; must be numbers by name") from error


def measured(task: Task, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return the metrics of the samples in ``sums``; :class:`UserError` where they lack the score or the loss."""
    found = numbers(who := f"{type(task).__name__}.metrics", task.metrics(sums))
    if missing := [name for name in (task.score, "loss") if name not in found]:
        raise UserError(f"{who}: returned {', '.join(found)}; must have {missing[0]!r}")
    return found


def registered(task: object) -> str:
    """Return a task's name in settings; register a task that is an object of this program for its processes."""
    if isinstance(task, str):
        return task
    if not isinstance(task, Task):
        raise UserError(f"task = {task!r}: must be one of {', '.join(TASKS)}, or an object derived from fedsub.Task")
    name = next((name for name, known in TASKS.items() if known is task), f"{OWN}{type(task).__name__}")
    if TASKS.get(name) is not task:
        KEPT.append(task)
    TASKS[name] = task
    return name


def task_of(name: str, metrics: Sequence[str] = ()) -> Task:
    """Return the task that the setting names, with the further metrics of a classification; a user's file is run."""
    if further := further_metrics(metrics):
        return FurtherMetrics(further)
    if name in TASKS:
        return TASKS[name]
    if name.startswith(OWN):
        raise UserError(f"task = {name!r}: an object that this process has not; give client_app task= as well")
    task: object = named_code("task", name)
    if isinstance(task, type) and issubclass(task, Task):
        if task.__abstractmethods__:
            raise UserError(f"task = {name!r}: the class lacks {', '.join(sorted(task.__abstractmethods__))}")
        task = task()
    if not isinstance(task, Task) or "-" in task.score:
        raise UserError(f"task = {name!r}: must be a class derived from fedsub.Task, whose score is one word")
    return task
