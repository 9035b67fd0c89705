"""A client's durable state (mask scores, personal weights, optimizer moments): safetensors files, one a round.

Flower's ``context.state`` lives in memory, is lost after a restart or an exception, and travels with every message in
simulation. Files have none of these faults. A client's state of round t is written beside the older one and read back
only in a later round, so a run that is resumed at an earlier round finds the state that belongs to it, and a state
written by a round that was never checkpointed is ignored and overwritten.
"""

import os
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import write_atomic
from fedsub_app.common.tensors import Tensors


def _apart(tensors: Tensors) -> Tensors:
    """Return the tensors on the CPU, copied where they share memory, which safetensors refuses."""
    found, known = {}, set()
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous()
        place = values.untyped_storage().data_ptr()
        found[name] = values.clone() if place in known else values
        known.add(place)
    return found


class ClientState:
    """The states of one client in ``folder`` (``client-000012/round-000003.safetensors``)."""

    def __init__(self, folder: Path, client: int) -> None:
        self.folder = folder / f"client-{client:06d}"

    def _rounds(self) -> dict[int, Path]:
        try:
            names = os.listdir(self.folder)  # a fifth of the time of Path.glob: every client of a round asks
        except FileNotFoundError:
            return {}
        found = (re.fullmatch(r"round-(\d+)\.safetensors", name) for name in names)
        return {int(match[1]): self.folder / match[0] for match in found if match}

    def load(self, before: int) -> Tensors:
        """Return the newest state of a round earlier than ``before``; empty where there is none.

        Raises
        ------
        UserError
            The file is truncated or damaged.
        """
        rounds = {number: path for number, path in self._rounds().items() if number < before}
        if not rounds:
            return {}
        path = rounds[max(rounds)]
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: client state is truncated or damaged ({error})") from None

    def save(self, round_: int, tensors: Tensors, committed: int) -> None:
        """Write the state of ``round_``; drop those that no resume can ask for.

        ``committed`` is the server's oldest checkpoint: states older than the newest one up to it are never read again.
        """
        data = save(_apart(tensors))
        write_atomic(self.folder / f"round-{round_:06d}.safetensors", data)
        rounds = self._rounds()
        keep_from = max((number for number in rounds if number <= committed), default=0)
        for number, path in rounds.items():
            if number < keep_from:
                path.unlink(missing_ok=True)
