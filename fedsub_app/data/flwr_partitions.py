"""Partitions by flwr-datasets' partitioners; importing flwr-datasets takes seconds."""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.own_code import read_options
from fedsub_app.common.seeds import derive
from fedsub_app.data.samples import Dataset
from fedsub_app.data.settings import FLWR, PartitionSettings


def by_flwr(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Return each client's training samples, int64: partition = "dirichlet", "shards", "classes" or "flwr:NAME"."""
    from datasets import Dataset as Table
    from flwr_datasets import partitioner as partitioners

    name, key, options = _partitioner(settings)
    kind = getattr(partitioners, name, None)
    if kind is None:
        allowed = ", ".join(each for each in dir(partitioners) if each.endswith("Partitioner"))
        raise UserError(f"partition = {settings.partition!r}: flwr-datasets has no {name}; allowed are {allowed}")
    ours = {"num_partitions": settings.num_clients, "seed": derive(settings.seed, "partition")}
    takes = inspect.signature(kind).parameters
    labels, sources = dataset.train_labels.tolist(), [dataset.sources[k] for k in dataset.train_source.tolist()]
    try:
        made = kind(**{k: value for k, value in ours.items() if k in takes} | options)
        made.dataset = Table.from_dict({"label": labels, "source": sources, "index": list(range(len(labels)))})
    except Exception as error:  # of options that are none of its
        raise UserError(f"partition-options = {settings.partition_options!r}: {one_line(error)[:200]}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns at every new draw; what matters is the error below
            clients = [made.load_partition(client)[:]["index"] for client in range(settings.num_clients)]
    except Exception as error:  # ValueError, and what options that are none of its lead to
        of = f"{len(labels)} samples over num-clients = {settings.num_clients}"
        raise UserError(f"{key} = {settings.toml()[key]!r}: no partition of {of}: {one_line(error)}") from error
    return [torch.tensor(client, dtype=torch.int64) for client in clients]


def _partitioner(settings: PartitionSettings) -> tuple[str, str, dict[str, Any]]:
    """Return the class of flwr-datasets, the key of ours that its errors are about, and its options."""
    options: dict[str, Any]
    match settings.partition:
        case "dirichlet":
            least = 1 if settings.client_test == "labels" else 2  # one to train on, one to hold out
            options = {"alpha": settings.dirichlet_alpha, "min_partition_size": least, "self_balancing": False}
            return "DirichletPartitioner", "dirichlet-alpha", {"partition_by": "label", **options}
        case "shards":
            options = {"num_shards_per_partition": settings.shards_per_client}
            return "ShardPartitioner", "shards-per-client", {"partition_by": "label", **options}
        case "classes":
            mode = "first-deterministic"  # every class is used where there are clients enough
            options = {"num_classes_per_partition": settings.classes_per_client, "class_assignment_mode": mode}
            return "PathologicalPartitioner", "classes-per-client", {"partition_by": "label", **options}
        case name:
            return name.removeprefix(FLWR), "partition", read_options(settings.partition_options)
