"""The clients of a run as its directory holds them, each with its own model."""

from pathlib import Path

from client_apps.base import Client
from fedsub_app.common.errors import UserError
from fedsub_app.runs.checkpoint import checkpoints, read_checkpoint
from fedsub_app.runs.directory import settings_in
from fedsub_app.runs.methods import METHODS
from fedsub_app.runs.rounds import plateau_lr, read_rounds
from fedsub_app.training.client_state import ClientState
from fedsub_app.training.workplace import workplace


def client_of(folder: Path, client: int) -> Client:
    """Return a client of a run as of the last checkpoint, its own model loaded, the one of its ``personal`` score.

    ``network.module`` is the network, ``samples("test")`` are the client's images and labels, ``score("test")`` is
    the model's score on them. For a method without personal models it is the global model; a method that
    fine-tunes for its evaluation does so here. All clients of a process share the network: the next call loads another
    model into it; ``trained()`` returns a copy of this one's tensors.

    Parameters
    ----------
    folder : directory of a run whose clients' data are on this machine.
    client : its number, from 0.

    Raises
    ------
    UserError
        The folder is not that of a run, has no checkpoint, no longer the client's state or a damaged
        file, or the run has no such client.
    """
    settings = settings_in(folder)
    settings.need_data()
    if not 0 <= client < settings.num_clients:
        raise UserError(f"client = {client}: must be an integer from 0 to {settings.num_clients - 1}")
    paths = checkpoints(folder)
    if not paths:
        raise UserError(f"{folder}: no checkpoint")
    last, method = read_checkpoint(paths[-1]), METHODS[settings.method]
    place = workplace(settings, state=folder / "clients")
    strategy = method.strategy(settings, place.network.module)
    strategy.round, strategy.current = last.round, {name: last.model[name] for name in strategy.current}
    strategy.load_state(last.state)
    merged = int(strategy.state_rounds[client])
    state = ClientState(folder / "clients", client).load(merged)
    if merged and not state:
        raise UserError(f"{folder}: the state of client {client} is not there; batches of runs do not keep it")
    restored = method.client(place, client, last.round, state)
    if settings.lr_schedule == "plateau":
        restored.lr = plateau_lr([line for line in read_rounds(folder) if line["round"] < last.round], settings)
    with restored.dropout("evaluation"):
        restored.load(restored.personal(strategy.personal_download(client), {}))
    restored.network.module.eval()
    return restored
