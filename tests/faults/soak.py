"""Many rounds on real processes while a node is killed and started again over and over.

    python tests/faults/soak.py --rounds 200 --every 10 --out DIR

prints a line a kill and writes DIR/soak.json: rounds lost, seconds to recover, memory of each process after each
recovery, and the accuracy beside that of the same run on the local engine.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from federations import Deployed, deployed, ended, pairs, so_far, wait_for, why
from helpers import fedsub

from fedsub_app.common.files import write_json
from fedsub_app.deployment.processes import running

KEYS: dict[str, object] = {
    "num-clients": 10,
    "robust": "on",
    "round-timeout": 300,
    "evaluate": "global",
    "fedpews.warmup-rounds": 20,
}
NODE = ("node-1", "node-1-superexec")


def memory(here: Deployed) -> dict[str, int]:
    """Resident MiB of each of the federation's own processes, without the app's, which live for one message."""
    alive = running(here.now.processes)
    return {name: alive[name][process.pid] // 1024 for name, process in here.now.processes.items() if name in alive}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="rounds from one kill to the next")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out = options.out.resolve()
    folder, keys = out / "run", KEYS | {"num-rounds": options.rounds}
    kills = []
    start = time.monotonic()
    with deployed(out, "--nodes", "2") as here:
        process = here.run("fedpews/digits", *pairs(keys | {"run-dir": folder}))
        for number in range(options.every, options.rounds - options.every // 2, options.every):
            wait_for(lambda number=number: process.poll() is not None or len(so_far(folder)) >= number, 3600)
            if process.poll() is not None:
                break
            killed = time.monotonic()
            for name in NODE:
                os.killpg(here.pid(name), signal.SIGKILL)
            here.up()
            done_by = len(so_far(folder)) + 2  # the round at work may wait for the node, which loses none then
            wait_for(lambda by=done_by: len(so_far(folder)) >= by and not why(so_far(folder)[-1], 1), 600)
            seconds = time.monotonic() - killed
            lost = sum(bool(why(line, 1)) for line in so_far(folder)[number:])
            kills.append({"round": number, "rounds": lost, "seconds": seconds, "memory": memory(here)})
            print(json.dumps(kills[-1]), flush=True)
        done = ended(process, 3600)
        print(done.stdout[-500:], done.stderr[-500:], f"exit code {done.returncode}")
    local = fedsub(out, "run", "fedpews/digits", *pairs(keys | {"run-dir": out / "local"}))
    lines = so_far(folder)
    summary = {
        "exit-code": done.returncode,
        "local-exit-code": local.code,
        "seconds": time.monotonic() - start,
        "rounds": len(lines),
        "rounds-without-node-1": sum(bool(why(line, 1)) for line in lines),
        "statuses": sorted({line["status"] for line in lines}),
        "lost-state": sum("lost-state" in line for line in lines),
        "median-seconds-to-recover": statistics.median(kill["seconds"] for kill in kills),
        "accuracy": [so_far(path)[-1]["global-accuracy"] for path in (folder, out / "local")],
        "kills": kills,
    }
    write_json(out / "soak.json", summary)
    print({key: value for key, value in summary.items() if key != "kills"})


if __name__ == "__main__":
    main()
