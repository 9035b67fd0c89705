"""One client of eight answers within all checks, and with ``robust`` the run's numbers stay those of the others.

Each attack ended or falsified a run before ``robust``. Client 3 attacks; its training is honest, its answer is not.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ConfigRecord, Message
from helpers import METHOD_KEYS, rounds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_hostile import METHODS_THAT_DIFFER, Scene, closed, opened, scene, spoiling  # noqa: F401  (a fixture)
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.federation.wire import STYPE, read_update
from fedsub_app.models.groups import split
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.bounds import FLOOR, Size, remembered, size, usual, within
from fedsub_app.subnets.masks import expand, gather
from fedsub_app.subnets.norms import NormGuard
from fedsub_app.training.workplace import workplace
from strategies import direction
from strategies.bounding import parts
from strategies.direction import AGREEMENT, agreeing, agreement
from strategies.harm import LOSS, SUSPECTED, far_worse
from strategies.merging import Valid
from strategies.rounds import check_defences, kept_rounds

Attack = Callable[[Any, Tensors, Update], Update]  # the hostile client, what it was sent, its honest answer
KEYS: dict[str, Value] = {"num_clients": 8, "num_rounds": 8, "batch_size": 16, "partition": "iid", "robust": "on"}
HOSTILE = 3


def hostile(monkeypatch: pytest.MonkeyPatch, method: str, attack: Attack, clients: Sequence[int] = (HOSTILE,)) -> None:
    """Register a client of ``method`` that attacks."""

    class Hostile(METHODS[method].client):  # type: ignore[name-defined, misc]
        def run_training(self, sent: Tensors, config: Json) -> Update:
            update = super().run_training(sent, config)
            return attack(self, sent, update) if self.id in clients else update

    monkeypatch.setitem(METHODS, method, replace(METHODS[method], client=Hostile))


# --- attacks ----------------------------------------------------------------------------------------------------------


def changed(update: Update, **tensors: Tensor) -> Update:
    return replace(update, tensors=update.tensors | tensors)


def model_of(sent: Tensors, update: Update) -> Tensors:
    """The tensors of the model that were sent and answered whole."""
    return {n: sent[n] for n, x in update.tensors.items() if n in sent and sent[n].shape == x.shape and "/" not in n}


def times(factor: float) -> Attack:
    """The change of the model, times a factor."""
    return lambda client, sent, update: changed(
        update, **{n: x + factor * (update.tensors[n] - x) for n, x in model_of(sent, update).items()}
    )


def length(sent: Tensors, update: Update) -> float:
    return math.hypot(*(float((update.tensors[n] - x).norm()) for n, x in model_of(sent, update).items()))


def along_the_weights(factor: float) -> Attack:
    """A change ``factor`` times as long as the honest one, along the weights themselves."""

    def attack(client: Any, sent: Tensors, update: Update) -> Update:
        model = model_of(sent, update)
        whole = math.hypot(*(float(x.norm()) for x in model.values()))
        return changed(update, **{n: x * (1 + factor * length(sent, update) / whole) for n, x in model.items()})

    return attack


def one_bias(factor: float) -> Attack:
    """All the length in one position of the output bias, which all clients contribute to."""

    def attack(client: Any, sent: Tensors, update: Update) -> Update:
        bias = update.tensors["fc2.bias"].clone()
        bias[0] += factor * length(sent, update)
        return changed(update, **model_of(sent, update) | {"fc2.bias": bias})

    return attack


def in_round(number: int, attack: Attack) -> Attack:
    return lambda client, sent, update: attack(client, sent, update) if client.round == number else update


def tensors(change: Callable[[Tensor], Tensor], *names: str) -> Attack:
    return lambda client, sent, update: changed(
        update, **{n: change(x) for n, x in update.tensors.items() if not names or n in names}
    )


def saying(**metrics: float) -> Attack:
    known = {name.replace("_", "-"): value for name, value in metrics.items()}
    return lambda client, sent, update: replace(update, metrics=update.metrics | known)


def variate(factor: float) -> Attack:
    return lambda client, sent, update: changed(
        update, **{n: factor * x for n, x in update.tensors.items() if n.startswith("variate/")}
    )


def both(*attacks: Attack) -> Attack:
    def attack(client: Any, sent: Tensors, update: Update) -> Update:
        for one in attacks:
            update = one(client, sent, update)
        return update

    return attack


def prunes_nothing(client: Any, sent: Tensors, update: Update) -> Update:
    """All positions, also those that the others prune, with noise of the values' size."""
    draws = torch.Generator().manual_seed(client.round)
    noisy = {}
    for name, x in update.tensors.items():
        if not name.startswith("mask/"):
            noise = 0.3 * sent[name].std() * torch.randn(sent[name].shape, generator=draws)
            noisy[name] = (sent[name] + noise).reshape(-1 if x.dim() == 1 else x.shape)
    return replace(update, tensors=noisy)


def no_mask(client: Any, sent: Tensors, update: Update) -> Update:
    """A mask of nothing, and the few values that all clients have."""
    mask = torch.zeros_like(update.tensors["fedpews/mask"])
    shapes = {name: tensor.shape for name, tensor in client.network.tensors.items()}
    kept = expand(client.network.units, split(mask, client.network.units), shapes)
    values = gather({name: sent[name] for name in shapes}, kept)
    return changed(update, mask=mask, **values)


# --- the attacks that were found --------------------------------------------------------------------------------------

PEWS: dict[str, Value] = {"fedpews__warmup_rounds": 8, "fedpews__others": "highest"}
PRUNED = METHOD_KEYS["subfedavg"]
OWN: dict[str, Value] = {"evaluate": "personal"}
# Method, attack, further keys, points of accuracy that it may cost. The attacker is in the mean of personal accuracies.
FOUND: dict[str, tuple[str, Attack, Mapping[str, Value], float]] = {
    "weights along themselves": ("fedavg", along_the_weights(95), {}, 3),
    "change x -20": ("fedavg", times(-20), {}, 5),
    "change x -60 in the last round": ("fedavg", in_round(8, times(-60)), {}, 5),
    "a variate of its own": ("scaffold", variate(-95), {}, 3),
    "a variate of its own, once": ("scaffold", in_round(2, variate(-95)), {}, 3),
    "a variate that its model implies": ("scaffold", in_round(1, both(times(-95), variate(-95))), {}, 3),
    "its change x -9, divided by its steps": ("fednova", times(-9), {}, 3),
    "one bias": ("fedavg", one_bias(4), {}, 5),
    "one bias, masks": ("fedpews", one_bias(4), PEWS, 5),
    "one bias, personal positions": ("fedselect", one_bias(4), OWN, 14),
    "FedRep x -95": ("fedrep", times(-95), OWN, 14),
    "LG-FedAvg x -95": ("lg-fedavg", times(-95), OWN, 14),
    "no variance": ("fedpac", tensors(torch.zeros_like, "fedpac/v"), OWN, 3),
    "means x 90": ("fedpac", tensors(lambda x: 90 * x, "fedpac/means"), OWN, 14),
    "probabilities of 1": ("fedpews", tensors(torch.ones_like, "fedpews/theta"), PEWS, 3),
    "a mask of nothing": ("fedpews", no_mask, PEWS, 3),
    "prunes nothing": ("subfedavg", prunes_nothing, PRUNED | OWN | {"min_contributors": 2}, 14),
    "slices of zeros": ("ist", tensors(torch.zeros_like), {}, 3),
    "one answer x 95": ("fedadagrad", in_round(2, times(95)), {}, 3),
    "two clients": ("fedavg", times(-95), {"num_clients": 2}, 5),
    "one of two": ("fedavg", times(-95), {"num_clients": 2, "clients_per_round": 1}, 20),
}


SLOW = ("fedpews", "fedselect", "subfedavg", "fedrep", "fedpac")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (row[0] in SLOW)) for name, row in FOUND.items()]
)
def test_the_numbers_stay_those_of_the_others(
    name: str, run_local: Callable[..., Any], shared_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, attack, more, costs = FOUND[name]
    keys = KEYS | {"method": method} | more
    key = "final-personal-accuracy" if "evaluate" in keys else "final-global-accuracy"
    honest = rounds(shared_run(**keys))[-1][key.removeprefix("final-")]
    hostile(monkeypatch, method, attack, [HOSTILE % int(str(keys["num_clients"]))])
    summary, folder = run_local(**keys)
    assert summary[key] >= honest - costs
    dropped = {drop["client"] for line in rounds(folder) for drop in line.get("dropped", ())}
    assert dropped <= {HOSTILE % int(str(keys["num_clients"]))}, "no honest client is dropped"


def test_four_of_forty_do_not_decide_the_median() -> None:
    """The first eight, compared alone, were half hostile."""
    norms = [1e6 if client < 4 else 1.0 for client in range(40)]
    guard = NormGuard[int](5, 1.0, math.inf)
    assert not any(guard.add(client, {"update": norm}) for client, norm in enumerate(norms))
    assert [client for client, reason in guard.rest() if reason] == [0, 1, 2, 3]


def test_half_of_a_round_does_not_decide() -> None:
    guard = NormGuard[int](5, 1.0, math.inf)
    for client in range(8):
        guard.add(client, {"update": 1.0 if client % 2 else 100.0})
    assert [client for client, reason in guard.rest() if reason] == [0, 2, 4, 6]


def test_what_a_client_says_of_itself_moves_no_mean(
    run_local: Callable[..., Any], shared_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KEYS | {"method": "fedavg", "num_rounds": 2}
    honest = rounds(shared_run(**keys))[-1]
    flops = honest["flops"] / 8
    hostile(monkeypatch, "fedavg", saying(train_loss=9_999, flops=4 * flops))
    _, folder = run_local(**keys)
    line = rounds(folder)[-1]
    assert line["train-loss"] == pytest.approx(honest["train-loss"], rel=0.2)
    assert line["flops"] <= 1.07 * honest["flops"]
    hostile(monkeypatch, "fedavg", lambda client, sent, update: replace(update, num_examples=1))
    _, folder = run_local("few", **keys)
    (drop,) = rounds(folder)[-1]["dropped"]
    assert re.fullmatch(r"num-examples = 1: must be 1[78]\d", drop["reason"])


def test_the_norms_of_a_round_are_those_of_the_updates(shared_run: Callable[..., Path]) -> None:
    """A client with more samples may go farther: its norm is compared divided, and stands in the line as it is."""
    keys = KEYS | {"method": "fedavg", "num_rounds": 1, "partition": "quantity", "dirichlet_alpha": 0.5}
    found = [rounds(shared_run(**keys | {"robust": robust}))[-1] for robust in ("off", "on")]
    assert found[1]["update-norm"] == found[0]["update-norm"]
    assert found[1]["largest-update-norm"] == found[0]["largest-update-norm"]


def test_min_contributors_keeps_what_one_client_alone_has(shared_run: Callable[..., Path]) -> None:
    similar: dict[str, Value] = {"fedpart.momentum": "similarity", "optimizer": "adam", "momentum": 0.0}
    rows = [("ist", {}), ("fedpews", {"fedpews.masks": "fixed"}), ("fedpac", {}), ("fedpart", similar)]
    for method, more in rows:
        found = resolve({"method": method, "min-contributors": 2, "model": "feature-mlp", **more})
        strategy = METHODS[method].strategy(found, workplace(found).network.module)
        with pytest.raises(UserError, match=r"^min-contributors = 2: not with method = .* (one|single) client"):
            check_defences(strategy)
    with pytest.raises(UserError, match=r"^min-contributors = 3: at most the 2 clients that take part in a round$"):
        resolve({"min-contributors": 3})
    with pytest.raises(UserError, match=r"^robust = 'on': not with dp-noise-multiplier above 0"):
        resolve({"robust": "on", "dp-noise-multiplier": 1.0, "clip-norm": 1.0})


def test_the_best_model_is_kept_beside_the_last(shared_run: Callable[..., Path]) -> None:
    folder = shared_run(**KEYS | {"method": "fedavg"})
    accuracies = [line["global-accuracy"] for line in rounds(folder)[1:]]
    best = accuracies.index(max(accuracies)) + 1
    kept = load_file(folder / "model-best.safetensors")
    last = load_file(folder / "model.safetensors")
    assert all(torch.equal(kept[name], last[name]) for name in last) == (best == 8)
    assert not (shared_run(method="fedavg", num_rounds=1) / "model-best.safetensors").exists()


# --- a model that becomes worse slowly --------------------------------------------------------------------------------


@pytest.mark.run
def test_a_slow_poisoner_is_undone_over_all_its_rounds(
    run_local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four, from round 3 on: every round is below the limit of the rounds before it. Clients keep a state."""

    def slowly(client: Any, sent: Tensors, update: Update) -> Update:
        return times(-1.5)(client, sent, update) if client.round > 2 else update

    hostile(monkeypatch, "ditto", slowly, range(3))
    _, folder = run_local(**KEYS | {"method": "ditto", "num_clients": 4, "train_per_class": 30, "evaluate": "global"})
    lines = rounds(folder)
    undone = next(line for line in lines if "back-to-round" in line)
    good = lines[undone["back-to-round"]]
    assert good["round"] < undone["round"] - 2
    assert all(line["status"] == "ok" for line in lines[: undone["round"]])
    assert undone["global-loss"] == good["global-loss"] < 0.5 * lines[undone["round"] - 1]["global-loss"]
    assert not any("lost-state" in line for line in lines), "the clients go on from their states of that round"
    drops = [{drop["client"] for drop in line["dropped"]} for line in lines[undone["round"] + 1 :]]
    assert drops
    assert all({0, 1, 2} & clients for clients in drops), "they are suspected from then on"


def test_the_servers_state_goes_back_with_the_model(scene: Callable[[str], Scene]) -> None:  # noqa: F811
    for method in METHODS_THAT_DIFFER:
        made, _ = robust(scene, method).merged(lambda reply: [reply])
        if not made.judged:
            continue
        good, state = made.current, {n: x.clone() for n, x in made.state().items() if n[:5] not in ("good/", "usual")}
        fresh = METHODS[method].strategy(made.settings, made.model)
        made.usual |= {LOSS: torch.tensor([0.4], dtype=torch.float64)}
        for made.round in range(3, 9):  # 1.5 is not far worse than 0.4, nor 2 than 1.5, but 2 than 0.4
            assert far_worse(made, 1.5, [0, 1]) == ""
            made.current = fresh.current
            made.state_rounds[:] = fresh.state_rounds  # in place, as a commit does
            vars(made).update({name: getattr(fresh, name) for name in made.remembers})
        server, made = made, METHODS[method].strategy(made.settings, made.model)  # as after a resume
        made.load_state(server.state())
        made.facts, made.round, made.current = server.facts, 9, server.current
        assert far_worse(made, 2.0, [2]) == (
            "the merged model's loss is 2, the best one's 0.4: it is not kept, nor are those since round 2"
        )
        assert made.phase.report["back-to-round"] == 2
        assert all(torch.equal(made.current[name], x) for name, x in good.items()), method
        assert all(torch.equal(made.state()[name], x) for name, x in state.items()), method
        assert made.usual[SUSPECTED].tolist() == [9, 9, 9, 0, 0, 0, 0]
        assert rounds_of_states(made) == [7, 2], "clients keep their states of that round"


def rounds_of_states(made: Any) -> list[int]:
    return list(kept_rounds(made, ConfigRecord({"checkpoints": [7]}))["checkpoints"])


def test_one_bad_round_undoes_no_other(scene: Callable[[str], Scene]) -> None:  # noqa: F811
    """The model before it stays; where all rounds are refused, as after a change of the data, the limits double."""
    made, _ = robust(scene, "fedavg").merged(lambda reply: [reply])
    made.usual |= {LOSS: torch.tensor([0.4], dtype=torch.float64)}
    model, refusals = made.current, 0
    for made.round in range(3, 12):
        if not far_worse(made, 5.0, [0]):
            break
        refusals += 1
    assert refusals == 3, "0.4, 0.8 and 1.6 allow 1.8, 2.6 and 4.2"
    assert made.current is model
    assert "back-to-round" not in made.phase.report


# --- any attack within the checks, on any method ----------------------------------------------------------------------

Change = Callable[[Tensor], Tensor]
KINDS = (
    *("scaled", "shifted", "with noise", "noise alone", "one position", "one row", "constant", "signs", "sorted"),
    *("reversed", "permuted", "half of it 0", "its mean", "its largest value", "rounded", "squared", "inverse", "cut"),
    *("every second position", "growing"),
)


def one_client(change: Change) -> Callable[[Message], list[Message]]:
    """Change every tensor of float32 in the answer of client 3."""

    def spoil(reply: Message) -> list[Message]:
        header, arrays = opened(reply)
        for key, (numbers, rows) in zip(list(arrays), header["index"], strict=True):
            old = arrays[key]
            if old.dtype == "float32" and old.data:
                stack = torch.frombuffer(bytearray(old.data), dtype=torch.float32).reshape(old.shape)
                for number, row in zip(numbers, rows, strict=True):
                    if header["parts"][number]["client"] == HOSTILE:
                        stack[row] = change(stack[row].clone())
                arrays[key] = Array(old.dtype, old.shape, STYPE, stack.numpy().tobytes())
        return [closed(reply, header, arrays)]

    return spoil


def farthest(place: Scene) -> dict[str, float]:
    """The largest change of a position of each tensor that an honest client makes."""
    phase, replies = place.train
    made = place.strategy(phase)
    peaks: dict[str, float] = {}
    for client, part, expected in made.federation.answers(made.phase, replies, made.expected):
        update = read_update(part, expected, made.metrics(client))
        for name, x, start, mask in parts(made, update, made.contribution(update)):
            if name in place.model and (found := size(x, start, mask)):
                peaks[name] = max(found.peak, peaks.get(name, 0.0))
    return peaks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(METHODS_THAT_DIFFER),
    kind=st.sampled_from(KINDS),
    factor=st.sampled_from((-95.0, -9.0, -1.0, 0.0, 0.1, 2.0, 50.0, 1e4)),
    seed=st.integers(0, 99),
)
def test_no_answer_moves_a_position_farther_than_the_others_do(
    method: str,
    kind: str,
    factor: float,
    seed: int,
    scene: Callable[[str], Scene],  # noqa: F811
) -> None:
    """Whatever one client sends: the model is finite, and nowhere farther away than an honest client went."""
    place = robust(scene, method)
    draws = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        number = seed % max(1, x.numel())
        noise = torch.randn(x.shape, generator=draws)
        flat = x.flatten()
        return (
            {
                "scaled": lambda: x * factor,
                "shifted": lambda: x + factor,
                "with noise": lambda: x + factor * noise,
                "noise alone": lambda: factor * noise,
                "one position": lambda: flat.index_add(0, torch.tensor([number]), torch.tensor([factor])),
                "one row": lambda: torch.cat([x[:1] + factor, x[1:]]) if x.dim() else x,
                "constant": lambda: torch.full_like(x, factor),
                "signs": lambda: factor * x.sign(),
                "sorted": lambda: flat.sort().values,
                "reversed": lambda: flat.flip(0),
                "permuted": lambda: flat[torch.randperm(len(flat), generator=draws)],
                "half of it 0": lambda: torch.cat([flat[: len(flat) // 2], 0 * flat[len(flat) // 2 :]]),
                "its mean": lambda: torch.full_like(x, float(x.mean())),
                "its largest value": lambda: torch.full_like(x, float(x.max())),
                "rounded": lambda: (x / (abs(factor) + 1e-3)).round() * (abs(factor) + 1e-3),
                "squared": lambda: x * x.abs() * factor,
                "inverse": lambda: factor / (x.abs() + 0.01),
                "cut": lambda: x.clamp(-abs(factor), abs(factor)),
                "every second position": lambda: flat * (1 + factor * (torch.arange(len(flat)) % 2)),
                "growing": lambda: flat + factor * torch.linspace(0, 1, len(flat)),
            }[kind]().reshape(x.shape)
            if x.numel()
            else x
        )

    made, model = place.merged(one_client(change))
    assert model is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (model | made.state()).values())
    assert {drop.client for drop in made.phase.dropped} <= {HOSTILE}
    for name, peak in farthest(place).items():
        floor = FLOOR * float(place.model[name].abs().max())
        assert float((model[name] - place.model[name]).abs().max()) <= 1.01 * max(peak, floor), name


def robust(scene: Callable[[str], Scene], method: str) -> Scene:  # noqa: F811
    """The scene of a method with ``robust``."""
    place = scene(method)
    return replace(place, settings=place.settings.model_copy(update={"robust": "on"}))


def test_a_false_number_of_private_samples_buys_no_weight(scene: Callable[[str], Scene]) -> None:  # noqa: F811
    """The mean was this client's alone; FedNova made steps of 10^4 clients' length, or divided by too few steps."""

    def claim(samples: int, header: Json, arrays: dict[str, Array]) -> None:
        for part in header["parts"]:
            part["num-examples"] = samples if part["client"] == HOSTILE else part["num-examples"]

    rows = [("fedavg", "examples", 10**6), ("fednova", "examples", 10**6), ("fednova", "uniform", 10)]
    for method, weighting, samples in rows:
        place = robust(scene, method)
        bound = replace(place.facts, examples=[10**6] * 7, exact=False)
        changed = {"weighting": weighting, "batch_size": 10}  # 42 samples or so are five steps
        place = replace(place, settings=place.settings.model_copy(update=changed), facts=bound)
        models = [place.merged(spoil)[1] for spoil in (lambda reply: [reply], spoiling(partial(claim, samples)))]
        honest, other = (torch.cat([(m[n] - x).flatten() for n, x in place.model.items()]) for m in models if m)
        assert (other - honest).norm() < 0.05 * honest.norm(), (method, weighting)


def test_an_honest_round_is_kept(scene: Callable[[str], Scene]) -> None:  # noqa: F811
    for method in METHODS_THAT_DIFFER:
        made, model = robust(scene, method).merged(lambda reply: [reply])
        assert model is not None, method
        assert made.phase.dropped == []


def test_what_is_usual_goes_into_the_checkpoint_and_comes_back(scene: Callable[[str], Scene]) -> None:  # noqa: F811
    made, _ = robust(scene, "fedavg").merged(lambda reply: [reply])
    usual = {name for name in made.state() if name.startswith("usual/")}
    assert {f"usual/{name}" for name in made.current} <= usual
    other = METHODS["fedavg"].strategy(made.settings, made.model)
    other.load_state(made.state())
    assert other.state().keys() == made.state().keys()
    assert all(torch.equal(other.state()[name], tensor) for name, tensor in made.state().items())


# --- bounds by hand ---------------------------------------------------------------------------------------------------


def test_a_change_is_scaled_to_the_usual_size_and_cut_at_the_usual_peak() -> None:
    start = torch.tensor([1.0, 1.0, 1.0, 1.0])
    x = start + torch.tensor([6.0, 0.0, 0.0, 0.0])
    assert size(x, start) == Size(3.0, 6.0)
    assert within(x, start, Size(3.0, 6.0), Size(3.0, 6.0)) is x
    assert within(x, start, Size(3.0, 6.0), Size(1.0, 9.0)).tolist() == [3, 1, 1, 1]
    assert within(x, start, Size(3.0, 6.0), Size(1.0, 1.5)).tolist() == [2.5, 1, 1, 1]
    mask = torch.tensor([True, False, False, False])
    assert size(x, start, mask) == Size(6.0, 6.0), "a mask buys no length"
    assert size(x, start, ~mask) == Size(0.0, 0.0)
    assert size(x, start, torch.zeros(4, dtype=torch.bool)) is None


def test_the_usual_size_is_the_lower_median_of_this_round_and_the_last_ones() -> None:
    values = [Size(1.0, 2.0), Size(95.0, 95.0)]
    nothing = Size(0, 0)
    assert usual(values, None, nothing) == Size(1.0, 2.0), "of two the smaller one"
    past = torch.tensor([[3.0, 4.0]] * 5, dtype=torch.float64)
    assert usual(values[1:], past, nothing) == Size(3.0, 4.0), "one client is held against the last rounds"
    assert usual(values, None, Size(500.0, 100.0)) == Size(5.0, 2.0), "a hundredth of what it started from"
    grown = remembered(past, values[1:], Size(3.0, 4.0))
    assert grown.tolist() == [[3, 4]] * 4 + [[6, 8]], "what is usual doubles at most"


# --- updates that point against the others ----------------------------------------------------------------------------


def as_contributed(current: Tensors, **more: Any) -> Any:
    """A strategy whose clients start from the model, and of which contributions are compared."""
    hooks = {"compared": lambda update, contribution: contribution, "origin": lambda update: current}
    return SimpleNamespace(current=current, usual={}, **hooks, **more)


def moved(*changes: Sequence[float], masks: Mapping[int, Tensor] = {}) -> tuple[Any, list[Valid]]:
    """A strategy whose model is (1, 1), and the updates of clients 0, 1, … that change it so."""
    start = torch.ones(2)
    settings = SimpleNamespace(num_clients=max(5, len(changes)))
    strategy = as_contributed({"w": start}, settings=settings)
    updates = []
    for client, change in enumerate(changes):
        x, mask = {"w": start + torch.tensor(change)}, {"w": masks[client]} if client in masks else None
        updates.append(Valid(Update(client, x, {}, 1), Contribution(x, mask, 1.0), {}))
    return strategy, updates


@pytest.mark.parametrize("block", [direction.BLOCK, 3])  # 3: each position by itself
def test_the_cosine_is_with_the_sum_of_the_others(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direction, "BLOCK", block)
    changes = [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)]
    strategy, updates = moved(*changes)
    ones = torch.ones(3, dtype=torch.float64)
    half = 0.5**0.5
    assert agreement(strategy, updates, ones).tolist() == pytest.approx([-half, 0, -half])
    assert agreement(strategy, updates, torch.tensor([1.0, 1, 0]).double()).tolist() == pytest.approx([0, 0, -half])
    strategy, updates = moved(*changes, masks={0: torch.tensor([True, False])})
    assert agreement(strategy, updates, ones).tolist() == pytest.approx([-1, 0, -half]), "at its positions alone"


def test_a_client_is_left_out_by_the_mean_of_its_cosines() -> None:
    strategy, updates = moved((1, 0), (1, 1), (1, -1), (1, 0), (-1, 0))
    kept, (drop,), seen = agreeing(strategy, updates)
    assert [valid.update.client for valid in kept] == [0, 1, 2, 3]
    assert (drop.client, drop.reason) == (4, "opposed: its mean cosine with the others' updates is -0.50")
    assert float(seen[AGREEMENT][0]) == pytest.approx(0.5)
    strategy, updates = moved((1, 0), (1, 1), (1, -1), (1, 0), (1, 0))
    strategy.usual = seen
    _, dropped, seen = agreeing(strategy, updates)
    assert dropped == []
    assert float(seen[AGREEMENT][4]) == pytest.approx(0.25, abs=0.03), "its last round counts half"
    assert float(strategy.usual[AGREEMENT][4]) == pytest.approx(-0.5), "as before, until the round is committed"


@pytest.mark.parametrize(
    ("means", "left_out"),
    [([-0.9, -1.0, -0.95, -0.97, 0.0], [1, 3]), ([-0.2, 0.0, -0.14, 0.0, 0.0], [0])],
)
def test_fewer_than_half_are_left_out_the_most_opposed_ones(means: list[float], left_out: list[int]) -> None:
    strategy, updates = moved(*[(0, 0)] * 5)
    strategy.usual = {AGREEMENT: torch.tensor(means, dtype=torch.float64)}
    assert [drop.client for drop in agreeing(strategy, updates)[1]] == left_out


def test_a_round_without_a_direction_tells_nothing() -> None:
    for changes in ([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)], [(1, 0), (1, 0), (1, 0), (-1, 0)]):
        strategy, updates = moved(*changes)
        kept, dropped, seen = agreeing(strategy, updates)
        assert (kept, dropped, float(seen[AGREEMENT].abs().sum())) == (updates, [], 0.0)


def test_clients_with_parts_of_their_own_are_held_against_the_past_of_their_positions() -> None:
    """Five clients with two positions each, dealt anew; the one that always goes back is left out from round 3 on."""
    strategy = as_contributed({"w": torch.zeros(10)}, settings=SimpleNamespace(num_clients=5))
    for turn in range(4):
        updates = []
        for client in range(5):
            at = torch.tensor([(client + turn) % 5, 5 + (client + 2 * turn) % 5])
            x = {"w": torch.full((2,), -1.0 if client == 4 else 1.0)}
            contribution = Contribution(x, None, 1.0, {"w": (at, None)}, alone={"w"})
            updates.append(Valid(Update(client, x, {}, 1), contribution, {}))
        kept, dropped, strategy.usual = agreeing(strategy, updates)
        assert [drop.client for drop in dropped] == ([4] if turn > 1 else [])
        assert len(kept) + len(dropped) == 5
    assert bool((strategy.usual["past change/w"] > 0).all())


def test_the_last_change_of_a_position_counts_half() -> None:
    strategy, updates = moved((2, 0), (0, 8), masks={0: torch.tensor([True, False])})
    past = {"w": torch.tensor([4.0, 4.0])}
    assert direction.moved(strategy, past, updates)["w"].tolist() == [((4 + 2) / 2 + 0) / 2, (4 + 8) / 2]
    assert past["w"].tolist() == [4, 4]


@pytest.mark.run
@pytest.mark.parametrize(("method", "points", "since"), [("fedavg", 5, 3), ("ist", 12, 4)])
def test_three_of_eight_that_send_minus_their_change(
    method: str,
    points: float,
    since: int,
    run_local: Callable[..., Any],
    shared_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are left out from round ``since`` on; with IST their positions need a past."""
    keys = KEYS | {"method": method, "partition": "dirichlet", "dirichlet_alpha": 1.0}
    honest = rounds(shared_run(**keys))[-1]
    hostile(monkeypatch, method, times(-1), range(3))
    summary, folder = run_local(**keys)
    assert summary["final-global-accuracy"] >= honest["global-accuracy"] - points
    dropped = [{drop["client"] for drop in line["dropped"]} for line in rounds(folder)[1:]]
    assert set().union(*dropped) <= {0, 1, 2}
    assert all({0, 1, 2} == clients for clients in dropped[since - 1 :])
