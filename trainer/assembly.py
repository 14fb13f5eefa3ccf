"""The production parts: Ray workers, FSDP ranks, files. The only module that puts real ones together.

Imported when a run really starts, so that no other command pays for Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..rollout.rayworkers import RayRolloutPool
from ..rollout.store import FsspecGroupStore
from ..statemachine.events import encode
from .checkpoints import Checkpoints
from .config import Config
from .ending import Ending
from .journal import Blocking, Journal
from .learner import RayLearner
from .parts import Parts
from .places import Place
from .plan import Prepared
from .prompts import DataPrompts
from .raysession import RaySession
from .weights import initial_weights


@asynccontextmanager
async def ray_session(
    config: Config, workers: int | None = None, ending: Ending | None = None
) -> AsyncIterator[RaySession]:
    """The process's Ray, with room for this run's ranks and its workers, or as many as are named.

    Raises ClusterTooSmall, TimedOut.
    """
    cluster, rollout, learner = config.cluster, config.rollout, config.learner
    ending = ending or Ending(config.preempt.grace_seconds)
    async with RaySession.acquire(cluster.address, cluster.slots, cluster.start_seconds, ending) as session:
        await session.check_fits(
            rollout.workers if workers is None else workers,
            learner.ranks,
            rollout.gpus_per_worker,
            learner.gpus_per_rank,
        )
        yield session


def assemble(
    place: Place,
    prepared: Prepared,
    journal: Journal,
    session: RaySession,
    ending: Ending,
    blocking: Blocking,
    waiting: Callable[[str], None],
) -> Parts:
    """The parts of one driver, none of them started."""
    config = prepared.config
    storage = place.storage_url(config)
    rows = [*prepared.data.rows, *(prepared.eval_data.rows if prepared.eval_data else [])]
    return Parts(
        config=config,
        journal=journal,
        pool=RayRolloutPool(
            config,
            session=session,
            budget=lambda: encode(journal.state.total),
            max_prompt_tokens=max(len(row.prompt_ids) for row in rows),
            reward=prepared.reward if "reward" in prepared.objects else None,
        ),
        learner=RayLearner(config, storage, session=session),
        store=FsspecGroupStore(storage),
        checkpoints=Checkpoints(storage),
        prompts=DataPrompts(prepared),
        initial_weights=lambda: initial_weights(config.model.path),
        blocking=blocking,
        draining=session.draining,
        node=session.node,
        ending=ending,
        waiting=waiting,
    )
