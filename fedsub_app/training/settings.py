"""The settings of local training."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedsub_app.common.section import Count, CountOrZero, Listed, NonNegative, Positive, Section

Rounds = Annotated[tuple[Count, ...], Listed("must be rounds from 1 on, such as '200, 400', or ''", read=int)]


class TrainingSettings(Section):
    """What a client trains, and how."""

    model: str = "fedpews-cnn"
    """A name of `fedsub list models`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Fresh in every round unless a method says otherwise."""
    lr: Positive = 0.05
    """Learning rate of the first round."""
    lr_decay_at: Rounds = ()
    """Rounds from which on lr is multiplied by lr-decay: "200, 400"."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of lr at each round of lr-decay-at."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD; not with adam."""
    weight_decay: NonNegative = 0.0
    """Pull of all weights towards 0, added to the gradients."""
    augment: Literal["none", "crop-flip"] = "none"
    """Training images: as they are, or random crops with padding 4 and horizontal flips."""
    objective: Literal["none", "prox", "moon"] = "none"
    """Term that any method's local loss gets on top: FedProx's or MOON's."""
    prox_mu: NonNegative = 0.01
    """Weight of objective = "prox"."""
    moon_mu: NonNegative = 1.0
    """Weight of objective = "moon"."""
    moon_temperature: Positive = 0.5
    """Temperature of objective = "moon"."""
    batch_size: Count = 32
    """Samples of a mini-batch."""
    local_epochs: CountOrZero = 1
    """Passes over a client's training samples in a round; 0: none, to time the machinery."""

    def lr_at(self, server_round: int) -> float:
        """Return the learning rate of a round: ``lr`` times ``lr_decay`` for each round of ``lr_decay_at`` so far."""
        return self.lr * self.lr_decay ** sum(server_round >= number for number in self.lr_decay_at)

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> "TrainingSettings":
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum = {self.momentum}: allowed with optimizer = 'sgd' only")
        return self
