"""A pretrained network on two real nodes over TLS, each with the base of its own folder."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from federations import Deployed, deployed, ended, pairs, so_far, wait_for
from helpers import fedsub, rounds
from test_deployment import same

from fedsub_app.deployment.keys import make_keys
from fedsub_app.deployment.processes import free_port

KEYS = {
    "method": "flexlora",
    "flexlora.widths": "1, 0.5",
    "dataset": "tsv:texts.tsv",
    "input": "text",
    "partition": "iid",
    "tokenizer": "words",
    "tokens": 8,
    "model": "transformers:bert",
    "model-options": "pretrained=True",
    "trainable": "lora",
    "lora-rank": 4,
    "lora-targets": "query, value",
    "num-clients": 2,
    "num-rounds": 3,
    "robust": "on",
    "node-timeout": 600,  # a busy machine
}


def base(folder: Path, seed: int) -> None:
    """Write texts and a small pretrained BERT."""
    import torch
    import transformers

    torch.manual_seed(seed)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=300, **size)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert")
    lines = [f"{k % 2}\tthis film is {'good' if k % 2 else 'bad'}, said reader {k}" for k in range(120)]
    (folder / "texts.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")


@contextmanager
def two_nodes(folder: Path) -> Iterator[Deployed]:
    """Two SuperNodes: one reads the server's data folder, the other ``folder / "own"``."""
    with deployed(folder, "--nodes", "1", "--partitions", "2") as here:
        keys = here.folder / "keys"
        make_keys(keys, nodes=2)
        assert here.flwr("supernode", "register", str(keys / "node-1.pub"), here.now.name)["success"]
        command = ["federation", "node", "--superlink", f"127.0.0.1:{here.now.port}", "--key", keys / "node-1"]
        command += ["--ca", keys / "ca.crt", "--partition", "1", "--partitions", "2", "--port", str(free_port())]
        node = here.begin(*command, "--data", folder / "own", "--state", folder / "state")
        try:
            yield here
        finally:
            os.kill(node.pid, signal.SIGTERM)
            node.communicate(timeout=60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the server's data folder, which is the one that processes read by default."""
    for package in ("peft", "transformers", "tokenizers"):
        pytest.importorskip(package)
    base(tmp_path / "server", 0)
    monkeypatch.setenv("FEDSUB_DATA", str(tmp_path / "server"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_with_another_base_is_out_by_name(folder: Path) -> None:
    base(folder / "own", 1)
    with two_nodes(folder) as here:
        refused = ended(here.run(*pairs(KEYS | {"run-dir": folder / "refused", "node-timeout": 150})), 600)
    assert refused.returncode != 0
    assert "model = 'transformers:bert': the frozen base has SHA-256 " in refused.stdout + refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_interrupted_and_resumed_it_is_the_local_engine(folder: Path) -> None:
    """Bit for bit, with the same base in two folders."""
    base(folder / "own", 0)
    local = fedsub(folder, "run", *pairs(KEYS | {"run-dir": folder / "local"}))
    assert local.code == 0, local.err
    with two_nodes(folder) as here:
        run = here.run(*pairs(KEYS | {"run-dir": folder / "run"}))
        wait_for(lambda: len(so_far(folder / "run")) >= 1, 300)
        run.send_signal(signal.SIGINT)
        assert ended(run).returncode == 130
        assert len(rounds(folder / "run")) < len(rounds(folder / "local"))
        done = ended(here.run("--resume", folder / "run"), 600)
        assert done.returncode == 0, done.stdout + done.stderr + here.logs()
    same(folder / "run", folder / "local")
