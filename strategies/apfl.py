"""APFL, server side: FedAvg's.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, 2020, https://arxiv.org/abs/2003.13461, Algorithm 1. A
client trains w_i as in FedAvg. On the same mini-batches it trains v_i, which it keeps, along the gradient in v of
``f(alpha v + (1 - alpha) w_i)``. Its personal model is this mixture. With adaptive alpha each client's own alpha
follows the gradient ``<v - w_i, grad f(alpha v + (1 - alpha) w_i)>``. The global model is FedAvg's of the same
``weighting`` (``auto``: uniform here, by samples there). It is equal bit for bit in networks without dropout (the
mixture would draw for dropout as well).

Checked against the authors' code (https://github.com/MLOPTPSU/FedTorch: trainings/federated/apfl.py,
``alpha_update``) and PFLlib (clientapfl.py). Deviations from the paper and from both, and points that they leave open:
- v, w_i and alpha move together, from their values before the step (paper). The code moves w_i, then v, then alpha.
- The network runs on the mixture of the weights (paper). The code mixes the outputs of two networks.
- The personal model has the newest global w in the mixture (paper: the mean of the w_j). The code has the w_i that the
  client has just trained. PFLlib puts that mixture in the place of v after each round, and moves v along the gradient
  at v, not at the mixture.
- alpha is adapted in the first step of a round (code; ``adapt = "step"``: in every step, as in PFLlib), by the round's
  learning rate and clipped to [0, 1] (code). The code's further pull of alpha towards 0, 0.02 alpha, is left out.
- v starts at the common start, whenever the client first takes part. v has an optimizer of its own, of the same
  settings; ``objective`` acts on w_i alone. BatchNorm's statistics in the personal model are those of the mixture.
"""

from strategies.base import SubnetStrategy


class APFL(SubnetStrategy):
    """FedAvg; v and alpha never leave a client."""
