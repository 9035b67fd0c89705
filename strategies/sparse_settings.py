"""The keys of the sparse methods (strategies/sparse.py, asked.py, fedpm.py); torch is not imported here."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsub_app.common.section import EPOCHS, Count, CountOrZero, Fraction, NonNegative, Positive
from fedsub_app.settings import MethodSettings


class SparseSettings(MethodSettings):
    """Keys of all sparse methods."""

    density: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the weights of convolutions and linear layers that the network keeps; 1: all, FedAvg."""


class FedPMSettings(MethodSettings):
    objectives: ClassVar = ("none", "prox")

    reset_every: Count = 1
    """Rounds after which the counts of the masks' ones and zeros begin anew."""


class RegrownSettings(SparseSettings):
    layers: Literal["erk", "uniform"] = "erk"
    """Densities of the layers: Erdős–Rényi kernel, or the same for all."""
    every: Count = 10
    """Rounds from one adjustment of the masks to the next."""
    share: Fraction = 0.5
    """Fraction of a layer's kept weights that an adjustment exchanges at the start."""
    until: CountOrZero = 200
    """Round from which on the masks stay; 0: from the start."""

    def share_at(self, server_round: int) -> float:
        ended = server_round >= self.until
        return 0.0 if ended else self.share / 2 * (1 + math.cos(math.pi * server_round / self.until))

    def block(self, server_round: int, layers: list[str]) -> list[str]:
        """Return the layers that an adjustment in this round changes."""
        return layers


class FedTinySettings(RegrownSettings):
    candidates: Annotated[Count, EPOCHS] = 8
    """Masks that the clients choose from in round 1, with a pass over their samples for each."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Each layer of a candidate keeps the weights that ``layers`` says times a factor from 1 - noise to 1 + noise."""
    blocks: Count = 5
    """Number of parts, with equally many layers each; an adjustment changes one part, the last part first."""

    def block(self, server_round: int, layers: list[str]) -> list[str]:
        count = min(self.blocks, len(layers))
        number = count - 1 - (server_round // self.every - 1) % count
        return [name for i, name in enumerate(layers) if i * count // len(layers) == number]


class FedRTSSettings(RegrownSettings):
    gamma: Fraction = 0.5
    """Weight of the outcomes in the clients' models; 1 - gamma is the merged model's; 0: the merged model alone."""
    trust: Positive = 10.0
    """Number of draws as which a round's outcome counts in the weights' Beta distributions."""


class PruneFLSettings(RegrownSettings):
    constant: NonNegative = 1.0
    """Time of a round that does not depend on the kept weights; 1: as much time as all weights take."""
