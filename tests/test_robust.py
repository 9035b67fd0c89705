"""Clipping, median, trimmed mean, Krum: against references written from the definitions; which methods take them."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import METHOD_KEYS, fedsub, merge_round, result
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_methods import made, play
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import Update
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets import robust
from fedsub_app.subnets.averaging import Contribution, masked_mean
from fedsub_app.subnets.norms import norm
from fedsub_app.subnets.robust import RobustMean, clipped, krum
from strategies.base import SubnetStrategy
from strategies.defences import DEFENCES
from strategies.rounds import check_defences

Run = Callable[..., tuple[Json, Path]]
values = st.floats(-1e6, 1e6, width=32)


def mean_of(updates: Sequence[Contribution], old: Mapping[str, Tensor], rule: str, **how: float) -> dict[str, Tensor]:
    mean = RobustMean(old, rule, **how)  # type: ignore[arg-type]
    for update in updates:
        mean.add([update])
    return mean.result()


def columns(rows: Sequence[Sequence[float]]) -> list[Contribution]:
    return [Contribution({"w": torch.tensor(row)}) for row in rows]


def rows_of(least: int, most: int) -> st.SearchStrategy[list[list[float]]]:
    """So many clients' values of the same few positions."""
    return st.integers(1, 5).flatmap(
        lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=least, max_size=most)
    )


# --- position by position: Yin et al. 2018 ---------------------------------------------------------------------------


def by_definition(column: Sequence[float], rule: str, beta: float) -> float:
    """Definitions 1 and 2, with Python's floats."""
    if rule == "median":
        return statistics.median(column)
    ordered, count = sorted(column), len(column)
    left_out = next(k for k in range(count, -1, -1) if k <= round(beta * count, 6))  # floor(beta c)
    kept = ordered[left_out : count - left_out]
    return math.fsum(kept) / len(kept)


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 6), max_size=3),
    st.integers(0, 99),
    st.sampled_from(["median", "trimmed"]),
    st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.49]),
    st.sampled_from([3, 50, 1 << 18]),
)
def test_each_position_is_as_the_definition_says(
    clients: int, shape: list[int], seed: int, rule: str, beta: float, block: int
) -> None:
    """With masks of every kind: one a position, one that broadcasts, none, and tensors that are lacking."""
    draws = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(shape, generator=draws) for name in ("w", "v")}
    updates, covers = [], []
    for number in range(clients):
        x = {name: torch.randn(shape, generator=draws) for name in ("w", "v")}
        mask = torch.rand(shape if number % 2 else [1] * len(shape), generator=draws) < 0.6
        masks = {} if number % 3 == 0 else {"w": mask}
        if number % 4 == 1:
            del x["v"]
        updates.append(Contribution(x, masks, weight=1.0 + number))
        whole = {name: torch.full(shape, name in x) for name in ("w", "v")}
        covers.append(whole | {name: m.expand(shape) for name, m in masks.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "BLOCK", block)
        found = mean_of(updates, old, rule, trim_fraction=beta)
    for name, before in old.items():
        expected = np.empty(shape)
        for position in np.ndindex(*shape):
            column = [
                float(u.tensors[name][position]) for u, c in zip(updates, covers, strict=True) if c[name][position]
            ]
            expected[position] = by_definition(column, rule, beta) if column else before[position]
        assert found[name].dtype == torch.float32
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6, atol=1e-9)


def test_slices_count_where_they_belong() -> None:
    old = {"w": torch.tensor([[8.0, 8.0], [8.0, 8.0], [8.0, 8.0]])}
    rows, column = torch.tensor([0, 2]), torch.tensor([1])
    small = [Contribution({"w": torch.full((2, 1), x)}, slices={"w": (rows, column)}) for x in (1.0, 2.0, 99.0)]
    tall = Contribution({"w": torch.full((3, 1), 5.0)}, slices={"w": (None, column)})
    assert mean_of([*small, tall], old, "median")["w"].tolist() == [[8, 3.5], [8, 5], [8, 3.5]]
    assert mean_of(small, old, "trimmed", trim_fraction=0.34)["w"].tolist() == [[8, 2], [8, 8], [8, 2]]
    change = clipped(small[0], old, 7 * math.sqrt(2), 3.5 * math.sqrt(2))
    assert change.tensors["w"].tolist() == [[4.5], [4.5]]


def test_a_position_is_left_out_of_exactly_the_fraction() -> None:
    """0.29 of 100 values are 29, although 0.29 * 100 is 28.999999999999996; 0.19 of 5 are none."""
    for count, fraction, left_out in ((100, 0.29, 29), (5, 0.19, 0)):
        squares = [float(number**2) for number in range(count)]  # one more at either end is another mean
        mean = mean_of(columns([[x] for x in squares]), {"w": torch.zeros(1)}, "trimmed", trim_fraction=fraction)["w"]
        assert mean.item() == pytest.approx(statistics.mean(squares[left_out : count - left_out]), rel=1e-6)


@settings(deadline=None)
@given(rows_of(3, 9), st.integers(0, 4), values, st.data())
def test_a_minority_cannot_leave_the_range_of_the_honest(
    rows: list[list[float]], hostile: int, evil: float, data: st.DataObject
) -> None:
    """The breakdown points: fewer than half for the median, at most beta n for the trimmed mean."""
    count = len(rows)
    assume(2 * hostile < count)
    honest = torch.tensor(rows[hostile:])
    low, high = honest.amin(0), honest.amax(0)
    rows = [[evil * 1e6 for _ in row] for row in rows[:hostile]] + rows[hostile:]
    updates = data.draw(st.permutations(columns(rows)))
    for rule, beta in (("median", 0.0), ("trimmed", hostile / count)):
        found = mean_of(updates, {"w": torch.zeros_like(low)}, rule, trim_fraction=beta)["w"]
        assert bool(((low <= found) & (found <= high)).all()), rule


@settings(deadline=None)
@given(rows_of(1, 9), st.sampled_from(["median", "trimmed"]), st.data())
def test_the_order_of_the_clients_is_of_no_influence(rows: list[list[float]], rule: str, data: st.DataObject) -> None:
    old = {"w": torch.zeros(len(rows[0]))}
    found = mean_of(columns(rows), old, rule, trim_fraction=0.3)
    shuffled = mean_of(columns(data.draw(st.permutations(rows))), old, rule, trim_fraction=0.3)
    assert torch.equal(found["w"], shuffled["w"])


@settings(deadline=None)
@given(rows_of(1, 9))
def test_trimmed_by_nothing_is_the_average(rows: list[list[float]]) -> None:
    old = {"w": torch.zeros(len(rows[0]))}
    average = masked_mean(old, columns(rows))["w"].numpy()
    largest = np.abs(rows).max()
    np.testing.assert_allclose(mean_of(columns(rows), old, "trimmed")["w"].numpy(), average, atol=1e-5 * largest)


def test_what_nobody_covers_stays_and_server_lr_goes_part_of_the_way() -> None:
    old = {"w": torch.tensor([8.0, 8.0]), "v": torch.tensor(5.0)}
    mask = torch.tensor([True, False])
    updates = [Contribution({"w": torch.tensor([x, 99.0])}, {"w": mask}) for x in (1.0, 2.0, 99.0)]
    for rule in ("median", "trimmed"):
        mean = RobustMean(old, rule, 0.4)
        mean.add(updates)
        new = mean.result(0.5)
        assert new["w"].tolist() == [5.0, 8.0]
        assert new["v"].item() == 5.0
        assert mean.result()["v"].data_ptr() != old["v"].data_ptr()
    with pytest.raises(ValueError, match=r"^tensor w has shape \(1,\), the old one \(2,\)$"):
        mean.add([Contribution({"w": torch.zeros(1)})])


# --- Krum: Blanchard et al. 2017 --------------------------------------------------------------------------------------


def krum_by_definition(vectors: Sequence[Sequence[float]], hostile: int) -> list[float]:
    """Section 4: s(i) = sum over the n - f - 2 closest others of ||V_i - V_j||²."""
    scores = []
    for i, mine in enumerate(vectors):
        away = sorted(
            math.fsum((a - b) ** 2 for a, b in zip(mine, other, strict=True))
            for j, other in enumerate(vectors)
            if j != i
        )
        scores.append(math.fsum(away[: len(vectors) - hostile - 2]))
    return scores


@settings(deadline=None)
@given(rows_of(3, 9), st.integers(0, 3), st.sampled_from([4, 1 << 18]))
def test_krum_chooses_as_the_definition_says(rows: list[list[float]], hostile: int, block: int) -> None:
    assume(len(rows) >= 2 * hostile + 3)
    half = len(rows[0]) // 2
    updates = [{"a": torch.tensor(row[:half]), "b": torch.tensor(row[half:]).reshape(-1, 1)} for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "BLOCK", block)
        chosen = krum(updates, hostile)
    scores = krum_by_definition(rows, hostile)
    assert scores[chosen] == pytest.approx(min(scores), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 99), values)
def test_krums_choice_is_near_the_honest(hostile: int, more: int, seed: int, evil: float) -> None:
    """Its score is at most an honest one's: (n - f - 2) diameters²; and one of its n - f - 2 closest is honest."""
    count = 2 * hostile + 3 + more
    honest = torch.randn(count - hostile, 4, generator=torch.Generator().manual_seed(seed))
    every = [*torch.full((hostile, 4), evil), *honest]
    chosen = every[krum([{"w": row} for row in every], hostile)]
    diameter = float(torch.cdist(honest, honest).max())
    nearest = float((honest - chosen).norm(dim=1).min())
    assert nearest <= math.sqrt(count - hostile - 2) * diameter * (1 + 1e-5)


def test_krum_of_models_that_are_close_together() -> None:
    """Differences of 1e-3 between models of norm 1e3, in which matrix products would see nothing."""
    base = torch.full((30,), 200.0)
    steps = torch.tensor([0.0, 1e-3, 2.2e-3, 5e-2, 7e-2])
    assert krum([{"w": base + step} for step in steps], 1) == 1


def test_krum_takes_one_update_as_it_is() -> None:
    old = {"w": torch.zeros(2), "kept": torch.ones(1)}
    updates = columns([[1.0, 1.0], [1.1, 1.0], [9.0, 9.0], [1.0, 1.2], [0.9, 0.9]])
    new = mean_of(updates, old, "krum", byzantine=1)
    assert new["w"].tolist() == [1.0, 1.0]
    assert new["kept"].tolist() == [1.0]


def test_krum_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="krum of 4 updates: with 1 hostile ones at least 5"):
        krum([{"w": torch.zeros(1)}] * 4, 1)
    mean = RobustMean({"w": torch.zeros(1), "v": torch.zeros(1)}, "krum")
    mean.add([Contribution({"w": torch.zeros(1)})])
    for other in (
        Contribution({"v": torch.zeros(1)}),
        Contribution({"w": torch.zeros(1)}, {"w": torch.tensor([True])}),
        Contribution({"w": torch.zeros(1)}, slices={"w": (torch.tensor([0]), None)}),
    ):
        with pytest.raises(ValueError, match="krum compares whole updates"):
            mean.add([other])


# --- clipping ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 99), st.floats(0.01, 100))
def test_a_clipped_change_has_the_norm_and_the_direction(seed: int, most: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    old = {"w": torch.randn(3, 4, generator=draws), "v": torch.randn(5, generator=draws)}
    update = Contribution({name: torch.randn(x.shape, generator=draws) for name, x in old.items()}, None, 2.0)
    change = {name: x - old[name] for name, x in update.tensors.items()}
    way = norm(change.values())
    found = clipped(update, old, way, most)
    assert found.weight == 2.0
    if way <= most:
        assert found is update
        return
    after = {name: x - old[name] for name, x in found.tensors.items()}
    assert norm(after.values()) == pytest.approx(most, rel=1e-4, abs=1e-6)
    for name, x in after.items():
        torch.testing.assert_close(x, change[name] * (most / way), rtol=1e-4, atol=1e-6)


def test_only_covered_positions_count_for_a_norm() -> None:
    """FedPeWS's mask leaves one of the two values: its change of 3 is scaled to 1, whatever stands at the other."""
    strategy, _ = made("fedavg", clip_norm=1.0)
    strategy.current = {"w": torch.zeros(2)}
    strategy.contribution = lambda update: Contribution(  # type: ignore[method-assign]
        update.tensors, {"w": torch.tensor([True, False])}
    )
    merge_round(strategy, [Update(0, {"w": torch.tensor([3.0, 400.0])}, {}, 1)])
    assert strategy.current["w"].tolist() == [1.0, 0.0]


def test_a_long_update_weighs_less(run_local: Run) -> None:
    """A scaled attack: the clipped run says how many it has clipped, and moves no farther than clip-norm a round."""
    _, folder = run_local(num_clients=3, partition="iid", clip_norm=0.1, attack="scale", attack_scale=50.0)
    lines = read_rounds(folder)[1:]
    assert [line["clipped-updates"] for line in lines] == [3, 3, 3]
    assert lines[0]["largest-update-norm"] > 50 * 0.1


@pytest.mark.parametrize(("factor", "refused"), [(4.5, []), (6.0, [0])])
def test_an_update_of_five_times_the_median_norm_is_the_largest(
    run_local: Run, factor: float, refused: list[int]
) -> None:
    keys: Json = {"robust": "on", "attack": "scale", "attack_scale": factor, "partition": "iid", "num_rounds": 1}
    _, folder = run_local(str(factor), num_clients=5, **keys)
    dropped = read_rounds(folder)[1].get("dropped", [])
    norms = [one["client"] for one in dropped if "max-update-norm = 5 times the round's median" in one["reason"]]
    assert norms == refused


# --- methods ----------------------------------------------------------------------------------------------------------

EVERY = set(DEFENCES)
MASKED = {"krum", "dp-noise-multiplier"}
PRODUCTS = ("fedex-lora", "flexlora", "flora", "hetlora")  # their servers use each client's adapters
REFUSES = dict.fromkeys(
    (
        *(*PRODUCTS, "scaffold", "fednova", "fedpac", "ist", "istprox", "local", "fedpart"),
        *("ssfl", "fedpm", "prunefl", "fedtiny", "fedrts"),
    ),
    EVERY,
) | dict.fromkeys(
    ("fedpews", "subfedavg", "fedselect", "heterofl", "fedrolex", "feddrop", "fjord", "fiarse", "feddst"), MASKED
)
ON = {
    "clip-norm": {"clip_norm": 0.5},
    "median": {"mean": "median"},
    "trimmed": {"mean": "trimmed", "trim_fraction": 0.34},
    "krum": {"mean": "krum", "byzantine_clients": 0},
    "dp-noise-multiplier": {"dp_noise_multiplier": 1.0, "clip_norm": 0.5},
}


@pytest.mark.run  # all of them as long as one
@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_a_defence_or_refuses_it(method: str, defence: str) -> None:
    """Three clients, one round: the model is what the definition says of the contributions, for the plain mean."""
    uniform = {"weighting": "uniform"} if METHOD_KEYS.get(method, {}).get("weighting") else {}
    if method == "fedpart":
        uniform["fedpart__momentum"] = "mean"
    strategy, client = made(method, **uniform, **ON[defence])
    if defence in REFUSES.get(method, ()):
        with pytest.raises(UserError, match=f": not with method = '{method}': "):
            check_defences(strategy)
        return
    check_defences(strategy)
    start, updates = dict(strategy.current), play(strategy, client, rounds=0)
    contributions = [strategy.contribution(update) for update in updates]
    merge_round(strategy, updates)
    assert any(not torch.equal(strategy.current[name], x) for name, x in start.items())
    if defence in ("median", "trimmed") and type(strategy).merge is SubnetStrategy.merge:
        for name, before in start.items():
            held = [c.whole(name, before) for c in contributions if name in c.tensors]
            stacked = np.stack(
                [np.where(True if m is None else m.numpy(), x.numpy(), np.nan) for x, m in held]
                or [np.full(before.shape, np.nan)]
            )
            with np.testing.suppress_warnings() as quiet:
                quiet.filter(RuntimeWarning)  # of positions that nobody covers
                middle = np.nanmedian(stacked, 0)  # of three values also the mean trimmed by one at either end
            full = np.isnan(stacked).sum(0) == 0
            where = full if defence == "trimmed" else ~np.isnan(middle)
            np.testing.assert_allclose(strategy.current[name].numpy()[where], middle[where], rtol=1e-6, atol=1e-9)
            if defence == "median":
                np.testing.assert_array_equal(strategy.current[name].numpy()[~where], before.numpy()[~where])


def test_fedpart_without_moments_and_fedpews_without_warm_up_take_all() -> None:
    for keys in ({"fedpart__momentum": "none"}, {"fedpews__warmup_rounds": 0}):
        method = next(iter(keys)).partition("__")[0]
        for defence in DEFENCES:
            check_defences(made(method, **keys, **ON[defence])[0])


def test_a_method_that_weighs_all_answers_refuses_all() -> None:
    strategy, _ = made("fednova", **ON["median"])
    with pytest.raises(UserError, match="mean = 'median': not with method = 'fednova': its server weighs"):
        check_defences(strategy)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"mean": "mode"}, "mean = 'mode': must be 'average', 'median', 'trimmed' or 'krum'"),
        ({"trim-fraction": 0.5}, "trim-fraction = 0.5: must be less than 0.5"),
        ({"clip-norm": -1.0}, "clip-norm = -1.0: must be greater than or equal to 0"),
        ({"mean": "median", "weighting": "examples"}, "weighting = 'examples': must be 'uniform' with mean = 'median'"),
        (
            {"mean": "krum", "num-clients": 8, "byzantine-clients": 3},
            "byzantine-clients = 3: at most 2 with mean = 'krum' and the 8 clients that take part in a round",
        ),
        (
            {"mean": "krum"},
            "byzantine-clients = 1: mean = 'krum' needs at least 5 clients a round, 2 take part",
        ),
        (
            {"mean": "krum", "byzantine-clients": 0},
            "byzantine-clients = 0: mean = 'krum' needs at least 3 clients a round, 2 take part",
        ),
        ({"mean": "krum", "num-clients": 5}, ""),
        ({"mean": "median"}, ""),
        ({"mean": "trimmed"}, ""),
        ({"attack": "scale", "attackers": 3}, "attackers = 3: at most num-clients = 2"),
        ({"attack": "scale", "attackers": 2}, ""),
        ({"attack": "none", "attackers": 3}, ""),
    ],
)
def test_wrong_settings_are_named(keys: dict[str, str | float], line: str) -> None:
    if not line:
        resolve(keys)
        return
    with pytest.raises(UserError) as caught:
        resolve(keys)
    assert str(caught.value) == line


def test_too_few_answers_for_krum_abandon_the_round(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Client.train

    def fail(self: Client, *arguments: object) -> dict[str, Tensor]:
        if (self.id, self.round) == (0, 2):
            raise ValueError("boom")
        return train(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "train", fail)
    _, folder = run_local(num_clients=5, partition="iid", mean="krum")
    lines = read_rounds(folder)[1:]
    assert [line["status"] for line in lines] == ["ok", "abandoned", "ok"]
    assert lines[1]["abandoned"] == "4 valid replies: mean = 'krum' with byzantine-clients = 1 needs 5"


@pytest.mark.parametrize(
    ("clients", "attackers", "said"),
    [
        (5, 3, "the merged model's loss is "),
        (6, 2, "4 valid replies: mean = 'krum' with byzantine-clients = 1 needs 5"),
    ],
)
def test_robust_leaves_krum_the_answers_that_it_needs(
    run_local: Run, tmp_path: Path, clients: int, attackers: int, said: str
) -> None:
    """No merge is tried without an update where Krum then has too few, here of 5, or of 4 that are not opposed."""
    keys = {"partition": "iid", "model": "feature-mlp", "mean": "krum", "robust": "on", "max_abandoned": 9}
    with suppress(RunFailed):  # all rounds of six clients are abandoned
        run_local(**keys, num_clients=clients, attack="sign-flip", attackers=attackers, attack_scale=1.0)
    assert read_rounds(tmp_path / "run")[2]["abandoned"].startswith(said)


# --- attackers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attack", "factor"), [("sign-flip", -3.0), ("scale", 3.0)])
def test_an_attacker_sends_a_multiple_of_its_change(attack: str, factor: float) -> None:
    keys = {"model": "mnist-cnn-bn", "image_size": 28}
    strategy, client = made("fedavg", attack=attack, attack_scale=3.0, attackers=1, **keys)
    _, honest = made("fedavg", **keys)
    start = strategy.current
    for number in (0, 1):
        ours = client(number, 1, {}).run_training(dict(start), {}).tensors
        theirs = honest(number, 1, {}).run_training(dict(start), {}).tensors
        by = factor if number == 0 else 1.0
        for name, x in theirs.items():
            statistic = name.endswith(("running_mean", "running_var"))
            expected = start[name] + (1.0 if statistic else by) * (x - start[name])
            torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [name for name in METHOD_KEYS if name != "scaffold"])
def test_an_attacker_keeps_the_model_that_it_has_trained(method: str) -> None:
    """It trains it in the next round, and it is evaluated on it: only what it sends is flipped.

    SCAFFOLD's variate follows from the model that is sent, which its server checks.
    """
    kept = []
    for more in ({}, {"attack": "sign-flip", "attackers": 1}):
        strategy, client = made(method, **more)
        strategy.round = 1
        task, worker = strategy.task(0), client(0, 1, {})
        worker.run_training(dict(task.tensors), task.config)
        kept.append(worker.state | worker.personal(dict(strategy.personal_download(0)), {}))
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[1][name], tensor) for name, tensor in kept[0].items())


def test_a_label_flipper_trains_on_labels_from_the_other_end() -> None:
    _, client = made("fedavg", attack="label-flip", attackers=2)
    _, honest = made("fedavg")
    for number in range(3):
        ours, theirs = client(number, 1, {}), honest(number, 1, {})
        assert torch.equal(ours.x, theirs.x)
        assert torch.equal(ours.y, 9 - theirs.y if number < 2 else theirs.y)
        assert torch.equal(ours.samples("test")[1], theirs.samples("test")[1])


def test_the_median_keeps_what_an_attack_on_the_average_destroys(run_local: Run) -> None:
    keys = {"num_clients": 5, "partition": "iid", "attack": "sign-flip", "num_rounds": 8}
    found = {mean: run_local(mean, mean=mean, **keys)[0]["final-global-accuracy"] for mean in ("average", "median")}
    assert found["average"] < 50 < 80 < found["median"]


# --- resume -----------------------------------------------------------------------------------------------------------


def test_killed_and_resumed_is_as_never_killed(tmp_path: Path) -> None:
    keys = ["-s", "method=fedpews", "-s", "fedpews.warmup-rounds=3", "-s", "mean=trimmed", "-s", "clip-norm=0.5"]
    keys += ["-s", "model=feature-mlp", "-s", "train-per-class=40", "-s", "num-clients=5", "-s", "num-rounds=3"]
    keys += ["-s", "partition=iid"]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert fedsub(tmp_path, "run", *keys, "-s", f"run-dir={whole}").code == 0
    died = fedsub(tmp_path, "run", *keys, "-s", f"run-dir={folder}", die=("line written", 2))
    assert died.code < 0, died.err
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert resumed.code == 0, resumed.err
    assert result(folder) == result(whole)
