"""The ServerApp, the same for all methods: Flower's door to the loop over rounds (runs/loop.py)."""

import logging
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsub_app.common.errors import UserError
from fedsub_app.common.late import uncollected
from fedsub_app.common.machine import keep_freed_memory
from fedsub_app.common.own_code import bundled
from fedsub_app.common.run_files import deployed
from fedsub_app.deployment.engines import log_lines, run_and_report
from fedsub_app.deployment.ray_pool import mend
from fedsub_app.runs.recorded import RunFailed, own_code, settings_of
from fedsub_app.settings import Settings

with uncollected():
    from fedsub_app.federation.roll import wake

log = logging.getLogger("fedsub")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    keep_freed_memory()
    log_lines()
    try:
        settings = settings_of(grid.run.override_config)
        refuse_own_code(settings)
        if not deployed():  # a real node starts a process for every message
            mend()
            wake(grid)
        run_and_report(grid, settings)
    except (UserError, RunFailed) as error:
        log.error("%s: %s", "failed" if isinstance(error, RunFailed) else "error", error)
        if Path(sys.argv[0]).name.startswith("flwr-"):  # a process of this run alone
            sys.tracebacklimit = 0  # Flower logs what is raised
        raise  # Flower marks the run as failed


def refuse_own_code(settings: Settings) -> None:
    """Raise :class:`UserError` for code of the user that the run's bundle does not hold."""
    for key, text in own_code(settings.flat()).items():
        if not bundled(text).exists():
            other = "`fedsub run --engine` puts FILE.py:NAME into it, and fedsub.client_app takes any code"
            raise UserError(f"{key} = {text!r}: not in the run's bundle; {other}")
