"""The checkpoint of a finished round, one file; the network with a run's last global model."""

from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.tensor_files import read_tensors, round_files, write_tensors
from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.models import base_digest, check_base, load_tensors, tensors_of
from fedsub_app.runs.recorded import read_recorded
from fedsub_app.settings import Settings
from fedsub_app.training.problem import Problem


@dataclass(frozen=True)
class Checkpoint:
    """The global model and the method's state after a round; before the first round round 0 and no tensors.

    ``round``: number of the finished round. ``model``: the global model after it, named tensors. ``state``: the tensors
    that :meth:`strategies.hooks.Hooks.state` returned after it. ``abandoned``: number of rounds in a row, up to this
    one, that were abandoned. ``run``: id of the run; "" in a file of an earlier version.
    """

    round: int = 0
    model: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    abandoned: int = 0
    run: str = ""

    def write(self, path: Path) -> None:
        header = {"round": str(self.round), "run": self.run, "abandoned": str(self.abandoned)}
        write_tensors(path, prefixed("model/", self.model) | prefixed("state/", self.state), header)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; its tensors are in the order of the file, not of the model."""
    try:
        tensors, header = read_tensors(path)
        model, state = unprefixed("model/", tensors), unprefixed("state/", tensors)
        return Checkpoint(int(header["round"]), model, state, int(header["abandoned"]), header.get("run", ""))
    except (KeyError, ValueError) as error:
        how = "delete it to resume from the one before"
        raise UserError(f"{path}: checkpoint is truncated or damaged ({error}); {how}") from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints' files in the directory of a run, the oldest first."""
    return list(round_files(folder / "checkpoints").values())


def global_network(folder: Path, problem: Problem) -> nn.Module:
    """Return the network with a run's final global model, or that of its last checkpoint, in evaluation mode."""
    network, path = problem.network(), global_file(folder)
    try:
        load_tensors(network, _model(path))
    except ValueError as error:
        raise UserError(f"{path}: truncated or damaged ({error})") from None
    return network.eval()


def global_file(folder: Path) -> Path:
    """Return the file of a run's final global model, or its last checkpoint."""
    final, paths = folder / "model.safetensors", checkpoints(folder)
    if not final.exists() and not paths:
        raise UserError(f"{folder}: no model.safetensors and no checkpoint")
    return final if final.exists() else paths[-1]


def _model(path: Path) -> Tensors:
    return read_checkpoint(path).model if path.parent.name == "checkpoints" else read_tensors(path)[0]


def start_file(settings: Settings) -> Path:
    """Return the file that ``start-from`` names, of a run's directory that of its last global model."""
    path = Path(str(settings.start_from)).expanduser()
    return global_file(path) if path.is_dir() else path


def started(problem: Problem, settings: Settings) -> Problem:
    """Return the problem with the initial global model that ``start-from`` names.

    UserError: the file is not there or damaged, its tensors are not those of the network, or the run in whose directory
    it lies has another base or another ``lora-alpha``.
    """
    said, path = f"start-from = {settings.start_from!r}:", start_file(settings)
    named = Path(str(settings.start_from)).expanduser()
    kept = path.is_file() and path.parent.name == "checkpoints" and (path.parents[1] / "settings.json").is_file()
    run = path.parents[kept]
    try:
        given = load_file(path) if path == named and not kept else _model(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{said} {one_line(error)}") from None
    network = problem.network()
    own = tensors_of(network)
    given = {name: x for name, x in given.items() if name in own or x.is_floating_point()}  # without BatchNorm's counts
    for name in [*own, *given]:
        have, need = (f"{of[name].dtype} {tuple(of[name].shape)}" if name in of else "none" for of in (given, own))
        if have != need:
            raise UserError(f"{said} tensor {name!r} is {have}, must be {need} with model = {settings.model!r}")
        if not bool(given[name].isfinite().all()):
            raise UserError(f"{said} tensor {name!r} has NaN or infinite values")
    if (run / "settings.json").is_file() and (base := base_digest(network)):
        recorded = read_recorded(run)
        check_base(settings.model, base, recorded.get("base", ""), f"that of {said[:-1]}")
        alpha = recorded["settings"].get("lora-alpha", settings.lora_alpha)
        if settings.trainable == "lora" and alpha != settings.lora_alpha:
            raise UserError(f"lora-alpha = {settings.lora_alpha:g}: must be {alpha:g}, as in {said[:-1]}")
    begun = copy(problem)  # with the frozen base, which the process has once
    object.__setattr__(begun, "start", {name: given[name] for name in own})
    return begun
