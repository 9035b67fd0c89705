"""LoRA in a federation, server side: seven ways to merge the clients' adapters; an adapter computes ``s B A x``.

The mean of the products B A is not the product of the means. ``merge-error`` in a round's line is the distance between
the change by the merged adapters and the clients' weighted mean, over all layers (Frobenius norm). With FedIT it is
exactly ``s ‖mean(B A) - mean(B) mean(A)‖``. The head, and whatever else is trained, is averaged as in FedAvg.

- FedIT, Zhang et al., ICASSP 2024, https://arxiv.org/abs/2305.05644: A and B are averaged.
- FFA-LoRA, Sun et al., ICLR 2024, https://arxiv.org/abs/2403.12313: A stays at its common start, B is averaged.
- FedSA-LoRA, Guo et al., ICLR 2025, https://arxiv.org/abs/2410.01463: A is averaged, B stays with its client.
- FlexLoRA, Bai et al., NeurIPS 2024, https://arxiv.org/abs/2402.11505: the mean of B A has the singular value
  decomposition U S V^T; B = U S and A = V^T, and a client has the first r_i ranks of both.
- FLoRA, Wang et al., NeurIPS 2024, https://arxiv.org/abs/2409.05976: the sum of all weighted products, the product of
  the stacked A and B, is added to the weights W; adapters start anew.
- FedEx-LoRA, Singhal et al., ACL 2025, https://arxiv.org/abs/2410.09432: A and B are averaged, and
  mean(B A) - mean(B) mean(A) is added to W.
- HetLoRA, Cho et al., EMNLP 2024, https://arxiv.org/abs/2401.06432: adapters of a lower rank are filled up with zeros,
  weights are the norms of B A, and clients prune ranks (client_apps/lora.py).

Deviations:

- alpha / r is that of ``lora-rank`` for all ranks, so that an adapter means the same for all clients.
- FLoRA and FedEx-LoRA send the weights W that have adapters, not the stack or the residual that is added to them. A
  client that was away needs nothing else; where ranks and clients are few, these are more bytes than the papers count.
- HetLoRA weighs the head by the same norms, over all layers together. Ranks that a client prunes are sent once, as 0.
- FLoRA's new A is drawn by the server, the same for all clients.
- A network without adapters is trained as with FedAvg of the same `weighting`, bit for bit, and the log says so.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsub_app.common.reported import Reported
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.models import Adapter, adapters, scale_of, turned
from strategies.base import Contribution, Mean, Merged, Spec, SubnetStrategy, Task, Update
from strategies.parts import SharedPart
from strategies.settings import HetLoRASettings
from strategies.sliced import Sliced

USES_ALL = "its server uses the products of each client's adapters"
PRUNES = "prunes"  # tensor of a reply, bool [1]: the client gives up its last ranks


class FedIT(SubnetStrategy):
    """FedAvg over adapters, and the base of the others; :meth:`next_layer` changes what was averaged."""

    secure = ""
    reports: ClassVar = {"merge-error": Reported("Error of the merged adapters", "Frobenius norm")}

    def setup(self) -> None:
        super().setup()
        self.adapters = adapters(self.current)
        self.scale, self.turned = scale_of(self.model) if self.adapters else 1.0, turned(self.model)
        if not self.adapters:
            self.warning = f"trainable = {self.settings.trainable!r}: without 'lora' {self.settings.method} is FedAvg"

    def expected(self, client: int) -> Mapping[str, Spec]:
        fixed = {adapter.weight for adapter in self.adapters} if self.options.moves_base else set()
        return {name: spec for name, spec in super().expected(client).items() if name not in fixed}

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        names = {name for adapter in self.adapters for name in adapter[:2]}
        return super().remembered(update, contribution) | chosen(update.tensors, names)

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Return the mean, changed by :meth:`next_layer`, with the error; with privacy no sum without noise is made."""
        merged = super().merge(mean, updates)
        if not self.adapters or self.settings.dp_noise_multiplier or self.settings.secure_aggregation:
            return merged
        model, square = dict(merged.model), 0.0
        for adapter in self.adapters:
            exact = self.stacked(adapter, updates)
            layer = self.next_layer(adapter, exact, model)
            layer |= {n: tensor.T for n, tensor in layer.items() if n in self.turned}
            model |= {n: tensor.float().reshape(model[n].shape).contiguous() for n, tensor in layer.items()}
            square += float((self.change(adapter, model) - exact[0] @ exact[1]).square().sum())
        return replace(merged, model=model, report={**merged.report, "merge-error": self.scale * math.sqrt(square)})

    def stacked(self, adapter: Adapter, updates: Sequence[Update]) -> tuple[Tensor, Tensor]:
        """Return B [out, R] and A [R, in], float64, whose product is the step towards the mean of the clients' B A."""
        weights = [self.weight(update) for update in updates]
        shares = [self.settings.server_lr * weight / (sum(weights) or 1.0) for weight in weights]
        every = [(share, self.current | update.tensors) for share, update in zip(shares, updates, strict=True)]
        every += [(1 - self.settings.server_lr, self.current)] if self.settings.server_lr != 1 else []
        b = [share * tensors[adapter.b].double().flatten(1) for share, tensors in every]
        return torch.cat(b, 1), torch.cat([tensors[adapter.a].double().flatten(1) for _, tensors in every])

    def change(self, adapter: Adapter, model: Mapping[str, Tensor]) -> Tensor:
        """Return what an adapter of a model computes, [out, in] over alpha / r, with the change of W in this round."""
        product = model[adapter.b].double().flatten(1) @ model[adapter.a].double().flatten(1)
        if adapter.weight not in model:
            return product
        return product + (self.matrix(adapter, model) - self.matrix(adapter, self.current)) / self.scale

    def matrix(self, adapter: Adapter, model: Mapping[str, Tensor]) -> Tensor:
        """Return the weight W of a model under an adapter, [out, in], float64."""
        weight = model[adapter.weight].double()
        return weight.T if adapter.weight in self.turned else weight.flatten(1)

    def next_layer(self, adapter: Adapter, exact: tuple[Tensor, Tensor], model: Tensors) -> Tensors:
        """Return the tensors of an adapter that are not their mean, W as [out, in]; ``exact`` is :meth:`stacked`'s."""
        return {}


class FFALoRA(FedIT, SharedPart):
    """Shares all but A, which stays at its common start."""

    judged = True  # with this A the global model is whole

    def personal_names(self) -> Collection[str]:
        return {adapter.a for adapter in adapters(self.current)}


class FedSALoRA(SharedPart):
    """Shares all but B, which stays with its client: there is no product to be merged."""

    def setup(self) -> None:
        super().setup()
        if len(self.shared) == len(self.current):
            self.warning = f"trainable = {self.settings.trainable!r}: without 'lora' fedsa-lora is FedAvg"

    def personal_names(self) -> Collection[str]:
        return {adapter.b for adapter in adapters(self.current)}


class FedExLoRA(FedIT):
    """Averages A and B, and adds to W what the product of the means lacks."""

    secure = refused = USES_ALL

    def next_layer(self, adapter: Adapter, exact: tuple[Tensor, Tensor], model: Tensors) -> Tensors:
        residual = exact[0] @ exact[1] - self.change(adapter, model)
        return {adapter.weight: self.matrix(adapter, self.current) + self.scale * residual}


class Ranked(FedIT, Sliced):
    """Clients have the first ranks of each adapter, a fraction of ``lora-rank`` by ``widths`` or their devices."""

    secure = refused = USES_ALL

    def setup(self) -> None:
        super().setup()
        self.narrows = bool(self.adapters)  # else it is FedAvg

    def refuses(self) -> Mapping[str, str]:
        return {**super().refuses(), "min-contributors": USES_ALL}

    def units_of(self, client: int) -> dict[str, Tensor]:
        width = self.held_width(client)
        groups = self.units if self.adapters and width < 1 else ()
        return {group.name: torch.arange(group.size) < group.kept(width) for group in groups}


class FlexLoRA(Ranked):
    """Splits the mean of the products by its singular values."""

    def next_layer(self, adapter: Adapter, exact: tuple[Tensor, Tensor], model: Tensors) -> Tensors:
        """Return the best B and A of the adapter's rank; the decomposition is of the stacked factors' triangles."""
        (left, upper), (right, lower) = torch.linalg.qr(exact[0]), torch.linalg.qr(exact[1].T)
        u, s, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
        rank, old = len(model[adapter.a]), self.current[adapter.a].double().flatten(1)
        b, a = (left @ u * s)[:, :rank], (v @ right.T)[:rank]
        # A rank that no product needs starts anew: with B = 0 and an A of some value it can be trained.
        return {adapter.b: nn.functional.pad(b, (0, rank - len(a))), adapter.a: torch.cat((a, old[len(a) :]))}


class FLoRA(Ranked):
    """Adds the stacked products to W, and starts the adapters anew."""

    def next_layer(self, adapter: Adapter, exact: tuple[Tensor, Tensor], model: Tensors) -> Tensors:
        """Return W with the mean product, a new A and B = 0, as the package peft draws them."""
        draws = generator(self.settings.seed, self.round, adapter.layer)
        a = nn.init.kaiming_uniform_(torch.empty_like(model[adapter.a]), a=math.sqrt(5), generator=draws)
        weight = self.matrix(adapter, self.current) + self.scale * exact[0] @ exact[1]
        return {adapter.a: a, adapter.b: torch.zeros_like(model[adapter.b]), adapter.weight: weight}


class HetLoRA(Ranked):
    """Fills adapters up with zeros, weighs them by their norms, and lets clients prune their last ranks."""

    options: HetLoRASettings
    secure = USES_ALL
    remembers = ("ranks",)

    def setup(self) -> None:
        super().setup()
        first = self.units[0] if self.adapters else None
        widths = map(self.held_width, range(self.settings.num_clients))
        self.ranks = torch.tensor([first.kept(width) if first else 1 for width in widths])  # of every adapter, [N]

    def units_of(self, client: int) -> dict[str, Tensor]:
        groups = self.units if self.adapters else ()
        return {g.name: torch.arange(g.size) < self.ranks[client] for g in groups if self.ranks[client] < g.size}

    def task(self, client: int) -> Task:
        return Task(client, self.network_of(client), {"rank": int(self.ranks[client])})

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {**super().expected(client), PRUNES: Spec((1,), torch.bool)}

    def weight(self, update: Update) -> float:
        if not self.adapters:
            return super().weight(update)
        factors = {name: update.tensors[name].double().flatten(1) for layer in self.adapters for name in layer[:2]}
        return math.sqrt(sum(float((factors[b] @ factors[a]).square().sum()) for a, b, *_ in self.adapters))

    def contribution(self, update: Update) -> Contribution:
        """Add the client's adapters with zeros in the place of the ranks that it lacks."""
        added = super().contribution(update)
        return added._replace(tensors={n: added.whole(n, self.current[n])[0] for n in added.tensors}, slices={})

    def distance(self, update: Update, contribution: Contribution) -> float:
        return super().distance(update, super().contribution(update))

    def origin(self, update: Update) -> Tensors:
        """Return what the client was sent, with zeros in the place of the ranks that it lacks: those do not move."""
        sent = super().contribution(update)._replace(tensors=self.network_of(update.client))
        return {name: sent.whole(name, tensor)[0] for name, tensor in self.current.items()}

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Return the mean, and the ranks without those that clients have pruned."""
        merged, ranks = super().merge(mean, updates), self.ranks.clone()
        for update in updates:
            if bool(update.tensors[PRUNES]):
                ranks[update.client] = self.options.pruned(int(ranks[update.client]))
        report = {**merged.report, "mean-rank": float(ranks.double().mean())}
        return replace(merged, state={"ranks": ranks}, report=report)
