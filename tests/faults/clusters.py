"""A Ray cluster of several nodes on one machine: two raylets stand for two machines.

The first node has no room, so that ranks and workers are elsewhere than the driver.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEMORY_BYTES = 80_000_000
CLUSTERS_FILE = Path("/tmp/ray")  # where Ray's cluster helper leaves a note, and does not make the folder
DRAIN_SECONDS = 300.0


class LocalCluster:
    """Nodes of a cluster, from the outside."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    def add_node(self, slots: int) -> Any:
        """A machine more, with room for so many workers and ranks."""
        return self._cluster.add_node(
            num_cpus=slots, object_store_memory=MEMORY_BYTES, node_ip_address="127.0.0.1"
        )

    def take_away(self, node: Any) -> None:
        """The machine loses its power: nothing on it says good-bye."""
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._cluster.worker_nodes.discard(node)

    def drain(self, node: Any) -> None:
        """Give notice that the machine will be taken away, as a cloud does for spot machines."""
        from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
        from ray.core.generated import autoscaler_pb2

        reasons: Any = autoscaler_pb2
        reason = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int(1000 * (time.time() + DRAIN_SECONDS))
        accepted, why_not = GcsClient(address=self.address).drain_node(
            node.node_id, reason, "it will be taken away", deadline
        )
        assert accepted, why_not


@contextlib.contextmanager
def local_cluster() -> Iterator[LocalCluster]:
    """A cluster with a first node that has no room. Nothing of it is left afterwards."""
    from ray.cluster_utils import Cluster

    CLUSTERS_FILE.mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="sf", dir="/tmp")  # short: socket paths have a limit
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "temp_dir": folder,
            "object_store_memory": MEMORY_BYTES,
            "node_ip_address": "127.0.0.1",
            # a machine that does not answer is gone after 2 s, not after 15
            "_system_config": {
                "health_check_initial_delay_ms": 500,
                "health_check_period_ms": 500,
                "health_check_failure_threshold": 4,
            },
        },
    )
    try:
        yield LocalCluster(cluster)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
