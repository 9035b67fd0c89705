"""Whether the clients' devices can hold what they would be sent; checked by the plan and before round 1."""

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import size_of
from fedsub_app.common.text import human_bytes
from fedsub_app.data import Partition
from fedsub_app.federation.nodes import held_out
from fedsub_app.federation.protocol import formula_bytes
from fedsub_app.models import base_bytes
from fedsub_app.problem import Problem
from fedsub_app.settings import Settings
from strategies.base import SubnetStrategy


def client_bytes(settings: Settings, network: int, samples: float) -> float:
    """Return the bytes of a client that trains: network, gradients, received model, optimizer state, samples."""
    state = {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 1}[settings.optimizer] + bool(settings.momentum)
    return (3 + state) * network + samples


def check_devices(strategy: SubnetStrategy, problem: Problem, partition: Partition | None) -> list[tuple[str, str]]:
    """Return each class of devices and, in words, its clients and what the one with most samples needs in round 1."""
    settings, method, rows = strategy.settings, strategy.settings.method, []
    strategy.round, able = 1, not strategy.devices
    sizes = [len(indices) for indices in partition.train] if partition else [0] * settings.num_clients
    members = sorted({*range(settings.num_clients)} - held_out(settings))
    for device in strategy.devices.classes if strategy.devices else ():
        clients = [client for client in members if strategy.devices.of(client) is device]  # type: ignore[union-attr]
        named, needs = f"class {device.name} holds", "none takes part"
        if clients and device.width >= settings.min_width:
            if device.width < settings.model_width and not strategy.narrows:
                allowed = f"min-width = {settings.model_width:g}, model-width = {device.width:g} or a method of widths"
                whole = f"width {device.width:g}, method = {method!r} trains the whole network; allowed are {allowed}"
                raise UserError(f"devices: {named} {whole}")
            largest = max(clients, key=sizes.__getitem__)
            network = formula_bytes(strategy.network_of(largest))
            samples = sizes[largest] * size_of(problem.data.in_shape)
            needed = client_bytes(settings, network, samples) + base_bytes(strategy.model)
            if device.memory_mb and needed > device.memory_mb * 1e6:
                less = f"memory-mb = {device.memory_mb:g}, a client of {method} needs {human_bytes(needed)}"
                raise UserError(f"devices: {named} {less}")
            able, needs = True, f"a network of {human_bytes(network)}, {human_bytes(needed)} in training"
        rows.append((device.name, f"{len(clients)} clients of width {device.width:g}, {needs}"))
    if not able:
        raise UserError(f"min-width = {settings.min_width:g}: no client has a device of that width")
    return rows
