"""``fedsub setup`` and ``fedsub stop``: what Flower needs on this machine."""

from typing import Annotated

from typer import Option

from fedsub_app.common.errors import UserError


def setup(
    cluster: Annotated[
        int | None, Option(metavar="N", help="also ray-cluster: N simulated nodes on a Ray cluster that runs already")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", help="print nothing where it succeeds")] = False,
) -> None:
    """Register the Flower connection local-simulation in this environment; once."""
    from fedsub_app.deployment import flower

    if cluster is not None and cluster < 1:
        raise UserError(f"--cluster {cluster}: must be at least 1")
    lines = flower.setup(cluster)
    if not quiet:
        print(*lines, sep="\n")


def stop() -> None:
    """Stop the SuperLink that Flower keeps running for this environment's simulations."""
    from fedsub_app.deployment import flower

    print(flower.stop())
