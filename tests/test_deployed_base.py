"""A pretrained network on two real nodes over TLS, each with the base of its own folder."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from federations import deployed, ended, pairs, so_far, wait_for
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
    "num-rounds": 4,
    "robust": "on",
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_node_has_the_base_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted and resumed the run is the local engine's bit for bit; a node with another base is out by name."""
    for package in ("peft", "transformers", "tokenizers"):
        pytest.importorskip(package)
    for folder, seed in (("server", 0), ("own", 0), ("other", 1)):
        base(tmp_path / folder, seed)
    monkeypatch.setenv("FEDSUB_DATA", str(tmp_path / "server"))
    local = fedsub(tmp_path, "run", *pairs(KEYS | {"run-dir": tmp_path / "local"}))
    assert local.code == 0, local.err
    with deployed(tmp_path, "--nodes", "1", "--partitions", "2") as here:
        keys = here.folder / "keys"
        make_keys(keys, nodes=2)
        assert here.flwr("supernode", "register", str(keys / "node-1.pub"), here.now.name)["success"]
        command = ["federation", "node", "--superlink", f"127.0.0.1:{here.now.port}", "--key", keys / "node-1"]
        command += ["--ca", keys / "ca.crt", "--partition", "1", "--partitions", "2", "--port", str(free_port())]
        node = here.begin(*command, "--data", tmp_path / "own", "--state", tmp_path / "state")
        try:
            folder = tmp_path / "run"
            run = here.run(*pairs(KEYS | {"run-dir": folder}))
            wait_for(lambda: len(so_far(folder)) >= 1, 300)
            run.send_signal(signal.SIGINT)
            assert ended(run).returncode == 130
            assert len(rounds(folder)) < len(rounds(tmp_path / "local"))
            done = ended(here.run("--resume", folder), 600)
            assert done.returncode == 0, done.stdout + done.stderr + here.logs()
            same(folder, tmp_path / "local")

            shutil.rmtree(tmp_path / "own")
            shutil.move(tmp_path / "other", tmp_path / "own")
            refused = ended(here.run(*pairs(KEYS | {"run-dir": tmp_path / "refused", "node-timeout": 20})), 600)
            assert refused.returncode != 0
            reason = "stays out: model = 'transformers:bert': the frozen base has SHA-256 "
            assert reason in refused.stdout + refused.stderr + here.logs(20_000)
        finally:
            os.kill(node.pid, signal.SIGTERM)
            node.communicate(timeout=60)
