"""Reserves seats in a Ray of two nodes and prints where they are, as JSON; `test_placement.py` starts it.

The nodes are two raylets on two addresses of this machine's loopback, with 3 and 4 CPU slots. A process of its own, since
Ray reads some of its environment when it is imported, and a process is in one Ray only.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from beam_rl.errors import InputError
from beam_rl.recipe.load import load
from beam_rl.seats import Seat, reserved

SMALL_NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
TINY = Path(__file__).parents[1] / "recipes" / "tiny_cpu.yaml"
RUNS = {
    "disaggregated": ["cluster.placement=disaggregated", "trainer.parallel.dp=4", "rollout.parallel.tp=3"],
    "colocated": ["trainer.parallel.dp=6", "rollout.engines=2", "rollout.parallel.tp=3"],
    "again": ["cluster.placement=disaggregated", "trainer.parallel.dp=4", "rollout.parallel.tp=3"],
    "too_much": ["cluster.placement=disaggregated", "trainer.parallel.dp=7"],
}


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """For a cluster of the test's own. What Ray's Cluster notes in the default place lies there, too: on a machine that has
    not seen Ray before the default folder is missing."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temp:
        Path(temp, "ray").mkdir()
        os.environ["RAY_TMPDIR"] = temp
        yield temp


def address(seat: Seat) -> str:
    """Of the node of an actor in this seat."""

    def here() -> str:
        node = ray.get_runtime_context().get_node_id()
        return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)

    return ray.get(ray.remote(here).options(**seat.options).remote())


def seats(overrides: list[str]) -> dict[str, Any]:
    try:
        with reserved(load(TINY, overrides)) as found:
            return {
                "ranks": [(seat.host, address(seat)) for seat in found.ranks],
                "engines": [(seat.host, address(seat)) for seat in found.engines],
                "restarted": [(seat.host, address(seat)) for seat in found.engines],
                "meeting": found.meeting_point(),
            }
    except InputError as error:
        return {"error": str(error)}


def main() -> None:
    with ray_folder() as folder:
        head = {"num_cpus": 3, "node_ip_address": "127.0.0.1", "temp_dir": folder, **SMALL_NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=4, node_ip_address="127.0.0.2", **SMALL_NODE)
            ray.init(address=cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
            print(json.dumps({name: seats(overrides) for name, overrides in RUNS.items()}))
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
