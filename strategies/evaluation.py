"""The clients' evaluation after a round, and its scores for groups of clients.

Scores are those of all clients, of widths, of device classes, of the worst tenth and of the held-out clients.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean, median_low

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsub_app.common.errors import UserError
from fedsub_app.common.own_code import OWN
from fedsub_app.common.score import SPREAD
from fedsub_app.common.tensors import Json, Tensors, prefixed
from fedsub_app.federation.nodes import held_out
from fedsub_app.federation.phase import Dropped, Phase
from fedsub_app.federation.protocol import GLOBAL, BadReply, Range, Task, Update
from fedsub_app.federation.wire import read_update, to_tensors
from strategies.hooks import Hooks
from strategies.rounds import kept_rounds, lost_states, means_of, reasons, sums_of, with_state

FURTHER, MAX_FURTHER = Range(-1e12, 1e12), 16  # metrics besides score and loss


def evaluation_due(strategy: Hooks, server_round: int, config: ConfigRecord) -> bool:
    """Say whether the round ends with an evaluation: every ``eval-every`` rounds and the last one.

    ``config["last"]`` says that a budget has made it the last one.
    """
    last = bool(config.get("last")) or server_round == strategy.settings.num_rounds
    return last or server_round % strategy.settings.eval_every == 0


def ask_evaluation(strategy: Hooks, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Phase:
    """Ask all clients for the scores on their own test sets, if the settings name any."""
    wanted = [name for name in strategy.settings.evaluations if name != "global"]
    strategy.phase = Phase()
    if not wanted or not evaluation_due(strategy, server_round, config):
        return strategy.phase

    def task(client: int) -> Task:
        """Return the tensors of a client's own model and, for the global one, the tensors that differ from them."""
        personal = strategy.personal_download(client) if "personal" in wanted else {}
        differs = {n: t for n, t in strategy.current.items() if personal.get(n) is not t}
        return Task(client, personal | (prefixed(GLOBAL, differs) if "global-local" in wanted else {}))

    strategy.federation.meet(grid)
    strategy.round, strategy.current = server_round, to_tensors(arrays)
    clients = range(strategy.settings.num_clients)
    extra: Json = {"evaluate": wanted} | kept_rounds(strategy, config) | {k: config[k] for k in ("lr",) if k in config}
    asked = partial(with_state, strategy, task)
    strategy.phase = strategy.federation.ask(MessageType.EVALUATE, server_round, clients, asked, extra)
    return strategy.phase


def _evaluation_metrics(strategy: Hooks, client: int) -> dict[str, Range]:
    """Return the metrics that a client may answer an evaluation with: the requested ones, and its costs."""
    ranges, score = {"flops": Range(0, strategy.max_flops(client))}, strategy.score
    losses = Range(min(0, score.losses[0]), max(1e9, score.losses[1]), needed=True)
    for name in strategy.settings.evaluations:
        if name != "global":
            limits = Range(score.low, score.high)
            ranges |= {f"{name}-{score.name}": limits._replace(needed=True), f"{name}-loss": losses}
            ranges |= {f"{name}-validation-{score.name}": limits, **{f"{name}-{o}": FURTHER for o in score.others}}
    return ranges


def _further_metrics(strategy: Hooks, names: object) -> dict[str, Range]:
    """Return the metrics that the ClientApp of a user's app adds: a few words, whose names the server does not know."""
    if strategy.settings.model != OWN or not isinstance(names, dict):
        return {}
    word = re.compile(rf"({'|'.join(strategy.settings.evaluations)})-[a-z]\w{{0,40}}", re.ASCII)
    return dict.fromkeys([name for name in names if word.fullmatch(str(name))][:MAX_FURTHER], FURTHER)


def read_evaluations(strategy: Hooks, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
    """Return the unweighted client means; the clients' own values go into the round's line."""
    phase = strategy.phase
    updates = []
    for client, part, expected in strategy.federation.answers(phase, replies, lambda _: {}):
        try:
            allowed = _further_metrics(strategy, part.config.get("metrics")) | _evaluation_metrics(strategy, client)
            updates.append(read_update(part, expected, allowed))
        except BadReply as error:
            phase.dropped.append(Dropped(client, str(error)))
    members = [update for update in updates if update.client not in held_out(strategy.settings)]
    names = sorted({key for update in updates for key in update.metrics} - {"flops"})
    bounded = [name for name in names if strategy.score.bounded and name.endswith(f"-{strategy.score.name}")]
    means = means_of(members, bounded) | means_of(members, [*{*names} - {*bounded}], strategy.robust)
    for key in names if SPREAD in strategy.settings.metrics else ():
        if values := [update.metrics[key] for update in members if key in update.metrics]:
            low, high = np.quantile(values, [0.1, 0.9])
            means |= {f"{key}-sd": float(np.std(values)), f"{key}-q10": float(low), f"{key}-q90": float(high)}
    spent = {f"evaluate-{key}": value for key, value in sums_of(updates, ("flops",), strategy.robust).items() if value}
    phase.report |= means | spent
    phase.report |= lost_states(strategy, "evaluated-without-state", updates)
    if served := by_client(strategy, updates):
        phase.report["served"] = served
    phase.report["evaluated"] = {update.client: update.metrics for update in updates}
    phase.report["not-evaluated"] = reasons(phase.dropped)
    return MetricRecord(dict(means)) if updates else None


def by_client(strategy: Hooks, updates: Sequence[Update]) -> Json:
    """Return, for each score of the clients, its mean over groups of clients: score -> group -> mean.

    The groups are each device class, the worst tenth of all clients, and the held-out ones, which are in no other
    group. There are none without ``devices`` and ``held-out-clients``.
    """
    devices, out = strategy.devices, held_out(strategy.settings)
    if not (devices or out):
        return {}
    served: Json = {}
    for key in strategy.score.keys:
        of_client = {update.client: update.metrics[key] for update in updates if key in update.metrics}
        groups: dict[str, list[float]] = {}
        members = {client: value for client, value in of_client.items() if client not in out}
        for client, value in members.items() if devices else ():
            groups.setdefault(f"device {devices.of(client).name}", []).append(value)  # type: ignore[union-attr]
        ranked = sorted(members.values(), reverse=not strategy.score.high_is_good)
        groups["worst decile"] = ranked[: max(1, round(len(ranked) / 10))]
        groups["held out"] = [value for client, value in of_client.items() if client in out]
        mean = fmean if strategy.score.bounded or not strategy.robust else median_low
        if means := {name: mean(values) for name, values in groups.items() if values}:
            served[key] = means
    return served


def by_width(strategy: Hooks, whole: Mapping[str, float], test: Callable[[Tensors], Mapping[str, float]]) -> Json:
    """Return the score of the global model's network of each width that a device holds: score -> width -> value.

    ``whole`` are the global model's scores; ``test`` returns those of a network's tensors on the same test set.
    """
    classes, key = strategy.devices.classes if strategy.devices else (), f"global-{strategy.score.name}"
    most, tested = strategy.settings.model_width, {}
    for width in sorted({min(device.width, most) for device in classes}):
        with suppress(UserError):  # a network whose units cannot be removed has one width
            tested[f"width {width:g}"] = (whole if width == most else test(strategy.network_at(width / most)))[key]
    return {key: tested} if tested else {}
