"""Noise, what one client can change, epsilon: against the definitions and the accountant itself."""

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.client.mod import LocalDpMod, secaggplus_mod
from helpers import fedsub, merge_round, result
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import made, play
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.library.client import client_app
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.console import round_line, summary_table
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.norms import norm
from fedsub_app.subnets.privacy import NoisyMean, epsilon, noisy, secret_normal
from fedsub_app.subnets.robust import clipped
from strategies.merging import Merging
from strategies.rounds import check_defences

Run = Callable[..., tuple[Json, Path]]
PRIVATE = {"dp_noise_multiplier": 2.0, "clip_norm": 0.5}


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_noise_has_the_deviation_and_stands_in_what_was_sent_alone() -> None:
    old = {"w": torch.full((400, 500), 3.0), "kept": torch.ones(9)}
    mean = NoisyMean(old, clients=8, deviation=2.0, draws=draws())
    mean.add([Contribution({"w": old["w"] + 1.0})] * 4)
    new = mean.result(server_lr=0.5)
    assert torch.equal(new["kept"], old["kept"])
    moved = new["w"] - old["w"]
    # half of the way; four of eight have answered, the others count as unchanged; noise of 2 in the sum of the eight
    assert float(moved.mean()) == pytest.approx(0.5 * 4 / 8, abs=5 * 0.125 / 200_000**0.5)
    assert float(moved.std()) == pytest.approx(0.5 * 2.0 / 8, rel=0.01)
    assert float((moved - moved.mean()).pow(4).mean() / moved.var() ** 2) == pytest.approx(3, rel=0.05)  # Gaussian


def test_rounds_have_noise_of_their_own_and_a_round_always_the_same() -> None:
    strategy, client = made("fedavg", weighting="uniform", **PRIVATE)
    found = []
    for number, start in ((1, strategy.current), (1, strategy.current), (2, strategy.current)):
        strategy.round, strategy.current = number, start
        update = client(0, 1, {}).run_training(dict(start), {})
        merge_round(strategy, [update])
        found.append(torch.cat([x.flatten() for x in strategy.current.values()]))
        strategy.current = start
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_real_nodes_cannot_draw_the_noise_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the system, not from the seed that every node has: the same round has another noise."""
    strategy, client = made("fedavg", weighting="uniform", **PRIVATE)
    start, found = strategy.current, []
    for _ in range(2):
        strategy.round, strategy.current = 1, start
        strategy.federation = SimpleNamespace(simulated=False)  # type: ignore[assignment]
        merge_round(strategy, [client(0, 1, {}).run_training(dict(start), {})])
        found.append(torch.cat([x.flatten() for x in strategy.current.values()]))
    noise = found[0] - found[1]  # the answers are the same
    assert float(noise.std()) == pytest.approx(2**0.5 * 2.0 * 0.5 / strategy.settings.sample_size, rel=0.05)


def test_secret_numbers_are_normal() -> None:
    x = secret_normal(torch.Size([400, 500])).double()
    assert float(x.mean()) == pytest.approx(0, abs=5 / 200_000**0.5)
    assert float(x.std()) == pytest.approx(1, rel=0.01)
    assert float(x.pow(4).mean()) == pytest.approx(3, rel=0.06)
    assert float(x.abs().max()) < 8.3
    assert secret_normal(torch.Size([0, 3])).shape == (0, 3)
    assert secret_normal(torch.Size([])).dim() == 0


def test_the_least_and_the_greatest_secret_number_are_finite_and_opposite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantiles of half a step above 0 and half a step below 1."""
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\0" * (count // 2) + b"\xff" * (count // 2))
    least, greatest = secret_normal(torch.Size([2])).tolist()
    assert greatest == -least == pytest.approx(8.2095, abs=1e-4)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.floats(0.01, 10), st.integers(0, 5))
def test_one_client_changes_the_sum_by_clip_norm_at_most(clients: int, seed: int, most: float, gone: int) -> None:
    """With and without a client, whatever it sends: the sensitivity that the noise is measured against."""
    numbers = draws(seed)
    old = {"w": torch.randn(20, generator=numbers), "v": torch.randn(3, 3, generator=numbers)}
    updates = []
    for _ in range(clients):
        size = float(torch.rand((), generator=numbers)) * 10
        x = {name: start + size * torch.randn(start.shape, generator=numbers) for name, start in old.items()}
        updates.append(clipped(Contribution(x), old, norm(x[name] - old[name] for name in old), most))
    models = []
    for some in (updates, updates[: gone % clients] + updates[gone % clients + 1 :]):
        mean = NoisyMean(old, clients, 0.0, draws())
        mean.add(some)
        models.append(mean.result())
    change = norm(models[0][name] - models[1][name] for name in old) * clients
    assert change <= most * (1 + 1e-4) + 1e-4


@pytest.mark.run  # the accountants take seconds
@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (0.5, 10, 1e-3), (4.0, 200, 1e-6)])
def test_epsilon_is_that_of_the_accountants(noise: float, rounds: int, delta: float) -> None:
    """Of an event written by hand; the tighter accountant by privacy loss distributions agrees from below."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = accounting.ComposedDpEvent([accounting.GaussianDpEvent(noise)] * rounds)
    found = epsilon(noise, rounds, delta)
    assert found == pytest.approx(RdpAccountant().compose(event).get_epsilon(delta))
    tight = PLDAccountant().compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise), rounds))
    assert 1.0 < found / tight.get_epsilon(delta) < 1.2
    assert epsilon(noise, rounds + 1, delta) > found > epsilon(noise * 1.1, rounds, delta)
    assert epsilon(noise, 0, delta) == 0, "no round has asked a client"


PARTS = {
    "fedpart": {"fedpart__momentum": "none", "fedpart__full_rounds": 0},
    "fedrep": {},
    "fedbn": {"model": "mnist-cnn-bn", "image_size": 28},
}


@pytest.mark.parametrize("method", PARTS)
def test_noise_is_in_the_part_that_is_shared_alone(method: str) -> None:
    """FedPart's group, FedRep's body, all but FedBN's normalisation layers; what stays is as it was, bit for bit."""
    strategy, _ = made(method, **PARTS[method], **PRIVATE)
    check_defences(strategy)
    strategy.round, start = 1, strategy.current
    shared = strategy.expected(0).keys()
    assert 0 < len(shared) < len(start)
    merge_round(strategy, [Update(c, {name: start[name].clone() for name in shared}, {}, 20) for c in range(3)])
    assert all(torch.equal(strategy.current[name], x) for name, x in start.items() if name not in shared)
    noise = torch.cat([(strategy.current[name] - start[name]).flatten() for name in shared])
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 / 3, rel=0.2)


def test_what_noise_does_not_cover_is_refused() -> None:
    """Of a user's own method, which may not name the defences that do not protect it."""
    strategy, _ = made("fedavg", weighting="uniform", **PRIVATE)
    said = "^dp-noise-multiplier = 2: not with method = 'fedavg': "
    with pytest.raises(UserError, match=f"{said}no noise is in its tensor 'variate/w'$"):
        Merging(strategy).contribution(Update(0, strategy.current | {"variate/w": torch.ones(1)}, {}, 20))
    strategy.weight = lambda update: 2.0  # type: ignore[method-assign]
    with pytest.raises(UserError, match=f"{said}its clients contribute to different positions, or with different wei"):
        Merging(strategy).contribution(Update(0, dict(strategy.current), {}, 20))


# --- noise that the clients add ---------------------------------------------------------------------------------------

LOCAL: dict[str, Any] = {"dp_noise_by": "clients", **PRIVATE}


def noisy_update(client: int, round_: int = 1) -> tuple[Update, Tensors]:
    """A client's answer as its node sends it, and the model that it was sent; the change is of norm 50."""
    strategy, _ = made("fedavg", weighting="uniform", **LOCAL)
    length = norm(torch.ones_like(x) for x in strategy.current.values())
    tensors = {name: x + 50 / length for name, x in strategy.current.items()}
    update = Update(client, tensors, {}, 20)
    return node._noisy(strategy.settings, {"round": round_}, update, strategy.current), strategy.current


def test_a_client_clips_its_change_and_adds_its_share() -> None:
    update, start = noisy_update(0)
    moved = torch.cat([(update.tensors[name] - x).flatten() for name, x in start.items()])
    share = 2.0 * 0.5 / 3**0.5  # of three clients: in the sum of their answers it is 2 times 0.5
    assert float(moved.mean()) == pytest.approx(0.5 / len(moved) ** 0.5, abs=5 * share / len(moved) ** 0.5)
    assert float(moved.std()) == pytest.approx(share, rel=0.02)


def test_a_client_clips_the_norm_of_its_whole_change_by_hand() -> None:
    """Changes of 3 and of 4 are together of norm 5: half of them is of norm 2.5."""
    old = {"w": torch.tensor([3.0, 0.0]), "v": torch.tensor([4.0])}
    x = {"w": torch.tensor([3.0, 3.0]), "v": torch.tensor([8.0])}
    for limit, w, v in ((2.5, [3.0, 1.5], [6.0]), (5.0, [3.0, 3.0], [8.0])):
        sent = noisy(x, old, limit, 0.0, draws())
        assert (sent["w"].tolist(), sent["v"].tolist()) == (w, v)


def test_the_servers_mean_of_noisy_answers_has_the_noise_of_the_servers_own() -> None:
    strategy, _ = made("fedavg", weighting="uniform", **LOCAL)
    check_defences(strategy)
    start = strategy.current
    merge_round(strategy, [noisy_update(c)[0] for c in range(3)])
    moved = torch.cat([(strategy.current[name] - x).flatten() for name, x in start.items()])
    assert float(moved.std()) == pytest.approx(2.0 * 0.5 / 3, rel=0.02)


def test_clients_and_rounds_have_noise_of_their_own_and_real_nodes_a_secret_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noise(*which: int) -> Tensor:
        return noisy_update(*which)[0].tensors["fc1.weight"]

    assert torch.equal(noise(0), noise(0))
    assert not any(torch.equal(noise(0), other) for other in (noise(1), noise(0, 2)))
    monkeypatch.setattr(node, "simulated", lambda: False)
    assert not torch.equal(noise(0), noise(0))


@pytest.mark.run
def test_a_run_with_noise_by_the_clients_needs_all_of_them(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"num_clients": 3, "partition": "iid", "num_rounds": 2, "max_abandoned": 9} | LOCAL
    _, folder = run_local("all", **keys)
    plain = run_local("server", **keys | {"dp_noise_by": "server"})[1]
    lines, others = read_rounds(folder)[1:], read_rounds(plain)[1:]
    assert [line["status"] for line in lines] == ["ok", "ok"]
    assert [line["epsilon"] for line in lines] == [line["epsilon"] for line in others]
    run = Client.run_training

    def fails(client: Client, *about: Any) -> Update:
        return run(client, *about) if client.id or client.round == 1 else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(Client, "run_training", fails)
    line = read_rounds(run_local("two", **keys)[1])[-1]
    assert line["abandoned"] == "2 valid replies: dp-noise-by = 'clients' needs 3"


def test_a_group_that_is_not_sent_takes_no_noise_of_the_clients() -> None:
    with pytest.raises(UserError, match=r"^dp-noise-by = 'clients': not with method = 'fedpart': its clients are not "):
        check_defences(made("fedpart", fedpart__momentum="none", **LOCAL)[0])


def test_mods_of_flower_are_refused_by_name() -> None:
    mods = [LocalDpMod(1.0, 1.0, 1.0, 1e-5), secaggplus_mod]
    with pytest.raises(UserError, match=r"^mods = \[LocalDpMod, secaggplus_mod\]: an array of fedsub's messages "):
        client_app(model=lambda: None, data=lambda _: None, mods=mods)


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_every_round_says_what_is_spent(run_local: Run) -> None:
    """By the client that was asked most often so far; a client that fails is asked as well."""
    summary, folder = run_local(
        num_clients=4, clients_per_round=2, partition="iid", num_rounds=6, dp_delta=1e-3, **PRIVATE
    )
    asked: Counter[int] = Counter()
    lines = read_rounds(folder)[1:]
    for line in lines:
        asked.update(line["clients"])
        assert line["epsilon"] == pytest.approx(epsilon(2.0, max(asked.values()), 1e-3))
        assert line["delta"] == 1e-3
        assert f"epsilon {line['epsilon']:.3g}" in round_line(line, resolve({}), resolve({}).score, 0.0)
    assert max(asked.values()) < 6
    assert summary["epsilon"] == lines[-1]["epsilon"]
    assert f"epsilon {summary['epsilon']:.3g} at delta 0.001" in summary_table(summary, resolve({}).score)


def test_without_noise_nothing_is_said_of_privacy(run_local: Run) -> None:
    summary, folder = run_local()
    assert "epsilon" not in summary
    assert not any("epsilon" in line for line in read_rounds(folder))
    assert "privacy" not in summary_table(summary, resolve({}).score)


def test_no_client_decides_whether_another_counts(run_local: Run) -> None:
    """An update that is far larger than the others is refused without privacy, clipped with it."""
    keys = {"num_clients": 4, "partition": "iid", "num_rounds": 1, "attack": "scale", "attack_scale": 1e4}
    _, plain = run_local("plain", **keys)
    _, private = run_local("private", **keys, **PRIVATE)
    dropped = [[drop["client"] for drop in read_rounds(folder)[-1]["dropped"]] for folder in (plain, private)]
    assert dropped == [[0], []]


def test_the_more_noise_the_less_accuracy(run_local: Run) -> None:
    keys = {"num_clients": 4, "partition": "iid", "num_rounds": 8, "clip_norm": 2.0}
    little, much = (
        run_local(str(noise), **keys, dp_noise_multiplier=noise)[0]["final-global-accuracy"] for noise in (0.01, 1.0)
    )
    assert little > 80
    assert much < little - 20


def test_an_optimizer_on_the_server_takes_the_noisy_mean() -> None:
    strategy, client = made("fedadam", server_lr=1.0, **PRIVATE)
    plain, _ = made("fedadam", server_lr=1.0, clip_norm=0.5)
    updates = play(strategy, client, rounds=0)
    models = []
    for server in (strategy, plain):
        server.round = 1
        merge_round(server, updates)
        models.append(torch.cat([x.flatten() for x in server.current.values()]))
    assert not torch.equal(*models)
    assert all(bool(torch.isfinite(model).all()) for model in models)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "clip-norm = 0: must be above 0 with dp-noise-multiplier above 0"),
        (
            {"clip-norm": 1.0, "weighting": "examples"},
            "weighting = 'examples': must be 'uniform' with dp-noise-multiplier above 0",
        ),
        ({"clip-norm": 1.0, "mean": "median"}, "mean = 'median': must be 'average' with dp-noise-multiplier above 0"),
        ({"clip-norm": 1.0, "dp-delta": 0.0}, "dp-delta = 0.0: must be greater than 0"),
        (
            {"dp-noise-by": "clients", "dp-noise-multiplier": 0.0},
            "dp-noise-by = 'clients': does nothing with dp-noise-multiplier = 0",
        ),
        (
            {"clip-norm": 1.0, "dp-noise-multiplier": 0.001},
            "dp-noise-multiplier = 0.001: must be 0 or at least 0.01",
        ),
    ],
)
def test_wrong_settings_are_named(keys: dict[str, str | float], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve({"dp-noise-multiplier": 1.0} | keys)
    assert str(caught.value) == line


def test_statistics_take_no_noise() -> None:
    """LG-FedAvg's head has none; its first rounds, if there are such, share the whole model."""
    keys = {"weighting": "uniform", "model": "mnist-cnn-bn", "image_size": 28, **PRIVATE}
    for method, own in (("fedavg", {}), ("lg-fedavg", {"lg_fedavg__warm_rounds": 1})):
        with pytest.raises(UserError, match=r"model = 'mnist-cnn-bn': not with dp-noise-multiplier above 0: 'bn1"):
            check_defences(made(method, **keys, **own)[0])
    check_defences(made("lg-fedavg", **keys, lg_fedavg__warm_rounds=0)[0])


def test_no_score_of_the_clients_decides_the_learning_rate() -> None:
    keys = {"lr_schedule": "plateau", **PRIVATE}
    with pytest.raises(UserError, match=r"^evaluate = 'personal': not with lr-schedule = 'plateau' and dp-noise-multi"):
        check_defences(made("fedrep", evaluate="personal, global", **keys)[0])
    check_defences(made("fedrep", evaluate="global, personal", **keys)[0])


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, run_local: Run) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name != "dp_accounting" and find(name, *more))
    strategy, _ = made("fedavg", weighting="uniform", **PRIVATE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    with pytest.raises(UserError) as caught:
        check_defences(strategy)
    said = "dp-noise-multiplier above 0: needs the package dp-accounting; `pip install -e '.[dp]'` in the checkout"
    assert str(caught.value) == said


def test_killed_and_resumed_is_as_never_killed(tmp_path: Path) -> None:
    """The noise of a round is that of the seed, and epsilon counts the rounds before the resume."""
    keys = ["-s", "method=fedavg", "-s", "model=feature-mlp", "-s", "train-per-class=40", "-s", "num-clients=4"]
    keys += ["-s", "num-rounds=4", "-s", "partition=iid", "-s", "clip-norm=0.5", "-s", "dp-noise-multiplier=1"]
    keys += ["-s", "clients-per-round=3"]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = fedsub(tmp_path, "run", *keys, "-s", f"run-dir={whole}")
    assert done.code == 0, done.err
    assert "epsilon" in done.out
    died = fedsub(tmp_path, "run", *keys, "-s", f"run-dir={folder}", die=("line written", 3))
    assert died.code < 0, died.err
    resumed = fedsub(tmp_path, "run", "--resume", str(folder))
    assert resumed.code == 0, resumed.err
    assert result(folder) == result(whole)
