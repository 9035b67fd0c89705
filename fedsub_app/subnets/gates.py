"""Running a network with some of its hidden units off: ``f(x ∘ m)`` without forming ``x ∘ m``.

Multiplying a unit's row of weights, its bias and its column in the next layer by m (FedPeWS, Eq. 5, rule "and") is
multiplying what leaves its layer and what enters the next one by m. The values are the same; so are the gradients in
the weights (zero for units that are off) and in m (both factors count). It costs two products of a vector with the
activations a layer instead of one with every tensor. With BatchNorm the gate is behind it, so that statistics are
those of the ungated layer.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedsub_app.models.units import UnitGroup


class Gates:
    """Gates on the hidden units of ``model``; open (all units on) while ``masks`` is empty.

    Parameters
    ----------
    model : the network; hooks are put on its layers and stay until :meth:`remove`.
    groups : its unit groups.

    Attributes
    ----------
    masks : group name -> float ``[size]`` of 0 and 1, may require a gradient; set it before calling the model.
    """

    def __init__(self, model: nn.Module, groups: Sequence[UnitGroup]) -> None:
        self.masks: Mapping[str, Tensor] = {}
        self._handles = []
        for group in groups:
            last = model.get_submodule(group.rows[-1].rpartition(".")[0])  # the layer, or the BatchNorm behind it
            self._handles.append(last.register_forward_hook(partial(self._leaving, group.name)))
            for name, repeat in group.cols:
                consumer = model.get_submodule(name.rpartition(".")[0])
                self._handles.append(consumer.register_forward_pre_hook(partial(self._entering, group.name, repeat)))

    def _leaving(self, group: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * _over_channels(self.masks[group], output) if self.masks else output

    def _entering(self, group: str, repeat: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The unit's output is gated already: a second factor changes nothing but the gradient in the mask.
        if not self.masks or not self.masks[group].requires_grad:
            return inputs
        mask = self.masks[group] if repeat == 1 else self.masks[group].repeat_interleave(repeat)
        return (inputs[0] * _over_channels(mask, inputs[0]),)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def _over_channels(mask: Tensor, values: Tensor) -> Tensor:
    """View a mask so that it broadcasts over axis 1 of activations ``[batch, units, ...]``."""
    return mask.view(-1, *[1] * (values.dim() - 2))
