"""Running a network with some of its hidden units off: ``f(x ∘ m)`` without forming ``x ∘ m``.

Multiplying a unit's row of weights, its bias and its column in the next layer by m (FedPeWS, Eq. 5, rule "and") is
multiplying what leaves its layer and what enters the next one by m. Between the two are only layers that pass a factor
m >= 0 on (ReLU, pooling, dropout), so one product with m² has the value and the gradients of both: in the weights of a
unit that is off they are zero, and in its m as well. Therefore a unit that is off may also be left out of the
computation altogether.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedsub_app.models.units import UnitGroup
from fedsub_app.subnets.masks import split
from fedsub_app.subnets.slices import take


class Gates:
    """Gates on the hidden units of ``model``, open but during :meth:`forward`.

    Parameters
    ----------
    model : the network; hooks are put on its layers and stay until :meth:`remove`.
    groups : its unit groups.
    narrow : compute with smaller weights (units that are off are cut out) instead of with zeros: the same values and
        gradients up to rounding. Not for networks with BatchNorm, whose gate is behind it so that its statistics are
        those of the whole layer.
    """

    def __init__(self, model: nn.Module, groups: Sequence[UnitGroup], narrow: bool = False) -> None:
        self.model = model
        self.groups = groups
        self.narrow = narrow
        self._parameters = dict(model.named_parameters())
        self._masks: Mapping[str, Tensor] = {}
        self._handles = []
        for group in groups:
            last = model.get_submodule(group.rows[-1].rpartition(".")[0])  # the layer, or the BatchNorm behind it
            self._handles.append(last.register_forward_hook(partial(self._gate, group.name)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return f(x ∘ m), differentiable in the weights and, where it requires a gradient, in the mask.

        Parameters
        ----------
        x : a batch of inputs.
        mask : float ``[h]`` of 0 and 1, over the units of all groups.
        """
        gates = split(mask.square(), self.groups)
        if not self.narrow:
            return self._gated(gates, self._parameters, x)
        units = split(mask.detach().bool(), self.groups)
        ones = {name: gate[units[name]] for name, gate in gates.items()} if mask.requires_grad else {}
        return self._gated(ones, take(self._parameters, self.groups, units), x)

    def _gated(self, gates: Mapping[str, Tensor], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        self._masks = gates
        try:
            output: Tensor = functional_call(self.model, dict(weights), (x,)) if self.narrow else self.model(x)
        finally:
            self._masks = {}
        return output

    def _gate(self, group: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        gate = self._masks.get(group)
        return output if gate is None else output * gate.view(-1, *[1] * (output.dim() - 2))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
