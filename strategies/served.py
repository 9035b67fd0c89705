"""Scores by whom they serve: widths, device classes, the worst tenth of the clients, the held-out clients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import held_out
from fedsub_app.federation.protocol import Update
from strategies.hooks import Hooks


def by_client(strategy: Hooks, updates: Sequence[Update]) -> Json:
    """Return, for each score of the clients, its mean over groups of clients: score -> group -> mean.

    The groups are the clients of each device class, the worst tenth of all of them, and the held-out clients, which are
    in no other group. The result is empty without ``devices`` and ``held-out-clients``.
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
        if means := {name: fmean(values) for name, values in groups.items() if values}:
            served[key] = means
    return served


def by_width(strategy: Hooks, whole: Mapping[str, float], test: Callable[[Tensors], Mapping[str, float]]) -> Json:
    """Return the score of the global model's network of each width that a device holds: score -> width -> value.

    Parameters
    ----------
    whole : scores of the global model.
    test : tensors of a network -> its scores on the same test set.
    """
    classes, key = strategy.devices.classes if strategy.devices else (), f"global-{strategy.score.name}"
    most, tested = strategy.settings.model_width, {}
    for width in sorted({min(device.width, most) for device in classes}):
        with suppress(UserError):  # a network whose units cannot be removed has one width
            tested[f"width {width:g}"] = (whole if width == most else test(strategy.network_at(width / most)))[key]
    return {key: tested} if tested else {}
