"""The networks of the papers, by name, and their tensors, by name.

Every network but ResNet-18 is one ``nn.Sequential`` with named children (``conv1``, ``bn1``, ``relu1``, ``pool1``, …,
``flatten``, ``fc1``, …), so that :mod:`fedsub_app.models.units` can read its structure. All of them return logits.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.inputs import Shape
from fedsub_app.common.memory import check_memory
from fedsub_app.common.own_code import read_options
from fedsub_app.common.seeds import derive
from fedsub_app.common.tensors import brought
from fedsub_app.models.base import base_names
from fedsub_app.models.names import is_sourced
from fedsub_app.models.sources import adopted, from_source, numbers


def _fully_connected(
    layers: "OrderedDict[str, nn.Module]", widths: Sequence[int], relus: int = 0, batch_norm: bool = False
) -> nn.Sequential:
    """Return ``layers`` and behind them Linear layers ``fc1``, ``fc2``, … of these widths, a ReLU between two of them.

    ``relus``: how many ``layers`` has already; the names go on from there, as an equal name would replace its layer.
    """
    for k in range(1, len(widths)):
        layers[f"fc{k}"] = nn.Linear(widths[k - 1], widths[k])
        if k < len(widths) - 1:
            if batch_norm:
                # IST: statistics of the batch in training and in evaluation alike; with no running statistics
                # (and the authors' momentum of 1) there is nothing that a client could keep or send.
                layers[f"bn{k}"] = nn.BatchNorm1d(widths[k], momentum=1.0, track_running_stats=False)
            layers[f"relu{relus + k}"] = nn.ReLU()
    return nn.Sequential(layers)


def mlp(in_features: int, num_classes: int, hidden: Sequence[int], batch_norm: bool = False) -> nn.Sequential:
    """Return a multi-layer perceptron; images are flattened, flat inputs pass through.

    ``mlp(3072, classes, [3000], batch_norm=True)`` is the global network of IST for ten clients a round, whose hidden
    layer is wider than that of ``feature-mlp``. Initialised from the global generator: see :func:`build_model`.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    return _fully_connected(layers, [in_features, *hidden, num_classes], batch_norm=batch_norm)


def _mlp(
    name: str, in_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int], batch_norm: bool = False
) -> nn.Module:
    return mlp(math.prod(in_shape), num_classes, hidden, batch_norm)


def _image_shape(name: str, in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return ``in_shape`` as (channels, height, width); raise UserError unless it is one, of ``smallest`` or more."""
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        raise UserError(
            f"model = {name!r} cannot take inputs of shape {tuple(in_shape)}; "
            f"allowed: images (channels, height, width) of at least {smallest} x {smallest}"
        )
    return in_shape[0], in_shape[1], in_shape[2]


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
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, out_channels in enumerate(channels, start=1):
        layers[f"conv{k}"] = nn.Conv2d(in_channels, out_channels, kernel, padding=padding)
        if batch_norm:
            layers[f"bn{k}"] = nn.BatchNorm2d(out_channels)
        layers[f"pool{k}"] = nn.MaxPool2d(2)  # before the ReLU, which commutes with it: a quarter of its work
        layers[f"relu{k}"] = nn.ReLU()
        in_channels = out_channels
    layers["flatten"] = nn.Flatten()
    flat = in_channels * size_after_blocks(height) * size_after_blocks(width)
    return _fully_connected(layers, [flat, *hidden, num_classes], relus=len(channels))


def _resnet18(name: str, in_shape: tuple[int, ...], num_classes: int, pretrained: bool = False) -> nn.Module:
    """torchvision's ResNet-18, with its 7 x 7 stem also for small images (as FedSelect's code has it).

    ``pretrained``: with ImageNet's weights, read from torch's hub folder or downloaded, and a fresh output layer.
    """
    channels, _, _ = _image_shape(name, in_shape, 1)
    # Imported here because it takes a second, and only this network needs it.
    from torchvision.models import ResNet18_Weights, resnet18

    net: nn.Module
    if pretrained:
        weights = ResNet18_Weights.IMAGENET1K_V1
        if channels != 3:
            raise UserError(f"model = {name!r}: trained on RGB images, these have {channels} channels")
        try:
            net = resnet18(weights=weights, progress=False)
        except Exception as error:  # no network, a damaged file: torch's loader raises many types
            file = Path(torch.hub.get_dir()) / "checkpoints" / Path(weights.url).name
            raise UserError(f"model = {name!r}: needs {file}, from {weights.url} ({one_line(error)[:200]})") from error
        net.fc = nn.Linear(512, num_classes)
        return net
    net = resnet18(weights=None, num_classes=num_classes)
    if channels != 3:
        stem = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # torchvision's own rule
        net.conv1 = stem
    return net


def _resnet18_gn(name: str, in_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """torchvision's ResNet-18 with GroupNorm of 32 groups (Wu, He 2018) in the place of BatchNorm."""
    channels, _, _ = _image_shape(name, in_shape, 1)
    from torchvision.models import resnet18

    net: nn.Module = resnet18(weights=None, num_classes=num_classes, norm_layer=partial(nn.GroupNorm, 32))
    net.set_submodule("conv1", nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False))
    return adopted(net, in_shape)


# name: (builder, the builder's settings)
_NETWORKS: dict[str, tuple[Callable[..., nn.Module], dict[str, object]]] = {
    "fedpews-mlp": (_mlp, {"hidden": (32, 64, 128, 32)}),
    "fedpews-cnn": (_conv_net, {"channels": (32, 64, 128), "kernel": 3, "padding": 1}),
    "lenet5": (_conv_net, {"channels": (6, 16), "kernel": 5, "hidden": (120, 84)}),
    "lenet5-bn": (_conv_net, {"channels": (6, 16), "kernel": 5, "hidden": (120, 84), "batch_norm": True}),
    "mnist-cnn": (_conv_net, {"channels": (10, 20), "kernel": 5, "hidden": (50,)}),
    "mnist-cnn-bn": (_conv_net, {"channels": (10, 20), "kernel": 5, "hidden": (50,), "batch_norm": True}),
    "fedpart-cnn": (_conv_net, {"channels": (6, 16), "kernel": 5, "hidden": (180, 160, 140, 120, 84)}),
    "pfllib-cnn": (_conv_net, {"channels": (32, 64), "kernel": 5, "hidden": (512,)}),
    "resnet18": (_resnet18, {}),
    "resnet18-imagenet": (_resnet18, {"pretrained": True}),
    "resnet18-gn": (_resnet18_gn, {}),
    "feature-mlp": (_mlp, {"hidden": (1000,), "batch_norm": True}),
    "feature-mlp2": (_mlp, {"hidden": (1000, 1000), "batch_norm": True}),
}


def build_model(
    name: str, in_shape: Shape, num_classes: int, seed: int, width: int | None = None, options: str = ""
) -> nn.Module:
    """Return the network ``name`` on the CPU, in training mode, initialised as PyTorch does by default.

    Parameters
    ----------
    name : a name of :func:`~fedsub_app.models.model_names`, or ``SOURCE:NAME`` (:mod:`fedsub_app.models.sources`).
    in_shape : shape of one input without the batch axis: ``(features,)`` or ``(channels, height, width)``.
    num_classes : number of logits.
    seed : the run's seed. Equal arguments give bit-identical weights; the global generators are left as they were.
        A network of a source draws from torch's generator on the CPU, or its weights are not of the seed.
    width : units of every hidden layer of a multi-layer perceptron, ``None`` for its own.
    options : arguments of a network of a source, as one text: ``"width=32, norm='group'"``.
    """
    if is_sourced(name):
        return _sourced(name, in_shape, num_classes, seed, width, options)
    if name not in _NETWORKS:
        of_others = "a file's network 'FILE.py:NAME', or torchvision:NAME, timm:NAME, transformers:NAME"
        raise UserError(f"model = {name!r} is not known; allowed: {', '.join(_NETWORKS)}; {of_others}")
    if options:
        raise UserError(f"model-options = {options!r}: must be '' with model = {name!r}, whose settings are its own")
    builder, settings = _NETWORKS[name]
    if width:
        if builder is not _mlp:
            names = ", ".join(other for other, (made_by, _) in _NETWORKS.items() if made_by is _mlp)
            raise UserError(f"model = {name!r}: its layers' width is its own; with a width set, allowed are {names}")
        settings = settings | {"hidden": [width] * len(settings["hidden"])}  # type: ignore[arg-type]
    if builder not in (_resnet18, _resnet18_gn):  # whose size does not depend on the images'
        with torch.device("meta"):  # without values
            shapes = builder(name, numbers(in_shape, name), num_classes, **settings)
        check_memory(f"model = {name!r}", sum(4 * parameter.numel() for parameter in shapes.parameters()))
    with seeded(seed, "model"):
        return builder(name, numbers(in_shape, name), num_classes, **settings)


def _sourced(name: str, in_shape: Shape, num_classes: int, seed: int, width: int | None, options: str) -> nn.Module:
    if width:
        raise UserError(f"model = {name!r}: with a width set, allowed are listed multi-layer perceptrons")
    with seeded(seed, "model"):
        return from_source(name, in_shape, num_classes, read_options(options))


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Draw what networks draw from torch's global generator by a seed and a purpose; leave the generator as it was."""
    # devices=[] and default_generator, not manual_seed(): that would seed the GPUs' generators as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, purpose))
        yield


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and floating-point buffers by name, in ``state_dict`` order, without a frozen base.

    These are the model's own objects (``nn.Parameter`` with its ``grad``, running statistics), not copies:
    ``{name: t.detach().clone() for ...}`` is a snapshot. Integer buffers are left out, ``num_batches_tracked`` among
    them, which BatchNorm with a fixed momentum does not use. A tensor of two names (tied weights) has its first one.
    """
    every = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(every.items())}
    base = base_names(model)
    return {n: t for n, t in every.items() if t.is_floating_point() and first[id(t)] == n and n not in base}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name, without those that are frozen (``requires_grad`` is false)."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_tensors(model: nn.Module | Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy ``new`` into the model (or its :func:`tensors_of`), in place: exactly their names and shapes, any device.

    Raises
    ------
    ValueError
        If a name is missing, unknown, or has another shape; nothing has been copied then.
    """
    own = tensors_of(model) if isinstance(model, nn.Module) else model
    if own.keys() != new.keys():
        raise ValueError(
            f"tensors missing: {sorted(own.keys() - new.keys())}, unknown: {sorted(new.keys() - own.keys())}"
        )
    for name, tensor in own.items():
        if tensor.shape != new[name].shape:
            raise ValueError(f"tensor {name} has shape {tuple(new[name].shape)}, the model's is {tuple(tensor.shape)}")
    with torch.no_grad():
        there = brought(new, next(iter(own.values())).device)
        for name, tensor in own.items():
            tensor.copy_(there[name])
