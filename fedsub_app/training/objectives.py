"""Local objectives that any method can take (setting ``objective``): what is added to the loss of a mini-batch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsub_app.models import head_names

if TYPE_CHECKING:
    from client_apps.base import Client


class Objective:
    """The loss alone.

    Attributes
    ----------
    passes : forward and backward passes that the term costs in a step, for the FLOPs.
    """

    passes = 0.0

    def __init__(self, client: "Client") -> None:
        """The client's model has just been loaded: it is the w_global of the round."""

    def __enter__(self) -> "Objective":
        """Training begins."""
        return self

    def __exit__(self, *_: object) -> None:
        """Training ends."""

    def term(self, x: Tensor) -> Tensor | float:
        """Return what is added to the loss on ``x``, on which the model has just been run."""
        return 0.0

    def correct(self, gradients: list[Tensor]) -> None:
        """Add the gradient of what has a simple one, in place; they are those of the optimizer's parameters."""


class Prox(Objective):
    """``mu / 2 * ||w - w_global||²`` (FedProx, Li et al. 2020, Eq. 2): two fused operations instead of a graph.

    ``anchor`` and ``mu``: another w_global than the model just loaded, by name, and another mu than the settings'.
    """

    def __init__(self, client: "Client", anchor: Mapping[str, Tensor] | None = None, mu: float | None = None) -> None:
        self.client = client
        self.mu = client.settings.prox_mu if mu is None else mu
        self.start = {
            id(p): torch.empty_like(p).copy_(p.detach() if anchor is None else anchor[name])
            for name, p in client.model.named_parameters()
        }

    @torch.no_grad()
    def correct(self, gradients: list[Tensor]) -> None:
        """Add ``mu * (w - w_global)``."""
        if self.mu:
            trained = self.client.optimizer.parameters
            away = torch._foreach_sub(trained, [self.start[id(p)] for p in trained])
            torch._foreach_add_(gradients, away, alpha=self.mu)


class Moon(Objective):
    """Model-contrastive loss (MOON, Li, He, Song 2021, Eq. 3), times mu.

    ``-log(e^{cos(z, z_g) / t} / (e^{cos(z, z_g) / t} + e^{cos(z, z_p) / t}))``: z is what enters the last linear layer,
    z_g and z_p the same of the model received and of the client's own model at the end of its last round (of the model
    received where it has none: then the gradient is 0). Both are run as the model itself is (batch statistics in
    training). Published versions compare with an alias of the global model, which makes the term
    constant; this one keeps the previous model in the client's state.
    """

    passes = 2 / 3  # two forward passes

    def __init__(self, client: "Client") -> None:
        self.mu, self.temperature = client.settings.moon_mu, client.settings.moon_temperature
        self.model = client.model
        tensors = client.place.tensors
        self.received = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        own = client.previous or self.received
        self.previous = {name: torch.empty_like(tensor).copy_(own[name]) for name, tensor in self.received.items()}
        self.head = self.model.get_submodule(head_names(self.model)[0].rpartition(".")[0])

    def __enter__(self) -> "Moon":
        self.handle = self.head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.z = inputs[0]

    def term(self, x: Tensor) -> Tensor:
        """Return mu times the contrastive loss, a mean over the batch."""
        z, others = self.z, []
        with torch.no_grad():
            for tensors in (self.received, self.previous):
                functional_call(self.model, tensors, (x,))
                others.append(self.z)
        likeness = torch.stack([F.cosine_similarity(z, other) for other in others], dim=1) / self.temperature
        return self.mu * F.cross_entropy(likeness, torch.zeros(len(x), dtype=torch.int64, device=x.device))


OBJECTIVES: dict[str, type[Objective]] = {"none": Objective, "prox": Prox, "moon": Moon}
