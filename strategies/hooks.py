"""Server side of every method: FedAvg, and the hooks by which a method differs from it (docs/adding-a-method.md).

A round is a transaction. Hooks return values and change nothing. :meth:`Hooks.merge` returns the next model and the
next values of the attributes that the method :attr:`~Hooks.remembers`; the base makes all of them current, or none
where the round is abandoned. A client continues from the state of its last merged reply: a lost reply counts as not
asked for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedsub_app.common.reported import Reported
from fedsub_app.common.tensors import Tensors, chosen
from fedsub_app.federation.protocol import Range, Spec, Task, Update
from fedsub_app.subnets.averaging import Contribution, Mean
from fedsub_app.subnets.slices import take
from strategies.defences import DEFENCES
from strategies.server import Merged, Server

__all__ = ["Hooks", "Merged"]
# Upper bound on a method's forward and backward passes of the whole network on a sample in an epoch: two trainings with
# MOON, whose two further forward passes cost as much as a step each where most of the network is frozen.
MAX_PASSES = 6


class Hooks(Server):
    """FedAvg, and the hooks of all methods; :class:`~strategies.base.SubnetStrategy` adds Flower's verbs.

    The attributes of a run, such as ``current``, are those of :class:`~strategies.server.Server`.
    """

    keeps_models = False  # True: clients are evaluated on models that they keep, and are sent nothing for it
    holds_all = False  # True: merge needs all tensors of all replies, so the server holds a model for each reply
    narrows = False  # True: it adapts to the devices' widths; others refuse a class below ``model-width``
    computes_with_sgd = False  # True: with SGD's learning rate or steps; a user's own optimizer is refused
    # True: with ``robust`` the merged model's loss on test samples decides whether it is kept. False if the global
    # model does not solve the whole task, or if its loss swings between honest rounds.
    judged = True
    refused: ClassVar[Mapping[str, str] | str] = {}  # defence that does not protect it -> reason; a text: for all
    # For ``secure-aggregation``: "" if merge uses only the sum of the contributions and the ids of their clients, else
    # the reason to refuse it. A class that overrides merge, contribution or weight does not inherit this text.
    secure: ClassVar[str] = "it is not said that its server needs no more than the sum of the clients' contributions"
    sums = ""  # prefix of a reply's tensors of which merge uses only :meth:`total`
    measurement: "Hooks | None" = None  # the phase after the merge (strategies/measurement.py)
    warning = ""  # logged at the start of a run
    reports: ClassVar[Mapping[str, Reported]] = {}  # key of :attr:`Merged.report` -> picture; others are recorded

    # --- the hooks of most methods -----------------------------------------------------------------------------------

    def task(self, client: int) -> Task:
        """Return the training task of ``client`` with the network that it holds: by default the whole global model."""
        return Task(client, self.network_of(client))

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Return the specs of the tensors that ``client`` must reply with: by default those of the global model."""
        return self.specs

    def contribution(self, update: Update) -> Contribution:
        """Return the part of a checked update that enters the mean: the model's tensors; :class:`BadReply` drops it."""
        return Contribution(chosen(update.tensors, self.current), None, self.weight(update))

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Return the outcome of the round, from the mean of its valid contributions.

        The model is ``x_g + server_lr * (weighted mean of x_i - x_g)`` (McMahan et al. 2017; Reddi et al. 2021),
        position by position over the clients that contribute to it. ``updates`` (at least one, by client id) hold the
        tensors of :meth:`remembered`. The base commits the outcome, unless a value is not finite or the model diverged.
        """
        return Merged(mean.result(self.settings.server_lr))

    def metrics(self, client: int) -> Mapping[str, Range]:
        """Return the metrics that ``client`` may report of its training; any other metric is refused.

        The round's line has the sum of the costs and the mean of the other metrics, under the names given here.
        """
        flops, seconds = Range(0, self.max_flops(client)), Range(0, 1e7)
        costs = {"flops": flops, "subnet-flops": flops, "published-flops": flops, "compute-seconds": seconds}
        return {"train-loss": Range(*self.score.losses, loss=True), **costs}

    def personal_download(self, client: int) -> Tensors:
        """Return the tensors sent to evaluate the model of ``client``: its network, or none with ``keeps_models``."""
        return {} if self.keeps_models else self.network_of(client)

    def stage(self, server_round: int) -> str:
        """Return the name of the method's stage in a round, from 1 on, such as "warm-up"; "" for none."""
        return ""

    def forget(self, client: int) -> None:
        """Record that ``client`` has lost its state: from now on it counts as one that has never taken part."""
        self.state_rounds[client] = 0

    # --- bounds of an update -----------------------------------------------------------------------------------------

    def max_samples(self, client: int) -> int:
        """Return an upper bound on the samples that a client computes on in a round, each counted once a pass.

        It bounds the FLOPs that a client may report. It is the sum of the training, the passes of the method's keys of
        type ``Epochs``, and one pass for work that no key counts, such as features or scores.
        """
        count = self.max_examples(client)
        return self.fitted(count) + count * (1 + self.options.epochs)

    def fitted(self, examples: int) -> int:
        """Return the samples, with repeats, of ``local-epochs`` or ``local-steps`` on a client with ``examples``."""
        steps = self.settings.local_steps
        return steps * self.settings.batch_size if steps else examples * self.settings.local_epochs

    def max_flops(self, client: int) -> float:
        """Return an upper bound on the FLOPs of a client in a round."""
        return min(MAX_PASSES * self.facts.sample_flops * self.max_samples(client) if self.facts else math.inf, 1e24)

    def norms(self, update: Update, contribution: Contribution) -> Mapping[str, float]:
        """Return an update's Euclidean norms by name; they are compared with those of the round's other updates.

        ``update`` is the distance from the model, at the positions that the update contributes. A method whose server
        remembers other tensors of an update adds their norms.
        """
        return {"update": self.distance(update, contribution)}

    def origin(self, update: Update) -> Tensors:
        """Return the values from which ``robust`` measures an update's change; a tensor that is missing here: 0."""
        return self.current

    def compared(self, update: Update, contribution: Contribution) -> Contribution:
        """Return what ``robust`` compares with the other updates by its direction, seen from :meth:`origin`."""
        return contribution

    def remembered(self, update: Update, contribution: Contribution) -> Tensors:
        """Return the tensors of an update that :meth:`merge` needs after the contribution was added to the mean.

        By default these are the tensors that the contribution does not hold; with :attr:`holds_all` they are all.
        """
        kept = {} if self.holds_all else contribution.tensors
        return {name: tensor for name, tensor in update.tensors.items() if name not in kept}

    def refuses(self) -> Mapping[str, str]:
        """Return the defences that do not protect this method, with the reason: name of ``DEFENCES`` -> reason.

        Defences bound contributions only. A method names them if its server uses more of an update than its
        contribution, or if its clients contribute to different positions.
        """
        weighs = dict.fromkeys(DEFENCES, "its server weighs a round's answers by one another") if self.holds_all else {}
        refused = dict.fromkeys(DEFENCES, self.refused) if isinstance(self.refused, str) else self.refused
        return {**weighs, **refused}

    # --- secure aggregation ------------------------------------------------------------------------------------------

    def known_positions(self, client: int) -> Tensors:
        """Return the positions that ``client`` contributes, as far as the server knows them beforehand: name -> bool.

        A missing tensor is contributed whole. A client that replies with values at some positions is sent these.
        """
        return {}

    @property
    def chooses_positions(self) -> bool:
        """Say whether clients choose their positions in this round; then they send whole tensors and ``AT``."""
        return False

    def summed_weight(self, update: Update) -> float:
        """Return the weight of an update's contribution in the mean, the same as in :meth:`contribution`."""
        return self.weight(update)

    # --- smaller networks --------------------------------------------------------------------------------------------

    def fits(self, client: int) -> bool:
        """Say whether a client can train in the running round; others are not asked."""
        return True

    def network_of(self, client: int) -> Tensors:
        """Return the tensors of the network that a client holds while it trains: by default the global model's."""
        return self.current

    def network_at(self, width: float) -> Tensors:
        """Return the network that is tested for a width: the first units of the global model's hidden layers."""
        return take(self.current, self.units, {g.name: torch.arange(g.size) < g.kept(width) for g in self.units})

    def unit_masks(self) -> Tensor | None:
        """Return every client's sub-network for ``fedsub analyse``, bool ``[num_clients, hidden units]``, or None."""
        return None

    def position_masks(self) -> list[Tensors] | None:
        """Return every client's personal positions for ``fedsub analyse``, tensor name -> bool, or None."""
        return None
