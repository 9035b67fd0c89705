"""FedProx, client side: FedAvg with the proximal objective.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
https://arxiv.org/abs/1812.06127. Deviation: every client trains all its epochs (no partial work, no inexactness gamma).
"""

from client_apps.base import Client


class FedProxClient(Client):
    """``objective = "prox"``, whatever the settings say."""

    objective_name = "prox"
