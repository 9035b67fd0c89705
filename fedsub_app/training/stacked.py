"""Clients of one shape trained together: every operation once for all of them, on weights stacked [clients, ...].

A step of a small network takes as long as its many operations take to start, on a CPU and more so on a GPU. The
computation is the same as one client after the other, but sums are taken in another order: the numbers agree up to
float rounding, and depend on the clients that are trained together. Therefore it needs the setting ``stack-clients``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedsub_app.common.errors import one_line
from fedsub_app.common.inputs import blank, joined
from fedsub_app.common.tensors import Tensors, brought
from fedsub_app.models import Network
from fedsub_app.models.sources import about
from fedsub_app.settings import Settings
from fedsub_app.training import costs
from fedsub_app.training.client import ClientTools
from fedsub_app.training.optimizer import Optimizer

MAX_STACKED = 64  # clients together; beyond it a step is bound by arithmetic, and memory grows


def unstackable(settings: Settings, network: Network) -> str:
    """Return the setting that ``stack-clients`` excludes, as "key = value: reason", or ""."""
    if settings.objective != "none":
        return f"objective = {settings.objective}: its term is of one client's network"
    if settings.attack != "none":
        return f"attack = {settings.attack}: of one client"
    if settings.augment != "none":
        return f"augment = {settings.augment}: drawn client by client"
    if any(name.endswith("running_mean") for name in network.tensors):
        return f"model = {settings.model}: has BatchNorm, whose running statistics are one client's"
    if known := about(network.module):
        stacked = {name: torch.stack([tensor.detach()] * 2) for name, tensor in network.tensors.items()}
        x = joined([blank(2, known.in_shape, network.device)] * 2, torch.stack)
        network.training_mode()
        try:
            vmap(lambda own, batch: functional_call(network.module, own, (batch,)))(stacked, x)
        except Exception as error:  # code of others; dropout, whose draws are one client's
            return f"model = {settings.model}: {one_line(error)[:100]}"
    return ""


def fit_together(clients: Sequence[ClientTools], sent: Sequence[Tensors]) -> list[Tensors]:
    """Train clients with equally many samples as :meth:`ClientTools.fit` does; returns their tensors.

    Parameters
    ----------
    clients : the clients, whose metrics and FLOPs are set as by ``fit``.
    sent : the received tensors of each client: a whole network, or a narrower one, of one shape for all.
    """
    first, count = clients[0], len(clients)
    place, settings, task = first.place, first.settings, first.place.problem.task
    network = place.network_for(sent[0])
    network.training_mode()
    there = brought({name: torch.stack([one[name] for one in sent]) for name in network.tensors}, place.device)
    tensors = {name: tensor.clone().requires_grad_(name in network.parameters) for name, tensor in there.items()}
    optimizer = Optimizer(settings, {name: tensors[name] for name in network.parameters}, settings.lr_at(first.round))
    orders = [list(client.batches()) for client in clients]
    x = joined([client.x[:] for client in clients], torch.stack)
    y = torch.stack([client.y for client in clients])
    forward = vmap(lambda weights, batch: functional_call(network.module, weights, (batch,)))
    each = torch.arange(count, device=y.device)[:, None]
    total, seen = torch.zeros(count, device=y.device), sum(map(len, orders[0]))
    for batches in zip(*orders, strict=True):
        batch = torch.stack(batches).to(y.device)
        logits: Tensor = forward(tensors, x[each, batch])
        losses = task.loss(logits.flatten(0, 1), y[each, batch].flatten(0, 1), "none").view(count, -1)
        optimizer.step(optimizer.gradients(losses.mean(1).sum()))  # a client's weights move only its own loss
        total += losses.detach().sum(1)
    for client, loss in zip(clients, total.tolist(), strict=True):
        if seen:
            client.metrics["train-loss"] = loss / seen
        client.flops += seen * place.training_flops(network)
        client.published_flops += seen * costs.published_flops(place.forward_flops(network), False)
    trained = brought({name: tensor.detach() for name, tensor in tensors.items()})
    return [{name: tensor[number] for name, tensor in trained.items()} for number in range(count)]
