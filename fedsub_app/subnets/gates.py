"""Running a network with some of its hidden units off: ``f(x ∘ m)`` without forming ``x ∘ m``.

Multiplying a unit's row of weights, its bias and its column in the next layer by m (FedPeWS, Eq. 5, rule "and") is
multiplying what leaves its layer and what enters the next one by m. Between the two are only layers that pass a factor
m >= 0 on (ReLU, pooling, dropout), so one product with m² has the value and the gradients of both: in the weights of a
unit that is off they are zero, and in its m as well. Therefore a unit that is off may also be left out of the
computation altogether.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from fedsub_app.models import Network, Output
from fedsub_app.subnets.masks import split
from fedsub_app.subnets.slices import take


def gated(
    network: Network, mask: Tensor, x: Tensor, tensors: Mapping[str, Tensor] | None = None, narrow: bool = False
) -> Output:
    """Return f(x ∘ m), differentiable in the weights and, where it requires a gradient, in the mask.

    Parameters
    ----------
    network : the network; its tensors unless ``tensors`` are given.
    mask : float ``[h]`` of 0 and 1, over the units of all groups.
    x : a batch of inputs.
    narrow : compute with smaller weights (units that are off are cut out) instead of with zeros: the same values and
        gradients up to rounding; ``features`` are then those of the units that are on. Not for networks with
        BatchNorm, whose gate is behind it so that its statistics are those of the whole layer.
    """
    groups = network.units
    gates = split(mask.square(), groups)
    if narrow:
        on = split(mask.detach().bool(), groups)
        gates = {name: gate[on[name]] for name, gate in gates.items()} if mask.requires_grad else {}
        tensors = take(network.parameters if tensors is None else tensors, groups, on)
    with _on(network, gates):
        return network(x, tensors)


@contextmanager
def _on(network: Network, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply what leaves the layers, or the BatchNorm behind them, by the gates."""
    with ExitStack() as stack:
        for group in network.units:
            if group.name in gates:
                last = network.module.get_submodule(group.rows[-1].rpartition(".")[0])
                stack.enter_context(last.register_forward_hook(_Gate(gates[group.name])))
        yield


class _Gate:
    def __init__(self, gate: Tensor) -> None:
        self.gate = gate

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self.gate.view(-1, *[1] * (output.dim() - 2))
