"""FedBN, APFL, FedALA, Per-FedAvg, pFedMe: slow references of the papers, what travels, and equality to FedAvg."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SAME, away
from test_methods import made
from test_parts import BODY, HEAD, KEYS, Reference, fedper, initial, model_of, state_of
from torch import Tensor
from torch.nn import functional as F

from fedsub_app.analysis.clients import client_of
from fedsub_app.common.errors import UserError
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import Update
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds

Run = Callable[..., tuple[Json, Path]]
ALL = HEAD + BODY


class Slow(Reference):
    """Gradients of single mini-batches, in float64."""

    def batches(self, client: int, number: int, purpose: str = "batches", epochs: int = 2) -> Iterator[list[Tensor]]:
        """The mini-batches of each pass, as indices of the data set."""
        index = self.parts.train[client]
        draws = generator(self.s.seed, number, client, purpose)
        for _ in range(epochs):
            yield [index[part] for part in torch.randperm(len(index), generator=draws).split(self.s.batch_size)]

    def loss(self, model: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        logits = torch.func.functional_call(self.net.train(), dict(model), (self.data.train_x[batch].double(),))
        return F.cross_entropy(logits, self.data.train_y[batch])

    def gradient(self, model: Mapping[str, Tensor], batch: Tensor) -> Tensors:
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
        return dict(zip(leaves, torch.autograd.grad(self.loss(leaves, batch), list(leaves.values())), strict=True))


def moved(model: Tensors, step: float, direction: Tensors) -> Tensors:
    return {name: tensor - step * direction[name] for name, tensor in model.items()}


def apfl(r: Slow) -> tuple[Tensors, list[Tensors]]:
    """Algorithm 1 with alpha's gradient, in the first step of a round or in every one."""
    x_g, vs, alphas = dict(r.start), [dict(r.start) for _ in r.clients], [0.5 for _ in r.clients]
    for t in (1, 2, 3):
        ws = [dict(x_g) for _ in r.clients]
        for i in r.clients:
            first = True
            for batch in (batch for epoch in r.batches(i, t) for batch in epoch):
                w, v, alpha = ws[i], vs[i], alphas[i]
                slope = r.gradient({n: alpha * v[n] + (1 - alpha) * w[n] for n in w}, batch)
                if r.s.options.adapt == "step" or first:
                    change = sum(float(((v[n] - w[n]) * slope[n]).sum()) for n in w)
                    alphas[i] = min(1.0, max(0.0, alpha - r.s.lr * change))
                ws[i] = moved(w, r.s.lr, r.gradient(w, batch))
                vs[i] = moved(v, r.s.lr * alpha, slope)
                first = False
        x_g = r.mean(ws, ALL)
    return x_g, [{n: a * v[n] + (1 - a) * x_g[n] for n in v} for a, v in zip(alphas, vs, strict=True)]


def fedala(r: Slow) -> tuple[Tensors, list[Tensors]]:
    """Algorithm 1, the head merged."""
    x_g, own, weights = dict(r.start), [None for _ in r.clients], [None for _ in r.clients]

    def merged(i: int, t: int) -> Tensors:
        if own[i] is None:
            return dict(x_g)
        first, losses = weights[i] is None, []
        w = {n: torch.ones_like(x_g[n]) for n in HEAD} if first else weights[i]
        for epoch in r.batches(i, t, "merge", r.s.options.learn_passes if first else 1):
            some, total = epoch[: len(epoch) // 2], 0.0
            for batch in some:
                model = x_g | {n: own[i][n] + (x_g[n] - own[i][n]) * w[n] for n in HEAD}
                total += float(r.loss(model, batch)) * len(batch)
                slope = r.gradient(model, batch)
                w = {n: (w[n] - slope[n] * (x_g[n] - own[i][n])).clamp(0, 1) for n in HEAD}
            losses.append(total / sum(len(batch) for batch in some))
            if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
                break
        weights[i] = w
        return x_g | {n: own[i][n] + (x_g[n] - own[i][n]) * w[n] for n in HEAD}

    for t in (1, 2, 3):
        own = [r.sgd(merged(i, t), i, t, 2) for i in r.clients]
        x_g = r.mean(own, ALL)
    return x_g, [merged(i, 3) for i in r.clients]


def per_fedavg(r: Slow) -> tuple[Tensors, list[Tensors]]:
    """Algorithm 1 with its first-order and Hessian-free gradients."""
    x_g, alpha, delta = dict(r.start), r.s.options.alpha, r.s.options.delta
    for t in (1, 2, 3):
        ws = []
        for i in r.clients:
            w, others = dict(x_g), (b for epoch in r.batches(i, t, "adaptation", 100) for b in epoch)
            for batch in (batch for epoch in r.batches(i, t) for batch in epoch):
                u = r.gradient(moved(w, alpha, r.gradient(w, next(others))), batch)
                d = next(others) if r.s.options.variant == "hessian-free" else None
                if d is not None:
                    above, below = (r.gradient(moved(w, -shift, u), d) for shift in (delta, -delta))
                    u = {n: u[n] - alpha * (above[n] - below[n]) / (2 * delta) for n in u}
                mu = r.s.prox_mu if r.s.objective == "prox" else 0.0
                w = moved(w, r.s.lr, {n: u[n] + mu * (w[n] - x_g[n]) for n in u})
            ws.append(w)
        x_g = r.mean(ws, ALL)
    personal = []
    for i in r.clients:
        first, second = next(r.batches(i, 3, "tuning"))[:2]
        once = moved(x_g, alpha, r.gradient(x_g, first))
        personal.append(moved(once, alpha, r.gradient(once, second)))
    return x_g, personal


def pfedme(r: Slow) -> tuple[Tensors, list[Tensors]]:
    """Algorithm 1; theta from one mini-batch to the next."""
    x_g, pull, eta = dict(r.start), r.s.options.lambda_, r.s.options.w_lr
    for t in (1, 2, 3):
        ws, thetas = [], []
        for i in r.clients:
            w, theta = dict(x_g), dict(x_g)
            for batch in (batch for epoch in r.batches(i, t) for batch in epoch):
                for _ in range(r.s.options.steps):
                    slope = r.gradient(theta, batch)
                    theta = moved(theta, r.s.lr, {n: slope[n] + pull * (theta[n] - w[n]) for n in theta})
                w = moved(w, eta * pull, {n: w[n] - theta[n] for n in w})
            ws.append(w)
            thetas.append(theta)
        mean = r.mean(ws, ALL)
        x_g = {n: x_g[n] + r.s.server_lr * (mean[n] - x_g[n]) for n in x_g}
    return x_g, thetas


def fedbn(r: Slow) -> tuple[Tensors, list[Tensors]]:
    """FedPer with the normalisation layer in the place of the head."""
    shared = tuple(name for name in ALL if not name.startswith("bn1"))
    personal = fedper(r, shared)
    return r.start | {name: personal[0][name] for name in shared}, personal


META = {"per-fedavg__alpha": 0.1, "per-fedavg__tune_steps": 2}


@pytest.mark.parametrize(
    ("method", "reference", "keys"),
    [
        ("fedbn", fedbn, {}),
        ("apfl", apfl, {}),
        ("apfl", apfl, {"apfl__adapt": "step"}),
        ("fedala", fedala, {"fedala__learn_passes": 12, "fedala__percent": 50.0, "lr": 0.5}),
        ("per-fedavg", per_fedavg, META),
        ("per-fedavg", per_fedavg, META | {"per-fedavg__variant": "hessian-free"}),
        ("per-fedavg", per_fedavg, META | {"per-fedavg__variant": "hessian-free", "objective": "prox", "prox_mu": 0.5}),
        ("pfedme", pfedme, {"pfedme__w_lr": 0.02, "pfedme__steps": 3, "server_lr": 0.8}),
    ],
)
@pytest.mark.usefixtures("smooth")
def test_models_are_those_of_the_algorithm(
    method: str,
    reference: Callable[[Slow], tuple[Tensors, list[Tensors]]],
    keys: dict[str, Any],
    run_local: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[int, Tensors] = {}
    personal = METHODS[method].client.personal

    def keep(self: Any, sent: Tensors, config: Json) -> Tensors:
        found[self.id] = {name: tensor.detach().clone() for name, tensor in personal(self, sent, config).items()}
        return found[self.id]

    monkeypatch.setattr(METHODS[method].client, "personal", keep)
    keys = KEYS | {"method": method, "eval_every": 3, "lr": 0.05, "batch_size": 64} | keys
    _, folder = run_local(**keys)
    model, own = reference(Slow(resolve({k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()})))
    start = initial()
    assert away(model_of(folder), model, start) < SAME
    for client, expected in enumerate(own):
        assert away(found[client], expected, start) < SAME


# --- invariants -------------------------------------------------------------------------------------------------------

FEDAVG = {
    "apfl": {"apfl__adapt": "step"},
    "fedala": {"fedala__layers": 0},
    "per-fedavg": {"per-fedavg__alpha": 0.0},
    "pfedme": {"pfedme__lambda": 1.0, "pfedme__w_lr": 1.0, "pfedme__steps": 1},
}


@pytest.mark.parametrize("model", ["lenet5-bn", "fedpews-cnn"])
def test_where_it_is_fedavg_it_is_fedavg_bit_for_bit(run_local: Run, model: str) -> None:
    """APFL's global model always is; FedBN's on a network without normalisation."""
    keys = KEYS | {"model": model, "image_size": 32, "train_per_class": 20, "num_rounds": 2, "batch_size": 32}
    keys |= {"momentum": 0.9, "weight_decay": 0.01, "evaluate": "global", "weighting": "uniform"}
    _, fedavg = run_local("fedavg", **keys, method="fedavg")
    for method, own in FEDAVG.items() if model == "lenet5-bn" else {"fedbn": {}}.items():
        _, folder = run_local(method, **keys, **own, method=method)
        ours, theirs = model_of(folder), model_of(fedavg)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == [], method


def test_fedbn_keeps_its_normalisation_layers(run_local: Run) -> None:
    """Weights and running statistics; the others travel both ways."""
    keys = KEYS | {"model": "lenet5-bn", "image_size": 32, "train_per_class": 20, "num_rounds": 2}
    _, folder = run_local(**keys, method="fedbn")
    parts = ("weight", "bias", "running_mean", "running_var")
    personal = {f"{layer}.{part}" for layer in ("bn1", "bn2") for part in parts}
    assert {name.removeprefix("own/") for name in state_of(folder, 0, 2)} == personal
    shared = sum(4 * tensor.numel() for name, tensor in model_of(folder).items() if name not in personal)
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-up"] == line["formula-bytes-down"] == 3 * shared


@pytest.mark.parametrize("method", ["apfl", "fedala", "per-fedavg", "pfedme"])
def test_only_the_model_travels(method: str, run_local: Run) -> None:
    _, folder = run_local(method=method, **KEYS | {"num_rounds": 2, "evaluate": "global"})
    model = sum(4 * tensor.numel() for tensor in model_of(folder).values())
    for line in read_rounds(folder)[1:]:
        assert line["formula-bytes-up"] == line["formula-bytes-down"] == 3 * model


def test_a_merge_leaves_the_global_running_statistics(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches on which W is learned enter no statistics: training and evaluation begin with the global ones."""
    merges: list[tuple[bool, Tensors, Tensors]] = []
    client = METHODS["fedala"].client
    merged = client.merged  # type: ignore[attr-defined]

    def keep(self: object, sent: Tensors) -> Tensors:
        model = merged(self, sent)
        merges.append((bool(self.own), sent, model))  # type: ignore[attr-defined]
        return model  # type: ignore[no-any-return]

    monkeypatch.setattr(client, "merged", keep)
    keys = KEYS | {"model": "lenet5-bn", "image_size": 32, "train_per_class": 20, "num_rounds": 2}
    run_local(**keys, method="fedala", fedala__learn_passes=3)
    assert sum(own for own, _, _ in merges) == 3 * 3  # each client's in round 2 and for both evaluations
    for _, sent, model in merges:
        assert all(torch.equal(model[name], sent[name]) for name in sent if "running" in name)


def test_alpha_stays_between_0_and_1(run_local: Run) -> None:
    _, folder = run_local(method="apfl", **KEYS | {"num_rounds": 1, "lr": 5.0}, apfl__adapt="step")
    assert all(0 <= float(state_of(folder, client, 1)["alpha"]) <= 1 for client in range(3))
    _, folder = run_local("never", method="apfl", **KEYS | {"num_rounds": 1}, apfl__adapt="never", apfl__alpha=0.25)
    assert {float(state_of(folder, client, 1)["alpha"]) for client in range(3)} == {0.25}


def test_apfls_personal_model_has_the_statistics_of_the_mixture() -> None:
    strategy, client = made("apfl", model="lenet5-bn", image_size=32)
    worker = client(0, 1, {})
    answer = worker.run_training(dict(strategy.current), {}).tensors
    of_mixture = worker.personal(answer, {})["bn1.running_mean"]
    assert torch.equal(of_mixture, worker.own["bn1.running_mean"])
    assert not torch.equal(of_mixture, answer["bn1.running_mean"])


def test_per_fedavg_adapts_on_the_statistics_of_the_mini_batch() -> None:
    """Also after an evaluation: a step of alpha on one mini-batch of all samples."""
    keys = {"per-fedavg__alpha": 0.1, "per-fedavg__tune_steps": 1}
    strategy, client = made("per-fedavg", model="lenet5-bn", image_size=32, batch_size=1000, **keys)
    worker, w = client(0, 1, {}), strategy.current
    worker.network.module.eval()
    personal = worker.personal(dict(w), {})
    leaf = w["conv1.weight"].clone().requires_grad_()
    network = worker.place.problem.network().train()
    logits = torch.func.functional_call(network, {**w, "conv1.weight": leaf}, (worker.x,))
    (slope,) = torch.autograd.grad(F.cross_entropy(logits, worker.y), [leaf])
    torch.testing.assert_close(personal["conv1.weight"], w["conv1.weight"] - 0.1 * slope, rtol=1e-3, atol=1e-5)


def test_fedalas_proximal_term_is_around_the_global_model() -> None:
    """Not around the merged one, from which the client trains."""
    strategy, client = made("fedala", objective="prox", prox_mu=0.1, lr=0.5)
    sent, first = dict(strategy.current), client(0, 1, {})
    first.run_training(sent, {})
    later, seen = client(0, 2, first.state), list[tuple[Tensor, Tensor]]()
    fit = lambda: seen.append((later.objective().others[0]["fc2.bias"], later.network.copy()["fc2.bias"]))  # noqa: E731
    vars(later)["fit"] = fit
    later.run_training({name: tensor + 0.1 for name, tensor in sent.items()}, {})
    ((anchor, start),) = seen
    assert torch.equal(anchor, sent["fc2.bias"] + 0.1)
    assert not torch.equal(anchor, start)


def test_a_client_may_spend_the_steps_of_its_keys() -> None:
    """pFedMe's seven steps a mini-batch; Per-FedAvg's further 90 mini-batches of the tuning."""
    one, seven = (made("pfedme", pfedme__steps=steps)[0].max_samples(0) for steps in (1, 7))
    assert seven == 7 * one
    keys = {"batch_size": 8}
    few, many = (made("per-fedavg", **keys, **{"per-fedavg__tune_steps": k})[0].max_samples(0) for k in (10, 100))
    assert many == few + 90 * 8


def test_more_layers_than_there_are_cannot_be_merged(run_local: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^fedala.layers = 3: at most 2, the layers of the network$"):
        run_local(method="fedala", **KEYS, fedala__layers=3)
    assert not (tmp_path / "run").exists()


def test_personal_models_are_tuned_at_the_rate_of_their_round(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, list[float]] = {"training": [], "evaluation": []}

    class Watched(METHODS["fedavg-ft"].client):  # type: ignore[name-defined, misc]
        def run_training(self, sent: Tensors, config: Json) -> Update:
            rates["training"].append(self.lr)
            return super().run_training(sent, config)  # type: ignore[no-any-return]

        def run_evaluation(self, sent: Tensors, config: Json, wanted: list[str]) -> Update:
            rates["evaluation"].append(self.lr)
            return super().run_evaluation(sent, config, wanted)  # type: ignore[no-any-return]

    monkeypatch.setitem(METHODS, "fedavg-ft", replace(METHODS["fedavg-ft"], client=Watched))
    plateau = {"lr": 2.0, "lr_schedule": "plateau", "lr_patience": 0, "lr_decay": 0.1}
    _, folder = run_local(**KEYS | {"method": "fedavg-ft", "num_rounds": 4, "evaluate": "global,personal"} | plateau)
    assert client_of(folder, 0).lr == rates["training"][-1]
    assert rates["training"] == rates["evaluation"]
    assert min(rates["training"]) < 2.0


def test_a_model_tuned_under_dropout_is_the_one_of_its_score(run_local: Run, tmp_path: Path) -> None:
    layers = "nn.Flatten(), nn.Linear(64, 16), nn.Dropout(), nn.Linear(16, 10)"
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\ndef net():\n    return nn.Sequential({layers})\n")
    keys: dict[str, Any] = {"model": f"{tmp_path / 'net.py'}:net", "num_rounds": 1, "evaluate": "personal"}
    _, folder = run_local(**KEYS | {"method": "fedavg-ft"} | keys)
    for client, measured in read_rounds(folder)[-1]["evaluated"].items():
        assert client_of(folder, int(client)).score("test") == measured["personal-accuracy"]
