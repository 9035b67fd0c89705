"""The names of LoRA's tensors, as the package peft gives them, and their ranks as units."""

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from fedsub_app.models.groups import UnitGroup
from fedsub_app.models.networks import tensors_of

_A, _B, _W = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"


class Adapter(NamedTuple):
    """The names of an adapter's tensors: A ``[r, in, ...]``, B ``[out, r, ...]``, and of W ``[out, in, ...]``."""

    a: str
    b: str
    weight: str

    @property
    def layer(self) -> str:
        return self.weight.removesuffix(_W)


def adapters(names: Collection[str]) -> tuple[Adapter, ...]:
    """Return the LoRA adapters among a network's tensors, in their order."""
    layers = [name.removesuffix(_A) for name in names if name.endswith(_A)]
    return tuple(Adapter(f"{layer}{_A}", f"{layer}{_B}", f"{layer}{_W}") for layer in layers)


def scale_of(model: nn.Module) -> float:
    """Return alpha / r, the factor of B A in a network's adapters; 1 without any. Adapters of a lower rank keep it."""
    scales = (vars(module)["scaling"] for module in model.modules() if "scaling" in vars(module))
    return next((float(scale["default"]) for scale in scales if isinstance(scale, dict)), 1.0)


def rank_groups(model: nn.Module) -> tuple[UnitGroup, ...]:
    """Return the ranks of each adapter as units: rows of A and columns of B; ``()`` without adapters."""
    tensors = tensors_of(model)
    return tuple(
        UnitGroup(each.a.removesuffix(".weight"), len(tensors[each.a]), (each.a,), ((each.b, 1),), chain=False)
        for each in adapters(tensors)
    )
