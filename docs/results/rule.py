"""The verdict on a claim, by a rule that was fixed before the runs which it judges."""

import math

from fedsub_app.studies.evidence import Estimate

SIGMAS = 5  # one seed decides where the difference exceeds this many of the paper's standard deviations
VERDICTS = ("reproduced", "direction only", "not reproduced", "undecided", "not run", "data missing")


def relative(first: float, second: float) -> float:
    """Return by how many percent the first number is above the second."""
    return 100 * (first / second - 1)


def judged(
    found: Estimate, effect: float, stated: bool = True, sd: float = 0.0, exact: float | None = None
) -> tuple[str, Estimate]:
    """Return the verdict on a difference of runs of full length, and the interval that decided.

    *reproduced*: the interval lies on the paper's side of 0 and holds the paper's effect. *direction only*: it lies on
    that side and excludes the effect. *not reproduced*: it lies on the other side, or it holds 0 and excludes the
    effect. *undecided*: it holds 0, and the effect if ``stated``. With one seed the interval is ± ``SIGMAS`` of the
    paper's standard deviations, and the verdict is undecided where it holds 0.

    Parameters
    ----------
    effect : the paper's difference; where it is not ``stated``, only its sign counts.
    sd : the paper's standard deviation of this difference; 0: not known.
    exact : the paper's rounding of a quantity that no seed changes; ``None``: seeds change the quantity.
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
