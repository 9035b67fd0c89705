"""Images that are kept as bytes: what is taken of them has the bits that float32 images had."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import result
from pretended_gpu import pretended_gpu
from torch import Tensor

import fedsub_app.common.machine
import fedsub_app.data.dataset
import fedsub_app.training.workplace
from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.common.section import Value
from fedsub_app.data import Dataset, Samples, load_dataset
from fedsub_app.data.samples import normalised
from fedsub_app.runs.config import resolve
from fedsub_app.runs.evaluation import GlobalTest
from fedsub_app.training.workplace import workplace

Run = Callable[..., Any]
WAYS = ("standard", "half", "none")


def images(count: int, channels: int, height: int = 9, width: int = 7) -> Tensor:
    """Random images of bytes, as the readers give them."""
    found = np.random.default_rng(channels).integers(0, 256, (count, channels, height, width), np.uint8)
    return torch.from_numpy(found)


def as_it_was(train: Tensor, test: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """The arithmetic of the versions that kept all samples as float32."""
    train, test = train.float().div_(255), test.float().div_(255)
    mean = deviation = torch.full((train.shape[1],), 0.5)
    if how == "standard":
        total, squares = torch.zeros(2, train.shape[1], dtype=torch.float64)
        for chunk in train.split(256):
            pixels = chunk.double().flatten(2)
            total += pixels.sum(2).sum(0)
            squares += pixels.square_().sum(2).sum(0)
        count = train[:, 0].numel()
        variance = (squares / count - (total / count) ** 2).clamp_min(0)
        mean, deviation = (total / count).float(), variance.sqrt().float()
        deviation[deviation < 1e-6] = 1.0
    if how != "none":
        for x in (train, test):
            x.sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))
    rows = (x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format) for x in (train, test))
    train, test = (x.permute(0, 3, 1, 2) for x in rows)
    return train, test


def floats(train: Tensor, test: Tensor, how: str) -> tuple[Samples, Samples]:
    """What :func:`normalised` returned, had it kept float32."""
    before = as_it_was(train, test, how)
    return Samples(before[0]), Samples(before[1])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("how", WAYS)
def test_what_is_taken_has_the_same_bits_and_layout(how: Any, channels: int) -> None:
    x = images(700, channels)
    index = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:100]
    for found, before in zip(normalised(x[:600], x[600:], how), as_it_was(x[:600], x[600:], how), strict=True):
        assert found.stored.dtype == torch.uint8
        assert found.nbytes * 4 == before.nbytes
        assert (len(found), found.shape) == (len(before), before.shape)
        chosen = index[index < len(before)]
        pairs = [(found[:], before), (found[chosen], before[chosen]), (found[3:50], before[3:50])]
        for ours, theirs in pairs:
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
        assert torch.equal(found.darkest(), before.amin((0, 2, 3)))


@pytest.mark.parametrize("axes", [(), (1,)])
def test_grey_images_lie_channels_last_by_their_strides(axes: tuple[int, ...], data_dir: Path) -> None:
    """The axis of their one channel may have any stride; torch chooses convolutions by it."""
    x, y = np.zeros((12, 8, 9, *axes), np.uint8), np.arange(12) % 2
    np.savez(data_dir / "own.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
    found = load({"dataset": "own", "seed": len(axes)}).train_x
    assert found.stored.stride() == found[:].stride() == found[torch.arange(3)].stride() == (72, 1, 9, 1)


def test_a_constant_channel_stays_constant() -> None:
    x = images(40, 3)
    x[:, 1] = 7
    assert torch.equal(normalised(x[:30], x[30:], "standard")[0][:], as_it_was(x[:30], x[30:], "standard")[0])


def test_the_digest_is_of_training_and_test_samples() -> None:
    """Of the labels and the pixels of both, by which a resumed run and the nodes are checked."""
    x, y = images(4, 1), torch.zeros(4, dtype=torch.int64)
    data = Dataset("a", Samples(x), y, y, Samples(x), y, y, 2, ("a",), (), (1, 9, 7))
    others = [replace(data, **{part: Samples(255 - x)}) for part in ("train_x", "test_x")]
    others += [replace(data, **{part: y + 1}) for part in ("train_y", "test_y")]
    assert len({each.digest for each in (data, *others)}) == 5


def write_set(folder: Path, count: int = 60) -> dict[str, Value]:
    """Write a data set of coloured images; returns the keys that name it."""
    x, y = images(count, 3, 16, 16).permute(0, 2, 3, 1).numpy(), np.arange(count) % 5
    half = count // 2
    parts = {"train_images": x[:half], "train_labels": y[:half], "test_images": x[half:], "test_labels": y[half:]}
    np.savez(folder / "own.npz", **parts)  # type: ignore[arg-type]
    return {"dataset": "own", "data_dir": str(folder), "model": "lenet5-bn", "batch_size": 8}


@pytest.mark.parametrize("how", WAYS)
def test_a_run_has_the_same_bits(
    how: str, run_local: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write_set(data_dir) | {"normalise": how, "augment": "crop-flip", "evaluate": "global,global-local"}
    _, bytes_ = run_local("bytes", **keys)
    fedsub_app.data.dataset._load.cache_clear()
    workplace.cache_clear()
    monkeypatch.setattr(fedsub_app.data.dataset, "normalised", floats)
    _, float32 = run_local("float32", **keys)
    fedsub_app.data.dataset._load.cache_clear()
    workplace.cache_clear()
    assert result(bytes_) == result(float32)


def load(keys: dict[str, Value], **more: Value) -> Any:
    named = {name.replace("_", "-"): value for name, value in (keys | more).items()}
    return load_dataset(resolve(named).data)


def test_images_that_are_resized_or_joined_with_grey_ones_are_float32(data_dir: Path) -> None:
    keys = write_set(data_dir)
    assert load(keys).train_x.stored.dtype == torch.uint8
    assert load(keys, image_size=16, seed=1).train_x.stored.dtype == torch.uint8
    assert load(keys, image_size=20).train_x.stored.dtype == torch.float32
    grey = images(60, 1, 16, 16)[:, 0].numpy()
    labels = np.arange(60) % 5
    np.savez(data_dir / "grey.npz", train_images=grey, train_labels=labels, test_images=grey, test_labels=labels)
    assert load(keys, dataset="own+grey").train_x.stored.dtype == torch.float32


def test_memory_is_needed_for_bytes(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write_set(data_dir)
    monkeypatch.setattr(fedsub_app.common.machine, "memory_bytes", lambda: 3 * 60 * 3 * 16 * 16)
    assert len(load(keys, seed=2).train_x) == 30
    with pytest.raises(UserError, match=r"samples of 867 values: 0\.000208 GB in memory"):  # 60 x 867 float32
        load(keys, image_size=17)


def test_memory_is_the_least_of_the_machines_and_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job has a part of it; "max" is no limit."""
    (tmp_path / "job").write_text("4096\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(fedsub_app.common.machine, "LIMITS", [tmp_path / "none", tmp_path / "job", tmp_path / "gone"])
    assert fedsub_app.common.machine.memory_bytes.__wrapped__() == 4096


def test_server_and_clients_of_a_process_share_what_is_on_the_device(data_dir: Path) -> None:
    settings = resolve({name.replace("_", "-"): value for name, value in write_set(data_dir).items()})
    workplace.cache_clear()
    with pretended_gpu():
        place = workplace(settings)
        assert place.test_x.stored.is_cuda
        assert GlobalTest(place.problem, place.device).x is place.test_x
        assert torch.equal(place.train_x[:4].cpu(), place.problem.data.train_x[:4])
    workplace.cache_clear()


def test_the_samples_of_the_clients_that_trained_last_are_kept(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write_set(data_dir) | {"partition": "iid", "num_clients": 3, "method": "fedavg"}
    place = workplace.__wrapped__(resolve({name.replace("_", "-"): value for name, value in keys.items()}))
    largest = max(len(indices) for indices in place.partition.train) * 3 * 16 * 16 * 4
    monkeypatch.setattr(fedsub_app.training.workplace, "KEPT_BYTES", 2 * largest)
    first, second, third = (Client(place, client, 1, {}).x for client in (0, 1, 2))
    later = [Client(place, client, 2, {}).x for client in (2, 1, 0)]
    assert [x is before for x, before in zip(later, (third, second, first), strict=True)] == [True, True, False]
