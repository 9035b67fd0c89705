"""Methods with personal parts or models: what travels, what is trained, and that they are what their papers say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import SAME, away
from safetensors.torch import load_file
from test_methods import made
from torch import nn
from torch.nn import functional as F

from client_apps.parts import LGFedAvgClient
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.models import build_model, head_names, part_names, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.settings import Settings
from fedsub_app.training.workplace import workplace

Run = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Value] = {
    "model": "feature-mlp",
    "num_clients": 3,
    "partition": "iid",
    "evaluate": "personal",
    "local_epochs": 2,
    "num_rounds": 3,
    "momentum": 0.0,
}
HEAD = ("fc2.weight", "fc2.bias")
BODY = ("fc1.weight", "fc1.bias", "bn1.weight", "bn1.bias")


def model_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def state_of(folder: Path, client: int, round_: int = 3) -> Tensors:
    return load_file(folder / f"clients/client-{client:06d}/round-{round_:06d}.safetensors")


def initial() -> Tensors:
    return {n: t.detach() for n, t in tensors_of(build_model("feature-mlp", (1, 8, 8), 10, 0)).items()}


# --- the slow reference -----------------------------------------------------------------------------------------------


class Reference:
    """Federations written out with torch's own optimizer, a tensor at a time, full participation, in float64."""

    def __init__(self, settings: Settings) -> None:
        self.s = settings
        self.data = load_dataset(settings.data)
        self.parts = make_partition(self.data, settings.partitioning)
        self.net = build_model(settings.model, (1, 8, 8), 10, settings.seed).double()
        self.start = {n: t.detach().clone() for n, t in tensors_of(self.net).items()}
        self.clients = range(settings.num_clients)

    def sgd(
        self, model: Tensors, client: int, round_: int, epochs: int, purpose: str = "batches",
        names: tuple[str, ...] = HEAD + BODY, anchor: Tensors | None = None, pull: float = 0.0,
    ) -> Tensors:  # fmt: skip
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(model[name])
        trained = [p for name, p in self.net.named_parameters() if name in names]
        optimizer = torch.optim.SGD(trained, lr=self.s.lr)
        index = self.parts.train[client]
        x, y = self.data.train_x[index].double(), self.data.train_y[index]
        draw = generator(self.s.seed, round_, client, purpose)
        for _ in range(epochs):
            for batch in torch.randperm(len(y), generator=draw).split(self.s.batch_size):
                self.net.zero_grad()
                loss = F.cross_entropy(self.net(x[batch]), y[batch])
                for name, p in self.net.named_parameters():
                    if anchor:
                        loss = loss + pull / 2 * ((p - anchor[name]) ** 2).sum()
                loss.backward()
                optimizer.step()
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def mean(self, models: list[Tensors], names: tuple[str, ...]) -> Tensors:
        return {name: torch.stack([model[name] for model in models]).mean(0) for name in names}


def fedper(r: Reference, shared: tuple[str, ...]) -> list[Tensors]:
    x_g, own = dict(r.start), [dict(r.start) for _ in r.clients]
    for t in (1, 2, 3):
        own = [r.sgd(own[i] | {n: x_g[n] for n in shared}, i, t, 2) for i in r.clients]
        x_g |= r.mean(own, shared)
    return [own[i] | {n: x_g[n] for n in shared} for i in r.clients]


def fedrep(r: Reference, shared: tuple[str, ...]) -> list[Tensors]:
    x_g, own = dict(r.start), [dict(r.start) for _ in r.clients]
    for t in (1, 2, 3):
        for i in r.clients:
            head = r.sgd(own[i] | {n: x_g[n] for n in shared}, i, t, 2, "personal batches", HEAD)
            own[i] = r.sgd(head, i, t, 1, names=shared)
        x_g |= r.mean(own, shared)
    return [own[i] | {n: x_g[n] for n in shared} for i in r.clients]


def fedbabu(r: Reference, shared: tuple[str, ...]) -> list[Tensors]:
    x_g = dict(r.start)
    for t in (1, 2, 3):
        x_g |= r.mean([r.sgd(x_g, i, t, 2, names=shared) for i in r.clients], shared)
    return [r.sgd(x_g, i, 3, 3, "tuning") for i in r.clients]


def ditto(r: Reference, shared: tuple[str, ...]) -> list[Tensors]:
    w, own = dict(r.start), [dict(r.start) for _ in r.clients]
    for t in (1, 2, 3):
        updates = [r.sgd(w, i, t, 2) for i in r.clients]
        own = [r.sgd(own[i], i, t, 2, "personal batches", anchor=w, pull=0.5) for i in r.clients]
        w = r.mean(updates, HEAD + BODY)
    return own


def fine_tuned(r: Reference, shared: tuple[str, ...]) -> list[Tensors]:
    w = dict(r.start)
    for t in (1, 2, 3):
        w = r.mean([r.sgd(w, i, t, 2) for i in r.clients], HEAD + BODY)
    return [r.sgd(w, i, 3, 3, "tuning") for i in r.clients]


@pytest.mark.parametrize(
    ("method", "reference", "shared"),
    [
        ("fedper", fedper, BODY),
        ("lg-fedavg", fedper, HEAD),
        ("fedrep", fedrep, BODY),
        ("fedbabu", fedbabu, BODY),
        ("ditto", ditto, ()),
        ("fedavg-ft", fine_tuned, ()),
    ],
)
@pytest.mark.usefixtures("smooth")
def test_personal_models_are_those_of_the_algorithm(
    method: str,
    reference: Callable[[Reference, tuple[str, ...]], list[Tensors]],
    shared: tuple[str, ...],
    run_local: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[int, Tensors] = {}
    personal = METHODS[method].client.personal

    def keep(self: object, sent: Tensors, config: Json) -> Tensors:
        model = personal(self, sent, config)  # type: ignore[arg-type]
        found[self.id] = {n: t.clone() for n, t in model.items()}  # type: ignore[attr-defined]
        return model

    monkeypatch.setattr(METHODS[method].client, "personal", keep)
    run_local(method=method, eval_every=3, **KEYS)
    settings = resolve({k.replace("__", ".").replace("_", "-"): v for k, v in KEYS.items()} | {
        "method": method, "num-rounds": 3, "lr": 0.05, "batch-size": 64})  # fmt: skip
    for client, expected in enumerate(reference(Reference(settings), shared)):
        assert away(found[client], expected, initial()) < SAME


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "idle"), [({}, ""), ({"local_epochs": 5}, "epochs = 5"), ({"local_steps": 3}, "steps = 3")]
)
def test_fedrep_says_that_it_has_epochs_of_its_own(keys: Json, idle: str) -> None:
    said = f"local-{idle}: does nothing with fedrep, which has personal-epochs and shared-epochs"
    assert made("fedrep", **keys)[0].warning == (idle and said)


@pytest.mark.parametrize(
    ("method", "shared"), [("fedper", BODY), ("fedrep", BODY), ("fedbabu", BODY), ("lg-fedavg", HEAD)]
)
def test_only_the_shared_part_travels_and_changes(method: str, shared: tuple[str, ...], run_local: Run) -> None:
    _, folder = run_local(method=method, **KEYS)
    model, start = model_of(folder), initial()
    size = sum(4 * start[name].numel() for name in shared)
    for line in read_rounds(folder):
        assert line["formula-bytes-up"] == line["formula-bytes-down"] == 3 * size
    assert {name for name in start if not torch.equal(model[name], start[name])} == set(shared)
    for client in range(3):
        kept = {name.removeprefix("own/") for name in state_of(folder, client)}
        assert kept == set(HEAD + BODY) - set(shared)


def test_nothing_personal_is_fedavg(run_local: Run) -> None:
    """LG-FedAvg that only warms up, Ditto's and the fine-tuned global model: FedAvg's, bit for bit."""
    _, fedavg = run_local("fedavg", **KEYS)
    same = {"lg-fedavg": {"lg_fedavg__warm_rounds": 3}, "ditto": {}, "fedavg-ft": {}}
    for method in same:
        warm = {"lg-fedavg__warm_rounds": 3} if method == "lg-fedavg" else {}
        _, folder = run_local(method, **KEYS | {"method": method}, **warm)
        ours, theirs = model_of(folder), model_of(fedavg)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), method


def test_the_warm_model_is_handed_out_once(run_local: Run) -> None:
    _, folder = run_local(method="lg-fedavg", **KEYS, **{"lg-fedavg__warm_rounds": 1})
    start = initial()
    head, whole = (sum(4 * start[name].numel() for name in names) for names in (HEAD, HEAD + BODY))
    lines = read_rounds(folder)
    assert [line["formula-bytes-down"] // 3 for line in lines] == [whole, whole, head]
    assert [line["formula-bytes-up"] // 3 for line in lines] == [whole, head, head]


def test_fedbabu_tunes_the_part_that_it_is_told() -> None:
    strategy, client = made("fedbabu", fedbabu__tune="head")
    tuned = client(0, 1, {}).personal(dict(strategy.current), {})
    assert {name for name, tensor in tuned.items() if not torch.equal(tensor, strategy.current[name])} == {*HEAD}


def test_dittos_personal_models_start_at_the_common_start(run_local: Run) -> None:
    """Also in a later round, where the global model has moved: the paper's v^0; and so are they evaluated."""
    keys = KEYS | {"num_clients": 12, "clients_per_round": 2, "local_epochs": 1, "method": "ditto", "lr": 0.5}
    _, folder = run_local(**keys, ditto__lambda=0.0, validation_fraction=0.1)
    lines = read_rounds(folder)
    late = next(c for c in lines[2]["clients"] if c not in lines[0]["clients"] + lines[1]["clients"])
    settings = resolve(json.loads((folder / "settings.json").read_text())["settings"] | {"experiment": ""})
    place = workplace(settings)
    alone = METHODS["local"].client(place, late, 3, {})
    alone.load(alone.initial())
    alone.fit(purpose="personal batches")
    own = state_of(folder, late)
    assert all(torch.equal(own[f"own/{name}"], tensor) for name, tensor in alone.trained().items())
    never = next(c for c in range(12) if all(c not in line["clients"] for line in lines))
    start = METHODS["ditto"].client(place, never, 3, {})
    assert all(torch.equal(tensor, start.personal({}, {})[name]) for name, tensor in initial().items())


def test_ditto_without_pull_is_local_training(run_local: Run) -> None:
    _, ditto_run = run_local("ditto", method="ditto", ditto__lambda=0.0, **KEYS)
    _, anchored = run_local("anchored", method="ditto", ditto__lambda=1e3, lr=1e-4, **KEYS)
    own, near = (state_of(folder, 0)["own/fc1.weight"] for folder in (ditto_run, anchored))
    start = initial()["fc1.weight"]
    assert (near - start).norm() < 0.1 * (own - start).norm()


def test_parts_by_hand() -> None:
    resnet = build_model("resnet18", (3, 32, 32), 10, 0)
    assert part_names(resnet, "head") == head_names(resnet) == ("fc.weight", "fc.bias")
    body = part_names(resnet, "body")
    assert set(body) | {"fc.weight", "fc.bias"} == set(tensors_of(resnet))
    named = part_names(resnet, "layer4.1, fc")
    assert all(name.startswith(("layer4.1.", "fc.")) for name in named)
    assert "layer4.1.bn1.running_mean" in named
    for wrong in ("fc1", "layer4.3", "laye", "", "conv1 bn1 layer1 layer2 layer3 layer4 fc"):
        with pytest.raises(ValueError, match=r"is no layer|of 1.. tensors"):
            part_names(resnet, wrong)


@pytest.mark.parametrize(("method", "personal"), [("lg-fedavg", "body"), ("fedper", "fc1, bn1")])
def test_a_shared_head_has_no_features_for_moon(method: str, personal: str, run_local: Run) -> None:
    """Received and previous model would have the same features, and the term no gradient."""
    with pytest.raises(UserError, match=f"objective = 'moon': {method} shares the head alone; features are personal"):
        run_local(method=method, **KEYS, **{f"{method}__personal": personal}, objective="moon")


@pytest.mark.parametrize(
    ("method", "key", "said"),
    [
        (
            "fedper",
            "personal",
            r"fedper.personal = 'fc9': 'fc9' is no layer; allowed are head, body or some of fc1, bn1, fc2",
        ),
        ("fedbabu", "tune", r"fedbabu.tune = 'fc9': 'fc9' is no layer"),
        ("fedper", "personal", r"fedper.personal = 'all': 'all' is no layer"),
        ("lg-fedavg", "personal", r"lg-fedavg.personal = 'all': 'all' is no layer"),
    ],
)
def test_a_part_that_is_not_there_is_named(method: str, key: str, said: str, run_local: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run_local(method=method, **KEYS, **{f"{method}__{key}": said.split("'")[1]})
    assert not (tmp_path / "run").exists()


def test_a_client_without_the_body_of_its_warm_up_is_sent_the_whole_model_again() -> None:
    """It trained the head under a random body, which went into everybody's mean."""
    place = workplace(resolve({"method": "lg-fedavg", "lg-fedavg.warm-rounds": 1, "model": "fedpews-mlp"}))
    said = [LGFedAvgClient(place, 0, number, {}).irreplaceable for number in (1, 2)]
    assert said == ["", "the body of its warm-up is nowhere else"]


def test_a_frozen_part_is_not_trained(run_local: Run) -> None:
    """The head of FedBABU, with BatchNorm in the body: common start, bit for bit, at every client."""
    net = build_model("lenet5-bn", (1, 32, 32), 10, 0)
    assert any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    keys = KEYS | {"model": "lenet5-bn", "image_size": 32, "train_per_class": 20, "num_rounds": 1}
    _, folder = run_local(method="fedbabu", **keys)
    start = {n: t.detach() for n, t in tensors_of(net).items()}
    for name in head_names(net):
        assert torch.equal(state_of(folder, 0, 1)[f"own/{name}"], start[name])
