"""A run over a Ray of two nodes, of which the one with half of the engines is lost; `test_engine_faults.py` starts it.

Prints as JSON what became of it. The nodes are raylets on addresses of this machine's loopback. A process of its own:
see `two_nodes.py`, which sets what Ray reads when it is imported.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from two_nodes import SMALL_NODE, ray_folder  # isort: skip (before Ray)
import ray
from live_run import live_cluster, on
from ray.cluster_utils import Cluster

from beam_rl.engines import Slot
from beam_rl.seats import own_address

ROUTER = "model.layers.4.mlp.gate.weight"


def addresses(slots: Sequence[Slot]) -> list[str]:
    """Of the nodes that the engines are on, as they say themselves."""
    return ray.get([slot.actor.__ray_call__.remote(lambda _: own_address()) for slot in slots])


def main(tiny: str, folder: str) -> None:
    overrides = [f"model.path={tiny}", "rollout.engines=2", "cluster.placement=disaggregated"]
    with ray_folder() as temp:
        head = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "temp_dir": temp, **SMALL_NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2", **SMALL_NODE)
            ray.init(address=cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
            logs, out = Path(folder, "logs"), Path(folder, "run")
            with live_cluster(logs, *overrides) as started, on(started, out, *overrides) as live:
                slots = live.loop.engines.slots
                before = addresses(slots)
                live.loop.step()
                struck = time.monotonic()
                cluster.remove_node(second, allow_graceful=False)
                live.step_until(lambda: any(slot.seat.host == "" for slot in slots))
                alone = live.loop.engines.serving()
                live.loop.step()
                cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3", **SMALL_NODE)
                live.step_until(live.all_serve)
                took = time.monotonic() - struck
                live.loop.step()
                live.nothing_lost()
                weights = [live.weights_of(i, ROUTER).tobytes() for i in (0, 1)]
                live.loop.check_engines()
                said = {"before": before, "alone": alone, "after": addresses(slots), "equal": weights[0] == weights[1]}
                said |= {"restarts": [slot.restarts for slot in slots], "recovery_s": took}
        finally:
            ray.shutdown()
            cluster.shutdown()
    print(json.dumps(said))  # last: Ray prints what it has to say of the lost node until it is shut down


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
