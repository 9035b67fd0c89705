"""FedSelect, client side (GradSelect, LocalAlt); what it deviates in: ``strategies/fedselect.py``."""

from itertools import islice

import torch

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.subnets.masks import gather, pack_bits, unpack_bits
from fedsub_app.subnets.selection import grow, selectable
from strategies.fedselect import MASK, FedSelectSettings

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
        own = self.previous or self.initial()
        received = {name: ~mask for name, mask in held.items() if mask.any()}
        before = own | sent | {name: own[name].masked_scatter(part, sent[name]) for name, part in received.items()}
        cut = {name: ~mask for name, mask in masks.items() if mask.any()}
        self.load(before)
        self.alternate(masks, cut)
        trained = self.remember()
        named = tuple(f"{MASK}{config[key]}/" for key in ("grown", "held"))
        self.state = {n: t for n, t in self.state.items() if n.startswith(named) or not n.startswith(MASK)}
        whole = {name: trained[name] for name in trained if name not in cut and name in self.shared}
        return whole | gather(trained, cut) | self.grow(masks, before, trained)

    @property
    def shared(self) -> set[str]:
        """Names of the tensors that are global at least in part: all but local BatchNorm statistics."""
        local = self.options.bn_statistics == "local"
        return {name for name, _ in self.model.named_parameters()} if local else set(self.place.tensors)

    def masks(self, grown: int) -> Tensors:
        """Return the mask that grew in this round, for every tensor that can be selected; 0: the empty one."""
        names = selectable([name for name, _ in self.model.named_parameters()], self.options.layer)
        prefix = f"{MASK}{grown}/"
        bits = {name: self.state[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in self.state}
        if grown and not bits:
            raise UserError(f"client {self.id} has lost its state: its personal parameters are nowhere else")
        return unpack_bits(bits, {name: self.place.tensors[name].shape for name in names})

    def alternate(self, masks: Tensors, cut: Tensors) -> None:
        """GradSelect's L LocalAlts: a pass on the personal positions, if any, then one on the global ones."""
        passes = self.settings.local_epochs
        if not passes:
            return
        orders = {"personal": self.order(passes, "personal batches"), "global": self.order(passes)}
        steps = sum(1 for _ in self.order(1))
        phases = {}
        for phase, names in (("personal", tuple(masks)), ("global", None)):
            self.begin(names)
            keep = {id(self.place.tensors[name]): part for name, part in (masks if names else cut).items()}
            phases[phase] = (
                self.optimizer,
                [_factor(keep.get(id(p)), p) for p in self.optimizer.parameters],
            )
        self.model.train(self.options.bn_batch == "always" or self.round == 1)
        for _ in range(passes):
            for phase in phases if cut else ("global",):
                self.optimizer, self.factors = phases[phase]
                self.run(islice(orders[phase], steps), names=tuple(masks) if phase == "personal" else None)

    def correct_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Leave the gradients of the positions that this pass trains."""
        for gradient, factor in zip(gradients, self.factors, strict=True):
            if factor is not None:
                gradient.mul_(factor)

    def grow(self, masks: Tensors, before: Tensors, trained: Tensors) -> Tensors:
        """Lines 8 to 10: return the masks that changed, and remember them."""
        options = self.options
        since = options.movement == "since-growth"
        if (self.round - 1) % options.grow_every or (options.grow_every > 1 and self.round == 1):
            return {}
        if since:
            start = self.initial()
            before = {name: self.state.get(f"{SINCE}{name}", start[name]) for name in masks}
        new = grow(
            masks,
            {name: trained[name].cpu() - before[name] for name in masks},
            options.share,
            options.alpha,
            options.alpha_test == "at-most",
            options.choose,
            options.scope == "model",
            self.generator("selection"),
        )
        if since:
            self.state |= {f"{SINCE}{name}": trained[name] for name in masks}
        changed = {name: mask for name, mask in new.items() if not torch.equal(mask, masks[name])}
        if changed:
            self.state |= {f"{MASK}{self.round}/{name}": bits for name, bits in pack_bits(new).items()}
        return {f"{MASK}{name}": mask for name, mask in changed.items()}

    def personal(self, sent: Tensors) -> Tensors:
        """Return the client's model as its last training left it."""
        return self.previous or self.initial()


def _factor(positions: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return bool positions as 0 and 1 laid out as the parameter; via uint8, the same bytes, in half the time."""
    return None if positions is None else torch.empty_like(parameter).copy_(positions.view(torch.uint8))
