"""Federated multi-task learning with a mean regulariser, server side: FedAvg's mean of the clients' own models.

Evgeniou, Pontil: Regularized multi-task learning, KDD 2004. The method follows the federated baseline in the published
code of LG-FedAvg (Liang et al., https://arxiv.org/abs/2001.01523), as it was meant: client k minimises
``loss + c (||W||² + tr(W Omega W^T))``, with the clients' models as columns of W and Omega = (I - 11^T / m)². The
second term is the sum of ``||w_k - mean||²``. Published code has ones in the place of I, and columns of other clients.

Sub-FedAvg cites its baseline "MTL" as Smith et al., Federated multi-task learning, 2017, gives neither its form nor its
c, and published no code of it; we infer that it ran this form.

Ditto pulls a client's personal model to the mean of other models; here it is the mean of the personal ones.
Deviations: the mean is over the clients of the last round; at first it is the common start. It stands still while a
client trains. Biases are regularised as well. ``objective = "moon"`` is refused: a client trains its own last model.
"""

from strategies.base import SubnetStrategy


class MTL(SubnetStrategy):
    """The global model is the mean of the personal models, which the clients keep."""

    keeps_models = True
