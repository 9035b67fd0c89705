"""FedProx, server side: FedAvg's; only the settings are new.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
https://arxiv.org/abs/1812.06127. Deviation: every client trains all its epochs (no partial work, no inexactness gamma).
"""

from fedsub_app.settings import MethodSettings, NonNegative


class FedProxSettings(MethodSettings):
    """``mu``: weight of the proximal term, 0 is FedAvg."""

    mu: NonNegative
