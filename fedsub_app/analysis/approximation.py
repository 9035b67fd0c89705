"""How well federated rounds stand in for central training: the cosine between the directions that both take.

Hu, Tang, Kyrillidis, Jermaine: Federated Learning Over Images, ICCV 2023, Section 6.3 and Figure 2. From a model M some
federated rounds lead to M^, and "processing exactly the same set of data centrally, via a series of mini-batches" to
M*. The similarity is ``(M^ - M) . (M* - M) / (|M^ - M| |M* - M|)``, over all trained tensors of the global network.

Where this leaves the paper, or the paper leaves a choice:

- M are the checkpoints of the run, or of another run of the same network. The paper's are the epochs of central
  training: a run with one client, as ``ist/central``.
- The same data are the mini-batches that the clients of these rounds train on. The samples of all clients' first
  mini-batches are shuffled and cut into as many mini-batches again, then those of their second ones, and so on: one
  client's central training is its own, in the same steps. The paper's appendix has an epoch over all samples of the
  clients, also where a client takes one step.
- Central training takes the settings' optimizer, fresh in every round as the clients' are, and the loss without an
  objective's term.
- The running mean of the curve is over ten checkpoints; the paper does not say over how many.
"""

import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from client_apps.base import Client
from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch, joined
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.reports.export import write_csv
from fedsub_app.reports.pictures import COLOURS, figure, legend_beside
from fedsub_app.runs.checkpoint import Checkpoint, checkpoints, read_checkpoint
from fedsub_app.runs.directory import settings_in
from fedsub_app.runs.methods import METHODS
from fedsub_app.training.client import Training
from fedsub_app.training.objectives import Objective
from fedsub_app.training.workplace import Workplace, workplace

WINDOW = 10


def approximation(folder: Path, rounds: int, starts: Path | None = None) -> list[Path]:
    """Compare both directions from each checkpoint; write and draw ``approximation.csv`` and ``.png`` into ``folder``.

    ``rounds``: federated rounds from each checkpoint. ``starts``: run whose checkpoints are the models M, ``None`` for
    this one's; its states are not used.
    """
    settings = settings_in(folder)
    settings.need_data()
    if settings.lr_schedule != "step":  # a plateau hangs on the scores before a checkpoint, a cosine ends with its run
        raise UserError(f"lr-schedule = {settings.lr_schedule!r} of {folder}: must be 'step' for an approximation")
    place = workplace(settings)
    paths = checkpoints(starts or folder)
    if not paths:
        raise UserError(f"{starts or folder}: no checkpoint to start from")
    rows: list[tuple[int, float, float]] = []
    for path in paths:
        start = read_checkpoint(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in start.model.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in place.network.tensors.items()}:
            raise UserError(f"{path}: a model of another network than that of {folder}")
        federated, clients = _federated(place, start, rounds, folder / "clients", not starts)
        central = start.model
        for number, of_round in enumerate(clients, start.round + 1):
            central = train_centrally(place, central, number, of_round)
        similarity = cosine({name: start.model[name] for name in place.network.parameters}, federated, central)
        recent = [value for _, value, _ in rows[1 - WINDOW :]] + [similarity]
        rows.append((start.round, similarity, sum(recent) / len(recent)))
    files = [folder / "approximation.csv", folder / "approximation.png"]
    cells = [[number, rounds, f"{similarity:.6f}", f"{mean:.6f}"] for number, similarity, mean in rows]
    write_csv(files[0], ("checkpoint", "rounds", "similarity", "mean of ten"), cells)
    drawing = figure(8, 4)
    axes = drawing.subplots()
    numbers, similarities, means = zip(*rows, strict=True)
    axes.plot(numbers, similarities, ".", color=COLOURS[0], alpha=0.4, label="one checkpoint")
    axes.plot(numbers, means, color=COLOURS[0], label=f"mean of the last {WINDOW}")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="checkpoint", ylabel=f"cosine with central training, {rounds} rounds")
    axes.locator_params(axis="x", integer=True)
    legend_beside(drawing)
    drawing.savefig(files[1], dpi=120)
    return files


def cosine(start: Mapping[str, Tensor], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the cosine between ``one - start`` and ``other - start`` over all tensors; NaN where one has not moved."""
    a, b = (
        torch.cat([(to[name].cpu().double() - tensor.cpu().double()).flatten() for name, tensor in start.items()])
        for to in (one, other)
    )
    return float(a @ b / (a.norm() * b.norm()))


def _federated(
    place: Workplace, start: Checkpoint, rounds: int, states: Path, with_state: bool
) -> tuple[Tensors, list[list[int]]]:
    """Return the global model after some rounds, and the clients of each; clients read copies of their ``states``."""
    settings = place.settings
    strategy = METHODS[settings.method].strategy(settings, place.network.module)
    if with_state:
        strategy.load_state(start.state)
    grid = LocalGrid(app, {})
    clients = []
    with TemporaryDirectory(prefix="fedsub-") as scratch:
        if states.is_dir():  # without the clients' own, the initial model of start-from
            apart = None if with_state else shutil.ignore_patterns("client-*")
            shutil.copytree(states, scratch, dirs_exist_ok=True, ignore=apart)
        sent = settings.flat() | {"experiment": "", "resume": False}
        header = {"run": "approximation", "state-dir": scratch, "base": place.base}
        strategy.connect(Federation(settings, header, sent))
        arrays = to_arrays({name: start.model[name] for name in strategy.current})
        for number in range(start.round + 1, start.round + rounds + 1):
            config = ConfigRecord({"checkpoints": [start.round]})
            phase = strategy.configure_train(number, arrays, config, grid)
            merged, _ = strategy.aggregate_train(number, strategy.federation.exchange(grid, phase))
            if merged is None:
                report = strategy.phase.report
                reasons = [report["abandoned"], *(drop["reason"] for drop in report["dropped"][:1])]
                raise UserError(f"round {number} from checkpoint {start.round} was abandoned: {'; '.join(reasons)}")
            arrays = strategy.measurement.run(number, merged, config, grid) if strategy.measurement else merged
            clients.append(sorted(set(strategy.phase.asked) - set(strategy.phase.report.get("not-waited-for", ()))))
    return to_tensors(arrays), clients


def train_centrally(place: Workplace, model: Tensors, number: int, clients: Sequence[int]) -> Tensors:
    """Return ``model`` after the mini-batches of these clients in round ``number``, one central step each."""
    x, y, batches = pooled(place, number, clients)
    central = Client(place, clients[0], number, {})
    vars(central).update(x=x, y=y)
    central.load(model)
    with central.dropout("central"):
        Training(central, objective=Objective()).run(batches)
    return central.network.copy()  # an attacker sends other tensors


def pooled(place: Workplace, number: int, clients: Sequence[int]) -> tuple[Batch, Tensor, list[Tensor]]:
    """Return the training samples of some clients in a round as those of one client, and mini-batches of them.

    x, y are in the order of the clients' steps; a sample that is used twice is there twice. batches are indices into
    them, int64: as many mini-batches in each step as clients take part in it.
    """
    workers = [Client(place, client, number, {}) for client in clients]
    x, y, batches = [], [], []
    first = 0
    for step, taken in enumerate(zip_longest(*(worker.batches() for worker in workers))):
        taking_part = [(w, i.to(place.device)) for w, i in zip(workers, taken, strict=True) if i is not None]
        x += [worker.x[index] for worker, index in taking_part]
        y += [worker.y[index] for worker, index in taking_part]
        size = sum(len(index) for _, index in taking_part)
        order = torch.randperm(size, generator=generator(place.settings.seed, number, step, "central"))
        batches += [part + first for part in order.tensor_split(len(taking_part))]
        first += size
    return joined(x, torch.cat), torch.cat(y), batches
