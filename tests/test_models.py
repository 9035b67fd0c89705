"""Networks, their tensors and their structure."""

import copy
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsub_app.common.errors import UserError
from fedsub_app.models import (
    Network,
    adopted,
    build_model,
    check_float32,
    head_names,
    layer_groups,
    load_tensors,
    mlp,
    model_names,
    tensors_of,
    unit_groups,
)
from fedsub_app.models.networks import MaxPool, trim_kernels
from fedsub_app.training.problem import built
from strategies.fedbn import FedBN

# name, input, classes, parameters as the papers or their code have them
PAPERS = [
    ("fedpews-mlp", (5,), 4, 14_884),
    ("fedpews-cnn", (3, 32, 32), 20, 93_248 + 2048 * 20 + 20),
    ("lenet5", (3, 32, 32), 10, 62_006),
    ("lenet5", (3, 32, 32), 100, 69_656),
    ("lenet5-bn", (3, 32, 32), 10, 62_006 + 44),
    ("mnist-cnn", (1, 28, 28), 10, 21_840),
    ("pfllib-cnn", (1, 28, 28), 10, 582_026),
    ("mnist-cnn-bn", (1, 28, 28), 10, 21_840 + 60),
    ("fedpart-cnn", (3, 32, 32), 10, 154_486),
    ("resnet18", (3, 32, 32), 10, 11_181_642),
    ("resnet18", (3, 32, 32), 65, 11_209_857),
    ("resnet18-gn", (3, 32, 32), 10, 11_181_642),
    ("feature-mlp", (3072,), 200, 3_275_200),
    ("feature-mlp2", (3072,), 200, 3_275_200 + 1000 * 1000 + 3 * 1000),
]


@pytest.mark.parametrize(("name", "in_shape", "classes", "parameters"), PAPERS)
def test_parameter_counts_are_the_papers(name, in_shape, classes, parameters):
    model = build_model(name, in_shape, classes, seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *in_shape)).shape == (2, classes)


def test_every_name_has_a_description_and_a_paper_network():
    assert set(model_names()) == {name for name, *_ in PAPERS} | {"resnet18-imagenet"}
    assert all(description and "\n" not in description for description in model_names().values())


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_convolution_of_a_resnet_is_drawn_as_torchvision_does(channels):
    weight = tensors_of(build_model("resnet18", (channels, 28, 28), 10, seed=0))["conv1.weight"]
    assert float(weight.detach().std()) == pytest.approx((2 / (64 * 7 * 7)) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", ["fedpews-mlp", "fedpews-cnn", "resnet18", "feature-mlp"])
def test_small_grey_digits_fit(name):
    assert build_model(name, (1, 8, 8), 10, seed=0)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_digits_reach_the_linear_layer_as_one_pixel_per_channel():
    assert tensors_of(build_model("fedpews-cnn", (1, 8, 8), 10, seed=0))["fc1.weight"].shape == (10, 128 * 1 * 1)


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first, again, other = (tensors_of(build_model("lenet5", (3, 32, 32), 10, seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)  # another state of the global generator must not matter
    after = tensors_of(build_model("lenet5", (3, 32, 32), 10, 1))
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], after[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "in_shape", "said"),
    [
        ("LeNet", (3, 32, 32), ["model", "'LeNet'", "resnet18", "; did you mean lenet5?"]),
        ("lenet5", (1, 8, 8), ["model", "'lenet5'", "(1, 8, 8)", "16 x 16"]),
        ("fedpews-cnn", (3, 7, 32), ["model", "'fedpews-cnn'", "(3, 7, 32)", "8 x 8"]),
        ("resnet18", (5,), ["model", "'resnet18'", "(5,)", "channels"]),
    ],
)
def test_bad_model_or_shape_is_named(name, in_shape, said):
    with pytest.raises(UserError) as error:
        build_model(name, in_shape, 10, seed=0)
    message = str(error.value)
    assert all(word in message for word in said)
    assert "\n" not in message


def test_smallest_image_of_the_message_works():
    assert build_model("lenet5", (1, 16, 16), 10, seed=0)(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


def test_tensors_are_the_models_own_without_integers():
    model = build_model("lenet5-bn", (3, 32, 32), 10, seed=0)
    named = tensors_of(model)
    assert [n for n in named if n.startswith("bn1")] == [
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
    ]
    assert list(named) == [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    assert named["conv1.weight"] is model.conv1.weight
    assert named["bn1.running_mean"] is model.bn1.running_mean


def test_extra_state_is_no_tensor():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return torch.ones(3) if self.bias is None else {"version": 1}

    model = nn.Sequential(Extra(2, 2), Extra(2, 2, bias=False))
    assert list(tensors_of(model)) == ["0.weight", "0.bias", "1.weight"]


def overlapping():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1, 1).expand(4, 1))
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.LazyLinear(2)), "'0.weight' has no values yet; a factory of lazy layers must run them once"),
        (overlapping(), "'scale' has one value at several positions, as from expand; must be cloned"),
    ],
)
def test_tensors_that_no_values_can_be_copied_into(model, said):
    with pytest.raises(UserError, match=f"^model = 'own': {said}$"):
        check_float32(tensors_of(model), "model = 'own'")


def test_a_compiled_script_is_refused():
    with pytest.raises(UserError, match=r"^model = Linear: is compiled by torch\.jit; allowed is the plain network$"):
        adopted(torch.jit.script(nn.Linear(2, 2)), (2,))


def test_feature_mlp_has_no_running_statistics():
    assert list(tensors_of(mlp(3, 2, [4], batch_norm=True))) == [
        "fc1.weight",
        "fc1.bias",
        "bn1.weight",
        "bn1.bias",
        "fc2.weight",
        "fc2.bias",
    ]


def test_load_tensors_copies_in():
    source, target = (build_model("lenet5-bn", (3, 32, 32), 10, seed) for seed in (0, 1))
    load_tensors(target, tensors_of(source))
    assert all(torch.equal(a, tensors_of(source)[name]) for name, a in tensors_of(target).items())
    assert target.conv1.weight is not source.conv1.weight
    assert target.conv1.weight.requires_grad


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape"])
def test_load_tensors_is_strict_and_copies_nothing_then(spoil):
    model = build_model("fedpews-mlp", (5,), 4, seed=0)
    new = {name: torch.zeros_like(t) for name, t in tensors_of(model).items()}
    if spoil == "missing":
        del new["fc5.bias"]
    elif spoil == "unknown":
        new["fc6.bias"] = torch.zeros(4)
    else:
        new["fc5.bias"] = torch.zeros(1)  # would broadcast
    with pytest.raises(ValueError, match=r"fc[56]\.bias"):
        load_tensors(model, new)
    assert all(bool(t.any()) for t in tensors_of(model).values())


def test_units_of_an_mlp():
    groups = unit_groups(build_model("fedpews-mlp", (5,), 4, seed=0))
    assert [(g.name, g.size) for g in groups] == [("fc1", 32), ("fc2", 64), ("fc3", 128), ("fc4", 32)]
    assert groups[0].rows == ("fc1.weight", "fc1.bias")
    assert groups[0].cols == (("fc2.weight", 1),)
    assert sum(g.size for g in groups) == 256  # h of the paper


def test_units_of_a_cnn_with_batch_norm_and_flatten():
    conv1, conv2, fc1, fc2 = unit_groups(build_model("lenet5-bn", (3, 32, 32), 10, seed=0))
    assert conv2.rows == (
        "conv2.weight",
        "conv2.bias",
        "bn2.weight",
        "bn2.bias",
        "bn2.running_mean",
        "bn2.running_var",
    )
    assert conv1.cols == (("conv2.weight", 1),)
    assert conv2.cols == (("fc1.weight", 25),)  # 5 x 5 pixels behind the second pool
    assert (fc1.size, fc2.size, fc2.cols) == (120, 84, (("fc3.weight", 1),))


def test_pretrained_weights_are_torchvisions_file_with_a_new_head(tmp_path, monkeypatch):
    from torchvision.models import resnet18

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth"  # the name that torchvision looks for

    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(UserError, match=rf"model = 'resnet18-imagenet': needs {file}, from https.*no network"):
        build_model("resnet18-imagenet", (3, 64, 64), 65, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    stored = resnet18(weights=None).state_dict()
    torch.save(stored, file)
    net = build_model("resnet18-imagenet", (3, 64, 64), 65, 0)
    found = net.state_dict()
    assert found["fc.weight"].shape == (65, 512)
    assert all(torch.equal(tensor, found[name]) for name, tensor in stored.items() if not name.startswith("fc."))
    again = build_model("resnet18-imagenet", (3, 64, 64), 65, 0).state_dict()
    assert torch.equal(found["fc.weight"], again["fc.weight"])  # from the seed
    with pytest.raises(UserError, match="'resnet18-imagenet': trained on RGB images, these have 1 channels"):
        build_model("resnet18-imagenet", (1, 64, 64), 65, 0)
    file.write_bytes(b"no weights")
    with pytest.raises(UserError, match=rf"needs {file}, from https"):
        build_model("resnet18-imagenet", (3, 64, 64), 65, 0)


def test_units_of_a_resnet_are_the_inner_channels_of_its_blocks():
    groups = unit_groups(build_model("resnet18", (3, 32, 32), 10, seed=0))
    assert [g.size for g in groups] == [64, 64, 128, 128, 256, 256, 512, 512]
    assert groups[2].name == "layer2.0.conv1"
    assert groups[2].rows[:2] == ("layer2.0.conv1.weight", "layer2.0.bn1.weight")
    assert groups[2].cols == (("layer2.0.conv2.weight", 1),)


@pytest.mark.parametrize(("name", "in_shape", "classes", "_"), PAPERS)
def test_units_fit_the_shapes(name, in_shape, classes, _):
    model = build_model(name, in_shape, classes, seed=0)
    named = tensors_of(model)
    for group in unit_groups(model):
        assert all(named[row].shape[0] == group.size for row in group.rows)
        assert all(named[col].shape[1] == group.size * repeat for col, repeat in group.cols)
    assert not set(head_names(model)) & {row for group in unit_groups(model) for row in group.rows}


def test_unknown_structure_is_refused_not_guessed():
    with pytest.raises(TypeError, match="Sigmoid"):  # sigmoid(0) is not 0
        unit_groups(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 2)))
    with pytest.raises(TypeError, match="Bilinear"):
        unit_groups(nn.Bilinear(1, 1, 1))


class Residual(nn.Sequential):
    def forward(self, x):
        h = self[0](x)
        return self[2](h + torch.relu(self[1](h)))


class Centred(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class BasicBlock(nn.Module):
    """As in pre-activation ResNets: its first BatchNorm is of the residual stream."""

    def __init__(self):
        super().__init__()
        self.bn1, self.conv1, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return x[..., 2:-2, 2:-2] + self.conv2(self.conv1(torch.relu(self.bn1(x))))


def test_units_of_ones_own_forward_are_refused_not_guessed():
    """In :func:`built` such networks are traced."""
    layers = [nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)]
    with pytest.raises(TypeError, match="units of a Residual are found with the shape"):
        unit_groups(Residual(*layers))
    with pytest.raises(TypeError, match="layer 2: no units are known for a Centred"):
        unit_groups(nn.Sequential(layers[0], nn.ReLU(), Centred(3, 2)))
    with pytest.raises(TypeError, match="units of a BasicBlock are found with the shape"):
        unit_groups(BasicBlock())
    assert [group.name for group in unit_groups(built(lambda: Residual(*layers), (4,))(0))] == ["0"]


@pytest.mark.parametrize(("name", "in_shape", "classes", "_"), PAPERS)
def test_layers_hold_every_tensor_once_and_end_with_the_head(name, in_shape, classes, _):
    model = build_model(name, in_shape, classes, seed=0)
    layers = layer_groups(model)
    flat = [tensor for layer in layers for tensor in layer]
    assert sorted(flat) == sorted(tensors_of(model))
    assert len(set(flat)) == len(flat)
    assert layers[-1] == head_names(model)


def test_layers_of_the_fedpart_net_are_the_papers():
    model = build_model("fedpart-cnn", (3, 32, 32), 10, seed=0)
    sizes = [sum(tensors_of(model)[name].numel() for name in layer) for layer in layer_groups(model)]
    assert sizes == [456, 2416, 72_180, 28_960, 22_540, 16_920, 10_164, 850]


def test_layers_of_a_resnet_keep_batch_norm_with_its_convolution():
    layers = layer_groups(build_model("resnet18", (3, 32, 32), 10, seed=0))
    assert len(layers) == 21  # stem, 16 convolutions, 3 shortcuts, head
    assert layers[0] == ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")
    assert layers[-1] == ("fc.weight", "fc.bias")


class LlamaRMSNorm(nn.Module):
    """As transformers has it: of no class of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm3d(5), nn.InstanceNorm2d(5, affine=True), nn.RMSNorm(5), nn.GroupNorm(1, 5), LlamaRMSNorm()]
)
def test_every_normalisation_is_in_its_layers_group(norm):
    """And stays with FedBN's clients."""
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 2))
    assert [{name[0] for name in names} for names in layer_groups(model)] == [{"0", "1"}, {"2"}]
    assert {name[0] for name in FedBN.personal_names(SimpleNamespace(model=model))} == {"1"}


def test_a_layer_with_normed_weights_is_no_normalisation() -> None:
    class NormedLinear(nn.Linear):
        pass

    assert len(layer_groups(nn.Sequential(nn.Linear(4, 5), NormedLinear(5, 2)))) == 2


@pytest.mark.parametrize("name", [name for name in model_names() if not name.startswith("resnet")])
def test_a_relu_follows_every_hidden_layer(name: str) -> None:
    """Without one two layers are one: LeNet-5's fully connected layers once had none."""
    model = build_model(name, (1, 32, 32), 10, 0)
    kinds = ["".join("L" if isinstance(m, nn.Linear | nn.Conv2d) else "r" * isinstance(m, nn.ReLU)) for m in model]
    assert "".join(kinds) == "Lr" * (len(unit_groups(model))) + "L"


def test_lenet5_is_the_one_of_the_papers() -> None:
    """conv 6 and 16 of 5x5, each with ReLU and 2x2 max-pooling, linear 120-84 with ReLU, output."""
    model = build_model("lenet5", (3, 32, 32), 10, 0)
    t = tensors_of(model)
    x = torch.randn(4, 3, 32, 32)
    h = x
    for k in (1, 2):
        h = F.max_pool2d(torch.relu(F.conv2d(h, t[f"conv{k}.weight"], t[f"conv{k}.bias"])), 2)
    h = h.flatten(1)
    for k in (1, 2):
        h = torch.relu(F.linear(h, t[f"fc{k}.weight"], t[f"fc{k}.bias"]))
    torch.testing.assert_close(model(x), F.linear(h, t["fc3.weight"], t["fc3.bias"]))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(2, 2), (5, 8), (9, 3)])
def test_pooling_without_a_gradient_is_torchs(size: tuple[int, int], layout: torch.memory_format) -> None:
    """Odd borders, equal numbers, infinities and NaN as well."""
    x = torch.randint(-3, 3, (4, 3, *size), generator=torch.Generator().manual_seed(0)).float()
    x[0, 0, 0, 0], x[1, 0, 1, 0], x[2, 0, 0, 1] = -torch.inf, torch.inf, torch.nan
    x = x.contiguous(memory_format=layout)
    expected = F.max_pool2d(x, 2)
    with torch.no_grad():
        pooled = MaxPool()(x)
    assert torch.equal(pooled.nan_to_num(), expected.nan_to_num())
    assert torch.equal(pooled.isnan(), expected.isnan())
    assert pooled.stride() == expected.stride()
    assert MaxPool()(x.requires_grad_()).grad_fn is not None


CONVOLUTIONS = [
    (size, kernel, stride, padding)
    for size in ((1, 1), (2, 1), (2, 3), (4, 2))
    for kernel in (1, 2, 3, 5, 7)
    for stride in (1, 2, 3)
    for padding in range(min(kernel, 4))
    if min(size) + 2 * padding >= kernel
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_trimmed_convolution_computes_what_torchs_does(layout: torch.memory_format) -> None:
    """Output and gradients, for inputs that are smaller than the kernel; the kernel's unused places get exactly 0."""
    draws = torch.Generator().manual_seed(0)
    for size, kernel, stride, padding in CONVOLUTIONS:
        case = f"{size} {kernel} {stride} {padding}"
        layer = nn.Conv2d(6, 4, kernel, stride, padding, groups=2).to(memory_format=layout)  # type: ignore[call-overload]
        x = torch.randn(3, 6, *size, generator=draws).contiguous(memory_format=layout).requires_grad_()
        found = []
        for module, given in ((copy.deepcopy(layer).double(), x.double()), (layer, x)):
            trim_kernels(module)  # float64 is not trimmed
            output = module(given)
            found.append((output, *torch.autograd.grad((output**2).sum(), (x, module.weight, module.bias))))
        for expected, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine.double(), expected.double(), rtol=1e-4, atol=1e-4, msg=case)
        assert torch.equal(found[1][2] == 0, found[0][2] == 0), case


@pytest.mark.parametrize(
    ("kernel", "shape", "said"),
    [
        (5, (1, 1, 2, 2), r"padded input size per channel: \(2 x 2\). Kernel size: \(5 x 5\)"),
        ((7, 3), (1, 1, 4, 1), r"padded input size per channel: \(6 x 3\). Kernel size: \(7 x 3\)"),
        (3, (1, 2, 1, 1), r"weight of size \[1, 1, 3, 3\], expected input\[1, 2, 1, 1\] to have 1 channels"),
        (3, (2,), r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv2d"),
    ],
)
def test_an_input_that_does_not_fit_a_trimmed_convolution_is_refused_as_by_torch(
    kernel: Any, shape: tuple[int, ...], said: str
) -> None:
    layer = nn.Conv2d(1, 1, kernel, padding=0 if kernel == 5 else 1)
    trim_kernels(layer)
    with pytest.raises(RuntimeError, match=said):
        layer(torch.randn(shape))


def test_a_convolution_that_was_changed_after_it_was_made_computes_what_torchs_does() -> None:
    """Its stride or padding is a number, its weight smaller than its kernel_size says, or it reads padding alone."""
    layers, x = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)] + [nn.Conv2d(1, 1, 2, 4, 2)], torch.randn(1, 1, 2, 1)
    vars(layers[0])["stride"] = vars(layers[1])["padding"] = 2
    layers[2].weight = nn.Parameter(torch.randn(1, 1, 2, 2))
    for layer in layers:
        expected = layer(x)
        trim_kernels(layer)
        torch.testing.assert_close(layer(x), expected)


def test_a_trimmed_convolution_is_compiled_without_a_break() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=1)
    trim_kernels(layer)
    x = torch.randn(1, 1, 1, 1)
    assert torch.allclose(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize(("padding", "more"), [("same", {}), (1, {"dilation": 2}), (1, {"padding_mode": "circular"})])
def test_a_convolution_of_another_kind_stays_torchs(padding: int | str, more: dict[str, Any]) -> None:
    layer, x = nn.Conv2d(2, 2, 3, padding=padding, **more), torch.randn(1, 2, 2, 2)
    if "dilation" in more:
        x = torch.randn(1, 2, 3, 3)
    expected = layer(x)
    trim_kernels(layer)
    assert torch.equal(layer(x), expected)


def test_a_network_runs_with_other_tensors_as_torchs_functional_call_does() -> None:
    """Some of them, a tied one in both its places; afterwards its own are back."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    module[2].weight = module[0].weight
    network, x = Network(module), torch.randn(5, 4)
    mine, before = network.tensors, module(x)
    for names in (mine, ["0.weight", "3.running_mean", "4.bias"]):
        other = {name: torch.randn_like(mine[name]) ** 2 for name in names}
        assert torch.equal(network(x, other).logits, functional_call(module, other, (x,)))
        assert torch.equal(module(x), before)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_old_hooks_compute_are_refused(norm):
    """A copy fails after a step; the parametrizations of the same name are taken."""
    said = r"^model = Linear: has a (Weight|Spectral)Norm of torch\.nn\.utils; allowed is that of .*parametrizations"
    with pytest.raises(UserError, match=said):
        adopted(norm(nn.Linear(2, 2)), (2,))
    adopted(getattr(nn.utils.parametrizations, norm.__name__)(nn.Linear(2, 2)), (2,))
