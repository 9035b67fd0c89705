"""The test of the global model: by the server, or by the nodes of a simulation, which wait for the next round."""

from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedsub_app.common.seeds import drawing
from fedsub_app.common.tasks import measured
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.protocol import TEST, Task
from fedsub_app.federation.wire import to_tensors
from fedsub_app.models import Network, load_tensors, narrowed, unit_groups, widths_of
from fedsub_app.training.local import added, evaluate, evaluation_batches, sums_of
from fedsub_app.training.problem import Problem

QUICK_SAMPLES = 32


class GlobalTest:
    """Score and loss of the global model on the global test set.

    Its fixed batches' sums are added in their order: the same bits, whichever process computes which batch.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.task = problem.task
        self.network = Network(problem.network().to(device))
        self.model = self.network.module
        self.x, self.y = problem.data.test_x.to(device), problem.data.test_y.to(device)
        self.batches: Sequence[slice | Tensor] = evaluation_batches(self.model, len(self.y), device)
        self.federation: Federation | None = None

    def share(self, federation: Federation, grid: Grid) -> None:
        """From now on let simulated nodes, where there are several, compute the batches; they have the test set."""
        self.federation, self.grid = federation, grid

    def __call__(self, arrays: ArrayRecord) -> dict[str, float]:
        """Return the task's metrics as ``global-<name>``, such as ``global-loss``."""
        tensors = to_tensors(arrays)
        sums = self._sums_of_nodes(tensors)
        self.network.load(tensors)
        self.model.eval()
        for number, batch in enumerate(self.batches):
            if number not in sums:
                sums[number] = sums_of(self.task, self.model, self.x[batch], self.y[batch])
        values = measured(self.task, added(sums[number] for number in range(len(self.batches))))
        return {f"global-{name}": value for name, value in values.items()}

    def narrow(self, tensors: Tensors) -> dict[str, float]:
        """Return the metrics of a network with fewer units; its BatchNorm takes the statistics of each batch."""
        whole = all(tensor.shape == self.network.tensors[name].shape for name, tensor in tensors.items())
        groups = () if whole else unit_groups(self.model)  # FIARSE's widths leave out weights, not units
        model = narrowed(self.network.reset(), groups, widths_of(groups, tensors)).eval()
        load_tensors(model, tensors)
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.running_mean = layer.running_var = None
        return {f"global-{name}": value for name, value in evaluate(self.task, model, self.x, self.y).items()}

    def _sums_of_nodes(self, tensors: Tensors) -> dict[int, Mapping[str, float | Tensor]]:
        """Return the sums of the batches that nodes have computed, by number; a batch takes the place of a client."""
        federation = self.federation
        if not federation or min(len(federation.nodes), len(self.batches)) < 2 or not federation.simulated:
            return {}
        phase = federation.ask(TEST, 0, range(len(self.batches)), lambda batch: Task(batch, tensors), {})
        answers = federation.answers(phase, federation.exchange(self.grid, phase), lambda _: {}, in_order=False)
        return {batch: _read(part.config["metrics"]) for batch, part, _ in answers if "error" not in part.config}

    @torch.no_grad()
    def quick_loss(self, tensors: Tensors) -> float:
        """Return the loss on a few test samples, which keeps a diverged model from being merged in any round.

        BatchNorm uses the samples' statistics: where clients keep the running ones, the global model's fit no data.
        """
        self.network.load(tensors)
        some = torch.linspace(0, len(self.y) - 1, min(len(self.y), QUICK_SAMPLES)).long().to(self.y.device)
        x, y = self.x[some], self.y[some]  # evenly: a test set may be sorted by class
        self.model.train(len(x) > 1)  # one sample has no statistics
        with drawing(y.device, "quick loss"):
            return float(self.task.loss(self.model(x), y))


def _read(sums: Json) -> dict[str, float | Tensor]:
    """Return a batch's sums as the task made them: a list was a tensor."""
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in sums.items()}
