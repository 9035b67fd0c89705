"""The wire format carries every method's tensors, and refuses what was not asked for."""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import DTYPES, BadReply, Range, Spec, Update, specs
from fedsub_app.federation.wire import (
    HEADER,
    STYPE,
    TENSORS,
    Part,
    Stack,
    asks_for_settings,
    deflated,
    inflated,
    pack,
    read_update,
    unpack,
    unpack_reply,
    update_part,
    wire_bytes,
)


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


def test_three_numbers_by_hand() -> None:
    content = pack({"round": 1}, [({"client": 0}, {"w": torch.tensor([1.0, 2.0, 3.0])})])
    array = content.array_records[TENSORS]["0:w"]
    assert array.data == b"\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x40\x40"
    assert array.shape == (1, 3)
    assert array.dtype == "float32"


def test_bool_travels_as_bits() -> None:
    mask = torch.tensor([True, False, True, True, False, False, False, True, True])
    content = pack({}, [({}, {"m": mask})])
    assert content.array_records[TENSORS]["0:m"].data == bytes([0b10110001, 0b10000000])
    assert torch.equal(unpack(content)[1][0][1]["m"], mask)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "layer.0.weight", "mask/fc1"]),
            st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99)),
            max_size=4,
        ),
        max_size=4,
    )
)
def test_any_tensors_come_back(parts: list[dict[str, tuple[str, list[int], int]]]) -> None:
    """All dtypes, empty and zero-dimensional tensors, parts with different names and shapes of one name."""

    def tensor(dtype: str, shape: list[int], seed: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])

    made = [({"client": i}, {k: tensor(*v) for k, v in part.items()}) for i, part in enumerate(parts)]
    header, back = unpack(pack({"round": 7}, made))
    assert header == {"round": 7}
    assert [config for config, _ in back] == [config for config, _ in made]
    assert all(same(a, b) for (_, a), (_, b) in zip(made, back, strict=True))


def test_methods_shapes() -> None:
    """What the five methods send fits: moments of some layers, slices, smaller networks, gathered values and bits."""
    model = {"conv1.weight": torch.randn(4, 3, 3, 3), "fc.weight": torch.randn(10, 64)}
    parts = [
        ({"client": 0, "step": 12}, {"fc.weight": model["fc.weight"], "exp_avg/fc.weight": torch.rand(10, 64)}),
        ({"client": 1}, {"fc.weight": model["fc.weight"][:, ::2], "units/fc": torch.arange(32)}),
        ({"client": 2}, {"conv1.weight": model["conv1.weight"][:2]}),
        ({"client": 3}, {"value/fc.weight": torch.rand(17), "mask/fc.weight": torch.rand(10, 64) > 0.5}),
        ({"client": 4}, model | {"control/fc.weight": torch.zeros(10, 64), "prototype": torch.rand(10, 16)}),
    ]
    _, back = unpack(pack({}, parts))
    assert all(same(a, b) for (_, a), (_, b) in zip(parts, back, strict=True))


def test_a_shared_model_travels_once() -> None:
    model = {"w": torch.randn(1000)}
    alone = wire_bytes(pack({}, [({}, model)]))
    crowd = wire_bytes(pack({}, [({}, model) for _ in range(100)]))
    assert crowd < alone + 2000
    parts = unpack(pack({}, [({}, model), ({}, {"w": torch.zeros(1000)}), ({}, model)]))[1]
    assert torch.equal(parts[2][1]["w"], model["w"])
    assert not parts[1][1]["w"].any()


def raw(array: Array, index: object = None, copies: int = 1) -> RecordDict:
    text = json.dumps({"parts": [{}], "index": [[[0], [0]]] * copies if index is None else index})
    return RecordDict({HEADER: deflated(text), TENSORS: ArrayRecord({f"{k}:w": array for k in range(copies)})})


CUT = bytes(deflated('{"parts":[],"index":[]}')["json"])[:-1]  # type: ignore[arg-type]


def test_a_header_is_small_and_inflated_no_farther_than_allowed() -> None:
    words = ("train-loss", "flops", "published-flops", "subnet-flops", "compute-seconds")
    update = Update(3, {}, dict.fromkeys(words, 1.5), 500, state=(0, 7))
    content = pack({"nonce": "0123456789a"}, [update_part(update)])
    assert wire_bytes(content) < 60 < 180 < len(inflated(content))
    bomb = RecordDict({HEADER: deflated(" " * 10**7), TENSORS: ArrayRecord({})})
    assert wire_bytes(bomb) < 20_000
    with pytest.raises(BadReply, match="a header of more than 65536 characters"):
        unpack_reply(bomb, {})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (RecordDict({}), "not fedsub's wire format"),
        (RecordDict({HEADER: ConfigRecord({"json": "{}"}), TENSORS: ArrayRecord({})}), "not fedsub's wire format"),
        (RecordDict({HEADER: ConfigRecord({"json": b"\xff" * 9}), TENSORS: ArrayRecord({})}), r"\(error: Error -3"),
        (RecordDict({HEADER: ConfigRecord({"json": CUT}), TENSORS: ArrayRecord({})}), "its JSON is cut off"),
        (RecordDict({HEADER: deflated("{"), TENSORS: ArrayRecord({})}), "not fedsub's wire format"),
        (RecordDict({HEADER: deflated("3"), TENSORS: ArrayRecord({})}), "not fedsub's wire format"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 11)), "11 bytes, expected 12"),
        (raw(Array("bool", (1, 9), STYPE, b"\0")), "1 bytes, expected 2"),
        (raw(Array("complex64", (1, 1), STYPE, b"\0" * 8)), "dtype 'complex64'"),
        (raw(Array("float32", (1, 3), "numpy.ndarray", b"\0" * 12)), "numpy.ndarray"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), [[[5], [0]]]), "not fedsub's wire format"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), [[[0], [5]]]), "tensor 'w': no row 5 of 1"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), [[[0], [-2]]]), "tensor 'w': no row -2 of 1"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), [[[0], [0.5]]]), "a part or row is not a number"),
        (raw(Array("float32", (-1, -3), STYPE, b"\0" * 12)), r"shape \(-1, -3\): not fedsub's wire format"),
        (raw(Array("float32", (), STYPE, b"\0" * 4)), r"shape \(\): not fedsub's wire format"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), []), "not fedsub's wire format"),
        (raw(Array("float32", (1, 3), STYPE, b"\0" * 12), copies=2), "two tensors of one name"),
    ],
)
def test_damaged_content_is_refused(content: RecordDict, reason: str) -> None:
    with pytest.raises(BadReply, match=reason):
        unpack(content)
    assert not asks_for_settings(content)


EXPECTED = {
    "w": Spec((2, 3)),
    "b": Spec((6,), up_to=True, low=0),
    "m": Spec((4,), torch.bool),
    "extra": Spec((1,), optional=True),
    "theta": Spec((2,), optional=True, low=0, high=1),
}
METRICS = {"loss": Range(0, 100, loss=True), "steps": Range(1, 9, integer=True, needed=True)}


def received(parts: list[tuple[Json, Tensors]], expected: Mapping[str, Spec] = EXPECTED) -> list[Part]:
    """Parts as they come off the wire, nothing decoded."""
    return unpack_reply(pack({}, parts), dict.fromkeys(range(len(parts)), expected))[1]


def reply(tensors: Tensors | None = None, without: str = "", **config: object) -> Update:
    good = {"w": torch.ones(2, 3), "b": torch.ones(5), "m": torch.tensor([True, False, True, True])}
    sent = {k: v for k, v in (good | (tensors or {})).items() if k != without}
    said: Json = {"client": 3, "num-examples": 10, "metrics": {"loss": 0.5, "steps": 2}}
    said |= {"error": "", "state": [0, 0]}
    return read_update(received([(said | config, sent)])[0], EXPECTED, METRICS, (1, 1000))


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), math.inf, math.nan, True], ids=["large", "small", "inf", "nan", "bool"]
)
def test_a_metric_without_bounds_is_a_float64(value: object) -> None:
    """As of a method of one's own: the mean of a larger integer ended the server."""
    with pytest.raises(BadReply, match="metric 'length' = "):
        Range(-math.inf, math.inf).check("length", value)
    Range(-math.inf, math.inf).check("length", 10**300)


def test_a_good_update_passes() -> None:
    update = reply()
    assert (update.client, update.num_examples, update.metrics) == (3, 10, {"loss": 0.5, "steps": 2})
    assert reply({"extra": torch.ones(1)}).tensors["extra"] == 1
    assert reply({"theta": torch.tensor([0.0, 1.0])}).tensors["theta"].tolist() == [0, 1]
    assert reply({"b": torch.ones(0)}).tensors["b"].tolist() == []  # no value is out of range
    for examples, steps, loss in ((1, 1, 0), (1000, 9, 100)):  # the bounds themselves
        assert reply(**{"num-examples": examples, "metrics": {"steps": steps, "loss": loss}}).metrics["steps"] == steps


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"tensors": {"w": torch.full((2, 3), math.nan)}}, r"tensor 'w': NaN or infinite"),
        ({"tensors": {"w": torch.tensor([[1, 2, 3], [4, 5, math.inf]])}}, r"tensor 'w': NaN or infinite"),
        ({"tensors": {"w": torch.ones(3, 2)}}, r"tensor 'w': shape \(3, 2\), expected \(2, 3\)"),
        ({"tensors": {"w": torch.ones(1)}}, r"tensor 'w': shape \(1,\), expected \(2, 3\)"),  # would broadcast
        ({"tensors": {"w": torch.ones(1, 3)}}, r"tensor 'w': shape \(1, 3\), expected \(2, 3\)"),  # would broadcast
        ({"tensors": {"w": torch.ones(2, 3, dtype=torch.float64)}}, r"tensor 'w': dtype float64, expected float32"),
        ({"tensors": {"m": torch.tensor([0.0, 0.5, 1.0, 1.0])}}, r"tensor 'm': dtype float32, expected bool"),
        ({"tensors": {"m": torch.tensor([0, 2, 1, 1], dtype=torch.uint8)}}, r"tensor 'm': dtype uint8, expected bool"),
        ({"tensors": {"v": torch.ones(1)}}, r"tensor 'v' was not asked for"),
        ({"without": "w"}, r"tensor 'w' is missing"),
        ({"tensors": {"b": torch.ones(7)}}, r"tensor 'b': shape \(7,\), expected at most \(6,\)"),
        ({"tensors": {"b": torch.ones(5, 1)}}, r"tensor 'b': shape \(5, 1\), expected at most \(6,\)"),
        ({"tensors": {"theta": torch.tensor([0.5, 1.5])}}, r"tensor 'theta': values 0.5 to 1.5, expected 0 to 1"),
        ({"num-examples": 0}, r"num-examples = 0: must be an integer from 1 to 1000"),
        ({"num-examples": -5}, r"num-examples = -5"),
        ({"num-examples": 1001}, r"num-examples = 1001"),
        ({"num-examples": 10**4000}, r"num-examples = 1000000.*…: must be"),
        ({"num-examples": 2.5}, r"num-examples = 2.5"),
        ({"num-examples": None}, r"num-examples = None"),
        ({"num-examples": True}, r"num-examples = True"),
        ({"state": [3, 2]}, r"state = \[3, 2\]: must be two rounds"),
        ({"state": [0, 10**30]}, r"state = \[0, 1000000000000000000000000000000\]: must be two rounds"),
        ({"state": [-1, 2]}, r"state = \[-1, 2\]"),
        ({"state": 3}, r"state = 3"),
        ({"state": None}, r"state = None"),
        ({"metrics": {"steps": 1, "loss": math.nan}}, r"metric 'loss' = nan: must be a number from 0 to 100"),
        ({"metrics": {"steps": 1, "loss": 10**400}}, r"metric 'loss' = 1000.*…: must be a number from 0 to 100"),
        ({"metrics": {"steps": 1, "loss": 1e300}}, r"metric 'loss' = 1e\+300: must be"),
        ({"metrics": {"steps": 1, "loss": "low"}}, r"metric 'loss' = 'low'"),
        ({"metrics": {"steps": 1, "loss": True}}, r"metric 'loss' = True"),
        ({"metrics": {"steps": 2.5}}, r"metric 'steps' = 2.5: must be an integer from 1 to 9"),
        ({"metrics": {"loss": 1.0}}, r"metric 'steps' is missing"),
        ({"metrics": {"steps": 1, "clients": 7}}, r"metric 'clients' was not asked for"),
        ({"metrics": {"steps": 1, "x" * 3000: 7}}, r"metric 'x{79}…' was not asked for"),
        ({"metrics": 3}, r"metrics = 3"),
        ({"error": "ValueError: boom"}, r"client failed: ValueError: boom"),
        ({"error": ["a"] * 99}, r"client failed: \['a', 'a', .*…$"),
        ({"error": "a\x1b[31m\nb\u202e c\ud800"}, r"client failed: a \[31m b c$"),
    ],
)
def test_a_bad_update_is_refused(broken: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadReply, match=reason):
        reply(**broken)


def test_specs_are_alike_whatever_they_start_from() -> None:
    assert replace(EXPECTED["w"], start=torch.zeros(2, 3)) == replace(EXPECTED["w"], start=torch.ones(2, 3))
    assert EXPECTED["w"] != replace(EXPECTED["w"], low=0)


def test_a_variance_is_not_negative() -> None:
    """Of three clients' variances 1 and one of -9 the mean is negative, and the network answers NaN."""
    expected = specs({"bn.running_var": torch.ones(2), "bn.running_mean": torch.ones(2)})
    for name, allowed in (("bn.running_mean", True), ("bn.running_var", False)):
        update = Update(0, {"bn.running_var": torch.ones(2), "bn.running_mean": torch.ones(2), name: -torch.ones(2)})
        (part,) = received([update_part(replace(update, num_examples=1))], expected)
        with nullcontext() if allowed else pytest.raises(BadReply, match=r"'bn\.running_var': values -1 to -1, exp"):
            read_update(part, expected, {})


def test_one_client_with_nan_does_not_take_the_others_of_its_node_along() -> None:
    updates = [Update(c, {"w": torch.ones(2, 3) if c != 1 else torch.full((2, 3), math.nan)}, {}, 1) for c in range(3)]
    parts = received([update_part(update) for update in updates])
    for client in (0, 2):
        assert read_update(parts[client], {"w": Spec((2, 3))}, {}).client == client
    with pytest.raises(BadReply, match="tensor 'w': NaN or infinite"):
        read_update(parts[1], {"w": Spec((2, 3))}, {})


def test_each_update_of_a_message_has_its_own_distance() -> None:
    asked = {client: specs({"w": torch.zeros(2)}) for client in (0, 1)}
    sent = [Update(client, {"w": torch.tensor([3.0, 4.0]) * (client + 1)}, {}, 1) for client in asked]
    _, parts = unpack_reply(pack({}, [update_part(update) for update in sent]), asked)
    assert [read_update(part, asked[0], {}).squares for part in parts] == [{"w": 25.0}, {"w": 100.0}]


def test_each_client_of_a_message_has_its_own_range() -> None:
    asked = {0: {"w": Spec((2,))}, 1: {"w": Spec((2,), high=1)}}
    sent = [update_part(Update(client, {"w": torch.full((2,), 2.0)}, {}, 1)) for client in asked]
    _, parts = unpack_reply(pack({}, sent), asked)
    assert read_update(parts[0], asked[0], {}).tensors["w"].tolist() == [2, 2]
    with pytest.raises(BadReply, match=r"tensor 'w': values 2 to 2, expected -inf to 1"):
        read_update(parts[1], asked[1], {})


def test_an_update_survives_the_wire() -> None:
    update = Update(5, {"w": torch.ones(2, 3)}, {"loss": 1.5}, 20)
    back = read_update(received([update_part(update)])[0], {"w": Spec((2, 3))}, {"loss": Range(0, 2)})
    assert (back.client, back.metrics, back.num_examples) == (5, {"loss": 1.5}, 20)
    assert same(back.tensors, update.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_stack_has_no_more_rows_than_are_used(dtype: torch.dtype) -> None:
    content = pack({}, [({"client": number}, {"w": torch.ones(2, dtype=dtype)}) for number in range(3)])
    array = content.array_records[TENSORS]["0:w"]
    assert Stack("w", array, 3).row(2).tolist() == [1, 1]
    for uses in (1, 2):
        with pytest.raises(BadReply, match=f"tensor 'w': 3 rows, of which at most {uses} are used"):
            Stack("w", array, uses).row(0)
