"""The workplace that all clients of one process share: problem, data on the device, partition, one model object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedsub_app.common.device import pick_device
from fedsub_app.common.tensors import Tensors
from fedsub_app.data import AnySamples, Partition, make_partition
from fedsub_app.models import Network, base_digest, narrowed, tensors_of, widths_of
from fedsub_app.problem import Problem
from fedsub_app.settings import Settings
from fedsub_app.training import costs
from fedsub_app.training.optimizer import Optimizer


@dataclass(frozen=True, eq=False)
class Workplace:
    """Settings, problem, data on the device, partition, and the networks, one object a width."""

    settings: Settings
    problem: Problem
    partition: Partition
    network: Network
    device: torch.device
    train_x: AnySamples
    train_y: Tensor
    test_x: AnySamples
    test_y: Tensor
    first: Callable[[], Tensors] | None = None  # returns the initial global model that no seed gives
    optimizer: Callable[[Settings, Mapping[str, Tensor], float], Optimizer] = Optimizer  # of parameters and an lr

    @cached_property
    def black(self) -> Tensor:
        """Value of a black pixel after normalisation: each channel's minimum, float [channels]."""
        return self.train_x.darkest()

    # Caches belong to the workplace, not to its class: an earlier run's tensors on a GPU are freed with its workplace.
    @cached_property
    def narrow_network(self) -> Callable[[tuple[int, ...]], Network]:
        """Function: units of each hidden layer -> the network of these widths."""
        groups = self.network.units
        names = [group.name for group in groups]

        def made(widths: tuple[int, ...]) -> Network:
            return Network(narrowed(self.network.module, groups, dict(zip(names, widths, strict=True))))

        return lru_cache(maxsize=8)(made)

    def network_for(self, tensors: Mapping[str, Tensor]) -> Network:
        """Return the network that has tensors of these shapes: the whole one, or one with fewer hidden units."""
        whole = self.network.tensors
        if tensors.keys() != whole.keys() or all(tensors[name].shape == tensor.shape for name, tensor in whole.items()):
            return self.network
        widths = widths_of(self.network.units, tensors)
        return self.narrow_network(tuple(widths[group.name] for group in self.network.units))

    def training_flops(self, network: Network, names: frozenset[str] | None = None) -> int:
        """Return the FLOPs of one forward and backward pass of one sample; ``names``: the tensors that are trained."""
        return self._flops(network, True, names)

    def forward_flops(self, network: Network) -> int:
        """Return the FLOPs of one forward pass of one sample."""
        return self._flops(network, False, None)

    @cached_property
    def _flops(self) -> Callable[[Network, bool, frozenset[str] | None], int]:
        def count(network: Network, training: bool, names: frozenset[str] | None) -> int:
            if training:
                return costs.training_flops(self.problem, network.module, names)
            return costs.forward_flops(self.problem, network.module)

        return lru_cache(maxsize=256)(count)

    @cached_property
    def base(self) -> str:
        """Digest of the network's frozen base, "" without one."""
        return base_digest(self.network.module)

    def initial(self, seed: int | None = None) -> Tensors:
        """Return the initial global model, from the seed or as the server sent it, or another seed's model."""
        if self.first and seed is None:
            return self.first()
        return tensors_of(self.problem.network(seed))


@lru_cache(maxsize=1)
def workplace(settings: Settings, problem: Problem | None = None) -> Workplace:
    """Load data, partition and model once per process and settings; ``problem``: in the place of the named one."""
    problem = problem or Problem.of(settings)
    data = problem.data
    partition = make_partition(data, settings.partitioning)
    device = pick_device(settings.device, settings.gpu_exact)
    # Images are channels-last (fastest in oneDNN); weights are not, so they are sliced, sent and averaged as stored.
    train_x, test_x = data.train_x.to(device), data.test_x.to(device)
    train_y, test_y = data.train_y.to(device), data.test_y.to(device)
    network = Network(problem.network().to(device))
    return Workplace(settings, problem, partition, network, device, train_x, train_y, test_x, test_y)
