"""Per-FedAvg, client side; the paper and deviations from it: ``strategies/perfedavg.py``."""

from itertools import islice

from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.inputs import Batch
from fedsub_app.common.section import MILLION
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.training.client import Training
from strategies.settings import PerFedAvgSettings


class PerFedAvgClient(Client):
    """Trains the model for its loss after a gradient step."""

    options: PerFedAvgSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return the trained model (Algorithm 1, lines 5 to 9)."""
        self.load(sent)
        w, alpha, delta = self.network.parameters, self.options.alpha, self.options.delta
        others = self.batches(MILLION, "adaptation")  # D, D''

        def step(training: Training, x: Batch, y: Tensor) -> Tensor:
            _, slopes = self.slopes(w, next(others))
            adapted = {name: tensor - alpha * slopes[name] for name, tensor in w.items()}
            return training.descend(x, y, lambda x, tensors: self.network(x, adapted if tensors is None else tensors))

        def correct(u: Tensors) -> None:
            batch = next(others)
            (_, above), (_, below) = (
                self.slopes({name: tensor + shift * u[name] for name, tensor in w.items()}, batch)
                for shift in (delta, -delta)
            )
            for name in u:
                u[name].sub_(alpha / (2 * delta) * (above[name] - below[name]))

        hessian = self.options.variant == "hessian-free" and alpha
        self.fit(step=step if alpha else None, correct=correct if hessian else None)
        return self.trained()

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the global model after gradient steps on the client's training data."""
        self.load(sent)
        self.network.training_mode()
        for batch in islice(self.batches(MILLION, "tuning"), self.options.tune_steps):
            for name, slope in self.slopes(self.network.parameters, batch)[1].items():
                self.network.parameters[name].data.sub_(self.options.alpha * slope)
        return self.trained()
