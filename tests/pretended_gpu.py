"""A CUDA device that is not there: tensors that say ``cuda:0``, compute on the CPU and refuse what CUDA refuses.

Between :func:`pretended_gpu` and its end, ``torch.cuda.is_available()`` is true, and whatever is brought to the device
``cuda`` becomes a :class:`Pretended` tensor. An operation on tensors of two devices, a CPU generator for a draw on the
device and ``.numpy()`` fail as they do on a GPU. ``Counts`` has the operations on the device and the copies that the
program waits for. It shows nothing of cuDNN, TF32, atomic additions, memory or Ray.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
COPIES = {"copy_", "_to_copy", "set_", "_foreach_copy_"}  # between devices
INDEXING = {"index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put"}
# Operations that launch nothing, and those whose result's size or value the program waits for.
FREE = {
    *("view", "_unsafe_view", "expand", "permute", "t", "transpose", "select", "slice", "squeeze", "unsqueeze"),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "_reshape_alias", "unbind", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "copy_", "_to_copy"),
}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "is_nonzero"}


class Counts(Counter[str]):
    """``operations`` on the device, copies ``to`` and ``from`` it, each of which the program waits for."""


class Pretended(torch.Tensor):
    """A tensor on the pretended device; ``inner``: where its values are."""

    inner: torch.Tensor
    counts = Counts()

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Pretended":
        """Wrap a CPU tensor."""
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended one."""
        return CUDA

    is_cuda, is_cpu = True, False  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:
        """Show the values."""
        return f"Pretended({self.inner})"

    def tolist(self) -> Any:
        """Return the values."""
        self.counts["from"] += 1
        return self.inner.tolist()

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy values, not the wrapper."""
        copy = Pretended(self.inner.clone())
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU."""
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes what is created on, or brought to, ``cuda`` a :class:`Pretended`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        mine = target is not None and torch.device(target).type == "cuda"
        if mine or any(isinstance(leaf, Pretended) for leaf in tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    leaves = tree_leaves((args, kwargs))
    theirs = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    cpu = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, Pretended) and t.device.type == "cpu"]
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    # What C++ makes like a wrapper, as a backward pass does, is asked for on the wrapper's own device.
    like = bool(theirs) and target is not None and target.type == "meta" and name.startswith("new_")
    here = bool(theirs) if target is None else target.type == "cuda" or like
    if here and any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        raise RuntimeError(f"{func}: expected a 'cuda' device type for generator but found 'cpu'")
    if theirs and cpu and name not in COPIES:
        _refuse_mixed(func, name, args, cpu)
    plain_args, plain = tree_map(_inner_for(name), (args, kwargs))
    if here and target is not None:
        plain["device"] = torch.device("cpu")
    out = func(*plain_args, **plain)
    if name == "_to_copy":
        if target is not None and target.type == "meta":
            return out
        _count_copy(here, bool(cpu), bool(theirs) and target is not None and target.type == "cpu")
        out = out.clone() if any(out is leaf or (theirs and _shares(out, leaf)) for leaf in plain_args[:1]) else out
    elif name == "copy_":
        crossing = isinstance(args[0], Pretended) != isinstance(args[1], Pretended)
        _count_copy(isinstance(args[0], Pretended), crossing, crossing)
    elif here or theirs:
        Pretended.counts["operations"] += name not in FREE
        bools = [t for t in tree_leaves(args[1:2]) if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
        Pretended.counts["from"] += name in WAITING or (name in INDEXING and bool(bools))
    known = {id(t.inner): t for t in theirs} | {id(t): t for t in cpu}  # what was changed in place is handed back

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Pretended):
            return value
        return known.get(id(value)) if id(value) in known else Pretended(value) if here else value

    return tree_map(wrapped, out)


def _refuse_mixed(func: Any, name: str, args: Any, cpu: list[torch.Tensor]) -> None:
    """Raise as CUDA does where tensors of two devices meet; numbers (0-dim) and indices of a CUDA tensor may."""
    if name in INDEXING:
        if isinstance(args[0], Pretended) and not (len(args) > 2 and any(args[2] is t and t.dim() for t in cpu)):
            Pretended.counts["to"] += len(cpu)
            return
    elif all(t.dim() == 0 for t in cpu):
        return
    raise RuntimeError(f"{func}: expected all tensors on one device, found cpu {[tuple(t.shape) for t in cpu]}")


def _inner_for(name: str) -> Any:
    def inner(leaf: Any) -> Any:
        if isinstance(leaf, Pretended):
            return leaf.inner
        if name == "where" and isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" and not leaf.dim():
            return torch.zeros((), dtype=leaf.dtype)  # a number that C++ made on the wrapper's own device
        return leaf

    return inner


def _shares(out: torch.Tensor, leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and out.data_ptr() == leaf.data_ptr()


def _count_copy(here: bool, to: bool, back: bool) -> None:
    Pretended.counts["to"] += here and to
    Pretended.counts["from"] += not here and back


def _module_to(self: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """``nn.Module.to`` for parameters that may be, or become, :class:`Pretended`."""
    kind = torch.device(device).type

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if kind == "meta":
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return Pretended(tensor.detach().clone()) if kind == "cuda" else tensor.detach()

    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(moved(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer)
    return self


def _cosine(a: torch.Tensor, b: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """torch's own asks C++ for the device, which is "meta" here; the same operations."""
    lengths = (torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (a, b))
    return ((a / next(lengths)) * (b / next(lengths))).sum(dim)


@contextmanager
def pretended_gpu() -> Iterator[Counts]:
    """Have a GPU; yields the counts."""
    Pretended.counts = counts = Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "a pretended GPU")
        patch.setattr(torch.nn.Module, "to", _module_to)
        patch.setattr(F, "cosine_similarity", _cosine)
        with _Mode():
            yield counts
