"""The partition of the samples over the clients.

flwr-datasets' partitioners make ``dirichlet`` and ``flwr:NAME`` (:func:`by_flwr`). The others are a few lines of torch
here, because the package datasets, on which it works, takes a second to import: ``iid`` gives the same sizes as its
IidPartitioner, ``source`` the same clients as its NaturalIdPartitioner, ``shards`` those of its ShardPartitioner where
all are of one size (else that leaves samples out), ``lists`` has no counterpart there.

``classes`` deals every class to equally many clients, or some to one more, as FedSelect's code does, with distinct
classes for each client; with one client a class (FedPeWS) the clients are disjoint and cover everything. flwr-datasets'
PathologicalPartitioner has no mode for that, and may leave classes out.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, explained
from fedsub_app.common.late import alone
from fedsub_app.common.machine import check_memory
from fedsub_app.common.own_code import read_options
from fedsub_app.common.seeds import derive, generator
from fedsub_app.data.samples import Dataset
from fedsub_app.data.settings import FLWR, KINDS, WITHOUT_CLASSES, PartitionSettings

DRAWS = 11  # at most, until no client has too few samples; flwr-datasets makes as many Dirichlet draws


@dataclass(frozen=True, eq=False)
class Partition:
    """Sorted indices (int64) of every client: train and validation into ``train_x``, test into ``<test_pool>_x``."""

    train: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    test_pool: Literal["train", "test"]

    def class_counts(self, dataset: Dataset) -> Tensor:
        """Return the number of training samples, int64 [clients, classes]."""
        labels, classes = dataset.train_labels, dataset.label_count
        return torch.stack([torch.bincount(labels[indices], minlength=classes) for indices in self.train])


@lru_cache(maxsize=8)
def make_partition(dataset: Dataset, settings: PartitionSettings) -> Partition:
    """Return the partition of a data set; made once per process, so treat it as read-only."""
    if settings.private_examples:  # the whole set is one client's, whichever it is
        train = [torch.arange(len(dataset.train_y))] * settings.num_clients
    else:
        _check(dataset, settings)
        train = (_draw if settings.samples_per_client else _DIVIDE.get(settings.partition, by_flwr))(dataset, settings)
        if (fewest := min(map(len, train))) < (settings.min_samples or 0):
            said = f"a client has {fewest} samples with partition = {settings.partition!r}"
            raise UserError(f"min-samples = {settings.min_samples}: {said}; lower it or num-clients")
    validation: list[Tensor] = []
    test: list[Tensor] = []
    by_label = settings.client_test == "labels"
    for client, indices in enumerate(train):
        if not by_label:
            indices, held_out = _split(indices, settings.holdout_fraction, 1, settings.seed, client, "holdout")
            test.append(held_out)
        train[client], rest = _split(indices, settings.validation_fraction, 0, settings.seed, client, "validation")
        validation.append(rest)
        if not len(train[client]):
            how = f"partition = {settings.partition!r} of {len(dataset.train_y)} samples; lower num-clients"
            raise UserError(f"num-clients = {settings.num_clients}: client {client} has no training sample with {how}")
    if by_label:  # of all its samples: one that falls wholly into validation stays in the test set
        test = _test_by_label(dataset, [torch.cat(parts) for parts in zip(train, validation, strict=True)])
    return Partition(tuple(train), tuple(validation), tuple(test), "test" if by_label else "train")


def whole_set(dataset: Dataset, settings: PartitionSettings, client: int) -> Partition:
    """Return the partition of a data set that is ``client``'s own: all clients have the same indices, all tests."""
    every = torch.arange(len(dataset.train_y))
    train, rest = _split(every, settings.validation_fraction, 0, settings.seed, client, "validation")
    if not len(train):
        raise UserError(f"client {client}: no training sample")
    count = settings.num_clients
    return Partition((train,) * count, (rest,) * count, (torch.arange(len(dataset.test_y)),) * count, "test")


def partition_summary(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    """Return a JSON-able summary: ``counts[client][class]`` of the training samples, and every client's sizes."""
    splits = {"train": partition.train, "validation": partition.validation, "test": partition.test}
    return {
        "clients": len(partition.train),
        "classes": dataset.label_count,
        "counts": partition.class_counts(dataset).tolist(),
        **{split: [len(indices) for indices in clients] for split, clients in splits.items()},
        "test_pool": partition.test_pool,
    }


def _check(dataset: Dataset, settings: PartitionSettings) -> None:
    samples, clients = len(dataset.train_y), settings.num_clients
    if not len(dataset.test_y):
        raise UserError(f"dataset = {dataset.name!r}: no test samples")
    if not dataset.has_classes and settings.partition not in WITHOUT_CLASSES and settings.partition in KINDS:
        needs = f"needs classes, {dataset.name} has none; allowed are {', '.join(map(repr, WITHOUT_CLASSES))}"
        raise UserError(f"partition = {settings.partition!r}: {needs}")
    shards, classes = settings.shards_per_client, settings.classes_per_client
    if settings.samples_per_client:
        said = f"samples-per-client = {settings.samples_per_client}: must be 0 with"
        if settings.partition not in ("iid", "dirichlet"):
            raise UserError(f"{said} partition = {settings.partition!r}; allowed are 'iid', 'dirichlet'")
        if settings.validation_fraction or settings.client_test != "labels":
            raise UserError(f"{said} validation-fraction or holdout: drawn with replacement, a sample may be in both")
        what = f"samples-per-client = {settings.samples_per_client} of num-clients = {clients}"
        check_memory(what, 8 * settings.samples_per_client * clients)
    elif clients > samples:
        raise UserError(f"num-clients = {clients}: expected 1 to {samples}, the number of training samples")
    if settings.partition == "shards" and shards > samples // clients:
        most = f"{samples // clients}, {samples} samples / {clients}"
        raise UserError(f"shards-per-client = {shards}: expected 1 to {most}")
    if settings.partition in ("classes", "source-classes") and classes > dataset.label_count:
        raise UserError(f"classes-per-client = {classes}: expected 1 to {dataset.label_count}, the number of classes")


def _split(indices: Tensor, fraction: float, least: int, seed: int, client: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Return ``(rest, part)``, both sorted; the part is random and ``fraction`` of the indices, rounded down."""
    exact = Fraction(str(fraction))  # 90 * 0.7 is 62.99… in floating-point numbers
    size = min(max(int(len(indices) * exact), least), len(indices))
    order = torch.randperm(len(indices), generator=generator(seed, client, purpose))
    return indices[order[size:]].sort().values, indices[order[:size]].sort().values


def _test_by_label(dataset: Dataset, train: Sequence[Tensor]) -> list[Tensor]:
    shared: dict[tuple[int, ...], Tensor] = {}  # a thousand IID clients need one list of the test set, not a thousand
    tests = []
    kinds = dataset.train_source * dataset.label_count + dataset.train_labels
    test_kinds = dataset.test_source * dataset.label_count + (dataset.test_y if dataset.has_classes else 0)
    for client, indices in enumerate(train):
        own = kinds[indices].unique()
        key = tuple(own.tolist())
        if key not in shared:
            shared[key] = torch.isin(test_kinds, own).nonzero().flatten()
        if not len(shared[key]):
            labels = sorted({kind % dataset.label_count for kind in key})
            sources = ", ".join(sorted({dataset.sources[kind // dataset.label_count] for kind in key}))
            whose = f"labels {labels} of {sources}" if dataset.has_classes else f"sources {sources}"
            lacking = f"no sample of client {client}'s {whose}"
            raise UserError(f"client-test = 'labels': the test set has {lacking}; use 'holdout'")
        tests.append(shared[key])
    return tests


def _iid(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    order = torch.randperm(len(dataset.train_y), generator=generator(settings.seed, "partition"))
    return list(order.tensor_split(settings.num_clients))


def _least(settings: PartitionSettings) -> int:
    """Return the least samples of a client of a Dirichlet draw: one to train on, one to hold out, ``min-samples``."""
    return max(1 if settings.client_test == "labels" else 2, settings.min_samples or 0)


def _by_quantity(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Give clients random samples; a Dirichlet draw sets their numbers (Li et al., ICDE 2022, arXiv 2102.02079)."""
    samples, clients, least = len(dataset.train_y), settings.num_clients, _least(settings)
    order = torch.randperm(samples, generator=generator(settings.seed, "partition"))
    draws = np.random.default_rng(derive(settings.seed, "sizes"))
    for _ in range(DRAWS):
        ends = draws.dirichlet([settings.dirichlet_alpha] * clients).cumsum()[:-1] * samples
        parts = order.tensor_split(torch.from_numpy(ends.astype(int)))
        if min(map(len, parts)) >= least:
            return list(parts)
    of = f"{samples} samples over num-clients = {clients} with {least} or more each in {DRAWS} draws"
    raise UserError(f"dirichlet-alpha = {settings.dirichlet_alpha}: no partition of {of}")


def _draw(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Draw each client's samples by itself, with replacement; the last class gets what the others' rounding leaves."""
    size = settings.samples_per_client or 0
    of_class = [(dataset.train_labels == label).nonzero().flatten().numpy() for label in dataset.train_labels.unique()]
    clients = []
    for client in range(settings.num_clients):
        draws = np.random.default_rng(derive(settings.seed, client, "samples"))
        if settings.partition == "iid":
            found = draws.integers(len(dataset.train_y), size=size)
        else:
            shares = draws.dirichlet([settings.dirichlet_alpha] * len(of_class)) * size
            counts = np.round(shares).astype(int)
            counts[-1] = max(size - counts[:-1].sum(), 0)
            if (most := max(abs(counts[-1] - shares[-1]), counts.sum() - size)) > max(size / 10, 1):
                said = f"too few for {len(of_class)} classes, the rounding moves {most:.0f} samples of client {client}"
                raise UserError(f"samples-per-client = {size}: {said}; raise it or lower dirichlet-alpha")
            found = np.concatenate([draws.choice(own, n) for own, n in zip(of_class, counts, strict=True) if n])
        clients.append(torch.from_numpy(found).sort().values)
    return clients


def _by_source(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    if settings.num_clients != len(dataset.sources):
        expected = f"expected one a source, {len(dataset.sources)} ({', '.join(dataset.sources)})"
        raise UserError(f"num-clients = {settings.num_clients}: partition = {settings.partition!r} {expected}")
    return [(dataset.train_source == source).nonzero().flatten() for source in range(len(dataset.sources))]


def _by_groups(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Give whole sources, the largest first, each to the client with the fewest samples so far.

    If there are k times as many clients as sources, each source's samples go to k clients, in the order of the names.
    """
    groups = [(dataset.train_source == source).nonzero().flatten() for source in dataset.train_source.unique()]
    share, rest = divmod(settings.num_clients, len(groups))
    if settings.num_clients > len(groups):
        if rest or len(groups) == 1:
            key = f"num-clients = {settings.num_clients}: partition = 'column'"
            allowed = "expected at most that or a multiple, and the key group for a table"
            raise UserError(f"{key} has {len(groups)} groups; {allowed}")
        draws = [generator(settings.seed, "partition", number) for number in range(len(groups))]
        dealt = [own[torch.randperm(len(own), generator=draw)] for own, draw in zip(groups, draws, strict=True)]
        return [part.sort().values for own in dealt for part in own.tensor_split(share)]
    clients: list[list[Tensor]] = [[] for _ in range(settings.num_clients)]
    sizes = [0] * settings.num_clients
    for group in sorted(groups, key=len, reverse=True):  # stable: equal sizes in the order of their names
        client = sizes.index(min(sizes))
        clients[client].append(group)
        sizes[client] += len(group)
    return [torch.cat(parts).sort().values for parts in clients]


def _by_source_and_classes(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    pairs = zip(_by_source(dataset, settings), deal_classes(dataset.label_count, settings), strict=True)
    return [own[torch.isin(dataset.train_labels[own], torch.tensor(labels))] for own, labels in pairs]


def _by_shards(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Deal shards of the samples sorted by label, whose sizes differ by at most 1."""
    shards = dataset.train_labels.argsort(stable=True).tensor_split(settings.num_clients * settings.shards_per_client)
    order = np.random.default_rng(derive(settings.seed, "partition")).permutation(len(shards))
    hands = order.reshape(settings.num_clients, settings.shards_per_client).tolist()
    return [torch.cat([shards[number] for number in hand]) for hand in hands]


def _by_lists(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    lists = settings.class_lists
    prefix = f"class-lists = {settings.toml()['class-lists']!r}"
    if len(lists) != settings.num_clients:
        raise UserError(f"{prefix}: {len(lists)} lists for num-clients = {settings.num_clients}, expected one a client")
    for client, labels in enumerate(lists):
        if unknown := [label for label in labels if label >= dataset.label_count]:
            raise UserError(f"{prefix}: unknown class {unknown[0]}, expected 0 to {dataset.label_count - 1}")
        if len(set(labels)) < len(labels):
            raise UserError(f"{prefix}: the list of client {client} names a class twice")
    return _share_classes(dataset, lists, settings.seed)


def _by_classes(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    return _share_classes(dataset, deal_classes(dataset.label_count, settings), settings.seed)


def deal_classes(num_classes: int, settings: PartitionSettings) -> list[list[int]]:
    """Deal every class equally often, or some once more; distinct ones to each client unless they may repeat."""
    num_clients, classes_per_client = settings.num_clients, settings.classes_per_client
    random = generator(settings.seed, "classes of clients")
    copies, more = divmod(num_clients * classes_per_client, num_classes)
    if settings.repeat_classes:  # as published: a shuffled deck, cut
        if more:
            needs = f"num-clients * classes-per-client a multiple of {num_classes}, the number of classes"
            raise UserError(f"repeat-classes = true: needs {needs}")
        deck = torch.arange(num_classes).repeat(copies)[torch.randperm(num_classes * copies, generator=random)]
        return [hand.tolist() for hand in deck.split(classes_per_client)]
    left = torch.full((num_classes,), copies)
    if more:
        left[torch.randperm(num_classes, generator=random)[:more]] += 1
    lists = []
    for clients_left in range(num_clients, 0, -1):
        # A class with as many copies left as clients must go to each of them; the others by their copies left.
        must = left == clients_left
        free = classes_per_client - int(must.sum())
        weights = torch.where(must, 0, left).double()
        drawn = torch.multinomial(weights, free, generator=random) if free else torch.empty(0, dtype=torch.int64)
        labels = torch.cat((must.nonzero().flatten(), drawn)).sort().values
        left[labels] -= 1
        lists.append(labels.tolist())
    return [lists[i] for i in torch.randperm(num_clients, generator=random).tolist()]


def _share_classes(dataset: Dataset, lists: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    """Split every class evenly and at random among the clients whose list names it, once for each time it does."""
    shares: list[list[Tensor]] = [[] for _ in lists]
    for label in range(dataset.label_count):
        clients = [client for client, labels in enumerate(lists) for own in labels if own == label]
        if clients:
            indices = (dataset.train_labels == label).nonzero().flatten()
            order = torch.randperm(len(indices), generator=generator(seed, "partition", label))
            for client, part in zip(clients, indices[order].tensor_split(len(clients)), strict=True):
                shares[client].append(part)
    return [torch.cat(parts) for parts in shares]


def by_flwr(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Return each client's training samples, int64: partition = "dirichlet" or "flwr:NAME"."""
    from datasets import Dataset as Table

    if settings.partition == "dirichlet":
        name, key = "DirichletPartitioner", "dirichlet-alpha"  # the key of ours that its errors are about
        options = {"partition_by": "label", "alpha": settings.dirichlet_alpha, "self_balancing": False}
        options["min_partition_size"] = _least(settings)
    else:
        name, key = settings.partition.removeprefix(FLWR), "partition"
        options = read_options(settings.partition_options)
    partitioners = alone("flwr_datasets", "partitioner")  # without pictures: seaborn and scipy take 1.3 s to import
    kind = getattr(partitioners, name, None)
    if kind is None:
        allowed = ", ".join(each for each in dir(partitioners) if each.endswith("Partitioner"))
        raise UserError(f"partition = {settings.partition!r}: flwr-datasets has no {name}; allowed are {allowed}")
    ours = {"num_partitions": settings.num_clients, "seed": derive(settings.seed, "partition")}
    takes = inspect.signature(kind).parameters
    labels, sources = dataset.train_labels, dataset.train_source
    rows = torch.arange(len(labels))
    several = len((labels * len(dataset.sources) + sources).unique()) > len(labels.unique())
    if several or settings.partition.startswith(FLWR):  # they cut runs of rows: files may be sorted by class or source
        rows = torch.randperm(len(labels), generator=generator(settings.seed, "rows"))
    names = [dataset.sources[k] for k in sources[rows].tolist()]
    with explained(f"partition-options = {settings.partition_options!r}:", 200):  # from options that it does not have
        made = kind(**{k: value for k, value in ours.items() if k in takes} | options)
        made.dataset = Table.from_dict({"label": labels[rows].tolist(), "source": names, "index": rows.tolist()})
    of = f"{len(labels)} samples over num-clients = {settings.num_clients}"
    of += f" with {least} or more each" if (least := settings.min_samples) else ""
    said = f"{key} = {settings.toml()[key]!r}: no partition of {of}:"
    with explained(said), warnings.catch_warnings(action="ignore"):  # it warns at every new draw
        parts = made.num_partitions
        clients = [made.load_partition(k)[:]["index"] for k in range(min(parts, settings.num_clients))]
    if parts != settings.num_clients:  # of a natural id, of sizes, or of options
        said = f"partition = {settings.partition!r} makes {parts} parts, expected one a client"
        raise UserError(f"num-clients = {settings.num_clients}: {said}")
    return [torch.tensor(client, dtype=torch.int64) for client in clients]


_DIVIDE = {
    "iid": _iid,
    "quantity": _by_quantity,
    "shards": _by_shards,
    "classes": _by_classes,
    "source": _by_source,
    "source-classes": _by_source_and_classes,
    "lists": _by_lists,
    "column": _by_groups,
}
