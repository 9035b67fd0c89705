"""FedALA, server side: FedAvg's.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023, https://arxiv.org/abs/2212.01197, Algorithm 1. Before it trains, a client merges the global model into the last p
layers of its own, element by element: ``own + (global - own) W``; the other layers are the global ones. W, in [0, 1]
and 1 at first, is learned by gradient descent on s percent of the client's samples: to convergence in the first merge,
in one pass in the later ones. In its first round a client trains the global model.

Checked against the authors' code (https://github.com/TsingZ0/FedALA and PFLlib: utils/ALA.py, serverALA.py).
Deviations from it and from the paper, and points that they leave open:
- p counts layers (paper; a layer with the normalisation behind it). The code counts tensors.
- a pass learns on s percent of its mini-batches, rounded down and at least one, in an order of its own (paper: random
  samples). The code takes a random run of consecutive samples for each merge, and keeps their order in each pass.
- W has converged when the standard deviation of the losses of its last ten passes is below 0.1 (code: the losses of
  each pass's last mini-batch, here a pass's mean; the paper gives no rule), or after ``learn-passes`` (ours: the server
  bounds FLOPs).
- BatchNorm uses the statistics of the mini-batch while W is learned, and its running statistics are the global ones.
- a client is evaluated on its model after a merge and before training (code), for which W learns once more.
- ``objective`` acts in the training alone, around the global model.
"""

from fedsub_app.common.errors import UserError
from fedsub_app.models import layer_groups
from strategies.base import SubnetStrategy
from strategies.settings import FedALASettings


class FedALA(SubnetStrategy):
    """FedAvg; the client's own last layers and its W never leave it."""

    options: FedALASettings

    def setup(self) -> None:
        if self.options.layers > (count := len(layer_groups(self.model))):
            raise UserError(f"fedala.layers = {self.options.layers}: at most {count}, the layers of the network")
