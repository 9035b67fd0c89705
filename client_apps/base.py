"""Client side of every method: one client, one task. Methods that are not overridden are FedAvg's.

A method overrides :meth:`Client.train` and, where a client has a model of its own, :meth:`Client.personal`. The tools
for both are :class:`~fedsub_app.training.client.ClientTools`': ``load``, ``fit``, ``epochs``, ``outputs``, ``state``.
"""

import time
from typing import Any

from torch import Tensor

from fedsub_app.common.errors import UserError, explained, misfit, shown
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.federation.protocol import GLOBAL, Update
from fedsub_app.training.client import ClientTools
from fedsub_app.training.local import evaluate


class Client(ClientTools):
    """FedAvg, and the base of all methods' clients."""

    irreplaceable = ""  # the reason why a client cannot start anew without its state; it ends an error message

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train the model that the server sent; return the tensors of the reply: the whole model."""
        self.load(sent)
        self.fit()
        return self.trained()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the client's own model: the sent tensors, else those that it keeps, else the initial ones."""
        return self.completed(sent)

    def measure(self, sent: Tensors, config: Json) -> Tensors:
        """Return the tensors of the phase after the merge (strategies/measurement.py): by default none."""
        return {}

    # --- called by the ClientApp ------------------------------------------------------------------------------------

    def run_training(self, sent: Tensors, config: Json, measuring: bool = False) -> Update:
        """Train, or measure after the merge, and return the update with its costs."""
        start, before = time.perf_counter(), [(name, tensor, tensor._version) for name, tensor in sent.items()]
        with self.dropout("measurement" if measuring else "training"):
            answer: Any = (self.measure if measuring else self.train)(sent, config)
        seconds = time.perf_counter() - start - self.waited
        if changed := [name for name, tensor, version in before if tensor._version != version]:
            what = f"changes {changed[0]!r} in place, which other clients of its message have too; must copy it first"
            raise UserError(f"{type(self).__name__} {what}")
        # Here the failure is this client's alone; later the reply that it shares with others could not be packed.
        self._named("answers", answer)
        self._named("keeps as its state", self.state)
        live = {x.untyped_storage().data_ptr() for x in self.network.tensors.values()}  # the next client's as well
        copied = {n: x.detach().clone() if x.untyped_storage().data_ptr() in live else x for n, x in answer.items()}
        for name, x in self.metrics.items():
            if type(x) not in (int, float):
                with explained(f"{type(self).__name__}.metrics has {name!r} as {shown(x)}"):
                    self.metrics[name] = float(x)
        self.metrics["flops"] = self.flops
        self.metrics["published-flops"] = self.published_flops
        self.metrics.setdefault("subnet-flops", self.flops)
        self.metrics["compute-seconds"] = float(f"{seconds:.4g}")
        examples = len(self.place.partition.train[self.id])
        return Update(self.id, copied, self.metrics, examples, state=(0, self.round if self.state else 0))

    def run_evaluation(self, sent: Tensors, config: Json, wanted: list[str]) -> Update:
        """Return the ``wanted`` scores on the client's test and validation samples, and its own model's ``flops``."""
        splits = {"": self.samples("test"), "validation-": self.samples("validation")}
        personal = {name: tensor for name, tensor in sent.items() if not name.startswith(GLOBAL)}
        both = personal | unprefixed(GLOBAL, sent)
        metrics, task = {}, self.place.problem.task
        for name in wanted:
            whole = {n: both[n] for n in self.place.network.tensors} if name != "personal" else {}
            with self.dropout("evaluation"):
                self.load(whole or self._named("has as its own model", self.personal(personal, config)))
            for split, (x, y) in splits.items():
                if len(y):
                    values = evaluate(task, self.network.module, x, y)
                    metrics[f"{name}-{split}{task.score}"] = values[task.score]
                    others = {} if split else {other: value for other, value in values.items() if other != task.score}
                    metrics |= {f"{name}-{other}": value for other, value in others.items()}
        if self.flops:
            metrics["flops"] = self.flops
        return Update(self.id, {}, metrics, len(splits[""][1]))

    def _named(self, said: str, value: Any) -> Tensors:
        """Return what a hook returned; TypeError, with what is no tensor, if it is not tensors by name."""
        if wrong := misfit(value, Tensor):
            raise TypeError(f"{type(self).__name__} {said} {wrong}: must be tensors by name")
        return dict(value)
