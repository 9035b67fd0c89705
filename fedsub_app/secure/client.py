"""A node's part in secure aggregation: the answers of its clients, and their secrets between the phases of a round.

A trained client keeps its change in a file of the node, and its secrets in another one, which the node's owner alone
may read, because each message may be answered by another process. The client's last answer deletes both; where that is
not asked for, the training of another round does.
"""

import json
import shutil
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import private
from fedsub_app.common.tensors import Json, Tensors, unprefixed
from fedsub_app.federation.protocol import Update, finite
from fedsub_app.secure.secagg import Member, ProtocolError
from fedsub_app.secure.vectors import Layout, Scale, counting

SECRET = "secure/"  # prefix of the tensors that are no method's
KEYS, SHARES, COUNTS, SUM, OPENED = (f"{SECRET}{step}" for step in ("keys", "shares", "counts", "sum", "opened"))
AT = "secure/at/"  # prefix of positions: down, those of a client's values; in its trainer's answer, those of its choice
COVERED = "secure/covered"  # the positions that a client contributes, where its choice is public
OPEN = "secure/open"  # the positions that enough clients contribute


def to_bytes(rows: Tensor) -> list[bytes]:
    """Return the rows of a uint8 matrix."""
    return [row.tobytes() for row in rows.numpy()]


def to_rows(contents: list[bytes]) -> Tensor:
    """Return byte strings of one length as a uint8 matrix."""
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(contents)), np.uint8).reshape(len(contents), -1))


class Secrets:
    """The files of a client in one round, below the folder of the run's client states."""

    def __init__(self, folder: Path, server_round: int, client: int) -> None:
        self.path = folder / "secure" / f"round-{server_round:06d}" / f"client-{client:06d}.json"
        self.change = self.path.with_suffix(".safetensors")

    def begin(self, **tensors: Tensor) -> None:
        """Keep the tensors of a trained client; delete the files of other rounds."""
        self.path.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        for other in self.path.parents[1].iterdir():
            if other != self.path.parent and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
        with open(self.change, "wb", opener=private) as file:
            file.write(save(tensors))

    def take(self) -> Member:
        """Return the client and delete its file, so that no failure lets it answer twice."""
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            raise UserError("secure-aggregation: its secrets of this round are not there") from None
        self.path.unlink()
        secrets = {name: bytes.fromhex(content[name]) for name in ("cipher", "pair", "own")}
        tables = {n: {int(k): bytes.fromhex(v) for k, v in content[n].items()} for n in ("keys", "shares")}
        return Member(**content | secrets | tables)

    def open_once(self, step: str, alive: list[int], lost: list[int]) -> None:
        """Raise ProtocolError for a ``step`` opened before with other clients: the two sums' difference is theirs."""
        path = self.path.parents[1] / f"{self.path.stem}.opened"
        mark = sha256(json.dumps([alive, lost]).encode()).hexdigest()
        lines = path.read_text().splitlines() if path.exists() else []
        place, opened = f"{self.path.parent.name}/{step}", dict(line.split() for line in lines if " " in line)
        if opened.get(place, mark) != mark:
            raise ProtocolError("this round was opened before, with other clients")
        if place not in opened:
            with open(path, "a", opener=private) as file:
                print(f"\n{place} {mark}", file=file)  # a power cut may have torn the line before

    def keep(self, member: Member) -> None:
        """Write the secrets, without waiting for the disk: a client whose machine fails is lost in its round."""
        with open(self.path, "w", opener=private) as file:
            json.dump(asdict(member), file, default=bytes.hex)


def answer(folder: Path, header: Json, task: Json, sent: Tensors) -> Update:
    """Answer a step: with public keys, shares for neighbours, a masked vector, or revealed shares.

    UserError, ProtocolError: the client has lost its secrets, or the server asks for what the protocol does not allow.
    """
    client, step = task["client"], header["secure"]
    store = Secrets(folder, header["round"], client)
    member = Member(client) if step == KEYS else store.take()
    if step == KEYS:
        reply = to_rows([member.public])
    elif step == SHARES:
        sealed = member.share(dict(zip(task["neighbours"], to_bytes(sent[KEYS]), strict=True)), task["threshold"])
        reply = to_rows([sealed[other] for other in task["neighbours"]])
    elif step == OPENED:
        store.open_once(header["opens"], task["alive"], task["lost"])
        shares = member.opened(task["alive"], task["lost"])
        if header["opens"] == SUM:
            store.change.unlink()
        return Update(client, {OPENED: to_rows([shares[c] for c in (*task["alive"], *task["lost"])])}, num_examples=1)
    else:
        sealed = dict(zip(task["neighbours"], to_bytes(sent[SHARES]), strict=True))
        kept = load_file(store.change)
        if step == COUNTS:
            vector = counting(kept["covered"], header["clients"])
        else:
            vector = Scale(**header["scale"]).vector(kept["change"], task["weight"], sent.get(OPEN))
        reply = torch.from_numpy(member.masked(vector, sealed).view(np.int32))
    store.keep(member)
    return Update(client, {step: reply}, num_examples=1)


def withheld(folder: Path, header: Json, task: Json, sent: Tensors, update: Update) -> Update:
    """Keep a trained client's change at its node; return its update without tensors, but for public positions."""
    if update.error:
        return update
    layout = Layout(header["secure"]["shapes"], header["secure"]["absolute"])
    if broken := [name for name in layout.shapes if name in update.tensors and not finite(update.tensors[name])]:
        return Update(update.client, error=f"tensor {broken[0]!r}: NaN or infinite values", diverged=True)
    change, covered = layout.change(update.tensors, sent, unprefixed(AT, sent), unprefixed(AT, update.tensors))
    Secrets(folder, header["round"], update.client).begin(change=change, covered=covered)
    return replace(update, tensors={COVERED: covered} if header["secure"]["public"] else {})
