"""Means of blocks of clients, which simulated nodes take where the updates arise, instead of the server's one thread.

In a round of more than ``MANY`` clients every ``BLOCK`` of them, in the order of their ids, are a block. A node trains
whole blocks and replies with the weighted mean of each; the server takes the mean of these, weighted by the sums of
their clients' weights. So no bit depends on the number of nodes or on the messages. The node checks the updates as the
server would, but compares the norms of a block with each other only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update, finite
from fedsub_app.federation.wire import update_part
from fedsub_app.subnets.averaging import WAITING_BYTES, Contribution, MaskedMean
from fedsub_app.subnets.norms import NormGuard, square

MANY = 64  # clients of a round up to which each update goes to the server: a sum of block means has other last bits
BLOCK = 8  # clients
Part = tuple[Json, Tensors]


def blocks_of(clients: Sequence[int]) -> dict[int, int]:
    """Return the number of each client's block; nothing for a round of too few clients."""
    return {client: place // BLOCK for place, client in enumerate(sorted(clients))} if len(clients) > MANY else {}


def block_parts(run: Callable[[Json, Tensors], Update], tasks: Sequence[Part], how: Json) -> list[Part]:
    """Run a block's clients; returns their parts of the reply, of which the last one has the tensors of the mean.

    Parameters
    ----------
    run : runs a client's task; a second call with the same task gives the same update.
    tasks : of the clients of the block, by id.
    how : ``factor`` and ``model`` of :class:`NormGuard`; ``examples``: whether updates count by their samples.
    """
    refused: dict[int, Update] = {}
    while True:
        guard = NormGuard[int](how["factor"], how["model"], math.inf)
        parts: list[Part] = []
        mean: MaskedMean | None = None
        waiting: list[Contribution] = []
        for task, sent in tasks:
            update = refused.get(task["client"]) or _checked(run(task, sent))
            config, tensors = update_part(replace(update, tensors={}))
            if not update.error:
                distance = math.sqrt(sum(square(x, sent[name]) for name, x in update.tensors.items()))
                guard.add(len(parts), {"update": distance})
                config["norm"] = distance
                waiting.append(Contribution(update.tensors, None, update.num_examples if how["examples"] else 1.0))
                mean = mean or MaskedMean({name: sent[name] for name in update.tensors})
                if sum(x.nbytes for one in waiting for x in one.tensors.values()) > WAITING_BYTES:
                    mean.add(waiting)
                    waiting = []
            parts.append((config, tensors))
        if mean and not (odd := [(tasks[k][0]["client"], reason) for k, reason in guard.rest() if reason]):
            mean.add(waiting)
            return [*parts[:-1], (parts[-1][0], mean.result())]
        if not mean:
            return parts
        # Their updates are in the sum: the others run again.
        refused |= {client: Update(client, error=reason) for client, reason in odd}


def _checked(update: Update) -> Update:
    """Return the update, or that of a client that has failed where its values are not finite."""
    broken = [name for name, x in update.tensors.items() if not finite(x)]
    error = f"tensor {broken[0]!r}: NaN or infinite values" if broken else ""
    return Update(update.client, error=error, diverged=True) if broken else update
