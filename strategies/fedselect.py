"""FedSelect, server side (GradSelect, LocalAlt; Algorithms 1 to 3).

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian: FedSelect: Personalized Federated Learning with Customized Selection of
Parameters for Fine-Tuning, CVPR 2024, https://arxiv.org/abs/2404.02478.

A client trains its personal positions, at first none, then the global ones; the server takes at each position the mean
over the clients for which it is global. Then the positions that training moved most become personal, until a fraction
alpha is personal. A client sends the values at its global positions, with the new mask's bits where the mask changed.
It gets the values at positions that were global in its last round (Algorithm 1, last lines): one made personal since
then starts from the mean.

Paper and published code differ; the default follows the paper, and the code where the paper says nothing:
- a growth takes the fraction p of each layer's positions that are still global (code; the paper reads as if
  model-wide), in tensors named weight, BatchNorm's gamma included (code); biases and BatchNorm's beta stay global.
- a layer grows where its fraction of ones is below alpha (paper; code at most alpha: ``alpha-test = "at-most"``);
  growth is not clipped.
- LocalAlt draws the mini-batches of its two passes separately, with one learning rate (code; Algorithm 2 passes over
  the same ones, with gamma_v and gamma_u).
- the movement is that of this round's training (paper; code since the last growth: ``movement = "since-growth"``).
- masks grow in every round (paper; code every third one, not the first: ``grow-every = 3``, counted from round 0).
- BatchNorm's running statistics stay with the client (code); training uses those of the batch (``bn-batch =
  "first-round"``: published training runs on round 0's statistics after the first round).
- clients are weighed alike (both); a client's accuracy is that of its model after its training and before the next
  mean (code), correct over total.
- a client is tested on all test images of its labels (``client-test = "labels"``; code: disjoint shards of them).
Positions that no client has as global keep their value (the paper's 0/0), so that the global model can be evaluated; no
client reads them. A client that has lost its state is dropped in that round, then begins with no personal position.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.tensors import Tensors, chosen, unprefixed
from fedsub_app.models import trainable
from fedsub_app.subnets.sparsity import selectable
from strategies.base import BadReply, Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.defences import WITHOUT_MASKS
from strategies.settings import FedSelectSettings

MASK = "mask/"


class FedSelect(SubnetStrategy):
    """Knows every client's mask; merges each position over the clients for which it is global."""

    options: FedSelectSettings
    secure = ""
    keeps_models = narrows = True
    chooses_positions = True  # with secure-aggregation masks stay with the clients, and those here are the first ones
    refused = WITHOUT_MASKS
    remembers = ("masks", "held")
    judged = False
    reports: ClassVar = {
        "personal-fraction": Reported("Personal part of the model, mean over the clients", "personal (%)", scale=100)
    }

    def setup(self) -> None:
        settings = self.settings
        if settings.weight_decay:  # it would move positions whose gradient is masked; momentum and Adam do not
            raise UserError(f"weight-decay = {settings.weight_decay}: must be 0 with method = 'fedselect'")
        names = selectable(list(trainable(self.model)), self.options.layer)
        if not names:
            raise UserError(f"fedselect.layer = {self.options.layer!r}: no layer with weights; '' is all layers")
        statistics = {name for name, _ in self.model.named_buffers()}
        self.global_names = [name for name in self.current if name not in statistics]
        self.empty = {name: torch.zeros_like(self.current[name], dtype=torch.bool) for name in names}
        self.masks = [self.empty] * settings.num_clients  # m^t of each client, 1: personal, of the names above alone
        # m^(t-1), under which it trained in its last merged round: the positions whose personal values it has.
        self.held = [self.empty] * settings.num_clients

    def task(self, client: int) -> Task:
        """Send the values at the positions that the client does not hold; whole tensors where it holds none."""
        values = chosen(self.values_at(shared_positions(self.held[client])), self.global_names)
        return Task(client, values, {"width": self.held_width(client)} if self.devices else {})

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the values at the client's global positions and, where it grew, its mask."""
        masks = self.masks[client]
        specs = {name: self.specs[name] for name in self.global_names}
        specs |= {name: self.specs[name].of_shape([int(mask.sum())]) for name, mask in shared_positions(masks).items()}
        return specs | {f"{MASK}{n}": Spec(tuple(m.shape), torch.bool, optional=True) for n, m in masks.items()}

    def contribution(self, update: Update) -> Contribution:
        """Add the values at the positions that were global in this round; a mask may only grow."""
        masks = self.masks[update.client]
        for name, new in unprefixed(MASK, update.tensors).items():
            if bool((masks[name] & ~new).any()):
                raise BadReply(f"tensor {MASK + name!r}: a personal position became global again")
        return self.contribution_at(update, shared_positions(masks))

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Record that the clients hold the positions that they trained as personal; then their masks grow."""
        masks, held = list(self.masks), list(self.held)
        for update in updates:
            held[update.client] = self.masks[update.client]
            masks[update.client] = self.masks[update.client] | unprefixed(MASK, update.tensors)
        personal = sum(int(mask.sum()) for of in masks for mask in of.values())
        report = {"personal-fraction": personal / sum(mask.numel() for of in masks for mask in of.values())}
        known = {} if self.settings.secure_aggregation else report
        return Merged(super().merge(mean, updates).model, {"masks": masks, "held": held}, known)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.masks[client] = self.held[client] = self.empty

    def position_masks(self) -> list[Tensors] | None:
        return None if self.settings.secure_aggregation else self.masks


def shared_positions(masks: Tensors) -> Tensors:
    """Return the global positions of the tensors that are partly personal: tensor name -> bool."""
    return {name: ~mask for name, mask in masks.items() if mask.any()}
