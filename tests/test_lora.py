"""LoRA's seven aggregations against their papers' algebra on small matrices in float64; all methods over adapters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import merge_round, read
from torch import Tensor

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Tensors
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.library.strategy import TensorsAlone
from fedsub_app.models import adapters, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.training.workplace import workplace
from strategies.base import SubnetStrategy
from strategies.bounding import Bounds
from strategies.direction import agreeing
from strategies.lora import PRUNES
from strategies.merging import Valid
from strategies.rounds import check_defences
from strategies.settings import HetLoRASettings
from strategies.sparse import MASK

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.one, self.two, self.classes = nn.Linear(64, 5), nn.Linear(5, 6), nn.Linear(6, num_classes)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.classes(self.norm(self.two(torch.relu(self.one(x.flatten(1))))))
"""
# As GPT-2's layers: the weight is [in, out].
TURNED = "from transformers.pytorch_utils import Conv1D\n" + NET.replace("nn.Linear(5, 6)", "Conv1D(6, 5)")
RANK, SCALE = 4, 2.0
Made = Callable[..., tuple[SubnetStrategy, Callable[..., Client]]]


@pytest.fixture(autouse=True, scope="module")
def _with_peft() -> None:
    pytest.importorskip("peft")


@pytest.fixture
def made(tmp_path: Any) -> Made:
    """A function to a method's strategy over adapters of rank 4, and its client of a number, round and state."""

    def make(method: str, net: str = NET, **keys: Any) -> tuple[SubnetStrategy, Callable[..., Client]]:
        (tmp_path / "net.py").write_text(net)
        usual = {"model": f"{tmp_path}/net.py:Net", "trainable": "lora", "lora-rank": RANK, "lora-alpha": RANK * SCALE}
        usual |= {
            "weighting": "uniform",
            "method": method,
            "num-clients": 3,
            "partition": "iid",
            "train-per-class": 12,
            "batch-size": 16,
        }
        place = workplace(resolve(usual | {key.replace("__", ".").replace("_", "-"): v for key, v in keys.items()}))
        entry = METHODS[method]
        strategy = entry.strategy(place.settings, place.network.module)
        return strategy, lambda client, number=1, state=None: entry.client(place, client, number, state or {})

    return make


def updates_of(strategy: SubnetStrategy, seed: int = 0) -> list[Update]:
    """Return updates of random tensors, of the form that the clients are asked for."""
    draws = torch.Generator().manual_seed(seed)
    updates = []
    for client in range(3):
        tensors: Tensors = {}
        for name, spec in strategy.expected(client).items():
            tensors[name] = (
                torch.randn(spec.shape, generator=draws) if spec.dtype == torch.float32 else torch.zeros(1) > 0
            )
        updates.append(Update(client, tensors, {}, 10 * (client + 1)))
    return updates


def products(strategy: SubnetStrategy, updates: list[Update]) -> list[list[Tensor]]:
    """Return s B A of each adapter and client, float64."""
    every = [strategy.current | update.tensors for update in updates]
    return [[SCALE * t[a.b].double() @ t[a.a].double() for t in every] for a in adapters(strategy.current)]


def merged(strategy: SubnetStrategy, before: Tensors) -> list[Tensor]:
    """Return s B A of each adapter of the merged model, with the change of its W."""
    now = strategy.current
    own = [SCALE * now[a.b].double() @ now[a.a].double() for a in adapters(now)]
    moved = [now[a.weight].double() - before[a.weight] if a.weight in now else torch.zeros(()) for a in adapters(now)]
    return [p + (x.T if x.shape == p.T.shape else x) for p, x in zip(own, moved, strict=True)]


def norm(matrices: list[Tensor]) -> float:
    return float(sum(matrix.square().sum() for matrix in matrices)) ** 0.5


def distances(strategy: SubnetStrategy, before: Tensors, means: list[Tensor]) -> float:
    return norm([m - mean for m, mean in zip(merged(strategy, before), means, strict=True)])


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def test_fedit_reports_what_the_mean_of_factors_misses(made: Made) -> None:
    strategy, _ = made("fedit")
    updates, before = updates_of(strategy), strategy.current
    each = products(strategy, updates)
    report = merge_round(strategy, updates)
    errors = []
    for adapter, of_clients in zip(adapters(before), each, strict=True):
        a, b = (mean([update.tensors[name].double() for update in updates]) for name in adapter[:2])
        torch.testing.assert_close(strategy.current[adapter.a].double(), a)
        errors.append(mean(of_clients) - SCALE * b @ a)
    assert report["merge-error"] == pytest.approx(norm(errors), rel=1e-6)
    assert norm(errors) > 1


def test_fedit_of_equal_adapters_has_no_error_and_weighs_by_samples(made: Made) -> None:
    strategy, _ = made("fedit")
    updates = updates_of(strategy)
    alike = [Update(k, updates[0].tensors, {}, 10) for k in range(3)]
    assert merge_round(strategy, alike)["merge-error"] < 1e-5
    strategy, _ = made("fedit", weighting="examples")
    before, each = strategy.current, products(strategy, updates)
    report = merge_round(strategy, updates)
    means = [sum(w * p for w, p in zip((1 / 6, 2 / 6, 3 / 6), of_clients, strict=True)) for of_clients in each]
    assert report["merge-error"] == pytest.approx(distances(strategy, before, means), rel=1e-5)


@pytest.mark.parametrize("net", [NET, TURNED], ids=["linear", "turned"])
@pytest.mark.parametrize("method", ["ffa-lora", "fedex-lora", "flora"])
def test_the_merged_model_computes_the_mean_of_the_clients(method: str, net: str, made: Made) -> None:
    strategy, _ = made(method, net, **({"flora__widths": "1, 0.5, 0.25"} if method == "flora" else {}))
    if method == "ffa-lora":  # B of the start is 0
        assert all(strategy.current[a.a].any() and not strategy.current[a.b].any() for a in adapters(strategy.current))
    for seed in (0, 1):
        strategy.round, updates, before = seed, updates_of(strategy, seed), strategy.current
        start = [SCALE * before[a.b].double() @ before[a.a].double() for a in adapters(before)]
        means = [mean(each) for each in products(strategy, updates)]
        report = merge_round(strategy, updates)
        if method == "flora":
            assert not any(strategy.current[a.b].any() for a in adapters(before))
            assert all(not torch.equal(strategy.current[a.a], before[a.a]) for a in adapters(before))
            assert not norm(start)
        assert distances(strategy, before, means) < 1e-5 * norm(means)
        assert report["merge-error"] < 1e-5 * norm(means)


def test_a_step_of_the_server_towards_the_mean_is_exact_too(made: Made) -> None:
    strategy, _ = made("fedex-lora", server_lr=0.25)
    merge_round(strategy, updates_of(strategy))
    before = strategy.current
    old = [SCALE * before[a.b].double() @ before[a.a].double() for a in adapters(before)]
    updates = updates_of(strategy, 1)
    steps = [0.75 * start + 0.25 * mean(each) for start, each in zip(old, products(strategy, updates), strict=True)]
    merge_round(strategy, updates)
    assert distances(strategy, before, steps) < 1e-5 * norm(steps)


def test_flexlora_has_the_best_adapter_of_each_rank(made: Made) -> None:
    strategy, _ = made("flexlora", flexlora__widths="1, 0.5")
    updates = updates_of(strategy)
    assert [len(strategy.expected(k)["one.lora_A.default.weight"].shape) and
            strategy.expected(k)["one.lora_A.default.weight"].shape[0] for k in range(3)] == [4, 2, 4]  # fmt: skip
    before, means = strategy.current, [mean(each) for each in products(strategy, updates)]
    report = merge_round(strategy, updates)
    left = 0.0
    for adapter, exact, own in zip(adapters(before), means, merged(strategy, before), strict=True):
        u, s, v = torch.linalg.svd(exact, full_matrices=False)
        torch.testing.assert_close(own, (u[:, :4] * s[:4]) @ v[:4], rtol=1e-4, atol=1e-5)
        left += float(s[4:].square().sum())
        narrow = strategy.task(1).tensors  # two ranks
        two = SCALE * narrow[adapter.b].double() @ narrow[adapter.a].double()
        torch.testing.assert_close(two, (u[:, :2] * s[:2]) @ v[:2], rtol=1e-4, atol=1e-5)
    assert report["merge-error"] == pytest.approx(left**0.5, rel=1e-4)


@pytest.mark.parametrize("method", ["flexlora", "flora", "hetlora"])
def test_a_rank_above_the_clients_own_is_refused(method: str, made: Made) -> None:
    strategy, client = made(method, **{f"{method}__widths": "1, 0.5"})
    whole, half = strategy.task(0), strategy.task(1)
    answer = client(0).run_training(dict(whole.tensors), whole.config)
    assert whole.tensors["one.lora_A.default.weight"].shape == (4, 64)
    assert half.tensors["one.lora_A.default.weight"].shape == (2, 64)
    with pytest.raises(BadReply, match=r"one.lora_A.default.weight': shape \(4, 64\), expected \(2, 64\)"):
        read(strategy, replace(answer, client=1))


def test_flexlora_of_few_ranks_can_train_the_others(made: Made) -> None:
    strategy, _ = made("flexlora", flexlora__widths="0.25, 1", num_clients=3)
    updates, before = updates_of(strategy)[:1], strategy.current
    merge_round(strategy, updates)
    for adapter in adapters(before):
        assert not strategy.current[adapter.b][:, 1:].any()
        torch.testing.assert_close(strategy.current[adapter.a][1:], before[adapter.a][1:])


def test_fedsa_keeps_b(made: Made) -> None:
    strategy, client = made("fedsa-lora")
    b = {a.b for a in adapters(strategy.current)}
    assert b
    assert not b & strategy.task(0).tensors.keys()
    worker = client(0)
    answer = worker.run_training(dict(strategy.task(0).tensors), strategy.task(0).config).tensors
    assert answer.keys() == strategy.current.keys() - b
    assert worker.own.keys() == b
    assert all(tensor.any() for tensor in worker.own.values())


def test_the_error_of_clipped_adapters_is_that_of_their_mean(made: Made) -> None:
    """Updates that are clipped to 0.1: FFA-LoRA, with one A, has no error."""
    strategy, _ = made("ffa-lora", clip_norm=0.1)
    assert merge_round(strategy, updates_of(strategy))["merge-error"] < 1e-5


def test_robust_judges_the_global_model_that_is_whole(made: Made) -> None:
    """FFA-LoRA's A is the same everywhere; FedSA-LoRA's B is each client's own."""
    assert [made(method)[0].judged for method in ("fedit", "ffa-lora", "fedsa-lora")] == [True, True, False]


def test_ffa_trains_no_a(made: Made) -> None:
    strategy, client = made("ffa-lora")
    a = {each.a for each in adapters(strategy.current)}
    worker = client(0)
    answer = worker.run_training(dict(strategy.task(0).tensors), strategy.task(0).config).tensors
    assert answer.keys() == strategy.expected(0).keys() == strategy.current.keys() - a
    for name in a:
        assert torch.equal(worker.network.tensors[name], strategy.current[name])


def test_hetlora_fills_up_with_zeros_and_weighs_by_norms(made: Made) -> None:
    strategy, _ = made("hetlora", hetlora__widths="1, 0.5, 0.25")
    updates, before = updates_of(strategy), strategy.current
    sizes = [norm(list(each)) for each in zip(*products(strategy, updates), strict=True)]
    merge_round(strategy, updates)
    for adapter in adapters(before):
        whole = [torch.zeros_like(before[adapter.a], dtype=torch.float64) for _ in updates]
        for padded, update in zip(whole, updates, strict=True):
            padded[: len(update.tensors[adapter.a])] = update.tensors[adapter.a].double()
        expected = sum(size * padded for size, padded in zip(sizes, whole, strict=True)) / sum(sizes)
        torch.testing.assert_close(strategy.current[adapter.a].double(), expected, rtol=1e-5, atol=1e-6)


def test_hetlora_prunes_ranks_that_have_become_smaller(made: Made) -> None:
    strategy, client = made("hetlora", hetlora__gamma=0.5, hetlora__lambda=0.01)
    merge_round(strategy, updates_of(strategy))
    task = strategy.task(1)
    assert task.config["rank"] == 4
    update = read(strategy, client(1).run_training(dict(task.tensors), task.config))
    pruned = Update(1, update.tensors | {PRUNES: torch.ones(1, dtype=torch.bool)}, {}, 10)
    report = merge_round(strategy, [pruned])
    assert strategy.ranks.tolist() == [4, 2, 4]
    assert report["mean-rank"] == pytest.approx(10 / 3)
    assert strategy.task(1).tensors["two.lora_B.default.weight"].shape == (6, 2)
    whole, client = made("hetlora", hetlora__gamma=1.0)
    assert not client(0).run_training(dict(whole.task(0).tensors), whole.task(0).config).tensors[PRUNES]
    grows, client = made("hetlora", hetlora__gamma=0.5)  # from B = 0
    assert not client(0).run_training(dict(grows.task(0).tensors), grows.task(0).config).tensors[PRUNES]
    heavy, client = made("hetlora", hetlora__gamma=0.5, hetlora__lambda=5.0, lr=0.01)
    merge_round(heavy, updates_of(heavy))
    task = heavy.task(0)
    answer = client(0).run_training(dict(task.tensors), task.config).tensors
    assert answer[PRUNES]
    assert not answer["one.lora_A.default.weight"][2:].any()
    assert answer["one.lora_A.default.weight"][:2].any()
    assert not answer["one.lora_B.default.weight"][:, 2:].any()


def test_ranks_that_a_client_lacks_have_not_moved(made: Made) -> None:
    """Else ``robust`` would take the filled-up zeros for a change, and refuse the client."""
    strategy, _ = made("hetlora", hetlora__widths="1, 0.5, 0.25")
    merge_round(strategy, updates_of(strategy))
    for client in range(3):
        sent = strategy.task(client).tensors
        still = Update(client, {n: sent[n] for n in strategy.expected(client) if n in sent}, {}, 10)
        contribution = strategy.contribution(still)
        assert strategy.distance(still, contribution) == 0
        origin = strategy.origin(still)
        assert all(torch.equal(origin[name], x) for name, x in contribution.tensors.items())


def test_ranks_that_clients_lack_hide_no_opposed_one(made: Made) -> None:
    """Else the zeros there, minus the model, were a change that all have in common."""
    strategy, _ = made("hetlora", robust="on", num_clients=6, hetlora__widths="0.5")
    draws = torch.Generator().manual_seed(0)
    moves = {name: 0.01 * torch.randn(x.shape, generator=draws) for name, x in strategy.task(0).tensors.items()}
    valid = []
    for client in range(6):
        turn = -1 if client == 2 else 1
        tensors = {name: x + turn * moves[name] for name, x in strategy.task(client).tensors.items()}
        update = Update(client, tensors | {PRUNES: torch.zeros(1, dtype=torch.bool)}, {}, 10)
        valid.append(Valid(update, strategy.contribution(update), {}))
    kept, (opposed,), _ = agreeing(strategy, valid)
    assert (opposed.client, [each.update.client for each in kept]) == (2, [0, 1, 3, 4, 5])


@pytest.mark.parametrize("widths", ["1", "0.5"])
def test_a_bounded_adapter_weighs_what_is_left_of_it(widths: str, made: Made) -> None:
    """HetLoRA's weight is the norm of B A: of three alike clients, one sends fifty times as much."""
    strategy, _ = made("hetlora", robust="on", hetlora__widths=widths)
    bounds, valid = Bounds(strategy, dict.fromkeys(range(3), 1.0)), []
    for update in updates_of(strategy):
        sent, times = strategy.task(update.client).tensors, 0.01 * (50 if update.client == 0 else 1)
        moved = {n: sent[n] + times * x if n in sent else x for n, x in update.tensors.items()}
        update = replace(update, tensors=moved)
        valid.append(Valid(update, strategy.contribution(update), {}))
        bounds.measure(*valid[-1][:2])
    before, after = ([each.contribution.weight for each in of] for of in (valid, bounds.bounded(valid)))
    assert before[0] > 20 * max(before[1:])
    assert after[0] < 2 * max(after[1:])


def test_hetloras_fraction_of_ranks_is_that_of_its_decimals() -> None:
    assert [HetLoRASettings(gamma=gamma).pruned(100) for gamma in (0.57, 0.29, 0.999, 0.001)] == [57, 29, 99, 1]


@pytest.mark.parametrize("method", ["fedit", "ffa-lora", "flexlora", "hetlora", "flora", "fedex-lora", "fedsa-lora"])
def test_a_network_that_brings_its_adapters(method: str, made: Made, tmp_path: Path) -> None:
    """Its weights under the adapters are tensors of the model, which a plain client returns as they are."""
    config = "peft.LoraConfig(target_modules=['one'], r=4)"
    brings = f"        import peft\n        peft.inject_adapter_in_model({config}, self)\n"
    (tmp_path / "own.py").write_text(NET.replace("    def forward", f"{brings}\n    def forward"))
    strategy, client = made(method, model=f"{tmp_path}/own.py:Net", trainable="")
    task = strategy.task(0)
    read(strategy, client(0).run_training(dict(task.tensors), task.config))


def test_adapters_of_several_scales_are_refused(made: Made, tmp_path: Path) -> None:
    config = "peft.LoraConfig(target_modules=['one', 'two'], r=4, lora_alpha=8, rank_pattern={'two': 2})"
    brings = f"        import peft\n        peft.inject_adapter_in_model({config}, self)\n"
    (tmp_path / "own.py").write_text(NET.replace("    def forward", f"{brings}\n    def forward"))
    with pytest.raises(UserError, match=r"adapters have \[2.0, 4.0\] as alpha / r; allowed is one for all"):
        made("flora", model=f"{tmp_path}/own.py:Net", trainable="")


def test_without_the_networks_layers_the_scale_is_not_known(made: Made) -> None:
    """Arrays alone do not tell alpha; a scale of 1 merged another model without a word."""
    strategy, _ = made("flora")
    with pytest.raises(UserError, match="give model="):
        METHODS["flora"].strategy(strategy.settings, TensorsAlone(strategy.current))


@pytest.mark.parametrize("method", ["flora", "flexlora", "hetlora"])
def test_products_of_lone_clients_are_not_hidden(method: str, made: Made) -> None:
    strategy, _ = made(method, min_contributors=2)
    with pytest.raises(UserError, match=f"min-contributors = 2: not with method = '{method}'"):
        check_defences(strategy)


def test_fedpac_needs_the_head(made: Made) -> None:
    with pytest.raises(UserError, match=r"^trainable = 'one': without the head, which fedpac combines$"):
        made("fedpac", trainable="one")


def test_fiarse_of_threshold_zero_trains_its_mask_alone(made: Made) -> None:
    """B begins at 0, so that the threshold of its layer is 0 and every weight is at it."""
    strategy, client = made("fiarse", fiarse__widths="0.25", fiarse__threshold="layer")
    task, worker = strategy.task(0), client(0)
    worker.run_training(dict(task.tensors), task.config)
    for adapter in adapters(strategy.current):
        moved = worker.network.tensors[adapter.b] != 0
        assert moved.any()
        assert not (moved & ~task.tensors[MASK + adapter.b]).any()


def test_what_moves_the_base_is_sent_down_alone(made: Made) -> None:
    strategy, client = made("flora")
    task = strategy.task(0)
    assert "one.base_layer.weight" in task.tensors
    answer = client(0).run_training(dict(task.tensors), task.config)
    read(strategy, answer)
    assert answer.tensors.keys() == strategy.expected(0).keys()
    assert not any("base_layer" in name for name in answer.tensors)


def test_without_adapters_it_is_fedavg(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    strategy, _ = made("fedit", trainable="")
    report = merge_round(strategy, updates_of(strategy))
    assert "merge-error" not in report
    strategy.summary()
    assert "without 'lora' fedit is FedAvg" in caplog.text


def test_a_mean_with_noise_reports_no_sum_without(made: Made) -> None:
    strategy, _ = made("fedit", dp_noise_multiplier=1.0, clip_norm=1.0)
    strategy.round = 1
    assert "merge-error" not in merge_round(strategy, updates_of(strategy))


# --- all methods over adapters --------------------------------------------------------------------------------------

REFUSED = {"fedpm": "trainable = 'lora': fedpm masks random weights"}


@pytest.mark.run  # all of them as long as one
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_adapters_or_says_why_not(method: str, made: Made) -> None:
    """Two rounds of three clients over adapters and head: the base stays, the rest is what the method makes of it."""
    keys: dict[str, Any] = {
        "validation_fraction": 0.2,
        "local_epochs": 2,
        "fedpart__full_rounds": 1,
        "fedpart__rounds_per_group": 1,
    }
    keys = {key: value for key, value in keys.items() if "__" not in key or key.startswith(f"{method}__")}
    if method in REFUSED:
        with pytest.raises(UserError, match=REFUSED[method]):
            made(method, **keys)
        return
    strategy, client = made(method, **keys)
    base = {n: t.clone() for n, t in strategy.model.state_dict().items() if n not in tensors_of(strategy.model)}
    first, states = strategy.current, [{}, {}, {}]
    for number in (1, 2):
        strategy.round = number
        updates = []
        for c in range(3):
            task = strategy.task(c)
            worker = client(c, number, states[c])
            updates.append(read(strategy, worker.run_training(dict(task.tensors), task.config)))
            states[c] = worker.state
        merge_round(strategy, updates)
    sent = {name.rpartition("/")[2] for name in strategy.task(0).tensors}
    assert not sent & base.keys()
    assert method == "local" or any(not torch.equal(strategy.current[name], first[name]) for name in first)
    for name, tensor in strategy.model.state_dict().items():
        assert name not in base or torch.equal(tensor, base[name])


def test_what_the_papers_methods_make_of_adapters(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks are the units, FedPart trains an adapter a round, FedBN is FedAvg, channels without BatchNorm do not go."""
    every: dict[str, Any] = {name: made(name)[0] for name in ("fedpews", "ist", "heterofl", "fedpart", "fedbn")}
    for name in ("fedpews", "ist", "heterofl"):
        assert [(group.size, len(group.cols)) for group in every[name].units] == [(RANK, 1)] * 2
    pairs = [{adapter.a, adapter.b} for adapter in adapters(every["fedpart"].current)]
    assert [{*group} for group in every["fedpart"].groups] == [*pairs, {"classes.weight", "classes.bias"}]
    every["fedbn"].summary()
    assert "has no normalisation layer that trainable = 'lora' trains: fedbn is FedAvg" in caplog.text
    for pruning in ("structured", "hybrid"):
        with pytest.raises(
            UserError, match=rf"^subfedavg.pruning = '{pruning}': .*: no layer has a BatchNorm behind it"
        ):
            made("subfedavg", subfedavg__pruning=pruning, validation_fraction=0.2)
