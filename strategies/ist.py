"""IST and ISTProx, server side: every hidden unit is trained by one client of a round; clients train as in FedAvg.

Hu, Tang, Kyrillidis, Jermaine: Federated Learning Over Images: Vertical Decompositions and Pre-Trained Backbones Are
Difficult to Beat, ICCV 2023, https://arxiv.org/abs/2309.03237. Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine:
Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training, PVLDB 15(8), 2022,
https://arxiv.org/abs/1910.02120. ISTProx is IST with ``objective = "prox"``; with one local step, as in the paper's
tables, the term's gradient is 0 and the two are the same.

A round deals the units of each hidden layer, neurons or channels, to its clients, each layer by a permutation of its
own. A client trains the network of its units (strategies/sliced.py), and the server writes its values back: each is the
mean of one value. Weights between units of different clients keep their value, and so do the units of a client that
does not answer. Positions that belong to no unit (the output bias; the residual stream of a ResNet) are averaged.

Deviations from the papers or the authors' code (IST_FL):

- Biases are not in the papers. The authors' clients start from random biases of their own, and neither send nor receive
  biases, so that the server's biases stay as they are. Here a hidden unit's bias goes with the unit, and the output's
  bias is averaged.
- A client's optimizer is fresh in every round (Appendix B.2). The authors' IST code keeps one per client, whose
  momentum is then that of other neurons.
- The learning rate falls in the rounds that the paper says (``lr-decay-at``); in the authors' code it hardly ever does.
- The permutation is drawn anew from seed and round, so that a round needs no state; theirs shuffles the last one.
- BatchNorm on batch statistics is evaluated on random batches of 512, the same ones each time; their batches have 32
  samples and are drawn anew. Running statistics, where a network has them, go with their units.
- Units that do not divide by the clients are dealt as evenly as possible; the papers' widths are multiples.
- ``objective = "moon"`` is refused: a client has other units in every round, so that its last model is no z_p.
"""

from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.nodes import sample
from fedsub_app.subnets.masks import deal
from strategies.base import Contribution, Update
from strategies.defences import ALONE, DEFENCES
from strategies.sliced import Sliced


class IST(Sliced):
    """Deals the hidden units to a round's clients, anew in every round."""

    secure = ALONE
    refused: ClassVar = {
        **dict.fromkeys((*DEFENCES, "min-contributors"), ALONE),
        "oversample": "the units of a client that is not waited for would not be trained",
    }

    def setup(self) -> None:
        super().setup()
        settings = self.settings
        for group in self.units:
            if group.size < settings.sample_size:
                least = f"the {settings.sample_size} clients of a round; allowed is at least one each"
                raise UserError(f"model = {settings.model!r}: layer {group.name} has {group.size} units for {least}")
        self.dealt = {place.name for group in self.units for place in group.places if place.whole(group.size)}

    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return a client's units; one that the round does not ask has those of a client in whose place it is."""
        dealt = self._deal(self.round)
        return (dealt if client in dealt else self._deal(self.round, client))[client]

    @lru_cache(maxsize=2)  # noqa: B019  (a strategy lives as long as its run)
    def _deal(self, server_round: int, other: int | None = None) -> dict[int, dict[str, Tensor]]:
        clients = sample(self.settings, server_round)
        clients = clients if other is None else [other, *clients[1:]]
        draws = generator(self.settings.seed, server_round, "units")
        return dict(zip(clients, deal(self.units, [self.held_width(client) for client in clients], draws), strict=True))

    def contribution(self, update: Update) -> Contribution:
        """Average the tensors that all clients have; a unit's values are those of the one client that has it."""
        return super().contribution(update)._replace(alone=self.dealt)

    def personal_download(self, client: int) -> Tensors:
        """Return the global model: a client has other units in every round."""
        return self.current
