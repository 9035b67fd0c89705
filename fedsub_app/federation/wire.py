"""The wire format: tasks and updates (protocol.py) as Flower records.

One Flower message carries the parts of several clients of a node. A part is a JSON object, deflated with a dictionary
of its usual words, and named tensors. Equal-named tensors of one dtype and shape travel stacked in one array; a tensor
object that several parts share (the global model) travels once; bool tensors travel as bits.

A reply is not trusted. Its JSON is bounded by the request before it is parsed, and a tensor is built only if it was
asked for, in the size and dtype that were asked for: memory and time follow from the request, not from the reply.
Received tensors may alias the message's bytes: read-only.
"""

import json
import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedsub_app.common.errors import printable
from fedsub_app.common.section import MILLION
from fedsub_app.common.tensors import Json, Tensors, brought
from fedsub_app.federation.protocol import DTYPES, FAILURES, MAX_EXAMPLES, NAMES, BadReply, Range, Spec, Update, finite
from fedsub_app.subnets.norms import squares

HEADER, TENSORS = "fedsub.header", "fedsub.tensors"
STYPE = "fedsub.raw"  # little-endian C-order bytes; bools packed by numpy.packbits, a row a tensor
INITIAL = "initial"  # key of a part that is no client's task: its tensors are the run's initial global model
UNKNOWN_SETTINGS = {"unknown": "settings"}  # first in the header of a node's reply that lacks the settings
NONCE = "nonce"  # key of a header: a reply repeats that of its message, which is of one run, round and phase
# The words of the JSON of a message and of its reply, the usual ones last: a word costs two or three bytes.
WORDS = (
    b'"initial":true"fatal":true"lost":true"diverged":true"error":"evaluate":["global-local","personal"]"norm":"block":'
    b'{"run":"","digest":"","checkpoints":[1,2,3],"phase":"evaluate","],"phase":"train","round":1,"nonce":"'
    b'","parts":[{"client":0,"answer":"part","state":1}],"index":[[[0],[0]]]}'
    b'{"nonce":"","parts":[{"client":1,"metrics":{"train-loss":2.3,"flops":1000.0,"published-flops":00.0,"subnet-flops":'
    b'00.0,"compute-seconds":0.0},"num-examples":0,"state":[0,1]}],"index":[[[0],[0]],[[0],[0]]]}'
)
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, zlib.error)
# Characters of a reply's JSON: without its parts, for each client and for each tensor that a client was asked for.
MAX_HEADER, MAX_PART, MAX_ENTRY = 1 << 16, 1 << 12, 1 << 8


def to_tensors(arrays: ArrayRecord) -> Tensors:
    """Return Flower's record as named CPU tensors."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    return ArrayRecord({name: tensor.contiguous() for name, tensor in tensors.items()})


def _encode(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a CPU tensor's bytes as an array in C order."""
    values = tensor.detach()
    if values.dtype == torch.bool:
        return np.packbits(values.numpy())
    if values.dtype == torch.bfloat16:  # NumPy has none
        values = values.contiguous().view(torch.int16)
    return np.ascontiguousarray(values.numpy())


def pack(header: Json, parts: Sequence[tuple[Json, Mapping[str, torch.Tensor]]]) -> RecordDict:
    """Return the records that hold ``header`` and every part's JSON object and tensors."""
    parts = [(config, brought(tensors)) for config, tensors in parts]
    members: dict[tuple[str, torch.dtype, torch.Size], list[int]] = {}
    for number, (_, tensors) in enumerate(parts):
        for name, tensor in tensors.items():
            members.setdefault((name, tensor.dtype, tensor.shape), []).append(number)
    arrays: dict[str, Array] = {}
    index: list[list[Any]] = []  # of each array: the parts that refer to it, and the rows that they refer to
    for (name, dtype, shape), numbers in members.items():
        distinct = {id(parts[number][1][name]): parts[number][1][name] for number in numbers}
        rows = {key: row for row, key in enumerate(distinct)}
        data = b"".join(_encode(tensor) for tensor in distinct.values())  # type: ignore[misc]
        arrays[f"{len(index)}:{name}"] = Array(NAMES[dtype], (len(distinct), *shape), STYPE, data)
        index.append([numbers, [rows[id(parts[number][1][name])] for number in numbers]])
    text = json.dumps(header | {"parts": [config for config, _ in parts], "index": index}, separators=(",", ":"))
    return RecordDict({HEADER: deflated(text), TENSORS: ArrayRecord(arrays)})


def deflated(text: str) -> ConfigRecord:
    """Return JSON, in ASCII, as the record that is sent."""
    encoder = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return ConfigRecord({"json": encoder.compress(text.encode()) + encoder.flush()})


def inflated(content: RecordDict, limit: int = 0) -> str:
    """Return the JSON of a message, its first ``limit`` characters; 0: all. One of ``UNREADABLE`` for other records."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS, WORDS)
    text = decoder.decompress(content.config_records[HEADER]["json"], limit)  # type: ignore[arg-type]
    if not decoder.eof and len(text) < (limit or math.inf):
        raise ValueError("its JSON is cut off")
    return text.decode("ascii")


def asks_for_settings(content: RecordDict) -> bool:
    """Say whether a node has replied that it lacks the run's settings."""
    start = json.dumps(UNKNOWN_SETTINGS, separators=(",", ":"))[:-1]
    try:
        return inflated(content, len(start)) == start
    except UNREADABLE:
        return False


class Stack:
    """One array of a message: tensors of one name, dtype and shape. The first call of :meth:`row` builds them."""

    def __init__(self, name: str, array: Array, uses: int) -> None:
        self.name, self.array, self.uses = name, array, uses  # parts that refer to it bound its rows
        self._spec: Spec | None = None  # the spec that the rows were checked against
        self._rows: Sequence[torch.Tensor] | np.ndarray[Any, Any] | None = None  # an array: bits, eight a byte
        self._good = False  # whether all rows' values are valid: one pass over a stack, not one over each row
        self.squares: list[float] = []  # squared distances of all rows to the spec's start, if it has one

    def row(self, number: int, spec: Spec | None = None) -> torch.Tensor:
        """Return one tensor; :class:`BadReply` where it does not meet ``spec``, or is not of this format."""
        rows = self._rows
        if rows is None or spec != self._spec:
            rows = self._rows = self._decode(spec)
        if not 0 <= number < len(rows):
            raise BadReply(f"tensor {self.name!r}: no row {number} of {len(rows)}")
        if isinstance(rows, np.ndarray):  # unpacked one at a time: they take eight times the bytes that were received
            sizes = self.array.shape[1:]
            return torch.from_numpy(np.unpackbits(rows[number], count=math.prod(sizes)).view(bool)).reshape(sizes)
        if not self._good and spec:
            spec.check_values(self.name, rows[number])
        return rows[number]

    def _decode(self, spec: Spec | None) -> Sequence[torch.Tensor] | np.ndarray[Any, Any]:
        array, name = self.array, printable(self.name, 80)
        dtype = DTYPES.get(array.dtype)
        shape = tuple(array.shape)
        if dtype is None or array.stype != STYPE or not shape or min(shape) < 0:
            actual = printable(f"dtype {array.dtype!r}, stype {array.stype!r}, shape {shape}", 80)
            raise BadReply(f"tensor {name!r}: {actual}: not fedsub's wire format")
        rows, sizes = shape[0], shape[1:]
        if spec:
            spec.check(name, array.dtype, sizes)
        if rows > self.uses:
            raise BadReply(f"tensor {name!r}: {rows} rows, of which at most {self.uses} are used")
        row_bytes = Spec(sizes, dtype).nbytes
        if len(array.data) != rows * row_bytes:
            raise BadReply(f"tensor {name!r}: {len(array.data)} bytes, expected {rows * row_bytes} for {shape}")
        self._spec = spec
        if dtype == torch.bool:
            return np.frombuffer(array.data, np.uint8).reshape(rows, row_bytes)
        if not array.data:
            return list(torch.empty(shape, dtype=dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "buffer is not writable": received tensors are read-only
            stack = torch.frombuffer(array.data, dtype=dtype).reshape(shape)
        if spec and spec.start is not None and spec.shape == sizes:  # up_to may be shorter
            self.squares = squares(stack, spec.start)
            self._good = spec.unbounded and math.isfinite(sum(self.squares))
        else:
            self._good = spec is not None and spec.unbounded and finite(stack)
        return list(stack)


@dataclass(frozen=True)
class Part:
    """A client's part of a message: its JSON object and, not decoded yet, its tensors: name -> array and row in it."""

    config: Json
    rows: dict[str, tuple[Stack, int]] = field(default_factory=dict)


def _open(content: RecordDict, limit: int = 0) -> tuple[Json, list[Part]]:
    """Return header and parts; ``limit``: upper bound on the header's characters, 0 for none."""
    try:
        text = inflated(content, limit + bool(limit))
        if len(text) > limit > 0:
            raise BadReply(f"a header of more than {limit} characters")
        header = json.loads(text)
        arrays = content.array_records[TENSORS]
        parts = [Part(config) for config in header.pop("parts")]
        if not all(isinstance(part.config, dict) for part in parts):
            raise TypeError("a part is not an object")
        entries, index = 0, header.pop("index")
        for key, array in arrays.items():
            place, _, name = key.partition(":")
            numbers, rows = index[int(place)]
            stack = Stack(name, array, len(numbers))
            if {*map(type, numbers), *map(type, rows)} - {int}:
                raise TypeError("a part or row is not a number")
            for number, row in zip(numbers, rows, strict=True):
                parts[number].rows[stack.name] = (stack, row)
            entries += len(numbers)
        if entries != sum(len(part.rows) for part in parts):
            raise ValueError("a part has two tensors of one name")
    except UNREADABLE as error:
        raise BadReply(f"not fedsub's wire format ({type(error).__name__}: {error})") from None
    return header, parts


def unpack(content: RecordDict) -> tuple[Json, list[tuple[Json, Tensors]]]:
    """Inverse of :func:`pack`, for a trusted sender, the server; :class:`BadReply` for records of another format."""
    header, parts = _open(content)
    return header, [(part.config, {name: stack.row(row) for name, (stack, row) in part.rows.items()}) for part in parts]


def unpack_reply(content: RecordDict, asked: Mapping[int, Mapping[str, Spec]]) -> tuple[Json, list[Part]]:
    """Return a reply's header and its parts, whose tensors :func:`read_update` decodes.

    ``asked``: client -> its tensors, which bound the size. :class:`BadReply`: another format, or too large.
    """
    return _open(content, MAX_HEADER + sum(MAX_PART + MAX_ENTRY * len(expected) for expected in asked.values()))


def wire_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's content as sent: arrays and JSON, without Flower's own envelope."""
    if HEADER not in content.config_records or TENSORS not in content.array_records:
        return 0
    text = content.config_records[HEADER].get("json", b"")
    arrays = content.array_records[TENSORS].values()
    return (len(text) if isinstance(text, bytes) else 0) + sum(len(array.data) for array in arrays)


def update_part(update: Update) -> tuple[Json, Tensors]:
    config: Json = {"client": update.client, "metrics": update.metrics}
    config |= {"num-examples": update.num_examples, "state": update.state}
    config |= {"error": update.error} if update.error else {}
    return config | {kind: True for kind in FAILURES if getattr(update, kind)}, update.tensors


def read_update(
    part: Part, expected: Mapping[str, Spec], metrics: Mapping[str, Range], samples: tuple[int, int] = (1, MAX_EXAMPLES)
) -> Update:
    """Return the update in a part, checked against the tensors and metrics that its client may answer with.

    :class:`BadReply` where names, shapes, dtypes, values, metrics or ``num-examples`` are not as expected, or the
    client failed; :class:`Diverged` where they are not finite, :class:`StateLost` where the client has lost its state.
    """
    config, tensors, distances = part.config, {}, {}
    if config.get("error"):
        kind = next((failure for key, failure in FAILURES.items() if config.get(key) is True), BadReply)
        raise kind(f"client failed: {config['error']}")
    if missing := [name for name, spec in expected.items() if name not in part.rows and not spec.optional]:
        raise BadReply(f"tensor {missing[0]!r} is missing" + (f" (and {len(missing) - 1} more)" * (len(missing) > 1)))
    for name, (stack, number) in part.rows.items():
        spec = expected.get(name)
        if spec is None:
            raise BadReply(f"tensor {printable(name, 80)!r} was not asked for")
        tensors[name] = stack.row(number, spec)
        if stack.squares:
            distances[name] = stack.squares[number]
    count = config.get("num-examples")
    low, high = samples
    if type(count) is not int or not low <= count <= high:
        allowed = f"an integer from {low} to {high}" if low < high else high
        raise BadReply(f"num-examples = {printable(repr(count), 40)}: must be {allowed}")
    values = _read_metrics(config.get("metrics"), metrics)
    match config.get("state"):
        case [int(before), int(after)] if 0 <= before <= after <= MILLION:
            return Update(int(config["client"]), tensors, values, count, state=(before, after), squares=distances)
    shown = printable(repr(config.get("state")), 40)
    raise BadReply(f"state = {shown}: must be two rounds, of its state before and after")


def _read_metrics(values: object, allowed: Mapping[str, Range]) -> dict[str, float]:
    if not isinstance(values, dict):
        raise BadReply(f"metrics = {values!r}: must be an object of numbers")
    for name, value in values.items():
        if name not in allowed:
            raise BadReply(f"metric {printable(name, 80)!r} was not asked for")
        allowed[name].check(name, value)
    if missing := sorted(name for name in allowed.keys() - values.keys() if allowed[name].needed):
        raise BadReply(f"metric {missing[0]!r} is missing")
    return values
