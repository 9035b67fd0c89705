"""Running a network with some of its hidden units off: ``f(x ∘ m)`` without forming ``x ∘ m``.

Multiplying a unit's row of weights, its bias and its column in the next layer by m (FedPeWS, Eq. 5, rule "and") is
multiplying the output of its layer and the input of the next one by m. Between the two are only layers that pass a
factor m >= 0 on (ReLU, pooling, dropout), so one product with m² has the value and the gradients of both: the gradients
in the weights of a unit that is off are zero, and so is the gradient in its m: the computation may leave the unit out.

The common form for neuron masks multiplies a unit's output, h = relu(z), once. It has the same values and gradients in
the weights, but ``dL/dm_j = sum over the batch of (dL/dh_j) relu(z_j)`` also for units that are off.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from fedsub_app.common.tensors import Tensors
from fedsub_app.models import Network, Output, split
from fedsub_app.subnets.slices import take


def gated(
    network: Network,
    mask: Tensor,
    x: Tensor,
    tensors: Tensors | None = None,
    *,
    narrow: bool = False,
    outputs: bool = False,
) -> Output:
    """Return f(x ∘ m), differentiable in the weights and, where it requires a gradient, in the mask.

    Parameters
    ----------
    mask : float ``[h]`` of 0 and 1, over the units of all groups.
    tensors : replace the network's.
    narrow : if the units of each layer enter one other, compute with smaller weights (units that are off are cut out)
        instead of with zeros. Values and gradients are the same up to rounding; ``features`` has only units that are
        on. Not for networks with BatchNorm: their gate is behind it so that its statistics are the whole layer's.
    outputs : multiply by m where the units' outputs enter the next layer, for the gradient in the mask of all units.
        Not with ``narrow``.
    """
    groups = network.units
    if outputs or not all(group.chain for group in groups):
        return network(x, _multiplied(network, split(mask, groups), tensors, outputs))
    gates = split(mask.square() if mask.requires_grad else mask, groups)  # 0 and 1 are their squares
    on = split(mask.detach().bool(), groups) if narrow else {}
    if narrow and all(units.any() for units in on.values()):  # torch has no layer without any unit
        gates = {name: gate[on[name]] for name, gate in gates.items()} if mask.requires_grad else {}
        tensors = take(network.tensors if tensors is None else tensors, groups, on)  # frozen ones too
    for name, gate in gates.items():
        network.gates[name].factor = gate
    try:
        return network(x, tensors)
    finally:
        for name in gates:
            network.gates[name].factor = None


def _multiplied(network: Network, gates: Tensors, tensors: Tensors | None, outputs: bool) -> Tensors:
    """Return x ∘ m itself, for units that several layers produce; ``outputs``: as they enter the layers that read them.

    Where each of these layers has a BatchNorm behind it, its weights are multiplied in place of the layer's: its
    statistics are those of the whole layer.
    """
    own = {name: tensor for name, tensor in network.tensors.items() if isinstance(tensor, nn.Parameter)}  # also frozen
    masked = dict(own if tensors is None else tensors)
    for group in network.units:
        rows = {place.name.rpartition(".")[0] for place in group.places if place.axis == 0 and place.name in own}
        behind = rows & network.normalisations.keys()
        before = rows - behind if 2 * len(behind) == len(rows) else set()
        for name, axis, start, repeat, length in group.places:
            if name in own and (axis == 1 or not (outputs or name.rpartition(".")[0] in before)):
                gate = gates[group.name].repeat_interleave(repeat)
                gate = F.pad(gate, (start, length - start - len(gate)), value=1.0)
                masked[name] = masked[name] * gate.view([-1 if k == axis else 1 for k in range(masked[name].dim())])
    return masked
