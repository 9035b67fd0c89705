"""Local objectives that any method can take (setting ``objective``): terms added to the loss of a mini-batch."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Tensors, prefixed
from fedsub_app.models import Output

# Runs a network on a batch, with its own tensors or with others of the same names.
Forward = Callable[[Batch, Mapping[str, Tensor] | None], Output]

PREVIOUS = "previous/"  # prefix of MOON's model of the last round in a client's state


class Objective:
    """The loss alone."""

    forwards = 0  # further forward passes of the whole network that the term makes in a step, for the FLOPs
    others: tuple[Tensors, ...] = ()  # other models that it compares with

    def term(
        self, x: Batch, output: Output, forward: Forward, reduction: Literal["mean", "none"] = "mean"
    ) -> Tensor | None:
        """Return the term added to the loss on ``x``, or None; ``reduction = "none"``: one number a sample."""
        return None

    def correct(self, gradients: Tensors, parameters: Mapping[str, Tensor]) -> None:
        """Add the gradient of a term that needs no graph, in place, to the trained tensors' gradients by name."""

    def remember(self, trained: Mapping[str, Tensor]) -> Tensors:
        """Return the tensors that the client's next round needs of the ``trained`` model (live tensors)."""
        return {}


class Prox(Objective):
    """``mu / 2 * ||w - anchor||²`` (FedProx, Eq. 2) in two fused operations; ``anchor``: w_global, on the device."""

    def __init__(self, anchor: Tensors, mu: float) -> None:
        self.others = (anchor,)
        self.mu = mu

    @torch.no_grad()
    def correct(self, gradients: Tensors, parameters: Mapping[str, Tensor]) -> None:
        if self.mu and parameters:
            differences = torch._foreach_sub(list(parameters.values()), [self.others[0][name] for name in parameters])
            torch._foreach_add_([gradients[name] for name in parameters], differences, alpha=self.mu)


class Moon(Objective):
    """Model-contrastive loss (MOON, Li, He, Song 2021, Eq. 3), times mu.

    ``-log(e^{cos(z, z_g) / t} / (e^{cos(z, z_g) / t} + e^{cos(z, z_p) / t}))``: z is the input of the last linear
    layer, z_g and z_p the same of the received model and of the client's own model at the end of its last round. A
    client without such a model uses the received one: then the gradient is 0. Both models run as the trained model
    does: on batch statistics in training, and under the same mask where a method trains a sub-network.
    Published versions compare with an alias of the global model, which makes the term constant; this one keeps the
    previous model in the client's state.

    Both models are tensors by name on the network's device; their running statistics are overwritten. t > 0.
    """

    forwards = 2

    def __init__(self, received: Tensors, previous: Tensors, mu: float, temperature: float) -> None:
        self.others = (received, previous)
        self.mu, self.temperature = mu, temperature

    def term(self, x: Batch, output: Output, forward: Forward, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        with torch.no_grad():
            others = [forward(x, tensors).features for tensors in self.others]
        likeness = torch.stack([F.cosine_similarity(output.features, other) for other in others], dim=1)
        first = torch.zeros(len(likeness), dtype=torch.int64, device=likeness.device)
        return self.mu * F.cross_entropy(likeness / self.temperature, first, reduction=reduction)

    def remember(self, trained: Mapping[str, Tensor]) -> Tensors:
        return prefixed(PREVIOUS, {name: tensor.detach().clone() for name, tensor in trained.items()})
