"""pFedMe, server side: FedAvg's.

T Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
https://arxiv.org/abs/2006.08848, Algorithm 1. A client has a local model w, at the start of a round the global one, and
a personal model theta. For each mini-batch it minimises ``f(theta) + lambda / 2 ||theta - w||²`` in theta by K gradient
steps, then moves ``w <- w - eta lambda (w - theta)``. It sends w; the server goes beta of the way to the mean.

Checked against the authors' code (https://github.com/CharlieDinh/pFedMe: userpFedMe.py, fedoptimizer.py,
serverpFedMe.py). Deviations from it and from the paper, and points that they leave open:
- the learning rate of theta is the general ``lr``, eta is ``w-lr``, beta is the general ``server-lr``.
- theta starts at the global model in each round and goes on from one mini-batch to the next (code). The code also pulls
  theta to 0 (weight 0.001): set ``weight-decay`` for that.
- a round has R = ``local-steps`` mini-batches, or ``local-epochs`` passes.
- only the clients of a round train (paper: all train, some send). A client is evaluated on theta as its last training
  left it (code), at first the initial model.
- ``objective`` acts on theta. BatchNorm's running statistics are those of theta, for both models.
With ``lambda = 1``, ``w-lr = 1`` and ``steps = 1`` theta and w are FedAvg's model of the same ``weighting`` (``auto``:
uniform here, by samples there), bit for bit.
"""

from strategies.base import SubnetStrategy
from strategies.settings import PFedMeSettings


class PFedMe(SubnetStrategy):
    """FedAvg of the local models; theta never leaves a client."""

    options: PFedMeSettings
    keeps_models = True

    def max_samples(self, client: int) -> int:
        return super().max_samples(client) * self.options.steps
