"""The setting ``robust``: what a round does to the model, judged by its loss on the server's own test samples.

Xie, Koyejo, Gupta: Zeno: Distributed Stochastic Gradient Descent with Suspicion-based Fault-tolerance, ICML 2019,
https://arxiv.org/abs/1805.10032, scores each update by the loss that it leaves. Here a round is judged as a whole, and
its updates one by one only where the merged model is worse than the last good ones, or where an update's client was
found harmful in the last rounds.
"""

from collections.abc import Sequence

import torch

from fedsub_app.federation.phase import Dropped
from fedsub_app.subnets.bounds import WINDOW
from fedsub_app.subnets.norms import MAJORITY
from strategies.hooks import Hooks
from strategies.merging import Merging, Valid

LOSS, WATCHED = "merged model's loss", "watched clients"  # keys of Hooks.usual
# A loss of more than a times that of the last good models plus b is suspect; of more than that it is not kept.
SUSPECT, WORSE = (1.5, 0.3), (2.0, 1.0)
WATCH_ROUNDS = 10  # for which a client that was found harmful is tried in every round
MAX_TRIED = 32  # updates of a round that are tried one by one; more take too long


def harmless(strategy: Hooks, updates: Sequence[Valid]) -> tuple[list[Valid], list[Dropped]]:
    """Return a round's updates without those that harm the merged model, and these as dropped clients.

    Where the merged model's loss is suspect, the update is left out without which it is lowest, one after the other, as
    long as that brings it a quarter of the way down and at least half of the updates stay. Of two updates, which have
    no majority, one is left out where the loss is a fifth lower without it. The update of a watched client is left out
    where the loss is lower without it.
    """
    kept, dropped = list(updates), list[Dropped]()
    if not strategy.facts or not strategy.judged or not 1 < len(updates) <= MAX_TRIED:
        return kept, dropped
    now, limit = _loss(strategy, kept), _limit(strategy, SUSPECT)
    watched = strategy.usual.get(WATCHED, torch.zeros(strategy.settings.num_clients, dtype=torch.int64)).clone()

    def leave_out(number: int, loss: float) -> float:
        client = kept.pop(number).update.client
        dropped.append(Dropped(client, f"harmful: the merged model's loss is {now:.3g} with it, {loss:.3g} without it"))
        watched[client] = strategy.round
        return loss

    def without(number: int) -> float:
        return _loss(strategy, kept[:number] + kept[number + 1 :])

    for number in reversed(range(len(kept))):
        found = int(watched[kept[number].update.client])
        if found and strategy.round - found <= WATCH_ROUNDS and len(kept) > 1 and (loss := without(number)) < now:
            now = leave_out(number, loss)
    few = len(updates) < MAJORITY
    while (now > limit or few) and len(kept) > 1 and 2 * (len(kept) - 1) >= len(updates):
        losses = [without(number) for number in range(len(kept))]
        if min(losses) > (0.8 * now - 0.05 if few else now - (now - limit) / 4):
            break
        now = leave_out(losses.index(min(losses)), min(losses))
    if dropped:
        strategy.usual = {**strategy.usual, WATCHED: watched}
    return kept, dropped


def far_worse(strategy: Hooks, loss: float) -> str:
    """Return why a merged model of this loss is not kept, "" where it is; remember its loss.

    Each refusal doubles the losses that are remembered: where the clients' data have changed the rounds go on.
    """
    past, limit = _last(strategy), _limit(strategy, WORSE)
    if strategy.judged and loss > limit:
        strategy.usual = {**strategy.usual, LOSS: 2 * past}
        return f"the merged model's loss is {loss:.3g}, the last good ones' {float(past.min()):.3g}: it is not kept"

    strategy.usual = {**strategy.usual, LOSS: torch.cat([past, past.new_tensor([loss])])[-WINDOW:]}
    return ""


def _last(strategy: Hooks) -> torch.Tensor:
    """Return the losses of the last models that were kept, before round 1 the initial one's; float64."""
    assert strategy.facts
    if LOSS not in strategy.usual:
        first = strategy.facts.loss(strategy.current)
        strategy.usual = {**strategy.usual, LOSS: torch.tensor([first], dtype=torch.float64)}
    return strategy.usual[LOSS]


def _limit(strategy: Hooks, bound: tuple[float, float]) -> float:
    times, plus = bound
    return times * float(_last(strategy).min()) + plus


def _loss(strategy: Hooks, updates: Sequence[Valid]) -> float:
    assert strategy.facts
    merging = Merging(strategy)
    for each in updates:
        merging.add(each)
    return strategy.facts.loss(merging.result().model)
