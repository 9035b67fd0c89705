"""A phase after the merge: clients answer with tensors on the merged model, such as the statistics of its layers.

A method makes a :class:`Measurement` its ``measurement``. Replies are checked, bounded and averaged as in a training,
without ``clip-norm``.
"""

from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsub_app.federation.protocol import MEASURE, Update
from fedsub_app.subnets.averaging import Mean
from strategies import rounds
from strategies.hooks import Hooks, Merged

BUDGETED = ("flops", "formula-bytes-down", "formula-bytes-up", "device-seconds")  # that budgets count
SUMMED = (*rounds.COSTS, *BUDGETED, "bytes-down", "bytes-up", "merge-seconds", "joules")


class Measurement(Hooks):
    """The hooks of the phase after the merge; by default clients get the merged model and answer with one like it.

    ``current`` is the merged model, ``config`` that of the running round. A measurement keeps no state of its own, on
    the server or on a client; a client has the state of its last merged reply.
    """

    def __init__(self, method: Hooks) -> None:
        # A measured statistic is not a change of the model, so it must not be clipped.
        super().__init__(method.settings.model_copy(update={"clip_norm": 0.0}), method.model)
        self.method, self.current, self.config = method, method.current, ConfigRecord()

    def clients(self) -> Sequence[int]:
        """Return the clients that are asked in the running round, by default the round's own; none: no phase."""
        return self.federation.sample(self.round)

    def refuses(self) -> Mapping[str, str]:
        return {
            **super().refuses(),
            "dp-noise-multiplier": "no noise is in what its clients measure after the merge",
            "secure-aggregation": "what its clients measure after the merge is not summed under masks",
        }

    def merge(self, mean: Mean, updates: Sequence[Update]) -> Merged:
        """Return the mean itself: a measurement is not a step from the model, so ``server-lr`` does not scale it."""
        return Merged(mean.result())

    def forget(self, client: int) -> None:
        self.method.forget(client)

    def run(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> ArrayRecord:
        """Ask the clients; return the new model, or the merged one if too few replies are valid.

        Costs are added to the round's. The line's ``measurement`` has all other entries, and the budgeted costs again.
        """
        method, report = self.method, self.method.phase.report
        self.connect(method.federation, method.facts)
        self.config = config
        self.round, self.state_rounds, self.usual, self.good = server_round, method.state_rounds, {}, {}
        if not (clients := self.clients()):
            return arrays
        phase = rounds.ask(self, MEASURE, clients, server_round, arrays, config, grid)
        measured, _ = rounds.merge_answers(self, server_round, self.federation.exchange(grid, phase))
        report |= {key: report.get(key, 0) + value for key, value in phase.report.items() if key in SUMMED}
        report["measurement"] = {k: value for k, value in phase.report.items() if k not in SUMMED or k in BUDGETED}
        if measured is None:
            return arrays
        method.current = self.current
        return measured
