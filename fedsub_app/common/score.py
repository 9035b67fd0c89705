"""The score of a task: its name in reports, its unit, and which of two values is the better one."""

from collections.abc import Iterable
from typing import NamedTuple

CLASSES = ("classification",)  # tasks in which a sample is of one class
OWN = "own:"  # begins the name of an object of the program
ON_TEST_DATA = ("global", "global-local", "personal")  # kinds of evaluation
KINDS = (*ON_TEST_DATA, "global-local-validation", "personal-validation")


class Score(NamedTuple):
    """A number by which models are compared; ``unit`` is ``"%"`` or "".

    ``name`` is one word without hyphens; keys of reports end with it: ``global-accuracy``. ``low`` and ``high`` bound
    the values that a client may report. ``others`` are names of the task's further metrics. ``losses`` is the range of
    the loss; a model with a larger loss has diverged.
    """

    name: str = "accuracy"
    high_is_good: bool = True
    unit: str = "%"
    low: float = 0.0
    high: float = 100.0
    others: tuple[str, ...] = ()
    losses: tuple[float, float] = (-1e4, 1e4)  # of cross-entropies: guessing among 10^6 classes costs 14

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a round's line that hold this score."""
        return tuple(f"{kind}-{self.name}" for kind in KINDS)

    @property
    def bounded(self) -> bool:
        """It is from 0 to 100 or in a smaller range, so that no client moves a mean far."""
        return self.high - self.low <= 100

    def better(self, value: float, other: float) -> bool:
        return value > other if self.high_is_good else value < other

    def reached(self, value: float, threshold: float) -> bool:
        return value == threshold or self.better(value, threshold)

    def best(self, values: Iterable[float]) -> float:
        return (max if self.high_is_good else min)(values)

    def number(self, value: float) -> str:
        """Return a value as text without its unit: two decimals of a percentage, else four digits."""
        return f"{value:.2f}" if self.unit == "%" else f"{value:.4g}"

    def text(self, value: float) -> str:
        """Return a value as text with its unit: ``93.21 %``, ``0.4321``."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def titled(self, title: str) -> str:
        """Return a column's or axis' title with the unit: ``global (%)``."""
        return f"{title} ({self.unit})" if self.unit else title


SCORES = {  # of the tasks of tasks.py, by the setting ``task``
    "classification": Score(),
    "multi-label": Score("auroc", others=("f1",)),
    "regression": Score("rmse", False, "", 0.0, 1e9, ("mae",), (-1e18, 1e18)),
    "next-token": Score(others=("perplexity",)),
}
SPREAD = "spread"  # value of the setting ``metrics`` for any task


def further_metrics(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the names in reports of the metrics in the setting ``metrics`` that a classification computes."""
    return tuple(name.replace("-", "_") for name in metrics if name != SPREAD)


def kind_of(key: str) -> str:
    """Return the kind of evaluation of a score's key: ``global`` for ``global-accuracy``."""
    return key.rpartition("-")[0]


def checked_task(text: str) -> str:
    """Return the text of the setting ``task``; ValueError if it cannot name a task. The user's code is not run."""
    if text not in SCORES and ":" not in text:
        raise ValueError(f"allowed are {', '.join(SCORES)}, or a class of your own, 'FILE.py:NAME'")
    return text
