"""fed-foo, client side."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors
from strategies.fed_foo import FedFooSettings


class FedFooClient(Client):
    """Trains as FedAvg does and goes a part of the way."""

    options: FedFooSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Return ``w + step (w_i - w)``."""
        self.load(sent)
        start = self.trained()
        self.fit()
        step = self.options.step
        return {name: x if step == 1 else start[name] + step * (x - start[name]) for name, x in self.trained().items()}
