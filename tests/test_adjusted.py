"""PruneFL, FedTiny and FedRTS: three weights by hand, slow references in float64, what travels."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import merge_round
from test_methods import made
from test_parts import BODY, HEAD, model_of
from test_personal import Slow
from test_sparse import SMALL, WEIGHTS, nearly_equal, top, trained
from torch import Tensor, nn

from fedsub_app.common.seeds import derive, generator
from fedsub_app.common.tensors import Json, Tensors
from fedsub_app.federation.protocol import BadReply, Update
from fedsub_app.runs.config import resolve
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import read_rounds
from fedsub_app.subnets.sparsity import kept_counts, worth_their_time
from strategies.asked import FedTiny, exchange_counts
from strategies.sparse import Sparse

Run = Callable[..., tuple[Json, Path]]
ALWAYS = {"every": 1, "until": 100_000}  # and the share stays what it is


# --- three weights by hand --------------------------------------------------------------------------------------------


def three(method: str, mask: list[int], weights: list[float], **keys: Any) -> Sparse:
    """A server of a network of three weights, in round 1."""
    own = {f"{method}.{key.replace('_', '-')}": value for key, value in keys.items()}
    settings = resolve({"method": method, "num-clients": 2, "weighting": "uniform", **own})
    strategy = METHODS[method].strategy(settings, nn.Sequential(OrderedDict(w=nn.Linear(3, 1, bias=False))))
    assert isinstance(strategy, Sparse)
    strategy.masks = {"w.weight": torch.tensor([mask], dtype=torch.bool)}
    strategy.current = {"w.weight": torch.tensor([weights])}
    strategy.round = 1
    return strategy


def answer(client: int, values: list[float], **more: list[Any]) -> Update:
    found = {f"{prefix}/w.weight": torch.tensor(value) for prefix, value in more.items()}
    return Update(client, {"w.weight": torch.tensor(values), **found}, {}, 1)


def test_weights_worth_their_time_by_hand() -> None:
    """The first is needed: 4 / (1 + 1) = 2 is above the next square; 4 / (7 + 1) and then 5 / 9 are not, and are."""
    squares, needed = {"a": torch.tensor([4.0, 0.5, 1.0])}, {"a": torch.tensor([True, False, False])}
    assert worth_their_time(squares, needed, 1 / 3, 1)["a"].tolist() == [True, False, False]
    assert worth_their_time(squares, needed, 7 / 3, 1)["a"].tolist() == [True, False, True]
    assert worth_their_time(squares, needed, 7 / 3, 0.3)["a"].tolist() == [True, False, False]
    assert worth_their_time(squares, needed, 100, 1)["a"].all()


def test_prunefl_by_hand() -> None:
    """Half of two weights may go, -0.2; squares of 1 and 3 are 2 on average: above 0.3 / (3 + 1), as is 0.5 / 5."""
    strategy = three("prunefl", [1, 1, 0], [0.5, -0.2, 0.0], density=0.99, share=0.6, **ALWAYS)
    updates = [answer(0, [0.5, -0.2], slope=[[0.1, 0.5, 1.0]]), answer(1, [0.7, 0.2], slope=[[0.7, 0.5, 3.0]])]
    merge_round(strategy, updates)
    assert strategy.masks["w.weight"].tolist() == [[True, False, True]]  # 0.1 is below 2.3 / 5
    assert torch.allclose(strategy.current["w.weight"], torch.tensor([[0.6, 0.0, 0.0]]))
    strategy = three("prunefl", [1, 1, 0], [0.5, -0.2, 0.0], density=0.34, share=0.6, **ALWAYS)
    merge_round(strategy, updates)
    assert strategy.masks["w.weight"].tolist() == [[True, False, False]]  # the limit


def test_findings_count_by_the_samples_of_their_clients() -> None:
    """1 of one sample and 5 of three."""
    strategy = three("prunefl", [1, 1, 0], [0.5, -0.2, 0.0])
    strategy.settings = strategy.settings.model_copy(update={"weighting": "examples"})
    updates = [Update(client, {}, {}, samples) for client, samples in enumerate((1, 3))]
    assert strategy.weighted(updates, [torch.tensor(1.0), torch.tensor(5.0)]) == 4


def test_a_client_forgets_the_mask_of_a_layer_that_keeps_all_its_weights_again() -> None:
    strategy, client = made("prunefl")
    assert isinstance(strategy, Sparse)
    state: Tensors = {}
    for strategy.round in (1, 2):
        worker, task = client(0, strategy.round, state), strategy.task(0)
        worker.run_training(dict(task.tensors), task.config | {"adjust": False})
        state = worker.state
        assert len(state) == 3 - strategy.round
        strategy.masks = strategy.masks | {"fc2.weight": torch.ones(10, 1000, dtype=torch.bool)}


def test_fedtiny_by_hand() -> None:
    """The merged weights are 0.6 and 0; the mean gradients of 2 and -4 at the third are -1: it grows."""
    strategy = three("fedtiny", [1, 1, 0], [0.5, -0.2, 0.0], density=0.67, share=0.8, **ALWAYS)
    strategy.round, strategy.made = 2, torch.tensor(1)  # round 1 has chosen the masks
    updates = [
        answer(0, [0.5, -0.2], grow=[[False, False, True]], slope=[2.0]),
        answer(1, [0.7, 0.2], grow=[[False, False, True]], slope=[-4.0]),
    ]
    merge_round(strategy, updates)
    assert strategy.masks["w.weight"].tolist() == [[True, False, True]]
    assert torch.allclose(strategy.current["w.weight"], torch.tensor([[0.6, 0.0, 0.0]]))
    strategy.round = 3
    with pytest.raises(BadReply, match=r"^tensor 'grow/w.weight': must name 1 pruned positions$"):
        strategy.contribution(answer(0, [0.5, -0.2], grow=[[False, False, True]], slope=[2.0]))


def test_fedtiny_takes_the_candidate_of_the_smallest_mean_loss() -> None:
    """0.5 and 0.25 against 0.4 and 0.45."""
    strategy = three("fedtiny", [1, 1, 1], [0.5, -0.6, 0.3], density=0.34, candidates=2)
    assert strategy.stage(1)
    losses = [torch.tensor([0.5, 0.4]), torch.tensor([0.25, 0.45])]
    merge_round(strategy, [Update(c, {"losses": x}, {}, 1) for c, x in enumerate(losses)])
    assert strategy.masks["w.weight"].tolist() == [[False, True, False]]
    assert not strategy.stage(2)


def test_one_client_alone_does_not_choose_fedtinys_candidate() -> None:
    """With ``robust``: within the bounds on its losses, a client's 0 against 3 outweighs four clients."""
    strategy = three("fedtiny", [1, 1, 1], [0.5, -0.6, 0.3], density=0.34, candidates=2)
    strategy.settings = strategy.settings.model_copy(update={"robust": "on"})
    vars(strategy)["candidates"] = [{"w.weight": torch.tensor([[k == 0, k == 1, False]])} for k in range(2)]
    losses = [torch.tensor([0.0, 3.0]), *(torch.tensor([2.3, 2.2]) + level for level in (0.0, 0.1, 0.2, 0.3))]
    merge_round(strategy, [Update(c, {"losses": x}, {}, 1) for c, x in enumerate(losses)])
    assert strategy.masks["w.weight"].tolist() == [[False, True, False]]


def test_fedtinys_first_candidate_has_no_noise() -> None:
    strategy, _ = made("fedtiny")
    assert isinstance(strategy, FedTiny)
    first, second, *_ = ({name: int(mask.sum()) for name, mask in each.items()} for each in strategy.candidates)
    assert first == kept_counts(strategy.shapes, 0.2, "erk") != second


def test_fedtinys_candidates_keep_as_many_weights_as_the_density_says() -> None:
    """Three quarters of a layer times up to 1.9 are more than the layer; the other layers take what is over."""
    strategy, _ = made("fedtiny", fedtiny__density=0.75, fedtiny__noise=0.9, fedtiny__candidates=8)
    assert isinstance(strategy, FedTiny)
    kept = [sum(int(mask.sum()) for mask in each.values()) for each in strategy.candidates]
    assert kept == pytest.approx([kept[0]] * 8, abs=len(strategy.shapes))


def test_no_more_weights_are_exchanged_than_are_pruned() -> None:
    """Half of 9 and of 5 would be exchanged, of ten each."""
    options = three("fedrts", [1, 1, 0], [0.5, -0.2, 0.0], share=0.5, **ALWAYS).options
    masks = {"dense": torch.arange(10) < 9, "sparse": torch.arange(10) < 5}
    assert exchange_counts(options, 1, masks) == {"dense": 1, "sparse": 2}


def test_fedtinys_blocks_begin_with_the_last() -> None:
    strategy, _ = made("fedtiny", fedtiny__every=3, fedtiny__blocks=2)
    assert isinstance(strategy, FedTiny)
    strategy.masks = {name: torch.rand(shape) < 0.5 for name, shape in strategy.shapes.items()}
    asked = []
    for strategy.round in (3, 6, 9):
        asked.append([*strategy.counts])
    assert asked == [["fc2.weight"], ["fc1.weight"], ["fc2.weight"]]


def test_fedrts_by_hand() -> None:
    """One of two weights would stay: the first in the merged model (2 and 1.5), and either in one client's."""
    strategy = three("fedrts", [1, 1, 0], [0.5, -0.2, 0.0], density=0.67, share=0.8, every=2, until=100_000)
    updates = [answer(0, [3.0, 1.0]), answer(1, [1.0, 2.0])]
    merge_round(strategy, updates)
    assert strategy.ones["w.weight"].tolist() == [[1 + 10 * 0.75, 1 + 10 * 0.25, 1]]
    assert strategy.zeros["w.weight"].tolist() == [[1 + 10 * 0.25, 1 + 10 * 0.75, 1]]
    assert strategy.masks["w.weight"].tolist() == [[True, True, False]]
    strategy.round = 2
    named = {"grow": [[False, False, True]]}
    merge_round(strategy, [answer(0, [3.0, 1.0], **named), answer(1, [1.0, 2.0], **named)])
    assert strategy.ones["w.weight"].tolist() == [[16, 6, 1 + 10 * 0.75]]
    assert strategy.zeros["w.weight"].tolist() == [[6, 16, 1 + 10 * 0.25]]
    drawn = np.random.default_rng(derive(0, 2, "masks")).beta([16, 6, 8.5], [6, 16, 3.5])
    assert strategy.masks["w.weight"].tolist() == [[bool(x > drawn.min()) for x in drawn]]


@pytest.mark.parametrize("batch_size", [1000, 48])
def test_fedtinys_losses_have_batchnorm_adapted_to_the_client(batch_size: int) -> None:
    """Two candidates: the mean loss of the samples by the network in training mode, mini-batch by mini-batch."""
    strategy, client = made("fedtiny", model="lenet5-bn", image_size=32, batch_size=batch_size)
    assert isinstance(strategy, FedTiny)
    strategy.round = 1
    worker, task = client(0, 1, {}), strategy.task(0)
    answer = worker.run_training(dict(task.tensors), task.config)
    for number, masks in enumerate(strategy.candidates):
        network, model, loss = worker.place.problem.network().train(), under(strategy.current, masks), 0.0
        for batch in client(0, 1, {}).batches(1, "candidates"):
            logits = torch.func.functional_call(network, model, (worker.x[batch],))
            loss += float(nn.functional.cross_entropy(logits, worker.y[batch], reduction="sum")) / len(worker.y)
        assert float(answer.tensors["losses"][number]) == pytest.approx(loss, rel=1e-4)
    assert answer.metrics["train-loss"] == float(answer.tensors["losses"][0]) != float(answer.tensors["losses"][1])


# --- slow references --------------------------------------------------------------------------------------------------


def merged(r: Slow, x_g: Tensors, masks: Tensors, t: int) -> tuple[Tensors, list[Tensors]]:
    models = [trained(r, x_g, masks, i, t) for i in r.clients]
    return r.mean(models, HEAD + BODY), models


def under(x_g: Tensors, masks: Tensors) -> Tensors:
    return {n: x * masks.get(n, torch.ones(())) for n, x in x_g.items()}


def largest_slopes(
    r: Slow, model: Tensors, mask: Tensor, name: str, count: int, i: int, t: int
) -> tuple[Tensor, Tensor]:
    slope = r.gradient(model, next(r.batches(i, t, "slopes"))[0])[name]
    return top(torch.where(mask, -1, slope.abs()), count).view(mask.shape), slope


def prunefl(r: Slow) -> Tensors:
    o, draws = r.s.options, generator(r.s.seed, "masks")
    counts = kept_counts({n: r.start[n].shape for n in WEIGHTS}, o.density, o.layers)
    masks = {n: top(torch.rand(r.start[n].shape, generator=draws), counts[n]).view(r.start[n].shape) for n in WEIGHTS}
    x_g, every = under(r.start, masks), sum(r.start[n].numel() for n in WEIGHTS)
    for t in (1, 2, 3):
        x_g, models = merged(r, x_g, masks, t)
        if t % o.every:
            continue
        squares = {n: torch.zeros_like(x_g[n]) for n in WEIGHTS}
        for i, model in enumerate(models):
            batches = next(r.batches(i, t, "slopes"))
            for batch in batches:
                slope = r.gradient(model, batch)
                for n in WEIGHTS:
                    squares[n] += slope[n] ** 2 / len(batches) / len(models)
        candidates, kept, total, time = [], {}, 0.0, o.constant * every
        for n in WEIGHTS:
            count = int(masks[n].sum())
            kept[n] = top(torch.where(masks[n], x_g[n].abs(), -1), count - int(o.share_at(t) * count)).view(
                x_g[n].shape
            )
            total, time = total + float(squares[n][kept[n]].sum()), time + int(kept[n].sum())
            others = zip(squares[n][~kept[n]].tolist(), (~kept[n]).nonzero().tolist(), strict=True)
            candidates += [(square, n, at) for square, at in others]
        left = round(o.density * every) - sum(int(kept[n].sum()) for n in WEIGHTS)
        for square, n, at in sorted(candidates, key=lambda each: -each[0]):
            if square <= total / time or left <= 0:
                break
            kept[n][tuple(at)] = True
            total, time, left = total + square, time + 1, left - 1
        masks, x_g = kept, under(x_g, kept)
    return x_g


def fedrts(r: Slow) -> Tensors:
    o, draws = r.s.options, generator(r.s.seed, "masks")
    counts = kept_counts({n: r.start[n].shape for n in WEIGHTS}, o.density, o.layers)
    masks = {n: top(torch.rand(r.start[n].shape, generator=draws), counts[n]).view(r.start[n].shape) for n in WEIGHTS}
    x_g, ones = under(r.start, masks), {n: torch.ones_like(r.start[n]) for n in WEIGHTS}
    zeros = {n: torch.ones_like(r.start[n]) for n in WEIGHTS}
    for t in (1, 2, 3):
        x_g, models = merged(r, x_g, masks, t)
        rng = np.random.default_rng(derive(r.s.seed, t, "masks"))
        for n in WEIGHTS:
            mask, exchanged = masks[n], min(int(o.share_at(t) * counts[n]), masks[n].numel() - counts[n])
            votes = [top(torch.where(mask, m[n].abs(), -1), counts[n] - exchanged).view(mask.shape) for m in models]
            both = top(torch.where(mask, x_g[n].abs(), -1), counts[n] - exchanged).view(mask.shape)
            outcome = (1 - o.gamma) * both + o.gamma * sum(votes) / len(votes)
            seen = mask
            if t % o.every == 0:
                named = [largest_slopes(r, m, mask, n, exchanged, i, t)[0] for i, m in enumerate(models)]
                outcome = torch.where(mask, outcome, (1 - o.gamma) / 2 + o.gamma * sum(named) / len(named))
                seen = torch.ones_like(mask)
            ones[n] = torch.where(seen, ones[n] + o.trust * outcome, ones[n])
            zeros[n] = torch.where(seen, zeros[n] + o.trust * (1 - outcome), zeros[n])
            if t % o.every == 0:
                drawn = rng.beta(ones[n].float(), zeros[n].float())
                masks[n] = top(torch.from_numpy(drawn), counts[n]).view(mask.shape)
        x_g = under(x_g, masks)
    return x_g


def candidates(r: Slow) -> Iterator[Tensors]:
    o, draws = r.s.options, generator(r.s.seed, "candidates")
    counts = kept_counts({n: r.start[n].shape for n in WEIGHTS}, o.density, o.layers)
    for number in range(o.candidates):
        noise = [
            1 + o.noise * (2 * float(x) - 1) * (number > 0) for x in torch.rand(2, generator=draws, dtype=torch.float64)
        ]
        noisy = [counts[n] * x for n, x in zip(WEIGHTS, noise, strict=True)]
        sizes = [round(x * sum(counts.values()) / sum(noisy)) for x in noisy]
        yield {n: top(r.start[n].float().abs(), k).view(r.start[n].shape) for n, k in zip(WEIGHTS, sizes, strict=True)}


def fedtiny(r: Slow) -> Tensors:
    """The network's BatchNorm takes the statistics of the samples that it is given, in round 1 as well."""
    o, found = r.s.options, [*candidates(r)]
    losses = [sum(float(r.loss(under(r.start, masks), r.parts.train[i])) for i in r.clients) for masks in found]
    masks = found[int(np.argmin(losses))]
    x_g = under(r.start, masks)
    for t in (2, 3):
        x_g, models = merged(r, x_g, masks, t)
        for n in WEIGHTS if t % o.every == 0 else ():
            mask, kept = masks[n], int(masks[n].sum())
            count = min(int(o.share_at(t) * kept), mask.numel() - kept)
            named = [largest_slopes(r, m, mask, n, count, i, t) for i, m in enumerate(models)]
            slope = sum(bits * slope for bits, slope in named) / len(named)
            grown = top(torch.where(mask, -1, slope.abs()), count).view(mask.shape)
            masks[n] = grown | top(torch.where(mask, x_g[n].abs(), -1), kept - count).view(mask.shape)
        x_g = under(x_g, masks)
    return x_g


METHODS_AND_KEYS = [
    ("prunefl", prunefl, {"every": 2, "density": 0.6}),
    ("prunefl", prunefl, {"every": 3, "density": 0.9, "constant": 0.1}),
    ("fedrts", fedrts, {"every": 2}),
    ("fedrts", fedrts, {"every": 1, "density": 0.6, "layers": "uniform", "gamma": 0.2}),
    ("fedtiny", fedtiny, {"every": 3, "blocks": 1, "candidates": 3}),
]


@pytest.mark.run
@pytest.mark.parametrize(("method", "reference", "own"), METHODS_AND_KEYS)
def test_the_model_is_that_of_the_algorithm(
    method: str, reference: Callable[[Slow], Tensors], own: dict[str, Any], run_local: Run
) -> None:
    """Of two weights or gradients that are nearly equal, rounding may choose the other one: a few in 10,000."""
    keys = SMALL | {"method": method}
    keys |= {f"{method}__{key}": value for key, value in own.items()}
    _, folder = run_local(**keys)
    model = model_of(folder)
    expected = reference(Slow(resolve({k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()})))
    nearly_equal(model, expected)


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.run
@pytest.mark.parametrize("method", ["prunefl", "fedtiny", "fedrts"])
def test_findings_travel_in_the_rounds_that_adjust(method: str, run_local: Run) -> None:
    """The bytes of the formula: values, the masks' bits where they are new, and what a client adds."""
    own = {f"{method}__every": 3, f"{method}__density": 0.25} | (
        {"fedtiny__blocks": 1, "fedtiny__layers": "uniform"} if method == "fedtiny" else {}
    )
    _, folder = run_local(**SMALL | {"num_rounds": 4, "method": method} | own)
    model = model_of(folder)
    dense = sum(x.numel() for n, x in model.items() if n not in WEIGHTS)
    every, bits = sum(model[n].numel() for n in WEIGHTS), sum(-(-model[n].numel() // 8) for n in WEIGHTS)
    lines = read_rounds(folder)[1:]
    down, up = ([line[f"formula-bytes-{way}"] // 3 for line in lines] for way in ("down", "up"))
    if method == "prunefl":  # the gradients of all weights
        assert up[2] == up[0] + 4 * every
        assert up[3] == down[3] - bits
        assert up[3] <= up[0] == up[1] == down[1] == down[0] - bits
    elif method == "fedtiny":  # eight candidates' bits, and their losses
        assert down[0] == 4 * (dense + every) + 8 * bits
        assert up[0] == 4 * 8
        assert down[1] - bits == down[2] == up[1]
        exchanged = (up[2] - up[1] - bits) / 4  # of a quarter of the weights
        assert 0 < exchanged <= 0.5 * every / 4
    else:
        assert up[2] == down[0] == down[3]
        assert up[0] == up[1] == up[3] == down[1] == down[2] == up[2] - bits
