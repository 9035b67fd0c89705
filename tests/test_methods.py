"""What holds of every method: it asks without changing, any objective fits, and evaluating it changes nothing."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from helpers import METHOD_KEYS, ends_as_if_never_stopped, forget, merge_round, result, rounds
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from client_apps.base import Client
from fedsub_app.analysis.clients import client_of
from fedsub_app.client_app import app
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Epochs
from fedsub_app.common.tasks import Classification
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import Answer, Federation
from fedsub_app.federation.phase import Phase
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.federation.workers import WorkerGrid
from fedsub_app.models import build_model
from fedsub_app.reports.records import read_run
from fedsub_app.runs.config import register, resolve
from fedsub_app.runs.methods import METHODS, Method
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import MethodSettings
from fedsub_app.training.client import Training
from fedsub_app.training.local import evaluate, evaluation_batches
from fedsub_app.training.objectives import Moon, Objective
from fedsub_app.training.workplace import workplace
from strategies.base import Merged, SubnetStrategy
from strategies.ist import IST
from strategies.memory import flattened

Run = Callable[..., tuple[Json, Path]]
Shared = Callable[..., Path]
# Large enough that FedPeWS leaves units out of the computation, small enough for a second a run.
CNN: dict[str, Any] = {"model": "fedpews-cnn", "train_per_class": 10, "test_per_class": 5, "batch_size": 32}
TASK = Classification()
# A whole run of every method, which several tests share.
WHOLE: dict[str, Any] = {"num_clients": 4, "clients_per_round": 3, "partition": "dirichlet"}
WHOLE |= {"train_per_class": 20, "test_per_class": 8, "evaluate": "global,global-local,personal"}


def model_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def made(method: str, **changes: Any) -> tuple[SubnetStrategy, Callable[[int, int, Tensors], Client]]:
    """A method's strategy, and its client of a number, round and state."""
    keys = {"model": "feature-mlp", "method": method, "num_clients": 3, "partition": "iid", "train_per_class": 20}
    keys |= METHOD_KEYS.get(method, {}) | changes
    place = workplace(resolve({key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}))
    entry = METHODS[method]
    strategy = entry.strategy(place.settings, place.network.module)
    return strategy, lambda client, number, state: entry.client(place, client, number, state)


def play(strategy: SubnetStrategy, client: Callable[[int, int, Tensors], Client], rounds: int) -> list[Update]:
    """Play rounds with all clients; returns the updates of a further one."""
    states: list[Tensors] = [{}, {}, {}]
    for number in range(1, rounds + 2):
        strategy.round = number
        updates = []
        for c in range(3):
            task = strategy.task(c)
            worker = client(c, number, states[c])
            updates.append(worker.run_training(dict(task.tensors), task.config))
            states[c] = worker.state
        if number <= rounds:
            merge_round(strategy, updates)
    return updates


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_a_strategy_that_is_asked_does_not_change(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks, specs, contributions and outcomes twice: the same answers, and the state is as it was."""
    strategy, client = made(method)
    updates = play(strategy, client, rounds=2)
    before = {name: tensor.clone() for name, tensor in strategy.state().items()}
    model = {name: tensor.clone() for name, tensor in strategy.current.items()}
    for update in updates:
        first, second = (strategy.task(update.client) for _ in range(2))
        assert first.config == second.config
        assert same(first.tensors, second.tensors)
        assert strategy.expected(update.client) == strategy.expected(update.client)
        once, again = (strategy.contribution(update) for _ in range(2))
        assert same(dict(once.tensors), dict(again.tensors))
        assert same(dict(once.masks or {}), dict(again.masks or {}))
        assert once.weight == again.weight
        assert same(strategy.personal_download(update.client), strategy.personal_download(update.client))
    outcomes: list[Merged] = []
    monkeypatch.setattr(strategy, "commit", lambda merged, _: outcomes.append(merged))  # the round is abandoned
    for _ in range(2):
        merge_round(strategy, updates)
    assert same(outcomes[0].model, outcomes[1].model)
    assert same(flattened(outcomes[0].state), flattened(outcomes[1].state))
    assert same(strategy.state(), before)
    assert same(strategy.current, model)


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_values_are_any_or_from_0_or_from_0_to_1(method: str) -> None:
    """Variances, norms, counts and probabilities; steps are whole numbers from 1 on."""
    strategy, _ = made(method)
    for strategy.round in (1, 2, 3):
        for spec in strategy.expected(0).values():
            steps = spec.dtype == torch.int64
            assert steps or (spec.low, spec.high) in {(-math.inf, math.inf), (0, math.inf), (0, 1)}
            assert not steps or spec.low == 1


OBJECTIVES = [
    (method, objective, objective in METHODS[method].settings.objectives)
    for method in METHOD_KEYS
    for objective in ("prox", "moon")
    if not METHODS[method].preset
]


@pytest.mark.parametrize(("method", "objective"), [(method, name) for method, name, fits in OBJECTIVES if not fits])
def test_an_objective_that_does_not_fit_is_refused(method: str, objective: str) -> None:
    with pytest.raises(UserError, match=f"^objective = '{objective}': must be .* with method = '{method}'$"):
        resolve({"method": method, "objective": objective})


@pytest.mark.parametrize(("method", "objective"), [(method, name) for method, name, fits in OBJECTIVES if fits])
def test_any_method_takes_any_other_objective(method: str, objective: str, run_local: Run, shared_run: Shared) -> None:
    """On a network whose units FedPeWS cuts out (B1, B8); the term changes what is trained."""
    keys = CNN | METHOD_KEYS[method] | {"method": method, "evaluate": "personal", "eval_every": 3}
    _, changed = run_local(**keys, objective=objective, prox_mu=1.0, moon_mu=5.0)
    lines = [read_rounds(folder)[-1] for folder in (shared_run(**keys), changed)]
    assert lines[1]["dropped"] == []
    assert lines[0]["train-loss"] != lines[1]["train-loss"]


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_what_is_evaluated_changes_nothing(method: str, run_local: Run, shared_run: Shared) -> None:
    """B2: the model and each accuracy are the same whichever others are measured beside it."""
    keys = WHOLE | METHOD_KEYS[method] | {"method": method}
    folder = shared_run(**keys)
    lines = read_rounds(folder)
    for wanted in keys["evaluate"].split(","):
        _, one = run_local(wanted, **keys | {"evaluate": wanted})
        assert same(model_of(one), model_of(folder)), wanted
        for line, alone in zip([line for line in lines if line["round"]], read_rounds(one)[-3:], strict=True):
            assert alone[f"{wanted}-accuracy"] == line[f"{wanted}-accuracy"]
            assert alone["train-loss"] == line["train-loss"]


@pytest.mark.parametrize("method", [name for name in METHOD_KEYS if METHODS[name].strategy is not IST])
def test_a_lost_reply_is_as_if_the_client_had_not_been_asked(
    method: str, run_local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply is lost in each round. Model, server and clients go on as where these clients were not sampled.

    IST is left out: it deals its units to the clients that are sampled.
    """
    lost = {(1, 0), (2, 1), (3, 2)}
    answers, sample = Federation.answers, Federation.sample

    def losing(self: Federation, phase: Phase, *more: Any) -> Iterator[Answer]:
        header = phase.outbox.header
        for answer in answers(self, phase, *more):
            if header["phase"] != "train" or (header["round"], answer[0]) not in lost:
                yield answer

    def without(self: Federation, server_round: int) -> list[int]:
        return [client for client in sample(self, server_round) if (server_round, client) not in lost]

    keys = METHOD_KEYS[method] | {"num_clients": 3, "num_rounds": 4, "evaluate": "global,personal", "method": method}
    keys |= {"partition": "dirichlet", "train_per_class": 40}
    results = []
    for name, instead in (("answers", losing), ("sample", without)):
        with monkeypatch.context() as patch:
            patch.setattr(Federation, name, instead)
            _, folder = run_local(name, **keys)
        found = result(folder)
        measured = [{k: v for k, v in line.items() if "accuracy" in k or "loss" in k} for line in found["rounds"]]
        results.append((found["model"], found["last checkpoint"], measured))
        assert read_rounds(folder)[-1]["clients"] == [0, 1, 2]
    assert results[0] == results[1]


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_the_number_of_nodes_does_not_matter(method: str, run_local: Run, shared_run: Shared) -> None:
    """Two simulated nodes in processes of their own, three that keep their clients, and one: the same bits."""
    keys = WHOLE | METHOD_KEYS[method] | {"method": method}
    alone = shared_run(**keys)
    made: list[WorkerGrid] = []

    def workers(_: Any, overrides: Any) -> WorkerGrid:
        made.append(WorkerGrid("fedsub_app.client_app", overrides, 2, "fork"))
        return made[-1]

    try:
        for grid, placement, clients in ((workers, "auto", 2), (partial(LocalGrid, num_nodes=3), "pinned", 128)):
            _, folder = run_local(placement, grid=grid, **keys, placement=placement, message_clients=clients)
            assert result(folder) == result(alone)
    finally:
        made[0].close()


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_flowers_own_loop_gives_our_model(method: str, shared_run: Shared, tmp_path: Path) -> None:
    """``strategy.start`` of stock Flower instead of our loop."""
    folder = shared_run(**WHOLE | METHOD_KEYS[method] | {"method": method})
    settings = resolve(json.loads((folder / "settings.json").read_text())["settings"])
    dataset = load_dataset(settings.data)
    model = build_model(settings.model, tuple(dataset.train_x.shape[1:]), dataset.num_classes, settings.seed)
    header = {"run": "flowers", "state-dir": str(tmp_path / "state")}
    strategy = METHODS[method].strategy(settings, model)
    strategy.connect(Federation(settings, header, settings.flat()))
    grid = LocalGrid(app, settings.flat(), 2)
    found = strategy.start(grid, initial_arrays=to_arrays(strategy.current), num_rounds=settings.num_rounds)
    assert same(to_tensors(found.arrays), model_of(folder))
    for line in rounds(folder)[1:]:
        assert found.train_metrics_clientapp[line["round"]]["train-loss"] == line["train-loss"]
        measured = found.evaluate_metrics_clientapp[line["round"]]
        assert all(measured[key] == line[key] for key in ("global-local-accuracy", "personal-accuracy"))


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_a_clients_own_model_is_the_one_that_was_measured(method: str, shared_run: Shared) -> None:
    folder = shared_run(**WHOLE | METHOD_KEYS[method] | {"method": method})
    measured = read_run(folder).measured
    assert len(measured) == 4
    for client in measured:
        own = client_of(folder, int(client))
        assert own.score("test") == pytest.approx(measured[client]["personal-accuracy"], abs=1e-4)
        own.load(model_of(folder))
        assert own.score("test") == pytest.approx(measured[client]["global-local-accuracy"], abs=1e-4)


@pytest.mark.parametrize("method", METHOD_KEYS)
def test_resumed_in_the_middle_it_ends_as_if_never_stopped(method: str, run_local: Run, tmp_path: Path) -> None:
    keys = WHOLE | METHOD_KEYS[method] | {"method": method, "num_rounds": 4, "keep_checkpoints": 0}
    ends_as_if_never_stopped(run_local, tmp_path, keys)


# --- the bound on FLOPs counts the method's own passes ----------------------------------------------------------------


class ManyPassesSettings(MethodSettings):
    """A key that counts epochs and is not named so."""

    passes: Epochs = 40


class ManyPassesClient(Client):
    options: ManyPassesSettings

    def train(self, sent: Tensors, config: Json) -> Tensors:
        self.load(sent)
        self.fit(epochs=self.options.passes)
        return self.trained()


def test_a_client_that_trains_by_a_key_of_any_name_is_not_dropped(
    run_local: Run, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(forget, "many-passes"))
    register("many-passes", Method("a test", ManyPassesSettings, SubnetStrategy, ManyPassesClient))
    _, folder = run_local(method="many-passes", num_rounds=1, train_per_class=20)
    assert read_rounds(folder)[-1]["dropped"] == []


def test_two_trainings_with_moon_of_the_last_layers_are_not_too_many_flops(run_local: Run) -> None:
    """Of a step almost nothing is the backward pass, and MOON adds two forward passes."""
    keys: dict[str, Any] = {"model": "lenet5", "image_size": 28, "trainable": "fc2, fc3", "local_epochs": 4}
    keys |= {"num_clients": 2, "train_per_class": 10, "num_rounds": 2}
    _, folder = run_local(method="fedselect", objective="moon", **keys)
    assert read_rounds(folder)[-1]["dropped"] == []


EPOCH_KEYS = [
    (method, name)
    for method, entry in METHODS.items()
    for name, kind in get_type_hints(entry.settings, include_extras=True).items()
    if kind == Epochs
]


@pytest.mark.parametrize(("method", "key"), EPOCH_KEYS)
def test_a_client_may_spend_the_epochs_of_every_key_of_its_method(method: str, key: str) -> None:
    """Its bound on FLOPs grows by as many passes as the key does."""
    none, seven = (made(method, **{f"{method}__{key}": epochs})[0] for epochs in (0, 7))
    assert seven.max_samples(0) == none.max_samples(0) + 7 * none.max_examples(0)


def test_keys_that_count_epochs_are_found_by_their_type() -> None:
    expected = {"fedavg-ft": 1, "fedrep": 2, "fedbabu": 1, "fedpac": 1}
    assert Counter(method for method, _ in EPOCH_KEYS if method in expected) == expected


# --- LG-FedAvg's warm-up (B3) -----------------------------------------------------------------------------------------


def test_a_client_that_failed_gets_the_warm_model_later() -> None:
    strategy, client = made("lg-fedavg", **{"lg-fedavg__warm_rounds": 1})
    for number, answers in ((1, (0, 1, 2)), (2, (0, 1)), (3, (0, 1, 2))):  # client 2 fails in round 2
        strategy.round = number
        tasks = {c: strategy.task(c) for c in range(3)}
        assert len(tasks[2].tensors) == len(strategy.current)  # still the whole model in round 3
        updates = [client(c, number, {}).run_training(dict(tasks[c].tensors), tasks[c].config) for c in answers]
        merge_round(strategy, updates, asked=range(3))
    strategy.round = 4
    assert len(strategy.task(2).tensors) < len(strategy.current)


def test_the_personal_model_of_a_client_without_a_body_is_the_warm_one() -> None:
    strategy, client = made("lg-fedavg", **{"lg-fedavg__warm_rounds": 5})
    strategy.round = 3
    strategy.current = {name: tensor + 1 for name, tensor in strategy.current.items()}
    sent = strategy.personal_download(2)
    assert same(client(2, 3, {}).personal(dict(sent), {}), strategy.current)
    old_body = {f"own/{name}": tensor - 1 for name, tensor in strategy.current.items()}
    assert same(client(2, 3, old_body).personal(dict(sent), {}), strategy.current)


# --- what training counts and keeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_are_counted_with_every_optimizer(optimizer: str) -> None:
    """B4."""
    _, client = made("fedavg", optimizer=optimizer, batch_size=8, local_epochs=2)
    worker = client(0, 1, {})
    worker.load(worker.initial())
    training = worker.fit()
    assert training.steps == 2 * -(-len(worker.y) // 8)
    assert training.samples == 2 * len(worker.y)
    assert [int(steps) for steps in training.optimizer.steps.values()] == [training.steps] * (
        len(training.optimizer.parameters) if optimizer == "adam" else 0
    )


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHOD_KEYS),
        ("fedpart", {"objective": "moon"}),
        ("fedpews", {"objective": "moon"}),
        ("fedpews", {"fedpews__mask_gradient": "activations"}),
    ],
)
def test_the_flops_that_a_client_counts_are_those_that_torch_executes(
    method: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds: warm-ups, frozen layers, the masks' gradients without the weights', MOON's two forward passes."""
    strategy, client = made(method, **changes)
    monkeypatch.setattr("client_apps.fedpews.subnet_flops", lambda *_: 1)  # it runs the network to count
    state: Tensors = {}
    for number in (1, 2, 3):
        strategy.round = number
        task = strategy.task(0)
        client(0, number, dict(state)).run_training(dict(task.tensors), task.config)  # what is counted once is cached
        worker = client(0, number, state)
        with FlopCounterMode(display=False) as counter:
            update = worker.run_training(dict(task.tensors), task.config)
        state = worker.state
        executed = counter.get_total_flops()
        if (
            method == "fedpac"
        ):  # class means, twice, as a product of one-hot labels and features: no pass of the network
            executed -= 2 * 2 * len(worker.y) * 10 * 1000
        assert update.metrics["flops"] == executed
        merge_round(strategy, [update], asked=[0])


def test_a_tensor_that_there_is_not_cannot_be_trained() -> None:
    """Nothing would be trained, without a message."""
    _, client = made("fedavg")
    worker = client(0, 1, {})
    worker.load(worker.initial())
    with pytest.raises(ValueError, match=r"^no tensor 'head\.weight' to train in the network$"):
        worker.fit(["head.weight"])


def test_a_training_that_goes_on_counts_its_samples_once() -> None:
    strategy, client = made("fedavg")
    worker = client(0, 1, {})
    worker.load(strategy.current)
    training = worker.fit(epochs=1)
    flops, published = worker.flops, worker.published_flops
    training.run(worker.batches(1))
    assert (worker.flops, worker.published_flops) == (2 * flops, 2 * published)


def test_every_pass_is_in_the_flops() -> None:
    """B5: FedPAC's two passes for its features, and fine-tuning for an evaluation."""
    strategy, client = made("fedpac", local_epochs=0, **{"fedpac__head-epochs": 0})
    task = strategy.task(0)
    worker = client(0, 1, {})
    update = worker.run_training(dict(task.tensors), task.config)
    forward = worker.place.forward_flops(worker.network)
    assert update.metrics["flops"] == 2 * len(worker.y) * forward > 0
    assert strategy.max_samples(0) == strategy.max_examples(0), "one pass that no key counts"
    _, client = made("fedavg-ft", **{"fedavg-ft__tune-epochs": 3})
    worker = client(0, 1, {})
    update = worker.run_evaluation(worker.initial(), {}, ["personal"])
    assert update.metrics["flops"] == 3 * len(worker.y) * worker.place.training_flops(worker.network)
    _, client = made("fedavg")
    assert "flops" not in client(0, 1, {}).run_evaluation(worker.initial(), {}, ["personal"]).metrics


def test_tuning_flops_are_in_the_line(run_local: Run) -> None:
    _, folder = run_local(method="fedbabu", evaluate="personal", eval_every=2)
    assert ["evaluate-flops" in line for line in read_rounds(folder)] == [False, True, True]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    """The previous models that MOON is given, in the order of the trainings."""
    found: list[Tensors] = []
    start = Moon.__init__

    def watch(self: Moon, received: Tensors, previous: Tensors, mu: float, temperature: float) -> None:
        found.append(previous)
        start(self, received, previous, mu, temperature)

    monkeypatch.setattr(Moon, "__init__", watch)
    return found


def test_dittos_moon_compares_with_the_global_side(others: list[Tensors]) -> None:
    """B6: z_p is the model that the client trained from the global one last, not its personal model."""
    strategy, client = made("ditto", objective="moon")
    state: Tensors = {}
    for number in (1, 2):
        strategy.round = number
        task = strategy.task(0)
        worker = client(0, number, state)
        update = worker.run_training(dict(task.tensors), task.config)
        if number == 1:
            answered, state = update.tensors, worker.state
    assert len(others) == 2  # the personal model is trained without MOON's term
    assert same({n: t.detach() for n, t in others[1].items()}, answered)
    assert not same(worker.own, answered)


def test_moons_previous_model_is_the_last_rounds_where_a_round_trains_twice(others: list[Tensors]) -> None:
    """FedRep's second training must not compare with what its first one has just made."""
    strategy, client = made("fedrep", objective="moon")
    task = strategy.task(0)
    worker = client(0, 1, {})
    worker.run_training(dict(task.tensors), task.config)
    trained = worker.trained()
    others.clear()
    client(0, 2, worker.state).run_training(dict(task.tensors), task.config)
    assert len(others) == 2
    for previous in others:
        assert same({name: tensor.detach() for name, tensor in previous.items()}, trained)


def test_tuning_is_without_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """B6: FedAvg-FT and FedBABU fine-tune on the loss alone."""
    seen: list[type[Objective]] = []
    run = Training.run

    def watch(self: Training, batches: Any) -> None:
        seen.append(type(self.objective))
        run(self, batches)

    monkeypatch.setattr(Training, "run", watch)
    for method in ("fedavg-ft", "fedbabu"):
        strategy, client = made(method, objective="moon")
        client(0, 1, {}).run_evaluation(dict(strategy.personal_download(0)), {}, ["personal"])
    assert seen == [Objective, Objective]


def test_score_of_a_split_is_that_of_an_evaluation() -> None:
    _, client = made("fedavg", validation_fraction=0.3)
    worker = client(0, 1, {})
    worker.load(worker.initial())
    for split in ("train", "validation", "test"):
        x, y = worker.samples(split)  # type: ignore[arg-type]
        assert worker.score(split) == evaluate(TASK, worker.network.module, x, y)["accuracy"]  # type: ignore[arg-type]


def test_no_evaluation_batch_is_of_one_sample_of_many() -> None:
    """IST's network has the statistics of the batch in evaluation as well; one sample has none."""
    counts = (1, 2, 512, 513, 7169, 512 * 511 + 1)
    first = [evaluation_batches(torch.nn.Flatten(), count, torch.device("cpu"))[0] for count in counts]
    assert first == [slice(0, size) for size in (1, 512, 512, 511, 511, 510)]
    network = build_model("feature-mlp", (8,), 3, 0)
    found = evaluate(TASK, network, torch.randn(513, 8), torch.zeros(513, dtype=torch.int64))
    assert 0 <= found["accuracy"] <= 100
    assert found["loss"] > 0


def test_the_order_of_samples_is_nothing_to_batch_statistics() -> None:
    """Image files are read class by class: on batches of one class such a network would be lost."""
    data = load_dataset(resolve({"dataset": "digits"}).data)
    torch.manual_seed(0)
    network = build_model("feature-mlp", data.train_x.shape[1:], 10, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(10):
        for batch in torch.randperm(len(data.train_y)).split(64):
            optimizer.zero_grad()
            cross_entropy(network(data.train_x[batch]), data.train_y[batch]).backward()
            optimizer.step()
    by_class = torch.cat([(data.train_y == label).nonzero().flatten() for label in range(10)])
    x, y = data.train_x[by_class], data.train_y[by_class]
    assert evaluate(TASK, network, x, y)["accuracy"] > 97
    network.eval()
    lost = sum(int((network(x[part]).argmax(1) == y[part]).sum()) for part in torch.arange(len(y)).split(100))
    assert 100 * lost / len(y) < 70  # what is measured without


def test_outputs_are_in_the_order_of_the_samples() -> None:
    _, client = made("fedavg", partition="iid", num_clients=1, train_per_class=60)  # 600 samples: two batches
    worker = client(0, 1, {})
    worker.load(worker.initial())
    batches = evaluation_batches(worker.network.module, len(worker.y), worker.x.device)
    assert len(batches) == 2
    logits = worker.outputs().logits
    for batch in batches:
        assert torch.equal(logits[batch], worker.network.module.eval()(worker.x[batch]))


def test_a_batch_of_one_sample_is_refused_with_batchnorm() -> None:
    with pytest.raises(UserError, match="batch-size = 1: BatchNorm needs at least 2 samples in a mini-batch"):
        made("fedavg", model="feature-mlp", batch_size=1)
    made("fedavg", model="fedpews-mlp", batch_size=1)
