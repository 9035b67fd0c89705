"""Strategies for Flower's own ``Strategy.start``: each connects a method's strategy to the nodes in the first round."""

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedsub_app.common.errors import UserError, explained, shown
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.roll import Roll
from fedsub_app.federation.settings import FederationSettings
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.library.keywords import check, keys_of, signature, title, whole_keys
from fedsub_app.models import answer, as_defined, base_digest, check_float32, freeze, tensors_of, ties, with_head
from fedsub_app.runs.config import defaults, resolve
from fedsub_app.runs.methods import METHODS, Method, check_hooks
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.runs.rounds import OF_DEVICES
from fedsub_app.settings import Settings
from fedsub_app.training.problem import Model, built, trained_part
from strategies.base import SubnetStrategy
from strategies.rounds import check_defences, check_widths
from strategies.server import Facts

log = logging.getLogger("fedsub")
OF_OUR_LOOP = {
    *("max-flops", "max-bytes", "max-device-seconds", "all-budgets", "target-score", "stop-at-score"),
    *("checkpoint-every", "keep-checkpoints", "track", "max-abandoned"),
}


class TensorsAlone(nn.Module):
    """A stand-in for a network whose tensors are known and whose layers are not."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.known = dict(tensors)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        yield from ((name, nn.Parameter(t)) for name, t in self.known.items() if not _running(name))

    def named_buffers(self, *_: Any, **__: Any) -> Any:
        yield from ((name, tensor) for name, tensor in self.known.items() if _running(name))

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.known

    def modules(self, *_: Any, **__: Any) -> Any:
        """Yield a BatchNorm if there are running statistics: then a last batch of one sample makes no step."""
        yield from [nn.BatchNorm1d(1)] * any(map(_running, self.known))

    def named_modules(self, *_: Any, **__: Any) -> Any:
        """Raise :class:`UserError`: the layers are not known."""
        raise UserError("model = None: the method needs the network's layers, which arrays do not tell; give model=")


def _running(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


class LibraryStrategy(Strategy):
    """A method as a strategy; :func:`strategy_class` makes one class for each method.

    Parameters
    ----------
    model : the network's class or a function that makes one, for methods that need its layers.
    in_shape : shape of one sample; the clients' samples must have it. With it methods find units in the graph of a
        network that is not an ``nn.Sequential``.
    max_examples : upper bound on a client's training samples; a reply that claims more is dropped. 0: no bound.
    clients_per_node : number of clients that each node hosts; the roll call counts the nodes.
    given : settings by keyword; ``help`` lists them.

    Raises
    ------
    UserError
        One line that names the key, the value and what is allowed.

    Attributes
    ----------
    method : name of the method.
    connected : the method's own strategy, from the first ``configure_train`` on.
    """

    method: ClassVar[str]

    def __init__(
        self,
        *,
        model: Model | None = None,
        in_shape: Sequence[int] = (),
        max_examples: int = 0,
        clients_per_node: int = 1,
        **given: object,
    ) -> None:
        for name, value, least in (("clients_per_node", clients_per_node, 1), ("max_examples", max_examples, 0)):
            if type(value) is not int or value < least:
                raise UserError(f"{name} = {value!r}: must be an integer from {least} on")
        shape: object = in_shape
        is_shape = isinstance(shape, Sequence) and all(type(size) is int and size > 0 for size in shape)
        if not is_shape or (in_shape and not model):
            raise UserError(f"in_shape = {in_shape!r}: must be positive integers, with model=")
        self.model, self.in_shape = model, tuple(in_shape)
        self.max_examples, self.clients_per_node = max_examples, clients_per_node
        self.keys = keys_of(self.method, given)
        check(self.method, self.keys)
        self.num_rounds = 1
        self.connected: SubnetStrategy | None = None
        self._others: dict[str, Tensor] = {}  # arrays that no method changes: integers and a frozen base
        self._tied: dict[str, str] = {}  # further name of a tied weight -> its first name, under which it is sent
        self._order: list[str] = []
        self._abandoned: list[str] = []  # the reasons
        self._round: tuple[ConfigRecord, Grid] | None = None
        self._folder: TemporaryDirectory[str] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run Flower's own loop; the number of rounds is kept, because some methods need it beforehand.

        UserError: a config has keys, which are keywords of the strategy here, or a keyword needs :func:`fedsub.start`.
        RunFailed: all rounds were abandoned.
        """
        for key, value in self.keys.items():
            if (key in OF_OUR_LOOP and value != defaults()[key]) or (key, value) == ("lr-schedule", "plateau"):
                raise UserError(f"{key} = {value!r}: needs fedsub.start; Flower's own loop does not know it")
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            if config:
                allowed = "must be empty: the settings are keywords of the strategy, such as lr and local_epochs"
                raise UserError(f"{name} = {shown(dict(config))}: {allowed}")
        _check_record(initial_arrays)
        self.num_rounds = num_rounds
        timeout = min(timeout, float(self.keys.get("round-timeout", timeout)))
        self._abandoned.clear()
        result = super().start(grid, initial_arrays, num_rounds, timeout, evaluate_fn=evaluate_fn)
        if len(self._abandoned) == num_rounds > 0:
            raise RunFailed(f"all {num_rounds} rounds were abandoned; last reason: {self._abandoned[-1]}", Path())
        return result

    def call_roll(self, grid: Grid) -> dict[str, Value]:
        """Wait for the nodes; return the keys of a run with all clients of these nodes."""
        waiting = {key: value for key, value in self.keys.items() if key in ("min-nodes", "node-timeout")}
        self._roll = Roll(FederationSettings.model_validate(waiting), {})
        self._roll.meet(grid)
        nodes = next(iter(self._roll.nodes.values())).num_partitions
        return whole_keys(self.method, self.keys, nodes * self.clients_per_node, self.num_rounds)

    def build(self, settings: Settings, initial_arrays: ArrayRecord) -> tuple[SubnetStrategy, Tensors]:
        """Make the method's strategy; returns it with the initial tensors."""
        _check_record(initial_arrays)
        no_adapters = settings.trainable == "lora" and not any(".lora_A." in name for name in initial_arrays)
        if no_adapters or (settings.trainable and self.model is None):
            needs = "give a network of the package peft" if self.model else "needs model="
            raise UserError(f"trainable = {settings.trainable!r}: in a Flower app of your own {needs}")
        with explained("initial_arrays:"):  # of another serialisation than Flower's
            every = to_tensors(initial_arrays)
        self._order = list(every)
        initial = {name: tensor for name, tensor in every.items() if tensor.is_floating_point()}
        network = self._network(settings, initial)
        if settings.trainable:
            initial = {name: initial[name] for name in tensors_of(network)}
        check_float32(initial, "initial_arrays")
        self._others = {name: tensor for name, tensor in every.items() if name not in initial}
        strategy = METHODS[self.method].strategy(settings, network)
        if strategy.measurement:
            check_hooks(type(strategy.measurement))
        check_defences(strategy)
        check_widths(strategy)
        return strategy, initial

    def connect(self, settings: Settings, initial_arrays: ArrayRecord, header: Json) -> SubnetStrategy:
        """Make the method's strategy for the nodes that answered; ``header`` goes into all messages."""
        strategy, initial = self.build(settings, initial_arrays)
        if strategy.warning:
            log.warning("%s", strategy.warning)
        header = header | ({"in-shape": list(self.in_shape)} if self.in_shape else {})
        header |= {"base": base_digest(strategy.model)} if settings.trainable else {}
        header |= {"as-defined": True} if strategy.model in as_defined else {}
        federation = Federation(settings, header, settings.flat() | {"resume": False}, initial=initial)
        federation.header |= federation.run_settings  # Flower's loop does not ask a node again that lacks them
        federation.roll = self._roll
        bound = [self.max_examples] * settings.num_clients
        facts = Facts(bound, math.inf, lambda _: 0.0, self.max_examples, exact=False) if self.max_examples else None
        strategy.connect(federation, facts)
        self.connected = strategy
        return strategy

    def _network(self, settings: Settings, initial: Tensors) -> nn.Module:
        if self.model is None:
            return TensorsAlone(initial)
        network = with_head(built(self.model, self.in_shape)(0), settings.head)
        if self.in_shape:  # methods that trace the network would fail with a traceback
            answer(network, f"in_shape = {self.in_shape}: model = {type(network).__name__}", self.in_shape)
        own = tensors_of(network)
        self._tied = ties(network)
        for name, first in self._tied.items():
            if name in initial and first in initial and not torch.equal(initial.pop(name), initial[first]):
                raise UserError(f"initial_arrays: {name!r} is not {first!r}, to which {type(network).__name__} ties it")
        sent, made = ({name: tuple(tensor.shape) for name, tensor in of.items()} for of in (initial, own))
        if wrong := [name for name in [*own, *initial] if made.get(name) != sent.get(name)]:
            said = [f"shape {of[wrong[0]]}" if wrong[0] in of else "no such tensor" for of in (sent, made)]
            raise UserError(f"initial_arrays: {wrong[0]!r}: {said[0]}; model = {type(network).__name__} has {said[1]}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(initial[name])
        return freeze(network, trained_part(settings), type(network).__name__) if settings.trainable else network

    def whole(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return all arrays, unchanged ones included, in the order of the initial ones, for ``load_state_dict``."""
        tensors = to_tensors(arrays) | self._others
        tensors |= {name: tensors[first] for name, first in self._tied.items() if first in tensors}
        return to_arrays({name: tensors[name] for name in self._order})

    # --- Flower's verbs ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round; the first round begins with the roll call of the nodes."""
        if self.connected is None or server_round == 1:
            self._folder = TemporaryDirectory(prefix="fedsub-")  # of the simulated clients' state
            header = {"run": secrets.token_hex(6), "state-dir": self._folder.name}
            self.connect(resolve(self.call_roll(grid)), arrays, header)
        assert self.connected
        self._round = (config, grid)
        return list(self.connected.configure_train(server_round, self._floats(arrays), config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid updates; ``(None, metrics)``: the round is abandoned."""
        assert self.connected
        assert self._round
        merged, metrics = self.connected.aggregate_train(server_round, replies)
        if merged is not None and self.connected.measurement:
            merged = self.connected.measurement.run(server_round, merged, *self._round)
        report = self.connected.phase.report
        if metrics:
            metrics.update({key: report[key] for key in OF_DEVICES if key in report})
        for drop in report["dropped"]:
            log.warning("round %d: dropped client %d: %s", server_round, drop["client"], drop["reason"])
        if merged is None:
            log.warning("round %d is abandoned, the model stays: %s", server_round, report["abandoned"])
            self._abandoned.append("; ".join([report["abandoned"], *(d["reason"] for d in report["dropped"][:1])]))
        return self.whole(merged) if merged is not None else None, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that ask all clients for the scores in ``evaluate``, if an evaluation is due."""
        assert self.connected
        return list(self.connected.configure_evaluate(server_round, self._floats(arrays), config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the unweighted means over the clients."""
        assert self.connected
        if not self.connected.phase.clients:
            return None
        metrics = self.connected.aggregate_evaluate(server_round, replies)
        for drop in self.connected.phase.report["not-evaluated"]:
            log.warning("round %d: client %d was not evaluated: %s", server_round, drop["client"], drop["reason"])
        return metrics

    def summary(self) -> None:
        """Log the method and the keys that were given, in one line."""
        log.info("%s %s", title(self.method), self.keys)

    def _floats(self, arrays: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({name: array for name, array in arrays.items() if name not in self._others})


def strategy_class(method: str) -> type[LibraryStrategy]:
    """Return the strategy of a registered method as a class with the method's keywords."""
    return _class_of(method, METHODS[method])


@cache
def _class_of(method: str, about: Method) -> type[LibraryStrategy]:
    doc = f"{about.description}. Its keywords are keys of `fedsub list settings`, which tells what each means."
    names = {"method": method, "__doc__": doc, "__signature__": signature(method), "__module__": "fedsub"}
    return type(title(method), (LibraryStrategy,), names)


def _check_record(initial_arrays: object) -> None:
    if not isinstance(initial_arrays, ArrayRecord):
        must = "must be an ArrayRecord, such as ArrayRecord(network.state_dict())"
        raise UserError(f"initial_arrays = {type(initial_arrays).__name__}: {must}")
