"""Networks of a user's file, of a module and of packages: built, refused in one line, and their structure."""

import copy
import dataclasses
import json
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_small
from flwr.cli.build import build_fab_from_disk
from helpers import rounds
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import fedsub_app
from fedsub_app.common import own_code
from fedsub_app.common.errors import UserError
from fedsub_app.common.inputs import Form, Inputs, Part, Shape, blank, form_of
from fedsub_app.common.own_code import bundled
from fedsub_app.common.tasks import Classification, Reduction
from fedsub_app.data.samples import channels_last
from fedsub_app.deployment.flower import PROJECT, bundle
from fedsub_app.models import (
    Network,
    adopted,
    build_model,
    check_network,
    head_names,
    layer_groups,
    load_tensors,
    mlp,
    narrowed,
    part_names,
    tensors_of,
    unit_groups,
    widths_of,
    with_head,
)
from fedsub_app.models.groups import Place, kept_positions, split
from fedsub_app.runs import node
from fedsub_app.runs.config import resolve
from fedsub_app.runs.directory import open_run
from fedsub_app.runs.loop import prepare
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.node import settings_from
from fedsub_app.runs.plan import plan
from fedsub_app.server_app import refuse_own_code
from fedsub_app.subnets.gates import gated
from fedsub_app.subnets.masks import expand
from fedsub_app.subnets.slices import put, take
from fedsub_app.training.costs import forward_flops
from fedsub_app.training.problem import Problem
from fedsub_app.training.stacked import unstackable

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, in_shape, num_classes, width=4, norm="none"):
        super().__init__()
        self.norm = norm
        self.first = nn.Linear(in_shape[0] * in_shape[1] * in_shape[2], width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return {"logits": self.head(torch.relu(self.first(x.flatten(1))))}

def one_class_more(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + 1))

def half(num_classes):
    return nn.Linear(8, num_classes).half()

def no_network():
    return 3
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: small operations on several threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_net.py"
    path.write_text(NETWORK)
    return path


def test_a_files_class_is_given_what_it_names_and_the_options(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    made = [build_model(f"{file}:Net", (1, 8, 8), 10, seed, options="width=3, norm='group'") for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [made[0].get_submodule("first").out_features, made[0].norm] == [3, "group"]
    weights = [tensors_of(model)["first.weight"] for model in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert made[0](torch.zeros(2, 1, 8, 8)).shape == (2, 10)  # its {"logits": …} are a tensor
    monkeypatch.setenv("HOME", str(file.parent))
    assert build_model("~/my_net.py:Net", (1, 8, 8), 10, 0).norm == "none"


def test_a_module_on_the_path_and_a_changed_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    assert next(iter(tensors_of(build_model("my_net:Net", (1, 8, 8), 10, 0)))) == "first.weight"
    file.write_text(NETWORK.replace("first", "second"))
    assert next(iter(tensors_of(build_model(f"{file}:Net", (1, 8, 8), 10, 0)))) == "second.weight"
    sys.modules.pop("my_net")


def test_the_problem_of_a_users_network(file: Path) -> None:
    problem = Problem.of(resolve({"model": f"{file}:Net", "model-options": "width=5"}))
    assert tensors_of(problem.network())["head.weight"].shape == (10, 5)


def test_the_frozen_base_of_a_changed_file(file: Path) -> None:
    """Also in the next run of a process that has kept the base of the text before."""
    settings = resolve({"model": f"{file}:Net", "model-options": "width=5", "trainable": "head"})
    assert "first.weight" in Problem.of(settings).network().state_dict()
    file.write_text(NETWORK.replace("first", "second"))
    assert "second.weight" in Problem.of(settings).network().state_dict()


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("FILE:Nett", "", "no 'Nett' in .*my_net.py; allowed: Net, one_class_more, half, no_network"),
        ("FILE.gone.py:Net", "", "my_net.py.gone.py': No such file"),
        ("FILE:Net", "width='x'", "model = .*my_net.py:Net': TypeError: "),
        ("FILE:Net", "depth=3", "unexpected keyword argument 'depth'"),
        ("FILE:no_network", "", "gives a int; allowed is a torch.nn.Module"),
        ("FILE:one_class_more", "", r"answers 2 inputs with \[2, 11\]; allowed by task and labels is \[2, 10\]"),
        ("FILE:half", "", "half': '.*weight' is torch.float16; allowed is torch.float32, but for"),
        ("no_such_package:Net", "", "No module named 'no_such_package'"),
        ("torchvision:resnet19", "", "model = 'torchvision:resnet19': .*Unknown model resnet19"),
        ("torchvision:vit_b_16", "", r"cannot take inputs of shape \(1, 8, 8\): AssertionError: Wrong image height"),
        ("lenet5", "width=3", r"model-options = 'width=3': must be '' with model = 'lenet5'"),
        ("resnet", "", "model = 'resnet' is not known; .* 'FILE.py:NAME'"),
    ],
)
def test_what_cannot_be_is_one_line(file: Path, model: str, options: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        Problem.of(resolve({"model": model.replace("FILE", str(file)), "model-options": options})).network()
    assert "\n" not in str(caught.value)


def test_what_cannot_be_is_one_line_where_a_part_is_trained(file: Path) -> None:
    """The part is looked for in the order of the layers, before the network is tested."""
    file.write_text(NETWORK.replace("forward(self, x)", "forward(self, x, mask)"))
    with pytest.raises(UserError, match=r"^model = Net: cannot take inputs of shape \(1, 8, 8\): TypeError: .*'mask'"):
        Problem.of(resolve({"model": f"{file}:Net", "trainable": "head"}))


@pytest.mark.parametrize("package", ["timm", "transformers"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"model = '{package}:x': .*{package}.*; `pip install {package}` may help"):
        build_model(f"{package}:x", (3, 8, 8), 10, 0)


@pytest.mark.parametrize("options", ["width", "3", "width=", "**x", "width=open('x')", "width=3)", "(", "a=1, a=2"])
def test_options_that_are_none_are_refused(options: str) -> None:
    with pytest.raises(UserError, match=r"model-options = .*: must be names with numbers, texts, True or False"):
        resolve({"model-options": options})


def test_torchvisions_first_convolution_takes_the_datas_channels() -> None:
    model = build_model("torchvision:mobilenet_v3_small", (1, 32, 32), 10, 0)
    check_network(model, "mobilenet", (1, 32, 32), (10,))
    assert tensors_of(model)["features.0.0.weight"].shape == (16, 1, 3, 3)


def test_resnet18_with_group_norm_has_no_running_statistics() -> None:
    model = build_model("resnet18-gn", (1, 8, 8), 10, 0)
    assert not list(model.buffers())
    assert sum(p.numel() for p in model.parameters()) == 11_175_370  # resnet18's, whose affine BatchNorm has as many


@pytest.mark.parametrize(
    ("name", "size", "plain"), [("resnet18-gn", 32, True), ("resnet18-gn", 96, False), ("resnet18", 32, False)]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_resnet18_with_group_norm_reads_small_images_in_torchs_plain_layout(
    channels: int, name: str, size: int, plain: bool
) -> None:
    model = build_model(name, (channels, size, size), 10, 0).eval()
    first, seen = next(module for module in model.modules() if isinstance(module, nn.Conv2d)), []
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()[1]))
    model(channels_last(torch.randn(2, channels, size, size)))
    assert seen == [size * size if plain else 1]


def test_tied_weights_have_one_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert list(tensors_of(model)) == ["a.weight", "a.bias", "b.bias"]


# --- layers ---------------------------------------------------------------------------------------------------------

TOKENS = Form(
    (Part((5,), torch.int64, 20), Part((5,), torch.int64, 2)), ("input_ids", "attention_mask")
)  # of a text of five
FAMILIES = {"alexnet": 64, "googlenet": 64, "mnasnet0_5": 32, "squeezenet1_1": 32, "vgg11_bn": 32, "vit_b_16": 224}
LARGE_FAMILIES = {  # as long as a run each
    "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32, "inception_v3": 299,
    "maxvit_t": 224, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "regnet_y_400mf": 32, "resnext50_32x4d": 32,
    "shufflenet_v2_x0_5": 32, "swin_t": 32, "swin_v2_t": 32, "wide_resnet50_2": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "size"),
    [*FAMILIES.items(), *(pytest.param(*of, marks=pytest.mark.run) for of in LARGE_FAMILIES.items())],
)
def test_every_tensor_of_a_family_is_in_one_layer(family: str, size: int) -> None:
    from torchvision.models import get_model

    with warnings.catch_warnings(), torch.device("cpu" if family in ("maxvit_t", "regnet_y_400mf") else "meta"):
        warnings.simplefilter("ignore", FutureWarning)
        model = get_model(family, weights=None, num_classes=10)
    every_tensor_once_in_the_order_of_execution(model.to("meta"), (3, size, size))


SMALL_FAMILIES: dict[str, Callable[[Any], nn.Module]] = {
    "convnext": lambda of: of.ConvNeXt([of.convnext.CNBlockConfig(8, 16, 1), of.convnext.CNBlockConfig(16, None, 2)]),
    "densenet": lambda of: of.DenseNet(4, (2, 2), 8),
    "efficientnet": lambda of: of.EfficientNet(
        [
            of.efficientnet.FusedMBConvConfig(1, 3, 1, 8, 8, 1),
            of.efficientnet.FusedMBConvConfig(4, 3, 2, 8, 16, 1),
            of.efficientnet.MBConvConfig(4, 5, 2, 16, 24, 2),
        ],
        dropout=0.2,
        last_channel=32,
    ),
    "maxvit": lambda of: of.MaxVit((32, 32), 8, 2, [8, 16], [1, 2], 4, 0.1),
    "mobilenet_v2": lambda of: of.MobileNetV2(10, 0.25, [[1, 16, 1, 1], [4, 24, 2, 2]]),
    "mobilenet_v3": lambda of: of.MobileNetV3(
        [
            of.mobilenetv3.InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1),
            of.mobilenetv3.InvertedResidualConfig(8, 5, 16, 16, False, "HS", 2, 1, 1),
        ],
        last_channel=32,
    ),
    "regnet": lambda of: of.RegNet(of.regnet.BlockParams.from_init_params(4, 16, 8.0, 2.0, 8, 0.25)),
    "resnext": lambda of: of.ResNet(of.resnet.Bottleneck, [1, 1, 1, 2], groups=4, width_per_group=4),
    "shufflenet": lambda of: of.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 48]),
    "swin": lambda of: of.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4]),
    "swin_v2": lambda of: of.SwinTransformer(
        *([4, 4], 8, [2, 2], [2, 2], [4, 4]),
        block=of.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=of.swin_transformer.PatchMergingV2,
    ),
}


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_every_tensor_of_a_small_network_of_a_family_is_in_one_layer(family: str) -> None:
    """The blocks of the large ones, few of them."""
    every_tensor_once_in_the_order_of_execution(
        SMALL_FAMILIES[family](import_module("torchvision.models")), (3, 32, 32)
    )


TRANSFORMERS = {
    "Bert": ({"vocab_size": 20, "intermediate_size": 24}, TOKENS),
    "DistilBert": ({"vocab_size": 20, "n_heads": 2, "n_layers": 2, "dim": 12, "hidden_dim": 24}, TOKENS),
    "ViT": ({"image_size": 16, "patch_size": 8, "intermediate_size": 24}, (3, 16, 16)),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_tensor_of_a_family_of_transformers_is_in_one_layer(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, in_shape = TRANSFORMERS[family]
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2} if family != "DistilBert" else {}
    config = getattr(transformers, f"{family}Config")(**small, **sizes, num_labels=3)
    task = "ImageClassification" if family == "ViT" else "SequenceClassification"
    model = getattr(transformers, f"{family}For{task}")(config)
    every_tensor_once_in_the_order_of_execution(model, in_shape)
    assert [group.size for group in unit_groups(model)].count(24) == 2  # the feed-forward units


def every_tensor_once_in_the_order_of_execution(model: nn.Module, in_shape: Shape) -> None:
    """By hooks of this test's own: a layer's first module runs before the next layer's."""
    layers = layer_groups(adopted(model, in_shape))
    flat = [name for layer in layers for name in layer]
    assert sorted(flat) == sorted(tensors_of(model))
    assert len(set(flat)) == len(flat)
    turns: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules() if not any(True for _ in module.children())}

    def enter(module: nn.Module, inputs: object) -> None:
        turns.setdefault(names[module], len(turns))

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    like = next(model.parameters())
    with torch.no_grad():
        model.train()(blank(2, in_shape, like.device, like.dtype))
    for hook in hooks:
        hook.remove()
    ran = [[turns[owner] for name in layer if (owner := name.rpartition(".")[0]) in turns] for layer in layers]
    first = [min(each) for each in ran if each]
    assert first == sorted(first)
    assert len(first) > len(layers) / 2
    last = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    assert set(map(id, last.parameters())) & {id(tensors_of(model)[name]) for name in layers[-1]}


def test_tensors_beside_layers_go_with_the_first_of_them() -> None:
    from torchvision.models import get_model

    with torch.device("meta"):
        layers = layer_groups(adopted(get_model("vit_b_16", image_size=32), (3, 32, 32)))
    assert layers[0] == (
        "class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding",
        "encoder.layers.encoder_layer_0.ln_1.weight", "encoder.layers.encoder_layer_0.ln_1.bias",
    )  # fmt: skip
    attention = "encoder.layers.encoder_layer_0.self_attention"
    assert layers[1][:3] == tuple(f"{attention}.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight"))


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.unused = nn.Linear(4, 2), nn.Linear(3, 4), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def test_layers_stand_in_the_order_of_execution() -> None:
    layers = layer_groups(adopted(Reversed(), (3,)))
    assert layers == (("unused.weight", "unused.bias"), ("first.weight", "first.bias"), ("last.weight", "last.bias"))


# --- units ----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers added, two joined, a depthwise convolution, GroupNorm, a flatten; a stream with LayerNorm."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_shape[0], 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 6, 3, padding=1, groups=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.back = nn.Conv2d(6, 8, 1)
        self.side = nn.Conv2d(8, 4, 1)
        self.join = nn.Conv2d(8 + 4, 12, 1)
        self.group = nn.GroupNorm(4, 12)
        self.flat = nn.Linear(12 * 16, 10)
        self.layer = nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, 7), nn.Linear(7, 10)
        self.head = nn.Linear(10, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = torch.relu(h + self.back(torch.relu(self.deep(torch.relu(self.wide(h))))))
        h = torch.relu(self.group(self.join(torch.cat([h, torch.relu(self.side(h))], 1))))
        f = self.flat(h.flatten(1))
        return self.head(f + self.down(torch.relu(self.up(self.layer(f)))))


def branches() -> nn.Module:
    torch.manual_seed(0)
    return adopted(Branches((1, 4, 4), 3), (1, 4, 4))


def test_units_of_a_network_of_ones_own() -> None:
    groups = {group.name: group for group in unit_groups(branches())}
    assert {name: group.size for name, group in groups.items()} == {"stem": 8, "wide": 6, "side": 4, "join": 4, "up": 7}
    stem = groups["stem"]
    assert stem.rows == ("stem.weight", "stem.bias", *(f"norm.{n}" for n in NORM), "back.weight", "back.bias")
    assert stem.cols == (("wide.weight", 1), ("side.weight", 1))
    assert stem.blocks == (Place("join.weight", 1, 0, 1, 12),)
    assert groups["side"].blocks == (Place("join.weight", 1, 8, 1, 12),)
    assert groups["wide"].rows == ("wide.weight", "wide.bias", "deep.weight", "deep.bias")
    # GroupNorm: three channels of one group go together, each with the 16 columns behind the flatten
    assert Place("group.weight", 0, 0, 3, 12) in groups["join"].blocks
    assert groups["join"].cols == (("flat.weight", 48),)


class ReadTwice(nn.Module):
    """Channels that one layer reads at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.join = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.stem(x))
        return self.head(torch.relu(self.join(torch.cat([h, h], 1))).flatten(1))


def test_units_that_a_layer_reads_twice() -> None:
    stem, join = unit_groups(adopted(ReadTwice(), (1, 4, 4)))
    assert stem.blocks == (Place("join.weight", 1, 0, 1, 8), Place("join.weight", 1, 4, 1, 8))
    assert join.cols == (("head.weight", 16),)


class Shuffled(nn.Module):
    """Channels that are split and joined in another order, as ShuffleNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x).relu().chunk(2, 1)
        return self.head(self.second(torch.cat([right, left], 1)).relu())


def test_units_behind_a_split_leave_others_alone() -> None:
    assert [group.name for group in unit_groups(adopted(Shuffled(), (4,)))] == ["second"]


class Rotary(nn.Module):
    """A layer between rotary embeddings, as the heads of Llama's attention are."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.values(x)
        for _ in range(2):
            values = 0.8 * values + 0.6 * torch.cat([-values[..., 4:], values[..., :4]], -1)
        return self.head(self.second(values).relu())


@pytest.mark.timeout(60)
def test_units_of_rotary_embeddings_are_not_followed() -> None:
    """torch-pruning would not come to an end."""
    assert [group.name for group in unit_groups(adopted(Rotary(), (4,)))] == ["second"]


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x[:, :1].sigmoid()


@pytest.mark.parametrize("between", [nn.LocalResponseNorm(3), Gate()])
def test_units_that_read_their_neighbours_or_the_first_one_are_none(between: nn.Module) -> None:
    """The first units alone are the network in which the others are zero; other units are not."""
    layers = nn.Conv2d(1, 8, 1), between, nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3)
    assert [group.name for group in unit_groups(adopted(nn.Sequential(*layers), (1, 4, 4)))] == ["2"]


class Unit(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight / self.weight.norm(dim=1, keepdim=True)).T


def test_units_whose_rows_of_zeros_are_no_numbers_are_none() -> None:
    layers = Unit(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    assert [group.name for group in unit_groups(adopted(nn.Sequential(*layers), (4,)))] == ["2"]


class Auxiliary(nn.Module):
    """A second head that runs in training alone, as GoogLeNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.auxiliary = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 3)
        self.drop, self.head = nn.Dropout(), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.first(x))
        output = self.head(self.drop(torch.relu(self.second(h))))
        return {"logits": output, "auxiliary": self.auxiliary(h)} if self.training else output


def test_units_that_an_auxiliary_head_reads_in_training_are_none() -> None:
    model, before = adopted(Auxiliary(), (4,)), torch.get_rng_state()
    groups = unit_groups(model)
    assert [group.name for group in groups] == ["second"]
    assert torch.equal(torch.get_rng_state(), before)
    assert narrowed(model, groups, {"second": 2}).train()(torch.zeros(2, 4)).shape == (2, 3)


def test_a_unit_that_no_sample_switches_on_is_one() -> None:
    """By the weights that it begins with, the ReLU of the unit that is removed may cut off all samples of the test."""
    for seed in range(20):
        torch.manual_seed(seed)
        assert [group.name for group in unit_groups(adopted(Auxiliary(), (4,)))] == ["second"], seed


def test_three_reasons_are_enough_for_a_network_without_units() -> None:
    layers = [nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for _ in range(5)]
    with pytest.raises(TypeError) as error:
        unit_groups(adopted(nn.Sequential(*layers), (5,)))
    assert re.findall(r"(\d)\.0: ", str(error.value)) == ["4", "3", "2"]  # from the end


def small_vgg(num_classes: int) -> nn.Module:
    """torchvision's VGG with BatchNorm in small: 123 million parameters of vgg11_bn are its first Linear's."""
    from torchvision.models.vgg import make_layers

    features = make_layers([8, "M", 12, "M", 16, 16, "M"], batch_norm=True)
    classifier = nn.Linear(4 * 16, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, num_classes)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *classifier)


NORM = ("weight", "bias", "running_mean", "running_var")
SOURCES = {
    "torchvision:mobilenet_v3_small": ("", 27), f"{__name__}:small_vgg": ("", 5),
    "torchvision:squeezenet1_1": ("", 25), "bench.networks:Residual": ("", 3),
    "torchvision.models:VisionTransformer": (
        "image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32", 2
    ),
}  # fmt: skip
WHOLE_FAMILIES = {
    "torchvision:resnet18": ("", 12), "torchvision:resnet50": ("", 37), "torchvision:mobilenet_v2": ("", 25),
    "torchvision:efficientnet_b0": ("", 40), "torchvision:densenet121": ("", 120),
    "torchvision:convnext_tiny": ("", 18), "torchvision:swin_t": ("", 12), "torchvision:vgg11_bn": ("", 10),
    "torchvision:vit_b_16": ("image_size=32", 12), "timm:resnet10t": ("", 10),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        *((name, *of) for name, of in SOURCES.items()),
        pytest.param("resnet18-gn", "", 12, marks=pytest.mark.run),  # as long as one
        *(pytest.param(name, *of, marks=pytest.mark.slow) for name, of in WHOLE_FAMILIES.items()),
    ],
)
def test_a_network_without_units_is_the_network_in_which_they_are_zero(name: str, options: str, count: int) -> None:
    """In training as well: outputs, gradients and running statistics. traced_groups tries it in evaluation alone."""
    from torchvision.ops import StochasticDepth

    if name.startswith("timm"):
        pytest.importorskip("timm")
    model = build_model(name, (3, 32, 32), 10, 0, options=options).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout | StochasticDepth):
            module.p = 0.0
    groups = unit_groups(model)
    assert len(groups) == count
    draws = torch.Generator().manual_seed(0)
    units = {group.name: torch.rand(group.size, generator=draws) < 0.7 for group in groups}
    for mask in units.values():
        mask[0] = True
    tensors = {n: t.detach().clone() for n, t in tensors_of(model).items()}
    shapes = {n: t.shape for n, t in tensors.items()}
    masks, kept = expand(groups, units, shapes), take(tensors, groups, units)
    small = narrowed(model, groups, {n: int(mask.sum()) for n, mask in units.items()})
    load_tensors(small, kept)
    load_tensors(model, {n: t * masks[n] for n, t in tensors.items()})
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=draws)
    whole, output = model(x), small(x)
    torch.testing.assert_close(output, whole, rtol=1e-8, atol=1e-10)
    for computed in (whole, output):
        F.cross_entropy(computed, torch.tensor([0, 3, 9, 3])).backward()
    expected = take({n: p.grad for n, p in model.named_parameters()}, groups, units)
    for parameter, own in small.named_parameters():
        torch.testing.assert_close(own.grad, expected[parameter], rtol=1e-6, atol=1e-9)
    left = take({n: t.detach() for n, t in tensors_of(model).items()}, groups, units)
    for tensor, own in tensors_of(small).items():
        torch.testing.assert_close(own.detach(), left[tensor], rtol=1e-8, atol=1e-10)
    assert widths_of(groups, tensors_of(small)) == {n: int(mask.sum()) for n, mask in units.items()}
    again = put(kept, groups, units, shapes)
    assert all(torch.equal(again[n], tensors[n] * masks[n]) for n in tensors)


class Attention(nn.Module):
    """A block of a transformer, in the way of those of the package transformers."""

    def __init__(self, heads: int = 3, head_dim: int = 4) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v = (nn.Linear(8, heads * head_dim) for _ in range(3))
        self.out, self.classes = nn.Linear(heads * head_dim, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = ((q @ k.transpose(2, 3)).softmax(3) @ v).transpose(1, 2).flatten(2)
        return self.classes((x + self.out(h)).mean(1))


def test_heads_of_attention_are_units() -> None:
    (group,) = unit_groups(adopted(Attention(), (5, 8)))
    assert (group.name, group.size, group.cols) == ("q", 3, (("out.weight", 4),))
    assert group.blocks == tuple(Place(f"{n}.{leaf}", 0, 0, 4, 12) for n in "qkv" for leaf in ("weight", "bias"))


@pytest.mark.parametrize("outputs", [False, True])
def test_gates_of_a_network_of_ones_own_are_its_masked_weights(outputs: bool) -> None:
    network = Network(branches().eval())
    mask = (torch.arange(29) % 3 > 0).float().requires_grad_()
    units = split(mask.detach().bool(), network.units)
    masks = expand(network.units, units, {n: t.shape for n, t in network.tensors.items()})
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    gated_output = gated(network, mask, x, outputs=outputs).logits
    expected = network(x, {n: network.tensors[n] * masks[n] for n in network.parameters}).logits
    torch.testing.assert_close(gated_output, expected)
    (gradient,) = torch.autograd.grad(gated_output.square().sum(), [mask])
    off = gradient[mask.detach() == 0]
    assert bool(off.any()) == outputs  # with "weights" a unit that is off gets no gradient


@pytest.mark.parametrize("outputs", [False, True])
def test_gates_mask_frozen_weights_too(outputs: bool) -> None:
    """As the Sequential of the same layers does, by factors behind them."""
    layers = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)]
    layers[0].requires_grad_(False)
    layers[2].requires_grad_(False)
    x, found = torch.randn(7, 4), []
    for network in (Network(nn.Sequential(*layers)), Network(adopted(nn.Sequential(nn.Sequential(*layers)), (4,)))):
        mask = (torch.arange(11) % 3 > 0).float().requires_grad_()
        logits = gated(network, mask, x, outputs=outputs).logits
        found.append((logits, *torch.autograd.grad(logits.square().sum(), [mask])))
    torch.testing.assert_close(found[1], found[0])


def test_statistics_behind_gates_are_those_of_the_whole_layer() -> None:
    """Of a network of one's own as of the Sequential of the same layers: units that are off keep theirs."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    x, found = torch.randn(7, 1, 4, 4, generator=torch.Generator().manual_seed(1)), []
    for make in (lambda own: own, lambda own: adopted(nn.Sequential(own), (1, 4, 4))):
        network = Network(make(copy.deepcopy(nn.Sequential(*layers)).train()))
        mask = torch.tensor([1.0, 0, 1, 0]).requires_grad_()
        logits = gated(network, mask, x).logits
        grads = torch.autograd.grad(logits.square().sum(), [mask, *network.parameters.values()])
        found.append((logits, *grads, *network.tensors.values()))
    assert network.normalisations
    torch.testing.assert_close(found[1], found[0])
    assert bool((network.tensors["0.1.running_mean"] != 0).all())


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("length", [5, 6])  # as many tokens as units
def test_gates_of_a_sequential_on_tokens_are_its_masked_weights(length: int, outputs: bool) -> None:
    first, _, last = layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, mask = torch.randn(2, length, 4), torch.tensor([1.0, 0, 1, 1, 0, 1])
    hidden = torch.relu(x @ (first.weight * mask[:, None]).T + first.bias * mask)
    expected = hidden @ (last.weight * mask).T + last.bias
    torch.testing.assert_close(gated(Network(layers), mask, x, outputs=outputs).logits, expected)


class Last(nn.Sequential):
    """The last step of what recurrent layers return, without their state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)[0][:, -1] if isinstance(layer, nn.RNNBase) else layer(x)
        return x


class Beside(nn.Module):
    """A recurrent layer's last output beside that of a linear one; torch-pruning does not follow it."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.side, self.hidden, self.head = rnn, nn.Linear(16, 4), nn.Linear(14, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2)
        return self.head(self.hidden(torch.cat([self.rnn(x)[0][:, -1], self.side(x[:, 0])], 1)).relu())


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "no units can be removed from a Sequential: it has one layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Softmax(1), nn.Linear(4, 3)), "1: a removed unit is not"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
            "1: 2, a LayerNorm, computes",
        ),
        (Last(nn.Flatten(2), nn.GRU(16, 5), nn.Linear(5, 3)), "from a Last: 1: the units of a GRU read each other"),
        (
            Beside(nn.GRU(16, 5, bidirectional=True)),
            "no units are known for a Beside: rnn: the units of a GRU read each",
        ),
        (
            nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(16, 4)), nn.ReLU(), nn.Linear(4, 3)),
            "1: its weight is computed from other tensors",
        ),
    ],
)
def test_a_network_without_units_says_why(network: nn.Module, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        unit_groups(adopted(network, (1, 4, 4)))


def test_a_computed_weight_has_no_units_in_a_listed_network() -> None:
    with pytest.raises(TypeError, match=r"^layer 0: its weight is computed from other tensors$"):
        unit_groups(nn.Sequential(orthogonal(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3)))


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (twice(nn.Linear(6, 6)), "2.weight is in two places"),  # its units are read by itself
        (twice(nn.BatchNorm1d(6)), "2.weight is in two places"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(8, 5)), "layer 1 reads columns of pixels, not the channels of 0"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.Linear(64, 5)), "layer 2 reads columns of pixels"),
    ],
)
def test_a_sequential_whose_units_lie_elsewhere_says_so(network: nn.Module, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}"):
        unit_groups(network)


# --- a user's file on Flower's engines --------------------------------------------------------------------------------


@pytest.mark.skipif(not (PROJECT / "pyproject.toml").exists(), reason="bundles the checkout")
def test_the_bundle_holds_the_users_files(file: Path) -> None:
    """The bundle holds the files of network, data and task; a module is not copied."""
    keys = {key: f"{file.with_name(f'my_{key}.py')}:It" for key in ("dataset", "task")} | {"model": f"{file}:Net"}
    for text in (keys["dataset"], keys["task"]):
        Path(text.partition(":")[0]).write_text(f"# {text}\n")
    with bundle(resolve({"model": "torchvision:resnet18", "dataset": "csv:a.csv", "task": "pack:Task"})) as project:
        found = {path.relative_to(project).parts[0] for path in project.rglob("*.py")}
        assert found == {"client_apps", "fedsub", "fedsub_app", "strategies"}  # not .venv, which Flower would walk
    with bundle(resolve(keys)) as project, zipfile.ZipFile(BytesIO(build_fab_from_disk(project))) as fab:
        for text in keys.values():
            held = fab.read(bundled(text).relative_to(PROJECT).as_posix())
            assert held == Path(text.partition(":")[0]).read_bytes()
        assert {"fedsub_app/server_app.py", "strategies/base.py", "conf/fedpews/digits.toml"} <= {*fab.namelist()}
    gone = resolve({"task": f"{file}.gone.py:Task"})
    with pytest.raises(UserError, match=r"^task = '.*gone.py:Task': No such file"), bundle(gone):
        pass


@pytest.mark.parametrize("key", ["model", "dataset", "task"])
def test_flowers_engines_run_code_of_the_bundle_alone(file: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is part of that of all code; networks of packages are there on every node."""
    monkeypatch.setattr(node, "simulated", lambda: False)
    monkeypatch.setattr(own_code, "BUNDLE", file.parent / "bundle")
    text = f"{file}:Net"
    refuse_own_code(resolve({"model": "torchvision:resnet18"}))
    for named in (text, "my_package.nets:Net"):
        with pytest.raises(UserError, match=f"^{key} = .* not in the run's bundle; `fedsub run --engine` puts FILE"):
            refuse_own_code(resolve({key: named}))
        with pytest.raises(UserError, match=f"^{key} = .* a node runs code of the run's bundle or of known packages"):
            settings_from(json.dumps({key: named}))
    bundled(text).parent.mkdir()
    file.rename(bundled(text))
    refuse_own_code(resolve({key: text}))
    assert getattr(settings_from(json.dumps({key: text})), key) == text
    assert own_code.named_code(key, text)((1, 8, 8), 10).head.out_features == 10


@pytest.mark.parametrize("key", ["model", "dataset"])
def test_a_run_of_a_changed_file_is_not_resumed(file: Path, key: str, tmp_path: Path) -> None:
    settings = resolve({key: f"{file}:Net", "run-dir": str(tmp_path / "run")})
    open_run(settings).close()
    again = settings.model_copy(update={"resume": True})
    open_run(again).close()
    before = file.read_text()
    file.write_text(before.replace("width=4", "width=5"))
    with pytest.raises(
        UserError, match=rf"^{key} = '.*my_net.py:Net': the file has changed since the run in .* began$"
    ):
        open_run(again)
    file.write_text(before)
    open_run(again).close()


# --- head -----------------------------------------------------------------------------------------------------------


def test_the_head_is_the_last_linear_that_runs_or_a_convolution() -> None:
    assert head_names(adopted(Reversed(), (3,))) == ("last.weight", "last.bias")
    assert head_names(adopted(Auxiliary(), (4,))) == ("head.weight", "head.bias")
    squeezenet = build_model("torchvision:squeezenet1_1", (3, 32, 32), 10, 0)
    assert head_names(squeezenet) == ("classifier.1.weight", "classifier.1.bias")
    assert Network(squeezenet)(torch.zeros(2, 3, 32, 32)).features.dim() == 2


def test_the_head_that_a_key_names(file: Path) -> None:
    keys: dict[str, str | int | float | bool] = {"model": f"{file}:Net", "head": "first"}
    network = Network(Problem.of(resolve(keys)).network())
    assert head_names(network.module) == ("first.weight", "first.bias")
    assert part_names(network.module, "body") == ("head.weight", "head.bias")
    assert network(torch.zeros(2, 1, 8, 8)).features.shape == (2, 64)  # what enters it
    with pytest.raises(UserError, match="head = 'last': 'last' is no layer; allowed are head, body or some of first"):
        Problem.of(resolve(keys | {"head": "last"})).network()


LAYERLESS = """
import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 10))

    def forward(self, x):
        return x.flatten(1) @ self.w


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(x.flatten(1))
"""


@pytest.mark.parametrize("name", ["Linear", "Layer"])
def test_a_network_without_a_layer_in_it_is_all_head(name: str, tmp_path: Path) -> None:
    """It trains; what would be a method's other part is nothing, which is refused."""
    (tmp_path / "flat.py").write_text(LAYERLESS)
    keys: dict[str, Any] = {"model": f"{tmp_path}/flat.py:{name}", "partition": "iid", "num_clients": 2}
    for method in ("fedavg", "fedprox", "fedpart", "scaffold"):
        assert run_small(tmp_path / method, method=method, **keys)["final-global-accuracy"] > 50
    for method, part, has in (("fedper", "head", "[12]"), ("lg-fedavg", "body", "0")):
        said = f"^{method}.personal = '{part}': {has} of [12] tensors; allowed is a part of the model$"
        with pytest.raises(UserError, match=said):
            run_small(tmp_path / "refused", method=method, **keys)
    with pytest.raises(UserError, match=r"^objective = 'moon': the network is all head, "):
        run_small(tmp_path / "refused", method="moon", **keys)
    assert not (tmp_path / "refused").exists()


class OfTwo(nn.Module):
    """Its inputs come by name, as those of an adopted network do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.ones(4, 3))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (self.scores[tokens] * mask[..., None]).sum(1)


def test_what_enters_a_network_without_a_layer_is_its_first_input() -> None:
    x = Inputs.of({"tokens": torch.tensor([[1, 2], [3, 0]]), "mask": torch.tensor([[1, 1], [1, 0]])})
    output = Network(adopted(OfTwo(), form_of(x)))(x)
    assert output.logits.tolist() == [[2.0] * 3, [1.0] * 3]
    assert output.features.tolist() == [[1, 2], [3, 0]]


class SeveralHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleDict({"main": nn.Linear(5, 3), "age": nn.Linear(5, 1)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).relu()
        return {"logits": self.heads["main"](h), "age": self.heads["age"](h)}


def test_of_several_heads_the_logits_are_the_output() -> None:
    model = adopted(SeveralHeads(), (4,))
    assert model(torch.zeros(2, 4)).shape == (2, 3)
    assert layer_groups(model) == tuple((f"{n}.weight", f"{n}.bias") for n in ("body", "heads.main", "heads.age"))
    assert [group.name for group in unit_groups(model)] == ["body"]
    assert part_names(with_head(model, "heads.main"), "head") == ("heads.main.weight", "heads.main.bias")
    assert len(part_names(with_head(model, "heads"), "head")) == 4


def test_a_loss_that_is_not_finite_at_the_start(file: Path, tmp_path: Path) -> None:
    file.write_text(NETWORK.replace("torch.relu(self.first(x.flatten(1)))", "self.first(x.flatten(1)).log()"))
    with pytest.raises(UserError, match=r"^the loss of the first \d+ training samples is nan before round 1: must"):
        prepare(resolve({"model": f"{file}:Net"}))


NORMED = """
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, num_classes))
"""


def test_a_method_that_needs_units_says_why_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    settings = resolve({"model": f"{tmp_path}/normed.py:net", "method": "ist"})
    with pytest.raises(UserError, match=r"not with method = 'ist': no units can be .*: 1: 2, a LayerNorm, computes"):
        METHODS["ist"].strategy(settings, Problem.of(settings).network())


def test_a_network_from_python_has_the_units_of_its_graph() -> None:
    data = tuple((torch.randn(8, 1, 4, 4), torch.arange(8) % 3) for _ in range(2))
    network = Problem.own(lambda: Branches((1, 4, 4), 3), data, resolve({}), traced=True).network()
    assert [group.name for group in unit_groups(network)] == ["stem", "wide", "side", "join", "up"]
    listed = Problem.own(lambda: mlp(16, 3, [5]), data, resolve({}), traced=True).network()
    assert unit_groups(listed)[0].chain  # read like those listed: the same bits


HARD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.frozen = nn.Linear(64, 12).requires_grad_(False)
        self.tied = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.tied.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(12, num_classes)
        self.register_buffer("order", torch.arange(11, -1, -1))

    def forward(self, x):
        h = torch.relu(self.frozen(x.flatten(1)))[:, self.order] + torch.zeros(12)
        return {"logits": self.head(torch.relu(self.again(torch.relu(self.tied(h)))))}
"""


@pytest.mark.run
@pytest.mark.parametrize("method", ["fedpart", "scaffold", "fedselect"])
def test_frozen_unused_and_tied_tensors_take_part(method: str, tmp_path: Path) -> None:
    """And an integer buffer, tensors made in forward, an output with logits."""
    (tmp_path / "hard.py").write_text(HARD)
    adam = {"optimizer": "adam", "lr": 0.01} if method == "fedpart" else {}
    keys = {"model": f"{tmp_path}/hard.py:Net", "method": method, "num-rounds": 2, "partition": "iid", **adam}
    record = fedsub_app.run(keys)
    assert [line["status"] for line in record.lines] == ["ok"] * 3
    assert not any(line.get("dropped") for line in record.lines)
    start = tensors_of(Problem.of(resolve(keys)).network())
    end = load_file(record.folder / "model.safetensors")
    assert end.keys() == start.keys()
    assert "again.weight" not in end
    for name in ("frozen.weight", "unused.weight"):
        assert torch.equal(end[name], start[name].detach()), name


def test_flops_of_a_network_that_makes_tensors_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hard.py").write_text(HARD)
    problem = Problem.of(resolve({"model": f"{tmp_path}/hard.py:Net"}))
    assert forward_flops(problem, problem.network()) == 2 * (64 * 12 + 2 * 12 * 12 + 12 * 10)


def test_a_plan_of_a_network_of_ones_own(file: Path) -> None:
    text = plan(resolve({"model": f"{file}:Net", "model-options": "width=5", "method": "fedavg", "partition": "iid"}))
    assert re.search(rf"^network +{file}:Net: {64 * 5 + 5 + 5 * 10 + 10} parameters, 1.54 kB$", text, re.MULTILINE)
    flops = 3 * 2 * (64 * 5 + 5 * 10) - 2 * 64 * 5  # forwards and backwards, but for the gradient of the input
    samples = 2 * resolve({"method": "fedavg"}).local_epochs
    assert re.search(r"^training +\S+ GFLOPs a round", text, re.MULTILINE), (flops, samples)
    assert re.search(r"^memory +", text, re.MULTILINE)


def test_clients_are_stacked_or_a_line_says_why_not(file: Path) -> None:
    settings = resolve({"model": f"{file}:Net", "stack-clients": True})
    problem = Problem.of(settings)
    assert unstackable(settings, Network(problem.network()), problem) == ""
    dropping = adopted(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(), nn.Linear(4, 10)), (1, 8, 8))
    assert "vmap: called random operation" in unstackable(settings, Network(dropping), problem)
    counting = adopted(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10)), (1, 8, 8))
    assert "a BatchNorm with momentum = None" in unstackable(settings, Network(counting), problem)

    class Weighted(Classification):
        def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
            return F.cross_entropy(output, y, torch.arange(10.0), reduction=reduction)

    weighted = dataclasses.replace(problem, task=Weighted())
    assert "its mean loss is not the mean of" in unstackable(settings, Network(problem.network()), weighted)


@pytest.mark.parametrize(
    ("none", "said"),
    [
        (lambda each: each, "its loss with reduction = 'none' gives 320 numbers for 32 samples"),
        (lambda each: each.mean(), "gives 1 numbers for 32 samples"),
        (lambda each: each.no_such_thing, "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"),
    ],
)
def test_a_loss_of_other_than_one_number_a_sample_is_not_stacked(none: Any, said: str, file: Path) -> None:
    """As of ``F.mse_loss(output, y, reduction=reduction)``: of 10 outputs the training loss was 10 times too large."""
    settings = resolve({"model": f"{file}:Net", "stack-clients": True})

    class Squares(Classification):
        def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
            each = (output - F.one_hot(y, 10)).square()
            return none(each) if reduction == "none" else each.mean() if reduction == "mean" else each.sum()

    problem = dataclasses.replace(Problem.of(settings), task=Squares())
    assert said in unstackable(settings, Network(problem.network()), problem)


def test_weights_of_classes_are_seen_where_samples_are_sorted_by_class(file: Path) -> None:
    settings = resolve({"model": f"{file}:Net", "stack-clients": True})
    problem = Problem.of(settings)
    order = problem.data.train_y.argsort()
    y = problem.data.train_y[order]
    data = dataclasses.replace(problem.data, train_x=problem.data.train_x.part(order), train_y=y)

    class Weighted(Classification):
        def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
            return F.cross_entropy(output, y, torch.tensor([1.0] * 5 + [2.0] * 5), reduction=reduction)

    ordered = dataclasses.replace(problem, data=data, task=Weighted())
    assert "its mean loss is not the mean of" in unstackable(settings, Network(problem.network()), ordered)


@pytest.mark.parametrize(
    ("width", "parameters", "of_a_quarter"),
    [pytest.param(64, 11_172_170, 701_018, marks=pytest.mark.slow), (16, 701_018, 44_510)],
)
def test_the_preresnet_of_the_examples_has_heterofls_parameters(width: int, parameters: int, of_a_quarter: int) -> None:
    """At the levels a, c and e of HeteroFL's table; a quarter of the units, those of the stream too, is two levels."""
    network = "examples/own-network/preresnet.py:PreResNet18"
    model = build_model(network, (3, 32, 32), 10, 0, options=f"width={width}")
    assert sum(p.numel() for p in model.parameters()) == parameters
    groups = unit_groups(model)
    assert sum(group.size for group in groups) == 45 * width
    quarter = narrowed(model, groups, {group.name: group.size // 4 for group in groups})
    assert sum(p.numel() for p in quarter.parameters()) == of_a_quarter


def test_a_mean_of_statistics_is_of_the_clients_own_batches() -> None:
    """BatchNorm with momentum = None counts batches; the clients of a process share the network that counts."""
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)))
    start, x, answers = network.copy(), torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)), []
    for _ in range(2):
        network.load(start)
        network.training_mode()
        for batch in x:
            network.module(batch)
        answers.append(network.copy()["1.running_mean"])
    assert torch.equal(*answers)


def test_a_mean_of_statistics_is_not_of_other_models_batches() -> None:
    """MOON, APFL and Per-FedAvg run whole other models on a client's network between its own steps."""
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)))
    start, x = network.copy(), torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0))
    network.load(start)
    network.training_mode()
    other = network.like(start)
    for batch in x:
        network(batch, other)
        network(batch)
        network(batch, network.like(start))
    expected = torch.stack([network.module.get_submodule("0")(batch).mean(0) for batch in x]).mean(0)
    torch.testing.assert_close(network.copy()["1.running_mean"], expected.detach())


def test_units_that_lie_apart_behind_a_flatten() -> None:
    """They are not those of a listed network; by its graph they are found, or it is said that there are none."""
    tokens = [nn.Linear(8, 16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    with pytest.raises(TypeError, match="layer 2: the units of 0 may lie apart"):
        unit_groups(nn.Sequential(*tokens))
    with pytest.raises(TypeError, match="no units can be removed from a Sequential: 0: "):
        unit_groups(adopted(nn.Sequential(*tokens), (4, 8)))
    images = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)]
    with pytest.raises(TypeError, match="layer 3 has 16 features, 0 has 4 units"):
        unit_groups(nn.Sequential(*images))
    network = adopted(nn.Sequential(*images), (1, 4, 4)).eval().double()
    groups = unit_groups(network)
    zeroed = dict(tensors_of(network))
    for (name, axis), kept in kept_positions(groups, {"0": torch.arange(4) < 2}).items():
        zeroed[name] = zeroed[name] * kept.view([-1 if k == axis else 1 for k in range(zeroed[name].dim())])
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(
        narrowed(network, groups, {"0": 2})(x), torch.func.functional_call(network, zeroed, (x,))
    )


def test_runs_of_one_process_in_one_folder_have_each_the_file_as_it_is(run_local: Any, tmp_path: Path) -> None:
    """A notebook's run is made again in its folder, of another network: on the server and on the clients."""
    layers = "nn.Flatten(), nn.Linear(64, 16), nn.{}(), nn.Linear(16, 10)"
    text = f"from torch import nn\n\n\ndef net():\n    return nn.Sequential({layers})\n"
    file, losses = tmp_path / "my_net.py", []
    for folder, last in (("run", "ReLU"), ("run", "Tanh"), ("other", "Tanh")):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        file.write_text(text.format(last))
        run_local(folder, model=f"{file}:net", num_rounds=1, lr=0.1)
        losses.append(rounds(tmp_path / folder)[-1]["global-loss"])
    assert losses[0] != losses[1] == losses[2]


@pytest.mark.parametrize("between", [nn.Linear(6, 6), nn.BatchNorm1d(6)])
def test_a_layer_in_two_places_reads_and_writes_the_same_units(between: nn.Module) -> None:
    network = adopted(twice(between), (4,)).eval().double()
    (group,) = unit_groups(network)
    assert (group.name, group.size) == ("0", 6)
    x, narrow = torch.randn(5, 4, dtype=torch.float64), narrowed(network, (group,), {"0": 2})
    on = (torch.arange(6) < 2).double()
    first, _, layer, _, again, _, last = network._modules.values()
    hidden = first(x).relu() * on
    for place in (layer, again):
        hidden = place(hidden).relu() * on
    torch.testing.assert_close(narrow(x), last(hidden))
    assert narrow.get_submodule("2") is narrow.get_submodule("4")


def test_units_behind_a_gru_are_found() -> None:
    """A Linear before a GRU, whose units torch-pruning does not follow, hides no units of other layers."""
    layers = nn.Linear(6, 12), nn.GRU(12, 10, batch_first=True), nn.Linear(10, 16), nn.Linear(16, 3)

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.gru, self.hidden, self.head = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(self.gru(self.before(x).relu())[0][:, -1]).relu())

    assert [group.name for group in unit_groups(adopted(Read(), (7, 6)))] == ["hidden"]
