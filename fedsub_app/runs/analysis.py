"""What a run's masks and models show: which clients cover a unit, activations, overlap of masks, clients' accuracies.

Activations: Tastan et al., FedPeWS, 2024, Section D (Figures 14 and 15). Overlap of personal masks: Tamirisa et al.,
FedSelect, 2024, Figure 4. Accuracy against what the masks leave out: Vahidian et al., Sub-FedAvg, 2021, Figures 1, 2.
Overlap of masks against that of labels: what they claim of their sub-networks in Section 3.1 and do not show.
"""

import csv
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.methods import METHODS
from fedsub_app.models import build_model, load_tensors
from fedsub_app.models.units import UnitGroup
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.directory import settings_of
from fedsub_app.runs.pictures import COLOURS, figure, legend_beside
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import Settings
from fedsub_app.subnets.masks import split
from strategies.base import SubnetStrategy

log = logging.getLogger("fedsub")
COVERED_BY = ("no client", "one client", "several clients")


def analyse(folder: Path, samples: int) -> list[Path]:
    """Write and draw what a run's directory can tell; returns the files.

    ``coverage.csv`` and ``.png``: how many hidden units no client, one and several cover, per warm-up round.
    ``activations.csv`` and ``.png``: per checkpoint, layer and client (the first four) the mean activation of a unit on
    ``samples`` training samples of the client, of all units, of those of its sub-network and of the others. A channel's
    activation is the sum over its positions. Sub-networks are those of the last checkpoint.
    ``overlap.csv``, ``.png`` and ``overlap-rounds.png``, where several clients have personal positions: intersection
    over union of their masks, mean of all pairs per checkpoint and layer, and each pair at the last checkpoint.
    ``overlap-labels.csv`` and ``.png``: the same of the last checkpoint, of pairs that have so many labels in common,
    what independent masks of those sizes would have, and the correlation over all pairs of what is above that with the
    labels in common.
    ``mask-size.csv`` and ``.png``: accuracy of a client's own model against the part of the network outside its mask,
    at each checkpoint that was evaluated, of the clients that had been trained by then.
    ``units.csv`` and ``.png``, where clients have sub-networks: the units of each client at the last checkpoint.
    ``personal.csv`` and ``.png``: personal fraction and bytes per round. ``clients.csv`` and ``.png``: each client's
    last measured accuracies.

    Raises
    ------
    UserError
        The folder is not that of a run, or holds neither masked rounds nor checkpoints.
    """
    settings = settings_of({"run-dir": str(folder), "resume": True})
    settings.need_data()
    lines, files = read_rounds(folder), []
    masked = [line for line in lines if "units-covered-by" in line]
    if masked:
        files += _coverage(folder, masked)
    if paths := checkpoints(folder):
        if settings.keep_checkpoints and len(paths) < max((line["round"] for line in lines), default=0):
            kept = ", ".join(str(int(path.stem.rpartition("-")[2])) for path in paths)
            log.warning("checkpoints: rounds %s; a run with keep-checkpoints = 0 keeps all, and shows all", kept)
        strategy = _strategy(settings)
        files += _activations(folder, strategy, paths, samples, masked[-1]["round"] if masked else 0)
        files += _units(folder, strategy)
        files += _overlap(folder, strategy, paths, lines)
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


def labelled(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most so many of some numbers, from the first on and evenly, whose labels then do not touch."""
    return list(numbers[:: -(-len(numbers) // most)])


def _coverage(folder: Path, lines: Sequence[Json]) -> list[Path]:
    rows = []
    for line in lines:
        none, one, *several = line["units-covered-by"]
        rows.append([line["round"], none, one, sum(several)])
    drawing = figure(8, 4)
    axes = drawing.subplots()
    for column, name in enumerate(COVERED_BY, 1):
        axes.plot([row[0] for row in rows], [row[column] for row in rows], color=COLOURS[column - 1], label=name)
    axes.set(xlabel="round", ylabel="hidden units covered by", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    legend_beside(drawing)
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
            axes.set_xticks(labelled(rounds, 6))
            axes.set_title(f"client {client}, {group.name}", fontsize="small")
        grid[client][0].set_ylabel("unit")
    for axes in grid[-1]:
        axes.set_xlabel("round")
    drawing.savefig(folder / "activations.png", dpi=120)
    header = ("round", "client", "layer", "all units", "own units", "other units")[: 4 if own is None else 6]
    return [_write_csv(folder / "activations.csv", header, rows), folder / "activations.png"]


def _units(folder: Path, strategy: SubnetStrategy) -> list[Path]:
    """``strategy`` holds the state of the last checkpoint."""
    masks = strategy.unit_masks()
    if masks is None:
        return []
    of_groups = split(masks.T, strategy.units)  # group name -> bool [size, clients]
    drawing = figure(2.5 * len(of_groups), 4)
    grid = drawing.subplots(1, len(of_groups), squeeze=False)[0]
    for axes, (name, kept) in zip(grid, of_groups.items(), strict=True):
        axes.imshow(kept.T, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
        axes.set_title(f"{name}: {kept.sum(0).float().mean():.1f} of {len(kept)}", fontsize="small")
        axes.locator_params(integer=True)
        axes.set(xlabel="unit", ylabel="" if axes is not grid[0] else "client (yellow: its units)")
    drawing.savefig(folder / "units.png", dpi=120)
    rows = [
        [client, name, int(kept[:, client].sum()), len(kept)]
        for client in range(len(masks))
        for name, kept in of_groups.items()
    ]
    return [_write_csv(folder / "units.csv", ("client", "layer", "units", "of"), rows), folder / "units.png"]


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


def overlap_by_chance(masks: Sequence[Tensor]) -> Tensor:
    """Return what :func:`overlap` would be of independent masks of the same sizes: ``pq / (p + q - pq)``."""
    parts = torch.stack([mask.float().mean() for mask in masks])
    both = torch.outer(parts, parts)
    return torch.nan_to_num(both / (parts[:, None] + parts[None, :] - both), nan=1.0)


def _overlap(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], lines: Sequence[Json]) -> list[Path]:
    rows: list[list[Any]] = []
    rounds = []
    outside: dict[int, list[float]] = {}
    last: dict[str, Tensor] = {}
    pairs = ~torch.eye(strategy.settings.num_clients, dtype=torch.bool)
    for path in paths:
        checkpoint = read_checkpoint(path)
        strategy.load_state(checkpoint.state)
        masks = strategy.position_masks()
        if masks is None:
            return []
        of_layers = {name: [of_client[name] for of_client in masks] for name in masks[0]}
        last = {name: overlap(of_clients) for name, of_clients in of_layers.items()}
        rounds.append(checkpoint.round)
        rows += [[checkpoint.round, name, f"{found[pairs].mean():.4f}"] for name, found in last.items()]
        outside[checkpoint.round] = [_percent_outside(of_client) for of_client in masks]
    if not pairs.any():  # one client
        return _mask_size(folder, outside, lines)
    wide = min(6, len(last))
    high = -(-len(last) // wide)
    drawing = figure(2.2 * wide, 2.3 * high)
    grid = drawing.subplots(high, wide, squeeze=False).flatten()
    for number, (axes, (name, found)) in enumerate(zip(grid, last.items(), strict=False)):
        image = axes.imshow(found, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(name.removesuffix(".weight"), fontsize="small")
        axes.locator_params(integer=True)
        axes.set(xlabel="client", ylabel="" if number % wide else "client")
    for axes in grid[len(last) :]:
        axes.set_axis_off()
    drawing.colorbar(image, ax=grid.tolist(), label="intersection over union", shrink=0.8)
    drawing.savefig(folder / "overlap.png", dpi=120)
    names = list(last)
    over_rounds = figure(8, 2 + 0.15 * len(names))
    axes = over_rounds.subplots()
    means = np.array([float(mean) for _, _, mean in rows]).reshape(-1, len(names)).T
    image = axes.imshow(means, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    columns = labelled(range(len(rounds)), 20)
    axes.set_xticks(columns, [str(rounds[column]) for column in columns], fontsize="small")
    axes.set_yticks(range(len(names)), [name.removesuffix(".weight") for name in names], fontsize="x-small")
    axes.set_xlabel("round")
    over_rounds.colorbar(image, ax=axes, label="mean overlap")
    over_rounds.savefig(folder / "overlap-rounds.png", dpi=120)
    written = _write_csv(folder / "overlap.csv", ("round", "layer", "mean overlap"), rows)
    pictures = [folder / "overlap.png", folder / "overlap-rounds.png"]
    chance = {name: overlap_by_chance(of_clients) for name, of_clients in of_layers.items()}
    by_labels = _overlap_by_labels(folder, strategy.settings, last, chance)
    return [written, *pictures, *by_labels, *_mask_size(folder, outside, lines)]


def correlation(left: Tensor, right: Tensor) -> float:
    """Return Pearson's correlation of two vectors; nan where one of them is constant or shorter than 2."""
    x, y = (values.double() - values.double().mean() for values in (left, right))
    return float(x @ y / (x.norm() * y.norm()))


def _overlap_by_labels(
    folder: Path, settings: Settings, found: Mapping[str, Tensor], chance: Mapping[str, Tensor]
) -> list[Path]:
    """``found``, ``chance``: layer -> overlap of every pair of clients, as it is and of independent masks."""
    counts = make_partition(settings.data, settings.partitioning).class_counts(load_dataset(settings.data))
    pairs = torch.ones(len(counts), len(counts)).triu(1).bool()
    labels = overlap(list(counts > 0))[pairs]
    rows: list[list[Any]] = []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    for number, (name, of_pairs) in enumerate((name, found[name][pairs]) for name in found):
        related = correlation(labels, of_pairs - chance[name][pairs])
        alike = [(float(value), labels == value) for value in labels.unique()]
        means = [float(of_pairs[pairs_of].mean()) for _, pairs_of in alike]
        expected = [float(chance[name][pairs][pairs_of].mean()) for _, pairs_of in alike]
        for (value, pairs_of), *values in zip(alike, means, expected, strict=True):
            written = (f"{part:.4f}" for part in (*values, related))
            rows.append([name, f"{value:.4f}", int(pairs_of.sum()), *written])
        label, colour = f"{name}: correlation {related:.2f}", COLOURS[number % len(COLOURS)]
        axes.plot([value for value, _ in alike], means, "o-", color=colour, label=label)
        axes.plot([value for value, _ in alike], expected, ":", color=colour)
    axes.set(
        xlabel="labels in common (intersection over union)",
        ylabel="mean overlap of masks (dotted: by chance)",
        ylim=(0, 1.02),
    )
    if len(found) <= len(COLOURS):
        legend_beside(drawing)
    drawing.savefig(folder / "overlap-labels.png", dpi=120)
    header = ("layer", "labels in common", "pairs", "mean overlap", "by chance", "correlation")
    return [_write_csv(folder / "overlap-labels.csv", header, rows), folder / "overlap-labels.png"]


def _percent_outside(masks: Tensors) -> float:
    """Return which part of the positions a client's masks leave out, in percent."""
    return 100.0 * (1 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values()))


def _mask_size(folder: Path, outside: Mapping[int, Sequence[float]], lines: Sequence[Json]) -> list[Path]:
    """``outside``: round of a checkpoint -> percent outside each client's mask."""
    rows: list[tuple[int, int, float, float]] = []  # round, client, percent outside, accuracy
    trained: set[int] = set()
    for line in lines:
        others = {drop["client"] for drop in line.get("dropped", ())} | {*line.get("not-waited-for", ())}
        trained |= {*line.get("clients", ())} - others
        for client, metrics in line.get("evaluated", {}).items():
            if line["round"] in outside and int(client) in trained and "personal-accuracy" in metrics:
                percent = outside[line["round"]][int(client)]
                rows.append((line["round"], int(client), percent, metrics["personal-accuracy"]))
    if not rows:
        return []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    axes.scatter([row[2] for row in rows], [row[3] for row in rows], s=4, color="0.7", label="a client in a round")
    for number, client in enumerate(sorted(trained)[:4]):
        own = [row for row in rows if row[1] == client]
        axes.plot(
            [row[2] for row in own], [row[3] for row in own], ".-", color=COLOURS[number], label=f"client {client}"
        )
    means = [
        np.mean([row[2:] for row in rows if row[0] == number], axis=0) for number in sorted({row[0] for row in rows})
    ]
    axes.plot(*np.array(means).T, "o-", color="black", label="mean of a round")
    axes.set(xlabel="outside the client's mask (%)", ylabel="accuracy of the client's own model (%)")
    legend_beside(drawing)
    drawing.savefig(folder / "mask-size.png", dpi=120)
    written = [[number, client, f"{percent:.2f}", f"{accuracy:.2f}"] for number, client, percent, accuracy in rows]
    header = ("round", "client", "outside its mask (%)", "personal-accuracy")
    return [_write_csv(folder / "mask-size.csv", header, written), folder / "mask-size.png"]


def _personal(folder: Path, lines: Sequence[Json]) -> list[Path]:
    rows = [[line["round"], f"{line['personal-fraction']:.5f}", line["bytes-down"], line["bytes-up"]] for line in lines]
    drawing = figure(9, 3.5)
    left, right = drawing.subplots(1, 2)
    numbers = [line["round"] for line in lines]
    left.plot(numbers, [line["personal-fraction"] for line in lines], color=COLOURS[0])
    left.set(xlabel="round", ylabel="personal fraction", ylim=(0, 1))
    for colour, way in enumerate(("down", "up")):
        right.plot(numbers, [line[f"bytes-{way}"] / 1e6 for line in lines], color=COLOURS[colour], label=way)
    right.set(xlabel="round", ylabel="MB sent a round", ylim=(0, None))
    legend_beside(drawing)
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
    drawing.savefig(folder / "personal.png", dpi=120)
    header = ("round", "personal fraction", "bytes down", "bytes up")
    return [_write_csv(folder / "personal.csv", header, rows), folder / "personal.png"]


def _clients(folder: Path, line: Json) -> list[Path]:
    found = {int(client): metrics for client, metrics in line["evaluated"].items()}
    kinds = sorted({key for metrics in found.values() for key in metrics if key.endswith("-accuracy")})
    drawing = figure(min(16.0, 5 + 0.3 * len(found)), 3.5)
    axes = drawing.subplots()
    for colour, kind in enumerate(kinds):
        values = sorted(metrics[kind] for metrics in found.values() if kind in metrics)
        label = f"{kind.removesuffix('-accuracy')}: {values[0]:.1f} to {values[-1]:.1f} %"
        axes.plot(range(len(values)), values, "o-", color=COLOURS[colour], label=label)
    axes.set(xlabel="clients, sorted by accuracy", ylabel="accuracy (%)", title=f"round {line['round']}")
    legend_beside(drawing)
    drawing.savefig(folder / "clients.png", dpi=120)
    rows = [[client, *(metrics.get(kind, "") for kind in kinds)] for client, metrics in sorted(found.items())]
    return [_write_csv(folder / "clients.csv", ("client", *kinds), rows), folder / "clients.png"]


class Masks(NamedTuple):
    """The clients' masks at a run's last checkpoint.

    Attributes
    ----------
    of : ``units`` of hidden layers, or ``positions`` of weight tensors.
    round : of the checkpoint.
    layers : names.
    shares : client -> layer -> which part of it is in the client's mask, 0 to 1.
    overlap : client -> client -> intersection over union of both masks, over all layers, 0 to 1.
    """

    of: str
    round: int
    layers: list[str]
    shares: list[list[float]]
    overlap: list[list[float]]


def last_masks(folder: Path) -> Masks | None:
    """Return what the clients' masks are at the last checkpoint; ``None`` where the method has none.

    Raises
    ------
    UserError
        The folder is not that of a run, its checkpoint is damaged, or its data are not on this machine.
    """
    paths = checkpoints(folder)
    checkpoint = read_checkpoint(paths[-1]) if paths else None
    if checkpoint is None or not checkpoint.state:
        return None
    strategy = _strategy(settings_of({"run-dir": str(folder), "resume": True}))
    strategy.load_state(checkpoint.state)
    units = strategy.unit_masks()
    positions = strategy.position_masks() if units is None else None
    if units is not None:
        layers = {name: kept.T for name, kept in split(units.T, strategy.units).items()}  # bool [clients, size]
    elif positions:
        layers = {name: torch.stack([of[name].flatten() for of in positions]) for name in positions[0]}
    else:
        return None
    both = sum(kept.float() @ kept.float().T for kept in layers.values())
    assert isinstance(both, Tensor)
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    alike = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    shares = torch.stack([kept.float().mean(1) for kept in layers.values()], 1)
    names = [name.removesuffix(".weight") for name in layers]
    what = "positions" if units is None else "units"
    return Masks(what, checkpoint.round, names, shares.tolist(), alike.tolist())
