"""Local training without federation, client side: the model is the client's state."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors


class LocalClient(Client):
    """Trains its own model round after round."""

    def train(self, sent: Tensors, config: Json) -> Tensors:
        self.load(self.own or self.initial())
        self.fit()
        self.keep_own()
        return {}
