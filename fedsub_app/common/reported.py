"""Pictures of the numbers that a method adds to the lines of its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """The picture of a number, or a list of numbers, of each round: its heading and vertical axis.

    ``scale``: factor to the axis' unit (100: percent); ``curves``: names of a list's curves, the last sums the rest.
    """

    title: str
    axis: str
    scale: float = 1.0
    curves: tuple[str, ...] = ()

    def points(self, value: float | Sequence[float]) -> list[float]:
        """Return the value of each curve for a round's value, unscaled; a number has one curve."""
        if isinstance(value, int | float):
            return [value]
        last = len(self.curves) - 1
        return [*value[:last], sum(value[last:])]
