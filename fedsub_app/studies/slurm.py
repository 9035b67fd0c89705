"""The runs of a table or sweep as jobs of a Slurm cluster, through the package submitit."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedsub_app.common.errors import UserError
from fedsub_app.common.spelling import parse_pairs


class SlurmPool(ThreadPoolExecutor):
    """A thread a run, which waits for its job; jobs that have not ended are cancelled when this process is stopped.

    Parameters
    ----------
    workers : jobs at a time.
    options : ``key=value``, keys of ``submitit.AutoExecutor``, such as ``timeout_min`` and ``slurm_partition``;
        ``cluster=local`` starts the jobs on this machine.
    folder : where submitit writes its scripts, pickles and logs: a folder that all machines of the cluster see.
    """

    def __init__(self, workers: int, options: Sequence[str], folder: Path) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError("--slurm: needs the package submitit; `pip install 'fedsub[slurm]'`") from None
        super().__init__(workers)
        keys: dict[str, Any] = parse_pairs(options)
        try:
            self._cluster = submitit.AutoExecutor(folder, cluster=keys.pop("cluster", "slurm"))
            self._cluster.update_parameters(**keys)
        except (NameError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"--slurm {' '.join(options)}: {str(error).splitlines()[0]}") from None
        self._jobs: list[Any] = []

    def submit(self, run: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        """Return the future of ``run(*arguments)``, which a job of the cluster computes."""
        return super().submit(self._wait_for, run, *arguments, **named)

    def _wait_for(self, run: Any, *arguments: Any, **named: Any) -> Any:
        job = self._cluster.submit(run, *arguments, **named)
        self._jobs.append(job)
        return job.result()

    def __exit__(self, kind: Any, *details: Any) -> None:
        if kind:
            self.shutdown(wait=False, cancel_futures=True)
            for job in self._jobs:
                job.cancel()
        super().__exit__(kind, *details)
