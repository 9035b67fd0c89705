"""Ditto, server side: the same as FedAvg's; ``weighting = "auto"`` is uniform here, by samples there.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
https://arxiv.org/abs/2012.04221. A client's personal model starts at the common v^0, whenever it first takes part.
"""

from strategies.base import SubnetStrategy


class Ditto(SubnetStrategy):
    """FedAvg; a client's own model never leaves it."""

    keeps_models = True
