"""``fedsub setup`` and ``fedsub env``: what Flower needs on this machine."""

import argparse
from typing import Any

from fedsub_app.common.errors import UserError


def register(commands: Any) -> None:
    """Add both commands to those of argparse."""
    setup = commands.add_parser("setup", help="register the Flower connection local-simulation; once per machine")
    setup.add_argument(
        "--cluster",
        type=int,
        metavar="N",
        help="also ray-cluster: N simulated nodes on a Ray cluster that runs already",
    )
    setup.set_defaults(command=_setup)
    env = commands.add_parser("env", help='print what a shell needs where setup did not run: eval "$(fedsub env)"')
    env.set_defaults(command=_env)


def _setup(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    if options.cluster is not None and options.cluster < 1:
        raise UserError(f"--cluster {options.cluster}: must be at least 1")
    for line in flower.setup(options.cluster):
        print(line)
    return 0


def _env(options: argparse.Namespace) -> int:
    from fedsub_app.deployment import flower

    for name, value in flower.environment().items():
        print(f'export {name}="${{{name}:-{value}}}"')
    return 0
