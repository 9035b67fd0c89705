"""A run's model on files that it has not seen, and the model as a file of ONNX, of peft or of all its weights."""

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsub_app.analysis.clients import client_of
from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.files import make_folder
from fedsub_app.common.inputs import Batch, Inputs, blank
from fedsub_app.common.own_code import is_source
from fedsub_app.common.tasks import MultiLabel, NextToken
from fedsub_app.common.tensor_files import write_tensors
from fedsub_app.data import IMAGES, AnySamples, DataSettings, Samples, in_data_folder, in_unit, load_dataset, normalised
from fedsub_app.data.files import read_pixels
from fedsub_app.data.tables import unseen_rows
from fedsub_app.data.text import pretrained_tokenizer
from fedsub_app.models import adapters, base_digest, check_base, scale_of, tensors_of, tied_weights, turned, whole_names
from fedsub_app.runs.checkpoint import global_network
from fedsub_app.runs.directory import settings_in
from fedsub_app.runs.recorded import own_code, read_recorded
from fedsub_app.settings import Settings
from fedsub_app.training.local import evaluation_batches
from fedsub_app.training.problem import Problem


def model_of(folder: Path, client: int | None = None) -> tuple[nn.Module, AnySamples | Batch, Problem, Settings]:
    """Return a run's global model, or a client's own one, in evaluation mode.

    Behind it: the training samples, of the client where it is a client's, the problem and the settings.
    """
    own = None if client is None else client_of(folder, client)
    settings = own.settings if own else settings_in(folder)
    problem = Problem.of(settings)
    x: AnySamples | Batch = problem.data.train_x
    network = global_network(folder, problem)
    if not own:
        bs = [tensor for name, tensor in tensors_of(network).items() if ".lora_B." in name]
        if bs and not settings.options.moves_base and not any(b.any() for b in bs):
            said = "B = 0 in the global model's adapters, each client has its own: --client 0 takes that of client 0"
            print(f"note: method = {settings.method!r}: {said}", file=sys.stderr)
    else:
        shared, network = tensors_of(network), own.network.module
        if all(torch.equal(tensor.cpu(), shared[name].cpu()) for name, tensor in own.network.tensors.items()):
            print(f"note: method = {settings.method!r}: client {client}'s model is the global one", file=sys.stderr)
        x = problem.data.train_x.part(own.place.partition.train[own.id])
    check_base(settings.model, base_digest(network), read_recorded(folder).get("base", ""), "the run's")
    return network.cpu(), x, problem, settings


def predictions(folder: Path, files: Sequence[Path], client: int | None = None) -> tuple[list[str], list[list[Any]]]:
    """Return a header and a row an image or a row of a table.

    A classification has the columns ``label`` and ``score``, the probability from 0 to 1; a multi-label task a
    probability a label; all others the network's outputs.
    """
    network, x, problem, settings = model_of(folder, client)
    network, task = settled(network, x), problem.task
    if isinstance(task, NextToken) or "dataset" in own_code(settings.flat()) or settings.features != "none":
        raise UserError(f"{folder}: predict reads images and tables; `client_of` and `Record.model()` give the network")
    if is_source(settings.dataset):
        parts = [unseen_rows(settings.data, task, file) for file in files]
        names = parts[0][1]
        outputs = torch.cat([_outputs(network, x) for x, _ in parts])
        labels = [[file, row] for file, (x, _) in zip(files, parts, strict=True) for row in range(len(x))]
    else:
        x, names = _unseen_images(settings.data, files)
        outputs, labels = _outputs(network, x), [[file] for file in files]
    first = ["file", "row"][: len(labels[0])]
    if task.classes:
        best = zip(*map(Tensor.tolist, outputs.softmax(1).max(1)), strict=True)
        values = [[names[number] if names else number, f"{score:.4f}"] for score, number in best]
        return [*first, "label", "score"], [a + b for a, b in zip(labels, values, strict=True)]
    flat = (outputs.sigmoid() if isinstance(task, MultiLabel) else outputs).flatten(1)
    names = names if len(names) == flat.shape[1] else [f"output-{number}" for number in range(flat.shape[1])]
    return [*first, *names], [a + [f"{value:.6g}" for value in b] for a, b in zip(labels, flat.tolist(), strict=True)]


@torch.no_grad()
def settled(network: nn.Module, x: AnySamples | Batch) -> nn.Module:
    """Return the network, or a copy where that is needed: no sample's output depends on the others of its batch.

    A BatchNorm that has the statistics of its batch gets those of the training samples ``x``, the mean of their
    batches.
    """
    if not _of_batches(network):
        return network.eval()
    network = copy.deepcopy(network)  # a process's clients share theirs
    for layer in _of_batches(network):
        layer.running_mean, layer.running_var = torch.zeros(layer.num_features), torch.ones(layer.num_features)
        layer.num_batches_tracked, layer.track_running_stats, layer.momentum = torch.tensor(0), True, None
        layer.train()
    for batch in evaluation_batches(network, len(x), torch.device("cpu")):
        network(x[batch])
    return network.eval()


def _of_batches(network: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    layers = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.running_mean is None]


@torch.no_grad()
def _outputs(network: nn.Module, x: AnySamples) -> Tensor:
    return torch.cat([network(x[batch]) for batch in evaluation_batches(network, len(x), torch.device("cpu"))])


def _unseen_images(settings: DataSettings, files: Sequence[Path]) -> tuple[AnySamples, list[Any]]:
    """Return image files as the run's training images are, and the names of classes that are folders."""
    data = load_dataset(settings.model_copy(update={"normalise": "none"}))
    train = data.train_x
    if not isinstance(train, Samples) or len(train.shape) != 4:
        raise UserError(f"dataset = {settings.dataset!r}: its samples are no images; predict reads images and tables")
    if odd := [file for file in files if file.suffix.lower() not in IMAGES]:
        raise UserError(f"{odd[0]}: must end in {', '.join(IMAGES)}, as the run's data are images")
    pixels, images = read_pixels(files, train.shape[1:]), train.tensor
    if images.dtype != torch.uint8:
        pixels, images = in_unit(pixels), images.clone()  # normalised in place
    return normalised(images, pixels, settings.normalise)[1], list(data.labels)


class _OfTensors(nn.Module):
    """A network that takes tensors alone: torch would make an input of each argument whose default is a number.

    Images with a ``scale`` go in as pixels from 0 to 255.
    """

    def __init__(self, network: nn.Module, form: Batch, scale: Sequence[Tensor]) -> None:
        super().__init__()
        self.network, self.form, self.scale = network, form, scale

    def forward(self, *tensors: Tensor) -> Tensor:
        x, *_ = tensors
        if self.scale:
            white, mean, deviation = self.scale
            x = (x / white - mean) / deviation
        outputs: Tensor = self.network(replace(self.form, tensors=tensors) if isinstance(self.form, Inputs) else x)
        return outputs


def write_onnx(folder: Path, path: Path, client: int | None = None) -> str:
    """Write a run's model as an ONNX file with a free batch size; returns what goes in.

    Images of bytes go in as float32 pixels from 0 to 255, everything else as the network takes it: normalised.
    """
    network, x, problem, _ = model_of(folder, client)
    network, data = settled(network, x), problem.data
    if eager := getattr(network, "set_attn_implementation", None):
        eager("eager")  # of the others torch writes no heads that share keys, such as Llama's
    some, scale = blank(2, data.in_shape), getattr(data.train_x, "scale", ())
    tensors = some.tensors if isinstance(some, Inputs) else (some,)
    names = list(getattr(some, "names", ())) or [f"input{number or ''}" for number in range(len(tensors))]
    axes = {name: {0: "n"} for name in (*names, "output")}
    options: dict[str, Any] = {"input_names": names, "output_names": ["output"], "dynamic_axes": axes, "dynamo": False}
    make_folder(path.parent)
    try:
        with warnings.catch_warnings(action="ignore"):  # of the exporter's age; its outputs are tested
            torch.onnx.export(_OfTensors(network, some, scale).eval(), tensors, str(path), **options)
    except ModuleNotFoundError as error:
        raise UserError(f"--onnx: needs the package {error.name}; `pip install 'fedsub[onnx]'`") from error
    except Exception as error:  # of the exporter: code of the user
        raise UserError(f"--onnx: torch cannot write this network ({one_line(error)[:200]})") from error
    numbers = "pixels, 0 to 255" if scale else "normalised as in the run"
    whole = [numbers if tensor.is_floating_point() else "tokens as in the run" for tensor in tensors]
    shapes = [list(tensor.shape[1:]) for tensor in tensors]
    return "\n".join(map("{}: {} each, {}".format, names, shapes, whole))


def write_adapter(run: Path, folder: Path, client: int | None = None) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained(network, folder)`` loads, the head included."""
    network, _, _, settings = model_of(run, client)
    tensors = tensors_of(network)
    every = adapters(tensors) if settings.trainable == "lora" else ()
    if not every or settings.options.moves_base:
        why = f"{settings.method} changes other weights" if every else f"trainable = {settings.trainable!r}"
        raise UserError(f"--adapter: {why}, so there is no adapter alone; --merged writes the whole model")
    rank = len(tensors[every[0].a])  # a client may have fewer
    saved = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    # peft takes these as ends of names. Where other modules have such names, it loads the weights without being told.
    is_clear = not any(path.endswith(tuple(saved)) for path, _ in network.named_modules() if path not in saved)
    config = import_module("peft").LoraConfig(
        r=rank,
        lora_alpha=scale_of(network) * rank,
        lora_dropout=settings.lora_dropout,
        fan_in_fan_out=bool(turned(network)),
        target_modules=whole_names(adapter.layer for adapter in every),
        modules_to_save=saved if is_clear else None,
        base_model_name_or_path=settings.model.partition(":")[2],
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    names = {name: name.replace(".default.weight", ".weight") if ".lora_" in name else name for name in tensors}
    named = {f"base_model.model.{names[name]}": tensor.detach() for name, tensor in tensors.items()}
    write_tensors(folder / "adapter_model.safetensors", named)


def write_merged(run: Path, folder: Path, client: int | None = None) -> None:
    """Write all weights, the adapters added to those under them: a folder of transformers, or model.safetensors."""
    network, _, problem, settings = model_of(run, client)
    state, scale, others = dict(network.state_dict()), scale_of(network), turned(network)
    if settings.trainable == "lora":  # else adapters are the network's own
        if tied := tied_weights(network):
            raise UserError(f"--merged: {tied[0]!r} is tied, other layers would have its adapter too; use --adapter")
        for a, b, weight in adapters(state):
            product = state[b].flatten(1) @ state[a].flatten(1)
            product = product.T if weight in others else product
            state[weight] = state[weight].float() + scale * product.reshape(state[weight].shape)
        state = {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}
    whole = problem.unfrozen()
    whole.load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    if save := getattr(whole, "save_pretrained", None):
        labels = problem.data.labels
        config: Any = getattr(whole, "config", None)
        if labels and len(labels) == getattr(config, "num_labels", 0):
            config.id2label = dict(enumerate(map(str, labels)))
            config.label2id = {name: number for number, name in config.id2label.items()}
        save(str(folder))
        if tokenizer := pretrained_tokenizer(in_data_folder(settings.tokenizer, settings.data_dir)):
            tokenizer.save_pretrained(str(folder))
    else:
        write_tensors(folder / "model.safetensors", whole.state_dict())
