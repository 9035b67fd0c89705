"""HeteroFL and FedRolex, server side: clients train networks of different widths, cut out of the global one.

HeteroFL: Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021, https://arxiv.org/abs/2010.01264. A client of width r has the first ceil(r C) of each hidden layer's
C units. In training the outputs of its layers are divided by r (Scaler), logits of classes that it has no sample of are
0 and it counts for the other classes' rows of the output layer alone (masked cross-entropy), and BatchNorm takes the
statistics of the mini-batch; those of the global model are measured afterwards by all clients (static BatchNorm).
FedRolex: Alam, Liu, Yan, Zhang: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022,
https://arxiv.org/abs/2212.01548. The same with a window of units that begins at unit j mod C in round j = 0, 1, ... and
wraps around. Values are averaged position by position over the clients that have it (strategies/sliced.py).

Deviations from the papers or the authors' code (HeteroFL-Computation-..., FedRolex):

- A ResNet narrows the inner channels of its blocks alone: the units of the residual stream belong to no group, so that
  a network of width r has about r times the parameters and not r². All other networks narrow every hidden layer. Only
  layers that are narrow are divided by r; theirs divide the residual stream as well.
- The networks are fedsub's; theirs are a pre-activation ResNet-18 with a 3 x 3 stem and a CNN of 64-128-256-512
  channels. The Transformer and its embeddings, heads and masked tokens are not here.
- Client i has ``widths[i mod len]``; theirs deals the levels in blocks of clients. Their levels are shares of the
  widest one, here of ``model``: HeteroFL never trains units beyond those of its widest client.
- The authors clip each step's gradient to norm 1, which the papers do not say; it is not done here. Widths such as 1/16
  in networks without BatchNorm can diverge without it: the Scaler multiplies by 16 in every layer.
- Running statistics travel with the network and are averaged as in FedAvg; they are replaced in every round that
  ``eval-every`` evaluates, after a pass over all clients' data, as the mean of mini-batches by clients' samples.
  Nothing reads them before, unless ``max-flops`` or ``max-bytes`` ends a run between evaluations. FedRolex's code takes
  the statistics of the test batch instead.
- ``global-local`` and ``personal`` accuracies are the global model's on a client's data, as their "Local" is, without
  its mask on the logits. A narrow network alone, without its Scaler, is not what was trained.
- FedRolex's paper has floor(r C) units, its code ceil(r C), as here. The code's window moves towards lower units, the
  paper's and this one towards higher ones. Its weighting by widths or counts of updates, and `overlap`, are left out.
- Clients tell the server which classes they have; the authors' simulation knows.
- ``objective = "moon"`` is refused: a client's last model may be of other units.
"""

from collections.abc import Mapping, Sequence

import torch
from flwr.app import ConfigRecord
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.nodes import available
from fedsub_app.federation.protocol import Spec, Task, Update
from fedsub_app.models import output_names
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.slices import ALL
from fedsub_app.tasks import task_of
from strategies.measurement import Measurement
from strategies.rounds import evaluation_due
from strategies.settings import HeteroFLSettings
from strategies.sliced import Sliced

CLASSES = "classes"  # tensor of a reply, bool [classes]: the classes of the client's samples; all without masked loss


class Statistics(Measurement):
    """Asks all clients for the statistics of the global model's BatchNorm, in rounds that are evaluated."""

    def clients(self) -> Sequence[int]:
        """Return all clients that a round may ask, or none where no evaluation is due."""
        there = available(self.settings, self.round) if evaluation_due(self, self.round, ConfigRecord()) else ()
        return [client for client, able in enumerate(there) if able]

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the tensors that are no parameters."""
        return {name: self.specs[name] for name, _ in self.model.named_buffers() if name in self.specs}

    def weight(self, update: Update) -> float:
        """Return the number of samples."""
        return update.num_examples


class HeteroFL(Sliced):
    """Sends each client a window of every hidden layer's units; the client's width sets the window's size.

    ``rolling``: the window begins one unit later in every round; otherwise it begins at the first unit.
    """

    options: HeteroFLSettings
    rolling = False

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        if settings.options.masked_loss and not task_of(settings.task).classes:  # type: ignore[attr-defined]
            key = f"{settings.method}.masked-loss = True"
            raise UserError(f"{key}: needs classes, task = {settings.task!r} has none")
        try:
            self.output = output_names(model)
        except TypeError as error:
            raise UserError(f"model = {settings.model!r}: {error}") from None
        if self.current.keys() - dict(model.named_parameters()):
            self.measurement = Statistics(self)

    def held_width(self, client: int) -> float:
        """Return a client's width: its device's or, without ``devices``, the (i mod number)-th of ``widths``."""
        return super().held_width(client) if self.devices else self.options.widths[client % len(self.options.widths)]

    @property
    def held_widths(self) -> Sequence[float]:
        """The widths of all clients."""
        whole = self.settings.model_width
        return [min(1.0, each.width / whole) for each in self.devices.classes] if self.devices else self.options.widths

    def width(self, client: int) -> float:
        """Return a client's fraction of the units in the running round."""
        held = self.held_width(client)
        if self.options.assignment == "fixed":
            return held
        widths = [width for width in self.held_widths if not self.devices or width <= held]
        draws = generator(self.settings.seed, self.round, client, "width")
        return widths[int(torch.randint(len(widths), (), generator=draws))]

    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return the window of each layer; a client of width 1 has all."""
        width, start = self.width(client), self.round - 1 if self.rolling else 0
        groups = self.units if width < 1 else ()
        return {g.name: (torch.arange(g.size) - start) % g.size < g.kept(width) for g in groups}

    def task(self, client: int) -> Task:
        """Send the client's network and its width."""
        return Task(client, self.network_of(client), {"width": self.width(client)})

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the client's network, and the rows of the output layer that count."""
        rows = self.current[self.output[0]].shape[:1]
        return {**super().expected(client), CLASSES: Spec(tuple(rows), torch.bool)}

    def contribution(self, update: Update) -> Contribution:
        """Add the rows of the output layer for the client's classes alone."""
        added, classes = super().contribution(update), update.tensors[CLASSES].nonzero().flatten()
        tensors, slices = dict(added.tensors), dict(added.slices or {})
        for name in self.output:
            tensors[name], slices[name] = tensors[name][classes], (classes, slices.get(name, ALL)[1])
        return added._replace(tensors=tensors, slices=slices)

    def personal_download(self, client: int) -> Tensors:
        """Return the global model."""
        return self.current


class FedRolex(HeteroFL):
    """HeteroFL with a window that rolls."""

    rolling = True
