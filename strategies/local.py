"""Local training without federation, server side: nothing is sent, nothing is merged."""

from collections.abc import Mapping, Sequence

from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.protocol import Spec, Task, Update
from strategies.base import SubnetStrategy


class Local(SubnetStrategy):
    """The floor that every federated method is compared with: each client trains alone, from the common start."""

    def task(self, client: int) -> Task:
        """Send nothing: the start follows from the seed, the rest is the client's own."""
        return Task(client)

    def evaluation_task(self, client: int) -> Task:
        """Send the initial model only where its accuracy is asked for."""
        return super().evaluation_task(client) if "global-local" in self.settings.evaluations else Task(client)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect no tensors."""
        return {}

    def merge(self, updates: Sequence[Update]) -> Tensors:
        """Keep the initial model."""
        return self.current
