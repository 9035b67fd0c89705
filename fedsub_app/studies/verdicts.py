"""Statistics over seeds, and the verdict on a claim by a rule that was fixed before the runs which it judges."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SIGMAS = 5  # one seed decides where the difference is this many of the paper's standard deviations
VERDICTS = ("reproduced", "direction only", "not reproduced", "undecided", "not run", "data missing")


@dataclass(frozen=True)
class Sample:
    """A row's metric over seeds.

    Attributes
    ----------
    mean, sd, n : mean, standard deviation (0 with one seed) and number of seeds.
    values : seed -> its number; empty where only mean and standard deviation were kept.
    """

    mean: float
    sd: float
    n: int
    values: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.mean:.4g} (1)" if self.n == 1 else f"{self.mean:.4g} ± {self.sd:.2g} ({self.n})"


def sample(values: Mapping[int, float]) -> Sample:
    """Return the sample of some seeds' numbers, at least one."""
    numbers = list(values.values())
    return Sample(
        statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0, len(numbers), values
    )


@dataclass(frozen=True)
class Estimate:
    """A difference with its 95 % interval, ``mean`` ∓ ``half``; ``half`` is infinite for one seed."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        inside = "" if math.isinf(self.half) else f" [{self.mean - self.half:+.3g}, {self.mean + self.half:+.3g}]"
        return f"{self.mean:+.3g}{inside}"


def half_width(error: float, freedom: float, intervals: int = 1) -> float:
    """Return half of a t-interval; of several, all hold together with 95 % (Bonferroni).

    Parameters
    ----------
    error : standard error.
    freedom : degrees of freedom.
    """
    from scipy.stats import t  # on demand: it costs half a second

    return float(t.ppf(1 - 0.025 / intervals, freedom)) * error


def t_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of some numbers with its 95 % t-interval."""
    n, mean = len(values), statistics.fmean(values)
    return Estimate(mean, half_width(statistics.stdev(values) / math.sqrt(n), n - 1) if n > 1 else math.inf, n)


def relative(first: float, second: float) -> float:
    """Return by how many percent the first number is above the second."""
    return 100 * (first / second - 1)


def difference(
    first: Sample, second: Sample, of: Callable[[float, float], float] = lambda a, b: a - b
) -> Estimate | None:
    """Return the difference of two rows: paired over their common seeds, else Welch's; ``None`` where neither is."""
    if seeds := sorted(first.values.keys() & second.values.keys()):
        return t_interval([of(first.values[seed], second.values[seed]) for seed in seeds])
    parts = [each.sd**2 / each.n for each in (first, second)]
    if min(first.n, second.n) < 2 or not sum(parts):
        return None
    freedom = sum(parts) ** 2 / sum(part**2 / (each.n - 1) for part, each in zip(parts, (first, second), strict=True))
    return Estimate(first.mean - second.mean, half_width(math.sqrt(sum(parts)), freedom), min(first.n, second.n))


def judged(
    found: Estimate, effect: float, stated: bool = True, sd: float = 0.0, exact: float | None = None
) -> tuple[str, Estimate]:
    """Return the verdict on a difference of runs of full length, and the interval that decided.

    *reproduced*: the interval excludes 0 on the paper's side and holds the paper's effect; *direction only*: it
    excludes 0 on that side, and the paper's effect; *not reproduced*: it excludes the paper's effect, or 0 on the other
    side; *undecided*: it holds both. One seed has the interval of ± ``SIGMAS`` standard deviations of the paper, and is
    undecided where that holds 0.

    Parameters
    ----------
    effect : the paper's; where it is not ``stated`` only its sign counts.
    sd : the paper's standard deviation of this difference; 0: not known.
    exact : of a quantity that no seed changes, by how much the paper rounds; ``None``: seeds change it.
    """
    if exact is not None:
        found = Estimate(found.mean, exact, found.n)
    elif found.n == 1:
        found = Estimate(found.mean, SIGMAS * sd if sd else math.inf, 1)
        if abs(found.mean) <= found.half:
            return "undecided", found
    along = math.copysign(found.mean, found.mean * effect)  # above 0 on the paper's side
    other = along < -found.half or (stated and abs(found.mean - effect) > found.half)
    if along > found.half:
        return ("direction only" if other else "reproduced"), found
    return ("not reproduced" if other else "undecided"), found


def pooled(samples: Sequence[Sample]) -> tuple[float, int]:
    """Return the standard deviation over seeds of several rows together, and its degrees of freedom."""
    freedom = sum(each.n - 1 for each in samples)
    return (math.sqrt(sum((each.n - 1) * each.sd**2 for each in samples) / freedom) if freedom else 0.0), freedom
