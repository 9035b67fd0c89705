"""Local training and evaluation on tensors that are already in memory."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedsub_app.settings import Settings

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EVALUATION_BATCH = 512


class Optimizer:
    """SGD with momentum or Adam on a fixed list of parameters, fresh; as ``torch.optim.SGD`` and ``Adam`` bit for bit.

    It calls what those call, torch's functional forms (fused: one kernel for all tensors). On a small network the
    classes' own bookkeeping and ``backward()`` into ``.grad`` take a fifth of a step.

    Attributes
    ----------
    parameters : what is trained; gradients are computed for these only.
    first, second, steps : Adam's moments, shaped as the parameters, and the steps behind each (float scalars); with SGD
        ``first`` is the momentum.
    """

    def __init__(self, settings: Settings, parameters: Iterable[nn.Parameter], server_round: int = 1) -> None:
        self.settings = settings
        self.lr = settings.lr_at(server_round)
        self.parameters: list[torch.Tensor] = list(parameters)
        adaptive = settings.optimizer == "adam"
        self.first = [torch.zeros_like(p) for p in self.parameters] if adaptive or settings.momentum else []
        self.second = [torch.zeros_like(p) for p in self.parameters] if adaptive else []
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of ``loss`` in the parameters, laid out as these."""
        found = torch.autograd.grad(loss, self.parameters)
        return [
            gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient)
            for gradient, p in zip(found, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor]) -> None:
        """Move the parameters, in place."""
        if self.settings.optimizer == "adam":
            adam(
                self.parameters,
                gradients,
                self.first,
                self.second,
                [],
                self.steps,
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.lr,
                weight_decay=self.settings.weight_decay,
                eps=1e-8,
                maximize=False,
            )
        else:
            sgd(
                self.parameters,
                gradients,
                list(self.first) or [None] * len(gradients),
                fused=True,
                weight_decay=self.settings.weight_decay,
                momentum=self.settings.momentum,
                lr=self.lr,
                dampening=0,
                nesterov=False,
                maximize=False,
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
