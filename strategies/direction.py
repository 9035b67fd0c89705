"""The setting ``robust``: updates that point against the others of their round, within every bound of length.

Muñoz-González, Co, Lupu: Byzantine-Robust Federated Machine Learning through Adaptive Model Averaging, 2019,
https://arxiv.org/abs/1909.05125, judges an update by its cosine with the aggregate and a client by its past. Here the
update itself is left out of the aggregate, and a second aggregate is of the updates that agree with the first one. A
client's past is the mean of its cosines in the rounds in which most updates agree; the last of these rounds counts
half.

Where clients hold parts of their own (IST) no two updates have a position in common. Each update is compared with the
past of its positions instead: changes that clients made there in earlier rounds, of which the last one counts half. The
half of a round's updates that agrees more with the past is merged into it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.federation.phase import Dropped
from strategies.hooks import Hooks
from strategies.merging import Valid

AGREEMENT = "mean cosine with the others"  # key of Hooks.usual: float64 [num_clients], 0 for none
PAST = "past change/"  # of these keys as well, before the name of a tensor
OPPOSED = -0.15  # a client whose mean is below it is left out of the round
CLEAR = 0.1  # a round tells of its clients if the median cosine is above it: near the optimum honest updates differ too
FEWEST, MOST = 5, 100  # updates of a round that are compared: fewer have no clear majority, more take too long
BLOCK = 1 << 20  # values of all clients together that are compared at a time


def agreement(strategy: Hooks, updates: Sequence[Valid], weights: Tensor, past: Tensors | None = None) -> Tensor:
    """Return each update's cosine with the weighted sum of the others' changes at its positions, float64 ``[n]``.

    Changes are those from :meth:`~strategies.hooks.Hooks.origin`. It is 0 for an update that changes nothing, or at
    whose positions no other one changes anything. ``past``: changes of the model that count beside the others'.
    """
    product, own, others = torch.zeros(3, len(updates), dtype=torch.float64)
    compared = [strategy.compared(valid.update, valid.contribution) for valid in updates]
    origins = [strategy.origin(valid.update) for valid in updates]
    for name, old in strategy.current.items():
        held = [each.whole(name, old) for each in compared if name in each.tensors]
        rows = [row for row, each in enumerate(compared) if name in each.tensors]
        starts = [origins[row][name] for row in rows]
        starts = [old] if all(start is old for start in starts) else starts  # one row for all
        for part in torch.arange(old.numel()).split(max(1, BLOCK // len(updates))) if held else ():
            columns = slice(int(part[0]), int(part[-1]) + 1)
            change = torch.stack([x.reshape(-1)[columns] for x, _ in held])
            change -= torch.stack([start.reshape(-1)[columns] for start in starts])
            covers = [torch.ones(()) if m is None else m.expand(old.shape).reshape(-1)[columns] for _, m in held]
            covered = torch.stack([cover.expand(len(part)) for cover in covers])
            change = (change * covered).double()
            rest = weights[rows] @ change - weights[rows, None] * change
            rest = (rest + past[name].reshape(-1)[columns] if past else rest) * covered
            product[rows] += (change * rest).sum(1)
            own[rows] += change.square().sum(1)
            others[rows] += rest.square().sum(1)
    return torch.nan_to_num(product / (own * others).sqrt())


def agreeing(strategy: Hooks, updates: Sequence[Valid]) -> tuple[list[Valid], list[Dropped], Tensors]:
    """Return a round's updates without those of opposed clients, these as dropped clients, and what is remembered.

    Fewer than half of the updates are left out, the most opposed ones.
    """
    clients = [valid.update.client for valid in updates]
    means = strategy.usual.get(AGREEMENT, torch.zeros(strategy.settings.num_clients, dtype=torch.float64)).clone()
    seen = {AGREEMENT: means}
    if not FEWEST <= len(updates) <= MOST:
        return list(updates), [], seen
    if any(valid.contribution.alone for valid in updates):
        past = {name: torch.zeros_like(x) for name, x in strategy.current.items()} | unprefixed(PAST, strategy.usual)
        now = agreement(strategy, updates, torch.zeros(len(updates), dtype=torch.float64), past)
    else:
        past = {}
        first = agreement(strategy, updates, torch.ones(len(updates), dtype=torch.float64))
        now = agreement(strategy, updates, (first > 0).double())
    recent = (means[clients] + now) / 2
    if float(now.median()) > CLEAR:
        means[clients] = recent
    if past:
        trusted = [valid for valid, mean in zip(updates, recent, strict=True) if mean >= recent.median()]
        seen |= prefixed(PAST, moved(strategy, past, trusted))
    worst = sorted(clients, key=lambda client: float(means[client]))[: (len(updates) - 1) // 2]
    opposed = {client: float(means[client]) for client in worst if means[client] < OPPOSED}
    said = "opposed: its mean cosine with the others' updates is"
    dropped = [Dropped(client, f"{said} {mean:.2f}") for client, mean in opposed.items()]
    return [valid for valid in updates if valid.update.client not in opposed], dropped, seen


def moved(strategy: Hooks, past: Tensors, updates: Sequence[Valid]) -> Tensors:
    """Return the past changes with those of the updates, which count half at their positions."""
    past = {name: x.clone() for name, x in past.items()}
    for valid in updates:
        for name in valid.contribution.tensors:
            x, mask = valid.contribution.whole(name, strategy.current[name])
            new = (past[name] + x - strategy.current[name]) / 2
            past[name] = new if mask is None else torch.where(mask, new, past[name])
    return past
