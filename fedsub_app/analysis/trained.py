"""The trained network of a run, the global one or a client's own, as files for peft or of all its weights."""

from importlib import import_module
from pathlib import Path

from fedsub_app.analysis.prediction import model_of
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensor_files import write_tensors
from fedsub_app.models import adapters, scale_of, tensors_of


def write_adapter(run: Path, folder: Path, client: int | None = None) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained(network, folder)`` loads, the head included."""
    network, _, settings = model_of(run, client)
    tensors = tensors_of(network)
    if not (every := adapters(tensors)) or settings.options.moves_base:
        why = f"{settings.method} changes other weights" if every else f"trainable = {settings.trainable!r}"
        raise UserError(f"--adapter: {why}, so there is no adapter alone; --merged writes the whole model")
    rank = len(tensors[every[0].a])  # a client may have fewer
    config = import_module("peft").LoraConfig(
        r=rank,
        lora_alpha=scale_of(network) * rank,
        lora_dropout=settings.lora_dropout,
        target_modules=[adapter.layer for adapter in every],
        modules_to_save=sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name}),
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
    network, problem, _ = model_of(run, client)
    state, scale = dict(network.state_dict()), scale_of(network)
    for a, b, weight in adapters(state):
        product = state[b].flatten(1) @ state[a].flatten(1)
        state[weight] = state[weight].float() + scale * product.view(state[weight].shape)
    whole = problem.unfrozen()
    whole.load_state_dict({name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name})
    folder.mkdir(parents=True, exist_ok=True)
    if save := getattr(whole, "save_pretrained", None):
        save(str(folder))
    else:
        write_tensors(folder / "model.safetensors", whole.state_dict())
