"""FedSelect, client side (GradSelect, LocalAlt); deviations from paper and code: ``strategies/fedselect.py``."""

import torch

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors, chosen, prefixed, unprefixed
from fedsub_app.secure.client import AT
from fedsub_app.subnets.masks import gather, pack_bits, unpack_bits
from fedsub_app.subnets.sparsity import grow, selectable
from fedsub_app.training.client import Training
from strategies.fedselect import MASK, shared_positions
from strategies.settings import FedSelectSettings

HELD, SINCE = "held/", "since/"


class FedSelectClient(Client):
    """Trains its personal positions, then the global ones, then makes the ones that moved most personal.

    Its state is its model and, as bits, the mask of its last training (``held/<tensor>``) and the mask after the growth
    (``mask/<tensor>``); with ``movement = "since-growth"`` also its model at the last growth (``since/<tensor>``).
    """

    options: FedSelectSettings
    irreplaceable = "its personal parameters are nowhere else"

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train one round of Algorithm 1: take the mean at the positions that are not held, then run GradSelect."""
        masks, held, secure = self.masks(MASK), self.masks(HELD), self.settings.secure_aggregation
        if secure:  # the server does not know which positions the client holds
            sent = sent | gather(sent, shared_positions(held))
        model = self.own or self.initial()
        received = {name: model[name].masked_scatter(at, sent[name]) for name, at in shared_positions(held).items()}
        before = model | sent | received
        self.load(before)
        self.alternate(masks)
        trained = self.keep_own()
        self.state |= prefixed(HELD, pack_bits(masks))
        grown = self.grow(masks, before, self.own, max(self.options.alpha, 1 - config.get("width", 1.0)))
        shared, positions = chosen(trained, sent), shared_positions(masks)
        return shared | (prefixed(AT, positions) if secure else gather(trained, positions) | grown)

    def masks(self, kind: str) -> Tensors:
        """Return the state's masks of one kind, one for each tensor that can be selected; at first they are empty."""
        names = selectable(list(self.network.parameters), self.options.layer)
        return unpack_bits(unprefixed(kind, self.state), {name: self.network.tensors[name].shape for name in names})

    def alternate(self, masks: Tensors) -> None:
        """Run GradSelect's L LocalAlts: a pass on the personal positions, if any, then one on the global ones."""
        objective = self.objective()
        statistics = self.options.bn_batch == "always" or self.round == 1
        cut = shared_positions(masks)
        personal = Training(self, masks, keep=masks, objective=objective, batch_statistics=statistics)
        shared = Training(self, keep=cut, objective=objective, batch_statistics=statistics)
        for mine, theirs in zip(self.epochs(purpose="personal batches"), self.epochs(), strict=True):
            if cut:
                personal.run(mine)
            shared.run(theirs)

    def grow(self, masks: Tensors, before: Tensors, trained: Tensors, alpha: float) -> Tensors:
        """Return the masks that have changed, and keep them in the state (lines 8 to 10)."""
        options, draws = self.options, self.generator("selection")
        since = options.movement == "since-growth"
        if (self.round - 1) % options.grow_every or (options.grow_every > 1 and self.round == 1):
            return {}
        if since:
            before = unprefixed(SINCE, self.state) or self.initial()
        moved = {name: trained[name] - before[name] for name in masks}
        new = grow(masks, moved, options.share, alpha, options.alpha_test == "at-most", options.choose, draws)
        changed = {name: mask for name, mask in new.items() if not torch.equal(mask, masks[name])}
        if changed:
            self.state |= prefixed(MASK, pack_bits(new))
            if since:
                self.state |= prefixed(SINCE, {name: trained[name] for name in masks})
        return prefixed(MASK, changed)
