"""Local training and evaluation on samples that are already in memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsub_app.common.seeds import generator as seeded
from fedsub_app.common.tensors import Tensors, brought
from fedsub_app.data import Samples
from fedsub_app.models import Output
from fedsub_app.problem import Task
from fedsub_app.training import costs
from fedsub_app.training.objectives import Forward, Objective
from fedsub_app.training.optimizer import Optimizer

if TYPE_CHECKING:
    from fedsub_app.training.client import ClientTools

Loss = Callable[[Output, Tensor], Tensor]  # (output, labels) -> scalar
Correct = Callable[[Tensors], None]
EVALUATION_BATCH = 512  # samples, at most
CPU = torch.device("cpu")


class Training:
    """Training of some tensors of a client's network: the optimizer that moves them, and the step.

    Parameters
    ----------
    client : the client whose network and data these are.
    names : tensors that are trained, ``None`` for all. The others are frozen: no gradient of theirs is computed, and
        the statistics of a frozen BatchNorm are used and stay.
    lr : learning rate; default: the setting's of this round.
    loss : ``(output, labels) -> scalar`` instead of the task's; the objective's term comes on top.
    step : ``(training, x, y) -> detached loss`` instead of :meth:`descend`; it counts its passes beyond ``descend``
        with :meth:`spend`.
    correct : changes the gradients, named tensors, in place, after the objective's term, before the optimizer's step.
    keep : tensor name -> bool of its shape: the positions that are trained; a name that is lacking is trained whole.
    objective : instead of the setting's; ``Objective()`` for none.
    batch_statistics : BatchNorm on batch statistics everywhere (``True``) or nowhere (``False``), instead of where its
        weights are trained.

    Attributes
    ----------
    optimizer : fresh; its ``first``, ``second``, ``steps`` may be set before the first step.
    steps, samples : optimizer steps, and samples they were computed on, so far.
    """

    def __init__(
        self,
        client: "ClientTools",
        names: Iterable[str] | None = None,
        *,
        lr: float | None = None,
        loss: Loss | None = None,
        step: "Callable[[Training, Tensor, Tensor], Tensor] | None" = None,
        correct: Correct | None = None,
        keep: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        batch_statistics: bool | None = None,
    ) -> None:
        self.client = client
        self.network = client.network
        self.names = None if names is None else frozenset(names)
        trained = {n: p for n, p in self.network.parameters.items() if self.names is None or n in self.names}
        self.optimizer = Optimizer(client.settings, trained, client.settings.lr_at(client.round) if lr is None else lr)
        self.loss, self.step, self.correct = loss or client.loss, step or Training.descend, correct
        self.factors = _factors(keep or {}, trained, self.network.device)
        self.objective = client.objective() if objective is None else objective
        self.batch_statistics = batch_statistics
        plain = names is None and loss is None and not self.objective.forwards
        self.compiled = plain and client.settings.compile_steps
        self.steps = self.samples = 0
        self._extra = 0.0

    def run(self, batches: Iterable[Tensor]) -> None:
        """Train on these mini-batches (index tensors), continuing with the optimizer; add the costs to the client."""
        client = self.client
        self.network.training_mode(self.names, self.batch_statistics)
        draws = client.augmentation()
        before, extra = self.samples, self._extra
        device = client.x.device
        total, seen = torch.zeros((), device=device), 0
        for index in batches:
            batch = index.to(device)
            x = client.x[batch] if draws is None else crop_and_flip(client.x[batch], client.place.black, draws)
            total += self.step(self, x, client.y[batch]) * len(batch)
            seen += len(batch)
        if not seen:
            return
        client.metrics["train-loss"] = float(total) / seen
        forward = client.place.forward_flops(self.network)
        step = client.place.training_flops(self.network, self.names) + self.objective.forwards * forward
        client.flops += (self.samples - before) * step + self._extra - extra
        client.published_flops += (self.samples - before) * costs.published_flops(forward, self.objective.forwards > 0)
        client.state |= self.objective.remember(self.network.tensors)

    def descend(self, x: Tensor, y: Tensor, forward: Forward | None = None) -> Tensor:
        """Make one optimizer step on a mini-batch and return the loss before it, detached.

        ``forward`` runs the network in another way, under a mask for example.
        """
        if self.compiled and forward is None and len(y) == self.client.settings.batch_size:
            loss = self.network.compiled(self.client.place.problem.task.loss)(x, y)
        else:
            forward = forward or self.network
            output = forward(x, None)
            loss = self.loss(output, y) + self.objective.term(x, output, forward)
        gradients = self.optimizer.gradients(loss)
        self.objective.correct(gradients, self.optimizer.parameters)
        if self.correct:
            self.correct(gradients)
        for name, factor in self.factors.items():
            gradients[name].mul_(factor)
        self.optimizer.step(gradients)
        self.steps += 1
        self.samples += len(y)
        return loss.detach()

    def spend(self, samples: int, names: Iterable[str]) -> None:
        """Count a forward pass on ``samples`` more, and a backward pass that computes the gradients of ``names``."""
        place = self.client.place
        self._extra += samples * place.training_flops(self.network, frozenset(names))
        self.client.published_flops += samples * costs.published_flops(place.forward_flops(self.network), False)


def _factors(keep: Mapping[str, Tensor], parameters: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """Return bool positions as 0 and 1, laid out as the parameters; uint8, the same bytes, halves the time."""
    bits = brought({name: keep[name].view(torch.uint8) for name in parameters if name in keep}, device)
    return {name: torch.empty_like(parameters[name]).copy_(mask) for name, mask in bits.items()}


def epoch(
    count: int, batch_size: int, generator: torch.Generator, skip_single: bool, device: torch.device = CPU
) -> list[Tensor]:
    """Return the mini-batches of one pass over ``count`` samples in a fresh order, as index tensors (int64).

    One copy moves all of them to ``device``. ``skip_single`` leaves out a last batch of one sample, on which batch
    normalisation cannot train.
    """
    parts = torch.randperm(count, generator=generator).to(device).split(batch_size)
    return [part for part in parts if not (skip_single and len(part) == 1 < count)]


def crop_and_flip(x: Tensor, black: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return images as RandomCrop with ``padding`` and RandomHorizontalFlip make them, each with draws of its own.

    Parameters
    ----------
    x : float ``[n, channels, height, width]``.
    black : float ``[channels]``: value of the border, black after normalisation.
    generator : generator on the CPU.
    """
    n, channels, height, width = x.shape
    padded = black.view(1, -1, 1, 1).expand(n, channels, height + 2 * padding, width + 2 * padding).clone()
    padded[:, :, padding : padding + height, padding : padding + width] = x
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    flipped = torch.rand(n, 1, generator=generator) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    rows, columns = torch.cat((rows, columns), 1).to(x.device).split((height, width), 1)
    each = torch.arange(n, device=x.device).view(-1, 1, 1)
    picked = padded.permute(0, 2, 3, 1)[each, rows.view(n, -1, 1), columns.view(n, 1, -1)]
    return picked.permute(0, 3, 1, 2)  # channels_last, as the batch was


def evaluation_batch(count: int) -> int:
    """Return the largest size of evaluation batches that leaves no batch of one sample, which has no statistics."""
    return next(size for size in range(EVALUATION_BATCH, 0, -1) if count % size != 1)


def evaluation_batches(model: nn.Module, count: int, device: torch.device) -> list[slice] | list[Tensor]:
    """Return the evaluation batches of ``count`` samples: slices, or index tensors (int64) on ``device``.

    A BatchNorm without running statistics uses the batch's statistics in evaluation as well. Samples may be sorted by
    class (image files are), so for such a model batches are drawn at random, the same ones each time.
    """
    size = evaluation_batch(count)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in model.modules()):
        order = torch.randperm(count, generator=seeded("order of evaluation"))
        return list(order.to(device).split(size))
    return [slice(start, start + size) for start in range(0, count, size)]


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, x: Tensor | Samples, y: Tensor) -> dict[str, float]:
    """Return the task's metrics of ``model`` in evaluation mode, by name; restores the model's mode."""
    training = model.training
    model.eval()
    sums: dict[str, float] = {}
    for part in evaluation_batches(model, len(y), y.device):
        for name, value in task.sums(model(x[part]), y[part]).items():
            sums[name] = sums.get(name, 0) + value
    model.train(training)
    return task.metrics(sums)
