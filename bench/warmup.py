"""``python -m bench.warmup``: what a warm-up round of FedPeWS costs over a plain one (the paper's omega, Appendix A).

Seconds of training, FLOPs and bytes, learned and fixed masks, computing with zeros and with smaller weights ("narrow").
Both kinds of rounds are of one run on the local engine; medians. Writes ``bench/out/warmup.json``.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.flower_box import PROJECT
from bench.measures import DATASET, apart, commit, run_local, write_images
from client_apps import fedpews
from fedsub_app.protocol import Json
from fedsub_app.settings import Value

ROUNDS = 6  # of each kind
NETWORKS: dict[str, dict[str, Value]] = {
    "fedpews-mlp, batch 32": {"dataset": "synthetic-3k", "partition": "lists", "class-lists": "0 2 | 1 3"},
    "fedpews-cnn, batch 64": {"dataset": DATASET, "model": "fedpews-cnn", "batch-size": 64, "partition": "iid"},
}
KEYS = ("compute-seconds", "flops", "subnet-flops", "formula-bytes-down", "formula-bytes-up")


def measure(network: str, masks: str, narrow: bool) -> Json:
    """Return warm-up over plain, per key, and the mean density of the uploaded masks."""
    fedpews.NARROW_FLOPS = 0 if narrow else math.inf
    settings: dict[str, Value] = {
        "method": "fedpews",
        "model": "fedpews-mlp",
        "num-clients": 2,
        "num-rounds": 2 * ROUNDS + 1,
        "eval-every": 1000,
        "fedpews.warmup-rounds": ROUNDS + 1,
        "fedpews.masks": masks,
        **NETWORKS[network],
    }
    with TemporaryDirectory(prefix="fedsub-bench-") as folder:
        write_images(Path(folder), 1280)
        lines, _ = run_local(settings | {"data-dir": folder})
    warm = [line for line in lines if 1 < line["round"] <= ROUNDS + 1]  # round 1 counts FLOPs and imports
    plain = [line for line in lines if line["round"] > ROUNDS + 1]
    median = {key: [statistics.median(line[key] for line in part) for part in (warm, plain)] for key in KEYS}
    density = statistics.mean(line["mask-density"] for line in warm)
    return {key: upper / lower for key, (upper, lower) in median.items()} | {"mask-density": density}


def main() -> int:
    """Measure all variants in turn and print a table."""
    found = {}
    print(f"{'network':<24}{'masks':<9}{'computing':<12}{'seconds':>8}{'FLOPs':>7}{'subnet':>8}{'down':>7}{'up':>7}")
    for network in NETWORKS:
        for masks in ("learned", "fixed"):
            for narrow in (False, True):
                result = apart(measure, network, masks, narrow)
                how = "narrow" if narrow else "zeros"
                found[f"{network}, {masks}, {how}"] = result
                ratios = "".join(f"{result[key]:>{width}.2f}" for key, width in zip(KEYS, (8, 7, 8, 7, 7), strict=True))
                print(f"{network:<24}{masks:<9}{how:<12}{ratios}", flush=True)
    out = PROJECT / "bench/out/warmup.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"commit": commit(), "warm-up over plain": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
