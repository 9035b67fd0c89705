"""The plan of a run before it starts: settings, partition, network, a round's bytes and FLOPs, memory."""

from collections.abc import Iterable

import torch

from fedsub_app.common.inputs import size_of
from fedsub_app.common.text import human_bytes, markdown
from fedsub_app.data import Dataset, Partition
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.protocol import formula_bytes
from fedsub_app.models import base_bytes, trainable
from fedsub_app.runs.config import defaults
from fedsub_app.runs.console import stages_of
from fedsub_app.runs.loop import check_devices, client_bytes, prepare
from fedsub_app.settings import Settings
from fedsub_app.training.costs import training_flops
from fedsub_app.training.stacked import MAX_STACKED
from fedsub_app.training.workplace import KEPT_BYTES
from strategies.base import SubnetStrategy
from strategies.secure import SecureMerging
from strategies.server import Facts

MAX_CLIENTS = 20  # with more clients the partition is summed up


def plan(settings: Settings) -> str:
    """Return the plan of a run as text. Data are loaded and partitioned; nothing is trained and nothing written."""
    settings.need_data()
    problem, partition, strategy = prepare(settings)
    assert partition
    dataset, sample_flops = problem.data, training_flops(problem, strategy.model)
    facts = Facts([len(indices) for indices in partition.train], sample_flops, lambda _: 0.0)
    strategy.connect(Federation(settings, {}), facts)
    usual = defaults()
    chosen = [f"{key} = {value!r}" for key, value in settings.flat().items() if usual[key] != value]
    parameters = sum(parameter.numel() for parameter in strategy.model.parameters())
    trained = sum(parameter.numel() for parameter in trainable(strategy.model).values())
    size = human_bytes(formula_bytes(strategy.current))
    part = f", {trained:,} of them trained ({settings.trainable})" if settings.trainable else ""
    rows = [
        ("settings", ", ".join(chosen) or "the defaults"),
        ("data", f"{settings.dataset}: {len(dataset.train_y):,} training and {len(dataset.test_y):,} test samples, "
         f"{dataset.num_classes} {'classes' if dataset.has_classes else 'outputs'}"),
        ("network", f"{settings.model}: {parameters:,} parameters{part}, {size}"),
        ("rounds", "; ".join(f"{name}: {which}" if name else which for name, which in stages_of(strategy)[:5])),
        *((f"round {number}{f', {name}' if name else ''}", text) for number, name, text in _rounds(strategy)),
        ("training", _training(strategy, partition, sample_flops)),
        ("memory", _memory(strategy, dataset, partition)),
        *((f"device {name}", text) for name, text in check_devices(strategy, problem, partition)),
        *([("warning", strategy.warning)] if strategy.warning else []),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), "", _clients(dataset, partition)])


def _rounds(strategy: SubnetStrategy) -> Iterable[tuple[int, str, str]]:
    """Yield number, name, and bytes down and up by the formula of the first round of each of the method's stages."""
    firsts: dict[str, int] = {}
    for number in range(1, strategy.settings.num_rounds + 1):
        firsts.setdefault(strategy.stage(number), number)
    for name, number in firsts.items():
        strategy.round = number
        clients = [client for client in strategy.federation.sample(number) if strategy.fits(client)]
        down = sum(formula_bytes(strategy.task(client).tensors) for client in clients)
        on = strategy.settings.secure_aggregation
        secure = SecureMerging(strategy, clients, None) if on else None  # type: ignore[arg-type]  # nobody is asked
        expected = [(secure or strategy).expected(client) for client in clients]
        most = [{n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in of.items()} for of in expected]
        up = sum(map(formula_bytes, most)) + (secure.later * len(clients) if secure else 0)
        exact = not any(spec.up_to or spec.optional for specs in expected for spec in specs.values())
        bound = "" if exact else "at most "
        sizes = f"{human_bytes(down)} down, {bound}{human_bytes(up)} up by the formula"
        beside = ", without the protocol's keys, shares and positions" if secure else ""
        yield number, name, f"{sizes}, {len(clients)} clients{beside}"


def _training(strategy: SubnetStrategy, partition: Partition, sample_flops: int) -> str:
    settings = strategy.settings
    sizes = torch.tensor([len(indices) for indices in partition.train], dtype=torch.float64)
    steps = settings.local_steps
    samples = float(steps * settings.batch_size if steps else sizes.mean() * settings.local_epochs)
    flops = samples * sample_flops * settings.sample_size
    what = f"local-steps = {steps}" if steps else f"local-epochs = {settings.local_epochs}"
    rest = "without the method's own additions and savings"
    return f"{flops / 1e9:.3g} GFLOPs a round on average: {what} of the whole network, {rest}"


def _memory(strategy: SubnetStrategy, dataset: Dataset, partition: Partition) -> str:
    """Return in words the memory of the tensors on the server and in a training process, without activations."""
    settings, model = strategy.settings, formula_bytes(strategy.current)
    base = base_bytes(strategy.model)
    data = base + sum(part.nbytes for part in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y))
    all_held = strategy.holds_all or settings.mean != "average" or settings.robust == "on"
    kept = settings.sample_size if all_held else 1
    messages = min(2 * model * min(settings.message_clients, settings.sample_size), settings.message_mb * 2**20)
    server = data + (3 + kept) * model + 2 * messages  # current, mean and weights; two messages at a node
    together = min(MAX_STACKED, settings.message_clients, settings.sample_size) if settings.stack_clients else 1
    sizes, sample = [len(indices) for indices in partition.train], size_of(dataset.in_shape)  # numbers as float32
    samples = max(together * max(sizes), min(KEPT_BYTES // sample, sum(sizes))) * sample
    worker = data + together * client_bytes(settings, model, 0) + samples + messages
    part = f", {human_bytes(base)} of them the frozen base" if base else ""
    return f"about {human_bytes(server)} of tensors on the server, {human_bytes(worker)} in a process that trains{part}"


def _clients(dataset: Dataset, partition: Partition) -> str:
    counts = partition.class_counts(dataset)
    sizes = [len(indices) for indices in partition.train]
    if len(sizes) > MAX_CLIENTS:
        classes = (counts > 0).sum(1)
        middle = sorted(sizes)[len(sizes) // 2]
        samples = f"{min(sizes)} to {max(sizes)} training samples (median {middle})"
        return f"{len(sizes)} clients: {samples}, {int(classes.min())} to {int(classes.max())} classes"
    header = ("client", "training", "validation", "test", "classes: samples")
    rows = []
    for client, (size, labels) in enumerate(zip(sizes, counts, strict=True)):
        held = (client, size, len(partition.validation[client]), len(partition.test[client]))
        each = (f"{label}: {int(labels[label])}" for label in labels.nonzero().flatten().tolist())
        rows.append([*map(str, held), ", ".join(each)])
    return markdown(header, rows)
