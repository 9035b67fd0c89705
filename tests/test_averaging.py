"""The masked mean, against exact arithmetic in Python and by its invariants."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsub_app.common.seeds import generator
from fedsub_app.subnets import averaging
from fedsub_app.subnets.averaging import Contribution, MaskedMean, masked_mean


def slow_mean(old, updates, server_lr):
    """Eq. 4, one entry at a time, in fractions."""
    new = {}
    for name, tensor in old.items():
        new[name] = torch.empty(tensor.shape)
        for index in itertools.product(*(range(n) for n in tensor.shape)):
            numerator = denominator = Fraction(0)
            for values, masks, weight, slices, _ in updates:
                if name not in values:
                    continue
                mask, at = (masks or {}).get(name), index
                if name in (slices or {}):
                    kept = [range(size) if k is None else k.tolist() for size, k in axes(tensor, slices[name])]
                    if not all(i in k for i, k in zip(index, kept, strict=True)):
                        continue
                    at = tuple(k.index(i) for i, k in zip(index, kept, strict=True))
                if mask is None or bool(mask.broadcast_to(tensor.shape)[index]):
                    numerator += Fraction(weight) * Fraction(values[name][at].item())
                    denominator += Fraction(weight)
            value = Fraction(tensor[index].item())
            if denominator > 0:
                value += Fraction(server_lr) * (numerator / denominator - value)
            new[name][index] = float(value)
    return new


def axes(tensor, place):
    """Each axis of a tensor: its size, and which of it a slice has."""
    return zip(tensor.shape, [*place, *[None] * tensor.dim()][: tensor.dim()], strict=True)


def sliced(old, name, noise, draw):
    """Some rows and columns of a tensor, none of them or all, and random values for them."""
    place = [
        (torch.rand(size, generator=noise) < 0.6).nonzero().flatten() if draw(st.booleans()) else None
        for size in old[name].shape[:2]
    ]
    place = (*place, None, None)[:2]
    shape = [size if kept is None else len(kept) for size, kept in axes(old[name], place)]
    return place, torch.randn(shape, generator=noise)


@st.composite
def federations(draw, max_clients=4):
    """An old model, updates that lack some tensors, with masks of broadcastable shapes and slices, positive weights."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3))
    noise = generator(draw(st.integers(0, 1000)))
    old = {f"t{k}": torch.randn(shape, generator=noise) for k, shape in enumerate(shapes)}
    updates = []
    for _ in range(draw(st.integers(0, max_clients))):
        names = [name for name in old if draw(st.booleans()) or draw(st.booleans())]
        values = {name: torch.randn(old[name].shape, generator=noise) for name in names}
        masks, slices = {}, {}
        for name in names:
            if old[name].dim() and draw(st.booleans()):
                slices[name], values[name] = sliced(old, name, noise, draw)
            elif draw(st.booleans()):
                shape = [n if draw(st.booleans()) else 1 for n in old[name].shape]
                masks[name] = torch.rand(shape, generator=noise) < 0.6
        weight = draw(st.sampled_from([0.25, 1.0, 3.0, 500.0, 0.3]))
        updates.append(Contribution(values, draw(st.sampled_from([masks, None])), weight, slices))
    return old, updates


def covered(update, name, old):
    """Where an update has values, bool of the old tensor's shape."""
    if name not in update.tensors:
        return torch.zeros(old.shape, dtype=torch.bool)
    mask = update.whole(name, old)[1]
    return torch.ones(old.shape, dtype=torch.bool) if mask is None else mask.broadcast_to(old.shape)


@pytest.fixture(params=[1, 5, 1 << 17])
def block(request, monkeypatch):
    """Blocks of one entry, of a few with a shorter last one, and of more than there are."""
    monkeypatch.setattr(averaging, "BLOCK", request.param)


def test_a_tiny_first_weight_makes_no_other_overflow() -> None:
    """HetLoRA weighs by the norm of what a client sends."""
    updates = [Contribution({"w": torch.tensor([x])}, None, weight) for x, weight in ((9.0, 1e-60), (1.0, 1.0))]
    assert masked_mean({"w": torch.zeros(1)}, updates)["w"].tolist() == [1]


def test_equal_weights_cancel_exactly() -> None:
    old, x = {"w": torch.zeros(100)}, torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    plain, weighed = (masked_mean(old, [Contribution({"w": row}, weight=w) for row in x])["w"] for w in (1.0, 0.7))
    assert torch.equal(plain, weighed)


def test_three_numbers_by_hand(block):
    old = {"w": torch.tensor([10.0, 20.0, 30.0])}
    first = Contribution({"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([True, True, False])}, 1.0)
    second = Contribution({"w": torch.tensor([5.0, 6.0, 7.0])}, {"w": torch.tensor([True, False, False])}, 3.0)
    assert masked_mean(old, [first, second])["w"].tolist() == [(1 + 15) / 4, 2.0, 30.0]
    assert masked_mean(old, [first, second], server_lr=0.5)["w"].tolist() == [7.0, 11.0, 30.0]
    assert masked_mean(old, [first, second], server_lr=0.0)["w"].tolist() == [10.0, 20.0, 30.0]
    assert masked_mean(old, [])["w"].tolist() == [10.0, 20.0, 30.0]
    assert old["w"].tolist() == [10.0, 20.0, 30.0]


@settings(max_examples=60, deadline=None)
@given(federation=federations(), server_lr=st.sampled_from([0.25, 0.5, 1.0]), block=st.sampled_from([1, 3, 1 << 17]))
def test_is_exact_arithmetic_up_to_rounding(federation, server_lr, block):
    old, updates = federation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "BLOCK", block)
        new = masked_mean(old, updates, server_lr)
    expected = slow_mean(old, updates, server_lr)
    assert list(new) == list(old)
    for name in old:
        assert torch.allclose(new[name], expected[name], rtol=1e-5, atol=1e-5), name


@settings(max_examples=60, deadline=None)
@given(federation=federations(max_clients=6), cuts=st.sets(st.integers(0, 6)), server_lr=st.sampled_from([0.3, 1.0]))
def test_updates_one_after_the_other_give_the_same_bits(federation, cuts, server_lr):
    old, updates = federation
    mean = MaskedMean(old)
    ends = [0, *sorted(cuts), len(updates)]
    for start, end in itertools.pairwise(ends):
        mean.add(updates[start:end])
    whole = masked_mean(old, updates, server_lr)
    for name, tensor in mean.result(server_lr).items():
        assert torch.equal(tensor, whole[name])


def test_more_updates_than_a_byte_counts():
    old, mask = {"w": torch.zeros(2)}, {"w": torch.tensor([True, False])}
    mean = MaskedMean(old)
    for k in range(300):
        mean.add([Contribution({"w": torch.tensor([float(k), 1.0])}, mask if k else None, 5.0)])
    assert mean.result()["w"].tolist() == [149.5, 1.0]


@settings(max_examples=40, deadline=None)
@given(federation=federations())
def test_stays_between_the_values_that_cover(federation):
    old, updates = federation
    new = masked_mean(old, updates)
    for name, tensor in old.items():
        low, high = torch.full(tensor.shape, torch.inf), torch.full(tensor.shape, -torch.inf)
        for update in updates:
            if name in update.tensors:
                values, mask = update.whole(name, tensor)[0], covered(update, name, tensor)
                low = torch.where(mask, torch.minimum(low, values), low)
                high = torch.where(mask, torch.maximum(high, values), high)
        uncovered = low > high
        assert torch.equal(new[name][uncovered], tensor[uncovered]), "uncovered positions keep the old value"
        assert bool(((new[name] >= low - 1e-5) & (new[name] <= high + 1e-5))[~uncovered].all())


# Odd sizes, so that vectorised and left-over elements are both compared; blocks end inside.
@pytest.mark.parametrize("shape", [(), (1,), (1003,), (37, 19), (8, 3, 5, 5), (3, 0)])
@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_mask_of_ones_changes_no_bit(shape, server_lr, monkeypatch):
    monkeypatch.setattr(averaging, "BLOCK", 100)
    noise = generator(*shape)
    old = {"w": torch.randn(shape, generator=noise)}
    updates = [({"w": torch.randn(shape, generator=noise)}, weight) for weight in (0.1, 7.3, 500.0)]
    plain = masked_mean(old, [Contribution(x, None, w) for x, w in updates], server_lr)["w"]
    full = masked_mean(old, [Contribution(x, {"w": torch.ones(shape).bool()}, w) for x, w in updates], server_lr)["w"]
    broadcast = masked_mean(old, [Contribution(x, {"w": torch.tensor(True)}, w) for x, w in updates], server_lr)["w"]
    assert torch.equal(plain, full)
    assert torch.equal(plain, broadcast)


def test_mask_of_ones_changes_no_bit_of_a_number_in_float64():
    """torch rounds a 0-dim float64 to float32 before it adds it to a float32 tensor, not after."""
    xs = [torch.tensor(x, dtype=torch.float64) for x in (0.1, 1.7, 1 + 2**-24 + 2**-40, 2**-24)]
    bare = masked_mean({"a": torch.zeros(())}, [Contribution({"a": x}) for x in xs])
    ones = [Contribution({"a": x}, {"a": torch.ones((), dtype=torch.bool)}) for x in xs]
    assert torch.equal(bare["a"], masked_mean({"a": torch.zeros(())}, ones)["a"])


def test_mask_of_ones_changes_no_bit_whatever_the_memory_layout():
    noise = generator(0)
    old = {"w": torch.randn(6, 5, 3, 3, generator=noise)}
    value = torch.randn(6, 5, 3, 3, generator=noise)
    results = [
        masked_mean(old, [Contribution({"w": x}, mask, 0.7), Contribution({"w": old["w"]}, mask, 1.3)])["w"]
        for x in (value, value.to(memory_format=torch.channels_last))
        for mask in (None, {"w": torch.ones(6, 5, 3, 3).bool()})
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert torch.allclose(results[0], results[2])
    assert results[2].is_contiguous()


def test_equal_tensors(block):
    x = {"w": torch.randn(50, generator=generator(1))}
    old = {"w": torch.zeros(50)}
    assert torch.equal(masked_mean(old, [Contribution(x, None, w) for w in (1.0, 1.0, 2.0)])["w"], x["w"])
    assert torch.allclose(masked_mean(old, [Contribution(x, None, w) for w in (0.3, 7.0, 1.1)])["w"], x["w"], rtol=1e-6)


def test_a_tensor_that_nobody_trained_stays(block):
    old = {"a": torch.ones(2), "b": torch.ones(2)}
    new = masked_mean(old, [Contribution({"a": torch.zeros(2)})])
    assert new["a"].tolist() == [0.0, 0.0]
    assert new["b"].tolist() == [1.0, 1.0]
    new["b"].zero_()
    assert old["b"].tolist() == [1.0, 1.0]


def test_result_is_float32_and_needs_no_gradient():
    old = {"w": torch.nn.Parameter(torch.ones(3, dtype=torch.float64))}
    new = masked_mean(old, [Contribution({"w": torch.full((3,), 2.0, dtype=torch.float16)})])["w"]
    assert (new.dtype, new.requires_grad, new.tolist()) == (torch.float32, False, [2.0] * 3)


def test_weights_without_a_positive_sum_keep_the_old_value(block):
    old = {"w": torch.tensor([4.0])}
    updates = [Contribution({"w": torch.tensor([value])}, None, weight) for value, weight in ((1.0, 1.0), (2.0, -1.0))]
    assert masked_mean(old, updates)["w"].tolist() == [4.0]


@settings(max_examples=60, deadline=None)
@given(
    federation=federations(),
    server_lr=st.sampled_from([0.3, 1.0]),
    block=st.sampled_from([1, 3, 1 << 17]),
    one=st.booleans(),
)
def test_a_slice_is_the_whole_tensor_with_a_mask(federation, server_lr, block, one):
    """Bit for bit, also among updates without slices; with equal weights, which are counted, and with others."""
    old, updates = federation
    updates = [update._replace(weight=1.0) for update in updates] if one else updates
    whole = []
    for update in updates:
        both = {name: update.whole(name, old[name]) for name in update.tensors}
        masks = {name: mask for name, (_, mask) in both.items() if mask is not None}
        whole.append(Contribution({name: values for name, (values, _) in both.items()}, masks, update.weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "BLOCK", block)
        new, expected = masked_mean(old, updates, server_lr), masked_mean(old, whole, server_lr)
    assert all(torch.equal(new[name], expected[name]) for name in old)


def test_slices_by_hand():
    old = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0])}
    row, columns = torch.tensor([1]), torch.tensor([0, 2])
    small = Contribution({"w": torch.tensor([[10.0, 20.0]])}, None, 1.0, {"w": (row, columns)})
    wide = Contribution({"w": torch.tensor([[50.0, 60.0, 70.0]]), "b": torch.zeros(1)}, None, 3.0, {
        "w": (row, None), "b": (row, None)})  # fmt: skip
    new = masked_mean(old, [small, wide])
    assert new["w"].tolist() == [[0, 1, 2], [(10 + 150) / 4, 60, (20 + 210) / 4]]
    assert new["b"].tolist() == [7, 0]
    both = Contribution({"w": torch.ones(2, 2)}, None, 1.0, {"w": (None, columns)})
    assert masked_mean(old, [both])["w"].tolist() == [[1, 1, 1], [1, 4, 1]]


def test_what_one_client_alone_contributes_is_taken_as_it_is():
    """0.1 x / 0.1 is not x for each x."""
    noise = generator(5)
    old = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    halves = torch.arange(1000).split(500)
    updates = [
        Contribution({"a": torch.randn(500, generator=noise), "b": torch.ones(3) * k}, None, 7.0 - 6.9 * k, {
            "a": (half, None)}, {"a"}) for k, half in enumerate(halves)
    ]  # fmt: skip
    new = masked_mean(old, updates)
    assert torch.equal(new["a"], torch.cat([update.tensors["a"] for update in updates]))
    assert torch.allclose(new["b"], torch.full((3,), 0.1 / 7.1))
    assert not torch.equal(masked_mean(old, [u._replace(alone=()) for u in updates])["a"], new["a"])


def part(rows, size):
    """Some rows of a vector."""
    return Contribution({"w": torch.zeros(size)}, slices={"w": (None if rows is None else torch.tensor(rows), None)})


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (Contribution({"w": torch.zeros(2)}, weight=math.nan), "update has weight nan"),  # would keep the old value
        (Contribution({"v": torch.zeros(2)}), "tensor v that the old model lacks"),
        (Contribution({"w": torch.zeros(1)}), r"tensor w has shape \(1,\), the old one \(2,\)"),  # would broadcast
        (Contribution({"w": torch.zeros(2)}, {"w": torch.ones(2)}), "mask w has dtype torch.float32"),
        (Contribution({"w": torch.zeros(2)}, {"w": torch.ones(3).bool()}), r"mask w has shape \(3,\), its tensor \(2,"),
        (part([0], 2), r"tensor w has shape \(2,\), its slice \(1,\)"),
        (part([1, 0], 2), "slice of tensor w has rows that are not ascending int64 numbers"),
        (part([1, 1], 2), "slice of tensor w has rows that are not ascending"),
        (part([0.0], 1), "slice of tensor w has rows that are not ascending int64"),
        (part([[0]], 1), "slice of tensor w has rows that are not ascending int64"),
        (part([-1], 1), r"slice of tensor w has rows outside the shape \(2,\)"),
        (part([2], 1), r"slice of tensor w has rows outside the shape \(2,\)"),
        (part(None, 2)._replace(slices={"w": (None, torch.tensor([0]))}), r"slice of tensor w has columns outside"),
        (part([0], 1)._replace(masks={"w": torch.tensor(True)}), "tensor w has a slice and a mask"),
    ],
)
def test_bad_updates_are_named(update, said):
    with pytest.raises(ValueError, match=said):
        masked_mean({"w": torch.zeros(2)}, [update])
