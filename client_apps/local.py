"""Local training without federation, client side: the model is the client's state."""

from client_apps.base import Client
from fedsub_app.common.tensors import Json, Tensors


class LocalClient(Client):
    """Trains its own model round after round."""

    def personal(self, sent: Tensors, config: Json) -> Tensors:
        """Return the model as trained so far, at first the initial one."""
        return self.own or self.initial()

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Continue training; nothing leaves the client."""
        self.load(self.personal(sent, config))
        self.fit()
        self.keep_own()
        return {}
