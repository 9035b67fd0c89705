"""What all clients of one process share: data on the device, partition, one model object."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors
from fedsub_app.data import Dataset, Partition, load_dataset, make_partition
from fedsub_app.models import build_model, tensors_of, unit_groups
from fedsub_app.models.units import UnitGroup
from fedsub_app.settings import Settings
from fedsub_app.training import costs


@dataclass(frozen=True, eq=False)
class Workplace:
    """What all clients of one process share: data on the device, partition, one model object."""

    settings: Settings
    dataset: Dataset
    partition: Partition
    model: nn.Module
    device: torch.device
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.dataset.train_x.shape[1:])

    @cached_property
    def units(self) -> tuple[UnitGroup, ...]:
        """Hidden units of the network."""
        return unit_groups(self.model)

    @cached_property
    def tensors(self) -> Tensors:
        """The network's tensors by name, live."""
        return tensors_of(self.model)

    @cached_property
    def black(self) -> torch.Tensor:
        """Value of a black pixel after normalisation: each channel's minimum, float [channels]."""
        return self.train_x.amin((0, 2, 3))

    @cached_property
    def flops_per_sample(self) -> int:
        """FLOPs of one forward and backward pass of the dense network."""
        return costs.training_flops(self._bare, self.in_shape, 1)

    @lru_cache(maxsize=64)  # noqa: B019  (a workplace lives as long as its process needs it)
    def flops_of(self, names: frozenset[str]) -> int:
        """FLOPs of the same with all other tensors frozen."""
        return costs.training_flops(self._bare, self.in_shape, 1, names)

    @cached_property
    def _bare(self) -> nn.Module:
        """The network without the hooks that a client may have on it."""
        return build_model(self.settings.model, self.in_shape, self.dataset.num_classes, self.settings.seed)


def pick_device(name: str) -> torch.device:
    """Resolve the setting ``device``."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': this machine has no CUDA device; allowed here are auto, cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@lru_cache(maxsize=2)
def workplace(settings: Settings) -> Workplace:
    """Load data, partition and model once per process and settings."""
    dataset = load_dataset(settings.data)
    partition = make_partition(settings.data, settings.partitioning)
    device = pick_device(settings.device)
    model = build_model(settings.model, tuple(dataset.train_x.shape[1:]), dataset.num_classes, settings.seed)
    # Images are channels-last (fastest in oneDNN); weights are not, so they are sliced, sent and averaged as stored.
    placed = [
        part.to(device, memory_format=torch.channels_last if part.dim() == 4 else torch.preserve_format)
        for part in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y)
    ]
    return Workplace(settings, dataset, partition, model.to(device), device, *placed)
