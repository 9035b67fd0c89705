"""The FLOPs of a sample, by counting operations.

FLOPs = 2 x MAC, as ``torch.utils.flop_counter`` counts them: convolutions and matrix products; BatchNorm, activations
and pooling are free. The IST paper counts otherwise: :func:`published_flops`.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.failures import machine_failure
from fedsub_app.common.inputs import blank
from fedsub_app.models import UnitGroup, narrowed, trainable
from fedsub_app.training.problem import Problem


class _Counter(TorchDispatchMode):
    """Adds up FLOPs by torch's formulas; FlopCounterMode imports torch._dynamo, which takes longer than a short run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def _unfused() -> Iterator[None]:
    """Compute attention and recurrent layers by the operations that they consist of: fused ones have no formula."""
    fast, fused = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.mkldnn.enabled = fused


def _flops(problem: Problem, model: nn.Module, training: bool, names: Collection[str] | None = None) -> int:
    """Return the FLOPs of one input, half of those of a batch of two.

    A copy of the model computes on two inputs of zeros: BatchNorm on batch statistics refuses one. The generators stay
    as they are. No value of a model on a GPU is copied.
    """
    away = [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "cpu"]
    memo = {id(t): torch.zeros(t.shape, dtype=t.dtype) for t in away}
    blanks = {id(t): nn.Parameter(memo[id(t)], t.requires_grad) for t in away if isinstance(t, nn.Parameter)}
    copied, counter = copy.deepcopy(model, memo | blanks), _Counter()
    with torch.random.fork_rng(devices=[]), _unfused(), counter, torch.set_grad_enabled(training):
        out = copied.train(training)(blank(2, problem.data.in_shape))
        trained = [p for name, p in trainable(copied).items() if names is None or name in names] if training else []
        try:
            if trained:
                torch.autograd.grad(out.sum(), trained, allow_unused=True)
        except RuntimeError as error:  # code of the user, such as a change in place
            if machine_failure(error):
                raise
            raise UserError(f"model = {problem.name!r}: has no gradient: {one_line(error)[:200]}") from error
    return counter.flops // 2


def forward_flops(problem: Problem, model: nn.Module) -> int:
    """Return the FLOPs of one forward pass of one of the problem's inputs through ``model``."""
    return _flops(problem, model, training=False)


def training_flops(problem: Problem, model: nn.Module, names: Collection[str] | None = None) -> int:
    """Return the FLOPs of one forward and backward pass of one of the problem's inputs through ``model``.

    With ``names`` the backward pass ends at the first of these trained tensors. The gradient of the input is not
    computed: the total is a little below three times the forward pass. The optimizer's step is left out.
    """
    return _flops(problem, model, training=True, names=names)


def published_flops(forward: float, contrastive: bool) -> float:
    """Return the FLOPs of a training step as the IST paper's tables count them, from those of the forward pass.

    Hu et al. 2023: one a MAC, no backward pass, and MOON's two further forward passes (``contrastive``) count as one.
    Appendix B.2 says that the forward pass counts twice to include the backward one. The tables do not do so: FedAvg's
    GFLOPs and GB in Table 2 are 25 local steps apart, as many as it makes, and not 50.
    """
    return forward / 2 * (2 if contrastive else 1)


def subnet_flops(problem: Problem, model: nn.Module, groups: Sequence[UnitGroup], masks: Mapping[str, Tensor]) -> int:
    """Return the FLOPs of training the network of the units that are on, as if it were physically that small.

    Executed with masks (as FedPeWS does) the full network costs :func:`training_flops`.

    ``masks``: name of one of ``groups`` -> bool ``[size]``; each layer keeps a unit or more, without a mask all.
    """
    widths = {name: max(1, int(mask.sum())) for name, mask in masks.items()}
    return training_flops(problem, narrowed(model, groups, widths))
