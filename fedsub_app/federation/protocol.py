"""The wire format: what a client is sent (:class:`Task`) and what it answers (:class:`Update`), as Flower records.

One Flower message carries the parts of all clients that a node hosts. A part is a JSON object and named tensors.
Equal-named tensors of one dtype and shape travel stacked in one array; a tensor object that several parts share (the
global model) travels once; bool tensors travel as bits. So any method's tensors fit without a special case here: whole
models, some layers and their optimizer moments, slices, smaller networks, gathered positions with their masks.

Received tensors may alias the message's bytes: read-only.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedsub_app.common.tensors import Json, Tensors

HEADER, TENSORS = "fedsub.header", "fedsub.tensors"
STYPE = "fedsub.raw"  # little-endian C-order bytes; bools packed by numpy.packbits, a row a tensor
MAX_EXAMPLES = 10**9
GLOBAL = "global/"  # prefix, in an evaluation, of the global model's tensors that a client's own model does not share
DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadReply(Exception):
    """A client's or node's answer is not what was asked; the message is the reason, one line."""


@dataclass(frozen=True)
class Task:
    """What one client is sent in one phase: named tensors and a JSON-able ``config``."""

    client: int
    tensors: Tensors = field(default_factory=dict)
    config: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What one client answers: tensors, metrics (finite numbers), examples it used; or only an ``error``.

    ``state``: the rounds of the durable state that it had before its task and has after it, 0 for none.
    """

    client: int
    tensors: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_examples: int = 0
    error: str = ""
    state: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Spec:
    """What a tensor of an update must be. ``None`` in the shape: any size; ``optional``: may be left out."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    optional: bool = False


def specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Return the specs that ``tensors`` themselves fulfil."""
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def to_tensors(arrays: ArrayRecord) -> Tensors:
    """Flower's record as named CPU tensors."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Named tensors as Flower's record."""
    return ArrayRecord({name: tensor.contiguous() for name, tensor in tensors.items()})


def _encode(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's bytes as an array in C order."""
    values = tensor.detach().cpu()
    if values.dtype == torch.bool:
        return np.packbits(values.numpy())
    if values.dtype == torch.bfloat16:  # NumPy has none
        values = values.contiguous().view(torch.int16)
    return np.ascontiguousarray(values.numpy())


def pack(header: Json, parts: Sequence[tuple[Json, Mapping[str, torch.Tensor]]]) -> RecordDict:
    """Return the records that hold ``header`` and every part's JSON object and tensors."""
    members: dict[tuple[str, torch.dtype, torch.Size], list[int]] = {}
    for number, (_, tensors) in enumerate(parts):
        for name, tensor in tensors.items():
            members.setdefault((name, tensor.dtype, tensor.shape), []).append(number)
    arrays: dict[str, Array] = {}
    index: list[list[Any]] = []
    for (name, dtype, shape), numbers in members.items():
        distinct = {id(parts[number][1][name]): parts[number][1][name] for number in numbers}
        rows = {key: row for row, key in enumerate(distinct)}
        key = f"{len(index)}:{name}"
        data = b"".join(_encode(tensor) for tensor in distinct.values())  # type: ignore[misc]
        arrays[key] = Array(NAMES[dtype], (len(distinct), *shape), STYPE, data)
        index.append([key, numbers, [rows[id(parts[number][1][name])] for number in numbers]])
    text = json.dumps(header | {"parts": [config for config, _ in parts], "index": index}, separators=(",", ":"))
    return RecordDict({HEADER: ConfigRecord({"json": text}), TENSORS: ArrayRecord(arrays)})


def _decode(key: str, array: Array) -> list[torch.Tensor]:
    dtype = DTYPES.get(array.dtype)
    if dtype is None or array.stype != STYPE or not array.shape:
        raise BadReply(f"tensor {key!r}: dtype {array.dtype!r}, stype {array.stype!r}: not fedsub's wire format")
    rows, shape = int(array.shape[0]), tuple(int(size) for size in array.shape[1:])
    count = math.prod(shape)
    row_bytes = (count + 7) // 8 if dtype == torch.bool else count * dtype.itemsize
    if min((rows, *shape)) < 0 or len(array.data) != rows * row_bytes:
        raise BadReply(f"tensor {key!r}: {len(array.data)} bytes, expected {rows * row_bytes} for {array.shape}")
    if dtype == torch.bool:
        bits = np.frombuffer(array.data, np.uint8).reshape(rows, row_bytes)
        return list(torch.from_numpy(np.unpackbits(bits, axis=1, count=count).view(bool)).reshape(rows, *shape))
    if not array.data:
        return list(torch.empty((rows, *shape), dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "buffer is not writable": received tensors are read-only
        return list(torch.frombuffer(array.data, dtype=dtype).reshape(rows, *shape))


def unpack(content: RecordDict) -> tuple[Json, list[tuple[Json, Tensors]]]:
    """Inverse of :func:`pack`.

    Raises
    ------
    BadReply
        The records are not of this format (missing, truncated, of the wrong type).
    """
    try:
        header = json.loads(content.config_records[HEADER]["json"])  # type: ignore[arg-type]
        arrays = content.array_records[TENSORS]
        parts: list[tuple[Json, Tensors]] = [(dict(config), {}) for config in header.pop("parts")]
        for key, numbers, rows in header.pop("index"):
            stack, name = _decode(key, arrays[key]), key.partition(":")[2]
            for number, row in zip(numbers, rows, strict=True):
                parts[number][1][name] = stack[row]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, json.JSONDecodeError) as error:
        raise BadReply(f"not fedsub's wire format ({type(error).__name__}: {error})") from None
    return header, parts


def wire_bytes(content: RecordDict) -> int:
    """Bytes of a message's content as sent: arrays and JSON, without Flower's own envelope."""
    if HEADER not in content.config_records or TENSORS not in content.array_records:
        return 0
    text = content.config_records[HEADER].get("json", "")
    return len(str(text)) + sum(len(array.data) for array in content.array_records[TENSORS].values())


def update_part(update: Update) -> tuple[Json, Tensors]:
    """An update as the part of a message."""
    config = {
        "client": update.client,
        "metrics": update.metrics,
        "num-examples": update.num_examples,
        "error": update.error,
        "state": update.state,
    }
    return config, update.tensors


def read_update(config: Json, tensors: Tensors, expected: Mapping[str, Spec], stacks: dict[int, bool]) -> Update:
    """Return the update in a part, checked against what was asked.

    ``stacks`` holds which arrays are known to be finite; give all parts of one round the same dict.

    Raises
    ------
    BadReply
        Names, shapes, dtypes, finiteness, metrics or ``num-examples`` are not as expected, or the client failed.
    """
    if config.get("error"):
        raise BadReply(f"client failed: {config['error']}")
    missing = [name for name, spec in expected.items() if name not in tensors and not spec.optional]
    if missing:
        raise BadReply(f"tensor {missing[0]!r} is missing" + (f" (and {len(missing) - 1} more)" * (len(missing) > 1)))
    for name, tensor in tensors.items():
        spec = expected.get(name)
        if spec is None:
            raise BadReply(f"tensor {name!r} was not asked for")
        if tensor.dtype != spec.dtype:
            raise BadReply(f"tensor {name!r}: dtype {NAMES[tensor.dtype]}, expected {NAMES[spec.dtype]}")
        if tensor.shape != spec.shape and not _fits(tensor.shape, spec.shape):
            raise BadReply(f"tensor {name!r}: shape {tuple(tensor.shape)}, expected {spec.shape}")
        if not _finite_in_stack(tensor, stacks):
            raise BadReply(f"tensor {name!r}: NaN or infinite values")
    count = config.get("num-examples")
    if type(count) is not int or not 1 <= count <= MAX_EXAMPLES:
        raise BadReply(f"num-examples = {count!r}: must be an integer from 1 to {MAX_EXAMPLES}")
    metrics = config.get("metrics")
    if not isinstance(metrics, dict):
        raise BadReply(f"metrics = {metrics!r}: must be an object of numbers")
    for key, value in metrics.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadReply(f"metric {key!r} = {value!r}: must be a finite number")
    match config.get("state"):
        case [int(before), int(after)] if 0 <= before <= after:
            return Update(int(config["client"]), tensors, metrics, count, state=(before, after))
    raise BadReply(f"state = {config.get('state')!r}: must be two rounds, of its state before and after")


def _fits(sizes: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(sizes) == len(wanted) and all(want in (None, have) for have, want in zip(sizes, wanted, strict=True))


def _finite_in_stack(tensor: torch.Tensor, stacks: dict[int, bool]) -> bool:
    """:func:`finite` in one pass over the array that the tensor is a row of: 20 calls for 1,000 clients, not 10,000."""
    stack = tensor._base
    if stack is None:
        return finite(tensor)
    if id(stack) not in stacks:
        stacks[id(stack)] = finite(stack)
    return stacks[id(stack)] or finite(tensor)


def finite(tensor: torch.Tensor) -> bool:
    """Say whether a tensor holds neither NaN nor infinities."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # one pass; NaN propagates
    return math.isfinite(low.item()) and math.isfinite(high.item())  # a fifth of the time of torch.isfinite
