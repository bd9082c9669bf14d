"""What is wrong with a JobSet, beyond its schema: the webhook's rules, and what makes a TPU job hang instead of fail.

Reads a finished manifest, a hand-edited one too, and shares nothing with the templates but the table of TPUs.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from app.cluster.hardware import GENERATIONS, Topology, parse_topology

Dict = Mapping[str, Any]
MAX_NAME = 63  # of pods, jobs and label values
MAX_BACKOFF = 2**31 - 1
PROXY_ENV = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS")


def problems(jobset: Dict) -> Iterator[str]:
    """A line for every problem, the field first."""
    spec, name = jobset["spec"], jobset["metadata"]["name"]
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    coordinator = spec.get("coordinator", {}).get("replicatedJob")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name {name!r} is not an RFC 1035 label"
    yield from _references(spec, jobs)
    if coordinator and len(f"{name}-{coordinator}-0-0.{name}") > MAX_NAME:
        yield f"metadata.name {name!r} makes the coordinator's label longer than {MAX_NAME}"
    for job in jobs.values():
        yield from _job(name, job)
    workers = [job for job in jobs.values() if _slice(job) is not None]
    if len(workers) != 1:
        yield f"replicatedJobs: {len(workers)} of them ask for TPUs by accelerator and topology, expected one"
    elif coordinator:
        yield from _pathways(jobs, coordinator, workers[0])


def _pod(job: Dict) -> Dict:
    return job["template"]["spec"]["template"]["spec"]


def _containers(pod: Dict) -> dict[str, Dict]:
    return {container["name"]: container for container in [*pod.get("initContainers", ()), *pod["containers"]]}


def _env(container: Dict) -> dict[str, str | None]:
    """Name -> value, None for one that comes from a field or a secret."""
    return {entry["name"]: entry.get("value") for entry in container.get("env", ())}


def _references(spec: Dict, jobs: Dict) -> Iterator[str]:
    """Names of replicated jobs, in all places that use them, and what may not be combined."""
    named = {
        "coordinator": [spec["coordinator"]["replicatedJob"]] if "coordinator" in spec else [],
        "successPolicy": spec.get("successPolicy", {}).get("targetReplicatedJobs", []),
    }
    for rule in spec.get("failurePolicy", {}).get("rules", ()):
        named[f"failurePolicy rule {rule.get('name')}"] = rule.get("targetReplicatedJobs", [])
        if not rule.get("name"):
            yield "failurePolicy.rules: every rule needs a name"
    for where, targets in named.items():
        yield from (f"{where} names {target!r}, which is no replicated job" for target in targets if target not in jobs)
    if len(jobs) != len(spec["replicatedJobs"]):
        yield "replicatedJobs: a name is used twice"
    in_order = spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
    if in_order and any(job.get("dependsOn") for job in jobs.values()):
        yield "startupPolicy InOrder and dependsOn exclude each other"


def _job(name: str, job: Dict) -> Iterator[str]:
    where, spec, pod = job["name"], job["template"]["spec"], _pod(job)
    pods, replicas = spec["parallelism"], job["replicas"]
    if spec["completions"] != pods:
        yield f"{where}: parallelism {pods} is not completions {spec['completions']}: its pods must run together"
    if spec.get("completionMode") != "Indexed":
        yield f"{where}: completionMode must be Indexed, a pod's index is its host's number"
    if not 0 <= spec["backoffLimit"] <= MAX_BACKOFF:
        yield f"{where}: backoffLimit {spec['backoffLimit']} is not between 0 and {MAX_BACKOFF}"
    if len(f"{name}-{where}-{replicas - 1}-{pods - 1}-abcde") > MAX_NAME:
        yield f"{where}: the names of its pods are longer than {MAX_NAME}"
    if policy := spec.get("podFailurePolicy"):
        if pod.get("restartPolicy") != "Never":
            yield f"{where}: podFailurePolicy needs restartPolicy Never"
        for rule in policy["rules"]:
            container = rule.get("onExitCodes", {}).get("containerName")
            if container and container not in _containers(pod):
                yield f"{where}: podFailurePolicy names the container {container!r}, which the pod does not have"
    if "terminationGracePeriodSeconds" not in pod:
        yield f"{where}: terminationGracePeriodSeconds is missing: 30 seconds are too short for a checkpoint"
    buckets = any(volume.get("csi", {}).get("driver", "").startswith("gcsfuse") for volume in pod.get("volumes", ()))
    annotations = spec["template"].get("metadata", {}).get("annotations", {})
    if buckets and annotations.get("gke-gcsfuse/volumes") != "true":
        yield f"{where}: the annotation gke-gcsfuse/volumes is missing: its pods would wait for their buckets for ever"
    if (topology := _slice(job)) is not None:
        yield from _tpus(where, spec, replicas, topology)


def _slice(job: Dict) -> Topology | None:
    """The slice that a replicated job's node selector asks for; None if there is none or it is not a valid one."""
    selector = _pod(job).get("nodeSelector", {})
    accelerator = selector.get("cloud.google.com/gke-tpu-accelerator")
    shape = selector.get("cloud.google.com/gke-tpu-topology")
    for generation in GENERATIONS.values():
        if generation.gke_accelerator == accelerator:
            try:
                return parse_topology(f"{generation.name}:{shape}")
            except ValueError:
                return None
    return None


def _tpus(where: str, spec: Dict, replicas: int, topology: Topology) -> Iterator[str]:
    pod = spec["template"]["spec"]
    if spec["parallelism"] != topology.hosts:
        yield f"{where}: {spec['parallelism']} pods, but a slice of {topology} is {topology.hosts} hosts"
    if replicas > 1 and topology.hosts == 1:
        yield f"{where}: {replicas} slices of {topology}, which is one host: several slices need several hosts each"
    if topology.gke_topology != pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]:
        yield f"{where}: GKE calls the topology {topology.gke_topology}"
    asked = [container.get("resources", {}) for container in pod["containers"]]
    limits = [entry.get("limits", {}).get("google.com/tpu") for entry in asked]
    if [entry.get("requests", {}).get("google.com/tpu") for entry in asked] != limits:
        yield f"{where}: requests and limits of google.com/tpu must be equal"
    if sum(int(limit or 0) for limit in limits) != topology.chips_per_host:
        yield f"{where}: google.com/tpu {limits}, but a host of {topology} has {topology.chips_per_host} chips"
    exclusive = spec["template"].get("metadata", {}).get("annotations", {})
    if exclusive.get("alpha.jobset.sigs.k8s.io/exclusive-topology") != "cloud.google.com/gke-nodepool":
        yield f"{where}: the annotation exclusive-topology is missing: two slices' pods would mix in one node pool"
    for container in pod["containers"]:
        own = [name for name in _env(container) if name.startswith(("TPU_WORKER_", "TPU_TOPOLOGY", "TPU_PROCESS_"))]
        yield from (f"{where}: {name} is set here, which overrides what GKE gives each pod" for name in own)


def _pathways(jobs: Dict, head_name: str, workers: Dict) -> Iterator[str]:
    """Head, proxy and workers must agree on ports, sizes and variables."""
    head = _containers(_pod(jobs[head_name]))
    worker = next(iter(_containers(_pod(workers)).values()))
    missing = [name for name in ("pathways-rm", "pathways-proxy", "main") if name not in head]
    if missing:
        yield f"{head_name}: containers {', '.join(missing)} are missing"
        return
    manager, proxy, main = head["pathways-rm"], head["pathways-proxy"], head["main"]
    env = _env(main)
    yield from (f"main: {name} is missing: jax would not use the proxy" for name in PROXY_ENV if not env.get(name))
    if "proxy" not in (env.get("JAX_PLATFORMS") or ""):
        yield f"main: JAX_PLATFORMS={env.get('JAX_PLATFORMS')} has no 'proxy'"
    port = _argument(proxy, "server_port")
    if not (env.get("JAX_BACKEND_TARGET") or "").endswith(f":{port}"):
        yield f"main: JAX_BACKEND_TARGET={env.get('JAX_BACKEND_TARGET')}, but the proxy listens on {port}"
    if any("google.com/tpu" in part.get("resources", {}).get("limits", {}) for part in head.values()):
        yield f"{head_name}: asks for TPUs; only workers have them"
    for container in (proxy, worker):
        if _argument(container, "resource_manager_address") != f"$(PATHWAYS_HEAD):{_argument(manager, 'server_port')}":
            yield f"{container['name']}: --resource_manager_address is not the manager's port"
        used = {name for text in container["args"] for name in re.findall(r"\$\((\w+)\)", text)}
        yield from (f"{container['name']}: {name} is used but not set" for name in sorted(used - set(_env(container))))
    needed = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
    yield from (f"{worker['name']}: {name} is missing" for name in needed if name not in _env(worker))
    if _argument(manager, "instance_count") != str(workers["replicas"]):
        yield f"pathways-rm: --instance_count={_argument(manager, 'instance_count')} of {workers['replicas']} slices"
    topology = _slice(workers)
    assert topology is not None  # the caller looked
    if (_argument(manager, "instance_type") or "").partition(":")[2] != topology.gke_topology:
        yield f"pathways-rm: --instance_type={_argument(manager, 'instance_type')} is not {topology.gke_topology}"


def _argument(container: Dict, name: str) -> str | None:
    prefix = f"--{name}="
    return next((text.removeprefix(prefix) for text in container["args"] if text.startswith(prefix)), None)
