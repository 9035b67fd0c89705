"""Costs of secure aggregation over the plain run: ``python -m bench.secure lenet5:10 resnet18-gn:10:heterofl``.

A row of the table for each ``model:clients:method``, fedavg if no method is named; ``values:clients:computed`` computes
the seconds that a round costs more, with a network of so many values, from those of one client. One process, one round;
each client makes 10 steps of 10 samples of MNIST with LeNet-5, 2 steps with other networks. The processor's seconds are
those from the choice of the clients to the merged model.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares

from fedsub_app.secure.secagg import KEY, Member, degree_and_threshold, pair_mask, stream

COMMAND = """
import resource, sys, time
from fedsub_app.cli.main import main
from strategies.base import SubnetStrategy
asked, merged, times = SubnetStrategy.configure_train, SubnetStrategy.aggregate_train, []
def ask(*arguments):
    times.append(time.process_time())
    return asked(*arguments)
def merge(*arguments):
    outcome = merged(*arguments)
    times.append(time.process_time())
    return outcome
SubnetStrategy.configure_train, SubnetStrategy.aggregate_train = ask, merge
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, times[1] - times[0])
raise SystemExit(code)
"""


def measured(model: str, clients: int, method: str, secure: bool, folder: Path) -> dict[str, Any]:
    """Return the line of the round with the run's peak of memory in MB and the round's processor seconds."""
    keys = {
        "run-dir": folder, "dataset": "mnist", "model": model, "method": method,
        "weighting": "uniform", "num-clients": clients, "train-per-class": min(10 * clients, 5000),
        "test-per-class": 20, "partition": "iid", "local-steps": 10 if model == "lenet5" else 2, "batch-size": 10,
        "num-rounds": 1, "secure-aggregation": secure, "lr": 0.01,
    }  # fmt: skip
    keys |= {} if method == "fedavg" else {"min-contributors": 2}
    pairs = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    settings = [word for pair in pairs for word in ("-s", pair)]
    command = [sys.executable, "-c", COMMAND, "run", "--workers", "1", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    memory, seconds = map(float, done.stdout.split()[-2:])
    line: dict[str, Any] = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    return line | {"MB": memory, "seconds": seconds}


def computed(values: int, clients: int, dropouts: float = 0.3, corrupted: float = 0.1) -> str:
    """Return the row of a round whose costs are ``clients`` times those of one, its own and the server's for it."""
    degree, least = degree_and_threshold(clients, dropouts, corrupted)
    one, few = Member(0), [Member(other) for other in range(1, 11)]
    keys = {other: few[other % 10].public for other in range(1, degree + 1)}
    shares = create_shares(one.own, least, degree)

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    masks = seconds(lambda: [pair_mask(0, other, one.pair, keys[other][KEY:], values) for other in range(1, 11)])
    own = seconds(lambda: stream(one.own, b"own", values))
    sharing = seconds(lambda: one.share(keys, least)) + seconds(lambda: combine_shares(shares[:least]))
    total = clients * (sharing + masks / len(few) * degree + 2 * own)
    more = 4 * values + degree * 136 + 64, degree * 164  # vector, shares, revealed ones, keys; keys, shares
    up, down = (f"{math.ceil(size / 1e3):,}" for size in more)
    return f"| {values:,} values, {clients}, computed | + {total:.0f} | | {up} | + {down} | |"


def main(rows: list[str]) -> None:
    """Print the table."""
    print("| network, clients, method | processor seconds of a round | ratio | kB up a client | kB down | peak MB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        model, clients, method = (*row.split(":"), "fedavg")[:3]
        if method == "computed":
            print(computed(int(model), int(clients)))
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            plain, secure = (measured(model, int(clients), method, on, Path(folder) / str(on)) for on in (False, True))
        spent = [line["seconds"] for line in (plain, secure)]
        up, down = (
            " → ".join(f"{line[key] / int(clients) / 1e3:,.0f}" for line in (plain, secure))
            for key in ("bytes-up", "bytes-down")
        )
        cost = f"{spent[0]:.2f} → {spent[1]:.2f} | {spent[1] / spent[0]:.1f}"
        print(f"| {model}, {clients}, {method} | {cost} | {up} | {down} | {plain['MB']:.0f} → {secure['MB']:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["lenet5:10", "lenet5:100"])
