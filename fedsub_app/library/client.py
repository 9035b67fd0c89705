"""The ClientApp for a user's own network and data."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from torch import Tensor, nn

from fedsub_app.client_app import NodeApp
from fedsub_app.common.device import check_defaults, pick_device
from fedsub_app.common.errors import UserError, one_line, shown
from fedsub_app.common.failures import machine_failure
from fedsub_app.common.inputs import Form, shape_shown
from fedsub_app.common.run_files import initial_model, state_folder
from fedsub_app.common.tasks import Loss, Metrics, Reduction, Task, numbers, registered, task_of
from fedsub_app.common.tensors import Json
from fedsub_app.data import Collate, load_dataset, private_name, whole_set
from fedsub_app.models import Network, check_base, head_layer, layer_groups, ties, with_head
from fedsub_app.runs.config import defaults, resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.node import Places
from fedsub_app.settings import Settings
from fedsub_app.training.optimizer import MakeOptimizer, Optimizer, OwnOptimizer
from fedsub_app.training.problem import Model, Problem, built
from fedsub_app.training.workplace import Workplace

Load = Callable[[Context], object]
CLIENTS = 256  # clients whose data a process keeps


def client_app(
    *,
    model: Model,
    data: Load,
    task: Task | str | None = None,
    loss: Loss | None = None,
    metrics: Metrics | None = None,
    collate: Collate | None = None,
    optimizer: MakeOptimizer | None = None,
    head: str = "",
    mods: Sequence[object] = (),
) -> NodeApp:
    """Return the ClientApp whose clients train ``model`` on their own data, with any method.

    Parameters
    ----------
    model : the network's class, or a function that makes a network. The network maps [n, ...] to outputs [n, ...]; for
        a classification these are logits [n, classes].
    data : context -> ``(train, test)``. Each is (x, y), where x is a tensor, or a tuple or mapping of tensors; or it is
        a map-style data set of such items (of torch or the package datasets), which is read lazily if it is large.
        ``context.node_config`` is the node's, with the client as ``partition-id`` and the number of all clients as
        ``num-partitions``. A process calls ``data`` once a client and run; with over 256 clients it may call again.
    task : your own task; give it to the strategy as well. Other tasks are only named to the strategy.
    loss : (output, y) -> the mean loss of a batch, differentiable; default: the task's. A regression's y are
        [n, k], [n, 1] where ``data`` has [n].
    metrics : (output, y) -> name (one word) -> mean over a batch: further metrics that clients report with the score.
    collate : items of a map-style data set -> (x, y), or a mapping with ``label`` or ``labels``; default: stacks them.
    optimizer : (parameters, lr) -> a ``torch.optim.Optimizer`` that replaces SGD; it is made anew in every round.
    head : name of the layer that is the network's head, if the strategy's ``head`` names none; default: the last
        Linear.
    mods : Flower's mods of a ClientApp; refused.
    """
    if mods:
        names = ", ".join(getattr(mod, "__name__", type(mod).__name__) for mod in mods)
        why = "an array of fedsub's messages holds tensors of several clients; dp-noise-by = 'clients' adds local noise"
        raise UserError(f"mods = [{names}]: {why}")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UserError(f"loss = {type(loss).__name__}: no step trains its parameters; the model must use them")
    functions: dict[str, object] = {"data": data, "loss": loss, "metrics": metrics, "collate": collate}
    functions["optimizer"] = optimizer
    for name, given in functions.items():
        if not (callable(given) or (given is None and name != "data")):
            raise UserError(f"{name} = {shown(given)[:100]}: must be a function")
    built(model)  # which refuses what is no class or function
    module = str(sys._getframe(1).f_globals.get("__name__", ""))  # Ray's workers import the app from there
    networks: dict[Settings, Network] = {}

    @lru_cache(maxsize=CLIENTS)
    def loaded(settings: Settings, client: int, node: "_Node") -> Workplace:
        samples = _loaded(data, node.context, client, settings)
        check_defaults()  # after the user's code, which may change them
        if task and settings.task != (name := registered(task)):
            raise UserError(f"task = {settings.task!r}: the ClientApp's is {name!r}; give the strategy task= as well")
        used = task_of(settings.task, settings.metrics)
        used = with_loss(used, loss) if loss else used
        used = with_metrics(used, metrics) if metrics else used
        problem = Problem.own(model, samples, settings, used, bool(node.in_shape), collate)
        problem.check_start()
        if node.in_shape and node.in_shape != (came := problem.data.in_shape):
            have = f"samples of client {client} have {shape_shown(came)}"
            raise UserError(f"in_shape = {node.in_shape} of the strategy: {have}")
        device, initial = pick_device(settings.device, settings.gpu_exact), partial(initial_model, node.folder)
        if settings not in networks:
            network = Network(problem.network().to(device))
            if (tied := ties(network.module)) and (known := tied.keys() & initial().keys()):
                what = f"{min(known)!r} is tied to {tied[min(known)]!r}"
                raise UserError(f"model = {problem.name!r}: {what}; give model= to the strategy")
            networks.clear()
            networks[settings] = network
        if node.as_defined:
            _check_order(problem, settings, model)
        partition = whole_set(problem.data, settings.partitioning, client)
        how = partial(OwnOptimizer, optimizer) if optimizer else Optimizer
        place = Workplace(settings, problem, partition, networks[settings], device, initial, how)
        check_base(problem.name, place.base, node.base, "the server's")
        return place

    def source(settings: Settings, header: Json, context: Context) -> Places:
        folder = state_folder(header, context.node_config)
        config = {**context.node_config, "partition-id": 0, "num-partitions": 0}
        shape, base = tuple(header.get("in-shape", ())), str(header.get("base", ""))
        node = _Node(context, folder, shape, base, bool(header.get("as-defined")), tuple(sorted(config.items())))
        if head and settings.head not in ("", head):
            raise UserError(f"head = {head!r} of client_app: the strategy's is {settings.head!r}")
        if optimizer:
            _check_optimizer(settings)
        settings = settings.model_copy(update={"head": head or settings.head})
        return lambda client: loaded(settings, client, node)

    return NodeApp(source, module)


def private_data(context: Context) -> object:
    """Return the samples of a node's own file, for use as ``data`` of :func:`client_app` on SuperNodes.

    ``private-data`` of ``--node-config`` names an .npz file or image folder; its own training samples normalise it.
    """
    path = Path(str(context.node_config.get("private-data", "")))
    data = load_dataset(resolve({"dataset": private_name(path), "data-dir": str(path.parent)}).data)
    return (data.train_x[:], data.train_y), (data.test_x[:], data.test_y)


def with_loss(task: Task, mean: Loss) -> Task:
    """Return a task with another loss, which gives only a batch's mean; one number a sample raises ValueError."""

    def loss(output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        if reduction == "none":
            raise ValueError("loss=: gives the mean of a batch, not one number a sample")
        return mean(output, y) * (task.count(y) if reduction == "sum" else 1)

    changed = copy.copy(task)
    changed.__dict__["loss"] = loss
    return changed


def with_metrics(task: Task, means: Metrics) -> Task:
    """Return a task that also reports the metrics of ``means``, averaged over batches by their numbers of samples."""

    def sums(output: Tensor, y: Tensor) -> Mapping[str, float | Tensor]:
        found = numbers("metrics=", means(output, y))
        counts = {f"count/{name}": len(y) for name in found}  # of each: a batch may lack one, as an AUC of one class
        return {**task.sums(output, y), **{f"own/{name}": value * len(y) for name, value in found.items()}, **counts}

    def metrics(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        names = [name.removeprefix("own/") for name in sums if name.startswith("own/")]
        if taken := {*names} & (known := task.metrics(sums)).keys():
            raise UserError(f"metrics=: returned {min(taken)!r}, which the task has of its own; name it otherwise")
        return {name: float(sums[f"own/{name}"] / sums[f"count/{name}"]) for name in names} | known

    changed = copy.copy(task)
    changed.__dict__ |= {"sums": sums, "metrics": metrics}
    return changed


def _check_order(problem: Problem, settings: Settings, model: Model) -> None:
    """Refuse a network whose layers do not run in the order of their definition, which the server assumes.

    The head alone counts where the samples are tokens or several tensors, which in_shape= cannot tell.
    """
    shape, defined = problem.data.in_shape, problem.unfrozen()
    running = with_head(built(model, shape)(settings.seed), settings.head)
    assumed, head, why = head_layer(defined), head_layer(running), ""
    if isinstance(shape, Form) and assumed != head:
        why = f"its head {head!r} runs last and is not defined last; give head={head!r}"
    elif not isinstance(shape, Form) and (layer_groups(defined), assumed) != (layer_groups(running), head):
        why = f"its layers run in another order than they are defined in; give in_shape={shape_shown(shape)}"
    if why:
        raise UserError(f"model = {problem.name!r}: {why} to the strategy")


def _check_optimizer(settings: Settings) -> None:
    """Refuse keys that a user's optimizer replaces, and methods that compute with SGD's steps."""
    given, usual = settings.flat(), defaults()
    for key in ("optimizer", "momentum", "weight-decay"):
        if (value := given[key]) != (allowed := usual[key]):
            raise UserError(f"{key} = {value!r}: must be {allowed!r} with optimizer= of client_app, which replaces it")
    if METHODS[settings.method].strategy.computes_with_sgd:
        reason = f"method = {settings.method!r}, which computes with SGD's steps"
        raise UserError(f"optimizer= of client_app: not with {reason}")


@dataclass(frozen=True)
class _Node:
    """A node in one run; ``partition-id`` and ``num-partitions`` do not count when nodes are compared."""

    context: Context = field(compare=False)
    folder: Path
    in_shape: tuple[int, ...]
    base: str
    as_defined: bool  # whether the server takes the layers in the order of their definition
    config: tuple[tuple[str, object], ...]


def _loaded(data: Load, context: Context, client: int, settings: Settings) -> object:
    config = {**context.node_config, "partition-id": client, "num-partitions": settings.num_clients}
    of_client = Context(context.run_id, context.node_id, config, context.state, context.run_config)
    try:
        return data(of_client)
    except Exception as error:
        if machine_failure(error):
            raise
        raise UserError(f"data of client {client}: {one_line(error)}") from error
