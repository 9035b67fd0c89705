"""Means of blocks of clients, which simulated nodes take where the updates arise, instead of the server's one thread.

In a round of more than ``MANY`` clients every ``BLOCK`` of them, in the order of their ids, are a block. A node trains
whole blocks and replies with the weighted mean of each; the server takes the mean of these, weighted by the sums of
their clients' weights. So no bit depends on the number of nodes or on the messages. The node checks the updates as the
server would, but compares the norms of a block with each other only.
"""

import math
from collections.abc import Callable, Sequence

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update, finite
from fedsub_app.federation.wire import update_part
from fedsub_app.subnets.averaging import WAITING_BYTES, Contribution, MaskedMean
from fedsub_app.subnets.norms import NormGuard, squares_of

MANY = 64  # clients of a round up to which each update goes to the server: a sum of block means has other last bits
BLOCK = 8  # clients
Part = tuple[Json, Tensors]


def blocks_of(clients: Sequence[int]) -> dict[int, int]:
    """Return the number of each client's block; nothing for a round of too few clients."""
    return {client: place // BLOCK for place, client in enumerate(sorted(clients))} if len(clients) > MANY else {}


def block_parts(run: Callable[[Json, Tensors], Update], tasks: Sequence[Part], how: Json) -> list[Part]:
    """Run a block's clients; returns their parts of the reply, of which the last one has the tensors of the mean.

    ``run`` runs a client's task, the same each time. ``how`` has ``factor`` and ``model`` of :class:`NormGuard`, and
    ``examples``: whether updates count by their samples.
    """
    start = tasks[0][1]  # the model that all clients of a round are sent
    some = max(1, -(-WAITING_BYTES // (sum(x.nbytes for x in start.values()) or 1)))
    refused: dict[int, Update] = {}
    while True:
        guard = NormGuard[int](how["factor"], how["model"], math.inf)
        parts: list[Part] = []
        mean: MaskedMean | None = None
        for begin in range(0, len(tasks), some):
            group = tasks[begin : begin + some]
            updates = _checked([refused.get(task["client"]) or run(task, sent) for task, sent in group], start)
            for update, distance in updates:
                config, _ = update_part(update)
                if not update.error:
                    guard.add(len(parts), {"update": distance})
                    config["norm"] = distance
                parts.append((config, {}))
            if good := [update for update, _ in updates if not update.error]:
                mean = mean or MaskedMean({name: start[name] for name in good[0].tensors})
                weights = [one.num_examples if how["examples"] else 1.0 for one in good]
                mean.add([Contribution(one.tensors, None, w) for one, w in zip(good, weights, strict=True)])
        if mean and not (odd := [(tasks[k][0]["client"], reason) for k, reason in guard.rest() if reason]):
            return [*parts[:-1], (parts[-1][0], mean.result())]
        if not mean:
            return parts
        # Their updates are in the sum: the others run again.
        refused |= {client: Update(client, error=reason) for client, reason in odd}


def _checked(updates: Sequence[Update], start: Tensors) -> list[tuple[Update, float]]:
    """Return each update, or that of a client that has failed where values are not finite, with its distance."""
    totals = dict.fromkeys(range(len(updates)), 0.0)
    for name, old in start.items():
        rows = {k: update.tensors[name] for k, update in enumerate(updates) if name in update.tensors}
        for k, square in zip(rows, squares_of(list(rows.values()), old), strict=True):
            totals[k] += square
    checked = []
    for update, total in zip(updates, totals.values(), strict=True):
        broken = [] if math.isfinite(total) else [name for name, x in update.tensors.items() if not finite(x)]
        error = f"tensor {broken[0]!r}: NaN or infinite values" if broken else ""
        checked.append((Update(update.client, error=error, diverged=True) if broken else update, math.sqrt(total)))
    return checked
