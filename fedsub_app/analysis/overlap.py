"""Overlap of the clients' personal masks, by layer, round and labels in common, and score against their size.

Overlap: Tamirisa et al., FedSelect, 2024, Figure 4. Score against what the masks leave out: Vahidian et al.,
Sub-FedAvg, 2021, Figures 1, 2; overlap against labels in common is what they claim in Section 3.1 and do not show.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.score import Score
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import make_partition
from fedsub_app.problem import Problem
from fedsub_app.reports.export import write_csv
from fedsub_app.reports.pictures import COLOURS, figure, legend_beside, spaced
from fedsub_app.runs.checkpoint import read_checkpoint
from fedsub_app.runs.masks import overlap, overlap_by_chance
from fedsub_app.settings import Settings
from strategies.base import SubnetStrategy


def draw_overlap(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], lines: Sequence[Json]) -> list[Path]:
    """Write and draw the overlap of the masks in some checkpoints; nothing where clients have no personal positions."""
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
        rows += [[checkpoint.round, name, f"{overlaps[pairs].mean():.4f}"] for name, overlaps in last.items()]
        outside[checkpoint.round] = [_percent_outside(of_client) for of_client in masks]
    if not pairs.any():  # one client
        return _mask_size(folder, strategy.score, outside, lines)
    wide = min(6, len(last))
    high = -(-len(last) // wide)
    drawing = figure(2.2 * wide, 2.3 * high)
    grid = drawing.subplots(high, wide, squeeze=False).flatten()
    for number, (axes, (name, overlaps)) in enumerate(zip(grid, last.items(), strict=False)):
        image = axes.imshow(overlaps, vmin=0, vmax=1, cmap="viridis")
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
    columns = spaced(range(len(rounds)), 20)
    axes.set_xticks(columns, [str(rounds[column]) for column in columns], fontsize="small")
    axes.set_yticks(range(len(names)), [name.removesuffix(".weight") for name in names], fontsize="x-small")
    axes.set_xlabel("round")
    over_rounds.colorbar(image, ax=axes, label="mean overlap")
    over_rounds.savefig(folder / "overlap-rounds.png", dpi=120)
    written = write_csv(folder / "overlap.csv", ("round", "layer", "mean overlap"), rows)
    pictures = [folder / "overlap.png", folder / "overlap-rounds.png"]
    chance = {name: overlap_by_chance(of_clients) for name, of_clients in of_layers.items()}
    by_labels = _by_labels(folder, strategy.settings, last, chance)
    return [written, *pictures, *by_labels, *_mask_size(folder, strategy.score, outside, lines)]


def correlation(left: Tensor, right: Tensor) -> float:
    """Return Pearson's correlation of two vectors; nan where one of them is constant or shorter than 2."""
    x, y = (values.double() - values.double().mean() for values in (left, right))
    return float(x @ y / (x.norm() * y.norm()))


def _by_labels(
    folder: Path, settings: Settings, overlaps: Mapping[str, Tensor], chance: Mapping[str, Tensor]
) -> list[Path]:
    """``overlaps``, ``chance``: layer -> overlap of every pair of clients, measured and of independent masks."""
    data = Problem.of(settings).data
    counts = make_partition(data, settings.partitioning).class_counts(data)
    pairs = torch.ones(len(counts), len(counts)).triu(1).bool()
    labels = overlap(list(counts > 0))[pairs]
    rows: list[list[Any]] = []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    for number, (name, of_pairs) in enumerate((name, overlaps[name][pairs]) for name in overlaps):
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
    if len(overlaps) <= len(COLOURS):
        legend_beside(drawing)
    drawing.savefig(folder / "overlap-labels.png", dpi=120)
    header = ("layer", "labels in common", "pairs", "mean overlap", "by chance", "correlation")
    return [write_csv(folder / "overlap-labels.csv", header, rows), folder / "overlap-labels.png"]


def _percent_outside(masks: Tensors) -> float:
    """Return the percentage of the positions that a client's masks leave out."""
    return 100.0 * (1 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values()))


def _mask_size(folder: Path, score: Score, outside: Mapping[int, Sequence[float]], lines: Sequence[Json]) -> list[Path]:
    """``outside``: round of a checkpoint -> percent outside each client's mask."""
    key = f"personal-{score.name}"
    rows: list[tuple[int, int, float, float]] = []  # round, client, percent outside, score
    trained: set[int] = set()
    for line in lines:
        others = {drop["client"] for drop in line.get("dropped", ())} | {*line.get("not-waited-for", ())}
        trained |= {*line.get("clients", ())} - others
        for client, metrics in line.get("evaluated", {}).items():
            if line["round"] in outside and int(client) in trained and key in metrics:
                percent = outside[line["round"]][int(client)]
                rows.append((line["round"], int(client), percent, metrics[key]))
    if not rows:
        return []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    axes.scatter([row[2] for row in rows], [row[3] for row in rows], s=4, color="0.7", label="a client in a round")
    for number, client in enumerate(sorted(trained)[:4]):
        of_client = [row for row in rows if row[1] == client]
        axes.plot(
            [row[2] for row in of_client],
            [row[3] for row in of_client],
            ".-",
            color=COLOURS[number],
            label=f"client {client}",
        )
    means = [
        np.mean([row[2:] for row in rows if row[0] == number], axis=0) for number in sorted({row[0] for row in rows})
    ]
    axes.plot(*np.array(means).T, "o-", color="black", label="mean of a round")
    axes.set(xlabel="outside the client's mask (%)", ylabel=score.titled(f"{score.name} of the client's own model"))
    legend_beside(drawing)
    drawing.savefig(folder / "mask-size.png", dpi=120)
    written = [[number, client, f"{percent:.2f}", score.number(value)] for number, client, percent, value in rows]
    header = ("round", "client", "outside its mask (%)", key)
    return [write_csv(folder / "mask-size.csv", header, written), folder / "mask-size.png"]
