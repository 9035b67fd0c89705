"""HeteroFL, FedRolex, Federated Dropout, server side: clients train narrower networks, cut out of the global one.

HeteroFL: Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021, https://arxiv.org/abs/2010.01264. A client of width r has the first ceil(r C) of each hidden layer's
C units. In training the outputs of its layers are divided by r (Scaler). The logits of classes that it lacks are 0, and
it counts for the other classes' rows of the output layer alone (masked cross-entropy). BatchNorm takes the statistics
of the mini-batch; all clients measure those of the global model afterwards (static BatchNorm).
FedRolex: Alam, Liu, Yan, Zhang: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022,
https://arxiv.org/abs/2212.01548. It is the same with a window of units that begins at unit j mod C in round j = 0, 1,
... and wraps around. Values are averaged position by position over the clients that have the position
(strategies/sliced.py).
Federated Dropout: Caldas, Konečný, McMahan, Talwalkar: Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements, 2018, https://arxiv.org/abs/1812.07210. It is the same with random units, drawn for each client
and round; all clients have one width, and the loss has no mask (``widths = 0.75``, ``masked-loss = false``).

Deviations from the papers or the authors' code (HeteroFL-Computation-..., FedRolex):

- ``resnet18`` narrows the inner channels of its blocks alone, so that a network of width r has about r times the
  parameters and not r². All other networks, ``torchvision:resnet18`` too, narrow every hidden layer and the residual
  stream. Only layers that are narrow are divided by r.
- The networks are fedsub's. examples/own-network/preresnet.py is their pre-activation ResNet-18, 3 x 3 stem. Their
  CNN of 64-128-256-512 channels, the Transformer and its embeddings, heads and masked tokens are not here.
- Client i has ``widths[i mod len]``; theirs deals the levels in blocks of clients. Their levels are shares of the
  widest one, here of ``model``: HeteroFL never trains units beyond those of its widest client.
- The authors clip each step's gradient to norm 1, which the papers do not say; there is no clipping here. Widths such
  as 1/16 in networks without BatchNorm can diverge without clipping: the Scaler multiplies by 16 in every layer.
- Running statistics travel with the network and are averaged as in FedAvg. In every round that ``eval-every``
  evaluates, a pass over all clients' data replaces them: by the mean of mini-batches, weighed by clients' samples.
  Nothing reads them before, unless ``max-flops`` or ``max-bytes`` ends a run between evaluations. FedRolex's code takes
  the statistics of the test batch instead.
- ``global-local`` and ``personal`` accuracies are the global model's on a client's data, as their "Local" is, without
  its mask on the logits. A narrow network alone, without its Scaler, is not what was trained.
- FedRolex's paper has floor(r C) units, its code ceil(r C), as here. The code's window moves towards lower units, the
  paper's and this one towards higher ones. The code's weighting by widths or counts of updates, and `overlap`, are left
  out; biases, BatchNorm and the output layer are weighed by counts of updates in every setting of the code.
- Federated Dropout follows FedRolex's code (``ResnetServerRandom``); only the paper's abstract was read. Whether the
  paper divides by the width is open (``scaler``); the paper's lossy compression of messages is left out.
- Clients tell the server which classes they have; the authors' simulation knows.
- ``objective = "moon"`` is refused: a client's last model may be of other units.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.models import UnitGroup, output_names
from fedsub_app.subnets.slices import ALL
from strategies.base import Contribution, Spec, Update
from strategies.settings import HeteroFLSettings
from strategies.sliced import Narrow

CLASSES = "reply/classes"  # tensor of a reply with masked loss, bool [classes]: the classes of the client's samples


class HeteroFL(Narrow):
    """Sends each client the first units of every hidden layer, as many as its width says."""

    options: HeteroFLSettings
    secure = ""

    def setup(self) -> None:
        super().setup()
        self.needs_classes("masked_loss")
        try:  # the names of the head's tensors, whose rows are the classes
            self.output = output_names(self.model) if self.options.masked_loss else ()
        except TypeError as error:
            otherwise = f"or {self.settings.method}.masked-loss = false"
            raise UserError(f"model = {self.settings.model!r}: {error}, {otherwise}") from None

    def expected(self, client: int) -> Mapping[str, Spec]:
        if not self.output:
            return super().expected(client)
        return {**super().expected(client), CLASSES: Spec(tuple(self.current[self.output[0]].shape[:1]), torch.bool)}

    def contribution(self, update: Update) -> Contribution:
        added = super().contribution(update)
        if not self.output:
            return added
        classes = update.tensors[CLASSES].nonzero().flatten()
        tensors, slices = dict(added.tensors), dict(added.slices or {})
        for name in self.output:
            tensors[name], slices[name] = tensors[name][classes], (classes, slices.get(name, ALL)[1])
        return added._replace(tensors=tensors, slices=slices)

    @property
    def chooses_positions(self) -> bool:
        """Whether a client's classes decide which rows of the output it contributes."""
        return self.options.masked_loss

    def personal_download(self, client: int) -> Tensors:
        return self.current


class FedRolex(HeteroFL):
    """HeteroFL with a window that begins one unit later in every round."""

    def ranks(self, group: UnitGroup, client: int) -> Tensor:
        """Return the distance of each unit from the window's first one."""
        return (torch.arange(group.size) - (self.round - 1)) % group.size


class FedDrop(HeteroFL):
    """HeteroFL with random units, other ones for each client and round."""

    def ranks(self, group: UnitGroup, client: int) -> Tensor:
        return torch.randperm(group.size, generator=generator(self.settings.seed, self.round, client, group.name))
