"""The attributes of every method's server: the run's settings, the model, the bounds of a client's work, the state.

Methods read these attributes and override :meth:`Server.setup` alone; their hooks are
:class:`~strategies.hooks.Hooks`'.
"""

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedsub_app.common.errors import UserError, shown
from fedsub_app.common.tasks import task_of
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import MAX_EXAMPLES, BadReply, Spec, Update, specs
from fedsub_app.models import UnitGroup, head_names, tensors_of, unit_groups
from fedsub_app.settings import Settings
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.masks import gather, scatter
from fedsub_app.subnets.norms import square
from fedsub_app.subnets.slices import ALL, select
from strategies.memory import Memory, flattened, leaves, restored

Value = TypeVar("Value")
KEPT = ("state_rounds", "usual", "good")  # the server's state of every method


@dataclass(frozen=True)
class Facts:
    """The server's own knowledge, against which the clients' reports are checked."""

    examples: Sequence[int]  # training samples of each client, by the partition
    sample_flops: float  # FLOPs of a forward and backward pass of the whole network on a sample
    loss: Callable[[Tensors], float]  # of a global model on some test samples
    held_out: int = 0  # upper bound on a client's validation or test samples
    exact: bool = True  # False: ``examples`` are upper bounds, because clients have private data


@dataclass(frozen=True)
class Merged:
    """The outcome of a round, before it is committed: the next global model, and entries for the round's line."""

    model: Tensors
    state: Mapping[str, Memory] = field(default_factory=dict)  # new values of remembered attributes; others stay
    report: Json = field(default_factory=dict)


def returned(strategy: object, hook: str, value: Any, kind: type[Value]) -> Value:
    """Return what a hook returned; :class:`UserError` if it is no ``kind``."""
    if not isinstance(value, kind):
        place = f"{type(strategy).__name__}.{hook}"
        raise UserError(f"{place} returned a {type(value).__name__}: must be a strategies.base.{kind.__name__}")
    return value


def check_json(said: str, value: object) -> None:
    """Raise :class:`UserError` for values of a hook that no message or file can hold, such as tensors."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{said} {shown(value)[:100]}: {error}; must be numbers, texts, lists or dicts") from None


def _form(x: object) -> object:
    return (x.dtype, *x.shape) if isinstance(x, Tensor) else type(x)


class Server:
    """The state of a run on the server, and what is computed from it.

    ``remembers`` names the attributes that are the method's state between rounds, each a :data:`Memory`: they are in
    the checkpoint, and only :meth:`merge` gives them new values.
    """

    remembers: tuple[str, ...] = ()

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        self._normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if settings.batch_size == 1 and self._normalised:
            raise UserError("batch-size = 1: BatchNorm needs at least 2 samples in a mini-batch")
        if settings.objective == "moon" and {*tensors_of(model)} <= {*head_names(model)}:
            raise UserError("objective = 'moon': the network is all head, without features of its own to compare")
        if settings.attack == "label-flip" and not task_of(settings.task).classes:
            raise UserError(f"attack = 'label-flip': needs classes, task = {settings.task!r} has none")
        self.settings = settings
        self.options = settings.options  # the method's own settings
        self.score = settings.score  # the task's score
        self.devices = settings.client_devices  # None without the setting
        self.model = model  # for its structure only: unit_groups(model), shapes
        # The global model of the running round, named float32 CPU tensors; read-only.
        self.current: Tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        self.shared = list(self.current)  # names of the tensors that clients reply with; in a first stage all
        self.round = 0  # the running one, from 1
        self.plateau_lr: Any = None  # with lr-schedule = "plateau": the running round's learning rate
        self.phase = Phase()  # the running or last phase
        self.merging: Any = None  # the merging of the phase that was asked for (strategies/merging.py)
        self.facts: Facts | None = None
        # Each client's last round whose reply was merged and whose state the client kept, [N]; 0: none.
        self.state_rounds = torch.zeros(settings.num_clients, dtype=torch.int64)
        self.usual: Tensors = {}  # with robust, the usual sizes of changes (strategies/bounding.py)
        self.good: Tensors = {}  # with robust, the best model so far (strategies/harm.py)
        self._of_model: tuple[Tensors, dict[Hashable, Any]] = ({}, {})
        self.setup()
        names: object = self.remembers
        if isinstance(names, str):  # ("beta") is no tuple
            raise UserError(f"{type(self).__name__}.remembers = {names!r}: must be a tuple of names")
        if unset := [name for name in self.remembers if not hasattr(self, name)]:  # a resume could not restore it
            raise UserError(f"{type(self).__name__}.setup does not set {unset[0]!r}, which it remembers")
        self.first_names = [*dict(leaves("", {name: getattr(self, name) for name in self.remembers}))]

    def setup(self) -> None:
        """Set the method's own attributes; :class:`UserError` for settings that the network rules out."""

    @cached_property
    def units(self) -> tuple[UnitGroup, ...]:
        """The network's hidden units; :class:`UserError` where none can be removed."""
        try:
            return unit_groups(self.model)
        except TypeError as error:
            method = f"method = {self.settings.method!r}"
            raise UserError(f"model = {self.settings.model!r}: not with {method}: {error}") from None

    @property
    def specs(self) -> dict[str, Spec]:
        """Specs of a whole model that was trained from the global one."""
        return self.once("specs", lambda: specs(self.current))

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return ``make()``, which is called once for each key and global model."""
        if self._of_model[0] is not self.current:
            self._of_model = (self.current, {})
        known = self._of_model[1]
        if key not in known:
            known[key] = make()
        return known[key]  # type: ignore[no-any-return]

    def held_width(self, client: int) -> float:
        """Return the fraction of the global network that a client's device can hold.

        Without ``devices`` client i has the (i mod n)-th of the method's n ``widths``, or 1 without such a setting.
        """
        if self.devices:
            return min(1.0, self.devices.of(client).width / self.settings.model_width)
        widths = getattr(self.options, "widths", (1.0,))
        return float(widths[client % len(widths)])

    def weight(self, update: Update) -> float:
        """Return the update's weight in a mean (setting ``weighting``)."""
        return float(update.num_examples) if self.settings.by_examples else 1.0

    @staticmethod
    def total(updates: Sequence[Update], name: str) -> Tensor:
        """Return the sum of one tensor over the updates; with ``secure-aggregation`` the first update holds the sum."""
        return sum((u.tensors[name] for u in updates if name in u.tensors), torch.tensor(0))

    @property
    def lr(self) -> float:
        """The learning rate of the running round's clients."""
        return float(self.plateau_lr or self.settings.lr_at(self.round))

    def values_at(self, masks: Tensors) -> Tensors:
        """Return the global model; a tensor with a mask is reduced to the values at the mask's positions."""
        return self.current | gather(self.current, masks)

    def contribution_at(self, update: Update, masks: Tensors) -> Contribution:
        """Return the contribution of values at the masks' positions; :class:`BadReply` if their number differs."""
        for name, mask in masks.items():
            if (count := update.tensors[name].numel()) != (covered := int(mask.sum())):
                raise BadReply(f"tensor {name!r}: {count} values, its mask covers {covered}")
        whole = {name: x for name, x in update.tensors.items() if name in self.current and name not in masks}
        return Contribution(whole | scatter(update.tensors, masks), masks, self.weight(update))

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
        """Return the bounds of a client's training samples; both are equal if the server knows the number."""
        most = self.max_examples(client)
        return (most if self.facts and self.facts.exact else 1), most

    def steps(self, examples: int) -> int:
        """Return the steps of ``local-epochs`` or ``local-steps`` on ``examples`` samples, counted as by the client."""
        settings = self.settings
        batches = -(-examples // settings.batch_size)
        if examples % settings.batch_size == 1 < examples and self._normalised:
            batches -= 1  # BatchNorm cannot train on one sample
        return (settings.local_steps or batches * settings.local_epochs) if batches else 0

    @property
    def robust(self) -> bool:
        """Say whether a round's updates bound one another; "auto": not simulated, no noise, no secure aggregation."""
        settings = self.settings
        if settings.robust == "auto":
            return not (self.simulated or settings.dp_noise_multiplier or settings.secure_aggregation)
        return settings.robust == "on"

    @property
    def simulated(self) -> bool:
        """Say whether all nodes are simulated, or there are none yet."""
        return not hasattr(self, "federation") or self.federation.simulated

    # --- called by the rounds ----------------------------------------------------------------------------------------

    def connect(self, federation: Federation, facts: Facts | None = None) -> None:
        """Set the nodes that the verbs talk to, and the server's facts; without facts there are fewer checks."""
        self.federation = federation
        self.facts = facts

    def outcome(self, merged: Any) -> Merged:
        """Return what ``merge`` returned; :class:`UserError` if it has another form than the outcome of a round."""
        said = f"{type(self).__name__}.merge returned"
        for name, value in vars(returned(self, "merge", merged, Merged)).items():
            if not isinstance(value, Mapping):
                raise UserError(f"{said} Merged({name}={shown(value)}): must be a dict")
        check_json(f"{said} the report", merged.report)
        if unknown := merged.state.keys() - {*self.remembers}:
            raise UserError(f"{said} {sorted(unknown)}, which it does not remember")
        old, new = ({name: _form(x) for name, x in of.items()} for of in (self.current, merged.model))
        if wrong := [name for name in old | new if old.get(name) != new.get(name)]:
            what = f"{wrong[0]!r} as {new.get(wrong[0])}, in the model it is {old.get(wrong[0])}"
            raise UserError(f"{said} {what}")
        for name, value in merged.state.items():
            old = getattr(self, name)
            if isinstance(value, list) and not (isinstance(old, list) and len(old) == len(value)):
                why = "setup must set a list with an entry for each client, as a resumed run restores it"
                raise UserError(f"{said} {name!r} as a list of {len(value)}: {why}")
        kept = dict(leaves("", {name: getattr(self, name) for name in merged.state}))
        state = dict(leaves("", merged.state))
        if lost := [name for name in self.first_names if name.split("/")[0] in merged.state and name not in state]:
            raise UserError(f"{said} no {lost[0]!r}, which setup has set: a resumed run needs it")
        for name, value in state.items():
            if value.dtype == torch.bool and _form(value) != _form(kept.get(name)):
                why = "setup must set a bool tensor in its shape, of which a checkpoint has the bits alone"
                raise UserError(f"{said} {name!r} as {_form(value)}: {why}")
        return merged  # type: ignore[no-any-return]

    def commit(self, merged: Merged, updates: Sequence[Update]) -> None:
        """Make a round's outcome current: the model, the remembered attributes, the rounds of the clients' states."""
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
