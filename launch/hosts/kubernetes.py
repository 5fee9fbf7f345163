"""Kubernetes: the manifest of a JobSet, which runs a pod per host and restarts all of them if one fails.

[JobSet's API reference, jobset.x-k8s.io/v1alpha2]
"""

from typing import Any

import yaml

from sharding import ShardingError
from sharding.distributed import processes

from ..config.launch_config import Launch

PORT = 1234
WORKERS = "workers"

POD = "SHARDING_POD"
"""Environment variable: set in the pods of this manifest, whose environment has the process number."""


def manifest(config: Launch) -> str:
    """The manifest as YAML, for `kubectl apply -f -`."""
    count = config.nodes or config.processes
    if count is None:
        raise ShardingError("sharding launch --kubernetes", required="the number of pods", fix="--nodes 2")
    return yaml.safe_dump(_job_set(config, count), sort_keys=False)


def _job_set(config: Launch, count: int) -> dict[str, Any]:
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        # A failed pod fails the job, and the JobSet then recreates all pods.
        "backoffLimit": 0,
        "template": {"spec": _pod(config, count)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": config.name},
        "spec": {
            "failurePolicy": {"maxRestarts": config.restarts},
            "network": {"enableDNSHostnames": True, "subdomain": config.name, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(config: Launch, count: int) -> dict[str, Any]:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": config.gpus_per_host}}} if config.gpus_per_host else {}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(config.grace),
        "containers": [
            {
                "name": "worker",
                "image": config.image,
                "command": _command(config),
                "env": _environment(config, count),
                **gpus,
            }
        ],
    }


def _command(config: Launch) -> list[str]:
    """Each pod runs a launcher without restarts for one process; the JobSet restarts."""
    names = ("step_timeout", "start_timeout", "grace")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    options = [f"--{name.replace('_', '-')}={value:g}" for name, value in given.items()]
    return ["sharding", "launch", "--restarts=0", *options, "--", *config.command]


def _environment(config: Launch, count: int) -> list[dict[str, Any]]:
    coordinator = f"{config.name}-{WORKERS}-0-0.{config.name}:{PORT}"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    restart = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    variables = [
        {"name": POD, "value": "1"},
        {"name": processes.COORDINATOR, "value": coordinator},
        {"name": processes.NUM_PROCESSES, "value": str(count)},
        {"name": processes.PROCESS, "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": processes.RESTART, "valueFrom": {"fieldRef": {"fieldPath": restart}}},
        {"name": processes.CONNECT_TIMEOUT, "value": f"{max(config.connect_timeout, 300.0):g}"},
    ]
    if config.devices_per_process:
        variables.append({"name": processes.CPU_DEVICES, "value": str(config.devices_per_process)})
    return variables
