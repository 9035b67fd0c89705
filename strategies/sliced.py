"""A family of smaller networks: the base of methods whose clients train some of the global network's hidden units.

A method names the units of each client (:meth:`Sliced.units_of`). The client is sent the network that has only these
units and returns it trained, as FedAvg's client does. The values are averaged at the rows and columns that they were
taken from, over the clients that have them; a position that no client has keeps its value. Positions of no unit, such
as the output bias, go to all clients. Clients of :class:`Narrow` have a width, a fraction of every hidden layer.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tasks import task_of
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.nodes import available
from fedsub_app.models import UnitGroup
from fedsub_app.subnets.masks import expand
from fedsub_app.subnets.slices import Index, indices, select, sliced_shape
from strategies.base import Contribution, Spec, SubnetStrategy, Task, Update
from strategies.defences import WITHOUT_MASKS
from strategies.evaluation import evaluation_due
from strategies.measurement import Measurement
from strategies.settings import WidthSettings


class Sliced(SubnetStrategy):
    """Sends each client the network of its units."""

    narrows = True
    refused: ClassVar[Mapping[str, str] | str] = WITHOUT_MASKS
    secure = ""

    @abstractmethod
    def units_of(self, client: int) -> dict[str, Tensor]:
        """Return a client's units in this round: group name -> bool ``[group.size]``, read-only; missing ones: on."""

    def slices_of(self, client: int) -> dict[str, Index]:
        """Return a client's rows and columns of each tensor that it does not have whole."""
        return indices(self.units, self.units_of(client))

    def network_of(self, client: int) -> Tensors:
        # Slices of the model that a message still holds. Equal slices are one object, which is sent once a message.
        slices = self.once("slices", WeakValueDictionary[object, Tensor])
        network = dict(self.current)
        for name, index in self.slices_of(client).items():
            key = (name, *(None if wanted is None else wanted.numpy().tobytes() for wanted in index))
            known = slices.get(key)
            network[name] = select(self.current[name], index) if known is None else known
            slices[key] = network[name]
        return network

    def expected(self, client: int) -> Mapping[str, Spec]:
        slices = {name: sliced_shape(self.current[name].shape, index) for name, index in self.slices_of(client).items()}
        return self.specs | {name: self.specs[name].of_shape(shape) for name, shape in slices.items()}

    def contribution(self, update: Update) -> Contribution:
        return super().contribution(update)._replace(slices=self.slices_of(update.client))

    def known_positions(self, client: int) -> Tensors:
        units = self.units_of(client)
        return expand(self.units, units, {name: self.current[name].shape for name in indices(self.units, units)})


class WidthBased(SubnetStrategy):
    """Gives each client a width: the fraction of the network that it trains."""

    options: WidthSettings
    narrows = True

    @property
    def held_widths(self) -> Sequence[float]:
        """The widths of all clients."""
        whole = self.settings.model_width
        return [min(1.0, each.width / whole) for each in self.devices.classes] if self.devices else self.options.widths

    def width(self, client: int) -> float:
        """Return a client's width in the running round, above 0 and at most 1."""
        held = self.held_width(client)
        if self.options.assignment == "fixed" or not self.round:  # before round 1: what it may have to hold
            return held
        widths = [width for width in self.held_widths if not self.devices or width <= held]
        draws = generator(self.settings.seed, self.round, client, "width")
        return widths[int(torch.randint(len(widths), (), generator=draws))]

    def needs_classes(self, key: str) -> None:
        """Raise :class:`UserError` if this key of the method is on and the task has no classes."""
        if getattr(self.options, key) and not task_of(self.settings.task).classes:
            name = f"{self.settings.method}.{key.replace('_', '-')} = True"
            raise UserError(f"{name}: needs classes, task = {self.settings.task!r} has none")


class Statistics(Measurement):
    """Asks all clients for the statistics of the global model's BatchNorm, in rounds that are evaluated."""

    def clients(self) -> Sequence[int]:
        """Return all clients that a round may ask, or none where no evaluation is due."""
        there = available(self.settings, self.round) if evaluation_due(self, self.round, self.config) else ()
        return [client for client, able in enumerate(there) if able]

    def expected(self, client: int) -> Mapping[str, Spec]:
        return {name: self.specs[name] for name, _ in self.model.named_buffers() if name in self.specs}

    def weight(self, update: Update) -> float:
        return update.num_examples


class Narrow(WidthBased, Sliced):
    """Sends each client ``ceil(width * size)`` units of every hidden layer; BatchNorm is static."""

    def setup(self) -> None:
        super().setup()
        if self.current.keys() - dict(self.model.named_parameters()):
            self.measurement = Statistics(self)

    def distance(self, update: Update, contribution: Contribution) -> float:
        """Return the distance of the parameters alone: no training reads statistics, and evaluations replace them."""
        return super().distance(update, self.part(contribution, statistics=False))

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        norms = super().norms(update, contribution)
        if self.robust:  # which bounds each tensor; with Scaler a narrow network's statistics are of another size
            return norms
        return {**norms, "statistics": super().distance(update, self.part(contribution, statistics=True))}

    def part(self, contribution: Contribution, statistics: bool) -> Contribution:
        """Return a contribution with its statistics only, or with its parameters only."""
        names, tensors = dict(self.model.named_buffers()), contribution.tensors.items()
        return contribution._replace(tensors={n: x for n, x in tensors if (n in names) == statistics})

    def ranks(self, group: UnitGroup, client: int) -> Tensor:
        """Return the rank of each unit, int64 ``[group.size]``: a narrow client gets the units of the lowest ranks."""
        return torch.arange(group.size)

    def units_of(self, client: int) -> dict[str, Tensor]:
        width = self.width(client)
        groups = self.units if width < 1 else ()
        return {group.name: self.ranks(group, client) < group.kept(width) for group in groups}

    def task(self, client: int) -> Task:
        return Task(client, self.network_of(client), {"width": self.width(client)})
