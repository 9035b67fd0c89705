"""fed-foo, server side: FedAvg's.

Authors: Title, venue, year, link. Deviations from paper and authors' code: which, and why.
"""

from fedsub_app.common.section import Fraction
from fedsub_app.settings import MethodSettings
from strategies.base import SubnetStrategy


class FedFooSettings(MethodSettings):
    """Keys of fed-foo."""

    step: Fraction = 1.0
    """Fraction of its change that a client sends; 1: FedAvg."""


class FedFoo(SubnetStrategy):
    """FedAvg; docs/adding-a-method.md lists what can be overridden."""
