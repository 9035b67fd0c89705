"""Overlap of the clients' personal masks, by layer and round, and score against their size.

Overlap: Tamirisa et al., FedSelect, 2024, Figure 4. Score against what the masks leave out: Vahidian et al.,
Sub-FedAvg, 2021, Figures 1, 2.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.score import Score
from fedsub_app.common.tensors import Json
from fedsub_app.reports.export import write_csv
from fedsub_app.reports.pictures import COLOURS, figure, legend_beside
from fedsub_app.runs.checkpoint import read_checkpoint
from fedsub_app.runs.masks import overlap
from strategies.base import SubnetStrategy


def draw_overlap(folder: Path, strategy: SubnetStrategy, paths: Sequence[Path], lines: Sequence[Json]) -> list[Path]:
    """Write and draw the overlap of the masks in some checkpoints; nothing where clients have no personal positions."""
    means: dict[int, list[float]] = {}  # round of a checkpoint -> mean overlap of each layer
    outside: dict[int, list[float]] = {}
    last: dict[str, Tensor] = {}
    pairs = ~torch.eye(strategy.settings.num_clients, dtype=torch.bool)
    for path in paths:
        checkpoint = read_checkpoint(path)
        strategy.load_state(checkpoint.state)
        masks = strategy.position_masks()
        if masks is None:
            return []
        names = [name.removesuffix(".weight") for name in masks[0]]
        last = {name: overlap([of_client[name] for of_client in masks]) for name in masks[0]}
        means[checkpoint.round] = [float(overlaps[pairs].mean()) for overlaps in last.values()]
        inside = [sum(int(mask.sum()) for mask in of_client.values()) for of_client in masks]
        total = sum(mask.numel() for mask in masks[0].values())
        outside[checkpoint.round] = [100.0 * (1 - count / total) for count in inside]
    sizes = _mask_size(folder, strategy.score, outside, lines)
    if not pairs.any():  # one client
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
    image = axes.pcolormesh(list(means), range(len(names)), table, shading="nearest", vmin=0, vmax=1, cmap="viridis")
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("round")
    over_rounds.colorbar(image, ax=axes, label="mean overlap")
    over_rounds.savefig(files[2], dpi=120)
    return files + sizes


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
                rows.append((line["round"], int(client), outside[line["round"]][int(client)], metrics[key]))
    if not rows:
        return []
    drawing = figure(8, 4)
    axes = drawing.subplots()
    table = np.array(rows)
    axes.scatter(table[:, 2], table[:, 3], s=4, color="0.7", label="a client in a round")
    for number, client in enumerate(sorted(trained)[:4]):
        axes.plot(*table[table[:, 1] == client, 2:].T, ".-", color=COLOURS[number], label=f"client {client}")
    means = [table[table[:, 0] == number, 2:].mean(0) for number in np.unique(table[:, 0])]
    axes.plot(*np.array(means).T, "o-", color="black", label="mean of a round")
    axes.set(xlabel="outside the client's mask (%)", ylabel=score.titled(f"{score.name} of the client's own model"))
    legend_beside(drawing)
    drawing.savefig(folder / "mask-size.png", dpi=120)
    written: list[list[Any]] = [[r, client, f"{part:.2f}", score.number(value)] for r, client, part, value in rows]
    header = ("round", "client", "outside its mask (%)", key)
    return [write_csv(folder / "mask-size.csv", header, written), folder / "mask-size.png"]
