"""Rounds of many clients whose simulated nodes take means of blocks of updates (federation/blocks.py), server side."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.blocks import blocks_of
from fedsub_app.federation.nodes import Answer
from fedsub_app.federation.protocol import BadReply, Range
from fedsub_app.federation.wire import Part, read_update
from fedsub_app.subnets.averaging import Contribution
from strategies.hooks import Hooks
from strategies.merging import Valid

LENGTH = Range(0, math.inf)
SINGLE = ("contribution", "norms", "remembered", "weight")  # hooks that see single updates


def blocks(strategy: Hooks, clients: Sequence[int]) -> dict[int, int]:
    """Return the number of each client's block; nothing where each update goes to the server.

    Nodes take means where they are trusted and the server needs an update, of the current model, for nothing else.
    """
    settings, numbers = strategy.settings, blocks_of(clients)
    usual = (settings.mean, settings.attack, settings.min_contributors) == ("average", "none", 1)
    usual &= not settings.secure_aggregation and not strategy.holds_all
    alone = (settings.spares, settings.clip_norm, settings.dp_noise_multiplier, settings.stack_clients)
    own = any(getattr(type(strategy), hook) is not getattr(Hooks, hook) for hook in SINGLE)
    if not numbers or own or any(alone) or not usual or strategy.devices or strategy.robust:
        return {}
    sent, wanted = strategy.task(clients[0]).tensors, strategy.expected(clients[0]).keys()
    same = bool(wanted) and all(name in sent and sent[name] is strategy.current.get(name) for name in wanted)
    fits = same and strategy.simulated and not strategy.federation.pinned
    return numbers if fits and all(strategy.expected(client).keys() == wanted for client in clients) else {}


def block_means(
    strategy: Hooks, answers: Iterable[Answer], refuse: Callable[[int, BadReply], None]
) -> Iterator[tuple[list[Valid], Tensors]]:
    """Yield the updates of each block, without tensors, with the mean that their node has taken of them.

    Where the server refuses an update that the node has taken into the mean, none of the block counts.
    """
    for _, block in groupby(answers, key=lambda answer: strategy.phase.outbox.blocks[answer[0]]):
        valid, mean, lost = list[Valid](), Tensors(), False
        for client, part, expected in block:
            try:
                update = read_update(Part(part.config), {}, strategy.metrics(client), strategy.examples(client))
                LENGTH.check("norm", distance := part.config.get("norm", math.nan))
                contribution = Contribution({}, None, strategy.weight(update))
                valid.append(Valid(update, contribution, {"update": float(distance)}))
            except BadReply as error:
                refuse(client, error)
                lost |= not part.config.get("error")
            if part.rows.keys() == expected.keys():
                with suppress(BadReply):
                    rows = {name: (*row, replace(expected[name], start=None)) for name, row in part.rows.items()}
                    mean = {name: stack.row(number, spec) for name, (stack, number, spec) in rows.items()}
        if lost or not mean:
            for update, *_ in valid:
                refuse(update.client, BadReply("the mean of its block is not valid"))
        elif valid:
            yield valid, mean
