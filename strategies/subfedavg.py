"""Sub-FedAvg, server side: unstructured, structured and hybrid pruning (Algorithms 1 and 2).

Vahidian, Morafah, Lin: Personalized Federated Learning by Structured and Unstructured Pruning under Data Heterogeneity,
ICDCS Workshops 2021, https://arxiv.org/abs/2105.00562.

Every client has a sub-network, at first all of the network. It trains it and may prune it: its smallest weights, its
channels with the smallest BatchNorm scaling factors, or both. The values at the positions that it keeps travel down and
up, and the bits of the masks that shrank travel up. The server takes at each position the mean over the clients that
keep it. A client whose channels are gone builds, trains and sends a network that is really that much narrower.

Paper and published code (https://github.com/MMorafah/Sub-FedAvg) differ; the default is the code, but for the gate:
- pruning is gated by the accuracy on the client's validation samples (paper; code: on its test samples,
  ``gate-data = "test"``, which every round's line then says), after pruning and above the threshold (code; the paper:
  before it, at least).
- "average on the intersection": the mean over those who keep a position, the old value where nobody does (code;
  ``average = "intersection"``: only positions that all clients of the round keep).
- r_us of the weights that remain in each layer (code; paper "w.r.t. the full dense network": ``share-of = "layer"``);
  an event that would pass the target prunes less (code; of all weights, where the paper has no such rule, what is
  missing). Both masks are cut from the one before the round.
- channels: threshold in each layer (code; paper among all: ``channel-scope = "model"``), one more than the share, and
  no layer below half of its channels, so at most one event each; independent of the target (code and Section 3.5;
  Algorithm 2 stops at the target). Weights first, then channels.
- distance above epsilon, pruned below target (code; paper at least epsilon). With hybrid pruning epsilon is 0.0005 for
  weights and 0.01 for channels (code; paper 0.05). Pruned is the fraction of all parameters;
  published hybrid pruning counts the linear layers' biases as pruned, a third of a percent.
- BatchNorm's running statistics stay with the client; the server averages them for the global model alone (code;
  ``bn-statistics = "average"`` sends them). Unstructured pruning is of a network without BatchNorm (code).
- a client is evaluated on its model as its last training left it, at first the initial one (code).
Initial weights are PyTorch's (code: Xavier with normal biases; He, gamma 0.5). A target of 0 prunes nothing, channels
neither, and is FedAvg. Structured pruning alone and networks that the paper does not have are ours. Pruning that would
leave a layer with nothing is undone. A client that has lost its state is dropped in that round and begins anew with the
whole network.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.section import Fraction, NonNegative
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.federation.protocol import BadReply, Range, Spec, Task, Update
from fedsub_app.settings import MethodSettings, Settings
from fedsub_app.subnets.averaging import Contribution, MaskedMean
from fedsub_app.subnets.masks import gather, scatter
from fedsub_app.subnets.pruning import Pruning, prunable
from strategies.base import SubnetStrategy
from strategies.defences import WITHOUT_MASKS
from strategies.hooks import Merged

MASK = "mask/"
log = logging.getLogger("fedsub")


class SubFedAvgSettings(MethodSettings):
    """Keys of Sub-FedAvg."""

    pruning: Pruning = "unstructured"
    """Weights of all layers, channels by their BatchNorm, or channels and the linear layers' weights."""
    target: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """p, fraction of the parameters at which weights are no longer pruned; 0: nothing is ever pruned."""
    share: Fraction = 0.1
    """r_us, fraction of a layer's weights that one event prunes."""
    share_of: Literal["remaining", "layer"] = "remaining"
    """Weights of which share is a fraction: the ones that the layer has left, or all that it had."""
    distance: NonNegative = 0.0001
    """The weights' masks after the first and last epoch must differ in a larger fraction."""
    hybrid_distance: NonNegative = 0.0005
    """The same of the linear layers with pruning = "hybrid"."""
    channel_share: Annotated[float, Field(ge=0, lt=1)] = 0.45
    """r_s, fraction of a layer's channels that one event prunes (and one more)."""
    channel_scope: Literal["layer", "model"] = "layer"
    """Scope of the threshold: one for each layer, or one for all layers."""
    channel_floor: Fraction = 0.5
    """Lower bound on a layer's channels, a fraction of its original ones, rounded down and at least 1."""
    channel_distance: NonNegative = 0.01
    """The channels' masks after the first and last epoch must differ in a larger fraction."""
    accuracy: Annotated[float, Field(ge=0, le=100)] = 50.0
    """Accuracy in percent that the pruned network must exceed on gate-data, or the pruning is undone."""
    gate_data: Literal["validation", "test"] = "validation"
    """The client's samples on which accuracy is measured; test, as published, lets the test set choose the network."""
    average: Literal["keepers", "intersection"] = "keepers"
    """A position is averaged over the clients that keep it, or only where all clients of the round keep it."""
    bn_statistics: Literal["local", "average"] = "local"
    """BatchNorm's running statistics: the client's own, or averaged."""


class SubFedAvg(SubnetStrategy):
    """Knows every client's sub-network; merges each position over the clients that keep it.

    Attributes
    ----------
    plan : the parts of the network that can be pruned.
    masks : client -> masks of :mod:`fedsub_app.subnets.pruning`, 1: kept.
    fractions : fraction of all parameters that each client's network has lost, float64 [N].
    """

    options: SubFedAvgSettings
    remembers = ("masks", "fractions")
    reports: ClassVar = {
        "pruned-fraction": Reported(
            "Pruned part of the model, mean over the clients", "pruned (%)", file="pruned", scale=100
        )
    }

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        try:
            self.plan = prunable(model, self.options.pruning)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"subfedavg.pruning = {self.options.pruning!r}: model {settings.model!r}: {error}"
            ) from None
        # Not in the settings' own check: experiments of other papers have one epoch and can be given another method.
        if self.options.target and settings.local_epochs == 1:
            raise UserError("local-epochs = 1: subfedavg compares the first with the last epoch, at least 2")
        if self.options.target and settings.local_steps:
            raise UserError(f"local-steps = {settings.local_steps}: must be 0: subfedavg compares two whole epochs")
        if self.options.target and self.options.gate_data == "validation" and not settings.validation_fraction:
            raise UserError("validation-fraction = 0.0: must be above 0 with subfedavg.gate-data = 'validation'")
        local = self.options.bn_statistics == "local"
        self.sent_names = [name for name in self.current if not local or name in self.plan.sizes]
        self.cuttable = list(self.plan.positions(self.plan.everything()))
        self.masks = [self.plan.everything()] * settings.num_clients
        self.fractions = torch.zeros(settings.num_clients, dtype=torch.float64)

    def task(self, client: int) -> Task:
        """Send the values at the positions that the client keeps, whole tensors where these are all."""
        cut = {n: kept for n, kept in self.plan.positions(self.masks[client]).items() if not kept.all()}
        whole = {name: self.current[name] for name in self.sent_names if name not in cut}
        values = gather(self.current, {name: kept for name, kept in cut.items() if name in self.sent_names})
        return Task(client, whole | values)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the values at the positions that the client keeps after pruning, and the masks that shrank."""
        specs = self.specs | {name: self.specs[name].gathered() for name in self.cuttable}
        return specs | {
            f"{MASK}{n}": Spec(tuple(m.shape), torch.bool, optional=True) for n, m in self.masks[client].items()
        }

    def max_samples(self, client: int) -> int:
        """Add the gate's samples."""
        return super().max_samples(client) + (self.facts.held_out if self.facts else 0)

    def metrics(self, client: int) -> Mapping[str, Range]:
        """Add the distance between the masks of the first and the last epoch."""
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
            if len(update.tensors[name]) != int(kept.sum()):
                raise BadReply(f"tensor {name!r}: {len(update.tensors[name])} values, its masks keep {int(kept.sum())}")
        whole = {name: update.tensors[name] for name in self.current if name not in positions}
        return Contribution(whole | scatter(update.tensors, positions), positions, self.weight(update))

    def refuses(self) -> Mapping[str, str]:
        """Refuse defences that compare whole updates: clients send different positions, by masks of their own."""
        return WITHOUT_MASKS

    def merge(self, mean: MaskedMean, updates: Sequence[Update]) -> Merged:
        """Average each position over the clients that keep it, or only where all keep it; the clients' masks shrink."""
        everybody = {}
        if self.options.average == "intersection":
            everybody = {name: mean.everybody(name) for name in self.cuttable}
        model = super().merge(mean, updates).model
        model |= {name: torch.where(all_, model[name], self.current[name]) for name, all_ in everybody.items()}
        masks, fractions = list(self.masks), self.fractions.clone()
        for update in updates:
            masks[update.client] = masks[update.client] | unprefixed(MASK, update.tensors)
            fractions[update.client] = self.plan.pruned(masks[update.client])
        report: Json = {"pruned-fraction": sum(fractions.tolist()) / len(fractions)}
        report["published-bytes"] = sum(self.plan.published_bytes(masks[update.client]) for update in updates)
        report |= {"gate": "on test data"} if self.options.gate_data == "test" else {}
        return Merged(model, {"masks": masks, "fractions": fractions}, report)

    def forget(self, client: int) -> None:
        """Give the client the whole network again."""
        super().forget(client)
        self.masks[client], self.fractions[client] = self.plan.everything(), 0.0

    def personal_download(self, client: int) -> Tensors:
        """Send nothing: a client is evaluated on its model after its last training."""
        return {}

    def unit_masks(self) -> torch.Tensor | None:
        """Return every client's channels; None where only single weights are pruned."""
        if not self.plan.groups:
            return None
        return torch.stack(
            [
                torch.cat([masks.get(g.name, torch.ones(g.size, dtype=torch.bool)) for g in self.units])
                for masks in self.masks
            ]
        )

    def position_masks(self) -> list[Tensors] | None:
        """Return every client's kept positions of convolutions and linear layers."""
        every = (self.plan.positions(masks) for masks in self.masks)
        return [{name: kept for name, kept in positions.items() if kept.dim() > 1} for positions in every]

    def summary(self) -> None:
        """Log the settings, and a warning where test data choose the networks."""
        super().summary()
        if self.options.gate_data == "test":
            log.warning("subfedavg.gate-data = 'test': the clients' test samples choose what is pruned, as published")
