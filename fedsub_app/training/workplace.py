"""The workplace that all clients of one process share: problem, data on the device, partition, one model object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedsub_app.common.device import pick_device
from fedsub_app.common.inputs import Batch
from fedsub_app.common.run_files import initial_model
from fedsub_app.common.tensors import Tensors
from fedsub_app.data import AnySamples, LazySamples, Partition, make_partition
from fedsub_app.models import Network, base_digest, narrowed, tensors_of, widths_of
from fedsub_app.settings import Settings
from fedsub_app.training import costs
from fedsub_app.training.optimizer import Optimizer
from fedsub_app.training.problem import Problem

Split = Literal["train", "validation", "test"]
KEPT_BYTES = 2**28  # of clients' training samples, as float32, in a process


@dataclass(frozen=True, eq=False)
class Workplace:
    """Settings, problem, data on the device, partition, and the networks, one object a width."""

    settings: Settings
    problem: Problem
    partition: Partition
    network: Network
    device: torch.device
    first: Callable[[], Tensors] | None = None  # returns the initial global model if no seed gives it
    optimizer: Callable[[Settings, Mapping[str, Tensor], float], Optimizer] = Optimizer  # of parameters and an lr
    train_x: AnySamples = field(init=False)
    train_y: Tensor = field(init=False)
    test_x: AnySamples = field(init=False)
    test_y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # Images are channels-last (fastest in oneDNN); weights are sliced, sent and averaged as they are stored.
        for name in ("train_x", "train_y", "test_x", "test_y"):
            object.__setattr__(self, name, getattr(self.problem.data, name).to(self.device))

    @cached_property
    def black(self) -> Tensor:
        """Value of a black pixel after normalisation: each channel's minimum, float [channels]."""
        return self.train_x.darkest()

    # Caches belong to the workplace, not to its class: an earlier run's tensors on a GPU are freed with its workplace.
    @cached_property
    def training_samples(self) -> Callable[[int], tuple[Batch | LazySamples, Tensor]]:
        """Function: client -> its training samples and labels, not to be changed; the last clients' are kept."""
        sample = 1 if isinstance(self.train_x, LazySamples) else self.train_x[:1].nbytes
        kept = KEPT_BYTES // (sample * max(map(len, self.partition.train)))
        return lru_cache(kept)(lambda client: self.samples(client, "train"))

    @cached_property
    def narrow_network(self) -> Callable[[tuple[tuple[str, int], ...]], Network]:
        """Function: names and units of the hidden layers -> the network of these widths."""
        return lru_cache(8)(lambda widths: Network(narrowed(self.network.reset(), self.network.units, dict(widths))))

    def samples(self, client: int, split: Split) -> tuple[Batch | LazySamples, Tensor]:
        """Return a client's samples and labels of a split; there may be none."""
        index = getattr(self.partition, split)[client].to(self.device)
        in_test_set = split == "test" and self.partition.test_pool == "test"
        x, y = (self.test_x, self.test_y) if in_test_set else (self.train_x, self.train_y)
        return x.part(index), y[index]

    def network_for(self, tensors: Mapping[str, Tensor]) -> Network:
        """Return the network that has tensors of these shapes: the whole one, or one with fewer hidden units."""
        whole = self.network.tensors
        if tensors.keys() != whole.keys() or all(tensors[name].shape == tensor.shape for name, tensor in whole.items()):
            return self.network
        return self.narrow_network(tuple(widths_of(self.network.units, tensors).items()))

    @cached_property
    def training_flops(self) -> Callable[..., int]:
        """Function: network, names -> FLOPs of a forward and backward pass of a sample; ``names``: what is trained."""
        return lru_cache(256)(lambda network, names=None: costs.training_flops(self.problem, network.module, names))

    @cached_property
    def forward_flops(self) -> Callable[[Network], int]:
        """Function: network -> FLOPs of one forward pass of one sample."""
        return lru_cache(256)(lambda network: costs.forward_flops(self.problem, network.module))

    @cached_property
    def base(self) -> str:
        """Digest of the network's frozen base, "" without one."""
        return base_digest(self.network.module)

    def initial(self, seed: int | None = None) -> Tensors:
        """Return the initial global model, from the seed or as the server sent it, or another seed's model."""
        if seed is not None:
            return tensors_of(self.problem.network(seed))
        return {name: tensor.detach().clone() for name, tensor in self._initial.items()}

    @cached_property
    def _initial(self) -> Tensors:
        return self.first() if self.first else tensors_of(self.problem.network())


@lru_cache(maxsize=1)
def workplace(
    settings: Settings, problem: Problem | None = None, state: Path | None = None, run: str = ""
) -> Workplace:
    """Load data, partition and model once per process, settings and run.

    ``problem``: replaces the one that the settings name; ``state``: the node's folder of the run, with the initial
    model; ``run``: the run's id, because files that the settings name may change between runs.
    """
    problem = problem or Problem.of(settings)
    partition = make_partition(problem.data, settings.partitioning)
    device = pick_device(settings.device, settings.gpu_exact)
    first = partial(initial_model, state) if settings.start_from and state else None
    return Workplace(settings, problem, partition, Network(problem.network().to(device)), device, first)
