"""The checkpoint of a finished round, one file; the network with a run's last global model."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensor_files import read_tensors, round_files, write_tensors
from fedsub_app.common.tensors import Tensors, prefixed, unprefixed
from fedsub_app.models import load_tensors
from fedsub_app.problem import Problem


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
        raise UserError(
            f"{path}: checkpoint is truncated or damaged ({error}); delete it to resume from the one before"
        ) from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints' files in the directory of a run, the oldest first."""
    return list(round_files(folder / "checkpoints").values())


def global_network(folder: Path, problem: Problem) -> nn.Module:
    """Return the network with a run's final global model, or that of its last checkpoint, in evaluation mode."""
    network, final, paths = problem.network(), folder / "model.safetensors", checkpoints(folder)
    if not final.exists() and not paths:
        raise UserError(f"{folder}: no model.safetensors and no checkpoint")
    try:
        load_tensors(network, read_tensors(final)[0] if final.exists() else read_checkpoint(paths[-1]).model)
    except ValueError as error:
        raise UserError(f"{final}: truncated or damaged ({error})") from None
    return network.eval()
