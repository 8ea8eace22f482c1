"""launch/: a job on a Ray of three nodes ends as the run on one machine does, and what can be checked of the others."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
TINY = ROOT / "recipes" / "tiny_cpu.yaml"
STEPS, KILLED_AFTER = 4, 2
SHORT = [
    f"trainer.steps={STEPS}",
    f"eval.every={STEPS}",
    f"checkpoint.every={STEPS}",
    "rollout.prompts_per_step=8",
    "data.eval.limit=16",
    "logging.wandb=disabled",
    "logging.samples_per_step=1000",
]
APART = ["rollout.engines=2", "cluster.placement=disaggregated"]


@pytest.fixture(scope="module")
def ends(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same recipe on this machine and, at the same time, as a job on three nodes that loses an engine's node."""
    folder = tmp_path_factory.mktemp("launch")
    overrides = [*SHORT, f"model.path={tiny_folder}"]
    local = runs.start(TINY, overrides, folder / "local")
    program = [sys.executable, str(Path(__file__).with_name("ray_job.py")), str(folder / "job"), str(KILLED_AFTER)]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    job = subprocess.run(
        [*program, *overrides, *APART],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | runs.SOON_LOST | {"PYTHONPATH": path},
    )
    runs.finish(local, folder / "local")
    assert job.returncode == 0, job.stderr
    return {"local": folder / "local", "job": folder / "job", **json.loads(job.stdout.splitlines()[-1])}


def test_a_job_on_three_nodes_survives_the_loss_of_an_engines_node_and_says_so(ends: dict[str, Any]) -> None:
    assert ends["code"] == 0, ends["printed"] + ends["complaints"]
    assert f"{STEPS} of {STEPS}" in ends["printed"] and "succeeded" in ends["printed"] + ends["complaints"]
    assert "started anew: engine 1" in ends["printed"]
    assert sum(line.get("rollout/engine_restarts", 0) for line in runs.metrics(ends["job"])) >= 1


def test_the_job_ends_like_the_local_run(ends: dict[str, Any]) -> None:
    local, job = runs.metrics(ends["local"]), runs.metrics(ends["job"])
    assert [line["step"] for line in job] == [line["step"] for line in local] == list(range(STEPS + 1))
    assert [line.keys() for line in job] == [line.keys() for line in local]
    for step in range(1, STEPS + 1):
        texts = [{(row["row"], row["text"]) for row in runs.samples(ends[run], step)} for run in ("local", "job")]
        assert len(texts[0] & texts[1]) >= 0.95 * len(texts[0]), f"step {step}"  # engines batch otherwise: last bits
        assert job[step]["parity/abs_logprob_diff_mean"] < 1e-5
    assert job[-1]["eval/toy/avg@8"] == pytest.approx(local[-1]["eval/toy/avg@8"], abs=0.05)
    assert {path.name for path in (ends["job"] / "checkpoints").iterdir()} == {f"step_{STEPS}"}


@pytest.mark.parametrize("name", ["ray_job.sh", "slurm.sbatch"])
def test_bash_can_read_the_script(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / name)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(LAUNCH / name)], check=True)


def test_a_run_folder_that_would_be_in_the_jobs_own_copy_is_refused() -> None:
    done = subprocess.run([LAUNCH / "ray_job.sh"], env=os.environ | {"OUT": "runs/x"}, capture_output=True, text=True)
    assert done.returncode == 2 and "needs an absolute path" in done.stderr


# What KubeRay's CRDs (ray.io/v1) allow at each level that our file uses, and Kubernetes' pods at theirs.
SPEC = """activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata clusterSelector submitterConfig
managedBy deletionStrategy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources entrypointNumCpus
entrypointNumGpus ttlSecondsAfterFinished shutdownAfterJobFinishes suspend"""
CLUSTER = """headGroupSpec workerGroupSpecs rayVersion enableInTreeAutoscaling autoscalerOptions headServiceAnnotations
suspend"""
HEAD = "serviceType headService enableIngress rayStartParams template"
GROUP = "groupName replicas minReplicas maxReplicas numOfHosts rayStartParams template scaleStrategy"
POD = "containers volumes terminationGracePeriodSeconds nodeSelector tolerations serviceAccountName"
CONTAINER = "name image env envFrom resources volumeMounts command args ports lifecycle imagePullPolicy"


def allowed(section: dict[str, Any], names: str, *required: str) -> dict[str, Any]:
    assert set(required) <= set(section) <= set(names.split()), section.keys()
    return section


def check_group(group: dict[str, Any]) -> None:
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pod = allowed(allowed(group["template"], "metadata spec", "spec")["spec"], POD, "containers")
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        allowed(container, CONTAINER, "name", "image")
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(value, str) for kind in container["resources"].values() for value in kind.values())
        assert all(("value" in entry) != ("valueFrom" in entry) for entry in container["env"])


def test_the_ray_job_for_kubernetes_has_the_fields_that_its_schema_allows() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay_rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = allowed(job["spec"], SPEC, "entrypoint", "rayClusterSpec")
    cluster = allowed(spec["rayClusterSpec"], CLUSTER, "headGroupSpec", "workerGroupSpecs")
    check_group(allowed(cluster["headGroupSpec"], HEAD, "rayStartParams", "template"))
    for group in cluster["workerGroupSpecs"]:
        check_group(allowed(group, GROUP, "groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"))
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"], "a run has a fixed number of nodes"
    assert cluster["rayVersion"] == installed_ray() and all(isinstance(v, str) for v in environment(spec).values())


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]


def installed_ray() -> str:
    import ray

    return ray.__version__
