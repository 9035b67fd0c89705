"""A family of sparse networks: the base of methods whose model keeps a fraction of its single weights.

Weight tensors of convolutions and linear layers have a mask: with :class:`Masked` one for each client, with
:class:`Sparse` one for all. Weights at the other positions are 0. A client is sent the values at the positions that are
kept and, where it lacks the mask, the mask as bits. It trains these positions and answers with their values; tensors
without a mask travel whole. The mean is taken position by position over the clients that keep the position. With
``density = 1`` nothing is pruned, and the methods of :class:`Sparse` are FedAvg, bit for bit.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.settings import Settings
from fedsub_app.subnets.masks import gather
from fedsub_app.subnets.pruning import prunable
from fedsub_app.subnets.sparsity import kept_counts, largest_of_layers
from strategies.base import Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.defences import WITHOUT_MASKS
from strategies.sparse_settings import RegrownSettings, SparseSettings

MASK = "mask/"


class Masked(SubnetStrategy):
    """Sends, trains and merges the values that a client's masks keep."""

    secure = ""
    refused: ClassVar[Mapping[str, str] | str] = WITHOUT_MASKS

    @abstractmethod
    def kept(self, client: int) -> Tensors:
        """Return a client's masks that do not keep all weights: name -> bool; equal dicts of masks are one object."""

    def values(self, client: int) -> Tensors:
        """Return the model, each masked tensor as its kept values; equal tensors are sent once a message."""
        masks = self.kept(client)
        return self.once(("values", id(masks)), lambda: (masks, self.current | gather(self.current, masks)))[1]

    def expected(self, client: int) -> Mapping[str, Spec]:
        return self.specs | {n: self.specs[n].of_shape([int(mask.sum())]) for n, mask in self.kept(client).items()}

    def contribution(self, update: Update) -> Contribution:
        return self.contribution_at(update, self.kept(update.client) | unprefixed(MASK, update.tensors))

    def known_positions(self, client: int) -> Tensors:
        return self.kept(client)


class Sparse(Masked):
    """Has one mask for all clients."""

    options: SparseSettings
    secure = ""
    remembers: tuple[str, ...] = ("masks", "made")
    _cut: tuple[Tensors, Tensors] = ({}, {})

    def setup(self) -> None:
        names = weight_names(self.settings, self.model)
        self.shapes = {name: self.current[name].shape for name in names} if self.options.density < 1 else {}
        self.masks: Tensors = self.first_masks()  # 1: kept; none where all weights are kept
        self.made = torch.tensor(0)  # the round whose merge made the masks; 0: they are the first ones
        self.current = self.pruned(self.current, self.masks)

    def first_masks(self) -> Tensors:
        return {name: torch.ones(shape, dtype=torch.bool) for name, shape in self.shapes.items()}

    def adjusts(self, server_round: int) -> bool:
        """Say whether the masks are adjusted at the end of a round: by default never."""
        return False

    def chooses(self, server_round: int) -> bool:
        """Say whether a round chooses the masks: round 1 does, and the running round if all before were abandoned."""
        return bool(self.shapes) and (server_round == 1 or (server_round == self.round and not self.made))

    def findings(self) -> Mapping[str, Spec]:
        """Return the specs of the tensors that a client adds to its reply in a round that adjusts the masks."""
        return {}

    def adjusted(self, model: Tensors, updates: Sequence[Update]) -> Tensors:
        """Return the next masks, from the merged model before its pruning and the findings in the updates."""
        return self.masks

    def kept(self, client: int) -> Tensors:
        if self._cut[0] is not self.masks:
            self._cut = (self.masks, {name: mask for name, mask in self.masks.items() if not mask.all()})
        return self._cut[1]

    @staticmethod
    def pruned(model: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensors:
        """Return the model with 0 at the positions that masks do not keep."""
        return {name: tensor * masks[name] if name in masks else tensor for name, tensor in model.items()}

    def task(self, client: int) -> Task:
        """Send the kept values; send the masks as well to a client without a merged reply since they were made."""
        bits = {} if self.state_rounds[client] > self.made else prefixed(MASK, self.kept(client))
        return Task(client, self.values(client) | bits, {"adjust": self.adjusts(self.round)})

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {**super().expected(client), **(self.findings() if self.adjusts(self.round) else {})}

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Merge each position over the clients that keep it; adjust the masks."""
        model = self.merged(mean, updates)
        return self.under(model, self.adjusted(model, updates)) if self.adjusts(self.round) else Merged(model)

    def merged(self, mean: Mean, updates: Sequence[Update]) -> Tensors:
        """Return the merged weights under the masks, because in Flower's own loop the first model is not pruned."""
        return self.pruned(super().merge(mean, updates).model, self.masks)

    def under(self, model: Tensors, masks: Tensors) -> Merged:
        """Return the outcome of a round that has made these masks."""
        return Merged(self.pruned(model, masks), {"masks": masks, "made": torch.tensor(self.round)})

    def weighted(self, updates: Sequence[Update], tensors: Sequence[Tensor]) -> Tensor:
        """Return the weighted mean of one tensor of each update."""
        total = sum(map(self.weight, updates))
        shares = [self.weight(update) / total for update in updates]
        return torch.stack([share * tensor for share, tensor in zip(shares, tensors, strict=True)]).sum(0)

    def position_masks(self) -> list[Tensors] | None:
        return [self.masks] * self.settings.num_clients if self.masks else None


class Regrown(Sparse):
    """Begins at random positions and adjusts the masks in rounds ``every``, 2 ``every``, … before ``until``."""

    options: RegrownSettings

    def first_masks(self) -> Tensors:
        draws = generator(self.settings.seed, "masks")
        numbers = {name: torch.rand(shape, generator=draws) for name, shape in self.shapes.items()}
        return largest_of_layers(numbers, kept_counts(self.shapes, self.options.density, self.options.layers))

    def adjusts(self, server_round: int) -> bool:
        return bool(self.kept(0)) and server_round % self.options.every == 0 and server_round < self.options.until


def weight_names(settings: Settings, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of all convolutions and linear layers; :class:`UserError` without any."""
    if names := prunable(model, "unstructured").weights:
        return names
    raise UserError(f"model = {settings.model!r}: has no convolution or linear layer for {settings.method}")
