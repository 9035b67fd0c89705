"""The networks of the papers, by name, and their tensors, by name.

Every network but ResNet-18 is one ``nn.Sequential`` with named children (``conv1``, ``bn1``, ``relu1``, ``pool1``, …,
``flatten``, ``fc1``, …), so that :mod:`fedsub_app.models.units` can read its structure. All of them return logits.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsub_app.common.errors import UserError, explained
from fedsub_app.common.inputs import Shape
from fedsub_app.common.machine import check_memory
from fedsub_app.common.own_code import is_source, read_options
from fedsub_app.common.seeds import drawing
from fedsub_app.common.spelling import one_of
from fedsub_app.common.tensors import CPU, brought
from fedsub_app.models.names import NETWORKS
from fedsub_app.models.sources import adopted, base_names, check_types, from_source, numbers


def _fully_connected(layers: dict[str, nn.Module], widths: Sequence[int], batch_norm: bool = False) -> nn.Sequential:
    """Return ``layers`` and behind them Linear layers ``fc1``, … of these widths, with a ReLU between two of them."""
    relus = sum(isinstance(layer, nn.ReLU) for layer in layers.values())
    for k in range(1, len(widths)):
        layers[f"fc{k}"] = nn.Linear(widths[k - 1], widths[k])
        if k < len(widths) - 1:
            if batch_norm:
                # IST: statistics of the batch in training and in evaluation alike; with no running statistics
                # (and the authors' momentum of 1) there is nothing that a client could keep or send.
                layers[f"bn{k}"] = nn.BatchNorm1d(widths[k], momentum=1.0, track_running_stats=False)
            layers[f"relu{relus + k}"] = nn.ReLU()
    return nn.Sequential(OrderedDict(layers))


def mlp(in_features: int, num_classes: int, hidden: Sequence[int], batch_norm: bool = False) -> nn.Sequential:
    """Return a multi-layer perceptron; images are flattened, flat inputs pass through.

    ``mlp(3072, classes, [3000], batch_norm=True)`` is the global network of IST for ten clients a round, whose hidden
    layer is wider than that of ``feature-mlp``. Initialised from the global generator: see :func:`build_model`.
    """
    return _fully_connected({"flatten": nn.Flatten()}, [in_features, *hidden, num_classes], batch_norm)


def _image_shape(name: str, in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return ``in_shape`` as (channels, height, width); raise UserError unless it is one, of ``smallest`` or more."""
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        allowed = f"images (channels, height, width) of at least {smallest} x {smallest}"
        raise UserError(f"model = {name!r} cannot take inputs of shape {tuple(in_shape)}; allowed: {allowed}")
    return in_shape[0], in_shape[1], in_shape[2]


class MaxPool(nn.MaxPool2d):
    """2 x 2 max-pooling with torch's outputs; without gradients on a CPU it is several times as fast as torch's.

    torch also looks for the place of each maximum, one number after the other if a layer has few channels: that was
    40 % of LeNet-5's evaluation.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.device.type != "cpu" or _traced():
            return torch.max_pool2d(x, 2)
        height, width = (size // 2 * 2 for size in x.shape[-2:])
        rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class TrimmedConv2d(nn.Conv2d):
    """A convolution without the rows and columns of its kernel that reach nothing but padding, where oneDNN computes.

    They have no part in the output, and their gradient is 0. In the last stage of ResNet-18 for images of 32 pixels, a
    3 x 3 kernel at 1 x 1 position, they are 8 of 9. oneDNN multiplies them by zeros, image after image.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of ``x``, [n, channels, height, width], with another rounding than ``nn.Conv2d``."""
        kernel, size = self.kernel_size, x.shape[-2:]
        small = len(size) == 2 and (size[0] < kernel[0] or size[1] < kernel[1])  # rarely: the quickest test first
        if not small or _traced() or not _by_onednn(x):
            return super().forward(x)
        axes: Any = zip(size, self.weight.shape[2:], self.stride, self.padding, strict=True)
        (rows, top), (columns, left) = (_reached(*axis) for axis in axes)
        weight = self.weight[:, :, rows, columns]
        try:
            return torch.conv2d(x, weight, self.bias, self.stride, (top, left), 1, self.groups)
        except RuntimeError:  # its text would have the sizes of what is left
            return super().forward(x)


def _by_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and bool(torch._C._get_mkldnn_enabled())


def _traced() -> bool:
    """Say whether the network is being written down for another runtime."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _reached(size: int, kernel: int, stride: int, padding: int) -> tuple[slice, int]:
    """Return the part of an axis of a kernel that reaches an input of this size, and the padding that it needs."""
    places = (size + 2 * padding - kernel) // stride + 1
    first, last = max(0, padding - (places - 1) * stride), min(kernel, size + padding)
    less = padding - first
    even = (size + 2 * less - (last - first)) // stride + 1 == places  # else another padding before than behind
    return (slice(first, last), less) if places > 0 and even and first < last else (slice(None), padding)


def trim_kernels(model: nn.Module) -> None:
    """Let the network's convolutions leave out what reaches nothing but padding (:class:`TrimmedConv2d`)."""
    for module in model.modules():
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and module.dilation == (1, 1):
            sizes = (module.kernel_size, module.stride, module.padding)
            if all(isinstance(size, tuple) for size in sizes):  # else "same", or a number that was set later
                module.__class__ = TrimmedConv2d


def _conv_net(
    name: str,
    in_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: Sequence[int],
    kernel: int,
    padding: int = 0,
    hidden: Sequence[int] = (),
    batch_norm: bool = False,
) -> nn.Module:
    """Blocks of convolution, [BatchNorm,] 2 x 2 max-pooling and ReLU, then fully connected layers."""

    def size_after_blocks(size: int) -> int:
        for _ in channels:
            size = max(size + 2 * padding - kernel + 1, 0) // 2
        return size

    smallest = next(size for size in count(1) if size_after_blocks(size) >= 1)
    in_channels, height, width = _image_shape(name, in_shape, smallest)
    layers: dict[str, nn.Module] = {}
    for k, out_channels in enumerate(channels, start=1):
        layers[f"conv{k}"] = nn.Conv2d(in_channels, out_channels, kernel, padding=padding)
        if batch_norm:
            layers[f"bn{k}"] = nn.BatchNorm2d(out_channels)
        layers[f"pool{k}"] = MaxPool()  # before the ReLU, which commutes with it: a quarter of its work
        layers[f"relu{k}"] = nn.ReLU()
        in_channels = out_channels
    layers["flatten"] = nn.Flatten()
    flat = in_channels * size_after_blocks(height) * size_after_blocks(width)
    return _fully_connected(layers, [flat, *hidden, num_classes])


def _resnet18(name: str, in_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """torchvision's ResNet-18, with its 7 x 7 stem also for small images (as FedSelect's code has it).

    ``resnet18-imagenet``: with ImageNet's weights, read from torch's hub folder or downloaded, and a fresh output
    layer. ``resnet18-gn``: with GroupNorm of 32 groups (Wu, He 2018) in the place of BatchNorm. It reads images of
    up to 64 pixels in torch's plain layout. Channels last, the samples' layout, its step takes 1.2 to 1.7 times as long
    on a CPU at 32 pixels. Larger images, BatchNorm, depthwise and small networks are as fast or faster channels last.
    """
    channels, height, _ = _image_shape(name, in_shape, 1)
    from torchvision.models import ResNet18_Weights, resnet18  # on demand: it takes a second

    net: nn.Module
    if name == "resnet18-imagenet":
        weights = ResNet18_Weights.IMAGENET1K_V1
        if channels != 3:
            raise UserError(f"model = {name!r}: trained on RGB images, these have {channels} channels")
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
        with explained(f"model = {name!r}: needs {file}, from {weights.url}", 200):  # no network, a damaged file
            net = resnet18(weights=weights, progress=False)
        net.fc = nn.Linear(512, num_classes)
        return net
    group_norm = {"norm_layer": partial(nn.GroupNorm, 32)} if name == "resnet18-gn" else {}
    net = resnet18(weights=None, num_classes=num_classes, **group_norm)
    if group_norm or channels != 3:
        stem = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        net.set_submodule("conv1", stem)
        if not group_norm:
            nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # torchvision's own rule
    if group_norm and height <= 64:
        net.register_forward_pre_hook(_contiguous)
    return adopted(net, in_shape) if group_norm else net


def _contiguous(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].clone(memory_format=torch.contiguous_format)  # grey images are contiguous as they are


_MLPS: dict[str, dict[str, Any]] = {  # settings of multi-layer perceptrons
    "fedpews-mlp": {"hidden": (32, 64, 128, 32)},
    "feature-mlp": {"hidden": (1000,), "batch_norm": True},
    "feature-mlp2": {"hidden": (1000, 1000), "batch_norm": True},
}
_CONV_NETS: dict[str, dict[str, Any]] = {
    "fedpews-cnn": {"channels": (32, 64, 128), "kernel": 3, "padding": 1},
    "lenet5": {"channels": (6, 16), "kernel": 5, "hidden": (120, 84)},
    "lenet5-bn": {"channels": (6, 16), "kernel": 5, "hidden": (120, 84), "batch_norm": True},
    "mnist-cnn": {"channels": (10, 20), "kernel": 5, "hidden": (50,)},
    "mnist-cnn-bn": {"channels": (10, 20), "kernel": 5, "hidden": (50,), "batch_norm": True},
    "fedpart-cnn": {"channels": (6, 16), "kernel": 5, "hidden": (180, 160, 140, 120, 84)},
    "pfllib-cnn": {"channels": (32, 64), "kernel": 5, "hidden": (512,)},
}


def build_model(
    name: str, in_shape: Shape, num_classes: int, seed: int, width: int | None = None, options: str = ""
) -> nn.Module:
    """Return the network ``name`` on the CPU, in training mode, initialised as PyTorch does by default.

    Parameters
    ----------
    name : a name of :func:`~fedsub_app.models.model_names`, or ``SOURCE:NAME`` (:mod:`fedsub_app.models.sources`).
    in_shape : shape of one input without the batch axis: ``(features,)`` or ``(channels, height, width)``.
    seed : equal arguments give bit-identical weights; the global generators are left as they were. A network of a
        source draws from torch's generator on the CPU, or its weights are not of the seed.
    width : units of every hidden layer of a multi-layer perceptron, ``None`` for its own.
    options : arguments of a network of a source, as one text: ``"width=32, norm='group'"``.
    """
    if not is_source(name) and name not in NETWORKS:
        of_others = "a file's network 'FILE.py:NAME', or torchvision:NAME, timm:NAME, transformers:NAME"
        raise UserError(f"model = {name!r} is not known; allowed: {one_of(name, NETWORKS, of_others)}")
    if width and name not in _MLPS:
        only = f"with a width set, allowed are {', '.join(_MLPS)}"
        raise UserError(f"model = {name!r}: its layers' width is its own; {only}")
    if is_source(name):
        with drawing(CPU, seed, "model"):
            return from_source(name, in_shape, num_classes, read_options(options))
    if options:
        raise UserError(f"model-options = {options!r}: must be '' with model = {name!r}, whose settings are its own")
    shape = numbers(in_shape, name)

    def build() -> nn.Module:
        if name in _CONV_NETS:
            return _conv_net(name, shape, num_classes, **_CONV_NETS[name])
        if name not in _MLPS:
            return _resnet18(name, shape, num_classes)
        settings = _MLPS[name] | ({"hidden": [width] * len(_MLPS[name]["hidden"])} if width else {})
        return mlp(math.prod(shape), num_classes, **settings)

    if not name.startswith("resnet"):  # whose size does not depend on the images'
        with torch.device("meta"):  # without values
            check_memory(f"model = {name!r}", sum(4 * parameter.numel() for parameter in build().parameters()))
    with drawing(CPU, seed, "model"):
        return build()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and floating-point buffers by name, in ``state_dict`` order, without a frozen base.

    These are the model's own objects (``nn.Parameter`` with its ``grad``, running statistics), not copies:
    ``{name: t.detach().clone() for ...}`` is a snapshot. Integer buffers are left out, ``num_batches_tracked`` among
    them, which BatchNorm with a fixed momentum does not use. A tensor of two names (tied weights) has its first one.
    """
    every, without = _state(model), ties(model).keys() | base_names(model)
    return {name: tensor for name, tensor in every.items() if tensor.is_floating_point() and name not in without}


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers by name, without what ``get_extra_state`` and quantisation add."""
    every: dict[str, Any] = model.state_dict(keep_vars=True)
    return {n: t for n, t in every.items() if isinstance(t, Tensor) and not n.endswith("_extra_state")}


def ties(model: nn.Module) -> dict[str, str]:
    """Return the further names of the model's tensors (tied weights, layers in two places): name -> the first one."""
    every = _state(model)
    first = {id(tensor): name for name, tensor in reversed(every.items())}
    return {name: first[id(tensor)] for name, tensor in every.items() if first[id(tensor)] != name}


def check_float32(tensors: Mapping[str, Tensor], who: str) -> None:
    """Raise :class:`UserError` for a tensor that no message may hold: of another type, with NaN or infinities."""
    check_values(tensors, who)
    if odd := [
        n for n, t in tensors.items() if any(size > 1 > step for size, step in zip(t.shape, t.stride(), strict=True))
    ]:
        raise UserError(f"{who}: {odd[0]!r} has one value at several positions, as from expand; must be cloned")
    check_types(tensors, who)
    if odd := [repr(name) for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{who}: {odd[0]} has NaN or infinite values; only a buffer with persistent=False may")


def check_values(tensors: Mapping[str, Tensor], who: str) -> None:
    if odd := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise UserError(f"{who}: {odd[0]!r} has no values yet; a factory of lazy layers must run them once")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name, without those that are frozen (``requires_grad`` is false)."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_tensors(model: nn.Module | Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy ``new`` into the model (or its :func:`tensors_of`), in place: exactly their names and shapes, any device.

    ValueError if a name is missing, unknown, or has another shape; nothing has been copied then.
    """
    own = tensors_of(model) if isinstance(model, nn.Module) else model
    if own.keys() != new.keys():
        missing, unknown = sorted(own.keys() - new.keys()), sorted(new.keys() - own.keys())
        raise ValueError(f"tensors missing: {missing}, unknown: {unknown}")
    for name, tensor in own.items():
        if tensor.shape != new[name].shape:
            raise ValueError(f"tensor {name} has shape {tuple(new[name].shape)}, the model's is {tuple(tensor.shape)}")
    with torch.no_grad():
        there = brought(new, next(iter(own.values())).device)
        torch._foreach_copy_(list(own.values()), [there[name] for name in own])
