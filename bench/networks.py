"""``python -m bench.networks``: which methods train which networks; a table for docs/own-network.md.

Two rounds of two clients with 20 of scikit-learn's digits each, as 32 x 32 images, for each network and method. A
method *runs* where no client was dropped, no round abandoned, and the training loss is finite and lower in the second
round than in the first, with 2 local epochs or, if not, with 8 or 40. A pair that runs by ``--out`` is left out.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from bench.flower_box import PROJECT
from bench.measures import commit, run_local
from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.section import Value
from fedsub_app.common.tensors import Json
from fedsub_app.common.text import markdown
from fedsub_app.models import build_model, unit_groups
from fedsub_app.models.sources import for_channels
from fedsub_app.runs.config import applicable_keys
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.recorded import RunFailed

OUT = PROJECT / "bench/results/networks.json"
IN_SHAPE, CLASSES, ROUNDS = (1, 32, 32), 10, 2
EPOCHS = (2, 8, 40)  # local ones; the next where the loss does not fall
Shape = tuple[int, ...]
BASE: dict[str, Value] = {
    "dataset": "digits", "image-size": 32, "train-per-class": 4, "test-per-class": 4, "partition": "iid",
    "num-clients": 2, "num-rounds": ROUNDS, "batch-size": 10, "lr": 0.05, "eval-every": ROUNDS,
    "checkpoint-every": ROUNDS,
}  # fmt: skip
# Keys with which two rounds are enough to see that a method trains: FedPart has one layer in both, FedPeWS's warm-up
# ends, and adaptive servers make steps that show.
OF_METHOD: dict[str, dict[str, Value]] = {
    "fedadam": {"fedadam.lr": 0.1},
    "fedyogi": {"fedyogi.lr": 0.1},
    "fedadagrad": {"fedadagrad.lr": 0.1},
    "fedpac": {"fedpac.lambda": 0.1},
    "fedrep": {"fedrep.personal-epochs": 4, "fedrep.shared-epochs": 8},
    "fedpart": {"optimizer": "adam", "lr": 0.003, "fedpart.full-rounds": 0, "fedpart.rounds-per-group": ROUNDS},
    "fedpews": {"fedpews.warmup-rounds": 1},
    "heterofl": {"heterofl.widths": "1, 0.5"},
    "fedrolex": {"fedrolex.widths": "1, 0.5"},
    "subfedavg": {"validation-fraction": 0.2, "subfedavg.score": 0.0},
    "fedpm": {"lr": 1.0},
    **{name: {f"{name}.widths": "0.5, 1"} for name in ("fjord", "feddrop", "fiarse")},
    **{
        name: {"trainable": "lora"}
        for name in ("fedit", "ffa-lora", "fedsa-lora", "flexlora", "flora", "fedex-lora", "hetlora")
    },
}


# --- networks that no package offers in small -------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """A hidden layer and an output layer, in a class of a user's own."""

    def __init__(self, in_shape: Shape, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(math.prod(in_shape), width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.output(torch.relu(self.hidden(x.flatten(1))))
        return logits


class Residual(nn.Module):
    """Two residual blocks with GroupNorm between two convolutions and a Linear."""

    def __init__(self, in_shape: Shape, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_shape[0], width, 3, 2, 1), nn.GroupNorm(4, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.GroupNorm(8, 2 * width),
                nn.ReLU(),
                nn.Conv2d(2 * width, width, 3, padding=1),
                nn.GroupNorm(4, width),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def resnet50(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return resnet50 with one narrow bottleneck a stage."""
    blocks = models.resnet.Bottleneck
    return for_channels(models.ResNet(blocks, [1, 1, 1, 1], num_classes, width_per_group=8), in_shape[0])


def vgg(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a VGG with BatchNorm, four convolutions and one Linear."""
    features = models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=True)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes)
    return for_channels(nn.Sequential(features, *head), in_shape[0])


def mobilenet(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a MobileNetV2 of three stages."""
    stages = [[1, 16, 1, 1], [4, 24, 1, 2], [4, 32, 1, 2]]
    return for_channels(models.MobileNetV2(num_classes, 0.5, stages), in_shape[0])


def efficientnet(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return an EfficientNet of three stages."""
    sizes = ((1, 3, 1, 16, 16, 1), (4, 3, 2, 16, 24, 1), (4, 5, 2, 24, 40, 1))
    stages = [models.efficientnet.MBConvConfig(*size) for size in sizes]
    return for_channels(models.EfficientNet(stages, 0.2, num_classes=num_classes, last_channel=160), in_shape[0])


def densenet(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a DenseNet of two blocks of three layers."""
    return for_channels(models.DenseNet(8, (3, 3), 16, num_classes=num_classes), in_shape[0])


def convnext(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a ConvNeXt of three stages."""
    stages = [models.convnext.CNBlockConfig(*sizes) for sizes in ((16, 32, 1), (32, 64, 1), (64, None, 1))]
    return for_channels(models.ConvNeXt(stages, num_classes=num_classes), in_shape[0])


def swin(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a Swin Transformer of two stages."""
    sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 24, "window_size": [4, 4]}
    network = models.SwinTransformer(depths=[2, 2], num_heads=[2, 4], num_classes=num_classes, **sizes)
    return for_channels(network, in_shape[0])


def vit(in_shape: Shape, num_classes: int) -> nn.Module:
    """Return a ViT of two layers, patches of 8 x 8."""
    network = models.VisionTransformer(in_shape[1], 8, 2, 2, 32, 64, num_classes=num_classes)
    network.heads[0] = nn.Linear(32, num_classes)  # theirs is of zeros, with which FedBABU's body gets no gradient
    return for_channels(network, in_shape[0])


class Bert(nn.Module):
    """A BERT of two layers that reads an image's rows as the embeddings of a text."""

    def __init__(self, in_shape: Shape, num_classes: int) -> None:
        super().__init__()
        transformers = import_module("transformers")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.BertConfig(**sizes, vocab_size=1, num_labels=num_classes, attn_implementation="eager")
        self.rows = nn.Linear(in_shape[2], 32)
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Any:
        """Return an output with logits."""
        return self.bert(inputs_embeds=self.rows(x.mean(1)))


NETWORKS: dict[str, str] = {  # name in the table -> model
    "lenet5": "lenet5",
    "fedpews-cnn": "fedpews-cnn",
    "feature-mlp": "feature-mlp",
    "two-layer `nn.Module`": "bench.networks:TwoLayers",
    "residual, GroupNorm": "bench.networks:Residual",
    "VGG, small": "bench.networks:vgg",
    "ViT, small": "bench.networks:vit",
    "DenseNet, small": "bench.networks:densenet",
    "ConvNeXt, small": "bench.networks:convnext",
    "EfficientNet, small": "bench.networks:efficientnet",
    "MobileNetV2, small": "bench.networks:mobilenet",
    "squeezenet1_1": "torchvision:squeezenet1_1",
    "resnet50, narrow": "bench.networks:resnet50",
    "Swin, small": "bench.networks:swin",
    "transformers' BERT, small": "bench.networks:Bert",
    "timm's resnet10t": "timm:resnet10t",
}
# A row takes a quarter of an hour to hours: they run where `--only` names them.
IN_FULL: dict[str, str] = {
    "mobilenet_v3_small": "torchvision:mobilenet_v3_small",
    "resnet18": "torchvision:resnet18",
    "resnet18-gn": "resnet18-gn",
    "mobilenet_v2": "torchvision:mobilenet_v2",
    "efficientnet_b0": "torchvision:efficientnet_b0",
    "resnet50": "torchvision:resnet50",
    "convnext_tiny": "torchvision:convnext_tiny",
    "densenet121": "torchvision:densenet121",
    "vit_b_16": "torchvision:vit_b_16",
    "vgg11_bn": "torchvision:vgg11_bn",
}
OPTIONS = {"torchvision:vit_b_16": "image_size=32"}  # model -> its model-options
PACKAGES = {"timm's resnet10t": "timm", "transformers' BERT, small": "transformers"}


def outcome(model: str, method: str) -> str:
    """Return "" where the method trains the network, else the reason why not, one line."""
    reason = ""
    for epochs in EPOCHS:
        keys = applicable_keys(BASE | network_keys(model) | {"method": method} | OF_METHOD.get(method, {}))
        try:
            losses = train_losses(keys | {"local-epochs": epochs})
        except (UserError, RunFailed) as error:
            return str(error)
        if all(map(math.isfinite, losses)) and losses[-1] < losses[0]:
            return ""
        reason = f"the loss does not fall: {', '.join(f'{loss:.3f}' for loss in losses)}"
    return reason


def network_keys(model: str) -> dict[str, Value]:
    """Return the keys of a network."""
    keys: dict[str, Value] = {"model": model}
    return keys | ({"model-options": OPTIONS[model]} if model in OPTIONS else {})


def train_losses(keys: dict[str, Value]) -> list[float]:
    """Return the training loss of each round; :class:`UserError` where a client was dropped or a round abandoned."""
    lines = run_local(keys)[0][1:]
    for line in lines:
        if line["status"] != "ok" or line["dropped"]:
            raise UserError(line.get("abandoned") or line["dropped"][0]["reason"])
    return [line["train-loss"] for line in lines]


def structure(model: str) -> Json:
    """Return a network's parameters and units."""
    network = build_model(model, IN_SHAPE, CLASSES, 0, options=OPTIONS.get(model, ""))
    try:
        groups = unit_groups(network)
    except TypeError:
        groups = ()
    units = {"groups": len(groups), "units": sum(group.size for group in groups)}
    return {"parameters": sum(p.numel() for p in network.parameters()), **units}


def table(results: Json) -> str:
    """Return the results as Markdown: a row a network, one for each reason of what does not run, the methods tried."""
    tried = [method for method in METHODS if all(method in found["methods"] for found in results.values())]
    rows, reasons = [], []
    for name, found in results.items():
        failed = {method: found["methods"][method] for method in tried if found["methods"][method]}
        ran = f"{len(tried) - len(failed)} of {len(tried)}"
        units = f"{found['units']:,} in {found['groups']}" if found["units"] else "none"
        rows.append([name, f"{found['parameters']:,}", units, ran, ", ".join(failed) or "–"])
        for reason in dict.fromkeys(failed.values()):
            reasons.append([name, ", ".join(method for method in failed if failed[method] == reason), reason])
    text = markdown(("network", "parameters", "units, in groups", "methods that run", "not"), rows)
    why = f"\n\n{markdown(('network', 'methods', 'why not'), reasons)}" if reasons else ""
    return f"{text}{why}\n\nTried: {', '.join(tried)}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the networks in turn and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.networks", description=str(__doc__).partition("\n")[0])
    every = NETWORKS | IN_FULL
    parser.add_argument("--only", nargs="+", choices=every, default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    options = parser.parse_args(arguments)
    results = json.loads(options.out.read_text())["networks"] if options.out.exists() else {}
    for name in options.only:
        if (package := PACKAGES.get(name)) and not find_spec(package):
            print(f"{name}: needs the package {package}", file=sys.stderr)
            continue
        start, found = time.perf_counter(), structure(every[name])
        found["methods"] = results.get(name, {}).get("methods", {})
        for method in [method for method in options.methods if found["methods"].get(method) != ""]:
            found["methods"][method] = outcome(every[name], method)
            results[name] = found
            ordered = {name: results[name] for name in every if name in results}
            content = json.dumps({"commit": commit(), "networks": ordered}, indent=1)
            write_atomic(options.out, f"{content}\n".encode())
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
