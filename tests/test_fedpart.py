"""FedPart: its schedule, what travels, a slow reference of Algorithms 1 and 2, and its invariants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, forgetful, merge_round, problem_of, read
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_methods import made as of_method
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import build_model, layer_groups, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.training.costs import training_flops
from strategies.fedpart import FedPart, scheduled_group
from strategies.server import Facts
from strategies.settings import FedPartSettings

Run = Callable[..., tuple[Json, Path]]
SETTINGS: dict[str, Value] = {
    "method": "fedpart",
    "dataset": "synthetic-3k",
    "model": "fedpews-mlp",
    "partition": "iid",
    "num-clients": 3,
    "num-rounds": 6,
    "batch-size": 200,
    "optimizer": "adam",
    "lr": 0.003,
    "fedpart.full-rounds": 1,
    "fedpart.rounds-per-group": 2,
    "keep-checkpoints": 0,
}


def run_with(run_local: Run, name: str = "run", **changes: Value) -> tuple[Json, Path]:
    keys = SETTINGS | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return run_local(name, **{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})


def checkpoint(folder: Path, number: int) -> Tensors:
    found = load_file(folder / f"checkpoints/round-{number:06d}.safetensors")
    return {name.removeprefix("model/"): t for name, t in found.items() if name.startswith("model/")}


# --- the schedule -----------------------------------------------------------------------------------------------------


def trained(server_round: int, groups: int, full: int, per_group: int, order: Any, seed: int) -> int | None:
    options = FedPartSettings(full_rounds=full, rounds_per_group=per_group, order=order)
    return scheduled_group(options, server_round, groups, seed)


def test_the_papers_schedule() -> None:
    """Listing of the note: [-1, -1, 0, 0, 1, 1, ..., 7, 7], 18 rounds; then it starts again."""
    rounds = [trained(t, 8, 2, 2, "shallow", 0) for t in range(1, 37)]
    once = [None, None] + [g for g in range(8) for _ in range(2)]
    assert rounds == once * 2
    deep = [trained(t, 8, 2, 2, "deep", 0) for t in range(1, 19)]
    assert deep == [None, None] + [g for g in reversed(range(8)) for _ in range(2)]


@given(groups=st.integers(1, 20), full=st.integers(0, 5), per_group=st.integers(1, 3), seed=st.integers(0, 100))
def test_a_cycle_trains_every_group_the_same_number_of_rounds(
    groups: int, full: int, per_group: int, seed: int
) -> None:
    length = full + groups * per_group
    for order in ("shallow", "deep", "random"):
        for start in (1, length + 1):
            rounds = [trained(start + k, groups, full, per_group, order, seed) for k in range(length)]
            assert rounds[:full] == [None] * full
            assert sorted(rounds[full:]) == sorted(list(range(groups)) * per_group)  # type: ignore[type-var]


def test_random_order_differs_between_cycles_and_not_between_calls() -> None:
    def cycle(number: int) -> list[int | None]:
        return [trained(number * 16 + k, 16, 0, 1, "random", 3) for k in range(1, 17)]

    assert cycle(0) == cycle(0) != cycle(1)


# --- Algorithms 1 and 2, written out ----------------------------------------------------------------------------------


def reference(keys: dict[str, Value]) -> Tensors:
    """FedPart with torch's own Adam and its state dicts, clients one after the other, full participation, float64.

    What a client counts: in the mean of the models all alike, or by its samples; in that of the moments all alike
    ("simply computing the mean values", Section 3.2); with similarities these alone in both, and the mean of z is the
    plain one (Section 3.3).
    """
    s = resolve(keys)
    options: Any = s.options
    data = load_dataset(s.data)
    partition = make_partition(data, s.partitioning)
    model = build_model(s.model, (5,), 4, s.seed).double()
    layers = [list(names) for names in layer_groups(model)]
    x_g = {k: v.detach().clone() for k, v in tensors_of(model).items()}
    shared: dict[str, dict[str, torch.Tensor]] = {}  # parameter -> exp_avg, exp_avg_sq, step
    for t in range(1, s.num_rounds + 1):
        group = scheduled_group(options, t, len(layers), s.seed)
        names = list(x_g) if group is None else layers[group]
        answers, states, counts = [], [], []
        for i in range(s.num_clients):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(x_g[name]).requires_grad_(name in names)
            trained = {name: p for name, p in model.named_parameters() if name in names}
            adam = torch.optim.Adam(trained.values(), lr=s.lr)
            for name, p in trained.items():
                if name in shared and options.momentum != "none":
                    adam.state[p] = {k: v.clone() for k, v in shared[name].items()}
            x, y = data.train_x[partition.train[i]].double(), data.train_y[partition.train[i]]
            for batch in torch.randperm(len(y), generator=generator(s.seed, t, i, "batches")).split(s.batch_size):
                adam.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                adam.step()
            answers.append({name: p.detach().clone() for name, p in trained.items()})
            states.append({name: dict(adam.state[p]) for name, p in trained.items()})
            counts.append(len(y))
        state_weights = torch.ones(s.num_clients, dtype=torch.float64)
        weights = torch.tensor(counts, dtype=torch.float64) if s.weighting == "examples" else state_weights
        if options.momentum == "similarity":
            z = torch.stack(
                [
                    torch.cat([state[n][k].flatten() for k in ("exp_avg", "exp_avg_sq") for n in names])
                    for state in states
                ]
            )
            mean = z.mean(0)
            weights = state_weights = (z @ mean) / (z.norm(dim=1) * mean.norm())
            assert bool((weights > 0).all())  # a negative one is where the app leaves the paper
        weights, state_weights = weights / weights.sum(), state_weights / state_weights.sum()
        for name in names:
            x_g[name] = sum(w * a[name] for w, a in zip(weights, answers, strict=True))  # type: ignore[assignment]
            shared[name] = {
                k: sum(w * state[name][k] for w, state in zip(state_weights, states, strict=True))  # type: ignore[misc]
                for k in ("exp_avg", "exp_avg_sq")
            } | {"step": torch.stack([state[name]["step"] for state in states]).max()}
    return x_g


UNEQUAL = SETTINGS | {"partition": "lists", "class-lists": "0 1 2 3, 0 1 2, 2 3", "lr": 0.001}
"""Clients of unequal size and unlike data, but not so unlike that a similarity is negative."""


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("momentum", ["none", "mean", "similarity"])
def test_it_follows_the_algorithm(run_local: Run, momentum: str, weighting: str) -> None:
    keys = UNEQUAL | {"weighting": weighting, "fedpart.momentum": momentum}
    _, folder = run_local(**keys)
    start = tensors_of(build_model("fedpews-mlp", (5,), 4, 0))
    assert away(load_file(folder / "model.safetensors"), reference(keys), start) < SAME


def test_what_a_client_counts_decides() -> None:
    """What the test above tells apart: the two weightings end at two models."""
    start = tensors_of(build_model("fedpews-mlp", (5,), 4, 0))
    alike, viewed = (reference(UNEQUAL | {"fedpart.momentum": "mean", "weighting": w}) for w in ("uniform", "examples"))
    assert away(alike, viewed, start) > 5 * SAME


# --- invariants -------------------------------------------------------------------------------------------------------


def test_the_full_network_every_round_is_fedavg_bit_for_bit(run_local: Run) -> None:
    _, fedavg = run_with(run_local, "fedavg", method="fedavg")
    _, fedpart = run_with(run_local, "fedpart", fedpart__full_rounds=6)
    left, right = load_file(fedavg / "model.safetensors"), load_file(fedpart / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("model", ["fedpews-mlp", "lenet5-bn"])
def test_frozen_groups_stay_bit_for_bit(run_local: Run, model: str) -> None:
    """Weights, and the running statistics of frozen BatchNorms."""
    data = {} if model == "fedpews-mlp" else {"dataset": "digits", "image_size": 32, "train_per_class": 20}
    _, folder = run_with(run_local, model=model, fedpart__rounds_per_group=1, num_rounds=4, **data)
    settings = resolve(SETTINGS | {"model": model})
    shape = (5,) if model == "fedpews-mlp" else (1, 32, 32)
    groups = layer_groups(build_model(settings.model, shape, 4 if len(shape) == 1 else 10, 0))
    for number in (2, 3, 4):
        before, after = checkpoint(folder, number - 1), checkpoint(folder, number)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == set(groups[number - 2])


def test_only_the_trained_group_travels(run_local: Run) -> None:
    """Down the one that was trained last, up the one that is trained; Adam's moments with them if they are shared."""
    sizes = [sum(p.numel() for n, p in build_model("fedpews-mlp", (5,), 4, 0).named_parameters() if n in names)
             for names in layer_groups(build_model("fedpews-mlp", (5,), 4, 0))]  # fmt: skip
    _, plain = run_with(run_local, "plain")
    lines = read_rounds(plain)[1:]
    assert [line["formula-bytes-up"] // 12 for line in lines] == [sum(sizes), *(sizes[k // 2] for k in range(5))]
    last = [sum(sizes), sum(sizes), sizes[0], sizes[0], sizes[1], sizes[1]]
    assert [line["formula-bytes-down"] // 12 for line in lines] == last
    _, shared = run_with(run_local, "shared", fedpart__momentum="mean")
    for line, less in zip(read_rounds(shared)[1:], lines, strict=True):
        steps = 10 if line["round"] == 1 else 2  # a step count a tensor
        assert line["formula-bytes-up"] == 3 * less["formula-bytes-up"] + 3 * 4 * steps
    assert read_rounds(shared)[1]["formula-bytes-down"] == lines[0]["formula-bytes-down"]  # no moments yet


def test_flops_and_gradients_end_at_the_trained_group(run_local: Run) -> None:
    model = build_model("fedpart-cnn", (3, 32, 32), 10, 0)
    groups = layer_groups(model)
    flops = [training_flops(problem_of((3, 32, 32)), model, names) for names in groups]
    whole = training_flops(problem_of((3, 32, 32)), model)
    assert whole > flops[0] > flops[1] > flops[-1]
    _, folder = run_with(run_local, num_rounds=4)
    rounds = read_rounds(folder)
    assert rounds[1]["flops"] > rounds[2]["flops"] == rounds[3]["flops"] > rounds[4]["flops"]


def test_the_papers_bytes() -> None:
    """127.8, 31.9 and 95.7 MiB over 18 rounds and 6 clients, with the published code's 180 bytes more a tensor."""
    model = build_model("fedpart-cnn", (3, 32, 32), 10, 0)
    groups = layer_groups(model)
    size = {name: 4 * tensor.numel() + 180 for name, tensor in tensors_of(model).items()}
    whole, group = sum(size.values()), [sum(size[name] for name in names) for names in groups]
    schedule = [trained(t, len(groups), 2, 2, "shallow", 0) for t in range(1, 19)]
    up = sum(whole if g is None else group[g] for g in schedule)
    down = whole + sum(whole if g is None else group[g] for g in schedule[:-1])
    assert 6 * 18 * 2 * whole / 2**20 == pytest.approx(127.8, abs=0.1)
    assert 6 * (up + down) / 2**20 == pytest.approx(31.9, abs=0.1)
    assert 3 * 6 * (up + down) / 2**20 == pytest.approx(95.7, abs=0.3)


def strategy(**changes: Value) -> FedPart:
    keys = SETTINGS | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    made = FedPart(resolve(keys), build_model("fedpews-mlp", (5,), 4, 0))
    made.round = 1
    return made


def answer(made: FedPart, client: int) -> Update:
    tensors = {n: torch.ones([2 if k is None else k for k in s.shape], dtype=s.dtype)
               for n, s in made.expected(client).items()}  # fmt: skip
    return Update(client, tensors, {}, 10, state=(0, made.round))


def play(made: FedPart, rounds: list[list[int]]) -> list[dict[int, set[int]]]:
    """Play rounds with the clients that take part; returns which groups each of them was sent."""
    sent = []
    for number, clients in enumerate(rounds, 1):
        made.round = number
        tasks = {client: made.task(client).tensors for client in clients}
        sent.append({c: {k for k, names in enumerate(made.groups) if names[0] in t} for c, t in tasks.items()})
        merge_round(made, [answer(made, client) for client in clients])
    return sent


def test_as_published_each_client_begins_with_a_network_of_its_own() -> None:
    """The group that it neither trains nor was sent stays as it began."""
    server, client = of_method("fedpart", fedpart__stale="faithful")
    owns = []
    for number in (0, 1):
        worker = client(number, 2, {})
        worker.run_training({}, {"group": 0})
        owns.append(worker.own["fc2.weight"])
    assert not owns[0].equal(owns[1])
    assert not any(own.equal(server.current["fc2.weight"]) for own in owns)


def test_who_was_away_gets_what_stale_promises() -> None:
    """Rounds: full, 0, 0, 1, 1, 2; client 1 is away in rounds 3 and 4, client 2 comes in round 5 only."""
    rounds = [[0, 1], [0, 1], [0], [0], [0, 1, 2], [0, 1, 2]]
    everything = set(range(5))
    faithful = play(strategy(fedpart__stale="faithful"), rounds)
    assert faithful[4] == {0: {1}, 1: {1}, 2: {1}}
    first = play(strategy(fedpart__stale="full-first"), rounds)
    assert [first[k][0] for k in range(6)] == [everything, everything, {0}, {0}, {1}, {1}]
    assert first[4] == {0: {1}, 1: {1}, 2: everything}
    assert first[5] == {0: {1}, 1: {1}, 2: {1}}
    everyone = play(strategy(fedpart__stale="sync-all"), rounds)
    assert [everyone[k][0] for k in range(6)] == [first[k][0] for k in range(6)]  # who is always there: the same
    *_, again = play(strategy(fedpart__stale="full-first", fedpart__rounds_per_group=1), [[0]] * 7)
    assert again[0] == everything  # the next cycle begins with a full round
    assert everyone[4] == {0: {1}, 1: {0, 1}, 2: everything}


@pytest.mark.parametrize("stale", ["full-first", "sync-all"])
def test_a_lost_reply_is_as_if_the_client_had_not_been_asked(stale: str) -> None:
    """Its model is that of its last merged reply, of round 3."""
    lost, never = strategy(fedpart__stale=stale), strategy(fedpart__stale=stale)
    for made in (lost, never):
        play(made, [[0, 1], [0, 1], [0, 1]])
        made.round = 4
    merge_round(lost, [answer(lost, 0)], asked=[0, 1])
    merge_round(never, [answer(never, 0)])
    assert lost.has[0, 1] < lost.changed[1]  # its own training, not the merged group
    for made in (lost, never):
        made.round = 5
    assert lost.task(1).tensors.keys() == never.task(1).tensors.keys()
    assert len(lost.task(1).tensors) < len(lost.current)


def test_a_client_that_lost_its_model_is_sent_the_full_one_next_time(run_local: Run, tmp_path: Path) -> None:
    """Its state is gone before round 3: dropped then, it is sent the full model in round 4."""
    keys = SETTINGS | {"num-rounds": 5, "fedpart.full-rounds": 1}
    grid = forgetful(tmp_path / "run", client=1, after=2)
    _, folder = run_local(grid=grid, **{key.replace(".", "__").replace("-", "_"): value for key, value in keys.items()})
    dropped = [line["dropped"] for line in read_rounds(folder)[1:]]
    reason = "client failed: StateGone: client 1 has lost its state: it may be sent only a part of the model"
    assert dropped == [[], [], [{"client": 1, "reason": reason}], [], []]


def test_equal_states_are_the_plain_mean() -> None:
    made = strategy(fedpart__momentum="similarity")
    updates = [answer(made, client) for client in range(3)]
    for k, update in enumerate(updates):
        update.tensors["fc1.weight"].fill_(float(k))
    said = merge_round(made, updates)
    assert said["similarity"] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)  # rounded to 6 digits
    torch.testing.assert_close(made.current["fc1.weight"], torch.ones(32, 5))


def test_similarities_by_hand() -> None:
    """First moments of 1, second ones of 0 and of 1: cosines with (1, 0.5). The step of 0.5 is the model's."""
    made = strategy(fedpart__momentum="similarity", num_clients=2, server_lr=0.5)
    updates, start = [answer(made, client) for client in range(2)], made.current["fc1.weight"]
    for client, update in enumerate(updates):
        for name, tensor in update.tensors.items():
            if name.startswith("second/") or name == "fc1.weight":
                tensor.fill_(float(client))
    said = merge_round(made, updates)
    first, second = 1 / 1.25**0.5, 1.5 / 2.5**0.5
    assert said["similarity"] == pytest.approx([first, second], abs=1e-5)
    share = second / (first + second)
    torch.testing.assert_close(made.current["fc1.weight"], (start + share) / 2)
    torch.testing.assert_close(made.moments["second/fc1.weight"], torch.full((32, 5), share))
    torch.testing.assert_close(made.moments["first/fc1.weight"], torch.ones(32, 5))


def test_the_largest_step_count_is_merged() -> None:
    """As published: clients with more batches have taken more steps."""
    made = strategy(fedpart__momentum="mean", fedpart__full_rounds=0, local_steps=3)
    updates = [answer(made, client) for client in range(3)]
    for steps, update in zip(([3, 3], [8, 7], [5, 5]), updates, strict=True):
        update.tensors["steps"] = torch.tensor(steps)
    merge_round(made, updates)
    made.round = 2
    assert made.task(0).tensors["steps"].tolist() == [8, 7]
    assert made.expected(0)["steps"].high == 8 + 3


def test_opposite_states_fall_back_to_the_plain_mean_and_say_so() -> None:
    made = strategy(fedpart__momentum="similarity", num_clients=2)
    updates = [answer(made, client) for client in range(2)]
    for name in updates[0].tensors:
        if name.startswith("first/"):
            updates[1].tensors[name].neg_()
        if name.startswith("second/"):
            for update in updates:
                update.tensors[name].zero_()
    said = merge_round(made, updates)
    assert said["similarity-fallback"] is True
    torch.testing.assert_close(made.current["fc1.weight"], torch.ones(32, 5))


def test_a_client_against_the_others_does_not_count() -> None:
    made = strategy(fedpart__momentum="similarity")
    updates = [answer(made, client) for client in range(3)]
    for client, update in enumerate(updates):
        update.tensors["fc1.weight"].fill_(float(client))
        for name, tensor in update.tensors.items():
            if name.startswith("first/"):
                tensor.fill_((1.0, 2.0, -0.5)[client])
            elif name.startswith("second/"):
                tensor.fill_(0.1)
    said = merge_round(made, updates)
    first, second, third = said["similarity"]
    assert third < 0 < first
    expected = (first * 0 + second * 1) / (first + second)
    torch.testing.assert_close(made.current["fc1.weight"], torch.full((32, 5), expected))
    assert all(bool((tensor >= 0).all()) for name, tensor in made.moments.items() if name.startswith("second/"))


def test_the_norms_of_moments_are_those_of_gradients() -> None:
    """First moments of 2, second ones of 9, whose roots are 3."""
    made = strategy(fedpart__momentum="mean")
    update = answer(made, 0)
    for name, tensor in update.tensors.items():
        if "/" in name:
            tensor.fill_(2.0 if name.startswith("first/") else 9.0)
    norms = made.norms(update, made.contribution(update))
    length = sum(tensor.numel() for tensor in made.current.values()) ** 0.5
    assert norms["first moments"] == pytest.approx(2 * length)
    assert norms["second moments"] == pytest.approx(3 * length)


def test_bad_moments_are_refused() -> None:
    """A step count beyond that of its samples makes the next rounds of all clients' Adam begin with long steps."""
    made = strategy(fedpart__momentum="mean", local_epochs=2)
    made.facts = Facts([900] * 3, 1.0, lambda _: 0.0)  # 2 epochs of 5 batches
    for name, value, said in (
        ("second/fc1.bias", -1.0, "'second/fc1.bias': values -1 to -1, expected 0 to inf"),
        ("steps", 0, "'steps': values 0 to 0, expected 1 to "),
        ("steps", 11, "'steps': values 11 to 11, expected 1 to 10"),
        ("steps", 2**62, "'steps': values 4.61169e.18 to 4.61169e.18, expected 1 to 10"),
    ):
        update = answer(made, 0)
        update.tensors[name].fill_(value)
        with pytest.raises(BadReply, match=said):
            read(made, update)


def test_moments_need_adam() -> None:
    with pytest.raises(UserError, match=r"local-epochs = 0: fedpart.momentum = 'mean' needs a step's moments"):
        resolve(SETTINGS | {"optimizer": "adam", "local-epochs": 0, "fedpart.momentum": "mean"})
    with pytest.raises(UserError, match=r"optimizer = 'sgd': fedpart.momentum = 'mean' needs 'adam'"):
        resolve(SETTINGS | {"optimizer": "sgd", "fedpart.momentum": "mean"})
