"""Passes over samples that are already in memory: mini-batches, augmentation, evaluation."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch
from fedsub_app.common.seeds import generator as seeded
from fedsub_app.common.tasks import Sums, Task, measured
from fedsub_app.data import AnySamples

EVALUATION_BATCH = 512  # samples, at most


def epoch(count: int, batch_size: int, draws: torch.Generator, skip_single: bool, device: torch.device) -> list[Tensor]:
    """Return the mini-batches of one pass over ``count`` samples in a fresh order, as index tensors (int64).

    One copy moves all to ``device``. ``skip_single``: without a last batch of one, on which BatchNorm cannot train.
    """
    parts = torch.randperm(count, generator=draws).to(device).split(batch_size)
    return [part for part in parts if not (skip_single and len(part) == 1 < count)]


def crop_and_flip(x: Tensor, black: Tensor, generator: torch.Generator) -> Tensor:
    """Return images as RandomCrop with padding 4 and RandomHorizontalFlip make them, each with draws of its own.

    ``x``: float ``[n, channels, height, width]``; ``black``: float ``[channels]``, the border's value, black after
    normalisation; ``generator``: on the CPU.
    """
    (n, channels, height, width), padding = x.shape, 4
    padded = black.view(1, -1, 1, 1).expand(n, channels, height + 2 * padding, width + 2 * padding).clone()
    padded[:, :, padding : padding + height, padding : padding + width] = x
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(torch.rand(n, 1, generator=generator) < 0.5, columns.flip(1), columns)
    rows, columns = torch.cat((rows, columns), 1).to(x.device).split((height, width), 1)
    each = torch.arange(n, device=x.device).view(-1, 1, 1)
    picked = padded.permute(0, 2, 3, 1)[each, rows.view(n, -1, 1), columns.view(n, 1, -1)]
    return picked.permute(0, 3, 1, 2)  # channels_last, as the batch was


def evaluation_batches(model: nn.Module, count: int, device: torch.device) -> list[slice] | list[Tensor]:
    """Return the evaluation batches of ``count`` samples: slices, or index tensors (int64) on ``device``.

    A BatchNorm without running statistics uses the batch's statistics in evaluation as well. Samples may be sorted by
    class (image files are), so for such a model batches are drawn at random, the same ones each time.
    """
    # The largest size that leaves no batch of one sample, which has no statistics.
    size = next(size for size in range(EVALUATION_BATCH, 0, -1) if count % size != 1)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in model.modules()):
        if count == 1:
            raise UserError("one sample to be evaluated: BatchNorm without running statistics needs at least 2")
        return list(torch.randperm(count, generator=seeded("order of evaluation")).to(device).split(size))
    return [slice(start, start + size) for start in range(0, count, size)]


@torch.no_grad()
def sums_of(task: Task, model: nn.Module, x: Batch, y: Tensor) -> Mapping[str, float | Tensor]:
    """Return the task's sums of one batch; the model is in evaluation mode."""
    return task.sums(model(x), y)


def added(parts: Iterable[Mapping[str, float | Tensor]]) -> Sums:
    """Return the sums of several batches, added in their order."""
    sums: Sums = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value
    return sums


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, x: Batch | AnySamples, y: Tensor) -> dict[str, float]:
    """Return the task's metrics of ``model`` in evaluation mode, by name; restores the model's mode."""
    training = model.training
    model.eval()
    sums = added(sums_of(task, model, x[batch], y[batch]) for batch in evaluation_batches(model, len(y), y.device))
    model.train(training)
    return measured(task, sums)
