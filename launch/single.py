"""The manifests of a run under one controller (Pathways): a head pod with resource manager, proxy and trainer, and a
Job of workers per slice. As a JobSet, or as the PathwaysJob from which Google's controller makes about the same one.
"""

from typing import Any

from launch import pods
from launch.job import HEAD_JOB, WORKER_JOB, Job
from launch.xla_flags import flags_for, split_for_pathways

Dict = dict[str, Any]

# What Pathways calls a generation with machines of four chips.
INSTANCE_TYPES = {"v4": "tpuv4", "v5e": "tpuv5e", "v5p": "tpuv5", "v6e": "tpuv6e", "tpu7x": "tpu7x"}
IMAGES = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"
PROXY_PORT, MANAGER_PORT, WORKER_PORT = 29000, 29001, 29005
# Restarts of one worker beside the others, as when it is suspended for maintenance and resumed.
WORKER_RESTARTS = 4
_LABEL, _ANNOTATION = "metadata.labels['jobset.sigs.k8s.io/{}']", "metadata.annotations['jobset.sigs.k8s.io/{}']"


def manifest(job: Job) -> Dict:
    """The JobSet."""
    return pods.jobset(
        job,
        {
            "coordinator": {"replicatedJob": HEAD_JOB},
            "startupPolicy": {"startupPolicyOrder": "InOrder"},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HEAD_JOB]},
            "failurePolicy": pods.failure_policy(job, HEAD_JOB),
            "replicatedJobs": [
                {"name": HEAD_JOB, "replicas": 1, "template": _head(job)},
                {"name": WORKER_JOB, "replicas": job.slices, "template": _workers(job)},
            ],
        },
    )


def pathways_job(job: Job) -> Dict:
    """The PathwaysJob: its controller adds proxy, resource manager, workers and the variables that connect them."""
    proxy_flags, worker_flags = split_for_pathways(_xla_flags(job))
    custom = [("proxy_server", proxy_flags), ("worker", worker_flags)]
    worker: Dict = {
        "type": job.topology.machine_types[4],
        "topology": job.topology.gke_topology,
        "numSlices": job.slices,
        "maxSliceRestarts": WORKER_RESTARTS,
        "terminationGracePeriodSeconds": job.flags.grace_seconds,
    }
    if job.flags.priority:
        worker["priorityClassName"] = job.flags.priority
    own = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")  # of the controller
    if more := {key: value for key, value in pods.tpu_nodes(job)["nodeSelector"].items() if key not in own}:
        worker["nodeSelector"] = more
    pod = {
        "metadata": {"annotations": pods.pod_annotations(job)},
        "spec": pods.pod_spec(
            job, restartPolicy="Never", **pods.storage(job), containers=[_trainer(job, _trainer_env())]
        ),
    }
    controller: Dict = {"deploymentMode": "default", "mainContainerName": "main", "template": pod}
    if elastic := job.config.elastic.min_slices:
        controller["elasticSlices"] = job.slices - elastic
    metadata = pods.jobset(job, {})["metadata"]
    return {
        "apiVersion": "pathways-job.pathways.domain/v1",
        "kind": "PathwaysJob",
        "metadata": metadata,
        "spec": {
            "maxRestarts": job.restarts,
            "pathwaysDir": job.scratch,
            "pathwaysVersion": job.flags.pathways_tag,
            "workers": [worker],
            "controller": controller,
            "customComponents": [{"componentType": kind, "customFlags": flags} for kind, flags in custom if flags],
        },
    }


def _xla_flags(job: Job) -> list[str]:
    return flags_for(job.topology, job.slices, job.flags.xla_flags)


def _head(job: Job) -> Dict:
    exclusive = {pods.EXCLUSIVE: "kubernetes.io/hostname"}  # two heads on a node would fight for the ports
    pod = {
        "metadata": {"annotations": {**exclusive, **pods.pod_annotations(job)}},
        "spec": pods.pod_spec(
            job,
            restartPolicy="Never",
            nodeSelector={pods.NODE_POOL: job.flags.head_pool},
            **pods.storage(job),
            initContainers=[_manager(job), _proxy(job)],
            containers=[_trainer(job, _trainer_env())],
        ),
    }
    return {
        "metadata": {"annotations": exclusive},
        "spec": pods.indexed_job(1, 0, pod, podFailurePolicy=pods.exit_policy("main")),
    }


def _trainer_env() -> list[Dict]:
    values = {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": f"grpc://localhost:{PROXY_PORT}",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",  # the connection does not leave the pod
        "XCLOUD_ENVIRONMENT": "GCP",
        "ENABLE_PATHWAYS_PERSISTENCE": "1",  # workers write their own parts of a checkpoint
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _trainer(job: Job, env: list[Dict]) -> Dict:
    limits = {"cpu": str(job.flags.head_cpu), "memory": job.flags.head_memory}
    return pods.main_container(job, env, {"requests": limits, "limits": dict(limits)})


def _manager(job: Job) -> Dict:
    instance = f"{INSTANCE_TYPES[job.topology.generation.name]}:{job.topology.gke_topology}"
    return _sidecar(
        "pathways-rm",
        f"{IMAGES}/server:{job.flags.pathways_tag}",
        args=[
            f"--server_port={MANAGER_PORT}",
            f"--gcs_scratch_location={job.scratch}",
            "--node_type=resource_manager",
            f"--instance_count={job.slices}",
            f"--instance_type={instance}",
            "--enable_gcs_olm=false",  # a rule to clean up the bucket, for which it would have to be its administrator
        ],
        env=[
            pods.from_field("REPLICATED_JOB_NAME", _ANNOTATION.format("replicatedjob-name")),
            pods.from_field("JOBSET_NAME", _ANNOTATION.format("jobset-name")),
            pods.from_field("HOST_ADDRESS", _LABEL.format("coordinator")),
            {"name": "TPU_SKIP_MDS_QUERY", "value": "true"},
        ],
        ports=(MANAGER_PORT, MANAGER_PORT + 1),
        limits={"cpu": "8", "memory": "32G"},
    )


def _proxy(job: Job) -> Dict:
    elastic = job.config.elastic.min_slices
    return _sidecar(
        "pathways-proxy",
        f"{IMAGES}/proxy_server:{job.flags.pathways_tag}",
        args=[
            f"--server_port={PROXY_PORT}",
            f"--resource_manager_address=$(PATHWAYS_HEAD):{MANAGER_PORT}",
            f"--gcs_scratch_location={job.scratch}",
            *([f"--num_elastic_slices={job.slices - elastic}"] if elastic else []),
            *split_for_pathways(_xla_flags(job))[0],
        ],
        env=[
            pods.from_field("PATHWAYS_HEAD", _LABEL.format("coordinator")),
            {"name": "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "value": "true"},
        ],
        ports=(PROXY_PORT,),
        limits={"cpu": "16", "memory": "100G"},
    )


def _sidecar(name: str, image: str, *, args: list[str], env: list[Dict], ports: tuple[int, ...], limits: Dict) -> Dict:
    """An init container that keeps running: it is there before the trainer starts and ends with it."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Always",
        "restartPolicy": "Always",
        "args": args,
        "env": env,
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in ports],
        "resources": {"limits": limits},
    }


def _workers(job: Job) -> Dict:
    container = {
        "name": WORKER_JOB,
        "image": f"{IMAGES}/server:{job.flags.pathways_tag}",
        "imagePullPolicy": "Always",
        "args": [
            f"--resource_manager_address=$(PATHWAYS_HEAD):{MANAGER_PORT}",
            f"--server_port={WORKER_PORT}",
            f"--gcs_scratch_location={job.scratch}",
            *split_for_pathways(_xla_flags(job))[1],
        ],
        "env": [
            {"name": "TPU_MIN_LOG_LEVEL", "value": "0"},
            {"name": "TF_CPP_MIN_LOG_LEVEL", "value": "0"},
            {"name": "XCLOUD_ENVIRONMENT", "value": "GCP"},
            {"name": "MEGASCALE_GRPC_ENABLE_XOR_TRACER", "value": "false"},
            pods.from_field("MEGASCALE_NUM_SLICES", _LABEL.format("replicatedjob-replicas")),
            pods.from_field("JOBSET_NAME", _ANNOTATION.format("jobset-name")),
            pods.from_field("REPLICATED_JOB_NAME", _ANNOTATION.format("replicatedjob-name")),
            pods.from_field("MEGASCALE_SLICE_ID", _LABEL.format("job-index")),
            pods.from_field("PATHWAYS_HEAD", _LABEL.format("coordinator")),
            pods.from_field("MEGASCALE_COORDINATOR_ADDRESS", _LABEL.format("coordinator")),
        ],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (WORKER_PORT, WORKER_PORT + 1, 8471, 8080)],
        "resources": pods.tpu_resources(job),
        "volumeMounts": [{"name": "shared-tmp", "mountPath": "/tmp"}],
    }
    if job.flags.privileged:
        container["securityContext"] = {"privileged": True}
    pod = {
        "metadata": {"annotations": {pods.EXCLUSIVE: pods.NODE_POOL}},
        "spec": pods.pod_spec(
            job,
            restartPolicy="OnFailure",
            **pods.tpu_nodes(job),
            volumes=[{"name": "shared-tmp", "hostPath": {"path": "/tmp", "type": "DirectoryOrCreate"}}],
            containers=[container],
        ),
    }
    return {"spec": pods.indexed_job(job.hosts, job.hosts * WORKER_RESTARTS, pod)}
