"""Sub-FedAvg, server side: unstructured, structured and hybrid pruning (Algorithms 1 and 2).

Vahidian, Morafah, Lin: Personalized Federated Learning by Structured and Unstructured Pruning under Data Heterogeneity,
ICDCS Workshops 2021, https://arxiv.org/abs/2105.00562.

Every client has a sub-network, at first all of the network. It trains it and may prune its smallest weights, its
channels with the smallest BatchNorm scaling factors, or both. The values that it keeps travel down and up; the bits of
masks that shrank travel up. A network without some channels is really narrower. The server takes at each position the
mean over the clients that keep the position.

Paper and published code (https://github.com/MMorafah/Sub-FedAvg) differ; the default follows the code, but for the
gate:
- pruning is gated by the accuracy on the client's validation samples (paper; code: on its test samples,
  ``gate-data = "test"``, as each round's line says). The accuracy after pruning must be above the threshold (code;
  paper: before pruning, at least the threshold).
- "average on the intersection" is the mean over the clients that keep a position, and the old value where no client
  does (code; it can be read as only positions that all clients of the round keep).
- an event prunes the fraction r_us of the weights that remain in each layer (code; paper "w.r.t. the full dense
  network"). An event that would pass the target prunes less (code; the paper has no such rule). Both masks are cut from
  the mask before the round.
- channels: the threshold is taken in each layer (code; paper among all). One channel more than the share is pruned, and
  no layer falls below half of its channels, so there is at most one event each. Channels are independent of the target
  (code and Section 3.5;
  Algorithm 2 stops at the target). Weights first, then channels.
- an event needs a distance above epsilon and a pruned fraction below the target (code; paper at least epsilon). With
  hybrid pruning epsilon is 0.0005 for weights and 0.01 for channels (code; paper 0.05). The pruned fraction is of all
  parameters;
  published hybrid pruning counts the linear layers' biases as pruned, a third of a percent.
- BatchNorm's running statistics stay with the client; the server averages them for the global model alone (code).
  Unstructured pruning is of a network without BatchNorm (code).
- a client is evaluated on its model as its last training left it, at first the initial one (code).
Initial weights are PyTorch's (code: Xavier with normal biases; He, gamma 0.5). A target of 0 prunes nothing, channels
neither, and is FedAvg. Structured pruning alone and networks that the paper does not have are ours. Pruning that would
leave a layer with nothing is undone. A client that has lost its state is dropped in that round, then begins unpruned.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.tensors import Json, Tensors, chosen, unprefixed
from fedsub_app.subnets.pruning import prunable
from strategies.base import BadReply, Contribution, Mean, Merged, Range, Spec, SubnetStrategy, Task, Update
from strategies.defences import WITHOUT_MASKS
from strategies.settings import SubFedAvgSettings

MASK = "mask/"


class SubFedAvg(SubnetStrategy):
    """Knows every client's sub-network; merges each position over the clients that keep it."""

    options: SubFedAvgSettings
    secure = ""
    keeps_models = True
    chooses_positions = True  # with secure-aggregation masks stay with the clients, and those here are the first ones
    refused = WITHOUT_MASKS
    remembers = ("masks", "fractions")
    reports: ClassVar = {
        "pruned-fraction": Reported("Pruned part of the model, mean over the clients", "pruned (%)", scale=100)
    }

    def setup(self) -> None:
        settings = self.settings
        try:
            self.plan = prunable(self.model, self.options.pruning)
            if self.options.target and not (self.plan.groups or self.plan.weights):
                raise ValueError("no convolution or linear layer has a weight of its own to prune")
        except (ValueError, TypeError) as error:
            pruning = f"subfedavg.pruning = {self.options.pruning!r}"
            raise UserError(f"{pruning}: model {settings.model!r}: {error}") from None
        # Not in the settings' own check: experiments of other papers have one epoch and can be given another method.
        if self.options.target and settings.local_epochs == 1:
            raise UserError("local-epochs = 1: must be at least 2, subfedavg compares the first with the last epoch")
        if self.options.target and settings.local_steps:
            raise UserError(f"local-steps = {settings.local_steps}: must be 0: subfedavg compares two whole epochs")
        if self.options.target and self.options.gate_data == "validation" and not settings.validation_fraction:
            raise UserError("validation-fraction = 0.0: must be above 0 with subfedavg.gate-data = 'validation'")
        if self.options.gate_data == "test":
            self.warning = "subfedavg.gate-data = 'test': the clients' test samples choose what is pruned, as published"
        self.narrows = bool(self.options.target)
        self.cuttable = list(self.plan.positions(self.plan.everything()))
        self.masks = [self.plan.everything()] * settings.num_clients  # of subnets/pruning.py, 1: kept
        self.fractions = torch.zeros(settings.num_clients, dtype=torch.float64)  # of its parameters that a client lacks

    def task(self, client: int) -> Task:
        """Send the values at the positions that the client keeps, whole tensors where these are all."""
        cut = {n: kept for n, kept in self.plan.positions(self.masks[client]).items() if not kept.all()}
        values = chosen(self.values_at(cut), self.plan.sizes)
        return Task(client, values, {"width": self.held_width(client)} if self.devices else {})

    def expected(self, client: int) -> Mapping[str, Spec]:
        masks = self.masks[client]
        specs = self.specs | {name: self.specs[name].gathered() for name in self.cuttable}
        return specs | {f"{MASK}{n}": Spec(tuple(m.shape), torch.bool, optional=True) for n, m in masks.items()}

    def max_samples(self, client: int) -> int:
        return super().max_samples(client) + (self.facts.held_out if self.facts else 0)

    def metrics(self, client: int) -> Mapping[str, Range]:
        return {**super().metrics(client), "mask-distance": Range(0, 1)}

    def contribution(self, update: Update) -> Contribution:
        """Add the values at the positions that the client keeps; a mask may only shrink, and not to nothing."""
        masks = self.masks[update.client]
        for name, new in unprefixed(MASK, update.tensors).items():
            if bool((new & ~masks[name]).any()):
                raise BadReply(f"tensor {MASK + name!r}: a pruned position came back")
        positions = self.plan.positions(masks | unprefixed(MASK, update.tensors))
        for name, kept in positions.items():
            if not kept.any():
                raise BadReply(f"tensor {name!r}: its masks keep nothing of it")
        return self.contribution_at(update, positions)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Average each position over the clients that keep it; the clients' masks shrink."""
        masks, fractions = list(self.masks), self.fractions.clone()
        for update in updates:
            masks[update.client] = masks[update.client] | unprefixed(MASK, update.tensors)
            fractions[update.client] = self.plan.pruned(masks[update.client])
        report: Json = {"gate": "on test data"} if self.options.gate_data == "test" else {}
        if not self.settings.secure_aggregation:
            report["pruned-fraction"] = sum(fractions.tolist()) / len(fractions)
            report["published-bytes"] = sum(self.plan.published_bytes(masks[update.client]) for update in updates)
        return Merged(super().merge(mean, updates).model, {"masks": masks, "fractions": fractions}, report)

    def forget(self, client: int) -> None:
        super().forget(client)
        self.masks[client], self.fractions[client] = self.plan.everything(), 0.0

    def unit_masks(self) -> torch.Tensor | None:
        """Return every client's channels; None where only single weights are pruned."""
        if not self.plan.groups or self.settings.secure_aggregation:
            return None
        whole = {group.name: torch.ones(group.size, dtype=torch.bool) for group in self.units}
        return torch.stack([torch.cat([masks.get(name, all_) for name, all_ in whole.items()]) for masks in self.masks])

    def position_masks(self) -> list[Tensors] | None:
        if self.settings.secure_aggregation:
            return None
        every = (self.plan.positions(masks) for masks in self.masks)
        return [{name: kept for name, kept in positions.items() if kept.dim() > 1} for positions in every]
