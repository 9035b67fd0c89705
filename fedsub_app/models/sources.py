"""Networks that are not of this package: ``model = "SOURCE:NAME"``, with the options of the source's builder.

A source that is no package of :data:`PACKAGES` is a Python file, ``my_net.py:Net``, or an importable module,
``package.module:Net``. Its code runs as the user's own: it may do whatever the user may.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.inputs import Form, Inputs, Shape, blank, shape_shown
from fedsub_app.common.own_code import folder_or_hub, named_code, of_others, packaged

Options = Mapping[str, Any]
BASE = "_fedsub_base"  # attribute of a module: names of its own tensors that belong to a frozen base (frozen.py)
_IN_SHAPE, _FRESH = "_fedsub_in_shape", "_fedsub_fresh"
MOST_FRESH = 4  # tensors that published weights may lack: those of an output layer or two


class Base(nn.Parameter):
    """A parameter of the base: a copy of its network shares its storage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Base":
        copied = memo[id(self)] = Base(self.data, requires_grad=False)
        return copied


def base_names(model: nn.Module) -> set[str]:
    """Return the names of the tensors of a network's frozen base; most networks have none."""
    if not any(BASE in vars(module) for module in model.modules()):  # where tensors alone are known, paths are not
        return set()
    marked = [(path, vars(module).get(BASE, ())) for path, module in model.named_modules()]
    return {f"{path}.{leaf}" if path else leaf for path, leaves in marked for leaf in leaves}


def in_shape_of(model: nn.Module) -> Shape | None:
    """Return the form of one input of a network that came through :func:`adopted`; ``None`` for a paper's own."""
    return getattr(model, _IN_SHAPE, None)


def is_pretrained(model: nn.Module) -> bool:
    """Return whether the network was built with published weights."""
    return hasattr(model, _FRESH)


def fresh_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors of a pretrained network that its weights lack."""
    return getattr(model, _FRESH, frozenset())


def from_source(model: str, in_shape: Shape, num_classes: int, options: Options) -> nn.Module:
    """Return the network that ``model = "SOURCE:NAME"`` names, initialised from torch's global generator."""
    source, _, name = model.partition(":")
    with of_others(f"model = {model!r}", source):
        built = (PACKAGES.get(source) or _own)(model, name, in_shape, num_classes, options)
    if not isinstance(built, nn.Module):
        raise UserError(f"model = {model!r}: gives a {type(built).__name__}; allowed is a torch.nn.Module")
    return adopted(built, in_shape)


def adopted(model: nn.Module, in_shape: Shape) -> nn.Module:
    """Return the network, modified: it answers with its logits, and knows the form of an input, for tracing it."""
    setattr(model, _IN_SHAPE, in_shape)
    return with_logits(model)


def with_logits(model: nn.Module) -> nn.Module:
    """Return the network, modified: it takes several tensors, and returns the ``logits`` of an output that has them."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(f"model = {model.original_name}: is compiled by torch.jit; allowed is the plain network")
    for hook in (hook for module in model.modules() for hook in module._forward_pre_hooks.values()):
        if type(hook).__module__.startswith("torch.nn.utils."):  # their computed weight cannot be copied
            allowed = "allowed is that of torch.nn.utils.parametrizations, or none"
            raise UserError(f"model = {type(model).__name__}: has a {type(hook).__name__} of torch.nn.utils; {allowed}")
    model.register_forward_hook(_logits)
    model.register_forward_pre_hook(_arguments, with_kwargs=True)
    return model


def answer(model: nn.Module, who: str, in_shape: Shape, training: bool = False) -> Any:
    """Return a copy's output for two inputs, so that the network's statistics stay; ``who`` begins the error."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return copy.deepcopy(model).train(training)(blank(2, in_shape))
    except Exception as error:  # code of others
        check_types(_beside_base(model), who)
        raise refused(who, in_shape, error) from error


def check_types(tensors: Mapping[str, Tensor], who: str) -> None:
    """Raise :class:`UserError` for a tensor that is not float32; ``who`` begins the error."""
    if odd := [f"{name!r} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype != torch.float32]:
        raise UserError(f"{who}: {odd[0]}; allowed is torch.float32, but for a frozen base and integer buffers")


def _beside_base(model: nn.Module) -> dict[str, Tensor]:
    base = base_names(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in base}


def refused(who: str, in_shape: Shape, error: Exception) -> UserError:
    """Return the error of a network that cannot take inputs of this shape; ``who`` begins it."""
    return UserError(f"{who}: cannot take inputs of shape {shape_shown(in_shape)}: {one_line(error)[:200]}")


def check_network(model: nn.Module, name: str, in_shape: Shape, outputs: tuple[int, ...]) -> None:
    """Run a network of unknown origin on two inputs, in training and in evaluation mode; it stays as it was."""
    who = f"model = {name!r}"
    check_types(_beside_base(model), who)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{who}: has no parameters to train; allowed are torch.float32 ones")
    for training in (True, False):
        output = answer(model, who, in_shape, training)
        if not isinstance(output, Tensor) or output.shape != (2, *outputs):
            came = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UserError(f"{who}: answers 2 inputs with {came}; allowed by task and labels is {[2, *outputs]}")


def numbers(in_shape: Shape, model: str) -> tuple[int, ...]:
    """Return the shape of one input; :class:`UserError` where it is not one tensor of numbers."""
    if isinstance(in_shape, Form):
        allowed = "a network of yours, 'FILE.py:NAME', or transformers:NAME"
        raise UserError(f"model = {model!r}: takes one tensor of numbers, these inputs are tokens; allowed: {allowed}")
    return tuple(in_shape)


def _arguments(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if not inputs or not isinstance(x := inputs[0], Inputs):
        return None
    return ((), dict(zip(x.names, x.tensors, strict=True)) | named) if x.names else (x.tensors, named)


def _logits(module: nn.Module, inputs: object, output: Any) -> Any:
    """Return the logits in a network's output, such as transformers' or torchvision's with auxiliary heads."""
    return output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)


# --- the sources ----------------------------------------------------------------------------------------------------


def _torchvision(model: str, name: str, in_shape: Shape, num_classes: int, options: Options) -> nn.Module:
    """Build a network by name; ``weights`` names torchvision's weights, such as "DEFAULT", or a file."""
    from torchvision.models import get_model, get_model_weights

    channels, *_ = numbers(in_shape, model)
    given = {"num_classes": num_classes} | dict(options)
    weights = given.pop("weights", None)
    net = for_channels(get_model(name, weights=None, **given), channels)
    published = weights and getattr(get_model_weights(name), weights, None)
    state = published.get_state_dict(progress=False) if published else _read(weights) if weights else None
    return net if state is None else with_weights(net, state)


def for_channels(net: nn.Module, channels: int) -> nn.Module:
    """Return a network for RGB images with a new first convolution that takes ``channels`` channels."""
    first, stem = next(((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d)), ("", None))
    if stem and stem.in_channels != channels:
        sizes: dict[str, Any] = {name: getattr(stem, name) for name in ("kernel_size", "stride", "padding")}
        net.set_submodule(first, nn.Conv2d(channels, stem.out_channels, **sizes, bias=stem.bias is not None))
    return net


def _read(file: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file of safetensors, or of torch without pickled code."""
    path = Path(file).expanduser()
    if path.suffix == ".safetensors":
        return load_file(path)
    state: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def with_weights(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a network with published weights; tensors of another shape, as of the output layer, stay fresh.

    ValueError where more than the tensors of two layers do not fit: these are the weights of another network.
    """
    own = net.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    fresh = [name for name in own if name not in fitting and own[name].is_floating_point()]
    net.load_state_dict(fitting, strict=False)
    return _with_fresh(net, fresh, MOST_FRESH)


def _with_fresh(net: nn.Module, fresh: Sequence[str], most: int) -> nn.Module:
    """Return the network, which knows the tensors that its weights lack; ValueError: these are more than ``most``."""
    if len(fresh) > most:
        of = f"{len(fresh)} of {len(net.state_dict())} tensors"
        raise ValueError(f"weights: {of} are lacking or of another shape, as {fresh[0]!r}")
    setattr(net, _FRESH, frozenset(fresh))
    return net


def _timm(model: str, name: str, in_shape: Shape, num_classes: int, options: Options) -> nn.Module:
    """Build a network by name; ``pretrained=True`` takes weights from the hub's cache, ``weights`` from a file."""
    timm, (channels, *_) = import_module("timm"), numbers(in_shape, model)
    given = {"num_classes": num_classes, "in_chans": channels} | dict(options)
    weights = given.pop("weights", None)
    net: nn.Module = timm.create_model(name, **given)
    return with_weights(net, _read(weights)) if weights else net


def _transformers(model: str, name: str, in_shape: Shape, num_classes: int, options: Options) -> nn.Module:
    """Build a network from a configuration in a folder or on the hub; ``pretrained=True`` takes its weights, too."""
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()  # which tensors are fresh is known: fresh_names
    transformers.logging.disable_progress_bar()
    given = dict(options)
    pretrained = given.pop("pretrained", False)
    with folder_or_hub(name):
        config = transformers.AutoConfig.from_pretrained(name, num_labels=num_classes, trust_remote_code=False, **given)
    images = not isinstance(in_shape, Form) and len(in_shape) == 3
    next_token = isinstance(in_shape, Form) and in_shape.single and in_shape.tokens == num_classes
    what = "ImageClassification" if images else "CausalLM" if next_token else "SequenceClassification"
    if what == "SequenceClassification" and config.is_encoder_decoder:
        allowed = "allowed for these texts is one of them alone"
        raise UserError(f"model = {model!r}: is an encoder with a decoder; {allowed}")
    most = getattr(config, "max_position_embeddings", 0) or math.inf  # below 0: any number
    shape = in_shape.parts[0].shape if isinstance(in_shape, Form) else ()
    if shape and shape[0] > most > 0:
        cut = "must be as many or fewer, by the key tokens"
        raise UserError(f"model = {model!r}: takes {most} tokens, the samples have {shape[0]}; {cut}")
    kind, fresh = getattr(transformers, f"AutoModelFor{what}"), list[str]()
    if pretrained:  # no pickle: weights are read from safetensors alone
        how = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        net, loading = kind.from_pretrained(name, config=config, dtype=torch.float32, **how)
        mismatched = (key[0] if isinstance(key, tuple) else key for key in loading["mismatched_keys"])
        fresh = sorted({*loading["missing_keys"], *mismatched})
    else:
        net = kind.from_config(config, trust_remote_code=False)
    if next_token:  # the network may have more tokens than the tokenizer, as a multiple of 64
        have = net.get_input_embeddings().num_embeddings
        if pretrained and have < num_classes:
            more = f"the tokenizer's {num_classes} are more"
            raise UserError(f"model = {model!r}: its weights have {have} tokens; {more}")
        net.resize_token_embeddings(num_classes, mean_resizing=False)
    return _with_fresh(net, fresh, len(net.state_dict()) // 2) if pretrained else net


def _packaged(model: str, name: str, in_shape: Shape, num_classes: int, options: Options) -> nn.Module:
    """Build a network whose pretrained weights a Python package holds: nothing is downloaded at run time."""
    path = packaged(name)
    if path.is_dir():
        return _transformers(model, str(path), in_shape, num_classes, {"pretrained": True} | dict(options))
    net = _timm(model, "tf_efficientnet_lite0", in_shape, num_classes, options)
    state = _read(str(path))  # of EfficientNet-PyTorch, whose layers have other names in the same order
    return with_weights(net, dict(zip(net.state_dict(), state.values(), strict=False)))  # no head with num_classes=0


def _own(model: str, name: str, in_shape: Shape, num_classes: int, options: Options) -> Any:
    """Call a class or function of the user with the options and with what its parameters name."""
    factory = named_code("model", model)
    tokens = in_shape.tokens if isinstance(in_shape, Form) else 0
    known = {"num_classes": num_classes, "in_shape": shape_shown(in_shape), "num_tokens": tokens}
    named = inspect.signature(factory).parameters
    return factory(**{key: value for key, value in known.items() if key in named} | dict(options))


# prefix: builder of (the whole key's value, the name behind the prefix, shape of an input, classes, options)
PACKAGES: dict[str, Callable[[str, str, Shape, int, Options], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "package": _packaged,
}
