"""The methods of fedsub for your own Flower app; each name is imported on its first use.

There is a strategy class for each method of `fedsub list methods`, such as ``fedsub.FedSelect(alpha=0.3, lr=0.05)``,
and there are :func:`client_app`, :func:`private_data`, :func:`start`, :func:`run` and :func:`register`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_apps.base import Client as Client
    from fedsub_app import register as register
    from fedsub_app import run as run
    from fedsub_app.common.errors import UserError as UserError
    from fedsub_app.common.tasks import Task as Task
    from fedsub_app.library.client import client_app as client_app
    from fedsub_app.library.client import private_data as private_data
    from fedsub_app.library.loop import start as start
    from fedsub_app.runs.methods import Method as Method
    from fedsub_app.runs.recorded import RunFailed as RunFailed
    from fedsub_app.settings import MethodSettings as MethodSettings
    from strategies.base import SubnetStrategy as SubnetStrategy
    from strategies.hooks import Merged as Merged

_HOMES = {
    "Client": "client_apps.base",
    "Merged": "strategies.hooks",
    "Method": "fedsub_app.runs.methods",
    "MethodSettings": "fedsub_app.settings",
    "RunFailed": "fedsub_app.runs.recorded",
    "SubnetStrategy": "strategies.base",
    "Task": "fedsub_app.common.tasks",
    "UserError": "fedsub_app.common.errors",
    "client_app": "fedsub_app.library.client",
    "private_data": "fedsub_app.library.client",
    "register": "fedsub_app",
    "run": "fedsub_app",
    "start": "fedsub_app.library.loop",
}


def __getattr__(name: str) -> Any:
    """Return the object of a public name, or the strategy class of a registered method."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'fedsub' has no attribute {name!r}")
    from fedsub_app.library.keywords import method_of
    from fedsub_app.library.strategy import strategy_class

    if not (method := method_of(name)):
        raise AttributeError(f"module 'fedsub' has no attribute {name!r}; dir(fedsub) lists the methods")
    return strategy_class(method)


def __dir__() -> list[str]:
    """Return the public names, including those of the methods' strategy classes."""
    from fedsub_app.library.keywords import title
    from fedsub_app.runs.methods import METHODS

    return sorted([*_HOMES, *map(title, METHODS)])
