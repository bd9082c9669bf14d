"""Manifests: kept texts, schemas, the project's own rules and what they catch, Pathways' own builder."""

import copy
import json
import re

import pytest
import yaml

from app import train
from app.cluster import runtime
from launch import check, pods
from launch.job import read_job
from launch.render import render
from tests.unit.launch import cases, schemas

JOBSETS = [name for name in cases.CASES if not name.startswith("pathwaysjob")]


def manifest(name):
    return yaml.safe_load(cases.text(name))


def made(*arguments):
    return yaml.safe_load(render(read_job(arguments)))


def job(jobset, name):
    return next(part for part in jobset["spec"]["replicatedJobs"] if part["name"] == name)["template"]["spec"]


def pod(jobset, name):
    return job(jobset, name)["template"]["spec"]


def container(jobset, job_name, name):
    spec = pod(jobset, job_name)
    return next(part for part in [*spec.get("initContainers", ()), *spec["containers"]] if part["name"] == name)


def environment(part):
    return {entry["name"]: entry.get("value") for entry in part["env"]}


@pytest.mark.parametrize("name", cases.CASES)
def test_manifests_are_the_kept_ones(name):
    kept = (cases.GOLDEN / f"{name}.yaml").read_text()
    assert cases.text(name) == kept, "if this is meant: python -m tests.unit.launch.cases"


def test_nothing_else_is_kept():
    assert {path.stem for path in cases.GOLDEN.iterdir()} == set(cases.CASES)


@pytest.mark.parametrize("name", cases.CASES)
def test_manifests_fit_the_crds(name):
    assert schemas.crd_errors(manifest(name)) == []


def test_the_strict_crds_catch_mistakes():
    jobset = manifest("gke-jobset_v5p_2")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 4
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "RestartEverything"
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "many"
    assert len(schemas.crd_errors(jobset)) == 3
    pathways = manifest("pathwaysjob_v5p_2")
    pathways["spec"]["workers"][0]["type"] = "ct5p-hightpu-8t"
    assert len(schemas.crd_errors(pathways)) == 1


@pytest.mark.parametrize("name", JOBSETS)
def test_jobs_fit_the_api_of_kubernetes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for part in manifest(name)["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": part["template"]["spec"]}
        kubernetes_validate.validate(whole, "1.33", strict=True)
        whole["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize("name", JOBSETS)
def test_sizes_are_those_of_the_topology(name):
    """By hand: 128 chips are 32 hosts of four, of v5p and of v6e."""
    jobset = manifest(name)
    target, generation, slices = name.split("_")
    workers = jobset["spec"]["replicatedJobs"][-1]
    spec = workers["template"]["spec"]
    assert (workers["replicas"], spec["parallelism"], spec["completions"]) == (int(slices), 32, 32)
    nodes = spec["template"]["spec"]["nodeSelector"]
    accelerator = {"v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}[generation]
    assert nodes["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert nodes["cloud.google.com/gke-tpu-topology"] == {"v5p": "4x4x8", "v6e": "8x16"}[generation]
    if target == "gke-pathways":
        instance = {"v5p": "tpuv5:4x4x8", "v6e": "tpuv6e:8x16"}[generation]
        assert f"--instance_type={instance}" in container(jobset, "pathways-head", "pathways-rm")["args"]


def test_exit_statuses_that_start_again_are_the_programs():
    statuses = set(pods.RESTART_STATUSES)
    assert {42, 134, 137, 143} <= statuses
    assert not statuses & {0, 1, 2, 3, 125, 126, 127}
    named = {name: value for name, value in {**vars(train), **vars(runtime)}.items() if name.startswith("EXIT_")}
    assert named, "the exit statuses have names"
    for name, status in named.items():
        again = status == 42 or status >= 128
        assert (status in statuses) == again, name


def test_sigterm_reaches_python_and_it_has_time():
    jobset = made(*cases.arguments("gke-jobset", "v5p", 1, "--grace_seconds=1234"))
    main = container(jobset, "slice-job", "main")
    assert main["command"] == ["python", "-m"] and main["args"][0] == "app.train"
    assert pod(jobset, "slice-job")["terminationGracePeriodSeconds"] == 1234


def test_least_privilege_unless_asked():
    plain = made(*cases.arguments("gke-jobset", "v5p", 1))
    main, spec = container(plain, "slice-job", "main"), pod(plain, "slice-job")
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert main["securityContext"]["runAsNonRoot"] and not main["securityContext"]["allowPrivilegeEscalation"]
    assert spec["automountServiceAccountToken"] is False and "hostNetwork" not in spec
    asked = made(*cases.arguments("gke-jobset", "v5p", 1, "--privileged", "--host_network"))
    assert container(asked, "slice-job", "main")["securityContext"] == {"privileged": True, "runAsUser": 0}
    assert pod(asked, "slice-job")["hostNetwork"] is True


def test_queue_priority_spot_reservation_volumes_secrets():
    more = ("--queue=tpus", "--priority=high", "--spot", "--reservation=pool-1", "--env=NOTE=two words",
            "--secrets=HF_TOKEN=hub/token", "--config.compile_cache=/disk/cache",
            "--mounts=/disk=pvc:scratch")  # fmt: skip
    jobset = made(*cases.arguments("gke-jobset", "v6e", 2, *more))
    assert schemas.crd_errors(jobset) == []
    spec, main = pod(jobset, "slice-job"), container(jobset, "slice-job", "main")
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpus"}
    assert spec["priorityClassName"] == "high"
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert spec["nodeSelector"]["cloud.google.com/reservation-name"] == "pool-1"
    assert {entry["key"] for entry in spec["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    mounted = {entry["mountPath"]: entry["name"] for entry in main["volumeMounts"]}
    by_name = {entry["name"]: entry for entry in spec["volumes"]}
    bucket = by_name[mounted["/gcs/my-corpus"]]["csi"]["volumeAttributes"]
    assert bucket["bucketName"] == "my-corpus" and bucket["hostNetworkPodKSA"] == "true"
    assert "metadata-cache:ttl-secs:0" in bucket["mountOptions"]  # hosts see each other's checkpoints
    assert by_name[mounted["/disk"]]["persistentVolumeClaim"] == {"claimName": "scratch"}
    secret = next(entry for entry in main["env"] if entry["name"] == "HF_TOKEN")
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment(main)["JAX_COMPILATION_CACHE_DIR"] == "/disk/cache"


def test_flags_go_where_they_have_an_effect():
    several = container(manifest("gke-jobset_v6e_2"), "slice-job", "main")
    flags = environment(several)["LIBTPU_INIT_ARGS"].split()
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in flags and "--megascale_abort_on_hangs=true" in flags
    alone = container(manifest("gke-jobset_v5p_1"), "slice-job", "main")
    assert not re.search("megascale|vmem|data_parallel", environment(alone)["LIBTPU_INIT_ARGS"])
    jobset = manifest("gke-pathways_v6e_2")
    proxy = container(jobset, "pathways-head", "pathways-proxy")["args"]
    worker = container(jobset, "pathways-worker", "pathways-worker")["args"]
    assert "LIBTPU_INIT_ARGS" not in environment(container(jobset, "pathways-head", "main"))
    assert set(flags) - set(proxy) == {"--megascale_abort_on_hangs=true"} <= set(worker)
    changed = made(*cases.arguments("gke-jobset", "v6e", 1, "--xla_flags=--xla_tpu_scoped_vmem_limit_kib=65536"))
    found = environment(container(changed, "slice-job", "main"))["LIBTPU_INIT_ARGS"].split()
    assert [flag for flag in found if "vmem" in flag] == ["--xla_tpu_scoped_vmem_limit_kib=65536"]


def test_preflight_takes_the_place_of_training_and_is_not_repeated():
    jobset = made(*cases.arguments("gke-jobset", "v5p", 2, "--program=preflight"))
    arguments = container(jobset, "slice-job", "main")["args"]
    assert arguments[0] == "launch.preflight" and "--topology=v5p:4x4x8" in arguments
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_the_single_controller_is_told_so_and_elasticity_reaches_the_proxy():
    elastic = ("--config.elastic.min_slices=3", "--config.controller=single")
    jobset = made(*cases.arguments("gke-pathways", "v5p", 4, *elastic))
    main = container(jobset, "pathways-head", "main")
    assert "--config.controller=single" in main["args"]
    # The workers write what is WORKDIR/checkpoints for everyone else, by its address in the bucket.
    assert "--config.checkpoint.directory=gs://my-runs/lc-1m/checkpoints" in main["args"]
    assert environment(main)["ENABLE_PATHWAYS_PERSISTENCE"] == "1"
    assert "--num_elastic_slices=1" in container(jobset, "pathways-head", "pathways-proxy")["args"]
    pathways = made(*cases.arguments("gke-pathways", "v5p", 4, "--form=pathwaysjob", *elastic))
    assert pathways["spec"]["controller"]["elasticSlices"] == 1
    assert schemas.crd_errors(pathways) == []


def test_the_local_tier_of_checkpoints_is_in_the_machines_memory():
    tier = ("--config.checkpoint.local_directory=/local", "--config.checkpoint.local_every_steps=10")
    jobset = made(*cases.arguments("gke-jobset", "v5p", 1, *tier))
    mounted = {entry["mountPath"]: entry["name"] for entry in container(jobset, "slice-job", "main")["volumeMounts"]}
    volume = next(entry for entry in pod(jobset, "slice-job")["volumes"] if entry["name"] == mounted["/local"])
    assert volume["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
    assert schemas.crd_errors(jobset) == []


def test_a_pathways_job_asks_for_the_same_machines():
    spot = ("--form=pathwaysjob", "--spot", "--reservation=pool-1")
    pathways = made(*cases.arguments("gke-pathways", "v5p", 2, *spot))
    (worker,) = pathways["spec"]["workers"]
    assert worker["nodeSelector"] == {
        "cloud.google.com/gke-spot": "true", "cloud.google.com/reservation-name": "pool-1"}  # fmt: skip
    assert schemas.crd_errors(pathways) == []


def test_a_pod_of_one_slice_mounts_buckets_without_the_hosts_network():
    jobset = manifest("gke-jobset_v5p_1")
    volumes = pod(jobset, "slice-job")["volumes"]
    attributes = [volume["csi"]["volumeAttributes"] for volume in volumes if "csi" in volume]
    assert len(attributes) == 2 and not any("hostNetworkPodKSA" in given for given in attributes)
    annotations = job(jobset, "slice-job")["template"]["metadata"]["annotations"]
    assert annotations["gke-gcsfuse/volumes"] == "true" and annotations["gke-gcsfuse/memory-limit"] == "0"


@pytest.mark.parametrize("name", JOBSETS)
def test_own_rules_hold(name):
    assert list(check.problems(manifest(name))) == []


def change(path, value):
    """A function that sets jobset[path...] to `value`; None removes it."""

    def apply(jobset):
        *way, last = path
        place = jobset["spec"]
        for key in way:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return apply


def spec_of(index, *path):
    return ("replicatedJobs", index, "template", "spec", *path)


def pod_of(index, *path):
    return spec_of(index, "template", "spec", *path)


def without_env(index, kind, number, name):
    def apply(jobset):
        part = jobset["spec"]["replicatedJobs"][index]["template"]["spec"]["template"]["spec"][kind][number]
        part["env"] = [entry for entry in part["env"] if entry["name"] != name]

    return apply


def rename(name):
    def apply(jobset):
        jobset["metadata"]["name"] = name

    return apply


LIMITS = ("containers", 0, "resources", "limits", "google.com/tpu")
MULTI_MUTATIONS = {
    "wrong chips per VM": (change(pod_of(0, *LIMITS), "8"), "google.com/tpu"),
    "no chips": (change(pod_of(0, *LIMITS), None), "google.com/tpu"),
    "wrong host count": (change(spec_of(0, "parallelism"), 16), "16 pods"),
    "too few completions": (change(spec_of(0, "completions"), 31), "completions 31"),
    "wrong topology": (change(pod_of(0, "nodeSelector", "cloud.google.com/gke-tpu-topology"), "4x4x4"), "16 hosts"),
    "no such slice": (change(pod_of(0, "nodeSelector", "cloud.google.com/gke-tpu-topology"), "3x3x3"), "accelerator"),
    "sides in another order": (
        change(pod_of(0, "nodeSelector", "cloud.google.com/gke-tpu-topology"), "8x4x4"), "GKE calls"),
    "not indexed": (change(spec_of(0, "completionMode"), "NonIndexed"), "Indexed"),
    "restarts beside a failure policy": (change(pod_of(0, "restartPolicy"), "OnFailure"), "restartPolicy"),
    "no grace": (change(pod_of(0, "terminationGracePeriodSeconds"), None), "terminationGracePeriod"),
    "another container's exit status": (
        change(spec_of(0, "podFailurePolicy", "rules", 0, "onExitCodes", "containerName"), "train"), "'train'"),
    "a rule without a name": (change(("failurePolicy", "rules", 0, "name"), None), "needs a name"),
    "a rule about no job": (change(("failurePolicy", "rules", 0, "targetReplicatedJobs"), ["workers"]), "'workers'"),
    "no sidecar for the buckets": (
        change(spec_of(0, "template", "metadata", "annotations", "gke-gcsfuse/volumes"), None), "gke-gcsfuse/volumes"),
    "slices mix in a pool": (change(spec_of(0, "template", "metadata", "annotations"), {}), "exclusive-topology"),
    "worker ids by hand": (
        change(pod_of(0, "containers", 0, "env"), [{"name": "TPU_WORKER_ID", "value": "0"}]), "TPU_WORKER_ID"),
    "a name in capitals": (rename("LC"), "RFC 1035"),
    "a long name": (rename("l" * 44), "longer than 63"),
    "backoff beyond 32 bits": (change(spec_of(0, "backoffLimit"), 2**31), "backoffLimit"),
}  # fmt: skip
SINGLE_MUTATIONS = {
    "no JAX_PLATFORMS": (without_env(0, "containers", 0, "JAX_PLATFORMS"), "JAX_PLATFORMS"),
    "no proxy address": (without_env(0, "containers", 0, "JAX_BACKEND_TARGET"), "JAX_BACKEND_TARGET"),
    "no insecure grpc": (
        without_env(0, "containers", 0, "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"), "IFRT_PROXY"),
    "another port": (change(pod_of(0, "initContainers", 1, "args", 0), "--server_port=38681"), "38681"),
    "another manager": (
        change(pod_of(1, "containers", 0, "args", 0), "--resource_manager_address=$(PATHWAYS_HEAD):1"), "manager"),
    "no head address": (without_env(1, "containers", 0, "PATHWAYS_HEAD"), "PATHWAYS_HEAD is used"),
    "no slice id": (without_env(1, "containers", 0, "MEGASCALE_SLICE_ID"), "MEGASCALE_SLICE_ID"),
    "another number of slices": (change(("replicatedJobs", 1, "replicas"), 3), "instance_count"),
    "another instance": (
        change(pod_of(0, "initContainers", 0, "args", 4), "--instance_type=tpuv5:4x4x4"), "instance_type"),
    "TPUs on the head": (
        change(pod_of(0, "containers", 0, "resources", "limits"), {"google.com/tpu": "4"}), "asks for TPUs"),
    "no proxy": (change(pod_of(0, "initContainers", 1, "name"), "sidecar"), "pathways-proxy"),
    "success of no job": (change(("successPolicy", "targetReplicatedJobs"), ["leader"]), "'leader'"),
    "coordinator that is no job": (change(("coordinator", "replicatedJob"), "leader"), "'leader'"),
    "two orders": (change(("replicatedJobs", 1, "dependsOn"), [{"name": "pathways-head"}]), "dependsOn"),
    "a long name": (rename("l" * 23), "label longer"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, mutation",
    [("gke-jobset_v5p_2", key) for key in MULTI_MUTATIONS] + [("gke-pathways_v5p_2", key) for key in SINGLE_MUTATIONS],
)
def test_own_rules_catch_mutations(name, mutation):
    apply, expected = (MULTI_MUTATIONS if "jobset" in name else SINGLE_MUTATIONS)[mutation]
    jobset = copy.deepcopy(manifest(name))
    apply(jobset)
    try:
        found = list(check.problems(jobset))
    except KeyError as error:  # a manifest without its coordinator's job cannot be looked at further
        found = [f"{error}"]
    assert any(expected in line for line in found), found


def differences(ours, theirs, path=""):
    """Paths at which a value of `theirs` is not in `ours`; lists of named things are compared by name."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in theirs.items():
            yield from differences(ours.get(key), value, f"{path}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        named = all(isinstance(part, dict) and "name" in part for part in [*ours, *theirs])
        by_name = {part["name"]: part for part in ours} if named else {}
        for part in theirs:
            if named:
                yield from differences(by_name.get(part["name"]), part, f"{path}[{part['name']}]")
            elif part not in ours:
                yield f"{path}: {part}"
    elif (ours or {}) != (theirs or {}):
        yield f"{path}: {ours!r}, theirs {theirs!r}"


def test_nothing_of_pathways_own_builder_is_missing():
    """pathwaysutils' PathwaysJobSet (a kept output, for v5p:4x4x4, two slices) asks for nothing more than ours."""
    path = schemas.SHARED / "golden_pathways_jobset.yaml"
    if not path.exists():
        pytest.skip(f"the output of pathwaysutils' builder is not here: {path}")
    theirs = yaml.safe_load(path.read_text().replace("gs://b/pw", "gs://bkt/pw"))
    arguments = [part for part in cases.arguments("gke-pathways", "v5p", 2) if "--topology" not in part]
    ours = made(*arguments, "--topology=v5p:4x4x4", "--scratch=gs://bkt/pw", "--max_restarts=3", "--env=A=b")
    found = sorted(differences(ours, theirs))
    # What is ours by choice: the trainer's container, restarts of a worker (theirs: a million a host), tags, mounts,
    # elasticity, and no sidecar for Python beside the workers.
    meant = (
        r"user-workload", r"shared-memory|colocated|SHM_DIRECTORY|sidecar", r"gcsfuse",
        r"backoffLimit: 64, theirs 16000000", r"image: '.*:20261101-jax_0.12.0'", r"num_elastic_slices",
    )  # fmt: skip
    assert [line for line in found if not any(re.search(pattern, line) for pattern in meant)] == []
    assert json.dumps(theirs).count("pathways-") > 5  # it is what we think it is
