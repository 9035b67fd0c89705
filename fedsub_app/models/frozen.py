"""A frozen base: the tensors of a network that are never trained, sent or stored; all other tensors are.

A module's attribute ``BASE`` names its tensors that belong to the base. :func:`~fedsub_app.models.tensors_of` leaves
them out, so that methods, masks, messages and checkpoints know the trained tensors alone. The base is compared by its
digest (:func:`base_digest`), and copies of a network share its storage.

LoRA: Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, https://arxiv.org/abs/2106.09685, by the
package peft: a layer with the weight W computes W x + alpha / r * B A x, of which A and B are trained.
"""

import hashlib
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.models.groups import adapters, executed, is_turned
from fedsub_app.models.networks import tensors_of, ties
from fedsub_app.models.sources import BASE, Base, base_names, fresh_names
from fedsub_app.models.units import head_names, is_norm, part_names

_LAST = re.compile(r"last-([1-9][0-9]*)-blocks?")


class Trained(NamedTuple):
    """The trained part of a network, by the settings of these names; ``what = ""``: everything.

    ``moves_base``: the method changes the weights that have adapters, so these are sent as well. ``again``: blocks are
    computed again in the backward pass, instead of keeping their activations.
    """

    what: str = ""
    base_dtype: str = "float32"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    moves_base: bool = False
    again: bool = False


def freeze(model: nn.Module, trained: Trained, name: str) -> nn.Module:
    """Return the network, modified: all but the trained tensors are its frozen base.

    The head of the network is trained as well, unless names say otherwise. Adapters are drawn from torch's global
    generator on the CPU; a network that has some keeps them. ``name``: the setting ``model``, for errors.
    """
    names = _trained_names(model, trained, f"trainable = {trained.what!r}: model = {name!r}")
    if trained.what == "lora":
        if adapters(every := dict(model.named_parameters())):  # of peft, which says what else is trained
            names = {each for each, parameter in every.items() if parameter.requires_grad}
        else:
            _add_adapters(model, trained, names, name)
        every = dict(model.named_parameters())
        names |= {each for each in every if ".lora_" in each}
        for each in names & every.keys():
            every[each].requires_grad_()  # which peft has switched off
        if trained.moves_base:
            if tied := tied_weights(model):
                what = f"{tied[0]!r} is tied, the method moves the weights of adapters one by one"
                raise UserError(f"lora-targets = {', '.join(trained.targets)!r}: model = {name!r}: {what}")
            names |= {adapter.weight for adapter in adapters(every)}
    _freeze(model, names, torch.bfloat16 if trained.base_dtype == "bf16" else None)
    if trained.again:
        _compute_again(model, name)
    if trained.base_dtype == "bf16":
        cast = _Cast()
        model.register_forward_pre_hook(cast.enter)
        model.register_forward_hook(cast.leave, always_call=True)
    return model


def with_base_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Return a frozen network, modified: its base is now that of another network like it, in the same storage."""
    every, base = dict(model.named_parameters()), dict(other.named_parameters())
    for name in base_names(other) & base.keys():
        every[name].data = base[name].data
    return model


def base_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a network's base, names and values; "" without one."""
    base = base_names(model)
    if not base:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name in base:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_base(model: str, here: str, wanted: str, whose: str) -> None:
    """Raise :class:`UserError` where the frozen base's digest is not the wanted one; ``whose``: ``"the server's"``."""
    if here != wanted:
        digests = f"{here[:16] or 'none'} here, {wanted[:16] or 'none'} is {whose}"
        raise UserError(f"model = {model!r}: the frozen base has SHA-256 {digests}")


def base_bytes(model: nn.Module) -> int:
    every = model.state_dict()
    return sum(every[name].nbytes for name in base_names(model))


def _trained_names(model: nn.Module, trained: Trained, what: str) -> set[str]:
    every = tuple(tensors_of(model))
    whole = {*head_names(model), *fresh_names(model)}
    tied = {first for name, first in ties(model).items() if name not in whole}  # of an embedding, by either's name
    head = whole & {*every} - tied
    if trained.what == "head" and head:
        return head
    if _of_tokens(model):  # a language model's head is as trained as the rest
        head &= {*fresh_names(model)}
    if trained.what == "lora":
        return head
    if trained.what == "bias":
        leaves = {name: name.rpartition(".")[2] for name in every}  # bias_ih_l0: of a recurrent layer
        chosen = {name for name, leaf in leaves.items() if leaf.endswith("bias") or leaf.startswith("bias_")}
    elif trained.what == "norm":
        norms = [path for path, module in model.named_modules() if is_norm(module)]
        chosen = {name for name in every if name.rpartition(".")[0] in norms}
    elif last := _LAST.fullmatch(trained.what):
        blocks = blocks_of(model)
        if len(blocks) < int(last[1]):
            raise UserError(f"{what} has {len(blocks)} blocks")
        chosen = {name for name in every if name.startswith(tuple(f"{path}." for path in blocks[-int(last[1]) :]))}
    else:
        try:
            return {*part_names(model, trained.what)}
        except ValueError as error:
            raise UserError(f"{what}: {error}; or lora, head, bias, norm, last-2-blocks") from None
    if not chosen:
        raise UserError(f"{what} has no such tensors")
    return chosen | head


def tied_weights(model: nn.Module) -> list[str]:
    """Return the names of weights under adapters that a second layer shares, or the same layer in a second place."""
    weights, tied = {adapter.weight for adapter in adapters(model.state_dict())}, ties(model)
    return [name for name in (*tied, *tied.values()) if name in weights]


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of a network's blocks in order of execution: members of a list of modules that have layers."""
    blocks: list[str] = []
    modules = dict(model.named_modules())
    for path, module in executed(model):
        listed = path and isinstance(modules[path.rpartition(".")[0]], nn.ModuleList | nn.Sequential)
        composite = len([*module.modules()]) > 1 and bool(tensors_of(module))
        if listed and composite and not any(path.startswith(f"{block}.") for block in blocks):
            blocks.append(path)
    return blocks


def _add_adapters(model: nn.Module, trained: Trained, kept: Collection[str], name: str) -> None:
    """Add LoRA to the linear layers and convolutions that ``lora-targets`` names, by default to all."""
    try:
        peft = import_module("peft")
    except ImportError as error:
        needs = "needs the package peft; `pip install fedsub[adapters]`"
        raise UserError(f"trainable = 'lora': {needs} ({one_line(error)})") from None
    named, base = dict(model.named_modules()), _of_tokens(model)
    layers = [n for n, m in named.items() if f"{n}.weight" not in kept and _fits(m) and id(m.weight) not in base]
    ends = tuple(f".{target}" for target in trained.targets) or ("",)
    targets = [path for path in layers if f".{path}".endswith(ends)]
    if not all(any(f".{path}".endswith(end) for path in layers) for end in ends):  # one of several names may be wrong
        have = ", ".join(sorted({path.rpartition(".")[2] for path in layers})) or "no such layer but its head"
        raise UserError(f"lora-targets = {', '.join(trained.targets)!r}: model = {name!r} has {have}")
    how = {"r": trained.rank, "lora_alpha": trained.alpha, "lora_dropout": trained.dropout}
    with warnings.catch_warnings(action="ignore"):  # of GPT-2's layers, whose weights are turned
        config = peft.LoraConfig(target_modules=whole_names(targets), **how)
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:  # such as layers of Mamba, which reads their weights itself
            what = f"lora-targets = {', '.join(trained.targets)!r}: model = {name!r}"
            raise UserError(f"{what}: {one_line(error)[:200]}") from error
    for module in model.modules():  # in evaluation torch's fast path reads the weights under adapters itself
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _of_tokens(model: nn.Module) -> set[int]:
    """Return the ids of the weights that a language model of transformers has for each token: its head's; else none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {id(head.weight)} if isinstance(head, nn.Linear) else set()


def whole_names(layers: Iterable[str]) -> str:
    """Return names of layers as peft's ``target_modules``, which takes a list of them as ends of names."""
    return "|".join(map(re.escape, layers))


def _fits(module: nn.Module) -> bool:
    """Say whether a layer can have an adapter that is a change of its weight.

    Attention of torch reads the weights of its ``out_proj`` itself. An adapter's convolutions have no dilation and pad
    with zeros. Parametrized layers compute their weight, and so do convolutions with code of their own, which
    standardise it. Only timm's ``Conv2dSame`` just pads.
    """
    if is_parametrized(module):
        return False
    if isinstance(module, nn.Conv2d):
        plain = type(module).forward is nn.Conv2d.forward or type(module).__name__ == "Conv2dSame"
        return plain and module.groups == max(module.dilation) == 1 and module.padding_mode == "zeros"
    linear = isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"
    return linear or is_turned(module)


def _freeze(model: nn.Module, names: Collection[str], dtype: torch.dtype | None) -> None:
    """Mark all tensors but those of these names as the base, once where they are tied."""
    every: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    trained = {id(tensor) for name, tensor in every.items() if name in names}
    bases: dict[int, Base] = {}
    for path, module in model.named_modules():
        names_of = {leaf: f"{path}.{leaf}" if path else leaf for leaf in (*module._parameters, *module._buffers)}
        tensors = {leaf: every[name] for leaf, name in names_of.items() if name in every}
        marked = [leaf for leaf, t in tensors.items() if t.is_floating_point() and id(t) not in trained]
        kind = None if isinstance(module, nn.modules.batchnorm._NormBase) else dtype  # of its statistics
        for leaf in marked:
            if isinstance(tensor := tensors[leaf], nn.Parameter):
                base = bases.setdefault(id(tensor), Base(tensor.data.to(kind or tensor.dtype), requires_grad=False))
                setattr(module, leaf, base)
        if marked:
            setattr(module, BASE, tuple(marked))
        if marked and isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
            setattr(module, "train", _stays)  # noqa: B010  (a method of one object)


def _compute_again(model: nn.Module, name: str) -> None:
    """Switch on gradient checkpointing, with the network's own library."""
    try:
        library: Any = model
        if hasattr(model, "set_grad_checkpointing"):  # timm
            library.set_grad_checkpointing()
        else:
            library.activation_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, ValueError, AssertionError):
        has_none = f"model = {name!r} has none; transformers' and timm's have"
        raise UserError(f"gradient-checkpointing = true: {has_none}") from None


def _stays(mode: bool = True) -> None:
    """Leave a BatchNorm of the base in evaluation mode: its statistics are part of the base."""


class _Cast:
    """Hooks that compute a network in bfloat16 where its base is: values of float32 enter and leave."""

    def __init__(self) -> None:
        self.running: list[torch.autocast] = []

    def enter(self, module: nn.Module, inputs: object) -> None:
        self.running.append(torch.autocast(next(module.parameters()).device.type, torch.bfloat16))
        self.running[-1].__enter__()

    def leave(self, module: nn.Module, inputs: object, output: Any) -> Any:
        self.running.pop().__exit__(None, None, None)
        return output.float() if isinstance(output, Tensor) else output
