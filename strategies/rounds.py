"""Flower's verbs: they ask a round's clients, check their replies and merge the valid ones.

They are functions of a strategy, whose hooks (``base.py``) they call; no method overrides them.
"""

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, median_low

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedsub_app.common.errors import UserError, misfit, shown
from fedsub_app.common.tensors import Json
from fedsub_app.federation.nodes import draw, takes_part
from fedsub_app.federation.phase import Dropped, Phase
from fedsub_app.federation.protocol import BadReply, Diverged, Range, Spec, StateLost, Task, Update, finite
from fedsub_app.federation.wire import read_update, to_arrays, to_tensors
from fedsub_app.secure.server import Unopened
from fedsub_app.subnets.norms import FIRST, NormGuard, norm
from fedsub_app.subnets.privacy import epsilon
from strategies.blocks import block_means, blocks
from strategies.bounding import MAX_NORM, Bounds, reach
from strategies.clock import Clock
from strategies.direction import agreeing
from strategies.harm import ROUND, far_worse, harmless
from strategies.hooks import Hooks, Merged
from strategies.memory import leaves
from strategies.merging import FirstValid, Merging, Valid
from strategies.secure import SecureMerging, check_secure, refusal
from strategies.server import check_json, returned

MAX_COST = 1.5  # with robust: upper bound on a sample's cost, as a multiple of the median client's
COSTS = ("flops", "published-flops", "subnet-flops", "compute-seconds")


def ask(
    strategy: Hooks,
    kind: str,
    clients: Sequence[int],
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    grid: Grid,
) -> Phase:
    """Return the phase of message type ``kind`` with the clients' tasks; each task names the state of its client."""
    strategy.federation.meet(grid)
    strategy.round, strategy.current = server_round, to_tensors(arrays)
    task, extra = partial(with_state, strategy, strategy.task), kept_rounds(strategy, config)
    extra |= {"lr": config["lr"]} if "lr" in config else {}
    for hook, of in (("expected", Spec), ("metrics", Range)) if clients else ():
        if wrong := misfit(getattr(strategy, hook)(clients[0]), of):
            what = f"returned {wrong}: must be strategies.base.{of.__name__} by name"
            raise UserError(f"{type(strategy).__name__}.{hook} {what}")
    merging = Merging(strategy)
    if kind == MessageType.TRAIN and strategy.settings.secure_aggregation:
        merging = secure = SecureMerging(strategy, clients, grid)
        extra |= secure.header
        task = partial(secure.task, task)
    together = blocks(strategy, clients) if kind == MessageType.TRAIN else {}
    if together:
        settings, model = strategy.settings, norm(strategy.current.values())
        extra["means"] = {"factor": settings.max_update_norm, "model": model, "examples": settings.by_examples}
    strategy.phase = strategy.federation.ask(
        kind, server_round, clients, task, extra, merging.expected, strategy.max_samples, together
    )
    strategy.merging = merging
    strategy.phase.report["clients"] = list(clients)
    return strategy.phase


def with_state(strategy: Hooks, task: Callable[[int], Task], client: int) -> Task:
    """Return a client's task with the round of the state that it starts from, if it has one."""
    asked, merged = returned(strategy, "task", task(client), Task), int(strategy.state_rounds[client])
    said = f"{type(strategy).__name__}.task returned for client {client}"
    if asked.client != client or asked.config.keys() & {"client", "state", "block"}:
        wanted = f"must be of client {client}, with a config without client, state and block, which fedsub sets"
        raise UserError(f"{said} Task({asked.client}, …, {shown(asked.config)}): {wanted}")
    check_json(f"{said} the config", asked.config)
    values: Mapping[str, object] = asked.tensors
    if wrong := [f"{n!r} as {type(x).__name__}" for n, x in values.items() if not isinstance(x, Tensor)]:
        raise UserError(f"{said} {wrong[0]}: must be a torch.Tensor")
    return replace(asked, config={**asked.config, "state": merged}) if merged else asked


def kept_rounds(strategy: Hooks, config: ConfigRecord) -> Json:
    """Return the rounds whose states the clients keep: those of the checkpoints, and of the best model."""
    good = [int(strategy.good[ROUND])] if strategy.good else []
    return {"checkpoints": [*config.get("checkpoints", []), *good]}  # type: ignore[misc]


def merge_answers(
    strategy: Hooks, server_round: int, replies: Iterable[Message]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Check and merge replies as they come, commit or abandon the round; return model (None: abandoned), metrics."""
    phase, settings, federation = strategy.phase, strategy.settings, strategy.federation
    # Privacy: no client's update may decide whether another's counts, unless clients add the noise themselves.
    limit = math.inf if settings.server_noise else settings.max_update_norm
    bounds = Bounds(strategy, reach(strategy, phase.report["clients"])) if strategy.robust else None
    factor, first = (min(limit, MAX_NORM), math.inf) if bounds else (limit, FIRST)
    guard = partial(NormGuard[Valid], factor, norm(strategy.current.values()), first)
    spares = settings.spares if phase.outbox.header["phase"] == MessageType.TRAIN else 0
    clock = Clock(strategy, strategy.devices) if strategy.devices else None
    arrivals = clock.arrivals if clock else {}
    judge = FirstValid(draw(settings, server_round), settings.sample_size, guard, arrivals) if spares else guard()
    # Let go of the merging, which may hold all updates; a phase that another object asked for gets an ordinary one.
    merging, strategy.merging = strategy.merging or Merging(strategy), None
    merging.reach = bounds.reach if bounds else {}
    diverged, slow = 0, list[Dropped]()

    def take(decided: Sequence[tuple[Valid, str]]) -> None:
        phase.dropped += [Dropped(valid.update.client, reason) for valid, reason in decided if reason]
        accepted = [valid for valid, reason in decided if not reason]
        if bounds and accepted:
            accepted, opposed, seen = agreeing(strategy, bounds.bounded(accepted))
            bounds.usual |= seen
            accepted, harmful = harmless(strategy, accepted)
            phase.dropped += opposed + harmful
        for valid in accepted:
            merging.add(valid)

    def refuse(client: int, error: BadReply) -> None:
        nonlocal diverged
        phase.dropped.append(Dropped(client, str(error)))
        diverged += isinstance(error, Diverged)
        if isinstance(error, StateLost):
            strategy.forget(client)

    answers = federation.answers(phase, replies, merging.expected, not spares)
    for valid, mean in block_means(strategy, answers, refuse) if phase.outbox.blocks else ():
        merging.add_block(valid, mean)
    for client, part, expected in answers:
        try:
            if clock and clock.devices.vanishes(client, server_round):
                raise BadReply(f"its device drops out ({clock.devices.of(client).name})")
            update = read_update(part, expected, strategy.metrics(client), strategy.examples(client))
            if clock and (late := clock.late(update, merging.later)):
                if spares:
                    slow.append(Dropped(client, late))
                    continue  # dropped in the end only if no other client replaces it
                raise BadReply(late)
            contribution = merging.contribution(update)
            norms = strategy.norms(update, contribution)
            if bounds:
                norms = {kind: value / bounds.reach[client] for kind, value in norms.items()}
                bounds.measure(update, contribution)
            take(judge.add(Valid(update, contribution, norms), norms))
        except BadReply as error:
            refuse(client, error)
        # On real nodes the server does not wait for the other replies.
        if isinstance(judge, FirstValid) and judge.enough and not federation.simulated and not clock:
            break
    take(judge.rest())
    # Costs are those of replies that passed the checks: the claims of a refused reply are not trusted.
    updates = merging.updates
    names = {name: None for update in updates for name in update.metrics if name not in COSTS}
    flops = strategy.facts.sample_flops if strategy.facts else math.inf  # inf: unknown, in a Flower app of your own
    whole = flops if flops < math.inf else 0.0
    costs = sums_of(updates, COSTS, strategy.robust, strategy.fitted, whole)
    metrics = means_of(updates, names, strategy.robust) | costs
    # The server's own measurements override the clients' metrics.
    sizes = {"update-norm": median(merging.norms), "largest-update-norm": max(merging.norms)} if merging.norms else {}
    phase.report = {**metrics, **phase.report, **{key: float(f"{value:.3g}") for key, value in sizes.items()}}
    phase.report |= {"bytes-down": phase.outbox.bytes_down, "formula-bytes-down": sum(phase.outbox.formula_of.values())}
    phase.report |= {"bytes-up": phase.bytes_up, "formula-bytes-up": merging.formula_bytes}
    phase.report |= {"clipped-updates": merging.clipped} if settings.server_clip else {}
    phase.report |= _privacy(strategy) | (bounds.report if bounds else {})
    phase.report |= lost_states(strategy, "lost-state", updates)
    merged, reason = _merged(strategy, merging, diverged)
    phase.report["merge-seconds"] = merging.seconds
    wanted = min(len(phase.report["clients"]), settings.sample_size) if spares else len(phase.report["clients"])
    if spares:
        phase.dropped += slow if len(updates) < wanted else []
        decided = {update.client for update in updates} | {drop.client for drop in phase.dropped}
        phase.report["not-waited-for"] = sorted(set(phase.report["clients"]) - decided)
    if clock:
        phase.report |= clock.report([update.client for update in updates], wanted)
    if merged and len(updates) < wanted:
        phase.report["partial"] = f"{len(updates)} of {wanted} replies"
    phase.report["dropped"] = reasons(phase.dropped)
    if merged is None:
        phase.report |= {"abandoned": reason}
        return None, MetricRecord(dict(metrics))
    if taken := sorted(merged.report.keys() & phase.report.keys()):
        raise UserError(f"{type(strategy).__name__}.merge reports {taken[0]!r}, which the round's line has of its own")
    phase.report |= merged.report
    strategy.commit(merged, updates)
    if bounds:
        strategy.usual |= bounds.usual
    return to_arrays(merged.model), MetricRecord(dict(metrics))


def _merged(strategy: Hooks, merging: Merging, diverged: int) -> tuple[Merged | None, str]:
    """Return the round's outcome, or ``None`` and the reason to abandon it; then model and state stay."""
    count, settings = len(merging.updates), strategy.settings
    for key, needed in (("min-replies", settings.min_replies), ("min-contributors", settings.min_contributors)):
        if count < needed:
            return None, f"fewer than {key} = {needed} valid replies"
    if count < (least := settings.least_replies):
        krum = f"mean = {settings.mean!r} with byzantine-clients = {settings.byzantine_clients}"
        which = krum if settings.dp_noise_by == "server" else "dp-noise-by = 'clients'"
        return None, f"{count} valid replies: {which} needs {least}"
    if diverged > count:  # the few clients that are left may have caused it
        return None, f"training diverged on {diverged} of {diverged + count} clients"
    try:
        merged = merging.result()
    except Unopened as error:
        return None, str(error)
    values = (*merged.model.items(), *leaves("", merged.state))
    if broken := [name for name, tensor in values if not finite(tensor)]:  # finite values may add up to infinity
        return None, f"{type(strategy).__name__}.merge returned {broken[0]!r} with NaN or infinite values"
    loss = strategy.facts.loss(merged.model) if strategy.facts else 0.0
    if not loss <= strategy.score.losses[1]:
        return None, f"diverged: the merged model's loss is {loss:g}"
    clients = [update.client for update in merging.updates]
    if strategy.robust and strategy.facts and (reason := far_worse(strategy, loss, clients)):
        return None, reason
    return merged, ""


def _privacy(strategy: Hooks) -> Json:
    """Return ``epsilon`` and ``delta`` that the run has spent so far; nothing without noise.

    Every node has the seed, and the clients of a round follow from it, not from any data. So sampling gives no
    amplification: epsilon is that of the client that was asked most often; the other rounds reveal nothing about it.
    """
    settings = strategy.settings
    if not settings.dp_noise_multiplier:
        return {}
    asked = Counter(client for number in range(1, strategy.round + 1) for client in strategy.federation.sample(number))
    most = max(asked.values(), default=0)
    return {"epsilon": epsilon(settings.dp_noise_multiplier, most, settings.dp_delta), "delta": settings.dp_delta}


def lost_states(strategy: Hooks, key: str, updates: Sequence[Update]) -> Json:
    """Return, for the report, the clients that did not have the state of their last merged reply."""
    lost = [update.client for update in updates if update.state[0] < strategy.state_rounds[update.client]]
    return {key: lost} if lost else {}


def reasons(dropped: Sequence[Dropped]) -> list[Json]:
    return [{"client": drop.client, "reason": drop.reason} for drop in sorted(dropped, key=lambda drop: drop.client)]


def means_of(updates: Sequence[Update], keys: Iterable[str], robust: bool = False) -> dict[str, float]:
    """Return the clients' means; with ``robust`` the lower medians, which one client's claim does not move far."""
    values = {key: [u.metrics[key] for u in updates if key in u.metrics] for key in keys}
    return {key: median_low(each) if robust else sum(each) / len(each) for key, each in values.items() if each}


def sums_of(
    updates: Sequence[Update],
    keys: Iterable[str],
    robust: bool = False,
    fitted: Callable[[int], float] = float,
    whole: float = 0.0,
) -> dict[str, float]:
    """Return the clients' sums; with ``robust`` a sample counts at most 1.5 times the median client's cost a sample.

    It may always count ``whole`` FLOPs, those of the whole network, because other clients may hold less. ``fitted``:
    number of a client's samples -> number that it computes on, which is the same for all with local steps.
    """
    costs = {key: [u.metrics.get(key, 0.0) for u in updates] for key in keys}
    if robust and updates:
        counts = [max(1.0, fitted(update.num_examples)) for update in updates]
        for key, each in costs.items():
            usual = median_low([cost / count for cost, count in zip(each, counts, strict=True)])
            most = max(MAX_COST * usual, whole if key.endswith("flops") else 0.0)
            costs[key] = [min(x, most * count) for x, count in zip(each, counts, strict=True)]
    return {key: sum(each) for key, each in costs.items()}


def check_widths(strategy: Hooks) -> None:
    """Refuse devices that cannot hold the network if the method has no smaller network for them."""
    settings, devices = strategy.settings, strategy.devices
    if not devices or strategy.narrows:
        return
    held = {devices.of(client) for client, there in enumerate(takes_part(settings)) if there}
    least, most = min(held, key=lambda device: device.width, default=None), settings.model_width
    if least and least.width < most:
        allowed = f"min-width = {most:g}, model-width = {least.width:g} or a method of widths"
        whole = f"method = {settings.method!r} trains the whole network; allowed are {allowed}"
        raise UserError(f"devices: class {least.name} holds width {least.width:g}, {whole}")


def check_defences(strategy: Hooks) -> None:
    """Refuse defences that do not protect the method, noise in running statistics, and noise without its package."""
    settings = strategy.settings
    noise = settings.dp_noise_multiplier
    chosen = {
        "clip-norm": f"clip-norm = {settings.clip_norm:g}" if settings.clip_norm else "",
        settings.mean: f"mean = {settings.mean!r}",
        "min-contributors": f"min-contributors = {settings.min_contributors}" if settings.min_contributors > 1 else "",
        "oversample": f"oversample = {settings.oversample:g}" if settings.oversample > 1 else "",
        "dp-noise-multiplier": f"dp-noise-multiplier = {noise:g}" if noise else "",
        "dp-noise-by": "dp-noise-by = 'clients'" if settings.dp_noise_by == "clients" else "",
        "secure-aggregation": "secure-aggregation = true" if settings.secure_aggregation else "",
    }
    sums = {"secure-aggregation": reason} if (reason := refusal(strategy)) else {}
    measurement = strategy.measurement.refuses() if strategy.measurement else {}
    for name, reason in {**measurement, **sums, **strategy.refuses()}.items():
        if chosen.get(name):
            raise UserError(f"{chosen[name]}: not with method = {settings.method!r}: {reason}")
    if settings.secure_aggregation:
        check_secure(strategy)
    if noise:
        if settings.lr_schedule == "plateau" and (first := settings.evaluations[0]) != "global":
            reason = f"lr would follow the clients' {first!r} scores, which have no noise; allowed is 'global' first"
            raise UserError(f"evaluate = {first!r}: not with lr-schedule = 'plateau' and dp-noise-multiplier: {reason}")
        sent = strategy.current if strategy.stage(1) else strategy.shared
        buffers = [name for name, _ in strategy.model.named_buffers() if name in sent]
        if buffers:
            reason = f"{buffers[0]!r} is a statistic, which noise would make negative"
            raise UserError(f"model = {settings.model!r}: not with dp-noise-multiplier above 0: {reason}")
        if importlib.util.find_spec("dp_accounting") is None:
            how = "`pip install -e '.[dp]'` in the checkout"
            raise UserError(f"dp-noise-multiplier above 0: needs the package dp-accounting; {how}")
