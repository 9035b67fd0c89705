"""Device classes: shares, speeds and the clock by hand, draws from the seed, refusals, the same run on all engines."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ends_as_if_never_stopped, read, rounds
from safetensors.torch import load_file

from fedsub_app.common.conf_files import read_toml
from fedsub_app.common.errors import UserError
from fedsub_app.common.score import SCORES
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.devices import Device, checked, devices_of, presets
from fedsub_app.federation.local_grid import LocalGrid
from fedsub_app.federation.nodes import available, draw, held_out, takes_part
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.reports.compare import served_table, summary_table
from fedsub_app.reports.html import write_html
from fedsub_app.reports.records import grouped, read_run
from fedsub_app.runs import console
from fedsub_app.runs.config import resolve
from fedsub_app.runs.loop import client_bytes, prepare
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.plan import plan
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.masks import deal
from fedsub_app.subnets.norms import NormGuard
from fedsub_app.training.problem import Problem
from fedsub_app.training.workplace import workplace
from strategies.clock import Clock
from strategies.evaluation import by_client
from strategies.merging import FirstValid, Valid, _empty_mean

Run = Callable[..., tuple[Json, Path]]
TWO = """
[[class]]
name = "fast"
share = 0.5
flops-per-second = 1e9
down-mbps = 8
up-mbps = 4
watts = 2
[[class]]
name = "slow"
share = 0.5
width = 0.5
flops-per-second = 1e8
down-mbps = 1
up-mbps = 0.5
"""


@pytest.fixture
def two(tmp_path: Path) -> str:
    """A file of two classes, the second one of half width."""
    (tmp_path / "two.toml").write_text(TWO)
    return str(tmp_path / "two.toml")


def settings(**keys: Any) -> Any:
    return resolve({key.replace("_", "-"): value for key, value in ({"method": "heterofl"} | keys).items()})


def test_the_time_of_a_client_by_hand() -> None:
    """10^6 bytes at 8 Mbit/s take a second, 2e9 FLOPs two, 10^6 bytes at 4 Mbit/s two; a speed of 0 takes none."""
    device = Device(name="a", share=1.0, down_mbps=8.0, flops_per_second=1e9, up_mbps=4.0)
    assert device.seconds(1e6, 2e9, 1e6) == pytest.approx(1 + 2 + 2)
    assert Device(name="a", share=1.0).seconds(1e6, 2e9, 1e6) == 0


@pytest.mark.parametrize(("keys", "times"), [({}, 3), ({"momentum": 0.9}, 4), ({"optimizer": "adam"}, 5)])
def test_the_bytes_of_a_client_by_hand(keys: dict[str, Any], times: int) -> None:
    """Network, gradients and received model, each moment of the optimizer, and the samples."""
    assert client_bytes(settings(**keys), 100, 7) == times * 100 + 7


def test_the_clients_are_cut_into_the_shares_by_the_seed(two: str) -> None:
    drawn = [settings(devices=two, num_clients=7, seed=seed).client_devices for seed in (0, 0, 1)]
    names = [[devices.of(client).name for client in range(7)] for devices in drawn]
    assert Counter(names[0]) == {"fast": 4, "slow": 3}
    assert names[0] == names[1] != names[2]


def test_the_settings_hold_the_files_content(two: str, tmp_path: Path) -> None:
    before = settings(devices=two)
    (tmp_path / "two.toml").unlink()
    assert resolve(before.flat()) == before
    assert [each["name"] for each in json.loads(before.devices)] == ["fast", "slow"]


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid_and_name_their_sources(name: str) -> None:
    assert checked(name) == name
    assert devices_of(name, 10, 0).of(0).share > 0
    for line in presets()[name].read_text().splitlines():
        if line.startswith(("flops", "down", "up", "watts", "memory", "drop", "availability")):
            assert "#" in line, "a published number stands beside its source"
    assert read_toml(presets()[name])["class"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[class]]\nname = "a"\nshare = 1\nwidth = 2', "class 1, width = 2: must be less than or equal to 1"),
        (
            '[[class]]\nname = "a"\nshare = 1\nwidht = 1',
            "class 1: 'widht': unknown key; allowed are name, share, width, ",
        ),
        ('[[class]]\nname = "a"', "class 1, share: missing"),
        ('[[class]]\nname = "My phone"\nshare = 1', "class 1, name = 'My phone': must be lower-case letters a to z, "),
        ('[[class]]\nname = "a"\nshare = 0.5', "the shares add up to 0.5: must be 1"),
        ('[[class]]\nname = "a"\nshare = 0.5\n[[class]]\nname = "a"\nshare = 0.5', "two classes of one name in a, a"),
        ("[classes.a]\nshare = 1", "'classes': unknown key; allowed are class"),
        ('class = "a"', "class = 'a': must be a list"),
        ('class = ["a"]', "class 1 = 'a': must be a table of name, share, "),
        ("class = []", "class = []: Tuple should have at least 1 item"),
        ("[[class]", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_class_and_key(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError) as error:
        settings(devices=str(tmp_path / "mine.toml"))
    assert said in str(error.value)
    assert "mine.toml" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"devices": "none.toml"}, "devices = 'none.toml': allowed are boards, heterofl, phones, or a file of yours"),
        ({"devices": "cars"}, "devices = 'cars': allowed are boards, heterofl, phones, or a file of yours"),
        ({"deadline": 3.0}, "deadline = 3: does nothing without devices"),
        ({"min-width": 1.0}, "min-width = 1: does nothing without devices"),
        ({"max-device-seconds": 3.0}, "max-device-seconds = 3: does nothing without devices"),
        ({"num-clients": 3, "held-out-clients": 3}, "held-out-clients = 3: below num-clients = 3"),
        (
            {"num-clients": 3, "held-out-clients": 1, "clients-per-round": 3},
            "clients-per-round = 3: at most num-clients = 3 without held-out-clients = 1",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Value], said: str) -> None:
    with pytest.raises(UserError) as error:
        resolve(keys)
    assert str(error.value).startswith(said)


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_a_round_asks_neither_held_out_nor_absent_nor_narrow_clients(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(TWO.replace('name = "fast"', 'name = "fast"\navailability = 0.5'))
    keys = {"devices": str(tmp_path / "some.toml"), "num_clients": 200, "held_out_clients": 20}
    chosen = settings(**keys)
    out = held_out(chosen)
    assert len(out) == 20
    asked = [set(draw(chosen, number)) for number in range(1, 41)]
    assert all(clients.isdisjoint(out) for clients in asked)
    of = chosen.client_devices.of
    fast = {client for client in range(200) if of(client).name == "fast"} - out
    assert fmean(len(clients & fast) for clients in asked) == pytest.approx(len(fast) / 2, rel=0.05)
    assert all(len(clients - fast) == 180 - len(fast) for clients in asked), "the others are always there"
    assert len({frozenset(clients) for clients in asked}) == 40
    wide = settings(**keys, min_width=1.0)
    assert all(of(client).width == 1 for client in draw(wide, 1))
    assert available(settings(num_clients=3), 1) == [True] * 3


def test_statistics_are_measured_by_the_clients_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(TWO.replace('name = "fast"', 'name = "fast"\navailability = 0.5'))
    keys = {"devices": str(tmp_path / "some.toml"), "num_clients": 40, "held_out_clients": 4}
    chosen = settings(**keys, model="lenet5-bn", image_size=32)
    measured = METHODS["heterofl"].strategy(chosen, Problem.of(chosen).network()).measurement
    measured.round = 1
    assert list(measured.clients()) == sorted(draw(chosen, 1))
    assert len(measured.clients()) < 36


def test_without_devices_a_draw_is_the_earlier_one() -> None:
    """By the permutation of (seed, round), which earlier versions took whole."""
    assert draw(resolve({"num-clients": 6, "clients-per-round": 3}), 2) == draw(resolve({"num-clients": 6}), 2)[:3]


# --- the clock --------------------------------------------------------------------------------------------------------


def clock(text: str, **keys: Any) -> Clock:
    """A clock of round 1 of four clients, each of which was sent 10^6 bytes."""
    chosen = settings(devices=text, num_clients=4, **keys)
    phase = SimpleNamespace(outbox=SimpleNamespace(formula_of=dict.fromkeys(range(4), 10**6)))
    strategy = SimpleNamespace(settings=chosen, phase=phase, round=1)
    return Clock(strategy, chosen.client_devices)  # type: ignore[arg-type]


def of_class(timed: Clock, name: str) -> int:
    return next(client for client in range(4) if timed.devices.of(client).name == name)


def test_a_round_takes_as_long_as_its_slowest_reply(two: str) -> None:
    """Fast: 1 s down, 1e9 FLOPs in 1 s. Slow: 8 s down and 10 s."""
    timed = clock(two)
    fast, slow = of_class(timed, "fast"), of_class(timed, "slow")
    assert [timed.late(Update(client, {}, {"flops": 1e9})) for client in (fast, slow)] == ["", ""]
    assert timed.arrivals == {fast: pytest.approx(2), slow: pytest.approx(18)}
    assert timed.report([fast, slow], 2) == {"device-seconds": pytest.approx(18), "joules": pytest.approx(2 * 2)}
    timed = clock(two)
    assert timed.late(Update(fast, {}, {"flops": 1e9})) == ""
    assert timed.report([fast], 2)["device-seconds"] == pytest.approx(2), "no deadline: a lost reply is noticed at once"
    timed.late(Update(fast, {}, {"flops": 1e9}), later=10**6)
    assert timed.arrivals[fast] == pytest.approx(4), "a secure sum's vector follows the reply"


def test_who_is_late_is_named_and_the_server_waits_until_the_deadline(two: str) -> None:
    timed = clock(two, deadline=10.0)
    fast, slow = of_class(timed, "fast"), of_class(timed, "slow")
    late = timed.late(Update(slow, {}, {"flops": 1e9}))
    assert late == "late: 18 s on its device (slow), deadline = 10"
    assert timed.late(Update(fast, {}, {"flops": 1e9})) == ""
    assert timed.report([fast], 2)["device-seconds"] == 10
    assert timed.report([fast], 1)["device-seconds"] == pytest.approx(2), "over-sampled: one reply is enough"
    timed.deadline = 1.5
    assert timed.report([], 1)["joules"] == pytest.approx(2 * 1.5), "a late device stops at the deadline"
    timed.deadline = 10.0
    for client in range(4):
        timed.late(Update(client, {}, {"flops": 1e9}))
    assert timed.report([fast], 4)["device-seconds"] == 10, "also where all replies come in the end"


def test_a_refused_reply_has_come(two: str) -> None:
    """All four are asked and answer: nobody is waited for until the deadline."""
    timed = clock(two, deadline=100.0)
    assert [timed.late(Update(client, {}, {"flops": 1e9})) for client in range(4)] == [""] * 4
    fast = of_class(timed, "fast")
    assert timed.report([fast], 4)["device-seconds"] == pytest.approx(18), "slow ones were refused"


def test_in_an_over_sampled_round_the_first_by_the_clock_count() -> None:
    arrivals: dict[int, float] = {}
    judge = FirstValid([3, 1, 2], 2, lambda: NormGuard[Valid](10.0, 1.0), arrivals)
    for client, seconds in ((1, 5.0), (2, 1.0), (3, 2.0)):
        arrivals[client] = seconds
        judge.add(Valid(Update(client), Contribution({}), {"update": 1.0}), {})
    assert [item.update.client for item, _ in judge.rest()] == [2, 3]


# --- what fits --------------------------------------------------------------------------------------------------------


def test_a_class_that_cannot_hold_the_network_is_refused_before_round_1(two: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"devices": two, "num_clients": 4, "model": "fedpews-mlp"}
    with pytest.raises(UserError, match=r"^devices: class slow holds width 0.5, method = 'fedavg' trains the whole"):
        prepare(settings(**keys, method="fedavg"))
    for allowed in ({"method": "fedavg", "min_width": 1.0}, {"method": "fedavg", "model_width": 0.5}, {}):
        prepare(settings(**keys, **allowed))
    text = plan(settings(**keys))
    assert "device fast  2 clients of width 1, a network of" in text
    assert "device slow  2 clients of width 0.5, a network of" in text
    (tmp_path / "two.toml").write_text(TWO + "memory-mb = 0.01")
    with pytest.raises(UserError, match=r"^devices: class slow holds memory-mb = 0.01, a client of heterofl needs"):
        prepare(settings(**keys))
    (tmp_path / "two.toml").write_text('[[class]]\nname = "a"\nshare = 1\nwidth = 0.5')
    for method in ({}, {"method": "fedpews", "fedpews.masks": "fixed"}):
        with pytest.raises(UserError, match=r"^min-width = 1: 0 of 4 clients hold that width, a round needs 1$"):
            prepare(settings(**keys, **method, min_width=1.0))


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ({"min_replies": 3}, 3),
        ({"mean": "krum"}, 5),
        ({"secure_aggregation": True}, 3),
        ({"dp_noise_multiplier": 1.0, "dp_noise_by": "clients", "clip_norm": 1.0}, 5),
    ],
)
def test_clients_that_hold_the_width_are_as_many_as_a_round_needs(two: str, more: dict[str, Any], needed: int) -> None:
    keys = {"devices": two, "num_clients": 5, "model": "fedpews-mlp", "method": "fedavg", "weighting": "uniform"}
    said = rf"^min-width = 1: 2 of 5 clients hold that width, a round needs {needed}$"
    with pytest.raises(UserError, match=said):
        prepare(settings(**keys, min_width=1.0, **more))


@pytest.mark.parametrize("seed", range(4))
def test_a_class_that_draws_its_width_must_hold_the_largest_one(seed: int, two: str, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO.replace("watts = 2", "memory-mb = 0.25"))
    keys: dict[str, Any] = {"devices": two, "num_clients": 4, "model": "fedpews-mlp", "seed": seed}
    with pytest.raises(UserError, match=r"^devices: class fast holds memory-mb = 0.25, a client of heterofl needs"):
        prepare(settings(**keys, **{"heterofl.assignment": "dynamic"}))


def test_a_model_width_keeps_the_first_units() -> None:
    whole, half = (prepare(settings(method="fedavg", model="fedpews-mlp", model_width=w))[0] for w in (1.0, 0.5))
    weight, narrow = (next(p for p in each.network().parameters() if p.dim() > 1) for each in (whole, half))
    assert 2 * len(narrow) == len(weight)
    assert narrow.equal(weight[: len(narrow)])


# --- the methods of the five papers ----------------------------------------------------------------------------------


def made(two: str, **keys: Any) -> Any:
    """The server side of a method in round 1."""
    chosen = settings(**{"devices": two, "num_clients": 4, "model": "fedpews-mlp"} | keys)
    strategy = METHODS[chosen.method].strategy(chosen, workplace(chosen).network.module)
    strategy.round = 1
    return strategy


def slow(strategy: Any) -> int:
    return next(client for client in range(4) if strategy.devices.of(client).name == "slow")


@pytest.mark.parametrize(("model_width", "held"), [(1.0, {1.0, 0.5}), (0.8, {1.0, 0.625}), (0.5, {1.0})])
def test_a_device_holds_a_fraction_of_the_narrower_model(model_width: float, held: set[float], two: str) -> None:
    strategy = made(two, model_width=model_width)
    assert {strategy.held_width(client) for client in range(4)} == held


def test_with_noise_a_round_divides_by_the_clients_that_it_asks(two: str) -> None:
    """Of eight that would take part the fast four are asked: each changes every value by 1, and so does their mean."""
    keys: dict[str, Any] = {"dp_noise_multiplier": 0.01, "clip_norm": 1.0, "min_width": 1.0, "num_clients": 8}
    strategy = made(two, method="fedavg", **keys)
    assert len(draw(strategy.settings, 1)) == 4
    mean = _empty_mean(strategy)
    mean.add([Contribution({name: x + 1 for name, x in strategy.current.items()})] * 4)
    for name, new in mean.result().items():
        assert float((new - strategy.current[name]).mean()) == pytest.approx(1, abs=0.05)


def test_the_model_width_that_a_refusal_names_is_allowed() -> None:
    """Of three widths the smallest, in whatever order the classes stand."""
    keys = {"devices": "phones", "method": "fedavg", "num_clients": 10, "model": "fedpews-mlp"}
    with pytest.raises(UserError, match=r"class old holds width 0.25.* model-width = 0.25"):
        prepare(settings(**keys))
    prepare(settings(**keys, model_width=0.25))


def test_ist_deals_units_in_proportion_to_the_widths(two: str) -> None:
    """Widths 1, 1, 0.5, 0.5: each client has one unit and a third or a sixth of the others."""
    strategy = made(two, method="ist")
    for group in strategy.units:
        counts = {client: int(strategy.units_of(client)[group.name].sum()) for client in range(4)}
        assert sum(counts.values()) == group.size
        for client, count in counts.items():
            assert count == pytest.approx(1 + (group.size - 4) * strategy.held_width(client) / 3, abs=1)
    few = deal(strategy.units, [0.25, 0.25], generator(0))
    assert all(int(each[group.name].sum()) <= group.kept(0.25) for each in few for group in strategy.units)


def test_fedpews_fixed_masks_have_the_widths_as_shares(two: str) -> None:
    keys = {"method": "fedpews", "fedpews.masks": "fixed", "fedpews.warmup-rounds": 50}
    strategy = made(two, **keys)
    narrow = slow(strategy)
    assert strategy.fixed[narrow].float().mean() == pytest.approx(1 / 6, abs=0.01)
    assert strategy.narrows
    prepare(strategy.settings)
    with pytest.raises(UserError, match="method = 'fedpews' trains the whole network"):
        prepare(made(two, **keys | {"fedpews.warmup-rounds": 3}).settings)


def test_no_device_is_given_more_than_it_holds(tmp_path: Path) -> None:
    """The fixed masks of four eighths would be quarters; without adapters a method of ranks trains all."""
    (tmp_path / "tiny.toml").write_text('[[class]]\nname = "tiny"\nshare = 1.0\nwidth = 0.125\n')
    for keys in ({"method": "fedpews", "fedpews.masks": "fixed", "fedpews.warmup-rounds": 50}, {"method": "flexlora"}):
        with pytest.raises(UserError, match=f"method = '{keys['method']}' trains the whole network"):
            prepare(made(str(tmp_path / "tiny.toml"), **keys).settings)


@pytest.mark.parametrize("shares", ["", "0.4, 0.3, 0.2, 0.1"])
def test_fedpews_fixed_masks_leave_no_units_to_clients_that_never_take_part(shares: str) -> None:
    strategy = made("", method="fedpews", held_out_clients=1, **{"fedpews.masks": "fixed", "fedpews.shares": shares})
    assert bool((strategy.fixed.sum(0) == 1).all())
    assert strategy.fixed.any(1).tolist() == takes_part(strategy.settings)


@pytest.mark.parametrize("method", ["fedselect", "subfedavg"])
def test_personal_and_pruned_parts_go_by_the_width(method: str, two: str) -> None:
    strategy = made(two, method=method, local_epochs=2, validation_fraction=0.1)
    narrow = slow(strategy)
    assert strategy.task(narrow).config == {"width": 0.5}
    assert made("", method=method, local_epochs=2, validation_fraction=0.1).task(0).config == {}
    place, sent = workplace(strategy.settings), strategy.task(narrow).tensors
    client: Any = METHODS[method].client(place, narrow, 1, {})
    if method == "subfedavg":
        masks, client.width = client.masks, 0.3
        while fewer := client.fewer_weights(masks, {n: -t.flip(0) for n, t in sent.items()}, sent):
            masks |= fewer
        assert client.plan.pruned(masks) == pytest.approx(0.7, abs=0.01), "the setting's target is 0.5"
    else:
        alphas: list[float] = []

        def grow(masks: Tensors, before: Tensors, trained: Tensors, alpha: float) -> Tensors:
            alphas.append(alpha)
            return {}

        client.grow = grow
        client.train(dict(sent), {"width": 0.5})
        client.train(dict(sent), {})
        assert alphas == [0.5, strategy.options.alpha]


def test_a_narrow_client_may_prune_channels_down_to_its_width() -> None:
    keys = {"subfedavg.pruning": "hybrid", "model": "lenet5-bn", "image_size": 32}
    strategy = made("", method="subfedavg", local_epochs=2, validation_fraction=0.1, **keys)
    sent, left = strategy.task(0).tensors, {}
    for width in (1.0, 0.2):
        client: Any = METHODS["subfedavg"].client(workplace(strategy.settings), 0, 1, {})
        masks, client.width = dict(client.masks), width
        scales = {name: torch.arange(len(sent[name])) / 10 for name in client.plan.scales.values()}
        early = sent | {name: scale.flip(0) for name, scale in scales.items()}
        while fewer := client.fewer_channels(masks, early, sent | scales):
            masks |= fewer
            if (share := min(float(masks[group].float().mean()) for group in client.plan.scales)) == left.get(width):
                break
            left[width] = share
    assert left[0.2] < 0.5 <= left[1.0], "channel-floor = 0.5"


@pytest.mark.parametrize("others", ["masks", "highest"])
def test_clients_that_never_take_part_are_no_others_of_fedpews(others: str, two: str) -> None:
    strategy = made(two, method="fedpews", num_clients=6, held_out_clients=1, **{"fedpews.others": others})
    part = [client for client, there in enumerate(takes_part(strategy.settings)) if there]
    strategy.theta[part] = 0.25
    assert len(part) == 5
    assert all(bool((strategy.task(client).tensors["fedpews/theta"] == 0.25).all()) for client in part)


def test_fedpart_asks_the_clients_whose_devices_can_hold_the_trained_group(two: str, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO.replace("width = 0.5", "width = 0.1"))
    strategy = made(two, method="fedpart", **{"fedpart.full-rounds": 1})
    narrow = slow(strategy)
    wide = next(client for client in range(4) if client != narrow and strategy.devices.of(client).width == 1)
    assert (strategy.fits(narrow), strategy.fits(wide)) == (False, True), "round 1 trains the whole network"
    fitting = set()
    for number in range(2, 2 + 2 * len(strategy.groups)):
        strategy.round = number
        fitting.add(strategy.fits(narrow))
    assert fitting == {True, False}
    assert " by the formula, 2 clients" in plan(strategy.settings)


@pytest.mark.parametrize(("full", "what"), [(1, "the whole network"), (0, "layer group 0")])
def test_fedpart_refuses_devices_of_which_none_holds_what_a_round_trains(full: int, what: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('[[class]]\nname = "small"\nshare = 1\nwidth = 0.05\n')
    with pytest.raises(UserError, match=f"devices: no class can hold {what}, which round 1 trains"):
        made(str(path), method="fedpart", **{"fedpart.full-rounds": full})


@pytest.mark.parametrize("keys", [{"secure_aggregation": True}, {"min_replies": 3}], ids=str)
def test_fedpart_refuses_devices_of_which_fewer_hold_what_a_round_trains_than_it_needs(
    keys: dict[str, Any], two: str
) -> None:
    said = "devices: 2 of 4 clients can hold the whole network, which round 1 trains; a round needs 3"
    with pytest.raises(UserError, match=said):
        made(two, method="fedpart", **keys)


def test_fedpart_is_held_against_the_rounds_that_the_run_has(tmp_path: Path) -> None:
    """From deep to shallow groups of 330, 4,128 and 8,320 of 16,970 parameters, two rounds each."""
    path = tmp_path / "small.toml"
    path.write_text('[[class]]\nname = "small"\nshare = 1\nwidth = 0.3\n')
    keys = {"method": "fedpart", "fedpart.full-rounds": 0, "fedpart.order": "deep"}
    made(str(path), **keys, num_rounds=4)
    with pytest.raises(UserError, match="devices: no class can hold layer group 2, which round 5 trains"):
        made(str(path), **keys, num_rounds=5)


def test_with_noise_fedpart_divides_by_the_clients_that_can_hold_the_round(two: str) -> None:
    """Two of four can hold the whole network: each changes every value by 1, and so does their mean."""
    keys: dict[str, Any] = {"dp_noise_multiplier": 0.01, "clip_norm": 1.0, "weighting": "uniform"}
    strategy = made(two, method="fedpart", **keys)
    mean = _empty_mean(strategy)
    mean.add([Contribution({name: x + 1 for name, x in strategy.current.items()})] * 2)
    for name, new in mean.result().items():
        assert float((new - strategy.current[name]).mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_a_reply_of_another_width_or_of_rows_that_were_not_sent_is_refused(method: str, two: str) -> None:
    strategy = made(two, method=method)
    narrow = slow(strategy)
    classes = {"reply/classes": torch.ones(10, dtype=torch.bool)}
    sent = dict(strategy.task(narrow).tensors)
    read(strategy, Update(narrow, sent | classes, {"train-loss": 1.0}, 1))
    name = next(name for name, tensor in sent.items() if tensor.shape != strategy.current[name].shape)
    for tensor in (strategy.current[name], sent[name][1:], torch.cat([sent[name], sent[name][:1]])):
        with pytest.raises(BadReply, match=f"tensor '{name}': shape .* expected"):
            read(strategy, Update(narrow, sent | classes | {name: tensor}, {"train-loss": 1.0}, 1))


# --- who is served ----------------------------------------------------------------------------------------------------


def test_scores_by_class_decile_and_held_out_by_hand(two: str) -> None:
    chosen = settings(devices=two, num_clients=23, held_out_clients=3)
    strategy: Any = SimpleNamespace(settings=chosen, devices=chosen.client_devices, score=chosen.score)
    key, out = "personal-accuracy", held_out(chosen)
    updates = [Update(client, {}, {key: float(client)}) for client in range(23)]
    members = sorted({*range(23)} - out)
    served = by_client(strategy, updates)[key]
    assert served["held out"] == fmean(out)
    assert served["worst decile"] == fmean(members[:2])
    classes = {f"device {chosen.client_devices.of(client).name}" for client in members}
    assert served.keys() == classes | {"held out", "worst decile"}
    fast = [client for client in members if chosen.client_devices.of(client).name == "fast"]
    assert served["device fast"] == fmean(fast)
    strategy.score, strategy.robust = SCORES["regression"], True
    updates = [Update(client, {}, {"personal-rmse": 1e9 if client == fast[0] else 1.0}) for client in range(23)]
    assert by_client(strategy, updates)["personal-rmse"]["device fast"] == 1.0, "one client moves no group's error far"


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.run
@pytest.mark.parametrize("network", [{}, {"model": "lenet5-bn", "image_size": 32}])
def test_one_class_of_width_1_is_fedavg_bit_for_bit(network: Json, run_local: Run, tmp_path: Path) -> None:
    """All five methods; but for the statistics of BatchNorm, which all of them but FIARSE measure anew."""
    (tmp_path / "one.toml").write_text('[[class]]\nname = "all"\nshare = 1')
    keys = {
        "num_clients": 4,
        "clients_per_round": 2,
        "evaluate": "global, global-local",
        "weighting": "uniform",
    } | network
    _, folder = run_local("whole", method="fedavg", **keys)
    whole, lines = load_file(folder / "model.safetensors"), rounds(folder)[1:]
    for name in ("fedavg", "heterofl", "fedrolex", "feddrop", "fjord", "fiarse"):
        own = {f"{name}__masked_loss": False} if name in ("heterofl", "fedrolex", "feddrop") else {}
        _, folder = run_local(name, method=name, **keys, **own, devices=str(tmp_path / "one.toml"))
        measured = network and name not in ("fedavg", "fiarse")
        for tensor, values in load_file(folder / "model.safetensors").items():
            assert values.equal(whole[tensor]) or (measured and "running" in tensor)
        for line, other in zip(rounds(folder)[1:], lines, strict=True):
            assert line["device-seconds"] == 0
            assert line["train-loss"] == other["train-loss"]
            assert network or line["served"]["global-accuracy"] == {"width 1": other["global-accuracy"]}
            assert measured or line["global-local-accuracy"] == other["global-local-accuracy"]


@pytest.mark.run
def test_a_run_with_devices_is_the_same_on_two_workers_and_after_a_resume(
    two: str, run_local: Run, tmp_path: Path
) -> None:
    """Absent and vanishing clients, a deadline and spares included; the budget ends it by the clock."""
    (tmp_path / "two.toml").write_text(TWO.replace("share = 0.5", "share = 0.5\navailability = 0.8\ndrop = 0.2"))
    keys: dict[str, Any] = {
        "method": "heterofl", "heterofl__masked_loss": False, "devices": two, "num_clients": 8, "clients_per_round": 3,
        "oversample": 1.6, "deadline": 100.0, "held_out_clients": 1, "num_rounds": 4, "keep_checkpoints": 0,
        "evaluate": "global, global-local",
    }  # fmt: skip
    ends_as_if_never_stopped(run_local, tmp_path, keys)
    lines = rounds(tmp_path / "whole")
    _, folder = run_local("nodes", grid=lambda app, given: LocalGrid(app, given, 3), **keys)
    assert rounds(folder) == lines
    assert any("drops out" in drop["reason"] for line in lines[1:] for drop in line["dropped"])
    assert {"width 0.5", "width 1"} == lines[-1]["served"]["global-accuracy"].keys()
    assert "held out" in lines[-1]["served"]["global-local-accuracy"]
    spent = [line["device-seconds"] for line in read_rounds(tmp_path / "whole")[1:]]
    summary, _ = run_local("budget", **keys, max_device_seconds=spent[0] + spent[1] / 2)
    assert (summary["rounds"], summary["ended-by"]) == (2, "max-device-seconds")
    assert summary["total-device-seconds"] == pytest.approx(sum(spent[:2]))
    _, folder = run_local("budget", **keys, resume=True, max_device_seconds=0.0)
    assert rounds(folder) == lines
    shown_by_all_reports(folder, tmp_path)


@pytest.mark.parametrize(
    "keys", [{"devices": "heterofl"}, {"method": "fedavg", "local_steps": 5, "dirichlet_alpha": 0.1}]
)
def test_with_robust_honest_clients_that_differ_cost_what_they_cost(keys: dict[str, Any], run_local: Run) -> None:
    """Wide clients beside narrow ones, and few samples that as many steps train: more than 1.5 times the median."""
    keys = {"method": "heterofl", "num_clients": 5, "num_rounds": 1, "partition": "dirichlet"} | keys
    flops = [read_rounds(run_local(robust, **keys, robust=robust)[1])[1]["flops"] for robust in ("on", "off")]
    assert flops[0] == flops[1]


@pytest.mark.run
def test_ist_runs_where_the_client_with_most_samples_of_a_class_is_not_asked_first(two: str, run_local: Run) -> None:
    """The memory of each class is checked by that client, which has no units in round 1."""
    for seed in range(3):
        keys: dict[str, Any] = {"devices": two, "num_clients": 8, "clients_per_round": 2, "seed": seed}
        summary, _ = run_local(str(seed), method="ist", **keys, num_rounds=1)
        assert summary["abandoned-rounds"] == 0


def test_ist_begins_also_if_no_client_is_there_at_first(tmp_path: Path) -> None:
    (tmp_path / "rare.toml").write_text('[[class]]\nname = "rare"\nshare = 1\navailability = 0.05')
    chosen = settings(devices=str(tmp_path / "rare.toml"), method="ist", num_clients=3, model="fedpews-mlp")
    assert draw(chosen, 0) == []
    prepare(chosen)


def test_late_clients_do_not_count_and_are_named_where_nobody_stands_in(two: str, run_local: Run) -> None:
    keys: dict[str, Any] = {"method": "heterofl", "devices": two, "num_clients": 6, "num_rounds": 1}
    _, folder = run_local("patient", **keys)
    longest = read_rounds(folder)[1]["device-seconds"]
    classes = devices_of(two, 6, 0)
    slow = {client for client in range(6) if classes.of(client).name == "slow"}
    assert 0 < len(slow) < 4
    _, folder = run_local("deadline", **keys, deadline=0.9 * longest)
    line = read_rounds(folder)[1]
    assert {drop["client"] for drop in line["dropped"]} == slow
    reason = rf"late: [0-9.]+ s on its device \(slow\), deadline = {0.9 * longest:g}"
    assert all(re.fullmatch(reason, drop["reason"]) for drop in line["dropped"]), line["dropped"]
    assert line["device-seconds"] == pytest.approx(0.9 * longest)
    spare = keys | {"clients_per_round": 3, "oversample": 2.0}
    _, folder = run_local("spares", **spare, deadline=0.9 * longest)
    line = read_rounds(folder)[1]
    assert line["dropped"] == []
    assert line["device-seconds"] < 0.9 * longest
    short = keys | {"clients_per_round": 5, "oversample": 1.2}
    _, folder = run_local("short", **short, deadline=0.9 * longest)
    line = read_rounds(folder)[1]
    assert ({drop["client"] for drop in line["dropped"]}, line["not-waited-for"]) == (slow, [])
    assert line["device-seconds"] == pytest.approx(0.9 * longest)


def shown_by_all_reports(folder: Path, tmp_path: Path) -> None:
    """Summary, table, page, export: the clock, the energy and who is served are those of the lines."""
    record, (group,) = read_run(folder), grouped([folder])
    served, summary = record.lines[-1]["served"], record.summary
    header, ((_, row),) = summary_table([group])
    for name in ("device seconds", "joules"):
        assert row[header.index(name)].value == pytest.approx(summary[f"total-{name.replace(' ', '-')}"])
    assert f"{summary['total-joules']:.4g} J" in console.summary_table(summary | {"run-dir": folder}, record.score)
    titles, ((_, means),) = served_table([group])
    numbers = [number for of in served.values() for number in of.values()]
    assert [cell.value for cell in means] == numbers
    page, table, _ = write_html([group], tmp_path / "report.html", "A run", "")
    assert all(title in page.read_text() for title in titles)
    *_, last = csv.DictReader(table.open())
    assert [float(last[f"{score}, {name}"]) for score, of in served.items() for name in of] == numbers
