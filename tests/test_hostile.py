"""One node says what it likes: the run goes on, its numbers stay those of the others.

Real replies of a real round are taken apart, changed and put together again: one test for each way that was found to
hurt, and one that looks for more.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from conftest import SMALL
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from helpers import METHOD_KEYS, rounds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsub_app.client_app import app
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import Federation
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import Range, Update
from fedsub_app.federation.wire import HEADER, STYPE, TENSORS, deflated, inflated, to_arrays, to_tensors
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.evaluation import GlobalTest
from fedsub_app.runs.methods import METHODS
from fedsub_app.settings import Settings
from fedsub_app.training.workplace import workplace
from strategies.base import SubnetStrategy
from strategies.server import Facts

HOSTILE = (1, 3, 5)  # clients of the second node; 0, 2, 4 and 6 are the first one's
HONEST = (0, 2, 4, 6)


def again(phase: Phase) -> Phase:
    """The phase as it was before its answers came in."""
    found = copy.copy(phase)
    found.dropped, found.report, found.bytes_up, found.waiting_bytes = [], dict(phase.report), 0, 0
    found.open = set(phase.clients)
    return found


@dataclass(frozen=True)
class Scene:
    """The second round of a small run, of which each reply can be merged again and again."""

    settings: Settings
    facts: Facts
    state: Tensors
    model: Tensors
    train: tuple[Phase, list[Message]]
    evaluate: tuple[Phase, list[Message]]

    def strategy(self, phase: Phase) -> SubnetStrategy:
        """A strategy as it was when the replies came in."""
        made = METHODS[self.settings.method].strategy(self.settings, workplace(self.settings).network.module)
        made.load_state(self.state)
        federation = Federation(self.settings, {"run": "this"})
        made.connect(federation, self.facts)
        made.round, made.current = 2, self.model
        made.phase = again(phase)
        return made

    def merged(self, spoil: Callable[[Message], list[Message]]) -> tuple[SubnetStrategy, Tensors | None]:
        """What comes of the round where the second node's reply is ``spoil``ed."""
        phase, (good, bad) = self.train
        made = self.strategy(phase)
        arrays, _ = made.aggregate_train(2, [good, *spoil(bad)])
        return made, None if arrays is None else to_tensors(arrays)

    @cached_property
    def expected(self) -> tuple[Json, Tensors, set[str]]:
        """The honest round's report, the model without the second node, and the keys that a report can have."""
        honest, _ = self.merged(lambda reply: [reply])
        without, model = self.merged(lambda reply: [])
        assert model is not None
        assert not honest.phase.dropped
        return honest.phase.report, model, honest.phase.report.keys() | without.phase.report.keys()

    def evaluated(self, spoil: Callable[[Message], list[Message]]) -> Json:
        """What the round's line says of the evaluation then."""
        phase, (good, bad) = self.evaluate
        made = self.strategy(phase)
        made.aggregate_evaluate(2, [good, *spoil(bad)])
        return made.phase.report


def scene_of(method: str) -> Scene:
    keys: dict[str, Value] = {name.replace("__", ".").replace("_", "-"): v for name, v in METHOD_KEYS[method].items()}
    keys = SMALL | keys | {"method": method, "num-clients": 7, "placement": "pinned", "evaluate": "global-local"}
    found = resolve(keys | {"train-per-class": 30, "partition": "iid"})
    place = workplace(found)
    examples = [len(index) for index in place.partition.train]
    global_test = GlobalTest(place.problem, place.device)
    facts = Facts(examples, place.training_flops(place.network), global_test.quick_loss)
    strategy = METHODS[method].strategy(found, place.network.module)
    grid = LocalGrid(app, found.flat(), 2)
    header = {"run": "this", "state-dir": "nowhere"}
    strategy.connect(Federation(found, header, found.flat() | {"experiment": ""}), facts)
    arrays = to_arrays(strategy.current)
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord({"checkpoints": []}), grid)
        replies = list(grid.send_and_receive(messages))
        asked = again(strategy.phase)
        if number == 1:
            merged, _ = strategy.aggregate_train(1, replies)
            assert merged is not None, strategy.phase
            arrays = merged
    state = {name: tensor.clone() for name, tensor in strategy.state().items()}
    model = strategy.current
    questions = strategy.configure_evaluate(2, arrays, ConfigRecord({"last": True}), grid)
    answers = list(grid.send_and_receive(questions))
    return Scene(found, facts, state, model, (asked, replies), (strategy.phase, answers))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Scene]]:
    """Scenes by method, made once; clients keep their state in a folder of the test's."""
    folder = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "state_folder", lambda header, config: folder / header["digest"])
        yield lru_cache(scene_of)


def opened(reply: Message) -> tuple[Json, dict[str, Array]]:
    """A reply's JSON and arrays, to be changed."""
    return json.loads(inflated(reply.content)), dict(reply.content.array_records[TENSORS])


def closed(reply: Message, header: Any, arrays: dict[str, Array]) -> Message:
    """The reply with these instead; ``header`` may be JSON text."""
    text = header if isinstance(header, str) else json.dumps(header)
    content = RecordDict({HEADER: deflated(text), TENSORS: ArrayRecord(arrays)})
    spoilt = copy.copy(reply)
    spoilt.__dict__["_content"] = content
    return spoilt


Spoil = Callable[[Message], list[Message]]


def spoiling(change: Callable[[Json, dict[str, Array]], Any]) -> Spoil:
    """Change JSON and arrays; what is returned, if anything, stands for the JSON."""

    def spoil(reply: Message) -> list[Message]:
        header, arrays = opened(reply)
        instead = change(header, arrays)
        return [closed(reply, header if instead is None else instead, arrays)]

    return spoil


def reasons(made: SubnetStrategy) -> dict[int, str]:
    return {drop.client: drop.reason for drop in made.phase.dropped}


def check(scene: Scene, spoil: Spoil) -> SubnetStrategy:
    """Merge a spoilt round; check what must hold whatever was sent; return the strategy."""
    honest, their_model, known = scene.expected
    made, model = scene.merged(spoil)
    assert model is not None, made.phase.report
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (model | made.state()).values())
    dropped = reasons(made)
    assert dropped.keys() <= set(HOSTILE)
    assert all(reason.isprintable() and len(reason) <= 200 for reason in dropped.values())
    if dropped.keys() == set(HOSTILE):
        assert all(torch.equal(model[name], tensor) for name, tensor in their_model.items())
    report = made.phase.report
    assert report.keys() <= known
    for key in ("clients", "bytes-down", "formula-bytes-down"):
        assert report[key] == honest[key]
    line = json.dumps(report, allow_nan=False)
    assert len(line) < 2 * len(json.dumps(honest)) + 1000
    return made


# --- each of these hurt ---------------------------------------------------------------------------------------------


def parts(change: Callable[[Json], object]) -> Spoil:
    """Change each part's JSON object."""

    def every(header: Json, arrays: dict[str, Array]) -> None:
        for part in header["parts"]:
            change(part)

    return spoiling(every)


def metric(name: str, value: object) -> Spoil:
    return parts(lambda part: part["metrics"].update({name: value}))


def array(name: str, change: Callable[[Array], Array]) -> Spoil:
    def one(header: Json, arrays: dict[str, Array]) -> None:
        for key in arrays:
            if key.partition(":")[2] == name:
                arrays[key] = change(arrays[key])

    return spoiling(one)


def filled(name: str, value: float) -> Spoil:
    """A tensor whose values are all ``value``, of every client of the node."""
    return array(name, lambda old: Array(old.dtype, old.shape, STYPE, torch.full(old.shape, value).numpy().tobytes()))


def shaped(name: str, *shape: int) -> Spoil:
    """An array that says that it is of this shape, and has no bytes."""
    return array(name, lambda old: Array(old.dtype, shape, STYPE, b""))


def bombs(header: Json, arrays: dict[str, Array]) -> None:
    """300 unasked parts that refer to one array of 8 million bools."""
    header["parts"] += [{"client": 1000 + k} for k in range(300)]
    arrays[f"{len(arrays)}:mask"] = Array("bool", (1, 8 * 10**6), STYPE, bytes(10**6))
    header["index"].append([[*range(3, 303)], [0] * 300])


def twice(header: Json, arrays: dict[str, Array]) -> None:
    name = next(iter(arrays))
    arrays[f"{len(arrays)}{name[1:]}"] = arrays[name]
    header["index"].append(header["index"][0])


def nested(header: Json, arrays: dict[str, Array]) -> str:
    return '{"parts":' + "[" * 20_000 + "]" * 20_000 + "}"


HURT: list[tuple[str, str, Spoil, str]] = [
    *(
        (f"metric {name}", "fedavg", metric(name, 777), f"metric {name!r} was not asked for")
        for name in ("clients", "dropped", "round", "status", "seconds", "global-accuracy", "bytes-up", "merge-seconds")
    ),
    ("a huge loss", "fedavg", metric("train-loss", 10**400), "metric 'train-loss' = 1000"),
    ("an absurd loss", "fedavg", metric("train-loss", 1e300), "metric 'train-loss' = 1e+300: must be a number from -1"),
    ("negative time", "fedavg", metric("compute-seconds", -9.0), "metric 'compute-seconds' = -9.0: must be a number"),
    ("more FLOPs than there can be", "fedavg", metric("flops", 1e30), "metric 'flops' = 1e+30: must be a number from"),
    (
        "20,000 metrics",
        "fedavg",
        parts(lambda part: part["metrics"].update({f"m{k}": k for k in range(20_000)})),
        "a header of ",
    ),
    ("a metric name of 5 MB", "fedavg", metric("m" * 5_000_000, 1), "a header of "),
    ("a metric name of 3 kB", "fedavg", metric("m" * 3000, 1), "metric 'mmmm"),
    ("deep JSON", "fedavg", spoiling(nested), "not fedsub's wire format (RecursionError: "),
    ("a huge header", "fedavg", spoiling(lambda h, a: json.dumps(h) + " " * 10**7), "a header of more than "),
    ("a shape (2e9, 0)", "fedavg", shaped("fc1.bias", 2 * 10**9, 0), "tensor 'fc1.bias': shape (0,), expected (1000,)"),
    ("a shape (2e7, 0)", "fedavg", shaped("fc1.bias", 2 * 10**7, 0), "tensor 'fc1.bias': shape (0,), expected (1000,)"),
    ("a shape (0, 2e9, 2e9)", "fedavg", shaped("fc1.weight", 0, 2 * 10**9, 2 * 10**9), "tensor 'fc1.weight': shape (2"),
    ("no rows", "fedavg", shaped("fc1.bias", 0, 1000), "tensor 'fc1.bias': no row "),
    ("a million empty values", "fedpews", shaped("fc1.bias", 10**6, 0), "tensor 'fc1.bias': 1000000 rows, of which at"),
    ("a tensor twice", "fedavg", spoiling(twice), "not fedsub's wire format (ValueError: a part has two tensors"),
    ("1e30, finite", "fedavg", filled("fc1.weight", 1e30), "update of norm inf: more than max-update-norm = 100 times"),
    ("1e5", "fedavg", filled("fc1.weight", 1e5), "update of norm 2.53e+07: more than max-update-norm = 100 times"),
    ("1e30, at its positions", "fedpews", filled("fc1.bias", 1e30), "update of norm inf: more than"),
    ("1e5 in a slice", "ist", filled("fc1.weight", 1e5), "update of norm 9"),
    ("moments", "fedpart", filled("first/fc1.weight", 3e38), "first moments of norm inf: more than max-update-norm"),
    ("second moments", "fedpart", filled("second/fc1.weight", 3e38), "second moments of norm inf: more than max"),
    ("a variate", "scaffold", filled("variate/fc1.weight", 3e38), "tensor 'variate/fc1.weight': not the change of"),
    ("feature means", "fedpac", filled("fedpac/means", 1e30), "fedpac/means of norm inf: more than max-update-norm"),
    ("feature statistics", "fedpac", filled("fedpac/h", 1e30), "fedpac/h of norm inf: more than max-update-norm"),
    ("a feature variance", "fedpac", filled("fedpac/v", 1e30), "fedpac/v of norm 1e+30: more than max-update-norm"),
    ("class counts", "fedpac", filled("fedpac/counts", 1e6), "tensor 'fedpac/counts': counts of 1e+07 samples, num-ex"),
    (
        "many samples",
        "fedavg",
        parts(lambda part: part.update({"num-examples": 10**9})),
        "num-examples = 1000000000: mu",
    ),
    (
        "an error of 5 MB",
        "fedavg",
        parts(lambda part: part.update({"error": "x" * 5_000_000})),
        "a header of ",
    ),
    (
        "control characters",
        "fedavg",
        parts(lambda part: part.update({"error": "\x1b]0;owned\x07\r\n\u202e\ud800" + "x" * 999})),
        "client failed: ]0;owned xxxxx",
    ),
    ("an error that is a list", "fedavg", parts(lambda part: part.update({"error": [1, 2]})), "client failed: [1, 2]"),
    (
        "no header",
        "fedavg",
        lambda reply: [closed(reply, "null", {})],
        "not fedsub's wire format (AttributeError: ",
    ),
]


@pytest.mark.parametrize(("method", "spoil", "reason"), [row[1:] for row in HURT], ids=[row[0] for row in HURT])
def test_what_has_hurt_is_refused_by_name(
    method: str, spoil: Spoil, reason: str, scene: Callable[[str], Scene]
) -> None:
    said = reasons(check(scene(method), spoil))
    assert said.keys() == set(HOSTILE)
    for text in said.values():
        assert text.startswith(reason), text


@pytest.mark.parametrize("on", ["off", "on"])
def test_flops_of_a_network_that_the_server_cannot_count(on: str, scene: Callable[[str], Scene]) -> None:
    """As in a Flower app with max_examples: one claim ended the run; with ``robust`` it has no part in the record."""
    place = scene("fedavg")
    place = replace(place, settings=place.settings.model_copy(update={"robust": on}))
    place = replace(place, facts=replace(place.facts, sample_flops=math.inf))
    for value in (10**400, 1e308, math.inf):
        said = reasons(check(place, metric("flops", value)))
        assert all(text.startswith("metric 'flops' = ") for text in said.values())
        assert said.keys() == set(HOSTILE)
        assert all("1e+24" in drop["reason"] for drop in place.evaluated(metric("flops", value))["not-evaluated"])
    flops = check(place, metric("flops", 1e24)).phase.report["flops"]
    assert (flops < 2 * place.expected[0]["flops"]) == (on == "on")


def test_unasked_parts_are_never_decoded(scene: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    """300 of them refer to a megabyte of bits, which would be 2.4 GB."""
    unpacked: list[int] = []
    monkeypatch.setattr("numpy.unpackbits", lambda *arguments, **keys: unpacked.append(1))
    assert reasons(check(scene("fedavg"), spoiling(bombs))) == {}
    assert unpacked == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("global-accuracy", 100.0, "metric 'global-accuracy' was not asked for"),
        ("personal-accuracy", 100.0, "metric 'personal-accuracy' was not asked for"),
        ("round", 777, "metric 'round' was not asked for"),
        ("evaluate-seconds", -5, "metric 'evaluate-seconds' was not asked for"),
        ("global-local-accuracy", 100.5, "metric 'global-local-accuracy' = 100.5: must be a number from 0 to 100"),
        ("flops", 1e30, "metric 'flops' = 1e+30: must be a number from 0 to "),
    ],
)
def test_an_evaluation_says_what_was_asked(name: str, value: float, reason: str, scene: Callable[[str], Scene]) -> None:
    said = scene("fedavg").evaluated(metric(name, value))
    assert [found["client"] for found in said["not-evaluated"]] == list(HOSTILE)
    assert all(found["reason"].startswith(reason) for found in said["not-evaluated"])
    assert said["global-local-accuracy"] == scene("fedavg").evaluated(lambda reply: [])["global-local-accuracy"]


def test_an_evaluation_without_what_was_asked(scene: Callable[[str], Scene]) -> None:
    said = scene("fedavg").evaluated(parts(lambda part: part["metrics"].pop("global-local-accuracy")))
    assert {found["reason"] for found in said["not-evaluated"]} == {"metric 'global-local-accuracy' is missing"}


def test_what_the_server_measures_cannot_be_said(run_local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a method declared a metric of such a name."""
    _, folder = run_local("honest", num_rounds=1, evaluate="global,global-local")
    (start, honest) = rounds(folder)
    measured = [*honest, "seconds", "bytes-up", "merge-seconds", "evaluate-seconds"]
    measured = [key for key in measured if key not in ("train-loss", "flops", "subnet-flops", "published-flops")]
    asked = SubnetStrategy.metrics

    class Liar(METHODS["fedavg"].client):  # type: ignore[name-defined, misc]
        def run_training(self, sent: Tensors, config: Json) -> Update:
            update = super().run_training(sent, config)
            return replace(update, metrics=update.metrics | dict.fromkeys(measured, 777))

    def anything(self: SubnetStrategy, client: int) -> dict[str, Range]:
        return {**asked(self, client), **dict.fromkeys(measured, Range(0, 777))}

    monkeypatch.setattr(SubnetStrategy, "metrics", anything)
    monkeypatch.setitem(METHODS, "fedavg", replace(METHODS["fedavg"], client=Liar))
    _, folder = run_local("lied to", num_rounds=1, evaluate="global,global-local")
    assert rounds(folder) == [start, honest]
    assert 777 not in json.loads((folder / "rounds.jsonl").read_text().splitlines()[1]).values()


# --- and the next ones ----------------------------------------------------------------------------------------------

METHODS_THAT_DIFFER = ("fedavg", "fednova", "fedpews", "fedpart", "fedpac", "scaffold", "subfedavg", "fedselect", "ist")
VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 0.5, 777, 2**31, 2**63, 10**400, 1e9, 1e308, -1e308, math.nan, math.inf),
    *("", "0", "x" * 300, "\x1b[2J\x07", "\ud800", "fc1.weight", "0:fc1.weight", "train-loss", "client", "index"),
    *([], {}, [[]], [0], [0, 1, 2], [[0], [0]], {"client": 0}, {"client": 1}, [None] * 50),
)
SIZES = (-1, 0, 1, 2, 3, 2**31 - 1, 2 * 10**9, 2**62)
FILLS = (0.0, -0.0, 1e-40, 1.0, -1.0, 2.0, 100.0, 1e5, 1e30, -3e38, math.nan, math.inf, -math.inf)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64", "", "x" * 300)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@st.composite
def changes(draw: st.DrawFn) -> Spoil:
    """Some changes to a reply, of its JSON, its text and its arrays."""
    kinds = draw(st.lists(st.sampled_from(("set", "drop", "add", "text", "shape", "dtype", "data", "key")), max_size=3))
    steps = [
        (kind, draw(st.integers(0, 2**32)), draw(st.integers(0, 2**32)), draw(st.integers(0, 2**32))) for kind in kinds
    ]

    def spoil(reply: Message) -> list[Message]:
        header, arrays = opened(reply)
        text = ""
        for kind, *numbers in steps:
            text = change(kind, numbers, header, arrays) or text
        return [closed(reply, text or header, arrays)]

    spoil.__qualname__ = f"spoil {steps}"
    return spoil


def change(kind: str, numbers: list[int], header: Json, arrays: dict[str, Array]) -> str:
    """Make one change, in place; returns the text that stands for the JSON, if that is what is changed."""
    first, second, third = numbers
    if kind in ("set", "drop", "add") and (found := places(header)):
        # Any level alike: most places are deep in the index.
        depth = first % 4
        level = [place for place in found if _depth(header, place[0]) == depth] or found
        container, key = level[second % len(level)]
        value = copy.deepcopy(VALUES[third % len(VALUES)])
        if kind == "set":
            container[key] = value
        elif kind == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, container[key] if third % 2 else value)
        else:
            container[str(value)[:300]] = container[key] if third % 2 else value
    elif kind == "text":
        text = json.dumps(header)
        cut = second % len(text)
        return (text[:cut], text[:cut] + "[" * (third % 10**5) + text[cut:], text + text, "[" * 10**5)[first % 4]
    elif arrays and kind in ("shape", "dtype", "data", "key"):
        key = sorted(arrays)[first % len(arrays)]
        old = arrays[key]
        shape, data = list(old.shape), old.data
        if kind == "shape":
            size = SIZES[third % len(SIZES)]
            at = second % (len(shape) + 1)
            shape[at : at + third // 8 % 2] = [size] * (third // 16 % 3)
        elif kind == "dtype":
            arrays[key] = Array(DTYPES[second % len(DTYPES)], old.shape, (STYPE, "numpy")[third % 8 == 0], data)
            return ""
        elif kind == "data":
            count = len(data) // 4
            fill = torch.tensor([FILLS[third % len(FILLS)]]).numpy().tobytes()
            at = 4 * (third % max(1, count))
            data = (
                *(data[: second % (len(data) + 1)], data + data, fill * count, data[:at] + fill + data[at + 4 :]),
                *(data[::-1], bytes(len(data)), b"\xff" * len(data)),
            )[second % 7]
        else:
            name = key.partition(":")[2]
            arrays[(f"999:{name}", f"{key}x", "", ":", "x" * 300)[second % 5]] = arrays.pop(key) if third % 2 else old
            return ""
        arrays[key] = Array(old.dtype, tuple(shape), old.stype, data)
    return ""


def _depth(header: Any, container: Any) -> int:
    level, depth = [header], 0
    while level and not any(value is container for value in level):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        depth += 1
    return depth


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS_THAT_DIFFER), spoil=changes())
def test_whatever_one_node_answers_the_others_count(method: str, spoil: Spoil, scene: Callable[[str], Scene]) -> None:
    check(scene(method), spoil)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spoil=changes())
def test_whatever_one_node_answers_the_others_are_evaluated(spoil: Spoil, scene: Callable[[str], Scene]) -> None:
    honest = scene("fedavg").evaluated(lambda reply: [reply])
    said = scene("fedavg").evaluated(spoil)
    assert said.keys() <= honest.keys()
    assert set(HONEST) <= said["evaluated"].keys()
    assert said["evaluated"].keys() | {drop["client"] for drop in said["not-evaluated"]} == {*HONEST, *HOSTILE}
    assert all(said["evaluated"][client] == honest["evaluated"][client] for client in HONEST)
    assert len(json.dumps(said, allow_nan=False)) < 2 * len(json.dumps(honest)) + 1000


@settings(max_examples=100, deadline=None)
@given(spoil=changes())
def test_whatever_a_late_node_answers_to_the_roll_call(spoil: Spoil) -> None:
    def run(message: Message, context: Context) -> Message:
        reply = app(message=message, context=context)
        return spoil(reply)[0] if context.node_id == 3 else reply

    grid = LocalGrid(run, {}, 2)  # type: ignore[arg-type]
    late = grid.contexts.pop(3)
    federation = Federation(resolve({"min-nodes": 1}), {})
    federation.meet(grid)
    (first,) = federation.nodes.values()
    grid.contexts[3] = late
    federation.meet(grid)
    assert federation.nodes[2] == first
    assert all(0 <= node.partition_id < node.num_partitions == 2 for node in federation.nodes.values())
    assert len({node.partition_id for node in federation.nodes.values()}) == len(federation.nodes)
