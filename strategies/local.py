"""Local training without federation, server side: nothing is sent, nothing is merged."""

from collections.abc import Mapping

from strategies.base import Spec, SubnetStrategy, Task


class Local(SubnetStrategy):
    """The baseline of every federated method: each client trains alone, from the common start."""

    secure = "nothing is merged"
    keeps_models = True
    refused = "nothing is merged"

    def task(self, client: int) -> Task:
        """Send nothing: a client rebuilds the initial model from the seed and keeps its own afterwards."""
        return Task(client)

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {}
