"""A family of smaller networks: the base of methods whose clients train some of the global network's hidden units.

A method names the units of each client (:meth:`Sliced.units_of`). The client is sent the network that has only these
units, a network that is really so small, and returns it trained; FedAvg's client does that. The values are averaged at
the rows and columns that they were taken from, over the clients that have them; a position that no client has keeps its
value. Positions that belong to no unit, such as the output bias, go to all clients.
"""

from abc import abstractmethod
from collections.abc import Mapping
from weakref import WeakValueDictionary

from torch import Tensor, nn

from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.protocol import Spec, Task, Update
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.slices import Index, indices, select, sliced_shape
from strategies.base import SubnetStrategy
from strategies.defences import WITHOUT_MASKS


class Sliced(SubnetStrategy):
    """Sends each client the network of its units."""

    narrows = True

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        # Slices of the model that some message still holds: equal ones are one object, which travels once a message.
        self._slices: tuple[Tensors, WeakValueDictionary[object, Tensor]] = ({}, WeakValueDictionary())

    @abstractmethod
    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return the units of a client in the running round: group name -> bool ``[group.size]``; read-only.

        A group that is lacking has all its units.
        """

    def slices_of(self, client: int) -> dict[str, Index]:
        """Return a client's rows and columns of each tensor that it does not have whole."""
        return indices(self.units, self.units_of(client))

    def network_of(self, client: int) -> Tensors:
        """Return the tensors of a client's network."""
        if self._slices[0] is not self.current:
            self._slices = (self.current, WeakValueDictionary())
        network = dict(self.current)
        for name, index in self.slices_of(client).items():
            key = (name, *(None if wanted is None else wanted.numpy().tobytes() for wanted in index))
            known = self._slices[1].get(key)
            network[name] = select(self.current[name], index) if known is None else known
            self._slices[1][key] = network[name]
        return network

    def task(self, client: int) -> Task:
        """Send the client's network."""
        return Task(client, self.network_of(client))

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the client's network back."""
        slices = {name: sliced_shape(self.current[name].shape, index) for name, index in self.slices_of(client).items()}
        return self.specs | {name: self.specs[name].of_shape(shape) for name, shape in slices.items()}

    def contribution(self, update: Update) -> Contribution:
        """Add the client's network at the rows and columns that it was taken from."""
        return super().contribution(update)._replace(slices=self.slices_of(update.client))

    def personal_download(self, client: int) -> Tensors:
        """Return the client's network."""
        return self.network_of(client)

    def refuses(self) -> Mapping[str, str]:
        """Refuse the defences that compare whole updates."""
        return {**super().refuses(), **WITHOUT_MASKS}
