"""Local training without federation, server side: nothing is sent, nothing is merged."""

from collections.abc import Mapping

from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.protocol import Spec, Task
from strategies.base import SubnetStrategy
from strategies.defences import DEFENCES


class Local(SubnetStrategy):
    """The floor that every federated method is compared with: each client trains alone, from the common start."""

    def task(self, client: int) -> Task:
        """Send nothing: the start follows from the seed, the rest is the client's own."""
        return Task(client)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect no tensors, so that the global model stays the initial one."""
        return {}

    def refuses(self) -> Mapping[str, str]:
        """All: there is nothing to defend."""
        return dict.fromkeys(DEFENCES, "nothing is merged")

    def personal_download(self, client: int) -> Tensors:
        """Send nothing."""
        return {}
