"""How far updates move the model: against float64, and what is refused."""

import math

import pytest
import torch
from helpers import too_large
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsub_app.subnets import norms
from fedsub_app.subnets.norms import FIRST, NormGuard, norm, square, squares


@settings(deadline=None)  # the machine may be busy
@given(
    st.integers(0, 9), st.lists(st.integers(0, 12), max_size=3), st.integers(0, 99), st.sampled_from([7, 64, 1 << 17])
)
def test_squares_are_those_of_float64(rows: int, shape: list[int], seed: int, block: int) -> None:
    """Whatever blocks they are computed in, and each row as if it were alone, bit for bit."""
    draws = torch.Generator().manual_seed(seed)
    x, start = torch.randn(rows, *shape, generator=draws), torch.randn(shape, generator=draws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "BLOCK", block)
        found = squares(x, start)
        assert found == [squares(row[None].clone(), start)[0] for row in x]
    expected = (x.double() - start.double()).reshape(rows, start.numel()).square().sum(1)
    assert found == pytest.approx(expected.tolist(), rel=1e-4)


def test_masked_positions_count_alone() -> None:
    x, start = torch.tensor([[2.0, 3.0], [4.0, 5.0]]), torch.ones(2, 2)
    assert square(x, start) == pytest.approx(30)
    assert square(x, start, torch.tensor([[True, False], [False, True]])) == pytest.approx(17)
    assert square(x, start, torch.tensor([[False], [True]])) == pytest.approx(25)
    assert norm([x - start, torch.tensor(math.sqrt(6))]) == pytest.approx(6)


def test_a_long_tensor_is_as_long_as_its_float64() -> None:
    x, length = torch.full((1 << 24,), 1e-3), 2**12 * 1e-3
    assert norm([x]) == pytest.approx(length, rel=1e-4)
    for mask in (None, torch.tensor([True])):
        assert square(x, torch.zeros_like(x), mask) == pytest.approx(length**2, rel=1e-4)


@pytest.mark.parametrize(("value", "expected"), [(math.nan, math.nan), (math.inf, math.inf), (3e38, math.inf)])
def test_what_is_not_finite_shows_in_its_row_alone(value: float, expected: float) -> None:
    x = torch.ones(3, 5)
    x[1, 2] = value
    found = squares(x, torch.zeros(5))
    assert (found[0], found[2]) == pytest.approx((5, 5))
    assert found[1] == expected or (math.isnan(found[1]) and math.isnan(expected))


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ([1, 2, 3, 301], {3}),  # the median is 2.5
        ([1, 2, 3, 249], set()),
        ([0, 0, 0, 0, 1, 1, 101], {6}),  # who did not train says nothing of how far the others should go
        ([0, 0, 5], set()),
        ([1, 100], {1}),  # two: against 0.5
        ([51], {0}),
        ([math.inf], {0}),
        ([1, 1, math.inf, math.inf], {2, 3}),
        ([0, 0, 0], set()),
        ([], set()),
    ],
)
def test_what_is_far_larger_than_the_others(said: list[float], refused: set[int]) -> None:
    assert too_large([{"update": value} for value in said], 100, 0.5).keys() == refused


def test_a_small_median_is_no_measure() -> None:
    """Where most clients have nothing left to learn the model's norm is what a step is held against."""
    assert too_large([{"update": value} for value in (1e-6, 1e-6, 1e-6, 9.0)], 100, 10.0) == {}
    (reason,) = too_large([{"update": value} for value in (1e-6, 1e-6, 1e-6, 11.0)], 100, 10.0).values()
    assert reason == "update of norm 11: more than max-update-norm = 100 times a hundredth of the model's 0.1"


def test_each_kind_is_held_against_its_own() -> None:
    said = [{"update": 1.0, "moments": 1e-6}, {"update": 1.1, "moments": 1e-6}, {"update": 0.9, "moments": 1e-3}]
    reason = "moments of norm 0.001: more than max-update-norm = 100 times the round's median 1e-06"
    assert too_large(said, 100, 1e-5) == {2: reason}
    assert too_large([{"update": 9.0}], 100, 0.0) == {}  # a model of zeros


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=FIRST), st.floats(1, 1000))
def test_of_the_first_no_more_than_half_are_refused_and_never_the_smallest(values: list[float], most: float) -> None:
    refused = too_large([{"update": value} for value in values], most, 1.0)
    assert len(refused) <= len(values) / 2
    assert all(values[k] > min(values) for k in refused)


def test_later_ones_are_held_against_those_that_passed() -> None:
    """The first eight are decided together, each other one when it comes."""
    guard = NormGuard[int](10, 0.0)
    assert [guard.add(k, {"update": value}) for k, value in enumerate([1, 1, 1, 1, 1, 1, 99])] == [[]] * 7
    first = guard.add(7, {"update": 1})
    assert [bool(reason) for _, reason in first] == [False] * 6 + [True, False]
    assert [bool(guard.add(8, {"update": value})[0][1]) for value in (5, 11, 2, 9)] == [False, True, False, False]
    assert guard.rest() == []


def test_of_a_whole_round_the_lower_median_counts() -> None:
    """Two of four do not decide it: five times 1 is below 9, five times their mean is not."""
    guard = NormGuard[int](5, 0.0, math.inf)
    assert [guard.add(k, {"update": value}) for k, value in enumerate([1, 9, 1, 9])] == [[]] * 4
    assert [bool(reason) for _, reason in guard.rest()] == [False, True, False, True]


def test_clients_that_did_not_train_are_in_no_later_median() -> None:
    """Were the six norms of 0 counted, the median would be 0, against which nothing is too large."""
    guard = NormGuard[int](10, 0.0)
    for k, value in enumerate([0, 0, 0, 0, 0, 0, 1, 1]):
        guard.add(k, {"update": value})
    assert [bool(guard.add(8, {"update": value})[0][1]) for value in (1, 11)] == [False, True]
