"""What a run's masks and models show: which clients cover a unit, activations, overlap of masks, clients' accuracies.

Activations: Tastan et al., FedPeWS, 2024, Section D (Figures 14 and 15). Overlap of personal masks: Tamirisa et al.,
FedSelect, 2024, Figure 4. Overlap of masks against that of labels: what Vahidian et al., Sub-FedAvg, 2021, claim of
their sub-networks in Section 3.1 and do not show.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.methods import METHODS
from fedsub_app.models import build_model, load_tensors
from fedsub_app.models.units import UnitGroup
from fedsub_app.runs.directory import checkpoints, read_checkpoint, read_rounds, settings_of
from fedsub_app.runs.report import COLOURS, figure
from fedsub_app.settings import Settings
from fedsub_app.subnets.masks import split
from strategies.base import SubnetStrategy

COVERED_BY = ("no client", "one client", "several clients")


def analyse(folder: Path, samples: int) -> list[Path]:
    """Write and draw what a run's directory can tell; returns the files.

    ``coverage.csv`` and ``.png``: how many hidden units no client, one and several cover, per warm-up round.
    ``activations.csv`` and ``.png``: per checkpoint, layer and client (the first four) the mean activation of a unit on
    ``samples`` training samples of the client, of all units, of those of its sub-network and of the others. A channel's
    activation is the sum over its positions. Sub-networks are those of the last checkpoint.
    ``overlap.csv``, ``.png`` and ``overlap-rounds.png``, where clients have personal positions: intersection over union
    of the clients' masks, mean of all pairs per checkpoint and layer, and each pair at the last checkpoint.
    ``overlap-labels.csv`` and ``.png``: the same of the last checkpoint, of pairs that have so many labels in common.
    ``personal.csv`` and ``.png``: personal fraction and bytes per round. ``clients.csv`` and ``.png``: each client's
    last measured accuracies.

    Raises
    ------
    UserError
        The folder is not that of a run, or holds neither masked rounds nor checkpoints.
    """
    settings = settings_of({"run-dir": str(folder), "resume": True})
    lines, files = read_rounds(folder), []
    masked = [line for line in lines if "units-covered-by" in line]
    if masked:
        files += _coverage(folder, masked)
    if paths := checkpoints(folder):
        strategy = _strategy(settings)
        files += _activations(folder, strategy, paths, samples, masked[-1]["round"] if masked else 0)
        files += _overlap(folder, strategy, paths)
    if growing := [line for line in lines if "personal-fraction" in line]:
        files += _personal(folder, growing)
    if measured := [line for line in lines if line.get("evaluated")]:
        files += _clients(folder, measured[-1])
    if not files:
        raise UserError(f"{folder}: nothing to analyse: no checkpoint, no masks, no client was evaluated")
    return files


def _strategy(settings: Settings) -> SubnetStrategy:
    """Return the server side of the run's method, which reads the clients' masks from its state."""
    dataset = load_dataset(settings.data)
    model = build_model(
        settings.model, tuple(dataset.train_x.shape[1:]), dataset.num_classes, settings.seed, settings.hidden_width
    )
    return METHODS[settings.method].strategy(settings, model)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([header, *rows])
    return path


def _coverage(folder: Path, lines: Sequence[Json]) -> list[Path]:
    rows = []
    for line in lines:
        none, one, *several = line["units-covered-by"]
        rows.append([line["round"], none, one, sum(several)])
    drawing = figure(6, 4)
    axes = drawing.subplots()
    for column, name in enumerate(COVERED_BY, 1):
        axes.plot([row[0] for row in rows], [row[column] for row in rows], color=COLOURS[column - 1], label=name)
    axes.set(xlabel="round", ylabel="hidden units covered by", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
    drawing.savefig(folder / "coverage.png", dpi=120)
    return [_write_csv(folder / "coverage.csv", ("round", *COVERED_BY), rows), folder / "coverage.png"]


def unit_activations(model: nn.Module, groups: Sequence[UnitGroup], x: Tensor) -> dict[str, Tensor]:
    """Return every hidden unit's activation (ReLU of its layer's output), summed over a batch and over positions.

    Parameters
    ----------
    model : the network, in the mode it is to be run in.
    groups : its unit groups.
    x : inputs ``[n, ...]``.

    Returns
    -------
    group name -> float ``[group.size]``.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name] = torch.relu(output.detach()).transpose(0, 1).flatten(1).sum(1)

        return hook

    last = {group.name: model.get_submodule(group.rows[-1].rpartition(".")[0]) for group in groups}
    handles = [layer.register_forward_hook(keep(name)) for name, layer in last.items()]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _activations(
    folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], samples: int, warm_up: int
) -> list[Path]:
    """``warm_up``: number of the last warm-up round, 0 without one."""
    settings, model, groups = strategy.settings, strategy.model.eval(), strategy.units
    dataset, partition = load_dataset(settings.data), make_partition(settings.data, settings.partitioning)
    clients = range(min(settings.num_clients, 4))
    batches = []
    for client in clients:
        index = partition.train[client]
        order = torch.randperm(len(index), generator=generator(settings.seed, 0, client, "activations"))
        batches.append(dataset.train_x[index[order[:samples]]])
    rounds, history = [], []  # history[checkpoint][client]: group name -> [size]
    for path in paths:
        checkpoint = read_checkpoint(path)
        load_tensors(model, checkpoint.model)
        rounds.append(checkpoint.round)
        history.append([unit_activations(model, groups, x) for x in batches])
    strategy.load_state(checkpoint.state)
    own = strategy.unit_masks()
    rows = []
    for number, found in zip(rounds, history, strict=True):
        for client in clients:
            for group in groups:
                per_unit = found[client][group.name] / len(batches[client])
                parts = [per_unit]
                if own is not None:
                    mask = split(own[client], groups)[group.name]
                    parts += [per_unit[mask], per_unit[~mask]]
                rows.append([number, client, group.name, *(f"{part.mean():.5g}" for part in parts)])
    drawing = figure(3.2 * len(groups), 2.4 * len(clients))
    grid = drawing.subplots(len(clients), len(groups), squeeze=False)
    for client in clients:
        for column, group in enumerate(groups):
            axes = grid[client][column]
            values = torch.stack([found[client][group.name] for found in history]).T
            axes.pcolormesh(rounds, range(group.size), values, shading="nearest", cmap="viridis", rasterized=True)
            if rounds[0] < warm_up < rounds[-1]:
                axes.axvline(warm_up, color="white", linestyle="--", linewidth=1)
            axes.locator_params(axis="x", integer=True)
            axes.set_title(f"client {client}, {group.name}", fontsize="small")
        grid[client][0].set_ylabel("unit")
    for axes in grid[-1]:
        axes.set_xlabel("round")
    drawing.savefig(folder / "activations.png", dpi=120)
    header = ("round", "client", "layer", "all units", "own units", "other units")[: 4 if own is None else 6]
    return [_write_csv(folder / "activations.csv", header, rows), folder / "activations.png"]


def overlap(masks: Sequence[Tensor]) -> Tensor:
    """Return the intersection over union of every pair of masks, float [N, N]; 1 where both are empty.

    Parameters
    ----------
    masks : bool, all of one shape.
    """
    flat = torch.stack([mask.flatten() for mask in masks]).float()
    both = flat @ flat.T
    sizes = flat.sum(1)
    either = sizes[:, None] + sizes[None, :] - both
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def _overlap(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path]) -> list[Path]:
    rows: list[list[Any]] = []
    rounds = []
    last: dict[str, Tensor] = {}
    pairs = ~torch.eye(strategy.settings.num_clients, dtype=torch.bool)
    for path in paths:
        checkpoint = read_checkpoint(path)
        strategy.load_state(checkpoint.state)
        masks = strategy.position_masks()
        if masks is None:
            return []
        last = {name: overlap([of_client[name] for of_client in masks]) for name in masks[0]}
        rounds.append(checkpoint.round)
        rows += [[checkpoint.round, name, f"{found[pairs].mean():.4f}"] for name, found in last.items()]
    columns = min(6, len(last))
    lines = -(-len(last) // columns)
    drawing = figure(2.2 * columns, 2.3 * lines)
    grid = drawing.subplots(lines, columns, squeeze=False).flatten()
    for number, (axes, (name, found)) in enumerate(zip(grid, last.items(), strict=False)):
        image = axes.imshow(found, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(name.removesuffix(".weight"), fontsize="small")
        axes.locator_params(integer=True)
        axes.set(xlabel="client", ylabel="" if number % columns else "client")
    for axes in grid[len(last) :]:
        axes.set_axis_off()
    drawing.colorbar(image, ax=grid.tolist(), label="intersection over union", shrink=0.8)
    drawing.savefig(folder / "overlap.png", dpi=120)
    names = list(last)
    over_rounds = figure(8, 2 + 0.15 * len(names))
    axes = over_rounds.subplots()
    means = np.array([float(mean) for _, _, mean in rows]).reshape(-1, len(names)).T
    image = axes.imshow(means, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    labelled = range(0, len(rounds), -(-len(rounds) // 20))  # at most 20 labels, which then do not touch
    axes.set_xticks(labelled, [str(rounds[column]) for column in labelled], fontsize="small")
    axes.set_yticks(range(len(names)), [name.removesuffix(".weight") for name in names], fontsize="x-small")
    axes.set_xlabel("round")
    over_rounds.colorbar(image, ax=axes, label="mean overlap")
    over_rounds.savefig(folder / "overlap-rounds.png", dpi=120)
    written = _write_csv(folder / "overlap.csv", ("round", "layer", "mean overlap"), rows)
    pictures = [folder / "overlap.png", folder / "overlap-rounds.png"]
    return [written, *pictures, *_overlap_by_labels(folder, strategy.settings, last)]


def _overlap_by_labels(folder: Path, settings: Settings, found: dict[str, Tensor]) -> list[Path]:
    """``found``: layer -> overlap of every pair of clients."""
    counts = make_partition(settings.data, settings.partitioning).class_counts(load_dataset(settings.data))
    pairs = torch.ones(len(counts), len(counts)).triu(1).bool()
    labels = overlap(list(counts > 0))[pairs]
    rows: list[list[Any]] = []
    drawing = figure(6, 4)
    axes = drawing.subplots()
    for number, (name, of_pairs) in enumerate(found.items()):
        alike = [(float(shared), of_pairs[pairs][labels == shared]) for shared in labels.unique()]
        rows += [[name, f"{shared:.4f}", len(values), f"{values.mean():.4f}"] for shared, values in alike]
        means = [float(values.mean()) for _, values in alike]
        axes.plot([shared for shared, _ in alike], means, "o-", color=COLOURS[number % len(COLOURS)], label=name)
    axes.set(xlabel="labels in common (intersection over union)", ylabel="mean overlap of masks", ylim=(0, 1.02))
    if len(found) <= len(COLOURS):
        axes.legend(fontsize="small")
    drawing.savefig(folder / "overlap-labels.png", dpi=120)
    header = ("layer", "labels in common", "pairs", "mean overlap")
    return [_write_csv(folder / "overlap-labels.csv", header, rows), folder / "overlap-labels.png"]


def _personal(folder: Path, lines: Sequence[Json]) -> list[Path]:
    rows = [[line["round"], f"{line['personal-fraction']:.5f}", line["bytes-down"], line["bytes-up"]] for line in lines]
    drawing = figure(8, 3.5)
    left, right = drawing.subplots(1, 2)
    numbers = [line["round"] for line in lines]
    left.plot(numbers, [line["personal-fraction"] for line in lines], color=COLOURS[0])
    left.set(xlabel="round", ylabel="personal fraction", ylim=(0, 1))
    for colour, way in enumerate(("down", "up")):
        right.plot(numbers, [line[f"bytes-{way}"] / 1e6 for line in lines], color=COLOURS[colour], label=way)
    right.set(xlabel="round", ylabel="MB sent a round", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
    drawing.savefig(folder / "personal.png", dpi=120)
    header = ("round", "personal fraction", "bytes down", "bytes up")
    return [_write_csv(folder / "personal.csv", header, rows), folder / "personal.png"]


def _clients(folder: Path, line: Json) -> list[Path]:
    found = {int(client): metrics for client, metrics in line["evaluated"].items()}
    kinds = sorted({key for metrics in found.values() for key in metrics if key.endswith("-accuracy")})
    drawing = figure(min(14.0, 3 + 0.3 * len(found)), 3.5)
    axes = drawing.subplots()
    for colour, kind in enumerate(kinds):
        values = sorted(metrics[kind] for metrics in found.values() if kind in metrics)
        label = f"{kind.removesuffix('-accuracy')}: {values[0]:.1f} to {values[-1]:.1f} %"
        axes.plot(range(len(values)), values, "o-", color=COLOURS[colour], label=label)
    axes.set(xlabel="clients, sorted by accuracy", ylabel="accuracy (%)", title=f"round {line['round']}")
    axes.legend()
    drawing.savefig(folder / "clients.png", dpi=120)
    rows = [[client, *(metrics.get(kind, "") for kind in kinds)] for client, metrics in sorted(found.items())]
    return [_write_csv(folder / "clients.csv", ("client", *kinds), rows), folder / "clients.png"]
