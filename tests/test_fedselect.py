"""FedSelect: growth by hand, the algorithm written out a second time, what travels, and its invariants."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SAME, away, ends_as_if_never_stopped, forgetful, merge_round
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

from client_apps.fedselect import FedSelectClient
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.common.seeds import generator
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.data import load_dataset, make_partition
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.models import build_model, tensors_of
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.averaging import Contribution
from fedsub_app.subnets.masks import pack_bits, unpack_bits
from fedsub_app.subnets.sparsity import grow, selectable
from fedsub_app.training.client import Training
from fedsub_app.training.workplace import workplace
from strategies.fedselect import FedSelect

Run = Callable[..., tuple[Json, Path]]
KEYS: dict[str, Value] = {
    "method": "fedselect",
    "dataset": "synthetic-3k",
    "model": "fedpews-mlp",
    "partition": "iid",
    "num-clients": 3,
    "num-rounds": 4,
    "batch-size": 200,
    "local-epochs": 2,
    "lr": 0.05,
    "momentum": 0.0,
    "evaluate": "personal",
    "fedselect.alpha": 0.4,
    "fedselect.share": 0.25,
}
WEIGHTS = [f"fc{k}.weight" for k in range(1, 6)]


def run_with(run_local: Run, name: str = "run", **changes: Value) -> tuple[Json, Path]:
    keys = KEYS | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return run_local(name, **{k.replace(".", "__").replace("-", "_"): v for k, v in keys.items()})


def bits(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


# --- growth -----------------------------------------------------------------------------------------------------------


def test_growth_by_hand() -> None:
    masks = {"w": bits(1, 0, 0, 0, 0, 0)}
    moved = {"w": torch.tensor([9.0, -5.0, 1.0, 4.0, 0.0, 2.0])}
    # 5 positions are off; 5 - round(0.6 * 5) = 2 of them: |-5| and 4
    assert grow(masks, moved, 0.4, 0.5)["w"].tolist() == [True, True, False, True, False, False]
    assert grow(masks, moved, 0.4, 0.5, choose="least")["w"].tolist() == [True, False, True, False, True, False]
    assert grow(masks, moved, 0.0, 0.5)["w"].tolist() == masks["w"].tolist()
    assert grow(masks, moved, 0.4, 1 / 6)["w"].tolist() == masks["w"].tolist()  # one sixth is not below one sixth
    assert int(grow(masks, moved, 0.4, 1 / 6, limit_included=True)["w"].sum()) == 3
    assert grow({"w": bits(0)}, {"w": torch.ones(1)}, 0.05, 0.5)["w"].tolist() == [False]  # rounds to none


def test_each_layer_grows_by_itself() -> None:
    masks = {"a": bits(0, 0), "b": bits(0, 0)}
    grown = grow(masks, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}, 0.5, 0.5)
    assert (grown["a"].tolist(), grown["b"].tolist()) == ([False, True], [False, True])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_masks_only_grow_and_by_the_published_number(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    moved = torch.randn(size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    share, alpha = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    choose: Any = data.draw(st.sampled_from(["most", "least", "random"]))
    new = grow({"w": mask}, {"w": moved}, share, alpha, choose=choose, generator=torch.Generator().manual_seed(0))["w"]
    assert not bool((mask & ~new).any())
    off = int((~mask).sum())
    grows = int(mask.sum()) < alpha * size
    assert int(new.sum() - mask.sum()) == (off - round((1 - share) * off) if grows else 0)
    if choose == "most" and bool((new & ~mask).any()) and not bool(new.all()):
        assert moved.abs()[new & ~mask].min() >= moved.abs()[~new].max()


def test_published_fractions() -> None:
    """p = 0.25 ends at .25, .4375, .578 and .822 for alpha = .05, .3, .5 and .8."""
    for alpha, end in ((0.05, 0.25), (0.3, 0.4375), (0.5, 0.578), (0.8, 0.822)):
        mask, moved = {"w": torch.zeros(4096, dtype=torch.bool)}, {"w": torch.rand(4096)}
        for _ in range(20):
            mask = grow(mask, moved, 0.25, alpha)
        assert float(mask["w"].float().mean()) == pytest.approx(end, abs=1e-3)


def test_what_can_be_selected() -> None:
    names = [name for name, _ in build_model("resnet18", (3, 32, 32), 10, 0).named_parameters()]
    parameters = dict(build_model("resnet18", (3, 32, 32), 10, 0).named_parameters())
    assert sum(parameters[name].numel() for name in selectable(names)) == 11_176_832
    assert {name.split(".")[0] for name in selectable(names, "layer3")} == {"layer3"}


# --- the algorithm, written out ---------------------------------------------------------------------------------------


def reference(keys: dict[str, Value]) -> list[tuple[list[Tensors], list[Tensors], list[Tensors]]]:
    """Algorithms 1 to 3, line by line, every client holding a whole model; full participation, float64.

    What the paper does not say is as in the published code: only weights grow, BatchNorm's running statistics stay with
    the client, and, where the keys ask for it, growth is rarer and counts from the last one, and every round but the
    first (there: 0) trains in evaluation mode.

    Returns for every round the clients' models after GradSelect, their masks m^{t+1} and their models theta_k^{t+1}.
    """
    s = resolve(keys)
    o: Any = s.options
    data = load_dataset(s.data)
    parts = make_partition(data, s.partitioning)
    net = build_model(s.model, tuple(data.train_x.shape[1:]), data.num_classes, s.seed).double()
    theta_i = {n: t.detach().clone() for n, t in tensors_of(net).items()}
    weights = [n for n, _ in net.named_parameters() if "weight" in n]
    clients = range(s.num_clients)
    theta = [dict(theta_i) for _ in clients]  # theta_k^0 <- theta_I
    m = [{n: torch.zeros_like(t) for n, t in theta_i.items()} for _ in clients]  # m_k^0 <- 0
    last = [dict(theta_i) for _ in clients]  # published code: the model after the training of the last growth's round
    history = []
    for t in range(1, s.num_rounds + 1):
        after, grown = [], []  # (u_k^{t+}, v_k^{t+}) as one model, and m_k^{t+1}
        net.train(t == 1 or o.bn_batch == "always")
        for k in clients:  # GradSelect(u_k^t, v_k^t): u and v are theta_k at m_k = 0 and 1
            x, y = data.train_x[parts.train[k]].double(), data.train_y[parts.train[k]]
            draws = {p: generator(s.seed, t, k, p) for p in ("personal batches", "batches")}
            now = dict(theta[k])
            for _ in range(s.local_epochs):  # L times LocalAlt: a pass on v, then one on u
                for purpose in ("personal batches", "batches"):
                    if purpose == "personal batches" and not any(v.any() for v in m[k].values()):
                        continue
                    for batch in torch.randperm(len(y), generator=draws[purpose]).split(s.batch_size):
                        with torch.no_grad():
                            for n, tensor in tensors_of(net).items():
                                tensor.copy_(now[n])
                        net.zero_grad()
                        F.cross_entropy(net(x[batch]), y[batch]).backward()
                        now |= {n: b.clone() for n, b in net.named_buffers() if n in now}  # running statistics
                        for n, p in net.named_parameters():
                            assert p.grad is not None
                            part = m[k][n] if purpose == "personal batches" else 1 - m[k][n]
                            now[n] = now[n] - s.lr * part * p.grad
            new = {n: mask.clone() for n, mask in m[k].items()}
            if (t - 1) % o.grow_every == 0 and (t > 1 or o.grow_every == 1):  # t % lth_epoch_iters == 0 and t != 0
                since = theta[k] if o.movement == "round" else last[k]
                moved = {n: (now[n] - since[n]).abs() for n in weights}  # |u_{k,L} - u_{k,0}|
                for n in weights:
                    fraction = m[k][n].mean()
                    if fraction < o.alpha or (o.alpha_test == "at-most" and fraction == o.alpha):
                        delta = moved[n][m[k][n] == 0]
                        edge = delta.sort().values[round((1 - o.share) * len(delta))]
                        new[n][(m[k][n] == 0) & (moved[n] >= edge)] = 1  # the largest p, or those that are 1 already
                last[k] = dict(now)
            after.append(now)
            grown.append(new)
        nxt = []
        for k in clients:
            nxt.append({})
            for n in theta_i:
                if n not in dict(net.named_parameters()):
                    nxt[k][n] = after[k][n]
                    continue
                omega = sum(1 - m[j][n] for j in clients)
                mean = sum((1 - m[j][n]) * after[j][n] for j in clients) / omega.clamp(min=1)  # type: ignore[union-attr]
                # theta_k^{t+1} (*) not m_k^t <- theta_g^t (*) not m_k^t;  theta_k^{t+1} (*) m_k^t <- v_k^{t+}
                nxt[k][n] = torch.where(m[k][n] == 0, mean, after[k][n])
        theta, m = nxt, grown
        history.append((after, grown, nxt))
    return history


AUTHORS: dict[str, Value] = {
    "fedselect.grow-every": 2, "fedselect.movement": "since-growth", "fedselect.alpha-test": "at-most",
    "fedselect.alpha": 0.25, "num-rounds": 5,
}  # fmt: skip
"""Growth in the third and fifth round; the second one is only for ``at-most``, as the first one ends at 25 %."""
LENET: dict[str, Value] = {
    "dataset": "digits", "image-size": 32, "train-per-class": 30, "model": "lenet5-bn", "batch-size": 50,
    "local-epochs": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, AUTHORS, LENET, LENET | {"fedselect.bn-batch": "first-round"}],
    ids=["paper", "authors", "BatchNorm", "BatchNorm, first round"],
)
@pytest.mark.usefixtures("smooth")
def test_it_follows_the_algorithm(run_local: Run, changes: dict[str, Value]) -> None:
    keys = KEYS | {"num-rounds": 3, "keep-checkpoints": 0} | changes
    _, folder = run_local(**keys)
    start = initial(keys)
    for number, (models, masks, _) in enumerate(reference(keys), 1):
        for i in range(3):
            state = client_state(folder, i, number)
            assert unlike(own_masks(state, start), masks[i]) < 0.01
            assert away(unprefixed("own/", state), models[i], start) < SAME
    fractions = [line["personal-fraction"] for line in read_rounds(folder)]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(0.4375, abs=0.01)


def test_since_the_last_growth_is_another_movement(run_local: Run) -> None:
    """Two growths, by |theta(3) - theta_I| and |theta(5) - theta(3)|, of the models that training left.

    Not by another movement: since the start of the round (the paper's), and in the second growth since theta_I.
    """
    keys = KEYS | AUTHORS | {"keep-checkpoints": 0}
    _, folder = run_local(**keys)
    start, history = initial(keys), reference(keys)
    for k in range(3):
        theta = {0: start} | {t: after[k] for t, (after, _, _) in enumerate(history, 1)}
        begin = {t + 1: nxt[k] for t, (_, _, nxt) in enumerate(history, 1)}
        for number, since, others in ((3, theta[0], [begin[3]]), (5, theta[3], [begin[5], theta[0]])):
            before, ours = (own_masks(client_state(folder, k, t), start) for t in (number - 1, number))
            apart = [
                unlike(ours, {n: largest(theta[number][n] - old[n], before[n]) for n in ours})
                for old in (since, *others)
            ]
            assert apart[0] < 0.01
            assert min(apart[1:]) > 0.05


def largest(moved: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with a quarter of its zeros turned on, those with the largest |moved|."""
    off = (~mask).flatten().nonzero().flatten()
    order = moved.flatten()[off].abs().argsort(descending=True)
    new = mask.flatten().clone()
    new[off[order[: len(off) - round(0.75 * len(off))]]] = True
    return new.view(mask.shape)


def unlike(ours: Tensors, expected: Tensors) -> float:
    """Positions in which two masks differ, as a fraction of the ones; the largest over all tensors.

    Two of a tensor are free: rounding decides between positions that moved alike.
    """
    differ = {n: int((mask != expected[n].bool()).sum()) for n, mask in ours.items()}
    return max(max(differ[n] - 2, 0) / max(int(mask.sum()), 1) for n, mask in ours.items())


def test_batch_statistics_in_the_first_round_only(run_local: Run) -> None:
    """``bn-batch = "first-round"``: what round 1 left as running statistics stays, the client's own, bit for bit."""
    frozen = {}
    for bn_batch in ("always", "first-round"):
        _, folder = run_local(
            bn_batch, **KEYS | LENET | {"num-rounds": 3, "keep-checkpoints": 0, "fedselect.bn-batch": bn_batch}
        )
        states = [[client_state(folder, k, number) for number in (1, 2, 3)] for k in range(3)]
        names = [n for n in states[0][0] if "running_" in n]
        assert len(names) == 4
        frozen[bn_batch] = [torch.equal(one[n], later[n]) for one, *rest in states for later in rest for n in names]
        assert not any(torch.equal(states[0][0][n], states[1][0][n]) for n in names)
    assert all(frozen["first-round"])
    assert not any(frozen["always"])


def client_state(folder: Path, client_id: int, number: int) -> Tensors:
    return load_file(folder / f"clients/client-{client_id:06d}/round-{number:06d}.safetensors")


def initial(keys: dict[str, Value]) -> Tensors:
    """theta_I of these keys."""
    s = resolve(keys)
    data = load_dataset(s.data)
    model = build_model(s.model, tuple(data.train_x.shape[1:]), data.num_classes, s.seed)
    return {n: t.detach() for n, t in tensors_of(model).items()}


def has(kind: str, state: Tensors) -> bool:
    """Whether a client's state holds a mask ("mask") or a reference point ("since")."""
    return bool(unprefixed(f"{kind}/", state))


def own_masks(state: Tensors, start: Tensors) -> Tensors:
    """The mask in a client's state; all zeros where there is none. ``start``: theta_I."""
    return unpack_bits(unprefixed("mask/", state), {n: t.shape for n, t in start.items() if "weight" in n})


def test_a_newly_personal_position_starts_from_the_mean() -> None:
    """Algorithm 1, last lines: the broadcast is by the mask that the round trained under."""
    made, workers = strategy(), []
    for k in range(2):
        task = made.task(k)
        worker = FedSelectClient(workplace(resolve(KEYS)), k, 1, {})
        workers.append((worker, Update(k, worker.train(task.tensors, task.config), {}, 10)))
    merge_round(made, [update for _, update in workers])
    made.round = 2
    for k, (worker, _) in enumerate(workers):
        assert int(made.masks[k]["fc2.weight"].sum()) == 512  # a quarter of 64 x 32
        task = made.task(k)
        again = FedSelectClient(workplace(resolve(KEYS | {"local-epochs": 0})), k, 2, dict(worker.state))
        again.train(task.tensors, task.config)
        for name in WEIGHTS:  # all of it is the mean, also where the client has its own mask now
            assert torch.equal(again.own[name], made.current[name])


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["feature-mlp", "lenet5-bn"])
def test_alpha_0_is_fedavg_bit_for_bit(run_local: Run, model: str) -> None:
    """But for BatchNorm's running statistics, which stay with the clients."""
    keys = {"dataset": "digits", "model": model, "train_per_class": 30, "num_rounds": 2, "evaluate": "global"}
    keys |= {"image_size": 32} if model == "lenet5-bn" else {}
    _, fedavg = run_with(run_local, "fedavg", method="fedavg", **keys)
    _, ours = run_with(run_local, "ours", fedselect__alpha=0.0, **keys)
    left, right = load_file(fedavg / "model.safetensors"), load_file(ours / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left if "running" not in name)


def test_bytes_fall_as_masks_grow(run_local: Run) -> None:
    """4 bytes a global position both ways; up also the bits of the masks that changed."""
    _, folder = run_with(run_local)
    model = build_model("fedpews-mlp", (5,), 4, 0)
    sizes = {n: t.numel() for n, t in tensors_of(model).items()}
    off, before = dict(sizes), dict(sizes)
    for line in read_rounds(folder):
        assert line["formula-bytes-down"] == 3 * 4 * sum(before.values())  # by the mask of the round before
        before = dict(off)
        grows = [n for n in WEIGHTS if off[n] > 0.6 * sizes[n]]
        mask_bytes = sum(-(-sizes[n] // 8) for n in grows)
        assert line["formula-bytes-up"] == 3 * (4 * sum(off.values()) + mask_bytes)
        off |= {n: round(0.75 * off[n]) for n in grows}
    assert read_rounds(folder)[-1]["formula-bytes-down"] < 0.7 * read_rounds(folder)[0]["formula-bytes-down"]


def client(state: Tensors, **changes: Value) -> FedSelectClient:
    keys = KEYS | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return FedSelectClient(workplace(resolve(keys)), 0, 2, state)


def test_what_is_personal_is_nobody_elses_business() -> None:
    """Whatever the server sends for the rest, personal values are trained from the client's own."""
    one = client({}, local_epochs=0)
    state: Tensors = {f"own/{n}": torch.randn_like(t) for n, t in one.network.tensors.items()}
    masks = {n: torch.rand_like(one.network.tensors[n]) < 0.5 for n in WEIGHTS}
    state |= {f"{kind}/{n}": bits for n, bits in pack_bits(masks).items() for kind in ("mask", "held")}
    for seed in (1, 2):
        torch.manual_seed(seed)
        sent = {n: torch.randn_like(t).detach() for n, t in one.network.tensors.items() if n not in WEIGHTS}
        sent |= {n: torch.randn(int((~masks[n]).sum())) for n in WEIGHTS}
        worker = client(dict(state), local_epochs=0)
        answer = worker.train(sent, {})
        for n in WEIGHTS:
            mask = masks[n]
            assert torch.equal(worker.own[n][mask], state[f"own/{n}"][mask])
            assert torch.equal(worker.own[n][~mask], sent[n])
            assert torch.equal(answer[n], sent[n])  # and only these leave


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"optimizer": "adam"}])
def test_each_pass_leaves_the_other_positions_alone(
    optimizer: dict[str, Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = client({}, local_epochs=1, **optimizer)
    worker.load(worker.initial())
    before = worker.trained()
    masks = {n: torch.rand_like(before[n]) < 0.5 for n in WEIGHTS}
    moved = []
    descend = Training.descend

    def watch(self: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = worker.trained()
        loss = descend(self, x, y)
        moved.append({n: t != old[n] for n, t in worker.trained().items()})
        return loss

    monkeypatch.setattr(Training, "descend", watch)
    worker.alternate(masks)
    half = len(moved) // 2
    for changed in moved[:half]:  # personal
        assert not any(bool((changed[n] & ~masks[n]).any()) for n in WEIGHTS)
        assert not any(bool(changed[n].any()) for n in changed if n not in WEIGHTS)
    for changed in moved[half:]:  # global
        assert not any(bool((changed[n] & masks[n]).any()) for n in WEIGHTS)
        assert bool(changed["fc5.bias"].any())


def strategy(**keys: Value) -> FedSelect:
    made = FedSelect(resolve(KEYS | keys), build_model("fedpews-mlp", (5,), 4, 0))
    made.round = 1
    return made


def answer_of(made: FedSelect, client_id: int, value: float) -> Update:
    tensors = {n: torch.full([k or 0 for k in spec.shape], value) for n, spec in made.expected(client_id).items()
               if not spec.optional}  # fmt: skip
    return Update(client_id, tensors, {}, 10)


def test_positions_are_merged_over_those_who_share_them() -> None:
    made = strategy()
    mask = torch.zeros(32, 5, dtype=torch.bool)
    mask[0] = True
    made.masks[0] = made.empty | {"fc1.weight": mask}
    mask = torch.zeros(32, 5, dtype=torch.bool)
    mask[0, 0] = True
    made.masks[1] = made.masks[2] = made.empty | {"fc1.weight": mask}
    old = made.current["fc1.weight"].clone()
    merge_round(made, [answer_of(made, c, v) for c, v in ((0, 1.0), (1, 2.0), (2, 4.0))])
    merged = made.current["fc1.weight"]
    assert merged[0, 0] == old[0, 0]  # nobody shares it: it stays
    assert merged[0, 1:].tolist() == [3.0] * 4
    torch.testing.assert_close(merged[1:], torch.full((31, 5), 7 / 3))


def test_a_mask_that_shrinks_is_refused() -> None:
    made = strategy()
    made.masks[0] = made.empty | {"fc1.weight": torch.ones(32, 5, dtype=torch.bool)}
    update = answer_of(made, 0, 1.0)
    update.tensors["mask/fc1.weight"] = torch.arange(160).reshape(32, 5) > 0  # of one position alone
    with pytest.raises(BadReply, match=r"'mask/fc1.weight': a personal position became global again"):
        made.contribution(update)


def lose(monkeypatch: pytest.MonkeyPatch, client_id: int, number: int) -> None:
    """The server refuses this client's reply of this round."""
    contribution = FedSelect.contribution

    def refuse(self: FedSelect, update: Update) -> Contribution:
        if (update.client, self.round) == (client_id, number):
            raise BadReply("lost on the way")
        return contribution(self, update)

    monkeypatch.setattr(FedSelect, "contribution", refuse)


def test_a_lost_reply_takes_its_growth_back(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, client_id=1, number=2)
    _, folder = run_with(run_local)
    lines = read_rounds(folder)
    assert [len(line["dropped"]) for line in lines] == [0, 1, 0, 0]
    assert lines[-1]["personal-fraction"] == pytest.approx(0.4375, abs=0.01)
    # In round 3 it goes on from its state of round 1; that of round 2, with the growth that was lost, is gone.
    files = {path.name for path in (folder / "clients/client-000001").iterdir()}
    assert "round-000003.safetensors" in files
    assert "round-000002.safetensors" not in files


def test_a_lost_reply_takes_its_reference_point_back(run_local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1's growth of round 4 is lost: round 7's movement is since its last valid growth, so since theta_I."""
    lose(monkeypatch, client_id=1, number=4)
    keys = KEYS | {"num-rounds": 8, "keep-checkpoints": 0}
    keys |= {"fedselect.grow-every": 3, "fedselect.movement": "since-growth"}
    _, folder = run_local(**keys)
    start = initial(keys)
    states = {number: client_state(folder, 1, number) for number in (3, 5, 6, 7, 8)}
    ours = own_masks(states[7], start)
    theta = {number: unprefixed("own/", states[number]) for number in (3, 7)}
    none = {n: torch.zeros_like(mask) for n, mask in ours.items()}
    right, wrong = (
        {n: largest(theta[7][n] - since[n], none[n]) for n in ours} for since in (start, theta[3])
    )  # bit for bit: nothing is rounded
    assert all(torch.equal(ours[n], mask) for n, mask in right.items())
    assert unlike(ours, wrong) > 0.1
    assert [has("since", state) for state in states.values()] == [False, False, False, True, True]
    assert [has("since", client_state(folder, 0, number)) for number in range(3, 9)] == [False, *[True] * 5]


def test_since_the_last_growth_ends_as_if_never_stopped(
    run_local: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed after round 2, of which client 1's reply was lost: its state of round 1 and the others' of round 2."""
    lose(monkeypatch, client_id=1, number=2)
    keys = KEYS | {"fedselect.movement": "since-growth", "fedselect.alpha": 0.8, "keep-checkpoints": 0}
    ends_as_if_never_stopped(run_local, tmp_path, keys)


def test_a_lost_broadcast_is_repeated() -> None:
    """The client never saw round 2: in round 3 it is still sent what round 1 left global, by the newest mean."""
    made = strategy()
    task = made.task(0)
    worker = FedSelectClient(workplace(resolve(KEYS)), 0, 1, {})
    merge_round(made, [Update(0, worker.train(task.tensors, task.config), {}, 10)])
    made.round = 2
    first = made.task(0)
    made.current = {name: tensor + 1 for name, tensor in made.current.items()}
    made.round = 3
    second = made.task(0)
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(second.tensors[n], made.current[n]) for n in WEIGHTS)


def test_a_client_that_lost_its_state_begins_anew(run_local: Run, tmp_path: Path) -> None:
    """Its state is gone before round 3: dropped then, it grows from the empty mask in round 4."""
    grid = forgetful(tmp_path / "run", client=1, after=2)
    _, folder = run_with(partial(run_local, grid=grid), num_rounds=4, keep_checkpoints=0)
    lines = read_rounds(folder)
    assert [[drop["client"] for drop in line["dropped"]] for line in lines] == [[], [], [1], []]
    said = "client 1 has lost its state: its personal parameters are nowhere else"
    assert lines[-2]["dropped"][0]["reason"].endswith(said)
    masks = [own_masks(client_state(folder, k, 4), initial(KEYS)) for k in range(3)]
    share = [sum(int(m.sum()) for m in of.values()) / sum(m.numel() for m in of.values()) for of in masks]
    assert share[1] == pytest.approx(0.25, abs=0.01)
    assert share[0] == share[2] == pytest.approx(0.4375, abs=0.01)


def test_masks_survive_the_checkpoint() -> None:
    made, again = strategy(), strategy()
    made.masks = [{name: torch.rand(mask.shape) < 0.5 for name, mask in masks.items()} for masks in made.masks]
    made.held = [{name: mask & (torch.rand(mask.shape) < 0.5) for name, mask in masks.items()} for masks in made.masks]
    again.load_state(made.state())
    for left, right in zip(made.masks + made.held, again.masks + again.held, strict=True):
        assert all(torch.equal(mask, right[name]) for name, mask in left.items())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"weight-decay": 0.1}, "weight-decay = 0.1: must be 0 with method = 'fedselect'"),
        ({"fedselect.alpha": 1.2}, "fedselect.alpha = 1.2: must be less than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(keys: dict[str, Value], said: str) -> None:
    with pytest.raises(UserError, match=said):
        strategy(**keys)


def test_the_authors_reading_runs(run_local: Run) -> None:
    """Growth in rounds 3, 6, ... counted from 0. What it grows by, and BatchNorm: the tests of the algorithm."""
    changes: dict[str, Value] = {
        "fedselect.grow-every": 3, "fedselect.movement": "since-growth", "fedselect.alpha-test": "at-most",
        "num-rounds": 8,
    }  # fmt: skip
    _, folder = run_with(run_local, **{k.replace(".", "__").replace("-", "_"): v for k, v in changes.items()})
    fractions = [round(line["personal-fraction"], 2) for line in read_rounds(folder)]
    assert fractions == [0, 0, 0, 0.25, 0.25, 0.25, 0.44, 0.44]
