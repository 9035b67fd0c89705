"""Flower's pool of Ray workers, mended: a Ray node that is lost costs the messages that it was working on.

Flower 1.41 puts a lost worker back into its pool. It then fails in no time, and so gets most of the messages of each
later round; the log has two tracebacks for each.
"""

import logging
import sys
import threading
from typing import Any

POLL_SECONDS = 0.5
# Lines of Flower's log that repeat a failure: the reply has its reason, and the round's line names its clients.
TOLD_AGAIN = ("An exception was raised when processing a message", "Traceback (most recent call last)", "The actor ")


def mend() -> None:
    """Replace two methods of Flower's pool, which may exist already; a replacement waits for a node that joins."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import RayActorError

    flowers: Any = BasicActorPool
    submit, put_back = flowers.submit, flowers.add_actor_back_to_pool
    changed, joining = threading.Condition(), dict[Any, Any]()  # workers that start, by what is ready once they run

    def available(pool: Any) -> bool:
        for ready in ray.wait(list(joining), timeout=0)[0] if joining else ():
            pool.pool.append(joining.pop(ready))
        return bool(pool.pool)

    def submit_when_available(pool: Any, function: Any, job: Any) -> Any:
        with changed:
            while not available(pool):
                changed.wait(POLL_SECONDS)
            return submit(pool, function, job)

    def put_back_or_replace(pool: Any, future: Any) -> None:
        with changed:
            if isinstance(sys.exc_info()[1], RayActorError):
                ray.kill(pool._future_to_actor.pop(future))
                other = pool.create_actor_fn()
                joining[other.__ray_ready__.remote()] = other
            else:
                put_back(pool, future)
            changed.notify()

    flowers.submit, flowers.add_actor_back_to_pool = submit_when_available, put_back_or_replace
    logging.getLogger("flwr").addFilter(lambda record: not record.getMessage().startswith(TOLD_AGAIN))
