"""A phase after the merge, on HeteroFL's static BatchNorm: its statistics are those of a pass over the clients' data.

Diao, Ding, Tarokh: HeteroFL, ICLR 2021, https://arxiv.org/abs/2010.01264, Section 3: no statistics are tracked in
training; afterwards the server asks the clients for them. Here each client averages over its mini-batches, and the
server over the clients by their samples.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message
from helpers import ends_as_if_never_stopped, merge_round, result
from safetensors.torch import load_file
from torch import nn

from client_apps.base import Client
from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import Answer, Federation
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import MEASURE, Spec, Update
from fedsub_app.federation.wire import pack, unpack
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.models import load_tensors
from fedsub_app.runs.config import resolve
from fedsub_app.runs.console import round_line
from fedsub_app.runs.loop import _is_measured
from fedsub_app.runs.methods import METHODS, Method
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import MethodSettings, Settings
from fedsub_app.training.workplace import Workplace, workplace
from strategies.base import SubnetStrategy
from strategies.measurement import Measurement
from strategies.rounds import check_defences

Run = Callable[..., tuple[Json, Path]]
STATISTICS = ("running_mean", "running_var")
KEYS: dict[str, Any] = {
    "method": "static-bn", "model": "lenet5-bn", "image-size": 32, "num-clients": 4, "clients-per-round": 2,
    "partition": "dirichlet", "train-per-class": 12, "test-per-class": 5, "num-rounds": 2, "batch-size": 8, "lr": 0.05,
    "device": "cpu",
}  # fmt: skip


class Statistics(Measurement):
    """Asks all clients for the statistics of the merged model's BatchNorm, in every round."""

    def clients(self) -> range:
        """Return all clients."""
        return range(self.settings.num_clients)

    def expected(self, client: int) -> Mapping[str, Spec]:
        """Expect the statistics alone."""
        return {name: spec for name, spec in self.specs.items() if name.endswith(STATISTICS)}

    def weight(self, update: Update) -> float:
        """Return the number of samples."""
        return update.num_examples


class StaticBatchNorm(SubnetStrategy):
    """FedAvg with static BatchNorm."""

    def __init__(self, settings: Settings, model: nn.Module) -> None:
        super().__init__(settings, model)
        self.measurement = Statistics(self)


def measured(network: nn.Module, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the means of the statistics of mini-batches of 8; the network is as it was afterwards."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = None  # a cumulative average
        layer.reset_running_stats()
    with torch.no_grad():
        for batch in x.split(8):
            network.train()(batch)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return ((name, t.clone()) for name, t in network.named_buffers() if name.endswith(STATISTICS))


class StaticBatchNormClient(Client):
    """Passes its training samples through the merged model."""

    def measure(self, sent: Tensors, config: Json) -> Tensors:
        """Return the statistics."""
        self.load(sent)
        self.flops += len(self.y) * self.place.forward_flops(self.network)
        return dict(measured(self.network.module, self.x))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "static-bn", Method("a test", MethodSettings, StaticBatchNorm, StaticBatchNormClient))


def keys(**more: Any) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in KEYS.items()} | more


def reference(place: Workplace, model: Tensors) -> Tensors:
    """The statistics over all clients, by samples."""
    load_tensors(place.network.module, model)
    every = [dict(measured(place.network.module, place.train_x[index])) for index in place.partition.train]
    sizes = torch.tensor([float(len(index)) for index in place.partition.train])
    return {name: (torch.stack([one[name] for one in every]).mT @ sizes) / sizes.sum() for name in every[0]}


def test_the_statistics_are_those_of_all_clients_data(run_local: Run) -> None:
    _, folder = run_local("static", **keys(num_rounds=1))
    _, other = run_local("fedavg", **keys(num_rounds=1, method="fedavg"))
    model, plain = (load_file(path / "model.safetensors") for path in (folder, other))
    expected = reference(workplace(resolve(KEYS)), model)
    assert len(expected) == 4
    for name, tensor in model.items():
        if name in expected:
            assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-6)
            assert not torch.allclose(tensor, plain[name])
        else:
            assert torch.equal(tensor, plain[name]), "what is not measured is as it was merged"
    line, without = read_rounds(folder)[1], read_rounds(other)[1]
    assert line["measurement"]["clients"] == [0, 1, 2, 3]
    assert line["measurement"]["dropped"] == []
    assert line["clients"] == without["clients"]
    statistics = sum(4 * tensor.numel() for tensor in expected.values())
    assert line["formula-bytes-up"] - without["formula-bytes-up"] == 4 * statistics
    assert line["formula-bytes-down"] == 3 * without["formula-bytes-down"], "two trained, four measured"
    place = workplace(resolve(KEYS))
    samples = sum(len(index) for index in place.partition.train)
    assert line["flops"] - without["flops"] == samples * place.forward_flops(place.network)


@pytest.mark.parametrize("start", ["nodes", "fork"])
def test_any_engine_gives_the_same_bits(start: str, run_local: Run) -> None:
    _, alone = run_local("alone", **keys())
    made: list[WorkerGrid] = []

    def grid(_: Any, overrides: Any) -> LocalGrid:
        if start == "nodes":
            return LocalGrid(app, overrides, 3)
        made.append(WorkerGrid("fedsub_app.client_app", overrides, 2, start))
        return made[0]

    _, folder = run_local(start, grid=grid, message_clients=1, **keys())
    for one in made:
        one.close()
    assert result(folder) == result(alone)


def test_resumed_it_ends_as_if_never_stopped(run_local: Run, tmp_path: Path) -> None:
    ends_as_if_never_stopped(run_local, tmp_path, keys(num_rounds=4, keep_checkpoints=0))


class Spoiled(LocalGrid):
    """Client 0 answers with a negative variance, client 1 with what was not asked; others fail."""

    silent: tuple[int, ...] = (2,)

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            (number,) = super().push_messages([message])
            ids.append(number)
            if message.metadata.message_type == MEASURE:
                self._spoil(self._replies[number])
        return ids

    def _spoil(self, reply: Message) -> None:
        header, parts = unpack(reply.content)
        for config, tensors in parts:
            name = next((name for name in tensors if name.endswith("running_var")), "")
            if config["client"] == 0:
                tensors[name] = tensors[name] - 99
            elif config["client"] == 1:
                tensors["fc1.weight"] = torch.zeros(1)
            elif config["client"] in self.silent:
                config["error"] = "no"
        reply.content = pack(header, parts)


def test_answers_are_checked_as_those_of_training(run_local: Run) -> None:
    _, folder = run_local(grid=Spoiled, **keys(num_rounds=1))
    report = read_rounds(folder)[1]["measurement"]
    reasons = {drop["client"]: drop["reason"] for drop in report["dropped"]}
    assert reasons.keys() == {0, 1, 2}
    assert reasons[0].startswith("tensor 'bn1.running_var': values -")
    assert reasons[1] == "tensor 'fc1.weight' was not asked for"
    assert reasons[2] == "client failed: no"
    assert report["partial"] == "1 of 4 replies"
    place = workplace(resolve(KEYS))
    model = load_file(folder / "model.safetensors")
    load_tensors(place.network.module, model)
    alone = dict(measured(place.network.module, place.train_x[place.partition.train[3]]))
    assert all(torch.equal(model[name], tensor) for name, tensor in alone.items())


def test_where_too_few_answer_the_merged_model_stays(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spoiled, "silent", (2, 3))
    _, folder = run_local("static", grid=Spoiled, **keys())
    _, other = run_local("fedavg", **keys(method="fedavg"))
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    for line in read_rounds(folder)[1:]:
        assert line["status"] == "ok"
        assert line["measurement"]["abandoned"] == "fewer than min-replies = 1 valid replies"
        said = round_line(line, resolve({}), resolve({}).score, 0.0)
        assert "  measurement ABANDONED: fewer than min-replies = 1 valid replies, the merged model stays  " in said
        assert "  measurement dropped client 2: client failed: no  and 1 more dropped" in said


def test_a_client_measures_with_the_state_of_its_last_merged_reply(
    run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, measure, states = Client.train, StaticBatchNormClient.measure, []

    def trained(client: Client, sent: Tensors, config: Json) -> Tensors:
        client.state = {"round": torch.tensor(float(client.round))}
        return train(client, sent, config)

    def with_state(client: StaticBatchNormClient, sent: Tensors, config: Json) -> Tensors:
        states.append((client.round, client.id, *(int(value) for value in client.state.values())))
        return measure(client, sent, config)

    monkeypatch.setattr(StaticBatchNormClient, "train", trained)
    monkeypatch.setattr(StaticBatchNormClient, "measure", with_state)
    _, folder = run_local(**keys())
    sampled = [line["clients"] for line in read_rounds(folder)[1:]]
    merged = {client: round_ for round_, clients in enumerate(sampled, 1) for client in clients}
    assert sorted(states)[-4:] == [(2, k, merged[k]) if k in merged else (2, k) for k in range(4)]


def test_nobody_is_asked_where_it_is_not_due(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statistics, "clients", lambda self: range(4) if self.round == 2 else ())
    _, folder = run_local(**keys(num_rounds=3, oversample=1.3))
    assert [("measurement" in line) for line in read_rounds(folder)[1:]] == [False, True, False]
    assert "not-waited-for" not in read_rounds(folder)[2]["measurement"]


def test_after_an_abandoned_round_the_model_that_is_left_is_measured(
    run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HeteroFL measures where an evaluation is due: of round 2, all of whose replies are lost, as of round 1."""
    answers, lines = Federation.answers, {}

    def losing(self: Federation, phase: Phase, *more: Any) -> Iterator[Answer]:
        header = phase.outbox.header
        for answer in answers(self, phase, *more):
            if (header["phase"], header["round"]) != ("train", 2):
                yield answer

    monkeypatch.setattr(Federation, "answers", losing)
    for every in (1, 2):
        _, folder = run_local(str(every), **keys(method="heterofl", eval_every=every))
        lines[every] = read_rounds(folder)[-1]
    assert [lines[every]["status"] for every in lines] == ["abandoned"] * 2
    assert "measurement" in lines[2]
    assert "measurement" not in lines[1]  # round 1 was measured
    assert lines[2]["global-loss"] == pytest.approx(lines[1]["global-loss"], rel=1e-4)  # other mini-batches


OK: Json = {"status": "ok"}
ABANDONED: Json = {"status": "abandoned"}
MEASURED: Json = {"measurement": {}}


@pytest.mark.parametrize(
    ("lines", "report", "is_measured"),
    [
        ([], {}, True),
        ([OK], {}, False),
        ([OK | MEASURED, ABANDONED], {}, True),
        ([OK, ABANDONED | MEASURED], {}, True),
        ([OK | {"measurement": {"abandoned": "no reply"}}], {}, False),
        ([OK, OK | MEASURED], {"back-to-round": 1}, False),
        ([OK, OK | MEASURED, ABANDONED | {"back-to-round": 1}], {}, False),
        ([OK | MEASURED, OK, ABANDONED | {"back-to-round": 1}], {}, True),
        ([OK, OK, ABANDONED | {"back-to-round": 1} | MEASURED], {}, True),
    ],
)
def test_the_model_that_is_left_may_be_an_earlier_one(lines: list[Json], report: Json, is_measured: bool) -> None:
    """An undone round's measurement is of another model."""
    run = SimpleNamespace(lines=[{"round": 0, **OK}, *({"round": n, **line} for n, line in enumerate(lines, 1))])
    run.last_round = len(lines)
    assert _is_measured(run, report) is is_measured  # type: ignore[arg-type]


def test_what_is_measured_is_neither_clipped_nor_scaled_by_server_lr() -> None:
    settings = resolve(KEYS | {"clip-norm": 0.001, "server-lr": 0.5})
    measurement: Any = StaticBatchNorm(settings, workplace(settings).network.module).measurement
    sent = {name: measurement.current[name] + 5 for name in measurement.expected(0)}
    merge_round(measurement, [Update(0, sent, {}, 1)])
    assert all(torch.equal(measurement.current[name], tensor) for name, tensor in sent.items())


def test_noise_is_refused() -> None:
    settings = resolve(KEYS | {"clip-norm": 1.0, "dp-noise-multiplier": 1.0})
    strategy = StaticBatchNorm(settings, workplace(settings).network.module)
    with pytest.raises(UserError, match="dp-noise-multiplier = 1: not with method = 'static-bn': no noise is in what"):
        check_defences(strategy)
