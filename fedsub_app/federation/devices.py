"""Device classes: what a client's device can hold, how fast it computes and sends, and how often it is there.

The setting ``devices`` names a preset (conf/devices/classes/) or a user's file with a table ``[[class]]`` for each
class, whose keys are the fields of :class:`Device`. The settings of a run hold the content of a user's file, so that
neither a node nor a resumed run reads it again.
"""

import json
import re
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationError

from fedsub_app.common.conf_files import conf_folder, is_file, read_toml
from fedsub_app.common.late import Late
from fedsub_app.common.section import AmountOrNone, Entry, NonNegative, fault

if TYPE_CHECKING:
    from torch import Tensor

torch, seeds = Late("torch"), Late("fedsub_app.common.seeds")  # torch takes seconds


def _named(name: str) -> str:
    if len(name) > 40 or not re.fullmatch(r"[a-z0-9][a-z0-9.]*(-[a-z0-9.]+)*", name):
        raise ValueError("must be lower-case letters a to z, digits and dots, in words joined by '-', at most 40")
    return name


class Device(Entry):
    """One class of devices; a speed or a memory of 0 has no limit."""

    name: Annotated[str, AfterValidator(_named)]  # in reports
    share: Annotated[float, Field(gt=0, le=1)]  # fraction of the clients; those of all classes add up to 1
    width: Annotated[float, Field(gt=0, le=1)] = 1.0  # fraction of each hidden layer's units that it can hold
    flops_per_second: AmountOrNone = None  # training speed: 2 x MAC, forward and backward
    down_mbps: AmountOrNone = None  # from the server, 10^6 bits a second
    up_mbps: AmountOrNone = None
    memory_mb: AmountOrNone = None  # for training, 10^6 bytes
    availability: Annotated[float, Field(gt=0, le=1)] = 1.0  # chance of being there when a round draws its clients
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0  # chance of vanishing within a round, after the download
    watts: NonNegative = 0.0  # power while it downloads, trains and uploads

    def seconds(self, down: float, flops: float, up: float) -> float:
        """Return the time that a client takes: bytes down, FLOPs and bytes up, each over its speed."""
        amounts = ((8e-6 * down, self.down_mbps), (flops, self.flops_per_second), (8e-6 * up, self.up_mbps))
        return sum(amount / speed for amount, speed in amounts if speed)


class _File(Entry):
    class_: Annotated[tuple[Device, ...], Field(min_length=1, strict=False)]


class Devices:
    """The clients' devices: the clients, in an order that the seed shuffles, are cut into the classes' shares.

    ``text``: the setting ``devices``, as :func:`checked` returns it.
    """

    def __init__(self, text: str, num_clients: int, seed: int) -> None:
        self.classes, self.seed, start = _classes(text), seed, 0
        order = torch.randperm(num_clients, generator=seeds.generator(seed, "devices")).tolist()
        self._of: dict[int, Device] = {}
        for device, total in zip(self.classes, accumulate(device.share for device in self.classes), strict=True):
            self._of |= dict.fromkeys(order[start : (start := round(num_clients * total))], device)

    def of(self, client: int) -> Device:
        return self._of[client]

    def available(self, server_round: int) -> list[bool]:
        """Return which clients are there when a round draws its clients."""
        draws = self._draws(server_round, "availability").tolist()
        return [draw < self._of[client].availability for client, draw in enumerate(draws)]

    def vanishes(self, client: int, server_round: int) -> bool:
        return float(self._draws(server_round, "drop")[client]) < self._of[client].drop

    @lru_cache(maxsize=4)  # noqa: B019  (devices_of keeps few of these objects)
    def _draws(self, server_round: int, purpose: str) -> "Tensor":
        draws = seeds.generator(self.seed, server_round, purpose)
        return torch.rand(len(self._of), dtype=torch.float64, generator=draws)  # type: ignore[no-any-return]


devices_of = lru_cache(maxsize=4)(Devices)


def presets() -> dict[str, Path]:
    """Return the files of the device classes that come with the package, by name."""
    return {path.stem: path for path in sorted((conf_folder() / "devices" / "classes").glob("*.toml"))}


def checked(text: str) -> str:
    """Return ``devices``, a file's content as JSON; ValueError or UserError (TOML) names the wrong class and key."""
    contents = [device.model_dump(by_alias=True, exclude_defaults=True) for device in (_classes(text) if text else ())]
    return json.dumps(contents) if is_file(text) else text


def _classes(text: str) -> tuple[Device, ...]:
    path = Path(text) if is_file(text) else presets().get(text)
    if text.startswith("["):
        content = {"class": json.loads(text)}
    elif path and path.is_file():
        content = read_toml(path)
    else:
        raise ValueError(f"allowed are {', '.join(presets())}, or a file of yours, <name>.toml")
    try:
        classes = _File.model_validate(content).class_
    except ValidationError as error:
        raise ValueError(fault(error)) from None
    names = [device.name for device in classes]
    if len({*names}) < len(names):
        raise ValueError(f"two classes of one name in {', '.join(names)}")
    if abs((total := sum(device.share for device in classes)) - 1) > 1e-6:
        raise ValueError(f"the shares add up to {total:g}: must be 1")
    return classes
