"""Submits the tiny recipe to a Ray of three nodes with `launch/ray_job.sh`, kills a node in it, and prints as JSON how it
ended; `test_launch.py` starts it.

The nodes are three raylets on three addresses of this machine's loopback, with one CPU slot each: the trainer's rank, and
two engines. See `two_nodes.py`, which sets what Ray reads when it is imported.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from two_nodes import SMALL_NODE, TINY, ray_folder  # isort: skip (before Ray)

import ray
import runs
from ray.cluster_utils import Cluster

from beam_rl.seats import free_port

ROOT = Path(__file__).parents[1]
# On a machine with other work to do: Ray would give its workers what is left over, and its dashboard half a minute.
os.environ |= {"RAY_worker_niceness": "0", "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "120"}


def main(out: str, kill_after: str, *overrides: str) -> None:
    with ray_folder() as temp:
        port = free_port("127.0.0.1")
        head = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "temp_dir": temp} | SMALL_NODE
        head |= {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
        head["dashboard_agent_listen_port"] = None  # any: another Ray of this machine has the usual one
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = [cluster.add_node(wait=False, **node(i)) for i in (2, 3)]
            cluster.wait_for_nodes()
            # As `ray start` writes it: a job's driver must not find another Ray of this machine.
            Path(temp, "ray_current_cluster").write_text(cluster.address)
            wait_for_agent(port)
            job = submit(port, Path(out), overrides)
            try:
                runs.wait_for_step(Path(out), int(kill_after), job)
                cluster.remove_node(nodes[1], allow_graceful=False)
                printed, complaints = job.communicate(timeout=300)
            finally:
                job.kill()
            print(json.dumps({"code": job.returncode, "printed": printed, "complaints": complaints}))
        finally:
            ray.shutdown()
            cluster.shutdown()


def node(i: int) -> dict[str, Any]:
    """With a folder of its own for the job's files, as on a machine of its own: in a common one nodes write over each
    other's while they are read."""
    own = {"node_ip_address": f"127.0.0.{i}", "runtime_env_dir_name": f"runtime_resources_{i}"}
    return {"num_cpus": 1, **own, **SMALL_NODE}


def wait_for_agent(port: int) -> None:
    """Ray refuses a job until the head's agent has reported, which takes a busy machine some seconds."""
    from ray.job_submission import JobSubmissionClient

    end = time.monotonic() + 120
    while True:
        try:
            JobSubmissionClient(f"http://127.0.0.1:{port}").submit_job(entrypoint="true")
            return
        except (RuntimeError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(1)


def submit(port: int, out: Path, overrides: tuple[str, ...]) -> subprocess.Popen[str]:
    """As a user does, with this Python for all nodes."""
    edited = {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}",
        "RECIPE": str(TINY.relative_to(ROOT)),
        "OUT": str(out),
        "PYTHON": sys.executable,
        "RAY": f"{sys.executable} -m ray.scripts.scripts",
    }
    command = [str(ROOT / "launch" / "ray_job.sh"), *overrides]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | edited
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
