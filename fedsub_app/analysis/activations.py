"""Analysis of a run's masks and models: the units of clients, activations, overlap of masks.

Activations: Tastan et al., FedPeWS, 2024, Section D (Figures 14 and 15). Overlap of masks: Tamirisa et al., FedSelect,
2024, Figure 4. Score against what the masks leave out: Vahidian et al., Sub-FedAvg, 2021, Figures 1, 2.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch
from fedsub_app.common.score import Score
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json
from fedsub_app.data import make_partition
from fedsub_app.models import UnitGroup, load_tensors, split
from fedsub_app.reports.export import write_csv
from fedsub_app.reports.pictures import COLOURS, figure, legend_beside
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.directory import settings_in
from fedsub_app.runs.masks import overlap, strategy_of
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.training.problem import Problem
from strategies.base import SubnetStrategy

log = logging.getLogger("fedsub")
SAMPLES = 256


def analyse(folder: Path) -> list[Path]:
    """Analyse the directory of a run; write tables and pictures into it and return their paths.

    ``activations.csv`` and ``.png``: per checkpoint, layer and client (the first four) the mean activation of a unit on
    ``SAMPLES`` training samples of the client, of all units, of those of its sub-network and of the others. A channel's
    activation is the sum over its positions. Sub-networks are those of the last checkpoint.
    ``overlap.csv``, ``.png`` and ``overlap-rounds.png``, where several clients have personal positions: intersection
    over union of their masks, mean of all pairs of clients that had been trained by then per checkpoint and layer, and
    each pair at the last checkpoint.
    ``mask-size.csv`` and ``.png``: score of a client's own model against the part of the network outside its mask,
    at each checkpoint that was evaluated, of the clients that had been trained by then.
    """
    settings = settings_in(folder)
    settings.need_data()
    lines, paths = read_rounds(folder), checkpoints(folder)
    if not paths:
        raise UserError(f"{folder}: nothing to analyse: no checkpoint")
    if settings.keep_checkpoints and len(paths) < max((line["round"] for line in lines), default=0):
        kept = ", ".join(str(int(path.stem.rpartition("-")[2])) for path in paths)
        log.warning("checkpoints: rounds %s; a run with keep-checkpoints = 0 keeps all, and shows all", kept)
    strategy = strategy_of(settings)
    staged = [line["round"] for line in lines if "stage" in line]
    overlaps = _overlap(folder, strategy, paths, lines)
    try:
        return [*_activations(folder, strategy, paths, max(staged, default=0)), *overlaps]
    except UserError as error:  # a network without units
        if not overlaps:
            raise
        log.warning("no activations: %s", error)
        return overlaps


def unit_activations(model: nn.Module, groups: Sequence[UnitGroup], x: Batch) -> dict[str, Tensor]:
    """Return hidden units' activations (ReLU outputs) summed over batch and positions: float ``[group.size]`` each."""
    activations: dict[str, Tensor] = {}

    def keep(group: UnitGroup, module: nn.Module, inputs: Any, output: Tensor) -> None:
        channels = torch.relu(output.detach()).movedim(-1 if isinstance(module, nn.Linear) else 1, 0)
        activations[group.name] = channels.flatten(1).sum(1).view(group.size, -1).sum(1)

    with torch.no_grad(), ExitStack() as hooks:
        for group in groups:
            last = model.get_submodule(_end(model, group))
            hooks.enter_context(last.register_forward_hook(partial(keep, group)))
        model(x)
    return activations


def _end(model: nn.Module, group: UnitGroup) -> str:
    """Return the last layer before a group's ReLU: the one that produces the units, or the BatchNorm behind it."""
    if group.chain:
        return group.rows[-1].rpartition(".")[0]
    layers = [*dict.fromkeys(row.rpartition(".")[0] for row in group.rows), ""]
    behind = layers[layers.index(group.name) + 1] if group.name in layers else ""
    return behind if isinstance(model.get_submodule(behind), nn.BatchNorm1d | nn.BatchNorm2d) else group.name


def _activations(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], last_staged: int) -> list[Path]:
    """``last_staged``: last round of a stage of its own, such as a warm-up; 0 without one."""
    settings, model, groups = strategy.settings, strategy.model.eval(), strategy.units
    data = Problem.of(settings).data
    partition = make_partition(data, settings.partitioning)
    clients = range(min(settings.num_clients, 4))
    batches = []
    for client in clients:
        index = partition.train[client]
        order = torch.randperm(len(index), generator=generator(settings.seed, 0, client, "activations"))
        batches.append(data.train_x[index[order[:SAMPLES]]])
    rounds, history = [], []  # history[checkpoint][client]: group name -> [size]
    for path in paths:
        checkpoint = read_checkpoint(path)
        load_tensors(model, checkpoint.model)
        rounds.append(checkpoint.round)
        history.append([unit_activations(model, groups, x) for x in batches])
    strategy.load_state(checkpoint.state)
    unit_masks = strategy.unit_masks()
    rows = []
    for number, found in zip(rounds, history, strict=True):
        for client in clients:
            for group in groups:
                per_unit = found[client][group.name] / len(batches[client])
                parts = [per_unit]
                if unit_masks is not None:
                    mask = split(unit_masks[client], groups)[group.name]
                    parts += [per_unit[mask], per_unit[~mask]]
                rows.append([number, client, group.name, *(f"{part.mean():.5g}" for part in parts)])
    drawing = figure(3.2 * len(groups), 2.4 * len(clients))
    grid = drawing.subplots(len(clients), len(groups), squeeze=False)
    for client, row in enumerate(grid):
        for group, axes in zip(groups, row, strict=True):
            values = torch.stack([found[client][group.name] for found in history]).T
            _heat_map(axes, rounds, values, rasterized=True)
            if rounds[0] < last_staged < rounds[-1]:
                axes.axvline(last_staged, color="white", linestyle="--", linewidth=1)
            axes.locator_params(axis="x", nbins=6, integer=True)
            axes.set_title(f"client {client}, {group.name}", fontsize="small")
        row[0].set_ylabel("unit")
    for axes in grid[-1]:
        axes.set_xlabel("round")
    drawing.savefig(folder / "activations.png", dpi=120)
    header = ("round", "client", "layer", "all units", "own units", "other units")[: 4 if unit_masks is None else 6]
    return [write_csv(folder / "activations.csv", header, rows), folder / "activations.png"]


def _overlap(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], lines: Sequence[Json]) -> list[Path]:
    """Write and draw the overlap of the masks in some checkpoints; nothing where clients have no personal positions."""
    means: dict[int, list[float]] = {}  # round of a checkpoint -> mean overlap of each layer
    outside: dict[int, list[float]] = {}
    last: dict[str, Tensor] = {}
    others, first = ~torch.eye(strategy.settings.num_clients, dtype=torch.bool), _first_trained(lines)
    for path in paths:
        checkpoint = read_checkpoint(path)
        strategy.load_state(checkpoint.state)
        masks = strategy.position_masks()
        if masks is None:
            return []
        names = [name.removesuffix(".weight") for name in masks[0]]
        last = {name: overlap([torch.stack([of[name].flatten() for of in masks])]) for name in masks[0]}
        ours = torch.tensor([first.get(client, math.inf) <= checkpoint.round for client in range(len(masks))])
        if (pairs := others & ours & ours[:, None]).any():
            means[checkpoint.round] = [float(overlaps[pairs].mean()) for overlaps in last.values()]
        inside = [sum(int(mask.sum()) for mask in of_client.values()) for of_client in masks]
        total = sum(mask.numel() for mask in masks[0].values())
        outside[checkpoint.round] = [100.0 * (1 - count / total) for count in inside]
    sizes = _mask_size(folder, strategy.score, outside, lines)
    if not means:  # one client
        return sizes
    files = [folder / name for name in ("overlap.csv", "overlap.png", "overlap-rounds.png")]
    rows = [[r, layer, f"{mean:.4f}"] for r, of in means.items() for layer, mean in zip(last, of, strict=True)]
    write_csv(files[0], ("round", "layer", "mean overlap"), rows)
    wide = min(6, len(last))
    high = -(-len(last) // wide)
    drawing = figure(2.2 * wide, 2.3 * high)
    grid = drawing.subplots(high, wide, squeeze=False).flatten()
    for axes, name, overlaps in zip(grid, names, last.values(), strict=False):
        image = axes.imshow(overlaps, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(name, fontsize="small")
        axes.locator_params(integer=True)
    for axes in grid[len(last) :]:
        axes.set_axis_off()
    drawing.supxlabel("client")
    drawing.supylabel("client")
    drawing.colorbar(image, ax=grid.tolist(), label="intersection over union", shrink=0.8)
    drawing.savefig(files[1], dpi=120)
    over_rounds = figure(8, 2 + 0.15 * len(names))
    axes = over_rounds.subplots()
    table = np.array(list(means.values())).T
    image = _heat_map(axes, list(means), table, vmin=0, vmax=1)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("round")
    over_rounds.colorbar(image, ax=axes, label="mean overlap")
    over_rounds.savefig(files[2], dpi=120)
    return files + sizes


def _heat_map(axes: Any, rounds: Sequence[int], values: Any, **how: Any) -> Any:
    """Draw values [rows, rounds]; by itself pcolormesh gives a single round, or a single row, no room."""
    edges = []
    for centres in (np.array(rounds, float), np.arange(float(len(values)))):
        middles = (centres[1:] + centres[:-1]) / 2
        first, last = (middles[0], middles[-1]) if len(middles) else (centres[0] + 0.5, centres[0] - 0.5)
        edges.append([2 * centres[0] - first, *middles, 2 * centres[-1] - last])
    return axes.pcolormesh(*edges, values, cmap="viridis", **how)


def _first_trained(lines: Sequence[Json]) -> dict[int, int]:
    """Return the round in which the server first merged a client's reply, of the clients that had one."""
    first: dict[int, int] = {}
    for line in lines:
        others = {drop["client"] for drop in line.get("dropped", ())} | {*line.get("not-waited-for", ())}
        for client in () if line.get("status") == "abandoned" else {*line.get("clients", ())} - others:
            first.setdefault(client, line["round"])
    return first


def _mask_size(folder: Path, score: Score, outside: Mapping[int, Sequence[float]], lines: Sequence[Json]) -> list[Path]:
    """``outside``: round of a checkpoint -> percent outside each client's mask."""
    key = f"personal-{score.name}"
    rows: list[tuple[int, int, float, float]] = []  # round, client, percent outside, score
    first = _first_trained(lines)
    for line in lines:
        for client, metrics in line.get("evaluated", {}).items():
            if line["round"] in outside and first.get(int(client), math.inf) <= line["round"] and key in metrics:
                rows.append((line["round"], int(client), outside[line["round"]][int(client)], metrics[key]))
    if not rows:
        return []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    table = np.array(rows)
    axes.scatter(table[:, 2], table[:, 3], s=4, color="0.7", label="a client in a round")
    for number, client in enumerate(sorted(first)[:4]):
        axes.plot(*table[table[:, 1] == client, 2:].T, ".-", color=COLOURS[number], label=f"client {client}")
    means = [table[table[:, 0] == number, 2:].mean(0) for number in np.unique(table[:, 0])]
    axes.plot(*np.array(means).T, "o-", color="black", label="mean of a round")
    axes.set(xlabel="outside the client's mask (%)", ylabel=score.titled(f"{score.name} of the client's own model"))
    legend_beside(drawing)
    drawing.savefig(folder / "mask-size.png", dpi=120)
    written: list[list[Any]] = [[r, client, f"{part:.2f}", score.number(value)] for r, client, part, value in rows]
    header = ("round", "client", "outside its mask (%)", key)
    return [write_csv(folder / "mask-size.csv", header, written), folder / "mask-size.png"]
