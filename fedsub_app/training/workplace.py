"""What all clients of one process share: data on the device, partition, one model object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedsub_app.common.device import pick_device
from fedsub_app.common.tensors import Tensors
from fedsub_app.data import Dataset, Partition, Samples, load_dataset, make_partition
from fedsub_app.models import Network, build_model, narrowed, tensors_of, widths_of
from fedsub_app.settings import Settings
from fedsub_app.training import costs


@dataclass(frozen=True, eq=False)
class Workplace:
    """Settings, data on the device, partition, and the networks, of which there is one object a width."""

    settings: Settings
    dataset: Dataset
    partition: Partition
    network: Network
    device: torch.device
    train_x: Samples
    train_y: Tensor
    test_x: Samples
    test_y: Tensor

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.dataset.train_x.shape[1:])

    @cached_property
    def black(self) -> Tensor:
        """Value of a black pixel after normalisation: each channel's minimum, float [channels]."""
        return self.train_x.darkest()

    # Caches are the workplace's own, not their class's: what an earlier run has on a GPU goes with its workplace.
    @cached_property
    def narrow_network(self) -> Callable[[tuple[int, ...]], Network]:
        """Returns the network with so many units in each of its hidden layers."""
        groups = self.network.units
        names = [group.name for group in groups]

        def made(widths: tuple[int, ...]) -> Network:
            return Network(narrowed(self.network.module, groups, dict(zip(names, widths, strict=True))))

        return lru_cache(maxsize=8)(made)

    def network_for(self, tensors: Mapping[str, Tensor]) -> Network:
        """Return the network that these tensors are of: the whole one, or one with fewer hidden units."""
        own = self.network.tensors
        if tensors.keys() != own.keys() or all(tensors[name].shape == tensor.shape for name, tensor in own.items()):
            return self.network
        found = widths_of(self.network.units, tensors)
        return self.narrow_network(tuple(found[group.name] for group in self.network.units))

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
                return costs.training_flops(network.module, self.in_shape, 1, names)
            return costs.forward_flops(network.module, self.in_shape, 1)

        return lru_cache(maxsize=256)(count)

    def initial(self, seed: int | None = None) -> Tensors:
        """Return the initial global model, which every client can rebuild from the seed, or that of another seed."""
        settings = self.settings
        seed = settings.seed if seed is None else seed
        return tensors_of(
            build_model(settings.model, self.in_shape, self.dataset.num_classes, seed, settings.hidden_width)
        )


@lru_cache(maxsize=1)
def workplace(settings: Settings) -> Workplace:
    """Load data, partition and model once per process and settings."""
    dataset = load_dataset(settings.data)
    partition = make_partition(settings.data, settings.partitioning)
    device = pick_device(settings.device, settings.gpu_exact)
    model = build_model(
        settings.model, tuple(dataset.train_x.shape[1:]), dataset.num_classes, settings.seed, settings.hidden_width
    )
    # Images are channels-last (fastest in oneDNN); weights are not, so they are sliced, sent and averaged as stored.
    train_x, test_x = dataset.train_x.to(device), dataset.test_x.to(device)
    train_y, test_y = dataset.train_y.to(device), dataset.test_y.to(device)
    network = Network(model.to(device))
    return Workplace(settings, dataset, partition, network, device, train_x, train_y, test_x, test_y)
