"""``fedsub.start``: this package's loop over the rounds, with a run directory and checkpoints, in a user's app."""

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedsub_app.common.errors import UserError
from fedsub_app.common.files import CHECKSUM
from fedsub_app.common.run_files import initial_file, initial_model
from fedsub_app.common.section import Value
from fedsub_app.common.tasks import numbers
from fedsub_app.common.tensor_files import write_tensors
from fedsub_app.common.tensors import Json
from fedsub_app.federation.wire import to_arrays, to_tensors
from fedsub_app.library.strategy import LibraryStrategy
from fedsub_app.runs.directory import open_run
from fedsub_app.runs.loop import described_failures, run_rounds
from fedsub_app.runs.recorded import settings_of
from fedsub_app.runs.rounds import TOTALS
from fedsub_app.runs.tracking import check_tracker

OF_THE_ROUND = {"round", "status", "stage", "lr", "dropped", "abandoned", "clients", CHECKSUM, *TOTALS}
OF_THE_ROUND |= {"evaluated", "not-evaluated", "served", "measurement"}
Evaluate = Callable[[int, ArrayRecord], Mapping[str, float] | None]


def start(
    strategy: LibraryStrategy,
    grid: Grid,
    *,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    run_dir: str | Path = "",
    resume: bool = False,
    evaluate_fn: Evaluate | None = None,
) -> Json:
    """Run all rounds as ``fedsub run`` does; returns the summary.

    The run directory has a line a round, checkpoints and the final model. ``resume`` continues at the last checkpoint.

    Parameters
    ----------
    strategy : one of this package, such as ``fedsub.FedSelect()``.
    initial_arrays : the initial global model; a resumed run uses the one that it began with.
    num_rounds : total number of rounds, including those before a resume.
    run_dir : the run's directory; "": a new one under $FEDSUB_RUNS.
    evaluate_fn : (round, arrays) -> metrics for the round's line, such as ``{"global-accuracy": 93.1}``.

    Raises
    ------
    UserError
        Bad input, before the first round.
    RunFailed
        The run could not go on; its ``folder`` may hold a checkpoint to resume from.
    """
    if not isinstance(strategy, LibraryStrategy):
        raise UserError(f"strategy = {type(strategy).__name__}: must be one of fedsub's, such as fedsub.FedAvg()")
    strategy.num_rounds = num_rounds
    where: dict[str, Value] = {"run-dir": str(run_dir or ""), "resume": resume}
    settings = settings_of(strategy.call_roll(grid) | where)
    check_tracker(settings.track)
    used = ("lr-schedule", settings.lr_schedule == "plateau"), ("stop-at-score", settings.stop_at_score)
    using = [key for key, is_used in (*used, ("target-score", settings.target_score)) if is_used]
    score = f"global-{settings.score.name}" if using and settings.evaluations[0] == "global" else ""
    if score and evaluate_fn is None:
        raise UserError(f"{using[0]}: needs the score {score}, which evaluate_fn measures")
    strategy.build(settings, initial_arrays)  # errors are raised before anything is written
    run = open_run(settings)
    run.continuation = f"fedsub.start(…, run_dir={str(run.folder)!r}, resume=True)"
    with described_failures(run):
        first = initial_file(run.folder)
        if first.exists():
            initial_arrays = to_arrays(initial_model(run.folder))
        else:
            write_tensors(first, to_tensors(initial_arrays))
        header = {"run": run.run_id, "state-dir": str(run.folder / "clients")}
        connected = strategy.connect(settings, initial_arrays, header)

        of_clients = tuple(f"{kind}-" for kind in settings.evaluations if kind != "global")

        def measured(arrays: ArrayRecord) -> dict[str, float]:
            assert evaluate_fn
            named = numbers("evaluate_fn", evaluate_fn(connected.round, strategy.whole(arrays)) or {})
            if score and named and score not in named:
                raise UserError(f"evaluate_fn: returned {', '.join(named)}; {using[0]} needs {score!r}")
            others = OF_THE_ROUND | connected.phase.report.keys()
            if taken := sorted(name for name in named if name in others or name.startswith(of_clients)):
                what = f"{taken[0]!r}, which the round's line has of its own"
                raise UserError(f"evaluate_fn: returned {what}; name it otherwise")
            return named

        return run_rounds(grid, connected, run, measured if evaluate_fn else None)
