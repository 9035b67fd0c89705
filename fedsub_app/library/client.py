"""The ClientApp of a user's own network and data."""

import sys
from collections.abc import Callable
from functools import lru_cache

from flwr.app import Context

from fedsub_app.client_app import NodeApp
from fedsub_app.common.device import pick_device
from fedsub_app.common.errors import UserError, one_line
from fedsub_app.common.tensor_files import read_tensors
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data.partition import whole_set
from fedsub_app.models import Network
from fedsub_app.node import Places, Source, initial_file, settings_from, state_folder
from fedsub_app.problem import Loss, Model, OwnLoss, Problem
from fedsub_app.settings import Settings
from fedsub_app.training.workplace import Workplace

Load = Callable[[Context], object]
PARTITION = ("partition-id", "num-partitions")
CLIENTS = 256  # whose data a process keeps


def client_app(*, model: Model, data: Load, loss: Loss | None = None) -> NodeApp:
    """Return the ClientApp whose clients train ``model`` on their own data, with any method.

    Parameters
    ----------
    model : the network's class, or a function that makes one: [n, ...] -> logits [n, classes].
    data : context -> ``(train, test)``, each of them (x, y) tensors or a map-style torch data set of (x, y). Its
        ``context.node_config`` is the node's, with the client as ``partition-id`` and the number of all clients as
        ``num-partitions``. Called once a client and process.
    loss : (logits, y) -> the differentiable mean of a batch; default: cross-entropy.
    """
    module = str(sys._getframe(1).f_globals.get("__name__", ""))  # Ray's workers import the app from there
    return NodeApp(own(model, data, loss), module)


def own(model: Model, data: Load, loss: Loss | None = None) -> Source:
    """Return the source of a node whose clients' data ``data`` loads."""
    networks: dict[Settings, Network] = {}

    @lru_cache(maxsize=CLIENTS)
    def loaded(settings: Settings, client: int, node: "_Node") -> Workplace:
        problem = Problem.own(model, _loaded(data, node.context, client, settings), settings, loss and OwnLoss(loss))
        device = pick_device(settings.device, settings.gpu_exact)
        if settings not in networks:
            networks.clear()
            networks[settings] = Network(problem.network().to(device))
        found, partition = problem.data, whole_set(problem.data, settings.partitioning, client)
        train, test = (
            (found.train_x.to(device), found.train_y.to(device)),
            (found.test_x.to(device), found.test_y.to(device)),
        )
        return Workplace(settings, problem, partition, networks[settings], device, *train, *test, node.initial)

    def source(text: str, header: Json, context: Context) -> Places:
        settings, node = settings_from(text, ""), _Node(header, context)
        return lambda client: loaded(settings, client, node)

    return source


class _Node:
    """A node in one run; equal ones have the same configuration and folder."""

    def __init__(self, header: Json, context: Context) -> None:
        self.context, self.folder = context, state_folder(header, context.node_config)
        others = {
            key: value for key, value in context.node_config.items() if key not in ("partition-id", "num-partitions")
        }
        self._key = (str(self.folder), tuple(sorted(others.items())))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node) and other._key == self._key

    def initial(self) -> Tensors:
        """Return the initial global model, which the node was sent."""
        try:
            return read_tensors(initial_file(self.folder))[0]
        except ValueError as error:
            raise UserError(f"{initial_file(self.folder)}: {error}") from None


def _loaded(data: Load, context: Context, client: int, settings: Settings) -> object:
    config = {**context.node_config, "partition-id": client, "num-partitions": settings.num_clients}
    of_client = Context(context.run_id, context.node_id, config, context.state, context.run_config)
    try:
        return data(of_client)
    except Exception as error:
        raise UserError(f"data of client {client}: {one_line(error)}") from error
