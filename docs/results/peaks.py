"""``python docs/results/peaks.py TABLE`` puts each row's peak memory of one client into the table's data file.

The peak is the growth in MB of a process above the loaded data and network, while client 0 trains one round.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from fedsub_app.common.section import Value  # noqa: E402
from fedsub_app.data import load_dataset  # noqa: E402
from fedsub_app.runs.config import resolve  # noqa: E402
from fedsub_app.runs.methods import METHODS  # noqa: E402
from fedsub_app.studies.evidence import read_evidence, row_of, write_evidence  # noqa: E402
from fedsub_app.studies.tables import read_table  # noqa: E402
from fedsub_app.training.workplace import workplace  # noqa: E402

PROCESS = Path("/proc/self")


def resident(what: str) -> float:
    """Return this process's VmRSS, or VmHWM, which is its peak, in MB."""
    found = re.search(rf"{what}:\s+(\d+) kB", (PROCESS / "status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e6


def peak(keys: dict[str, Value]) -> float:
    """Train one client in this process; return the peak growth of the process's memory in MB."""
    place = workplace(resolve(keys))
    method = METHODS[place.settings.method]
    task = method.strategy(place.settings, place.network.module).task(0)
    ctypes.CDLL(None).malloc_trim(0)  # so that freed memory, once taken again, counts as growth
    (PROCESS / "clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    method.client(place, 0, 1, {}).run_training(dict(task.tensors), task.config)
    return resident("VmHWM") - before


def main(name: str) -> None:
    file = Path(__file__).parent / f"data/{name}.json"
    content = read_evidence(file)
    for wanted in read_table(name).rows:
        row = row_of(content, wanted.setting, wanted.label)
        if row and "peak-MB" not in row:
            load_dataset(resolve(wanted.overrides).data)  # once for rows of the same data
            reads, writes = os.pipe()
            if not os.fork():  # memory starts anew for each row
                os.write(writes, str(peak(dict(wanted.overrides))).encode())
                os._exit(0)
            os.close(writes)
            row["peak-MB"] = grown = round(float(os.fdopen(reads).read()))
            os.wait()
            print(wanted.setting, wanted.label, grown, flush=True)
            write_evidence(file, content)


if __name__ == "__main__":
    main(sys.argv[1])
