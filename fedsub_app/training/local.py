"""Local training and evaluation on tensors that are already in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EVALUATION_BATCH = 512


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


def crop_and_flip(x: torch.Tensor, black: torch.Tensor, generator: torch.Generator, padding: int = 4) -> torch.Tensor:
    """Return images as RandomCrop with ``padding`` and RandomHorizontalFlip make them, each with draws of its own.

    Parameters
    ----------
    x : float ``[n, channels, height, width]``.
    black : float ``[channels]``: what the border is filled with, black as it is after normalisation.
    generator : CPU.
    """
    n, channels, height, width = x.shape
    padded = black.view(1, -1, 1, 1).expand(n, channels, height + 2 * padding, width + 2 * padding).clone()
    padded[:, :, padding : padding + height, padding : padding + width] = x
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    flipped = torch.rand(n, 1, generator=generator) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    picked = padded.permute(0, 2, 3, 1)[
        torch.arange(n).view(-1, 1, 1), rows.view(n, -1, 1).to(x.device), columns.view(n, 1, -1).to(x.device)
    ]
    return picked.permute(0, 3, 1, 2)  # channels_last, as the batch was


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
