"""FedBN, client side; the paper and deviations from it: ``strategies/fedbn.py``."""

from functools import cached_property

from client_apps.parts import PartClient
from strategies.fedbn import normalisation_names


class FedBNClient(PartClient):
    """Keeps its normalisation layers, trains the whole model, returns the other layers."""

    @cached_property
    def personal_names(self) -> tuple[str, ...]:
        return normalisation_names(self.network.module)
