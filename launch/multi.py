"""The JobSet of a run with a process per host: one Job per slice, one pod per host.

GKE's TPU webhook adds what a pod must know of the others (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES, and MEGASCALE_* where
there are several slices), from which jax.distributed finds coordinator, number and id of the processes. Setting any of
them here would override it.
"""

from typing import Any

from launch import pods
from launch.job import SLICE_JOB, Job
from launch.xla_flags import flags_for


def manifest(job: Job) -> dict[str, Any]:
    flags = flags_for(job.topology, job.slices, job.flags.xla_flags)
    env = [
        {"name": "JAX_PLATFORMS", "value": "tpu,cpu"},
        {"name": "JAX_COMPILATION_CACHE_DIR", "value": job.cache},
        {"name": "LIBTPU_INIT_ARGS", "value": " ".join(flags)},
    ]
    container = pods.main_container(job, env, pods.tpu_resources(job))
    container["ports"] = [{"containerPort": port} for port in (pods.COORDINATOR_PORT, 8471, 8080, 8431)]
    pod = {
        "metadata": {"annotations": {pods.EXCLUSIVE: pods.NODE_POOL, **pods.pod_annotations(job)}},
        "spec": pods.pod_spec(
            job,
            restartPolicy="Never",
            automountServiceAccountToken=False,  # nothing here speaks to the cluster
            **pods.tpu_nodes(job),
            **pods.storage(job),
            containers=[container],
        ),
    }
    template = {
        "metadata": {"annotations": {pods.EXCLUSIVE: pods.NODE_POOL}},
        "spec": pods.indexed_job(job.hosts, 0, pod, podFailurePolicy=pods.exit_policy("main")),
    }
    return pods.jobset(
        job,
        {
            "failurePolicy": pods.failure_policy(job, SLICE_JOB),
            "replicatedJobs": [{"name": SLICE_JOB, "replicas": job.slices, "template": template}],
        },
    )
