"""A client's durable state (mask scores, personal weights, optimizer moments): safetensors files, one a round.

Flower's ``context.state`` is lost after a restart or an exception, and travels with every message in simulation.

A task names the round of the client's last merged reply, and the client continues from the state of exactly that round.
The state of a reply that was lost, or of a round that was never checkpointed, is deleted by the client's next task.
The states of a message's clients are on disk before its reply is sent.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedsub_app.common import files
from fedsub_app.common.errors import UserError
from fedsub_app.common.tensor_files import read_tensors, round_file, round_files, write_tensors
from fedsub_app.common.tensors import Tensors

_written: set[Path] = set()  # folders of states that may not be on disk yet


class StateGone(UserError):
    """A client cannot train without the state that the server counts on."""


class ClientState:
    """The states of one client in ``folder`` (``client-000012/round-000003.safetensors``)."""

    def __init__(self, folder: Path, client: int) -> None:
        self.folder = folder / f"client-{client:06d}"

    def load(self, merged: int) -> Tensors:
        """Return the state of round ``merged``; ``{}`` where that is 0 or its file is gone."""
        path = round_file(self.folder, merged)
        if not merged or not path.is_file():
            return {}
        try:
            return read_tensors(path)[0]
        except ValueError as error:
            reason = f"client state is truncated or damaged ({error})"
            raise UserError(f"{path}: {reason}; delete it to have the client start anew") from None

    def save(self, round_: int, tensors: Tensors, merged: int, checkpoints: Iterable[int]) -> None:
        """Write the state of ``round_``, which :func:`flush_states` waits for; delete older ones that no task can name.

        ``merged``: round of the client's last merged reply, 0 for none; no state between it and ``round_`` was merged.
        ``checkpoints``: the server's, by round; a resume from one names the newest merged state up to that round.
        """
        write_tensors(round_file(self.folder, round_), tensors, wait=False)
        _written.add(self.folder.parent)
        others = {number: path for number, path in round_files(self.folder).items() if number != round_}
        named = {max((number for number in others if number <= min(last, merged)), default=0) for last in checkpoints}
        for number, path in others.items():
            if number != merged and number not in named:
                path.unlink(missing_ok=True)


def flush_states() -> None:
    """Wait until the states that this process has written are on disk."""
    while _written:
        with suppress(FileNotFoundError):  # of an earlier run of this process, deleted since
            files.flush(_written.pop())
