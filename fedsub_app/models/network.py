"""A network together with what the methods ask of it: its tensors by name, its hidden units, its features."""

from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Batch
from fedsub_app.common.tensors import Tensors, brought
from fedsub_app.models.groups import UnitGroup
from fedsub_app.models.networks import load_tensors, tensors_of, trainable, trim_kernels
from fedsub_app.models.sources import base_names
from fedsub_app.models.units import head_layer, unit_groups

Loss = Callable[[Tensor, Tensor], Tensor]  # (batch, labels) -> scalar
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Output(NamedTuple):
    """The output of a network for a batch: ``logits`` [n, classes] and ``features`` [n, d], which enter its head."""

    logits: Tensor
    features: Tensor


class Gate:
    """A hook that multiplies the output of a layer by ``factor``, float ``[units]``, while it has one.

    The hook stays, because adding and removing it costs a tenth of a small network's step. A copied layer has its own.
    """

    factor: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self.factor is None:
            return output
        # A Linear's units are the last axis, for tokens as well; other layers' units are the second axis.
        linear = isinstance(module, nn.Linear)
        return output * (self.factor if linear else self.factor.view(-1, *[1] * (output.dim() - 2)))


class Tap:
    """A hook that, while open, keeps a layer's last input as ``entered``; it stays, as a gate does."""

    is_open = False
    entered: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if self.is_open:
            self.entered = (*inputs, *named.values())[0]


class Network:
    """One model object, whose weights are loaded before each use, with trimmed convolutions.

    ``module`` has, after the first use of :attr:`gates`, a gate behind each layer of units. ``tensors`` are its
    parameters and floating-point buffers by name, live (:func:`~fedsub_app.models.tensors_of`), ``parameters`` those
    that are trained. ``assigned``: buffers that the network's code assigned anew in the last run with other tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        trim_kernels(module)
        self.module = module
        self.tensors = tensors_of(module)
        self.parameters: dict[str, Tensor] = dict(trainable(module))
        self.assigned: dict[str, Tensor] = {}
        self._slots = self._places()  # now: the network's code may put other tensors there
        sent = self.tensors.keys() | base_names(module)
        self._unsent = [(buffer, buffer.clone()) for name, buffer in module.named_buffers() if name not in sent]
        self._held = [(m._buffers, dict(m._buffers)) for m in module.modules()]
        flags = ("gradient_checkpointing", "grad_checkpointing")  # of transformers, of timm
        self._again = [(vars(m), flag) for m in module.modules() for flag in flags if vars(m).get(flag) is True]

    @cached_property
    def units(self) -> tuple[UnitGroup, ...]:
        return unit_groups(self.module)

    @cached_property
    def gates(self) -> dict[str, Gate]:
        """A gate behind the layer of each group of units, or behind its BatchNorm: group name -> gate."""
        gates = {group.name: Gate() for group in self.units}
        for group in self.units:
            self.module.get_submodule(group.rows[-1].rpartition(".")[0]).register_forward_hook(gates[group.name])
        return gates

    @cached_property
    def normalisations(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.module.named_modules() if isinstance(module, _BATCH_NORM)}

    @cached_property
    def _tap(self) -> Tap:
        tap = Tap()
        self.module.get_submodule(head_layer(self.module)).register_forward_pre_hook(tap, with_kwargs=True)
        return tap

    def __call__(self, x: Batch, tensors: Mapping[str, Tensor] | None = None) -> Output:
        """Run the model, with ``tensors`` in the place of its own if given."""
        tap = self._tap
        tap.is_open = True
        counts = [(count, count.clone()) for count in self._counts if tensors and tensors.keys() >= self.tensors.keys()]
        try:
            logits: Tensor = self.module(x) if tensors is None else self.module_with(tensors, x)
            entered = tap.entered
        finally:
            tap.is_open, tap.entered = False, None
            for count, before in counts:  # a whole other model has statistics of its own
                count.copy_(before)
        if entered is None:
            said = f"head = {head_layer(self.module)!r}: the layer was not run"
            raise UserError(f"{said}; head= names another one, in_shape= finds the last that runs")
        return Output(logits, entered.flatten(1).to(logits.dtype))  # bfloat16 with base-dtype

    def _places(self) -> list[tuple[dict[str, Any], str, str]]:
        """Return a layer's dict, the key in it, the tensor's name; a tied tensor is held twice."""
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        dicts: list[dict[str, Any]] = [d for m in self.module.modules() for d in (m._parameters, m._buffers)]
        return [(held, key, names[id(held[key])]) for held in dicts for key in held if id(held[key]) in names]

    def module_with(self, tensors: Mapping[str, Tensor], x: Batch) -> Tensor:
        """Return the logits with ``tensors`` in the place of its own, as torch's slower ``functional_call`` does.

        Without gradient checkpointing: a backward pass would compute the blocks again with the network's own tensors.
        """
        replaced = []
        self.assigned = {}
        try:
            for held, key, name in self._slots:
                if tensors.get(name, self.tensors[name]) is not self.tensors[name]:
                    replaced.append((held, key, name, held[key]))
                    held[key] = tensors[name]
            for flags, flag in self._again:
                flags[flag] = not replaced
            logits: Tensor = self.module(x)
        finally:
            for held, key, name, before in replaced:
                if held[key] is not tensors[name]:
                    self.assigned[name] = held[key].detach()
                held[key] = before
            for flags, flag in self._again:
                flags[flag] = True
        return logits

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Copy a buffer that the network's code has assigned anew, ``self.mean = …``, into its tensor."""
        for held, key, name in self._slots:
            if held[key] is not self.tensors[name]:
                held[key] = self.tensors[name].copy_(held[key])

    @torch.no_grad()
    def reset(self) -> nn.Module:
        """Return the module; reset its buffers that are not sent, such as integers and later ones, to their start."""
        self.take_assigned()
        for held, built in self._held:
            held.clear()
            held.update(built)
        for buffer, values in self._unsent:
            buffer.copy_(values)
        return self.module

    @cached_property
    def compiled(self) -> Callable[[Loss], Loss]:
        """Function: loss of an output -> loss of an input, compiled with its backward pass; on CUDA as graphs."""

        def made(loss: Loss) -> Loss:
            _ = self._tap  # before it is compiled: a hook that comes later has it compiled again
            mode = "reduce-overhead" if self.device.type == "cuda" else "default"
            return torch.compile(lambda x, y: loss(self.module(x), y), dynamic=False, mode=mode)

        return cache(made)

    def load(self, new: Mapping[str, Tensor]) -> None:
        """Copy ``new`` in: exactly this network's names and shapes, else ValueError."""
        self.reset()
        load_tensors(self.tensors, new)
        for count in self._counts:
            count.zero_()

    @cached_property
    def _counts(self) -> list[Tensor]:
        """Batch counts of BatchNorm layers whose statistics are means of all batches: zeroed for the next client."""
        layers = [m for m in self.module.modules() if isinstance(m, _BATCH_NORM) and m.momentum is None]
        return [layer.num_batches_tracked for layer in layers if layer.num_batches_tracked is not None]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def copy(self) -> Tensors:
        self.take_assigned()
        if self.device.type == "cpu":
            return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return brought(self.tensors)

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of ``tensors`` on the device and in the memory layout of this network's own."""
        there = brought({name: tensors[name] for name in self.tensors}, self.device)
        return {name: torch.empty_like(own.detach()).copy_(there[name]) for name, own in self.tensors.items()}

    def training_mode(self, trained: Collection[str] | None = None, batch_statistics: bool | None = None) -> None:
        """Put the model in training mode, frozen BatchNorm in evaluation mode.

        ``trained``: names of the tensors that are trained, ``None`` for all. A BatchNorm whose weight, or without one
        running mean, is not among them uses its running statistics and leaves them as they are. ``batch_statistics``:
        training or evaluation mode of the whole model instead.
        """
        self.module.train(batch_statistics is not False)
        if batch_statistics is None and trained is not None:
            for name, module in self.normalisations.items():
                module.train(f"{name}.{'weight' if module.affine else 'running_mean'}" in trained)
