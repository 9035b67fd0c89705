"""Sub-FedAvg, client side (ClientUpdate of Algorithms 1 and 2); deviations from paper and code: the strategy's file."""

from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors, chosen, prefixed, unprefixed
from fedsub_app.secure.client import AT
from fedsub_app.subnets.masks import gather, pack_bits, scatter, unpack_bits
from fedsub_app.subnets.pruning import Prunable, last_share, mask_distance, prunable, prune_channels, prune_weights
from fedsub_app.subnets.slices import take
from fedsub_app.training.client import OWN, Training
from strategies.settings import SubFedAvgSettings
from strategies.subfedavg import MASK


class SubFedAvgClient(Client):
    """Trains its sub-network, then prunes it if the gates allow it.

    Its state is its model before the last pruning, in the whole network's shapes, and its masks after it, as bits.
    """

    options: SubFedAvgSettings
    irreplaceable = "its masks are not there"
    width = 1.0  # fraction of the network that its device can hold; it prunes down to this

    @cached_property
    def plan(self) -> Prunable:
        return prunable(self.place.network.module, self.options.pruning)

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the positions that are kept, prune, return the values at the positions that are still kept."""
        if len(self.y) == 1 and self.place.network.normalisations:
            raise UserError(f"client {self.id} has one training sample: BatchNorm needs at least 2")
        plan, masks = self.plan, self.masks
        self.width = config.get("width", 1.0)
        self.load(plan.cut(self.received(sent, masks), masks))
        if self.settings.objective == "moon" and self.own:  # as narrow as the current network
            self.previous = plan.cut(self.own, masks)
        keep = take({name: masks[name] for name in plan.weights}, plan.groups, masks)
        early: list[Tensors] = []
        Training(self, keep=keep).run_each(self.watched(early))
        own = self.network.copy()
        last, attacked = plan.widen(own, masks), self.attacked(own)
        sent = last if attacked is own else plan.widen(attacked, masks)
        new = self.prune(masks, plan.widen(early[0], masks) if early else last, last)
        self.state = prefixed(OWN, last) | prefixed(MASK, pack_bits(new))
        positions = plan.positions(new)
        if self.settings.secure_aggregation:
            return sent | prefixed(AT, positions)
        changed = {name: mask for name, mask in new.items() if not mask.equal(masks[name])}
        others = {name: tensor for name, tensor in sent.items() if name not in positions}
        return others | gather(sent, positions) | prefixed(MASK, changed)

    @property
    def masks(self) -> Tensors:
        everything, bits = self.plan.everything(), unprefixed(MASK, self.state)
        return unpack_bits(bits, {name: mask.shape for name, mask in everything.items()}) if bits else everything

    def received(self, sent: Tensors, masks: Tensors) -> Tensors:
        """Return the sent values in the shapes of the whole network; statistics that were not sent are the client's."""
        cut = {n: kept for n, kept in self.plan.positions(masks).items() if n in sent and not kept.all()}
        if self.settings.secure_aggregation:  # the server does not know which positions the client keeps
            sent = sent | gather(sent, cut)
        return (self.own or self.initial()) | sent | scatter(sent, cut)

    def watched(self, early: list[Tensors]) -> Iterator[list[Tensor]]:
        """Yield each epoch's mini-batches; the model after the first epoch goes to ``early`` if others follow."""
        for number, batches in enumerate(self.epochs()):
            if number == 1:
                early.append(self.network.copy())
            yield batches

    def prune(self, masks: Tensors, first: Tensors, last: Tensors) -> Tensors:
        """Prune weights, then channels, each only if the result passes the gates; return the masks."""
        if not self.options.target:
            return masks
        for event in (self.fewer_weights, self.fewer_channels):
            new = masks | event(masks, first, last)
            if any(not mask.equal(masks[name]) for name, mask in new.items()) and self.good(last, new):
                masks = new
        return masks

    def fewer_weights(self, masks: Tensors, first: Tensors, last: Tensors) -> Tensors:
        """Return the weights' masks without the smallest weights; none if epochs agree or the target is reached."""
        options, plan = self.options, self.plan
        if not plan.weights:
            return {}
        old = {name: masks[name] for name in plan.weights}
        pruned = plan.pruned(masks)
        early, late = (prune_weights(model, old, options.share) for model in (first, last))
        self.metrics["mask-distance"] = mask_distance(early, late)
        least = options.hybrid_distance if options.pruning == "hybrid" else options.distance
        target = max(options.target, 1 - self.width)
        if self.metrics["mask-distance"] <= least or pruned >= target:
            return {}
        share = last_share(pruned, target, options.share, options.pruning == "hybrid")
        return late if share == options.share else prune_weights(last, old, share)

    def fewer_channels(self, masks: Tensors, first: Tensors, last: Tensors) -> Tensors:
        """Return the channels' masks without the channels of the smallest scaling factors; none if epochs agree."""
        options, plan = self.options, self.plan
        if not plan.groups:
            return {}
        old = chosen(masks, plan.scales)
        scales = ({group: model[name] for group, name in plan.scales.items()} for model in (first, last))
        floor = min(options.channel_floor, self.width)
        early, late = (prune_channels(each, old, options.channel_share, floor) for each in scales)
        differ = sum(int((early[name] != late[name]).sum()) for name in old)
        return late if differ / sum(len(mask) for mask in old.values()) > options.channel_distance else {}

    def good(self, model: Tensors, masks: Tensors) -> bool:
        """Say whether the pruned network has positions in every layer and passes the gate's score."""
        if not len(self.samples(self.options.gate_data)[1]):
            raise UserError(f"client {self.id} has no {self.options.gate_data} samples for the gate")
        if not all(kept.any() for kept in self.plan.positions(masks).values()):
            return False
        self.load(self.plan.cut(model, masks))
        return self.place.problem.task.about.better(self.score(self.options.gate_data), self.options.score)

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the client's model after its last training, pruned; at first the initial one."""
        return self.plan.cut(self.own, self.masks) if self.own else self.initial()
