"""Ditto, server side: FedAvg's; only the settings are new.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
https://arxiv.org/abs/2012.04221.
"""

from fedsub_app.common.section import NonNegative
from fedsub_app.settings import MethodSettings


class DittoSettings(MethodSettings):
    """Keys of Ditto."""

    lambda_: NonNegative = 0.5
    """Pull of the personal model towards the global one."""
