"""Quantity skew: the partition of random samples whose sizes are drawn."""

import numpy as np
import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import derive, generator
from fedsub_app.data.samples import Dataset
from fedsub_app.data.settings import PartitionSettings

DRAWS = 11  # at most, until no client has too few samples; flwr-datasets makes as many of its Dirichlet draws


def least_samples(settings: PartitionSettings) -> int:
    """Return the least samples of a client of a Dirichlet draw: one to train on, one to hold out, ``min-samples``."""
    return max(1 if settings.client_test == "labels" else 2, settings.min_samples or 0)


def by_quantity(dataset: Dataset, settings: PartitionSettings) -> list[Tensor]:
    """Return each client's samples, int64, sizes by one Dirichlet draw (Li et al., ICDE 2022, arXiv 2102.02079)."""
    samples, clients, least = len(dataset.train_y), settings.num_clients, least_samples(settings)
    order = torch.randperm(samples, generator=generator(settings.seed, "partition"))
    draws = np.random.default_rng(derive(settings.seed, "sizes"))
    for _ in range(DRAWS):
        ends = draws.dirichlet([settings.dirichlet_alpha] * clients).cumsum()[:-1] * samples
        parts = order.tensor_split(torch.from_numpy(ends.astype(int)))
        if min(map(len, parts)) >= least:
            return list(parts)
    of = f"{samples} samples over num-clients = {clients} with {least} or more each in {DRAWS} draws"
    raise UserError(f"dirichlet-alpha = {settings.dirichlet_alpha}: no partition of {of}")
