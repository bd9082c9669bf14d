"""The settings that launch/tpu_vm.sh works from: NAME=VALUE lines, read by it as text and never run."""

import shlex

from launch.job import MEMORY, Job
from launch.xla_flags import flags_for

# Software of the virtual machines, by generation, as the Cloud TPU API names it.
RUNTIME_VERSIONS = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def settings(job: Job) -> str:
    """One line a setting. COMMAND is quoted for the shell of the virtual machines."""
    env = {
        "JAX_PLATFORMS": "tpu,cpu",
        "JAX_COMPILATION_CACHE_DIR": job.cache,
        "LIBTPU_INIT_ARGS": " ".join(flags_for(job.topology, job.slices, job.flags.xla_flags)),
        **job.env,
    }
    values = {
        "NAME": job.flags.name,
        "PROJECT": job.flags.project,
        "ZONE": job.flags.zone,
        "SLICES": job.slices,
        "HOSTS": job.hosts,
        "TYPE": job.topology.generation.accelerator_prefix,
        "TOPOLOGY": job.topology.gke_topology,
        "RUNTIME_VERSION": RUNTIME_VERSIONS[job.topology.generation.name],
        "SPOT": "yes" if job.flags.spot else "",
        "RESERVATION": job.flags.reservation,
        "SERVICE_ACCOUNT": job.flags.service_account,
        "IMAGE": job.flags.image,
        "MOUNTS": " ".join(f"{path}={target}" for path, target in job.mounts.items() if target != MEMORY),
        "GRACE_SECONDS": job.flags.grace_seconds,
        "MAX_RESTARTS": job.restarts,
        "COMMAND": _command(job, env),
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _command(job: Job, env: dict[str, str]) -> str:
    """In a container of the image, or in the virtual environment that tpu_vm.sh makes of the copied sources. Both get
    JAX_COORDINATOR_ADDRESS from the node's own environment."""
    pairs = [f"{name}={value}" for name, value in env.items()]
    if not job.flags.image:
        return shlex.join(["env", *pairs, ".venv/bin/python", "-m", *job.command])
    name = f"--name={job.flags.name}"
    options = ["--rm", "--init", name, "--privileged", "--net=host", "--shm-size=16g", "--user=0"]
    sources = {path: "/dev/shm" if target == MEMORY else path for path, target in job.mounts.items()}
    options += [f"--volume={source}:{path}" for path, source in sources.items()]
    options += [f"--env={pair}" for pair in ("JAX_COORDINATOR_ADDRESS", *pairs)]
    return shlex.join(["docker", "run", *options, "--entrypoint=python", job.flags.image, "-m", *job.command])
