"""A user of another machine, who starts runs through a federation's door."""

from pathlib import Path

from fedsub_app.common.errors import UserError
from fedsub_app.deployment.flower import CERTIFICATE_KEY, ask, connect, connections


def connect_user(name: str, address: str, ca: Path, certificate: Path) -> str:
    """Write the connection of a user to a federation's door; returns a line about it.

    :class:`UserError`: a file is not there, the name is another connection's, or the door refuses the certificate.
    """
    for path in (certificate, certificate.with_suffix(".key")):
        if not path.is_file():
            raise UserError(f"--certificate: {path} is not there")
    before = connections().get(name, {})
    if before and CERTIFICATE_KEY not in before:
        raise UserError(f"--name {name}: Flower's config.toml has such a connection, to another SuperLink")
    config = connect(name, {"address": address, "root-certificates": str(ca), CERTIFICATE_KEY: str(certificate)})
    try:
        nodes = ask("supernode", "list", name)["nodes"]
    except UserError:
        connect(name, before)
        raise
    return f"{config}: connection {name}, {len(nodes)} nodes; fedsub run … --engine {name}"
