"""Pieces that both controllers' manifests share: container, volumes, node selection, job templates, restart rules."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.job import MEMORY, Job, literal

Dict = dict[str, Any]

# Exit statuses that start the job again: stopped by a signal after a checkpoint, or a lost peer, a watchdog, a signal.
# Any other is a finished run, a bug or bad input, which would only fail again. app.cluster.runtime gives them.
RESTART_STATUSES = (42, *range(128, 256))
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
GCSFUSE = "gcsfuse.csi.storage.gke.io"
COORDINATOR_PORT = 8482  # jax.distributed (8471 libtpu, 8080 megascale, 8431 metrics)


def jobset(job: Job, spec: Mapping[str, Any]) -> Dict:
    metadata: Dict = {"name": job.flags.name, "namespace": job.flags.namespace}
    if job.flags.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": job.flags.queue}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"network": network, **spec},
    }


def failure_policy(job: Job, replicated_job: str) -> Dict:
    """Start everything again, except where `replicated_job` failed by an exit status that no restart can mend."""
    rule = {
        "name": "notRestartable",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [replicated_job],
    }
    return {"maxRestarts": job.restarts, "restartStrategy": "Recreate", "rules": [rule]}


def exit_policy(container: str) -> Dict:
    """podFailurePolicy: an exit status outside RESTART_STATUSES fails the Job for the reason PodFailurePolicy."""
    statuses = {"containerName": container, "operator": "NotIn", "values": list(RESTART_STATUSES)}
    return {"rules": [{"action": "FailJob", "onExitCodes": statuses}]}


def indexed_job(pods: int, backoff_limit: int, pod: Dict, **more: Any) -> Dict:
    """The spec of a Job of `pods` pods that run together."""
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": backoff_limit,
        **more,
        "template": pod,
    }


def main_container(job: Job, env: Sequence[Dict], resources: Dict) -> Dict:
    """The project's own image. No shell: the command is the container's first process and gets SIGTERM itself."""
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": name, "mountPath": path} for name, path in _volume_names(job).items()]
    return {
        "name": "main",
        "image": job.flags.image,
        "command": ["python", "-m"],
        "args": [literal(argument) for argument in job.command],
        "env": [*env, *user_env(job)],
        "resources": resources,
        "securityContext": {"privileged": True, "runAsUser": 0} if job.flags.privileged else LEAST_PRIVILEGE,
        "volumeMounts": mounts,
    }


USER = 1000  # Dockerfile makes it
# On machines of this size gcsfuse would cache names for ever, and hosts not see each other's files.
GCSFUSE_OPTIONS = (
    "implicit-dirs", f"uid={USER}", f"gid={USER}", "metadata-cache:ttl-secs:0", "metadata-cache:negative-ttl-secs:0",
)  # fmt: skip
LEAST_PRIVILEGE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def user_env(job: Job) -> list[Dict]:
    given: list[Dict] = [{"name": name, "value": literal(value)} for name, value in job.env.items()]
    for name, (secret, key) in job.secrets.items():
        given.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return given


def from_field(name: str, path: str) -> Dict:
    """An environment variable that Kubernetes fills with a label or annotation that JobSet puts on the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def storage(job: Job) -> Dict:
    """The volumes of a pod of `main_container`, and who owns them."""
    made: list[Dict] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    for name, path in _volume_names(job).items():
        target = job.mounts[path]
        if target.startswith("gs://"):
            attributes = {"bucketName": target.removeprefix("gs://"), "mountOptions": ",".join(GCSFUSE_OPTIONS)}
            if job.host_network:  # as the pod's own service account there too, not as the machine's
                attributes["hostNetworkPodKSA"] = "true"
            source: Dict = {"csi": {"driver": GCSFUSE, "volumeAttributes": attributes}}
        elif target == MEMORY:
            source = {"hostPath": {"path": "/dev/shm", "type": "Directory"}}  # every user may write there
        else:
            source = {"persistentVolumeClaim": {"claimName": target.removeprefix("pvc:")}}
        made.append({"name": name, **source})
    owner = {} if job.flags.privileged else {"securityContext": {"fsGroup": USER}}  # a claimed disk would be root's
    return {**owner, "volumes": made}


def pod_annotations(job: Job) -> Dict:
    """gcsfuse adds its sidecar where a pod says so; "0": no limit, its own (256 MiB) is too low for a checkpoint."""
    if not any(target.startswith("gs://") for target in job.mounts.values()):
        return {}
    limits = {f"gke-gcsfuse/{kind}-limit": "0" for kind in ("cpu", "memory", "ephemeral-storage")}
    return {"gke-gcsfuse/volumes": "true", **limits}


def pod_spec(job: Job, **more: Any) -> Dict:
    """What every pod has: who it runs as, how important it is, how long it may take to stop."""
    spec: Dict = {"terminationGracePeriodSeconds": job.flags.grace_seconds}
    if job.flags.service_account:
        spec["serviceAccountName"] = job.flags.service_account
    if job.flags.priority:
        spec["priorityClassName"] = job.flags.priority
    if job.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec | more


def tpu_nodes(job: Job) -> Dict:
    """Node selector and tolerations of the slices' machines."""
    selector = {
        "cloud.google.com/gke-tpu-accelerator": job.topology.generation.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": job.topology.gke_topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if job.flags.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    if job.flags.reservation:
        selector["cloud.google.com/reservation-name"] = job.flags.reservation
    return {"nodeSelector": selector, "tolerations": tolerations}


def tpu_resources(job: Job) -> Dict:
    """All chips of the machine: with fewer a pod is never scheduled or libtpu sees a wrong topology."""
    chips = {"google.com/tpu": str(job.topology.chips_per_host)}
    return {"requests": chips, "limits": dict(chips)}


def _volume_names(job: Job) -> dict[str, str]:
    return {f"mount-{index}": path for index, path in enumerate(job.mounts)}
