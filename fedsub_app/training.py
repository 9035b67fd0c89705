"""Local training and evaluation on tensors that are already in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from fedsub_app.settings import Settings

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EVALUATION_BATCH = 512


def make_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return a fresh optimizer over ``parameters`` (fused kernels: one call a step instead of one a tensor)."""
    trained = list(parameters)
    if settings.optimizer == "adam":
        return torch.optim.Adam(trained, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.SGD(
        trained, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
    )


def batches(
    count: int, batch_size: int, epochs: int, generator: torch.Generator, skip_single: bool
) -> Iterator[torch.Tensor]:
    """Yield index tensors (int64) of the mini-batches of ``epochs`` passes, each in a fresh order.

    ``skip_single`` leaves out a last batch of one sample, which batch normalisation cannot train on.
    """
    for _ in range(epochs):
        for batch in torch.randperm(count, generator=generator).split(batch_size):
            if not (skip_single and len(batch) == 1 < count):
                yield batch


def fit(step: Step, x: torch.Tensor, y: torch.Tensor, order: Iterable[torch.Tensor]) -> tuple[float, int]:
    """Call ``step(x_batch, y_batch) -> loss`` for every batch of ``order``.

    Returns
    -------
    tuple of float and int
        Mean loss over samples (0 without any) and the number of samples seen.
    """
    total, seen = torch.zeros((), device=x.device), 0
    for index in order:
        batch = index.to(x.device)
        total += step(x[batch], y[batch]) * len(index)
        seen += len(index)
    return (float(total) / seen if seen else 0.0), seen


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return accuracy in percent and mean cross-entropy of ``model`` in evaluation mode; leaves its mode as it was."""
    training = model.training
    model.eval()
    correct, loss = 0, 0.0
    for features, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        output = model(features)
        correct += int((output.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(output, labels, reduction="sum"))
    model.train(training)
    return 100.0 * correct / len(y), loss / len(y)
