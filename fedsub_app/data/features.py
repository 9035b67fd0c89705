"""Features of images by two pretrained networks: each image goes through them once, and the features are kept.

Hu, Tang, Kyrillidis, Jermaine: Federated Learning Over Images, ICCV 2023, Section 4.1 and Appendix A: torchvision's
ResNet-101 (2,048 features) and DenseNet-121 (1,024), trained on ImageNet, without their last linear layer. The paper's
text has the two numbers the other way round. As in the authors' code DenseNet's features are averaged without the ReLU
that torchvision puts before the average. ``efficientnet-lite0``, 1,280 features, is not the paper's.

Images are resized to 256 pixels (the shorter side), cropped to the central 224 and normalised, as torchvision publishes
for these weights. Training images of the sets that the paper names (birds, flowers, aircraft, textures) are instead
cut out, resized and flipped at random, once: a sample has the same features in every round, and with every seed.

The cache folder keeps features by the content of the weights' files and by the images: by pixels in memory, else by the
files' names, sizes, times of change and a few files' content. A file is written after each ``GROUP`` images, so that a
killed extraction goes on where it was. One of several processes extracts, on a GPU if there is one; the others wait.
"""

import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedsub_app.common.device import threads
from fedsub_app.common.errors import UserError, explained, one_line
from fedsub_app.common.files import write_atomic
from fedsub_app.common.machine import cores
from fedsub_app.common.own_code import packaged
from fedsub_app.common.progress import Progress
from fedsub_app.common.seeds import drawing
from fedsub_app.common.tensors import CPU
from fedsub_app.data.files import Pictures, cache_folder, unwritable
from fedsub_app.data.settings import Features

log = logging.getLogger("fedsub")

RANDOM = "-random"
CROPPED = ("cub200", "flowers102", "fgvc-aircraft", "dtd")  # sets whose training images are cropped at random
LITE0 = "efficientnet-lite0"
SIZES = {"resnet101": 2048, "densenet121": 1024, LITE0: 1280}  # features of an image
LITE = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}  # of the pixels that EfficientNet-Lite was trained with
GROUP = 128  # images of a file: half a minute's work of a CPU's core
BATCH = 16
DOWNLOAD_SILENCE_S = 30.0


@dataclass(frozen=True)
class Backbone:
    """A network: its name, the file of its weights (None: random weights) and the file's SHA-256."""

    name: str
    file: Path | None
    sha256: str = ""

    def build(self) -> nn.Module:
        """Return the network from images to features, in evaluation mode."""
        if self.name == LITE0:
            from fedsub_app.models.sources import from_source

            return from_source(f"package:{LITE0}", (3, 224, 224), 1000, {"num_classes": 0}).eval()
        from torchvision import models

        with drawing(CPU, "backbone", self.name):
            net: nn.Module = getattr(models, self.name)(weights=None)
        if self.file:
            with explained(f"{self.file}: not torchvision's weights of {self.name}", 200):
                state = torch.load(self.file, map_location="cpu", weights_only=True)
                # DenseNet's file has names of before torchvision 0.3: "denselayer1.norm.1.weight".
                new_names = {name: re.sub(r"\.(norm|relu|conv)\.([12])\.", r".\1\2.", name) for name in state}
                net.load_state_dict({new_names[name]: tensor for name, tensor in state.items()})
        if self.name == "densenet121":
            return nn.Sequential(net.get_submodule("features"), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        net.fc = nn.Identity()
        return net.eval()


@lru_cache(maxsize=2)
def backbones(features: Features, folder: str | None) -> tuple[Backbone, ...]:
    """Return the networks; look for their weights and, if ``folder`` is None, download missing ones."""
    if features == LITE0:
        file = packaged(features)
        return (Backbone(features, file, hashlib.sha256(file.read_bytes()).hexdigest()),)
    from torchvision import models

    published = {"resnet101": models.ResNet101_Weights, "densenet121": models.DenseNet121_Weights}
    if features.endswith(RANDOM):
        return tuple(Backbone(name, None, "random") for name in published)
    files = []
    for name, kind in published.items():
        weights = kind.IMAGENET1K_V1
        file = Path(folder or f"{torch.hub.get_dir()}/checkpoints").expanduser() / Path(weights.url).name
        try:
            if not file.exists() and not folder:
                with impatient():
                    weights.get_state_dict(progress=False, check_hash=True)
            with file.open("rb") as content:
                files.append(Backbone(name, file, hashlib.file_digest(content, "sha256").hexdigest()))
        except Exception as error:  # no network, a full disk, a wrong checksum
            reason = "not there" if isinstance(error, FileNotFoundError) else one_line(error)[:200]
            raise UserError(f"features = {features!r}: needs {file}, from {weights.url} ({reason})") from error
    return tuple(files)


@contextmanager
def impatient() -> Iterator[None]:
    """Give up a download after half a minute of silence: a network that drops all packets blocks without end."""
    silence = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(silence)


def notes(features: Features, folder: str | None) -> tuple[str, ...]:
    """Return a run's notes on its features: the weights' files, or that the weights are random."""
    if features.endswith(RANDOM):
        return ("features of backbones with random weights, not pretrained",)
    names = []
    for net in backbones(features, folder):
        assert net.file
        published = net.sha256.startswith(net.file.stem.split("-")[-1])
        suffix = "" if published else ", not torchvision's published file"
        names.append(f"{net.file.name} (sha256 {net.sha256[:8]}{suffix})")
    return (f"features by {', '.join(names)}",)


def extracted(name: str, pictures: Pictures, random_crops: bool, features: Features, folder: str | None) -> Tensor:
    """Return the features of some pictures, float32 ``[n, features]``, from the cache or by the networks.

    ``name``: of the data set, for the log. ``random_crops``: cut out and flip at random, each image with draws of its
    own, instead of the central crop. ``features``, ``folder``: the settings ``features`` and ``backbone-dir``.
    """
    networks = backbones(features, folder)
    weights = hashlib.sha256("".join(f"{net.name} {net.sha256}" for net in networks).encode()).hexdigest()[:16]
    crops = "random" if random_crops else "central"
    kept = cache_folder() / "features" / f"{features}-{weights}" / f"{name}-{pictures.digest}-{crops}"
    cached = torch.empty(len(pictures.images), sum(SIZES[net.name] for net in networks))
    known = _read(kept, cached)
    if not known[pictures.index].all():
        try:
            cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            kept.mkdir(parents=True, exist_ok=True)
            with FileLock(kept / ".lock"):
                known = _read(kept, cached)  # another process may have extracted them meanwhile
                missing = pictures.index[~known[pictures.index]].unique()
                header = {"dataset": name, "weights": ", ".join(f"{net.name} {net.sha256}" for net in networks)}
                for group, rows in _computed(name, pictures, missing, random_crops, networks):
                    cached[group] = rows
                    content = save({"index": group, "features": rows}, header)
                    write_atomic(kept / f"{int(group[0]):07d}-{uuid4().hex[:8]}.safetensors", content)
        except OSError as error:
            raise unwritable(kept, error) from error
    return cached[pictures.index]


def _read(folder: Path, cached: Tensor) -> Tensor:
    """Read a cache folder into ``cached``; returns which of its rows are known. Damaged files are deleted."""
    known = torch.zeros(len(cached), dtype=torch.bool)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                index, rows = file.get_tensor("index"), file.get_tensor("features")
            cached[index] = rows
            known[index] = True
        except (SafetensorError, IndexError, RuntimeError):
            log.warning("%s: damaged, its images are extracted again", path)
            path.unlink(missing_ok=True)
    return known


def _computed(
    name: str, pictures: Pictures, missing: Tensor, random_crops: bool, networks: Sequence[Backbone]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the numbers of some images and their features, a group after the other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built = [network.build().to(device).to(memory_format=torch.channels_last) for network in networks]
    transform = _transform(random_crops, LITE if networks[0].name == LITE0 else {})
    log.info("features of %d images of %s, on %s", len(missing), name, device)
    progress, done = Progress(f"features of {name}", len(missing)), 0
    for group in missing.split(GROUP):
        rows = []
        for batch in group.split(BATCH):
            x = torch.stack([transform(pictures.read(number), number) for number in batch.tolist()])
            x = x.to(device, memory_format=torch.channels_last)  # 1.8 times as fast on a CPU
            with torch.inference_mode(), threads(cores()):
                rows.append(torch.cat([network(x) for network in built], dim=1).cpu())
            done += len(batch)
            progress.update(done)
        yield group, torch.cat(rows)


def _transform(random_crops: bool, pixels: Mapping[str, list[float]]) -> Callable[[Image.Image, int], Tensor]:
    """Return a function from an image and its number to the networks' input, float32 ``[3, 224, 224]``."""
    from torchvision.models import ResNet101_Weights
    from torchvision.transforms import v2

    central = ResNet101_Weights.IMAGENET1K_V1.transforms(**pixels)  # DenseNet's are the same
    if not random_crops:
        return lambda image, number: central(image)
    steps = [v2.PILToTensor(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(central.mean, central.std)]
    random = v2.Compose(steps)

    def cut_out(image: Image.Image, number: int) -> Tensor:
        with drawing(CPU, "crop", number):
            made: Tensor = random(image)
        return made

    return cut_out
