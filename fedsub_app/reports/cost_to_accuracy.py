"""Cost to accuracy: the bytes and FLOPs that a method needs for 90 % of the best method's accuracy.

Hu, Tang, Kyrillidis, Jermaine: Federated Learning Over Images, ICCV 2023, Sections 4.3, 4.4 and Appendix B.3. A run's
accuracy is the mean over the last ten rounds, its best one is compared, and the threshold is 90 % of the best run's. A
run has reached it at the end of the fifth round in a row that is at or above it. Where it never is, it fails.

The paper leaves open:

- Which accuracy must stay at the threshold for five rounds (4.4): the mean of ten rounds, by which the threshold is set
  (B.3 averages "to smooth out the accuracies"), or that of each round. Here it is the mean, which arrives later: the
  method that sets the bar may itself fail in a run that ends soon after its best rounds.
- Before round 10 the mean is over the rounds so far: some of the paper's methods arrive after five. The best one is of
  ten rounds where the run has as many. The initial model, round 0, is in no mean.
- With ``eval-every`` above 1 the mean is over the evaluations of the last ten rounds, and five rounds in a row are all
  evaluations of a span of five rounds or more: with ``eval-every = 5`` two. A threshold reached
  between two evaluations is seen at the second one.
- A run that ends by ``num-rounds`` or by a budget before its fifth round has failed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedsub_app.common.score import Score
from fedsub_app.common.section import Json
from fedsub_app.common.text import three_digits

WINDOW = 10  # rounds of a mean
ROUNDS_IN_A_ROW = 5  # at or above the threshold
FRACTION = 0.9  # of the best accuracy

Averages = list[tuple[int, float]]


class Reached(NamedTuple):
    """The round at whose end a run has held the threshold, and what it has cost by then.

    ``gigabytes``: 1e9 bytes, down and up, by the papers' formula. ``gflops``: 1e9 FLOPs, 2 x MAC, forward and backward.
    ``published_gflops``: :func:`~fedsub_app.training.costs.published_flops`; NaN in runs that did not record them.
    ``device_seconds``: on the devices' clock.
    """

    round: int
    gigabytes: float
    published_gflops: float
    gflops: float
    device_seconds: float = 0.0


class Cost(NamedTuple):
    """A run's best ten-round score, and what the threshold has cost; ``None``: it was not reached."""

    best: float
    reached: Reached | None


def averages(lines: Sequence[Json], key: str) -> Averages:
    """Return the mean of a key of a run's lines over the last ten rounds, at each evaluated round."""
    measured = [(line["round"], line[key]) for line in lines if line["round"] > 0 and key in line]
    means = []
    for last, (number, _) in enumerate(measured, 1):
        window = [value for of, value in measured[max(0, last - WINDOW) : last] if of > number - WINDOW]
        means.append((number, sum(window) / len(window)))
    return means


def best(means: Averages, score: Score) -> float:
    """Return the best of :func:`averages`, of which there must be one, of whole windows where there are any."""
    whole = min(WINDOW, means[-1][0])
    return score.best(mean for number, mean in means if number >= whole)


def round_reached(means: Averages, threshold: float, score: Score) -> int | None:
    """Return the round at whose end the averages have been at the threshold or better for five rounds in a row."""
    since = None
    for number, mean in means:
        if score.better(threshold, mean):
            since = None
            continue
        since = number if since is None else since
        if number - since >= ROUNDS_IN_A_ROW - 1:
            return number
    return None


def costs_to_accuracy(runs: Mapping[str, Sequence[Json]], key: str, score: Score) -> tuple[float, dict[str, Cost]]:
    """Return the threshold that the best of some runs sets, and what it has cost each of them.

    ``runs``: name -> lines, one after round 0 at least with ``key``; where low is good: the best over ``FRACTION``.
    """
    smooth = {name: averages(lines, key) for name, lines in runs.items()}
    top = score.best(best(means, score) for means in smooth.values())
    worse = top / FRACTION if top > 0 else top * FRACTION  # of a score whose best is low
    threshold = top - (1 - FRACTION) * abs(top) if score.high_is_good else worse
    costs = {}
    for name, lines in runs.items():
        number = round_reached(smooth[name], threshold, score)
        costs[name] = Cost(best(smooth[name], score), None if number is None else _spent(lines, number))
    return threshold, costs


def _spent(lines: Sequence[Json], last_round: int) -> Reached:
    trained = [line for line in lines if 0 < line["round"] <= last_round]

    def total(*keys: str) -> float:
        return float(sum(line.get(key, 0) for line in trained for key in keys)) / 1e9

    published = total("published-flops") if all("published-flops" in line for line in trained) else math.nan
    sent, seconds = total("formula-bytes-down", "formula-bytes-up"), total("device-seconds") * 1e9
    return Reached(last_round, sent, published, total("flops"), seconds)


def columns(score: Score, timed: bool) -> tuple[str, ...]:
    """Return the header of :func:`cells`; ``timed``: with the devices' clock."""
    names = (score.titled("best"), "rounds", "GB", "GFLOPs, paper's count", "GFLOPs", "device seconds")
    return names if timed else names[:-1]


def about(score: Score) -> str:
    best = (f"highest mean {score.name}", "90 % of the highest", "at or above")
    if not score.high_is_good:
        best = (f"lowest mean {score.name}", "the lowest over 0.9", "at or below")
    return (
        f"Best: the {best[0]} of ten rounds. Threshold: {best[1]} of all methods. Rounds, GB (4 bytes a number, down "
        f"and up) and GFLOPs until the mean has been {best[2]} it for five rounds in a row. The paper's count: one MAC "
        "is one FLOP, no backward pass, MOON twice; the other: 2 x MAC, with the backward pass."
    )


def cells(costs: Sequence[Cost], score: Score, timed: bool) -> list[str]:
    """Return the text of :func:`columns` for the runs of a row, one a seed."""
    reached, never = [cost.reached for cost in costs], "not reached"
    columns = [[score.number(cost.best) for cost in costs]]
    columns.append([str(end.round) if end else never for end in reached])
    for part in Reached._fields[1 : None if timed else -1]:
        amounts = [getattr(end, part) if end else None for end in reached]
        columns.append([never if x is None else "–" if math.isnan(x) else three_digits(x) for x in amounts])
    return [", ".join(column) for column in columns]
