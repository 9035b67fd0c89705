"""Local training without federation, client side: the model is the client's state."""

from client_apps.base import Client
from fedsub_app.models import build_model
from fedsub_app.models import tensors as tensors_of
from fedsub_app.protocol import Json, Tensors


class LocalClient(Client):
    """Trains its own model round after round."""

    def personal(self, sent: Tensors) -> Tensors:
        """Return the model as trained so far, at first the common start that the seed gives."""
        if self.previous:
            return self.previous
        place = self.place
        return tensors_of(
            build_model(self.settings.model, place.in_shape, place.dataset.num_classes, self.settings.seed)
        )

    def train(self, sent: Tensors, config: Json) -> Tensors:
        """Train on; nothing leaves the client."""
        self.load(self.personal(sent))
        self.fit()
        self.remember()
        return {}
