"""FedSelect, client side (GradSelect, LocalAlt); deviations from paper and code: ``strategies/fedselect.py``."""

import torch

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors, prefixed, unprefixed
from fedsub_app.subnets.masks import gather, pack_bits, unpack_bits
from fedsub_app.subnets.selection import grow, selectable
from fedsub_app.training.local import Training
from strategies.fedselect import MASK, FedSelectSettings, shared_positions

SINCE = "since/"


class FedSelectClient(Client):
    """Trains its personal positions, then the global ones, then makes those personal that moved most.

    Its state is its model, its masks as bits (``mask/<round in which it grew>/<tensor>``: those that the server may
    still name, and the one grown last), and with ``movement = "since-growth"`` its model at that time.
    """

    options: FedSelectSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """One round of Algorithm 1: take the mean where nothing is held, GradSelect under the new mask."""
        masks, held = self.masks(config["grown"]), self.masks(config["held"])
        own = self.own or self.initial()
        received = {name: own[name].masked_scatter(at, sent[name]) for name, at in shared_positions(held).items()}
        before = own | sent | received
        self.load(before)
        self.alternate(masks)
        trained = self.keep_own()
        self.forget_masks(but=(config["grown"], config["held"]))
        cut = shared_positions(masks)
        local = (
            set(self.network.tensors) - set(self.network.parameters) if self.options.bn_statistics == "local" else ()
        )
        whole = {name: tensor for name, tensor in trained.items() if name not in cut and name not in local}
        return whole | gather(trained, cut) | self.grow(masks, before, trained)

    def masks(self, grown: int) -> Tensors:
        """Return the mask that grew in this round, for every tensor that can be selected; 0: the empty one."""
        names = selectable(list(self.network.parameters), self.options.layer)
        bits = unprefixed(f"{MASK}{grown}/", self.state)
        if grown and not bits:
            raise UserError(f"client {self.id} has lost its state: its personal parameters are nowhere else")
        return unpack_bits(bits, {name: self.network.tensors[name].shape for name in names})

    def forget_masks(self, but: tuple[int, int]) -> None:
        """Drop the masks that grew in other rounds: replies that were lost, and masks that have grown since."""
        kept = tuple(f"{MASK}{grown}/" for grown in but)
        self.state = {n: t for n, t in self.state.items() if n.startswith(kept) or not n.startswith(MASK)}

    def alternate(self, masks: Tensors) -> None:
        """GradSelect's L LocalAlts: a pass on the personal positions, if any, then one on the global ones."""
        objective = self.objective()
        statistics = self.options.bn_batch == "always" or self.round == 1
        cut = shared_positions(masks)
        own = Training(self, masks, keep=masks, objective=objective, batch_statistics=statistics)
        shared = Training(self, keep=cut, objective=objective, batch_statistics=statistics)
        for mine, theirs in zip(self.epochs(purpose="personal batches"), self.epochs(), strict=True):
            if cut:
                own.run(mine)
            shared.run(theirs)

    def grow(self, masks: Tensors, before: Tensors, trained: Tensors) -> Tensors:
        """Lines 8 to 10: return the masks that changed, and remember them."""
        options = self.options
        since = options.movement == "since-growth"
        if (self.round - 1) % options.grow_every or (options.grow_every > 1 and self.round == 1):
            return {}
        if since:
            before = self.initial() | unprefixed(SINCE, self.state)
        new = grow(
            masks,
            {name: trained[name] - before[name] for name in masks},
            options.share,
            options.alpha,
            options.alpha_test == "at-most",
            options.choose,
            options.scope == "model",
            self.generator("selection"),
        )
        if since:
            self.state |= prefixed(SINCE, {name: trained[name] for name in masks})
        changed = {name: mask for name, mask in new.items() if not torch.equal(mask, masks[name])}
        if changed:
            self.state |= prefixed(f"{MASK}{self.round}/", pack_bits(new))
        return prefixed(MASK, changed)

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the client's model as its last training left it."""
        return self.own or self.initial()
