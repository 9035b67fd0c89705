"""``python docs/results/figure2.py FOLDER`` runs IST's Figure 2 on Fashion-MNIST's pixels into FOLDER and ``data/``.

It trains each network centrally, then compares the direction of some federated rounds from every second epoch with the
direction of central training on the same mini-batches (``fedsub analyse --approximation``). A second call goes on.
"""

import csv
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from fedsub_app import run  # noqa: E402
from fedsub_app.analysis.approximation import approximation  # noqa: E402
from fedsub_app.common.files import read_json  # noqa: E402
from fedsub_app.common.section import Value  # noqa: E402
from fedsub_app.common.tensors import Json  # noqa: E402
from fedsub_app.studies.evidence import run_entry, write_evidence  # noqa: E402

FIRST = 20  # epochs of the table's mean, as in the paper's text
EPOCHS: dict[str, Value] = {
    "experiment": "ist/central",
    "num-rounds": 50,
    "lr-decay-at": "26, 38",
    "checkpoint-every": 2,
    "eval-every": 2,
}
NETWORKS: dict[str, dict[str, Value]] = {"fedavg": {}, "ist": {"method": "ist", "ist.width": 3000}}
METHODS = {"FedAvg": "fedavg", "IST": "ist"}
SETTINGS = {
    "at random, 1 round": ("ist/iid-fashion-mnist", 1),
    "skewed, 1 round": ("ist/skewed-fashion-mnist", 1),
    "skewed, 20 rounds": ("ist/skewed-fashion-mnist", 20),
}
ABOUT: Json = {
    "table": "ist-figure2",
    "title": "IST, Figure 2: cosine of the federated and the central direction in %, mean over the first 20 epochs",
    "command": "python docs/results/figure2.py runs/figure2",
    "reference": "FedAvg",
    "axes": ["epoch of central training", "cosine (%)"],
}
SOURCE = (
    "central training on all of Fashion-MNIST for 50 epochs, a comparison from every second one. All clients take one"
    " step, with which FedProx is FedAvg and ISTProx is IST."
)


def finished(folder: Path, keys: Mapping[str, Value]) -> Path:
    """Return the folder of a run with these keys, which is made unless it is there."""
    if not (folder / "summary.json").exists():
        run({**keys, "run-dir": str(folder), "resume": folder.exists()})
    return folder


def entry_of(folder: Path, rounds: int, central: Path) -> Json:
    """Return the data file's entry of a run: its cosines in percent by epoch, and their mean over the first epochs."""
    seconds, before = folder / "approximation-seconds", time.monotonic()
    if not seconds.exists():
        approximation(folder, rounds, central)
        seconds.write_text(f"{time.monotonic() - before:.1f}")
    with (folder / "approximation.csv").open() as file:
        cosines = {int(line["checkpoint"]): 100 * float(line["similarity"]) for line in csv.DictReader(file)}
    entry = run_entry(folder, "global-accuracy")
    entry |= {"final": statistics.fmean(cosine for epoch, cosine in cosines.items() if epoch <= FIRST)}
    entry |= {"totals": {"seconds": float(seconds.read_text())}}
    return entry | {"rounds": rounds, "curve": {"round": list(cosines), "similarity": list(cosines.values())}}


def main(folder: Path) -> None:
    rows: dict[tuple[str, str], list[Json]] = {(setting, label): [] for setting in SETTINGS for label in METHODS}
    hours = 0.0
    for seed in range(3):
        base: dict[str, Value] = {"seed": seed, "dataset": "fashion-mnist"}
        starts = {
            method: finished(folder / f"central/{method}-seed{seed}", EPOCHS | base | keys)
            for method, keys in NETWORKS.items()
        }
        hours += sum(read_json(start / "summary.json")["total-seconds"] for start in starts.values()) / 3600
        for (setting, label), entries in rows.items():
            (experiment, rounds), method = SETTINGS[setting], METHODS[label]
            own = base | {"experiment": experiment, "method": method, "num-rounds": 1}
            made = finished(folder / f"{experiment}-{method}-{rounds}-seed{seed}".replace("ist/", "", 1), own)
            entries.append(entry_of(made, rounds, starts[method]))
            print(setting, label, seed, f"{entries[-1]['final']:.2f}", flush=True)
        content = ABOUT | {"seeds": seed + 1, "source": f"{SOURCE} Central training took {hours:.1f} further hours"}
        content["rows"] = [
            {"setting": setting, "method": label, "metric": "similarity", "paper": {}, "runs": entries}
            for (setting, label), entries in rows.items()
        ]
        write_evidence(Path(__file__).parent / "data/ist-figure2.json", content)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
