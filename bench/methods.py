"""``python -m bench.methods``: what a method's round costs over a plain one, in seconds of training, FLOPs and bytes.

- ``fedpews``: a warm-up round over a plain one of the same run (the paper's omega, Appendix A), learned and fixed
  masks, computing with zeros and with smaller weights ("narrow").
- ``fedpart``: a round of each layer group over a round of the full network of the same run.
- ``fedselect``: a round of one or three LocalAlts (two passes over the data each) over a FedAvg round of two or six
  epochs, in turn.
- ``width_over_full``: a round of clients of width 1/4 over one of whole clients, with a client's peak of memory.
- ``subfedavg``: an epoch with a share of the channels gone from every layer over one of the whole network, in turn.
- ``together``: a round of ten clients with ``stack-clients`` over one without, in turn.

Local engine, medians. Writes ``bench/out/methods.json``.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.baselines import IMAGE
from bench.flower_box import PROJECT
from bench.measures import DATASET, apart, commit, peak_above_now_mb, run_local, write_images
from client_apps import fedpews
from client_apps.base import Client
from client_apps.subfedavg import SubFedAvgClient
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.federation.protocol import formula_bytes
from fedsub_app.models import build_model, layer_groups
from fedsub_app.runs.config import resolve
from fedsub_app.training.workplace import workplace

ROUNDS = 6  # of each kind
EPOCHS = 15
SHARES = (0.3, 0.5, 0.7, 0.9)
KEYS = ("compute-seconds", "flops", "subnet-flops", "formula-bytes-down", "formula-bytes-up")
BASE: dict[str, Value] = {"num-clients": 2, "partition": "iid", "eval-every": 1000, "evaluate": "global"}


def run(settings: Mapping[str, Value], images: int = 1280) -> list[Json]:
    """Return the lines of a run's rounds, without the first, which counts FLOPs and imports."""
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), images)
        lines, _ = run_local({**BASE, "dataset": DATASET, **settings, "data-dir": folder})
    return [line for line in lines if line["round"] > 1]


def over(upper: Sequence[Json], lower: Sequence[Json]) -> Json:
    """Return the ratio of the medians of every key."""
    return {
        key: statistics.median(line[key] for line in upper) / statistics.median(line[key] for line in lower)
        for key in KEYS
    }


def fedpews_round(settings: Mapping[str, Value], narrow: bool) -> Json:
    """Return a warm-up round over a plain round."""
    fedpews.NARROW_FLOPS = 0 if narrow else math.inf
    keys: dict[str, Value] = {"method": "fedpews", "num-rounds": 2 * ROUNDS + 1, "fedpews.warmup-rounds": ROUNDS + 1}
    lines = run({**keys, **settings})
    return over([x for x in lines if x["round"] <= ROUNDS + 1], [x for x in lines if x["round"] > ROUNDS + 1])


def fedpart_rounds(model: str) -> Json:
    """Return a round of each layer group over a full round, from shallow to deep."""
    groups = layer_groups(build_model(model, IMAGE, 10, 0))
    each = 2
    keys: dict[str, Value] = {
        "method": "fedpart",
        "model": model,
        "optimizer": "adam",
        "lr": 0.001,
        "num-rounds": ROUNDS + 1 + each * len(groups),
        "fedpart.full-rounds": ROUNDS + 1,
        "fedpart.rounds-per-group": each,
    }
    lines = run(keys, 640)
    full, rest = lines[:ROUNDS], lines[ROUNDS:]
    found = {names[0]: over(rest[each * k : each * (k + 1)], full) for k, names in enumerate(groups)}
    return found | {"all groups": over(rest, full)}


def fedselect_round(model: str, times: int) -> Json:
    """Return a round of some LocalAlts, once masks have grown, over a plain round of twice as many epochs."""
    keys: dict[str, Value] = {"model": model, "num-rounds": ROUNDS + 1, "lr": 0.01}
    upper: list[Json] = []
    lower: list[Json] = []
    for _ in range(2):
        lower += run({**keys, "method": "fedavg", "local-epochs": 2 * times}, 256)
        upper += run({**keys, "method": "fedselect", "local-epochs": times}, 256)
    return over(upper, lower)


def subfedavg_epoch(settings: Mapping[str, Value]) -> Json:
    """Return an epoch with a share of the channels gone from every layer over one of the whole network."""
    torch.set_num_threads(1)
    keys: dict[str, Value] = {"method": "subfedavg", "subfedavg.pruning": "structured", "dataset": DATASET}
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 1000)
        place = workplace(resolve({**BASE, **keys, "lr": 0.01, "momentum": 0.5, **settings, "data-dir": folder}))
    client = SubFedAvgClient(place, 0, 1, {})
    lines: dict[float, list[Json]] = {share: [] for share in (0.0, *SHARES)}
    for _ in range(EPOCHS + 1):
        for share, found in lines.items():
            masks = {group.name: torch.arange(group.size) >= round(share * group.size) for group in client.plan.groups}
            small = client.plan.cut(client.initial(), masks)
            client.load(small)
            client.flops = 0.0
            start = time.perf_counter()
            client.fit(epochs=1)
            spent = (time.perf_counter() - start, client.flops, client.flops, *[formula_bytes(small)] * 2)
            found.append(dict(zip(KEYS, spent, strict=True)))
    return {f"{share:.0%}": over(found[1:], lines[0.0][1:]) for share, found in lines.items() if share}


def width_over_full(settings: Mapping[str, Value]) -> Json:
    """Return a round of HeteroFL's clients of width 1/4 over one of whole clients, with a client's peak of memory."""
    narrow, whole = (apart(_rounds_of_width, settings, width) for width in ("0.25", "1"))
    small, large = (apart(_peak_of_width, settings, width) for width in (0.25, 1.0))
    return over(narrow, whole) | {"peak": small / large, "peak-mb": large}


def _rounds_of_width(settings: Mapping[str, Value], width: str) -> list[Json]:
    keys: dict[str, Value] = {"method": "heterofl", "heterofl.widths": width, "heterofl.masked-loss": False}
    return run({**keys, "num-rounds": ROUNDS + 1, **settings}, 640)


def _peak_of_width(settings: Mapping[str, Value], width: float) -> float:
    """Return the MB that two steps of a client of some width take above what its process had before."""
    torch.nn.Conv2d(1, 1, 1)(torch.zeros(1, 1, 1, 1)).sum().backward()  # loads the code of the backward pass
    keys: dict[str, Value] = {"method": "fedavg", "momentum": 0.9, "local-steps": 2, "model-width": width}
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 640)
        client = Client(
            workplace(resolve({**BASE, "dataset": DATASET, **keys, **settings, "data-dir": folder})), 0, 1, {}
        )

    def train() -> None:
        client.load(client.initial())
        client.fit()

    return peak_above_now_mb(train)


def together_over_apart(settings: Mapping[str, Value]) -> Json:
    """Return a round of ten clients that train together over one where they train one after the other."""
    torch.set_num_threads(1)
    lines: dict[bool, list[Json]] = {True: [], False: []}
    for _ in range(2):
        for stacked, found in lines.items():
            found += run({"num-clients": 10, "num-rounds": ROUNDS + 1, **settings, "stack-clients": stacked}, 5000)
    return over(lines[True], lines[False])


def measures() -> dict[str, tuple[Callable[..., Json], tuple[object, ...]]]:
    """Return what is measured: name -> function and arguments."""
    networks: dict[str, dict[str, Value]] = {
        "fedpews-mlp, batch 32": {
            "model": "fedpews-mlp", "dataset": "synthetic-3k", "partition": "lists", "class-lists": "0 2, 1 3",
        },
        "fedpews-cnn, batch 64": {"model": "fedpews-cnn", "batch-size": 64},
    }  # fmt: skip
    found: dict[str, tuple[Callable[..., Json], tuple[object, ...]]] = {
        f"fedpews: {network}, {masks}, {'narrow' if narrow else 'zeros'}": (
            fedpews_round,
            ({**settings, "fedpews.masks": masks}, narrow),
        )
        for network, settings in networks.items()
        for masks in ("learned", "fixed")
        for narrow in (False, True)
    }
    digits: dict[str, Value] = {"model": "mnist-cnn-bn", "dataset": "digits", "image-size": 28}
    found |= {
        f"subfedavg: {settings['model']}, batch {batch}": (subfedavg_epoch, ({**settings, "batch-size": batch},))
        for settings in ({"model": "lenet5-bn"}, digits)
        for batch in (10, 100)
    }
    mlp: dict[str, Value] = {"model": "fedpews-mlp", "dataset": "synthetic-3k", "batch-size": 8}
    stacked: list[dict[str, Value]] = [
        {"method": "fedavg", **mlp},
        {"method": "subfedavg", **mlp, "local-epochs": 2, "validation-fraction": 0.1},
        {"method": "fedavg", "model": "lenet5", "batch-size": 10},
        {"method": "fedavg", "model": "lenet5", "batch-size": 32},
    ]
    found |= {
        f"together: {keys['method']}, {keys['model']}, batch {keys['batch-size']}": (together_over_apart, (keys,))
        for keys in stacked
    }
    models: list[dict[str, Value]] = [{"model": "fedpews-mlp", "dataset": "digits"}, {"model": "lenet5"}]
    models.append({"model": "resnet18-gn"})
    found |= {f"width_over_full: {keys['model']}": (width_over_full, (keys,)) for keys in models}
    found |= {f"fedpart: {model}": (fedpart_rounds, (model,)) for model in ("fedpart-cnn", "resnet18")}
    return found | {
        f"fedselect: {model}, LocalAlts: {times}": (fedselect_round, (model, times))
        for model, times in (("lenet5", 1), ("resnet18", 1), ("resnet18", 3))
    }


def main() -> int:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.methods", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name")
    options = parser.parse_args()
    if not any(options.only in name for name in measures()):
        parser.error(f"--only {options.only}: is in none of {', '.join(measures())}")
    found = {}
    print(f"{'what':<46}{'seconds':>9}{'FLOPs':>8}{'subnet':>8}{'down':>8}{'up':>8}")
    for name, (function, arguments) in measures().items():
        if options.only not in name:
            continue
        result = apart(function, *arguments)
        nested = result if isinstance(next(iter(result.values())), dict) else {"": result}
        for part, ratios in nested.items():
            columns = "".join(f"{ratios[key]:>{width}.2f}" for key, width in zip(KEYS, (9, 8, 8, 8, 8), strict=True))
            peak = f"  peak of memory {ratios['peak']:.2f}" if "peak" in ratios else ""
            print(f"{' '.join([name, part]).strip():<46}{columns}{peak}", flush=True)
        found[name] = result
    out = PROJECT / "bench/out/methods.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"commit": commit(), "over": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
