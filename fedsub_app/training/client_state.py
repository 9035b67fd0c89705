"""A client's durable state (mask scores, personal weights, optimizer moments): safetensors files, one a round.

Flower's ``context.state`` lives in memory, is lost after a restart or an exception, and travels with every message in
simulation. Files have none of these faults. A client's state of round t is written beside the older one and read back
only in a later round, so a run that is resumed at an earlier round finds the state that belongs to it, and a state
written by a round that was never checkpointed is ignored and overwritten.
"""

from collections.abc import Iterable
from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.common.tensor_files import read_tensors, round_file, round_files, write_tensors
from fedsub_app.common.tensors import Tensors


class ClientState:
    """The states of one client in ``folder`` (``client-000012/round-000003.safetensors``)."""

    def __init__(self, folder: Path, client: int) -> None:
        self.folder = folder / f"client-{client:06d}"

    def load(self, before: int) -> tuple[int, Tensors]:
        """Return the newest state of a round earlier than ``before``, and its round; ``(0, {})`` where there is none.

        Raises
        ------
        UserError
            The file is truncated or damaged.
        """
        rounds = {number: path for number, path in round_files(self.folder).items() if number < before}
        if not rounds:
            return 0, {}
        newest = max(rounds)
        try:
            return newest, read_tensors(rounds[newest])[0]
        except ValueError as error:
            reason = f"client state is truncated or damaged ({error})"
            raise UserError(f"{rounds[newest]}: {reason}; delete it to go on from the one before") from None

    def save(self, round_: int, tensors: Tensors, checkpoints: Iterable[int]) -> None:
        """Write the state of ``round_``; drop the older ones that no resume can ask for.

        ``checkpoints`` are the rounds of the server's: of each the newest state up to it stays, and the last one before
        ``round_``.
        """
        write_tensors(round_file(self.folder, round_), tensors)
        older = {number: path for number, path in round_files(self.folder).items() if number < round_}
        kept = {max((number for number in older if number <= last), default=0) for last in (*checkpoints, round_)}
        for number, path in older.items():
            if number not in kept:
                path.unlink(missing_ok=True)
