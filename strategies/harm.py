"""The setting ``robust``: what a round does to the model, judged by its loss on the server's own test samples.

Xie, Koyejo, Gupta: Zeno: Distributed Stochastic Gradient Descent with Suspicion-based Fault-tolerance, ICML 2019,
https://arxiv.org/abs/1805.10032, scores each update by the loss that it leaves. Here a round is judged as a whole, and
its updates one by one only where the merged model is worse than the last good ones, or where an update's client was
found harmful in the last rounds.

A model that became worse slowly, by less than a round's limit each time, is replaced by the best one, with the server's
state of that round.
"""

import math
from collections.abc import Sequence

import torch

from fedsub_app.common.tensors import prefixed, unprefixed
from fedsub_app.federation.phase import Dropped
from fedsub_app.subnets.bounds import WINDOW
from fedsub_app.subnets.norms import MAJORITY
from strategies.hooks import Hooks
from strategies.merging import Merging, Valid
from strategies.server import KEPT

LOSS, WATCHED = "merged model's loss", "watched clients"  # keys of Hooks.usual
MERGED, SUSPECTED = "last merged", "suspected clients"  # of these as well: a round of each client, 0 for none
ALLOWED, ROUND = "allowed loss", "round"  # keys of Hooks.good beside LOSS
# A loss of more than a times that of the last good models plus b is suspect; of more than that it is not kept.
SUSPECT, WORSE = (1.5, 0.3), (2.0, 1.0)
WATCH_ROUNDS = 10  # for which a client that was found harmful is tried in every round
MAX_TRIED = 32  # updates of a round that are tried one by one; more take too long


def harmless(strategy: Hooks, updates: Sequence[Valid]) -> tuple[list[Valid], list[Dropped]]:
    """Return a round's updates without those that harm the merged model, and these as dropped clients.

    Where the merged model's loss is suspect, the update is left out without which it is lowest, one after the other, as
    long as that brings it a quarter of the way down and at least half of the updates stay. With two updates, which have
    no majority, one is left out where the loss is a fifth lower without it. The update of a watched client is left out
    where the loss is lower without it. Where a client takes part that contributed to a model that was not kept, any
    loss above that of the best model is suspect.
    """
    kept, dropped, settings = list(updates), list[Dropped](), strategy.settings
    least = settings.least_replies if settings.mean == "krum" else 1  # which compares no fewer
    if not strategy.facts or not strategy.judged or not max(2, least) <= len(updates) <= MAX_TRIED:
        return kept, dropped
    now, limit = _loss(strategy, kept), _limit(float(_last(strategy).min()), *SUSPECT)
    watched, suspected = _rounds(strategy, WATCHED), _rounds(strategy, SUSPECTED)
    if any(_recent(strategy, suspected, valid.update.client) for valid in updates):
        limit = float(strategy.good[LOSS])

    def leave_out(number: int, loss: float) -> float:
        client = kept.pop(number).update.client
        dropped.append(Dropped(client, f"harmful: the merged model's loss is {now:.3g} with it, {loss:.3g} without it"))
        watched[client] = strategy.round
        return loss

    def without(number: int) -> float:
        return _loss(strategy, kept[:number] + kept[number + 1 :]) if len(kept) > least else math.inf

    for number in reversed(range(len(kept))):
        if _recent(strategy, watched, kept[number].update.client) and (loss := without(number)) < now:
            now = leave_out(number, loss)
    few = len(updates) < MAJORITY
    while (now > limit or few) and 2 * (len(kept) - 1) >= len(updates):
        losses = [without(number) for number in range(len(kept))]
        if min(losses) > (_limit(now, 0.8, -0.05) if few else now - (now - limit) / 4):
            break
        now = leave_out(losses.index(min(losses)), min(losses))
    if dropped:
        strategy.usual = {**strategy.usual, WATCHED: watched}
    return kept, dropped


def far_worse(strategy: Hooks, loss: float, clients: Sequence[int]) -> str:
    """Return why a merged model of this loss is not kept, "" where it is; remember its loss and its clients.

    It is held against the last models and against the best one. Where the model that the round started from is suspect
    beside the best one, the model and the server's state go back to it. The clients whose updates are undone are
    suspected from now on. Each refusal doubles the losses that are allowed: where the clients' data have changed the
    rounds go on.
    """
    if not strategy.judged:
        return ""
    past = _last(strategy)
    if not strategy.good or float(past[-1]) < float(strategy.good[LOSS]):
        _keep_good(strategy, past[-1])
    best = float(strategy.good[ALLOWED])
    rounds = {key: _rounds(strategy, key) for key in (WATCHED, MERGED, SUSPECTED)}
    rounds[MERGED][list(clients)] = strategy.round
    if loss <= _limit(min(float(past.min()), best), *WORSE):
        losses = torch.cat([past, past.new_tensor([loss])])[-WINDOW:]
        strategy.usual = {**strategy.usual, **rounds, LOSS: losses}
        return ""

    reason = f"the merged model's loss is {loss:.3g}, the best one's {float(strategy.good[LOSS]):.3g}: it is not kept"
    strategy.good = {**strategy.good, ALLOWED: past.new_tensor(_limit(best, 2))}
    undone, losses = strategy.round - 1, past + past.abs()
    if loss > _limit(best, *WORSE) and float(past[-1]) > _limit(best, *SUSPECT):
        undone, losses = int(strategy.good[ROUND]), strategy.good[ALLOWED].reshape(1)
        _go_back(strategy)
        strategy.phase.report["back-to-round"] = undone
        reason += f", nor are those since round {undone}"
    rounds[SUSPECTED][rounds[MERGED] > undone] = strategy.round
    strategy.usual = {**strategy.usual, **rounds, LOSS: losses}
    return reason


def _keep_good(strategy: Hooks, loss: torch.Tensor) -> None:
    """Remember the model that the round started from, of this loss, and the server's state as the best ones."""
    state = {name: x for name, x in strategy.state().items() if not name.startswith("good/")}
    state["state_rounds"] = strategy.state_rounds.clone()  # changed in place, the others are not
    known = {LOSS: loss, ALLOWED: loss, ROUND: torch.tensor(strategy.round - 1)}
    strategy.good = {**known, **prefixed("model/", strategy.current), **prefixed("state/", state)}


def _go_back(strategy: Hooks) -> None:
    """Make the best model and its state current."""
    model, good = unprefixed("model/", strategy.good), strategy.good
    fresh = type(strategy)(strategy.settings, strategy.model)  # as at a resume: state may have had fewer tensors
    fresh.load_state(unprefixed("state/", good))
    vars(strategy).update({name: getattr(fresh, name) for name in (*KEPT, *strategy.remembers)})
    strategy.good = good
    strategy.current = {name: model[name] for name in strategy.current}  # a checkpoint keeps no order


def _rounds(strategy: Hooks, key: str) -> torch.Tensor:
    """Return a copy of the round that is remembered of each client, int64 [N]; 0: none."""
    return strategy.usual.get(key, torch.zeros(strategy.settings.num_clients, dtype=torch.int64)).clone()


def _recent(strategy: Hooks, rounds: torch.Tensor, client: int) -> bool:
    return bool(rounds[client]) and strategy.round - int(rounds[client]) <= WATCH_ROUNDS


def _last(strategy: Hooks) -> torch.Tensor:
    """Return the losses of the last models that were kept, before round 1 the initial one's; float64."""
    assert strategy.facts
    if LOSS not in strategy.usual:
        first = strategy.facts.loss(strategy.current)
        strategy.usual = {**strategy.usual, LOSS: torch.tensor([first], dtype=torch.float64)}
    return strategy.usual[LOSS]


def _limit(loss: float, times: float, plus: float = 0.0) -> float:
    """Return ``times`` a loss above 0, ``plus`` a number; one below 0, as of a density, rises by as much."""
    return (times * loss if loss > 0 else loss - (times - 1) * loss) + plus


def _loss(strategy: Hooks, updates: Sequence[Valid]) -> float:
    assert strategy.facts
    merging = Merging(strategy)
    for each in updates:
        merging.add(each)
    return strategy.facts.loss(merging.result().model)
