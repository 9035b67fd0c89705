"""FedPeWS and FedPeWS-Fixed, server side (Algorithm 1, lines 1 to 6 and 20).

Tastan, Horváth, Takáč, Nandakumar: FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning, 2024, https://arxiv.org/abs/2410.03042.

During the first W rounds a client trains a sub-network of its own; positions that no client covers keep their value, the
others take the mean over the clients that cover them (Eq. 4). Afterwards it is FedAvg or FedProx.

Read into the paper, which is silent or contradicts itself there:
- theta of the others (line 12) is the mean of ``sigmoid(s_j)`` that clients ``j != i`` uploaded last, at first 0.5
  (``s_g^0 = 0``); line 18 uploads only the mask, from which it could not be computed.
- A weight is masked by both its neurons ("and", the rule of IST, the function actually computed), a bias by its own.
- Positions that nobody covers keep ``x_g`` (0/0 in Eq. 4). Output biases are always covered.
- A client uploads the values that its mask covers, with the neuron mask; with fixed masks the server knows the mask and
  sends only the covered values as well. Evaluation is on the full model.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from fedsub_app.config import CountOrZero, MethodSettings, NonNegative, Positive, Settings
from fedsub_app.protocol import BadReply, Json, Spec, Task, Tensors, Update
from fedsub_app.subnets.averaging import masked_mean
from fedsub_app.subnets.masks import expand, fixed_masks, gather, scatter
from strategies.base import SubnetStrategy


class FedPeWSSettings(MethodSettings):
    """``warmup_rounds``: W; ``lambda_``: weight of the mask diversity; ``mask_lr``: eta_s; ``mu`` > 0: on FedProx."""

    masks: Literal["learned", "fixed"]
    warmup_rounds: CountOrZero
    lambda_: NonNegative
    mask_lr: Positive
    mu: NonNegative

    def check(self, settings: Settings) -> None:
        """W must not exceed T."""
        if self.warmup_rounds > settings.num_rounds:
            raise ValueError(
                f"fedpews.warmup-rounds = {self.warmup_rounds}: must be at most num-rounds = {settings.num_rounds}"
            )


def with_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Name tensors ``prefix/name`` for the wire."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return those of ``tensors`` that :func:`with_prefix` named, under their own names."""
    mark = f"{prefix}/"
    return {name.removeprefix(mark): tensor for name, tensor in tensors.items() if name.startswith(mark)}


class FedPeWS(SubnetStrategy):
    """Personalised warm-up, then FedAvg."""

    options: FedPeWSSettings

    def __init__(self, settings: Settings, model: nn.Module, header: Json) -> None:
        super().__init__(settings, model, header)
        self.shapes = {name: tensor.shape for name, tensor in self.current.items()}
        start = {group.name: torch.full((group.size,), 0.5) for group in self.units}
        self.theta = {client: start for client in range(settings.num_clients)}
        if self.options.masks == "fixed" and self.options.warmup_rounds:
            self.fixed = fixed_masks(self.units, settings.num_clients)

    @property
    def warming_up(self) -> bool:
        """Say whether the running round is one of the first W."""
        return self.round <= self.options.warmup_rounds

    def task(self, client: int) -> Task:
        """Line 6: the global model and, in the warm-up, the others' mask probabilities or the client's fixed mask."""
        if not self.warming_up:
            return super().task(client)
        if self.options.masks == "fixed":
            mask = self.fixed[client]
            covered = gather(self.current, expand(self.units, mask, self.shapes))
            return Task(client, with_prefix("value", covered) | with_prefix("mask", mask), {"warm-up": True})
        return Task(client, self.current | with_prefix("theta", self._theta_of_others(client)), {"warm-up": True})

    def _theta_of_others(self, client: int) -> Tensors:
        others = [theta for other, theta in self.theta.items() if other != client] or [self.theta[client]]
        return {name: torch.stack([theta[name] for theta in others]).mean(0) for name in others[0]}

    def expected(self, client: int) -> Mapping[str, Spec]:
        """The covered values and, where the client draws its own mask, the mask and its probabilities."""
        if not self.warming_up:
            return super().expected(client)
        specs = {f"value/{name}": Spec((None,)) for name in self.shapes}
        if self.options.masks == "learned":
            for group in self.units:
                specs[f"mask/{group.name}"] = Spec((group.size,), torch.bool)
                specs[f"theta/{group.name}"] = Spec((group.size,))
        return specs

    def decode(self, update: Update) -> Update:
        """Scatter the covered values to full tensors; ``mask/…`` becomes the mask of every position."""
        if not self.warming_up:
            return update
        learned = self.options.masks == "learned"
        masks = without_prefix("mask", update.tensors) if learned else self.fixed[update.client]
        theta = without_prefix("theta", update.tensors)
        for name, values in theta.items():
            if not bool(((values >= 0) & (values <= 1)).all()):
                raise BadReply(f"tensor 'theta/{name}': probabilities outside [0, 1]")
        positions = expand(self.units, masks, self.shapes)
        values = without_prefix("value", update.tensors)
        for name, mask in positions.items():
            if values[name].numel() != int(mask.sum()):
                raise BadReply(f"tensor 'value/{name}': {values[name].numel()} values, its mask covers {int(mask.sum())}")
        if theta:
            self.theta[update.client] = theta
        tensors = scatter(values, positions) | with_prefix("mask", positions)
        return Update(update.client, tensors, update.metrics, update.num_examples)

    def merge(self, updates: Sequence[Update]) -> Tensors:
        """Line 20, Eq. 4; after the warm-up FedAvg (all masks 1)."""
        if not self.warming_up:
            return super().merge(updates)
        return masked_mean(
            self.current,
            [
                ({name: u.tensors[name] for name in self.shapes}, without_prefix("mask", u.tensors), self.weight(u))
                for u in updates
            ],
            server_lr=self.settings.server_lr,
        )

    def state(self) -> Tensors:
        """Every client's last mask probabilities."""
        return {f"{client}/{name}": value for client, theta in self.theta.items() for name, value in theta.items()}

    def load_state(self, state: Tensors) -> None:
        """Restore them."""
        self.theta = {client: without_prefix(str(client), state) for client in self.theta}
