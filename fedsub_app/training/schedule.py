"""The learning rate by round: its settings."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedsub_app.common.section import Count, CountOrNone, CountOrZero, Listed, Positive, Section

Rounds = Annotated[tuple[Count, ...], Listed("must be rounds from 1 on, such as '200, 400', or ''", read=int)]


class ScheduleSettings(Section):
    """The learning rate and how it falls."""

    lr: Positive = 0.05
    """Learning rate of the first round."""
    lr_schedule: Literal["step", "cosine", "plateau"] = "step"
    """How lr falls: at some rounds, along a cosine to 0 behind num-rounds, or where the score gets no better.

    cosine is torch's CosineAnnealingLR; such a run gets no more rounds when it is resumed. plateau is torch's
    ReduceLROnPlateau on the first score of ``evaluate``; it multiplies lr by lr-decay.
    """
    lr_decay_at: Rounds = ()
    """Rounds that multiply lr by lr-decay, from then on: "200, 400"."""
    lr_decay_every: CountOrNone = None
    """Rounds from one multiplication of lr by lr-decay to the next; 0: those of lr-decay-at alone."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of lr each time that it falls."""
    lr_patience: CountOrZero = 10
    """Evaluations in a row without a better score that lr-schedule = "plateau" lets pass."""

    if TYPE_CHECKING:
        num_rounds: int  # of the run

    def lr_at(self, server_round: int) -> float:
        """Return the learning rate of a round; with ``plateau`` that of the first one, after it the scores decide."""
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * (server_round - 1) / self.num_rounds)) / 2
        falls = sum(server_round >= number for number in self.lr_decay_at)
        falls += (server_round - 1) // self.lr_decay_every if self.lr_decay_every else 0
        return float(self.lr * self.lr_decay**falls)

    @model_validator(mode="after")
    def _schedule_agrees(self) -> "ScheduleSettings":
        for key in ("lr_decay_at", "lr_decay_every") if self.lr_schedule != "step" else ():
            if getattr(self, key):
                raise ValueError(f"{key.replace('_', '-')}: does nothing with lr-schedule = {self.lr_schedule!r}")
        if self.lr_schedule == "plateau" and self.lr_decay == 1:
            raise ValueError("lr-decay = 1: must be below 1 with lr-schedule = 'plateau'")
        return self
