"""The masks of a run's clients, read from its checkpoints, and their overlap."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedsub_app.models.groups import split
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.directory import settings_in
from fedsub_app.runs.methods import METHODS
from fedsub_app.settings import Settings
from fedsub_app.training.problem import Problem
from strategies.base import SubnetStrategy


def strategy_of(settings: Settings) -> SubnetStrategy:
    """Return the server side of a run's method, whose state holds the clients' masks."""
    return METHODS[settings.method].strategy(settings, Problem.of(settings).network())


def overlap(layers: Iterable[Tensor]) -> Tensor:
    """Return intersection over union of every pair of N clients' masks over all layers, float [N, N].

    ``layers``: bool [N, n] each. The overlap of two empty masks is 1.
    """
    both = torch.stack([kept.float() @ kept.float().T for kept in layers]).sum(0)  # positions that each pair shares
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


class Masks(NamedTuple):
    """The clients' masks at a run's last checkpoint.

    ``kind``: ``units`` of hidden layers, or ``positions`` of weight tensors. ``round``: round of the checkpoint.
    ``layers``: names of the layers. ``shares``: client -> layer -> fraction of it in the client's mask, 0 to 1.
    ``overlap``: client -> client -> intersection over union of both masks, over all layers, 0 to 1.
    """

    kind: str
    round: int
    layers: list[str]
    shares: list[list[float]]
    overlap: list[list[float]]


def last_masks(folder: Path) -> Masks | None:
    """Return the clients' masks at the last checkpoint; ``None`` where the method has none."""
    paths = checkpoints(folder)
    checkpoint = read_checkpoint(paths[-1]) if paths else None
    if checkpoint is None or not checkpoint.state:
        return None
    strategy = strategy_of(settings_in(folder))
    strategy.load_state(checkpoint.state)
    units = strategy.unit_masks()
    if units is not None:
        kind = "units"
        layers = {name: kept.T for name, kept in split(units.T, strategy.units).items()}  # bool [clients, size]
    elif positions := strategy.position_masks():
        kind = "positions"
        layers = {name: torch.stack([masks[name].flatten() for masks in positions]) for name in positions[0]}
    else:
        return None
    shares = torch.stack([kept.float().mean(1) for kept in layers.values()], 1)
    names = [name.removesuffix(".weight") for name in layers]
    return Masks(kind, checkpoint.round, names, shares.tolist(), overlap(layers.values()).tolist())
