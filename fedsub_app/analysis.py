"""What a run's sub-networks do: which hidden units are covered by how many clients, and which ones fire for whom.

Tastan et al., FedPeWS, 2024, Section D (Figures 14 and 15) for the activations.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsub_app.data import load_dataset, make_partition
from fedsub_app.errors import UserError
from fedsub_app.models import build_model, load_tensors, unit_groups
from fedsub_app.models.units import UnitGroup
from fedsub_app.protocol import Json, Tensors
from fedsub_app.report import COLOURS, figure
from fedsub_app.runs import read_rounds, settings_of
from fedsub_app.seeds import generator
from fedsub_app.settings import Settings
from fedsub_app.subnets.masks import fixed_masks, split

COVERED_BY = ("nobody", "one client", "several clients")


def analyse(folder: Path, samples: int) -> list[Path]:
    """Write and draw what a run's directory can tell; returns the files.

    ``coverage.csv`` and ``.png``: hidden units covered by nobody, one and several clients, per warm-up round.
    ``activations.csv`` and ``.png``: per checkpoint, layer and client (the first four) the mean activation of a unit on
    ``samples`` training samples of the client, of all units, of those of its sub-network and of the others. A channel's
    activation is the sum over its positions. Learned sub-networks are those of the last checkpoint (theta > 0.5).

    Raises
    ------
    UserError
        The folder is not that of a run, or holds neither masked rounds nor checkpoints.
    """
    settings = settings_of({"run-dir": str(folder), "resume": True})
    files = []
    masked = [line for line in read_rounds(folder) if "units-covered-by" in line]
    if masked:
        files += _coverage(folder, masked)
    if checkpoints := sorted((folder / "checkpoints").glob("round-*.safetensors")):
        files += _activations(folder, settings, checkpoints, samples)
    if not files:
        raise UserError(f"{folder}: no round with masks and no checkpoint to analyse")
    return files


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([header, *rows])
    return path


def _coverage(folder: Path, lines: Sequence[Json]) -> list[Path]:
    rows = []
    for line in lines:
        nobody, one, *several = line["units-covered-by"]
        rows.append([line["round"], nobody, one, sum(several)])
    drawing = figure(6, 4)
    axes = drawing.subplots()
    for column, name in enumerate(COVERED_BY, 1):
        axes.plot([row[0] for row in rows], [row[column] for row in rows], color=COLOURS[column - 1], label=name)
    axes.set(xlabel="round", ylabel="hidden units covered by", ylim=(0, None))
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


def _activations(folder: Path, settings: Settings, checkpoints: Sequence[Path], samples: int) -> list[Path]:
    dataset, partition = load_dataset(settings.data), make_partition(settings.data, settings.partitioning)
    model = build_model(settings.model, tuple(dataset.train_x.shape[1:]), dataset.num_classes, settings.seed).eval()
    groups = unit_groups(model)
    clients = range(min(settings.num_clients, 4))
    batches = []
    for client in clients:
        index = partition.train[client]
        order = torch.randperm(len(index), generator=generator(settings.seed, 0, client, "activations"))
        batches.append(dataset.train_x[index[order[:samples]]])
    rounds, history = [], []  # history[checkpoint][client]: group name -> [size]
    for path in checkpoints:
        tensors = {n.removeprefix("model/"): t for n, t in load_file(path).items() if n.startswith("model/")}
        load_tensors(model, tensors)
        rounds.append(int(path.stem.removeprefix("round-")))
        history.append([unit_activations(model, groups, x) for x in batches])
    own = _subnets(settings, groups, load_file(checkpoints[-1]))
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
    warm_up = getattr(settings.options, "warmup_rounds", 0)
    for client in clients:
        for column, group in enumerate(groups):
            axes = grid[client][column]
            values = torch.stack([found[client][group.name] for found in history]).T
            axes.pcolormesh(rounds, range(group.size), values, shading="nearest", cmap="viridis", rasterized=True)
            if rounds[0] < warm_up < rounds[-1]:
                axes.axvline(warm_up, color="white", linestyle="--", linewidth=1)
            axes.set_title(f"client {client}, {group.name}", fontsize="small")
        grid[client][0].set_ylabel("unit")
    for axes in grid[-1]:
        axes.set_xlabel("round")
    drawing.savefig(folder / "activations.png", dpi=120)
    header = ("round", "client", "layer", "all units", "own units", "other units")[: 4 if own is None else 6]
    return [_write_csv(folder / "activations.csv", header, rows), folder / "activations.png"]


def _subnets(settings: Settings, groups: Sequence[UnitGroup], checkpoint: Tensors) -> Tensor | None:
    """Return every client's sub-network, bool [N, h]; None where the method has none."""
    options: Any = settings.options
    if getattr(options, "masks", "") == "fixed":
        masks = fixed_masks(groups, options.share_list(settings.num_clients))
        return torch.stack([torch.cat([mask[group.name] for group in groups]) for mask in masks])
    return checkpoint["state/theta"] > 0.5 if "state/theta" in checkpoint else None
