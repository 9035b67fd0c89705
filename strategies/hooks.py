"""Server side of every method: FedAvg, and the hooks by which a method differs from it.

A method overrides only the hooks that its paper changes: a client's task (:meth:`Hooks.task`), the tensors of
its reply (:meth:`~Hooks.expected`), the reply's part of the next model
(:meth:`~Hooks.contribution`), and the outcome of a round (:meth:`~Hooks.merge`).

A round is a transaction. Hooks return values and change nothing. :meth:`~Hooks.merge` returns the next model
and the next values of the attributes that the method :attr:`~Hooks.remembers`; the base makes all of them
current, or none where the round is abandoned. A client continues from the state of its last merged reply: a lost reply
is as if the client had not been asked.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError
from fedsub_app.common.reported import Reported
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import MAX_EXAMPLES, Range, Spec, Task, Update, specs
from fedsub_app.models import UnitGroup, tensors_of, unit_groups
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution, MaskedMean
from fedsub_app.subnets.norms import square
from fedsub_app.subnets.slices import ALL, select, take
from strategies.defences import DEFENCES
from strategies.memory import Memory, flattened, restored

log = logging.getLogger("fedsub")
KEPT = ("state_rounds", "usual")  # the server's state of every method
MAX_PASSES = 4  # upper bound on a method's forward and backward passes of the whole network on a sample in an epoch


@dataclass(frozen=True)
class Facts:
    """The server's own knowledge, against which the clients' reports are checked.

    Attributes
    ----------
    examples : training samples of each client, by the partition.
    sample_flops : FLOPs of a forward and backward pass of the whole network on one sample.
    loss : a global model -> its loss on some test samples.
    held_out : upper bound on a client's validation or test samples.
    exact : whether ``examples`` are exact; else they are upper bounds, of clients that have private data.
    """

    examples: Sequence[int]
    sample_flops: float
    loss: Callable[[Tensors], float]
    held_out: int = 0
    exact: bool = True


@dataclass(frozen=True)
class Merged:
    """The outcome of a round, before it is committed.

    Attributes
    ----------
    model : the next global model.
    state : new values of remembered attributes; an attribute that is lacking keeps its value.
    report : JSON-able entries for the round's line.
    """

    model: Tensors
    state: Mapping[str, Memory] = field(default_factory=dict)
    report: Json = field(default_factory=dict)


def _normalised(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class Hooks:
    """FedAvg, and the hooks of all methods; :class:`~strategies.base.SubnetStrategy` has Flower's verbs beside them.

    Attributes
    ----------
    remembers : names of the attributes that are the server's state between rounds, each a :data:`Memory`. They are in
        the checkpoint, and :meth:`merge` alone gives them new values.
    measurement : the phase after the merge, in which clients answer with tensors on the merged model, or None.
    holds_all : the method needs all tensors of all answers in :meth:`merge`; its server holds as many models.
    narrows : the method goes by the widths of the clients' devices; others refuse a class below ``model-width``.
    keeps_models : clients are evaluated on the models that they keep, and are sent nothing for it.
    epoch_keys : names of the options that count epochs beside ``local-epochs``.
    refused : the defences that do not protect the method, with the reason (:meth:`refuses`).
    judged : with ``robust`` the merged model's loss on test samples tells whether it is kept; False where the global
        model is no model of the whole task, because parts of it stay with the clients.
    reports : pictures of the keys that :attr:`Merged.report` adds to a round's line; other keys are recorded only.
    settings, options : the run's settings and the method's own.
    score : the task's score.
    devices : the clients' devices, None without the setting ``devices``.
    model : the network, for its structure only (``unit_groups(model)``, shapes).
    current : the global model of the running round, named float32 CPU tensors; read-only.
    round : number of the running round, from 1.
    phase : the running or last phase: clients that were asked or dropped, entries for the round's line.
    state_rounds : round of each client's last merged reply with which it kept a state, int64 [N]; 0: none.
    usual : with ``robust``, of the last rounds: usual sizes of each tensor's change (strategies/bounding.py), and the
        merged models' losses.
    """

    remembers: tuple[str, ...] = ()
    holds_all = False
    narrows = False
    judged = True
    measurement: "Hooks | None" = None
    keeps_models = False
    epoch_keys: tuple[str, ...] = ()
    refused: ClassVar[Mapping[str, str]] = {}
    reports: ClassVar[Mapping[str, Reported]] = {}

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        if settings.batch_size == 1 and _normalised(model):
            raise UserError("batch-size = 1: BatchNorm needs at least 2 samples in a mini-batch")
        self.settings = settings
        self.options = settings.options
        self.score = settings.score
        self.model = model
        self.current: Tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        self.devices = settings.client_devices
        self.round = 0
        self.phase = Phase()
        self.facts: Facts | None = None
        self.state_rounds = torch.zeros(settings.num_clients, dtype=torch.int64)
        self.usual: Tensors = {}
        self._specs: tuple[Tensors, dict[str, Spec]] = ({}, {})

    # --- the hooks of most methods -----------------------------------------------------------------------------------

    def task(self, client: int) -> Task:
        """Return the training task of ``client``: the whole global model."""
        return Task(client, self.current)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Return the specs of the tensors that ``client`` must reply with: a model like the global one."""
        return self.specs

    def contribution(self, update: Update) -> Contribution:
        """Return the part of an update, checked against :meth:`expected`, that enters the mean: the model's tensors.

        The method makes its own checks here: :class:`BadReply` drops the update.
        """
        tensors = {name: tensor for name, tensor in update.tensors.items() if name in self.current}
        return Contribution(tensors, None, self.weight(update))

    def merge(self, mean: MaskedMean, updates: Sequence[Update]) -> Merged:
        """Return the outcome of the round, from the mean of its valid contributions.

        The model is ``x_g + server_lr * (weighted mean of x_i - x_g)`` (McMahan et al. 2017; Reddi et al. 2021),
        position by position over the clients that contribute to it. ``updates``, at least one, by client id, have the
        tensors of :meth:`remembered`. The base commits the outcome, unless the model is not finite or has diverged.
        """
        return Merged(mean.result(self.settings.server_lr))

    def held_width(self, client: int) -> float:
        """Return the fraction of the global network that a client's device can hold; without ``devices`` 1."""
        return min(1.0, self.devices.of(client).width / self.settings.model_width) if self.devices else 1.0

    def fits(self, client: int) -> bool:
        """Say whether a client can train in the running round; others are not asked."""
        return True

    def network_of(self, client: int) -> Tensors:
        """Return the tensors of the network that a client holds while it trains: the global model's."""
        return self.current

    def network_at(self, width: float) -> Tensors:
        """Return the global model's network of a width, to be tested: the first units of each hidden layer."""
        return take(self.current, self.units, {g.name: torch.arange(g.size) < g.kept(width) for g in self.units})

    def personal_download(self, client: int) -> Tensors:
        """Return the tensors to evaluate the model of ``client``: the global model, or none (``keeps_models``)."""
        return {} if self.keeps_models else self.current

    # --- further hooks -----------------------------------------------------------------------------------------------

    def metrics(self, client: int) -> Mapping[str, Range]:
        """Return the metrics that ``client`` may report of its training; any other metric is refused.

        The round's line has the sum of the costs and the mean of the other metrics, under the names given here.
        """
        flops, seconds = Range(0, self.max_flops(client)), Range(0, 1e7)
        costs = {"flops": flops, "subnet-flops": flops, "published-flops": flops, "compute-seconds": seconds}
        return {"train-loss": Range(*self.score.losses, loss=True), **costs}

    def passes(self, client: int) -> float:
        """Return an upper bound on a client's passes over its samples in a round, beside ``local-epochs``.

        A client that reports more FLOPs than these passes can cost is dropped. Beside the epochs of :attr:`epoch_keys`
        this is one pass, which covers work that no key counts, such as features or scores.
        """
        epochs: list[int] = [getattr(self.options, key) for key in self.epoch_keys]
        return 1 + sum(epochs)

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        """Return the norms of an update that are compared with the round's other updates: a name -> Euclidean norm.

        ``update`` is the distance from the model, at the positions that the update contributes. A method whose server
        remembers other tensors of an update adds their norms.
        """
        return {"update": self.distance(update, contribution)}

    def origin(self, update: Update) -> Tensors:
        """Return the values that the update's tensors beside its contribution started from, by name; the others: 0.

        With ``robust`` their change is bounded like the model's.
        """
        return self.current

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        """Return the tensors of an update that :meth:`merge` needs after the contribution was added to the mean.

        By default these are the tensors that the contribution does not hold, with :attr:`holds_all` all tensors. The
        others are forgotten, so that a round need not hold all replies.
        """
        kept = {} if self.holds_all else contribution.tensors
        return {name: tensor for name, tensor in update.tensors.items() if name not in kept}

    def refuses(self) -> Mapping[str, str]:
        """Return the defences that do not protect this method, with the reason: name of ``DEFENCES`` -> reason.

        Defences bound contributions only. A method names them if its server uses more of an update than its
        contribution, or if its clients contribute to different positions.
        """
        weighs = dict.fromkeys(DEFENCES, "its server weighs a round's answers by one another") if self.holds_all else {}
        return {**weighs, **self.refused}

    def stage(self, server_round: int) -> str:
        """Return the name of the part of the method that a round, from 1 on, belongs to: "warm-up"; "" for none."""
        return ""

    def forget(self, client: int) -> None:
        """Record that ``client`` has lost its state: from now on it counts as one that has never taken part."""
        self.state_rounds[client] = 0

    def unit_masks(self) -> Tensor | None:
        """Return every client's sub-network, for ``fedsub analyse``.

        bool ``[num_clients, hidden units]``, units in the order of ``units``; None: the method has no such masks.
        """
        return None

    def position_masks(self) -> list[Tensors] | None:
        """Return every client's personal positions, for ``fedsub analyse``.

        One dict a client, tensor name -> bool of the tensor's shape, the same names for all; None: the method has none.
        """
        return None

    # --- what methods use --------------------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[UnitGroup, ...]:
        """The network's hidden units; :class:`UserError` where none can be removed."""
        try:
            return unit_groups(self.model)
        except TypeError as error:
            raise UserError(
                f"model = {self.settings.model!r}: not with method = {self.settings.method!r}: {error}"
            ) from None

    @property
    def specs(self) -> dict[str, Spec]:
        """Specs of a whole model that was trained from the global one."""
        if self._specs[0] is not self.current:
            self._specs = (self.current, specs(self.current))
        return self._specs[1]

    def weight(self, update: Update) -> float:
        """Return the update's weight in a mean (setting ``weighting``)."""
        return float(update.num_examples) if self.settings.by_examples else 1.0

    def distance(self, update: Update, contribution: Contribution) -> float:
        """Return the Euclidean distance of a contribution from the model, at the positions that it holds."""
        masks, slices, total = contribution.masks or {}, contribution.slices or {}, 0.0
        for name, x in contribution.tensors.items():
            known = update.squares.get(name) if x is update.tensors.get(name) and name not in masks else None
            start = select(self.current[name], slices.get(name, ALL))
            total += square(x, start, masks.get(name)) if known is None else known
        return math.sqrt(total)

    def max_examples(self, client: int) -> int:
        """Return an upper bound on a client's training samples."""
        return self.facts.examples[client] if self.facts else MAX_EXAMPLES

    def examples(self, client: int) -> tuple[int, int]:
        """Return the bounds of a client's training samples; where the server knows their number, both are equal."""
        most = self.max_examples(client)
        return (most if self.facts and self.facts.exact else 1), most

    def steps(self, examples: int) -> int:
        """Return the steps that ``local-epochs`` or ``local-steps`` make of so many samples, as the client counts."""
        settings = self.settings
        batches = -(-examples // settings.batch_size)
        if examples % settings.batch_size == 1 < examples and _normalised(self.model):
            batches -= 1  # BatchNorm cannot train on one sample
        return (settings.local_steps or batches * settings.local_epochs) if batches else 0

    @property
    def robust(self) -> bool:
        """Say whether updates are bounded by one another (setting ``robust``); not with privacy's own bound."""
        settings = self.settings
        if settings.robust == "auto":
            return not self.simulated and not settings.dp_noise_multiplier
        return settings.robust == "on"

    @property
    def simulated(self) -> bool:
        """Say whether all nodes are simulated, or there are none yet."""
        return not hasattr(self, "federation") or self.federation.simulated

    def max_samples(self, client: int) -> int:
        """Return an upper bound on the samples that a client computes on in a round, each counted once a pass."""
        settings, count = self.settings, self.max_examples(client)
        steps = settings.local_steps
        fitted = steps * settings.batch_size if steps else count * settings.local_epochs
        return fitted + math.ceil(count * self.passes(client))

    def max_flops(self, client: int) -> float:
        """Return an upper bound on the FLOPs of a client in a round."""
        return MAX_PASSES * self.facts.sample_flops * self.max_samples(client) if self.facts else 1e24

    # --- called by the rounds ----------------------------------------------------------------------------------------

    def connect(self, federation: Federation, facts: Facts | None = None) -> None:
        """Set the nodes that the verbs talk to, and the server's facts; without facts fewer checks are made."""
        self.federation = federation
        self.facts = facts

    def commit(self, merged: Merged, updates: Sequence[Update]) -> None:
        """Make a round's outcome current: the model, the remembered attributes, the rounds of the clients' states."""
        if unknown := merged.state.keys() - {*self.remembers}:
            raise ValueError(f"{type(self).__name__}.merge returned {sorted(unknown)}, which it does not remember")
        self.current = merged.model
        vars(self).update(merged.state)
        self.state_rounds[[update.client for update in updates if update.state[1] == self.round]] = self.round

    def state(self) -> Tensors:
        """Return the server's state between rounds, as named tensors for the checkpoint."""
        return flattened({name: getattr(self, name) for name in (*KEPT, *self.remembers)})

    def load_state(self, state: Tensors) -> None:
        """Restore the tensors that :meth:`state` returned; :class:`UserError` where one is missing."""
        values: dict[str, Any] = {name: getattr(self, name) for name in (*KEPT, *self.remembers)}
        vars(self).update(restored(state, values))
