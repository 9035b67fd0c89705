"""FjORD, server side: clients hold networks of different widths and train all narrower ones inside them.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout, NeurIPS 2021, https://arxiv.org/abs/2102.13451, Algorithm 1. A client of
width p_max has the first ceil(p_max C) of each hidden layer's C units. For each mini-batch it draws a width p uniformly
from those up to p_max and trains the first ceil(p C) units (ordered dropout). With self-distillation the network of
p_max is trained on the labels, and the one of p on its outputs: ``CE(F_pmax, y) + KL(F_p, F_pmax)``, the paper's loss
for its best alpha = T = 1. Values are averaged position by position over the clients that have the position. Each width
has its own statistics of BatchNorm, and all share its weight and bias.

Checked against its authors' version in Flower's baselines (baselines/fjord: client.py, models.py, strategy.py, od/):
rounding up, one p a mini-batch for all layers, no gradient through the teacher. Deviations from it and from the paper:

- BatchNorm takes the statistics of the mini-batch in training, at each width. All clients measure the global model's
  statistics, as with HeteroFL. A client's network is measured on its own samples, before it is evaluated. Theirs are
  running averages for each width.
- A ResNet narrows the inner channels of its blocks alone; theirs narrows the residual stream as well.
- Where p = p_max is drawn nothing is distilled: the gradient of that term is 0. Other alpha and T are not offered.
- Weights beside the drawn units have a gradient of 0 in that step; momentum and weight decay move them (theirs too).
- ``objective = "moon"`` is refused.
"""

from strategies.base import Task
from strategies.sliced import Narrow


class FjORD(Narrow):
    """Sends each client the first units of every hidden layer, and the widths that it draws from."""

    judged = False  # few clients train the whole network: from one honest round to the next its loss doubles

    def setup(self) -> None:
        super().setup()
        self.needs_classes("distill")

    def task(self, client: int) -> Task:
        widths = sorted(width for width in {*self.held_widths} if width <= self.width(client))
        return Task(client, self.network_of(client), {"widths": widths})
