"""A round commits all of its outcome or nothing: numbers by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from client_apps.personal import LocalClient
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Spec, Task, Update
from fedsub_app.models import build_model
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution
from strategies.base import SubnetStrategy
from strategies.bounding import Bounds, reach
from strategies.direction import agreement
from strategies.harm import ALLOWED, LOSS, SUSPECTED, WATCHED, far_worse, harmless
from strategies.hooks import Merged
from strategies.memory import flattened, restored
from strategies.merging import Merging, Valid
from strategies.rounds import _merged, sums_of
from strategies.server import Facts


def strategy(**settings: object) -> SubnetStrategy:
    made = SubnetStrategy(resolve({"num-clients": 4, **settings}), build_model("fedpews-mlp", (5,), 4, 0))
    made.current, made.round = {"w": torch.ones(3)}, 2
    return made


def update(client: int, state: tuple[int, int] = (0, 0), value: float = 2.0) -> Update:
    return replace(Update(client, {"w": torch.full((3,), value)}, {}, 10), state=state)


def outcome(made: SubnetStrategy, count: int, diverged: int = 0) -> str:
    """Return why a round with ``count`` valid updates is abandoned; "": it is not."""
    merging = Merging(made)
    for client in range(count):
        valid = update(client)
        merging.add(Valid(valid, made.contribution(valid), {}))
    return _merged(made, merging, diverged)[1]


def test_a_client_counts_with_the_round_in_which_it_wrote_its_state() -> None:
    made = strategy()
    made.state_rounds[1] = made.state_rounds[2] = 1
    # 0 wrote its first state; 1 another one; 2 kept its old one; 3 has none
    made.commit(Merged({"w": torch.zeros(3)}), [update(0, (0, 2)), update(1, (1, 2)), update(2, (1, 1)), update(3)])
    assert made.state_rounds.tolist() == [2, 2, 1, 0]
    assert made.current["w"].tolist() == [0, 0, 0]


def test_a_client_that_lost_its_state_is_forgotten_alone() -> None:
    made = strategy()
    made.state_rounds[:] = torch.tensor([1, 2, 2, 1])
    made.forget(1)
    assert made.state_rounds.tolist() == [1, 0, 2, 1]


def test_what_a_method_does_not_remember_is_not_committed() -> None:
    made = strategy()
    with pytest.raises(UserError, match=r"SubnetStrategy\.merge returned \['variate'\], which it does not remember"):
        made.outcome(Merged({"w": torch.zeros(3)}, {"variate": {}}))


@pytest.mark.parametrize("w", [torch.zeros(3, dtype=torch.float64), torch.zeros(1), None])
def test_a_model_of_another_form_is_not_committed(w: Tensor | None) -> None:
    """All clients would be dropped in the next round."""
    made = strategy()
    said = r"^SubnetStrategy\.merge returned 'w' as .*, in the model it is \(torch.float32, 3\)$"
    with pytest.raises(UserError, match=said):
        made.outcome(Merged({} if w is None else {"w": w}))


def test_what_a_method_reports_replaces_nothing(
    run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Merging.result
    monkeypatch.setattr(Merging, "result", lambda self: replace(result(self), report={"train-loss": -5.0}))
    with pytest.raises(UserError, match=r"^SubnetStrategy\.merge reports 'train-loss', which the round's line has of"):
        run_local(num_rounds=1)


@pytest.mark.parametrize(("hook", "kind"), [("task", "Task"), ("contribution", "Contribution"), ("merge", "Merged")])
def test_a_hook_that_returns_another_kind_ends_the_run(
    hook: str, kind: str, run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubnetStrategy, hook, lambda self, *_: self.current)
    with pytest.raises(
        UserError, match=rf"^SubnetStrategy\.{hook} returned a dict: must be a strategies\.base\.{kind}$"
    ):
        run_local(num_rounds=1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Contribution({"w": torch.ones(2)}), "ValueError: update has a tensor w that the old model lacks"),
        (Contribution({}, weight=float("nan")), "ValueError: update has weight nan; allowed: finite numbers"),
    ],
)
def test_a_contribution_that_does_not_fit_the_model_names_its_hook_and_client(
    wrong: Contribution, said: str, run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubnetStrategy, "contribution", lambda self, update: wrong)
    with pytest.raises(UserError, match=rf"^SubnetStrategy\.contribution returned for client \d: {said}$"):
        run_local(num_rounds=1)


@pytest.mark.parametrize(
    ("hook", "value", "said"),
    [
        (
            "task",
            Task(0),
            r"returned for client 1 Task\(0, …, {}\): must be of client 1, with a config without client, st",
        ),
        ("task", Task(0, {}, {"state": 3}), r"returned for client 0 Task\(0, …, {'state': 3}\): must be of client 0"),
        (
            "task",
            Task(0, {}, {"p": torch.ones(2)}),
            r"returned for client 0 the config {'p': tensor.*}: Object of type Tensor is not",
        ),
        ("task", Task(0, {"w": [1.0]}), r"returned for client 0 'w' as list: must be a torch.Tensor$"),  # type: ignore
        ("expected", {"w": (3,)}, r"returned {'w': \(3,\)}: must be strategies.base.Spec by name$"),
        ("expected", {"v": Spec((3,)), "w": 3}, r"returned {'w': 3}: must be strategies.base.Spec by name$"),
        ("expected", None, "returned None: must be strategies.base.Spec by name$"),
        ("metrics", None, "returned None: must be strategies.base.Range by name$"),
        ("metrics", {"steps": 3}, r"returned {'steps': 3}: must be strategies.base.Range by name$"),
    ],
)
def test_tasks_and_specs_of_another_form_end_the_run(
    hook: str, value: object, said: str, run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubnetStrategy, hook, lambda self, client: value)
    with pytest.raises(UserError, match=rf"^SubnetStrategy\.{hook} {said}"):
        run_local(num_rounds=1)


@pytest.mark.parametrize(
    ("merged", "said"),
    [
        (Merged([]), r"^SubnetStrategy\.merge returned Merged\(model=\[\]\): must be a dict$"),  # type: ignore[arg-type]
        (
            Merged({}, {}, {"p": torch.ones(2)}),
            r"^SubnetStrategy.merge returned the report {'p': tensor.*}: Object of type",
        ),
        (Merged({"w": [1]}), "^SubnetStrategy.merge returned 'w' as <class 'list'>, in the model"),  # type: ignore[dict-item]
        (
            Merged({"w": torch.ones(3)}, {"step": {"w": torch.ones(3).bool()}}),
            r"^SubnetStrategy.merge returned 'step/w' as \(torch.bool, 3\): setup must set a bool tensor in its shape",
        ),
        (
            Merged({"w": torch.ones(3)}, {"step": [{}]}),
            "^SubnetStrategy.merge returned 'step' as a list of 1: setup must",
        ),
        (Merged({"w": torch.ones(3)}, {"step": 0.5}), "^remembers 'step', which is 0.5: must be a tensor, a dict of"),  # type: ignore[dict-item]
    ],
)
def test_an_outcome_of_other_kinds_is_not_committed(merged: Merged, said: str) -> None:
    made = strategy()
    made.remembers, made.step = ("step",), {}
    with pytest.raises(UserError, match=said):
        made.outcome(merged)


def test_a_state_without_a_tensor_that_setup_has_set_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run would not find it."""
    monkeypatch.setattr(SubnetStrategy, "remembers", ("step",))
    monkeypatch.setattr(SubnetStrategy, "setup", lambda self: setattr(self, "step", {"a": torch.ones(1)}))
    made = strategy()
    said = r"^SubnetStrategy\.merge returned no 'step/a', which setup has set: a resumed run needs it$"
    with pytest.raises(UserError, match=said):
        made.outcome(Merged(made.current, {"step": {"b": torch.ones(1)}}))
    made.outcome(Merged(made.current, {"step": {"a": torch.ones(1), "b": torch.ones(1)}}))


@pytest.mark.parametrize(
    "state", [{"step": torch.tensor(float("nan"))}, {"step": {"w": torch.tensor([1, -torch.inf])}}]
)
def test_a_state_that_is_not_finite_is_not_committed(state: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubnetStrategy, "remembers", ("step",))
    first = torch.ones(1) if isinstance(state["step"], Tensor) else {}
    monkeypatch.setattr(SubnetStrategy, "setup", lambda self: setattr(self, "step", first))
    monkeypatch.setattr(SubnetStrategy, "merge", lambda self, mean, updates: Merged(mean.result(), state))
    assert outcome(strategy(), 2).startswith("SubnetStrategy.merge returned 'step")
    state["step"] = torch.tensor([3, 4])
    assert outcome(strategy(), 2) == ""


def test_what_a_method_remembers_is_made_of_tensors() -> None:
    class Counting(SubnetStrategy):
        remembers = ("step",)

        def setup(self) -> None:
            self.step = {"w": 0.5}

    with pytest.raises(UserError, match=r"^remembers 'step/w', which is 0.5: must be a tensor, a dict of tensors or a"):
        Counting(resolve({}), torch.nn.Linear(1, 1))


def test_what_a_method_remembers_is_set_by_its_setup() -> None:
    class Forgetful(SubnetStrategy):
        remembers = ("variate",)

    with pytest.raises(UserError, match=r"^Forgetful\.setup does not set 'variate', which it remembers$"):
        Forgetful(resolve({}), torch.nn.Linear(1, 1))
    Forgetful.remembers = "variate"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^Forgetful\.remembers = 'variate': must be a tuple of names$"):
        Forgetful(resolve({}), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("count", "reason"), [(2, ""), (1, "fewer than min-replies = 2 valid replies")])
def test_as_many_replies_as_min_replies_are_enough(count: int, reason: str) -> None:
    assert outcome(strategy(**{"min-replies": 2}), count) == reason


@pytest.mark.parametrize(("count", "reason"), [(2, ""), (1, "fewer than min-contributors = 2 valid replies")])
def test_a_round_of_too_few_contributors_is_abandoned(count: int, reason: str) -> None:
    """Also where the server takes more than the mean: SSFL's saliencies, FedPM's masks."""
    assert outcome(strategy(**{"min-contributors": 2}), count) == reason


def test_krum_needs_twice_the_liars_and_three() -> None:
    five = {"num-clients": 5, "mean": "krum", "weighting": "uniform"}
    made = strategy(**five, **{"byzantine-clients": 1})
    assert outcome(made, 5) == ""
    assert outcome(made, 4) == "4 valid replies: mean = 'krum' with byzantine-clients = 1 needs 5"
    with pytest.raises(UserError, match=r"^byzantine-clients = 2: at most 1 with mean = 'krum' and the 5 clients"):
        strategy(**five, **{"byzantine-clients": 2})


@pytest.mark.parametrize(("diverged", "reason"), [(2, ""), (3, "training diverged on 3 of 5 clients")])
def test_a_round_is_abandoned_when_more_than_half_of_its_clients_diverged(diverged: int, reason: str) -> None:
    assert outcome(strategy(), 2, diverged) == reason


@pytest.mark.parametrize(
    ("loss", "reason"), [(1e4, ""), (1.1e4, "diverged: the merged model's loss is 11000"), (float("nan"), "diverged")]
)
def test_a_merged_model_that_has_diverged_is_not_committed(loss: float, reason: str) -> None:
    made = strategy()

    def tested(_: Tensors) -> float:
        return loss

    made.facts = Facts([10] * 4, 1.0, tested)
    assert outcome(made, 2).startswith(reason)
    assert bool(outcome(made, 2)) == bool(reason)


def test_a_clients_bounds_with_local_steps() -> None:
    """3 batches of 8 samples and one pass over 10; six passes of 2 FLOPs a sample."""
    made = strategy(**{"local-steps": 3, "batch-size": 8})
    made.facts = Facts([10] * 4, 2.0, lambda _: 0.0)
    assert made.max_samples(0) == 34
    assert made.max_flops(0) == 6 * 2 * 34


@pytest.mark.parametrize(("model", "steps"), [("lenet5", [2, 2, 4, 4]), ("lenet5-bn", [2, 2, 2, 4])])
def test_a_clients_steps_are_without_a_last_batch_of_one_but_not_the_only_one(model: str, steps: list[int]) -> None:
    """2 epochs of batches of 4 of 1, 4, 5 and 6 samples: BatchNorm cannot train on one."""
    made = SubnetStrategy(resolve({"batch-size": 4, "local-epochs": 2}), build_model(model, (1, 28, 28), 10, 0))
    assert [made.steps(examples) for examples in (1, 4, 5, 6)] == steps


def test_a_blocks_mean_counts_as_all_samples_of_its_clients() -> None:
    """Two clients with 10 samples and the mean 1, one with 30 and 2."""
    merging = Merging(made := strategy(weighting="examples"))
    for clients, count, mean in (((0, 1), 10, 1.0), ((2,), 30, 2.0)):
        updates = [replace(update(client), num_examples=count) for client in clients]
        merging.add_block([Valid(each, made.contribution(each), {}) for each in updates], {"w": torch.full((3,), mean)})
    assert merging.result().model["w"].tolist() == pytest.approx([80 / 50] * 3)


def test_clients_that_did_not_train_bound_nobody() -> None:
    """Three of five send the model as it is; the change of 1 of the others is as it was."""
    made = strategy(**{"num-clients": 5})
    bounds, sent = Bounds(made, dict.fromkeys(range(5), 1.0)), [1.0, 1.0, 1.0, 2.0, 2.0]
    updates = [update(client, value=value) for client, value in enumerate(sent)]
    valid = [Valid(each, made.contribution(each), {}) for each in updates]
    for each in valid:
        bounds.measure(each.update, each.contribution)
    assert [float(each.contribution.tensors["w"][0]) for each in bounds.bounded(valid)] == sent
    assert not bounds.report


def test_a_client_with_more_samples_goes_farther() -> None:
    """Changes of 1, 3, 2 and 5, the last two on twice the samples: 1 is usual, and 2 for those."""
    made = strategy()
    made.facts = Facts([20, 20, 40, 40], 1.0, lambda _: 0.0)
    bounds = Bounds(made, reach(made, range(4)))
    updates = [update(client, value=1.0 + change) for client, change in enumerate((1, 3, 2, 5))]
    updates = [replace(each, squares={"w": float((each.tensors["w"] - 1).square().sum())}) for each in updates]
    valid = [Valid(each, made.contribution(each), {}) for each in updates]
    for each in valid:
        bounds.measure(each.update, each.contribution)
    bounded = bounds.bounded(valid)
    assert [float(each.contribution.tensors["w"][0]) for each in bounded] == [2, 2, 3, 3]
    lengths = [made.distance(each.update, each.contribution) for each in bounded]
    assert lengths == pytest.approx([3**0.5 * change for change in (1, 1, 2, 2)]), "clip-norm clips what is left"
    assert bounds.report == {"bounded-updates": [1, 3]}
    assert reach(made, [0, 2, 3]) == dict.fromkeys((0, 2, 3), 1.0), "of the clients that are asked"


def test_of_private_data_no_client_counts_with_more_samples_than_the_median_one() -> None:
    """The server has the clients' word: 10, 20 and 900 samples; no client may go farther."""
    made = strategy(weighting="examples")
    made.facts = Facts([10, 20, 1000], 1.0, lambda _: 0.0, exact=False)
    bounds, valid = Bounds(made, reach(made, range(3))), list[Valid]()
    for client, count in enumerate((10, 20, 900)):
        each = replace(update(client), num_examples=count)
        valid.append(Valid(each, made.contribution(each), {}))
        bounds.measure(*valid[-1][:2])
    assert bounds.reach == {0: 1, 1: 1, 2: 1}
    bounded = bounds.bounded(valid)
    assert [(each.update.num_examples, each.contribution.weight) for each in bounded] == [(10, 10), (20, 20), (20, 20)]


def test_what_else_an_update_holds_is_bounded_too() -> None:
    """Changes of w of 3, of s, which starts from 0, of 5, and of v, from 3, of -5 become 1. Masked values stay."""
    made = strategy(**{"num-clients": 3})
    made.current["v"] = torch.tensor([3.0])
    bounds, mask, valid = Bounds(made, dict.fromkeys(range(3), 1.0)), torch.tensor([True, True, False]), list[Valid]()
    for client, (w, v, s) in enumerate([(2.0, 4.0, None), (4.0, 2.0, 1.0), (2.0, -2.0, 5.0)]):
        tensors = {"w": torch.tensor([w, w, 9.0]), "v": torch.tensor([v])} | ({"s": torch.tensor([s])} if s else {})
        each = Update(client, tensors, {}, 10)
        valid.append(Valid(each, Contribution({"w": each.tensors["w"]}, {"w": mask}), {}))
        bounds.measure(each, valid[-1].contribution)
    for each, (v, s) in zip(bounds.bounded(valid), [(4, {}), (2, {"s": [1]}), (2, {"s": [1]})], strict=True):
        assert {n: x.tolist() for n, x in each.update.tensors.items()} == {"w": [2, 2, 9], "v": [v], **s}
        assert each.contribution.tensors["w"].tolist() == [2, 2, 9]
    assert bounds.report == {"bounded-updates": [1, 2]}
    assert {name: x.round().tolist() for name, x in bounds.usual.items()} == {name: [[1, 1]] for name in "wvs"}


@pytest.mark.parametrize(
    ("past", "changes", "bounded"),
    [
        ([[1, 1]] * 3, (5, 5), [1, 1]),  # the rounds before decide
        ([], (0.001, 0.001, 0.005), [0.001, 0.001, 0.005]),  # less than a hundredth of the values, which are 1
    ],
)
def test_what_bounds_a_change_besides_the_others(past: list[list[int]], changes: list[float], bounded: Json) -> None:
    made = strategy(**{"num-clients": len(changes)})
    made.usual = {"w": torch.tensor(past, dtype=torch.float64)} if past else {}
    bounds, valid = Bounds(made, dict.fromkeys(range(len(changes)), 1.0)), list[Valid]()
    for client, change in enumerate(changes):
        each = update(client, value=1.0 + change)
        valid.append(Valid(each, made.contribution(each), {}))
        bounds.measure(*valid[-1][:2])
    found = [float(each.contribution.tensors["w"][0]) - 1 for each in bounds.bounded(valid)]
    assert found == pytest.approx(bounded, rel=1e-3)


def test_updates_agree_where_they_have_the_same_tensors() -> None:
    """The first changes w and b by 1, the second b alone: cosines of (1, 1) with (0, 1), and of 1 with 1."""
    made = strategy()
    made.current = {"w": torch.zeros(1), "b": torch.zeros(1)}
    sent = [{"w": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1)}]
    valid = [Valid(Update(k, each), Contribution(each, None, 1.0), {}) for k, each in enumerate(sent)]
    found = agreement(made, valid, torch.ones(2, dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.5**0.5, 1.0])


@pytest.mark.parametrize(
    ("losses", "last", "usual", "left_out"),
    [
        ([1, 1, 1, 4], 1, {}, []),  # 1.75, and 1.5 * 1 + 0.3 is allowed
        ([1, 1, 1, 5], 1, {}, [3]),
        ([2, 2, 2, 2.24], 1, {}, []),  # from 2.06 to 2 is no quarter of the way to 1.8
        ([2, 2, 2, 2.4], 1, {}, [3]),
        ([3, 6, 40, 400], 1, {}, [3, 2]),  # half of them stay
        ([1.5, 2.5], 10, {}, [1]),  # of two: 0.8 * 2 - 0.05
        ([1.6, 2.4], 10, {}, []),
        ([1, 1, 2.8], 10, {}, []),  # three have a majority
        ([1, 1, 1, 1.4], 1, {WATCHED: [0, 0, 0, 2]}, [3]),
        ([1, 1, 1, 0.9], 1, {WATCHED: [0, 0, 0, 2]}, []),
        ([1, 1.4], 10, {WATCHED: [2, 2, 0, 0]}, [1]),  # not the last one
        ([1, 1, 1, 1.4], 1, {WATCHED: [0, 0, 0, 1]}, []),  # eleven rounds ago
        ([0.6, 0.6, 0.6, 1.8], 1, {}, []),
        ([-2, -2, -2, 3], -2, {}, []),  # -0.75; a loss below 0 may rise by half of its size, and 0.3: -0.7
        ([-2, -2, -2, 3.6], -2, {}, [3]),
        ([0.6, 0.6, 0.6, 1.8], 1, {SUSPECTED: [2, 0, 0, 0]}, [3]),  # any loss above the best one's is suspect
    ],
)
def test_whose_update_is_left_out(losses: list[float], last: float, usual: Json, left_out: list[int]) -> None:
    """The mean of the updates is the merged model's loss; the best one's is 0.5. It is round 12."""
    made = strategy()
    made.round, made.facts = 12, Facts([10] * 4, 1.0, lambda model: float(model["w"][0]))
    made.good = {LOSS: torch.tensor(0.5)}
    before = {key: torch.tensor(rounds) for key, rounds in usual.items()}  # type: ignore[arg-type]
    made.usual = {LOSS: torch.tensor([last, last + 1], dtype=torch.float64)} | before
    updates = [update(client, value=loss) for client, loss in enumerate(losses)]
    valid = [Valid(each, made.contribution(each), {}) for each in updates]
    kept, dropped = harmless(made, valid)
    assert [drop.client for drop in dropped] == left_out
    assert sorted(valid.update.client for valid in kept) == [k for k in range(len(losses)) if k not in left_out]
    assert all(int(made.usual[WATCHED][client]) == 12 for client in left_out)
    made.judged = False
    assert harmless(made, valid) == (valid, [])


def test_krum_keeps_as_many_updates_as_it_compares() -> None:
    """It compares no fewer of five updates, however bad the merged model is."""
    made = strategy(**{"num-clients": 5, "mean": "krum", "weighting": "uniform", "byzantine-clients": 1})
    made.round, made.facts = 12, Facts([10] * 5, 1.0, lambda model: float(model["w"][0]))
    made.usual = {LOSS: torch.tensor([1.0], dtype=torch.float64)}
    updates = [update(client, value=9.0) for client in range(5)]
    valid = [Valid(each, made.contribution(each), {}) for each in updates]
    assert harmless(made, valid) == (valid, [])


@pytest.mark.parametrize(("count", "left_out"), [(32, [31]), (33, [])])
def test_up_to_32_updates_are_tried_one_by_one(count: int, left_out: list[int]) -> None:
    made = strategy(**{"num-clients": count})
    made.round, made.facts = 12, Facts([10] * count, 1.0, lambda model: float(model["w"][0]))
    made.usual = {LOSS: torch.tensor([1.0], dtype=torch.float64)}
    updates = [update(client, value=100.0 if client == count - 1 else 1.0) for client in range(count)]
    _, dropped = harmless(made, [Valid(each, made.contribution(each), {}) for each in updates])
    assert [drop.client for drop in dropped] == left_out


def test_the_losses_of_the_last_five_models_are_remembered() -> None:
    made = strategy()
    made.facts = Facts([10] * 4, 1.0, lambda _: 1.0)
    for number in range(1, 9):
        made.round = number
        assert far_worse(made, 1.0 + number / 8, [0]) == ""
    assert made.usual[LOSS].tolist() == [1.5, 1.625, 1.75, 1.875, 2.0]


def test_a_model_that_is_far_worse_by_hand() -> None:
    """A loss of more than twice the lowest one's and 1 is not kept; each refusal doubles what is allowed."""
    made = strategy()
    made.facts = Facts([10] * 4, 1.0, lambda _: 0.5)
    made.round, best = 1, made.current
    assert far_worse(made, 0.4, [0]) == ""
    made.round = 2
    assert far_worse(made, 1.9, [1]) == "the merged model's loss is 1.9, the best one's 0.4: it is not kept"  # 1.8
    assert made.usual[SUSPECTED].tolist() == [0, 2, 0, 0], "not client 0, whose round is not undone"
    made.current = {"w": torch.zeros(3)}
    for made.round in range(3, 8):  # all of the losses that are remembered
        assert far_worse(made, 2.5, [2]) == ""
    made.round = 8
    reason = "the merged model's loss is 2.7, the best one's 0.4: it is not kept, nor are those since round 1"  # 2.6
    assert far_worse(made, 2.7, [3]) == reason
    assert made.usual[SUSPECTED].tolist() == [0, 8, 8, 8]
    assert torch.equal(made.current["w"], best["w"])
    assert (float(made.good[LOSS]), float(made.good[ALLOWED]), made.usual[LOSS].tolist()) == (0.4, 1.6, [1.6])


def test_what_clients_say_that_a_sample_costs_counts_up_to_one_and_a_half_times_the_median() -> None:
    """With ``robust``: 1 FLOP a sample twice, and 30 FLOPs, of which 1.5 count."""
    each = ((0, 10, 10), (1, 20, 20), (2, 900, 30))
    said = [Update(client, {}, {"flops": cost}, count) for client, cost, count in each]
    assert sums_of(said, ["flops"]) == {"flops": 930}
    assert sums_of(said, ["flops"], robust=True) == {"flops": 10 + 20 + 1.5 * 30}


def test_remembered_values_come_back_from_their_named_tensors() -> None:
    masks = {"w": torch.tensor([True, False, True]), "b": torch.tensor([[True], [True]])}
    values = {"round": torch.tensor([2, 0]), "masks": masks, "clients": [masks, {"w": ~masks["w"], "b": masks["b"]}]}
    state = flattened(values | {"sums": {"w": torch.ones(3)}, "own": [{}, {"w": torch.zeros(2)}]})
    assert sorted(state) == [
        "clients/0/b", "clients/0/w", "clients/1/b", "clients/1/w", "masks/b", "masks/w", "own/1/w", "round", "sums/w",
    ]  # fmt: skip
    assert state["masks/w"].dtype == torch.uint8
    again = restored(state, values | {"sums": {}, "own": [{}, {}]})  # whose names are known in the checkpoint alone
    assert [{name: x.tolist() for name, x in each.items()} for each in again["own"]] == [{}, {"w": [0, 0]}]
    assert again["sums"]["w"].tolist() == [1, 1, 1]
    assert [*again["masks"]] == ["w", "b"]
    for one, other in zip([values["masks"], *values["clients"]], [again["masks"], *again["clients"]], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert again["round"].tolist() == [2, 0]


def test_a_state_that_lacks_a_tensor_is_another_versions() -> None:
    with pytest.raises(UserError, match=r"state of the method lacks 'sums/w': another version of the code wrote it"):
        restored({"sums/b": torch.ones(1)}, {"sums": {"w": torch.ones(3)}})


def test_an_update_that_changes_nothing_is_not_in_the_median_norm() -> None:
    merging = Merging(made := strategy())
    merging.reach = {2: 3.0}  # its norm is compared as 12 / 3
    for client, distance in enumerate([0.0, 2.0, 4.0]):
        merging.add(Valid(update(client), made.contribution(update(client)), {"update": distance}))
    assert merging.norms == [2.0, 12.0]


def test_a_position_that_too_few_clients_contribute_to_keeps_its_value() -> None:
    merging = Merging(strategy(**{"min-contributors": 2}))
    for client, on in enumerate(([True, True, False], [True, False, False])):
        contribution = Contribution({"w": torch.full((3,), 2.0)}, {"w": torch.tensor(on)})
        merging.add(Valid(update(client), contribution, {}))
    assert merging.result().model["w"].tolist() == [2, 1, 1]


@pytest.mark.run
def test_a_client_that_leaves_no_state_keeps_its_last_one(
    run_local: Callable[..., tuple[Json, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"method": "local", "evaluate": "personal", "num_clients": 2, "batch_size": 1000, "momentum": 0.0}
    _, whole = run_local("whole", num_rounds=2, **keys)
    train = LocalClient.train

    def forgetful(client: LocalClient, sent: Tensors, config: Json) -> Tensors:
        answer = train(client, sent, config)
        if client.round == 2:
            client.state.clear()
        return answer

    monkeypatch.setattr(LocalClient, "train", forgetful)
    _, folder = run_local(num_rounds=3, **keys)
    lines, expected = read_rounds(folder), read_rounds(whole)
    assert not any(line.get("dropped") or "lost-state" in line for line in lines)
    accuracies = [line["personal-accuracy"] for line in (*lines, *expected)]
    assert accuracies[1] == accuracies[0] < accuracies[2]  # in round 3 it continues from round 1
    assert accuracies[3:] == [accuracies[0], accuracies[2]]  # one batch an epoch: no draw of the round decides
