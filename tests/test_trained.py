"""`fedsub export RUN --adapter` and `--merged`: what was trained is what the packages load."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ends_as_if_never_stopped, problem_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedsub_app.analysis.prediction import model_of, write_adapter, write_onnx
from fedsub_app.cli.main import main
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Inputs, form_of
from fedsub_app.common.tasks import Classification
from fedsub_app.common.tensors import Json
from fedsub_app.data import Samples
from fedsub_app.data.text import tokenizer_of
from fedsub_app.models import build_model
from fedsub_app.runs.evaluation import GlobalTest
from fedsub_app.training.problem import Problem, _named

Run = Callable[..., tuple[Json, Path]]
WORDS = ["good", "bad", "fine", "poor", "nice", "ugly", "great", "awful"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small BERT with weights, without a head for this task."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    how = {"tokenizer_object": tokenizer, "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(**how).save_pretrained(folder)
    return folder


@pytest.fixture
def keys(bert: Path, tmp_path: Path) -> dict[str, Any]:
    lines = [f"{('no', 'yes')[k % 2]}\t{WORDS[k % 8]} {WORDS[(k // 8) % 8]}" for k in range(64)]
    (tmp_path / "texts.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    return {
        "dataset": "tsv:texts.tsv", "data_dir": str(tmp_path), "input": "text", "tokenizer": "words", "tokens": 4,
        "lora_rank": 2,
        "model": f"transformers:{bert}", "model_options": "pretrained=True", "trainable": "lora", "num_rounds": 2,
        "lora_targets": "query, value", "partition": "iid", "lr": 0.5, "batch_size": 8,
    }  # fmt: skip


def classifier(folder: Path, **how: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, **how)


def plain(bert: Path) -> Any:
    torch.manual_seed(9)  # another head than the run's
    return classifier(bert, num_labels=2)


def adapted(bert: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(plain(bert), adapter)


X = Inputs((torch.tensor([[3, 4, 0, 0], [5, 2, 7, 1]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])))
X = Inputs(X.tensors, ("input_ids", "attention_mask"))


def logits(network: Any) -> Tensor:
    with torch.no_grad():
        return network.eval()(**dict(zip(X.names, X.tensors, strict=True))).logits


def ours(folder: Path, client: int | None = None) -> Tensor:
    with torch.no_grad():
        return model_of(folder, client)[0](X)


def test_what_peft_and_transformers_load_computes_the_same(
    keys: dict[str, Any], bert: Path, run_local: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    summary, run = run_local(**keys | {"tokenizer": f"transformers:{bert}"}, method="fedit", num_clients=2)
    assert "merge-error" in json.loads((run / "rounds.jsonl").read_text().splitlines()[1])
    sent = 4 * (4 * 2 * 2 * 8 + 8 * 2 + 2)  # float32: A and B of query and value of two layers, the head
    assert summary["total-formula-bytes-up"] == 2 * 2 * sent
    assert (run / "model.safetensors").stat().st_size < 3 * sent + 4000  # no base in it
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(run), "--adapter", str(adapter), "--merged", str(merged)]) == 0
    assert capsys.readouterr().out.split() == [str(adapter), str(merged)]
    expected = ours(run)
    torch.testing.assert_close(logits(adapted(bert, adapter)), expected)
    whole = classifier(merged)
    torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-5)
    assert whole.config.id2label == {0: "no", 1: "yes"}
    assert transformers.AutoTokenizer.from_pretrained(merged)("bad good")["input_ids"] == [3, 2]
    assert (logits(plain(bert)) - expected).abs().max() > 0.01


def test_adapters_of_gpt2_are_what_peft_and_transformers_load(
    keys: dict[str, Any], run_local: Run, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The weights of its layers are [in, out]; those of attention's output are square."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "pad_token_id": 0}
    tokens = {"bos_token_id": 1, "eos_token_id": 1}
    transformers.GPT2Model(transformers.GPT2Config(**sizes, **tokens)).save_pretrained(gpt2 := tmp_path / "gpt2")
    own = keys | {"model": f"transformers:{gpt2}", "lora_targets": "c_attn, c_proj", "num_clients": 2}
    for method in ("fedit", "flora"):
        _, run = run_local(method, **own, method=method)
        assert main(["export", str(run), "--merged", str(tmp_path / f"merged-{method}")]) == 0
        torch.testing.assert_close(logits(classifier(tmp_path / f"merged-{method}")), ours(run), rtol=1e-4, atol=1e-5)
    write_adapter(tmp_path / "fedit", tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted(gpt2, tmp_path / "adapter")), ours(tmp_path / "fedit"))
    assert not [warning for warning in recwarn if "fan_in_fan_out" in str(warning.message)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_tuned_for_the_next_token(
    tied: bool, keys: dict[str, Any], run_local: Run, tmp_path: Path
) -> None:
    """It keeps the tokens of the tokenizer; its head has no adapter, and belongs to the base as the rest does.

    As ONNX it takes the tokens alone, and answers for each of them; its heads share keys.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=8, tie_word_embeddings=tied)
    before = transformers.LlamaForCausalLM(config)
    before.save_pretrained(tmp_path / "llama")
    own = keys | {"model": f"transformers:{tmp_path}/llama", "lora_targets": "", "task": "next-token", "num_clients": 2}
    _, run = run_local(**own, method="fedex-lora")
    layers = {name.split(".")[-4] for name in load_file(run / "model.safetensors") if "lora_A" in name}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert main(["export", str(run), "--merged", str(tmp_path / "merged")]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(whole.lm_head.weight, before.lm_head.weight[:10])  # eight words, [PAD] and [UNK]
    x = torch.tensor([[3, 4, 5, 2]])
    with torch.no_grad():
        torch.testing.assert_close(whole.eval()(x).logits, model_of(run)[0](x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(whole(x).logits, before.eval()(x).logits[..., :10])
        onnx = str(tmp_path / "whole.onnx")
        assert write_onnx(run, Path(onnx)) == "input: [4] each, tokens as in the run"
        (outputs,) = runtime.InferenceSession(onnx, providers=["CPUExecutionProvider"]).run(None, {"input": x.numpy()})
        torch.testing.assert_close(torch.tensor(outputs), whole(x).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        UserError, match=r"^model = 'transformers:.*': its weights have 12 tokens; the tokenizer's \d+ are"
    ):
        run_local("other", **own | {"tokenizer": "characters"})


def test_a_network_that_reads_the_next_token_is_refused(keys: dict[str, Any], run_local: Run) -> None:
    """transformers makes a language model of BERT that attends to all tokens. Tokens with classes are another task."""
    with pytest.raises(
        UserError, match=r"^model = .*: reads the tokens that it predicts; must be a causal language mod"
    ):
        run_local(**keys, method="fedavg", task="next-token")
    of_tokens = form_of(torch.randint(20, (9, 4)))
    assert type(build_model(keys["model"], of_tokens, 2, 0)).__name__ == "BertForSequenceClassification"


TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "vocab_size": 20,
}
NEXT: dict[str, Any] = {"task": "next-token", "lora_targets": ""}


@pytest.mark.parametrize(
    ("kind", "options", "own", "said"),
    [
        ("Bart", {}, {}, "model = .*: is an encoder with a decoder; allowed for these texts is one of them alone"),
        (
            "Bert",
            {"max_position_embeddings": 3},
            {},
            "model = .*: takes 3 tokens, the samples have 4; must be as many or f",
        ),
        (
            "GPT2",
            {},
            NEXT | {"trainable": "head"},
            "trainable = 'head': model = .*: 0 of 16 tensors; allowed is a part of th",
        ),
        (
            "Mamba",
            {},
            NEXT,
            "lora-targets = '': model = .*: ValueError: .*Module 'out_proj' is incompatible with Mamba-based",
        ),
        (
            "GPT2",
            {},
            NEXT | {"trainable": "", "method": "ist"},
            "model = .*: not with method = 'ist': no units.*: its layers are",
        ),
    ],
)
def test_networks_of_transformers_that_cannot_be_trained(
    kind: str,
    options: dict[str, Any],
    own: dict[str, Any],
    said: str,
    keys: dict[str, Any],
    run_local: Run,
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, f"{kind}Config")(**TINY | options).save_pretrained(tmp_path / "net")
    with pytest.raises(UserError, match=f"^{said}"):
        run_local(**keys | {"model": f"transformers:{tmp_path}/net", "model_options": "", "method": "fedavg"} | own)


READER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_tokens, num_classes, both):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 4)
        self.read = nn.GRU(4, 4, batch_first=True, bidirectional=both)
        self.classes = nn.Linear(4 + 4 * both, num_classes)

    def forward(self, x):
        return self.classes(self.read(self.embed(x))[0])

def tags(seed):
    x = torch.randint(9, (40, 6))
    return (x[:30], x[:30] % 3), (x[30:], x[30:] % 3)
"""


def test_a_network_of_ones_own_that_reads_the_next_token_is_refused(
    keys: dict[str, Any], run_local: Run, tmp_path: Path
) -> None:
    """It may read all tokens where it predicts other labels of them."""
    (tmp_path / "net.py").write_text(READER)
    own = keys | {"model": f"{tmp_path}/net.py:Net", "trainable": "", "task": "next-token", "num_clients": 2}
    both = own | {"model_options": "both=True", "method": "fedavg"}
    with pytest.raises(
        UserError, match=r"^model = '.*net.py:Net': reads the tokens that it predicts; must be a causal"
    ):
        run_local(**both)
    run_local("one way", **both | {"model_options": "both=False"})
    run_local("tags", **both | {"dataset": f"{tmp_path}/net.py:tags", "input": ""})


def test_tensors_that_the_weights_lack_are_named(
    keys: dict[str, Any], bert: Path, run_local: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run that begins with another one's model they come from there. Weights of another network are refused."""
    caplog.set_level("INFO", "fedsub")
    _, first = run_local("first", **keys | {"num_rounds": 1}, method="fedit", num_clients=2)
    noted = f"note: model = 'transformers:{bert}': its weights lack classifier.bias, classifier.weight, which start"
    assert [line[: len(noted)] for line in caplog.messages if line.startswith("note: model")] == [noted]
    caplog.clear()
    run_local("second", **keys | {"num_rounds": 1}, method="fedit", num_clients=2, start_from=str(first))
    assert not [line for line in caplog.messages if line.startswith("note: model")]
    with pytest.raises(UserError, match="ValueError: weights: 39 of 41 tensors are lacking or of another shape, as 'b"):
        run_local("third", **keys | {"model_options": "pretrained=True, hidden_size=16"})


@pytest.mark.parametrize("own", [False, True])
def test_tokens_that_the_weights_were_not_trained_with_are_noted(
    own: bool, keys: dict[str, Any], bert: Path, run_local: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedsub")
    keys |= {"tokenizer": f"transformers:{bert}"} if own else {}
    run_local(**keys | {"num_rounds": 1}, method="fedit", num_clients=2)
    said = f"note: tokenizer = 'words': model = 'transformers:{bert}' was trained with other tokens"
    assert [line for line in caplog.messages if line.startswith("note: tok")] == [said] * (not own)


def test_a_folder_that_is_not_there_is_named() -> None:
    pytest.importorskip("transformers")
    said = r" = 'transformers:./bert': OSError: no folder ./bert here or in the data folder; from the hub: Repo id must"
    with pytest.raises(UserError, match=f"^model{said}"):
        build_model("transformers:./bert", (3, 8, 8), 10, 0)
    with pytest.raises(UserError, match=f"^tokenizer{said}"):
        tokenizer_of("transformers:./bert", (), 10)


def test_a_clients_own_model_and_what_has_no_adapter(
    keys: dict[str, Any], bert: Path, run_local: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = run_local(**keys, method="fedsa-lora", num_clients=2)
    said = "note: method = 'fedsa-lora': B = 0 in the global model's adapters, each client has its own: "
    for client in ([], ["--client", "1"]):
        capsys.readouterr()
        assert main(["export", str(run), "--adapter", str(tmp_path / "any"), *client]) == 0
        assert capsys.readouterr().err.startswith(said) != bool(client)
    own = [ours(run, client) for client in (0, 1)]
    assert not torch.allclose(*own)
    write_adapter(run, tmp_path / "adapter", 1)
    torch.testing.assert_close(logits(adapted(bert, tmp_path / "adapter")), own[1])
    assert main(["export", str(run), "--adapter", "x", "--client", "2"]) == 2


NET = """
from torch import nn


def Net(in_shape, num_classes):
    grouped = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(nn.Conv2d(in_shape[0], 2, 3), grouped, nn.Linear(8, num_classes))
"""


def test_peft_adapts_the_runs_layers_alone(run_local: Run, tmp_path: Path) -> None:
    """Of a list it would adapt all layers whose names end so: "0" is not "1.0"."""
    peft = pytest.importorskip("peft")
    (tmp_path / "net.py").write_text(NET)
    keys = {"model": f"{tmp_path}/net.py:Net", "trainable": "lora", "lora_rank": 2, "train_per_class": 4}
    _, run = run_local(**keys, method="fedit", num_rounds=1, lr=0.5)
    write_adapter(run, tmp_path / "adapter")
    network, x, problem, _ = model_of(run)
    adapted = peft.PeftModel.from_pretrained(problem.unfrozen(), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(adapted(x[:4]), network(x[:4]))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 1


HEADS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, head):
        super().__init__()
        self.block = nn.ModuleDict({"fc": nn.Linear(64, 6)})
        self.name = head
        setattr(self, head, nn.Linear(6, num_classes))

    def forward(self, x):
        return getattr(self, self.name)(self.block["fc"](x.flatten(1)))
"""


@pytest.mark.parametrize("head", ["classes", "out", "fc"])
def test_peft_loads_a_head_of_any_name(head: str, run_local: Run, tmp_path: Path) -> None:
    """peft takes its name as the end of names: "out" of ``block.fc.lora_dropout`` and "fc" of ``block.fc``."""
    peft = pytest.importorskip("peft")
    (tmp_path / "net.py").write_text(HEADS)
    keys = {"model": f"{tmp_path}/net.py:Net", "model_options": f"head='{head}'", "trainable": "lora", "lora_rank": 2}
    _, run = run_local(**keys, method="fedit", num_rounds=1, lr=0.5, train_per_class=4)
    write_adapter(run, tmp_path / "adapter")
    network, x, problem, _ = model_of(run)
    adapted = peft.PeftModel.from_pretrained(problem.unfrozen(), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(adapted(x[:4]), network(x[:4]))


def test_a_narrow_clients_adapter_has_its_rank(
    keys: dict[str, Any], bert: Path, run_local: Run, tmp_path: Path
) -> None:
    _, run = run_local(**keys | {"num_rounds": 1}, method="flexlora", flexlora__widths="1, 0.5", num_clients=2)
    write_adapter(run, tmp_path / "adapter", 1)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (1, 8.0)  # alpha / r is 16 / 2
    loaded = logits(adapted(bert, tmp_path / "adapter"))
    torch.testing.assert_close(loaded, ours(run, 1))


TIED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.one, self.two, self.classes = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, num_classes)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.classes(self.two(self.one(x.flatten(1))))
"""


def test_adapters_of_tied_weights_are_not_merged(
    run_local: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(TIED)
    keys: dict[str, Any] = {"model": f"{tmp_path}/net.py:Net", "trainable": "lora", "num_rounds": 1}
    _, run = run_local(**keys, method="fedit", num_clients=2, train_per_class=8)
    assert main(["export", str(run), "--merged", str(tmp_path / "merged")]) == 2
    said = "--merged: 'two.base_layer.weight' is tied, other layers would have its adapter too; use --adapter"
    assert said in capfd.readouterr().err


ADAPTED = """
import peft
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.one, self.classes = nn.Linear(64, 6), nn.Linear(6, num_classes)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["one"], r=2), self)

    def forward(self, x):
        return self.classes(self.one(x.flatten(1)))
"""


def test_a_network_that_brings_its_adapters_is_written_with_them(
    run_local: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(ADAPTED)
    keys: dict[str, Any] = {"model": f"{tmp_path}/net.py:Net", "num_rounds": 1, "num_clients": 2}
    _, run = run_local(**keys, method="fedit", train_per_class=8)
    assert main(["export", str(run), "--merged", str(tmp_path / "merged")]) == 0
    written, trained = load_file(tmp_path / "merged/model.safetensors"), load_file(run / "model.safetensors")
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
    assert main(["export", str(run), "--adapter", str(tmp_path / "a")]) == 2
    assert "--adapter: trainable = '', so there is no adapter alone; --merged" in capfd.readouterr().err


def test_weights_that_the_method_has_changed_are_merged(
    keys: dict[str, Any], run_local: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, run = run_local(**keys, method="flora", num_clients=2)
    assert main(["export", str(run), "--adapter", str(tmp_path / "a")]) == 2
    assert "--adapter: flora changes other weights, so there is no adapter alone; --merged" in capfd.readouterr().err
    assert main(["export", str(run), "--merged", str(tmp_path / "merged")]) == 0
    whole = classifier(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), ours(run), rtol=1e-4, atol=1e-5)


OFFLINE = """
import sys, torch
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Inputs, form_of
from fedsub_app.models.sources import from_source

x = torch.zeros(1, 4, dtype=torch.long)
form = form_of(Inputs((x, x + 1), ("input_ids", "attention_mask")), tokens=20)
net = from_source("transformers:me/bert", form, 2, {"pretrained": True})
print(repr(float(net.state_dict()["bert.embeddings.word_embeddings.weight"].double().sum())))
try:
    from_source("transformers:me/other", form, 2, {"pretrained": True})
except UserError as error:
    print(error)
"""


def test_offline_the_hubs_cache_is_read_and_nothing_else(bert: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--me--bert"
    shutil.copytree(bert, cache / "snapshots/0")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0")
    variables = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=variables, capture_output=True, text=True, check=True)
    found, refused = done.stdout.splitlines()
    weights = load_file(bert / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert float(found) == float(weights.double().sum())
    assert refused.startswith("model = 'transformers:me/other': ")


def test_another_base_is_not_resumed(keys: dict[str, Any], bert: Path, run_local: Run, tmp_path: Path) -> None:
    run_local(**keys | {"num_rounds": 1}, method="fedit", num_clients=2)
    file = bert / "model.safetensors"
    kept = file.read_bytes()
    state = load_file(file)
    try:
        save_file(state | {"pooler.dense.bias": state["pooler.dense.bias"] + 1}, file, {"format": "pt"})
        _named.cache_clear()
        with pytest.raises(UserError, match=r"the frozen base has SHA-256 .* here, .* is the run's"):
            run_local(**keys | {"num_rounds": 2}, method="fedit", num_clients=2, resume=True)
    finally:
        file.write_bytes(kept)
        _named.cache_clear()


def test_a_run_over_adapters_ends_as_if_never_stopped(keys: dict[str, Any], run_local: Run, tmp_path: Path) -> None:
    """HetLoRA's ranks are the server's state, the base comes from its folder, dropout draws by round and client."""
    more = {"method": "hetlora", "hetlora__gamma": 0.5, "num_clients": 2, "num_rounds": 4, "keep_checkpoints": 0}
    ends_as_if_never_stopped(run_local, tmp_path, keys | more)


def test_stacked_clients_share_the_base(run_local: Run) -> None:
    more = {"model": "fedpews-cnn", "trainable": "head", "train_per_class": 8, "num_rounds": 1}
    alone, together = (run_local(name, **more, stack_clients=name == "together")[1] for name in ("alone", "together"))
    for name, tensor in load_file(alone / "model.safetensors").items():
        torch.testing.assert_close(load_file(together / "model.safetensors")[name], tensor)


def test_the_servers_quick_loss_is_the_same_each_time() -> None:
    """The loss of a network with dropout in training mode repeats; the global generator stays as it is."""
    data = problem_of((4,)).data
    x, y = Samples(torch.randn(8, 4)), torch.arange(8) % 2
    data = replace(data, train_x=x, train_y=y, test_x=x, test_y=y)
    network = nn.Sequential(nn.Linear(4, 40), nn.Dropout(0.5), nn.Linear(40, 2))
    test = GlobalTest(Problem(data, lambda _: network, Classification()), torch.device("cpu"))
    tensors, before = {n: t.detach().clone() for n, t in network.state_dict().items()}, torch.get_rng_state()
    assert test.quick_loss(tensors) == test.quick_loss(tensors)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 8, 63, 95, 1000])
def test_the_quick_loss_is_of_samples_from_end_to_end(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = problem_of((1,)).data
    x, y = Samples(torch.arange(count).float()[:, None]), torch.zeros(count, dtype=torch.int64)
    data = replace(data, train_x=x, train_y=y, test_x=x, test_y=y)
    seen: list[Tensor] = []
    network = nn.Linear(1, 2)
    network.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].flatten()))
    GlobalTest(Problem(data, lambda _: network, Classification()), torch.device("cpu")).quick_loss(
        {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    )
    (places,) = seen
    assert len(places) == min(count, 32)
    assert (places[0], places[-1]) == (0, count - 1)
    assert len(places) < 2 or places.diff().max() - places.diff().min() <= 1
