"""A small stand-in for JobSet, its Jobs and GKE's TPU webhook: runs a rendered manifest's pods as processes here.

Each pod gets its container's command and environment, and what GKE would add; the names of hosts are resolved to
loopback addresses. What ends a pod, and what then happens, goes by the manifest's own rules.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Runs "python -m MODULE ARGS" as the pod would, with the probe for TPU hardware answering yes, and one CPU device that
# says of which slice it is, as a TPU does.
AS_IF_ON_TPU = (
    "import os, runpy, sys\n"
    "from jax._src.clusters import cloud_tpu_cluster\n"
    "cloud_tpu_cluster.running_in_cloud_tpu_vm = True\n"
    "from app.cluster import mesh\n"
    "hosts = len(os.environ['TPU_WORKER_HOSTNAMES'].split(','))\n"
    "mesh.device_slice = lambda device: device.process_index // hosts\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
)


@dataclasses.dataclass
class Pod:
    name: str
    process: subprocess.Popen
    output: Path


class JobSet:
    """mounts: mount path -> directory here. environ: wins over the manifest's variables."""

    def __init__(self, manifest, folder, mounts, environ):
        self.name = manifest["metadata"]["name"]
        self.spec = manifest["spec"]
        (self.job,) = self.spec["replicatedJobs"]
        self.template = self.job["template"]["spec"]
        self.pod = self.template["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.folder, self.mounts, self.environ = Path(folder), mounts, environ
        self.restarts = 0
        self.pods: list[Pod] = []

    def environments(self):
        """By pod, in the order of slices and hosts: the container's variables and those of GKE's webhook."""
        slices, hosts = self.job["replicas"], self.template["parallelism"]
        named = {entry["name"]: expand(entry["value"]) for entry in self.container["env"]}
        address = {(s, h): f"127.0.0.{1 + s * hosts + h}" for s in range(slices) for h in range(hosts)}
        for s in range(slices):
            for h in range(hosts):
                added = {
                    "TPU_WORKER_ID": str(h),
                    "TPU_WORKER_HOSTNAMES": ",".join(address[s, other] for other in range(hosts)),
                }
                if slices > 1:
                    added |= {
                        "MEGASCALE_NUM_SLICES": str(slices),
                        "MEGASCALE_SLICE_ID": str(s),
                        "MEGASCALE_COORDINATOR_ADDRESS": address[0, 0],
                    }
                yield f"{self.name}-{self.job['name']}-{s}-{h}", named | added

    def start(self):
        """All pods, as a Job with as many in parallel as completions starts them."""
        arguments = [self._mounted(expand(text)) for text in self.container["args"]]
        assert self.container["command"] == ["python", "-m"]
        self.pods = []
        for name, variables in self.environments():
            output = self.folder / f"{name}.{self.restarts}.log"
            with open(output, "w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-c", AS_IF_ON_TPU, *arguments],
                    env={**os.environ, **{k: self._mounted(v) for k, v in variables.items()}, **self.environ},
                    stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
            self.pods.append(Pod(name, process, output))

    def run(self, disturb=lambda jobset: None, timeout=600):
        """"Complete" or "Failed", by the manifest's rules. `disturb` is called again and again while pods run."""
        self.start()
        ends = time.monotonic() + timeout
        try:
            while True:
                assert time.monotonic() < ends, f"not done after {timeout} s:\n{self.logs()}"
                disturb(self)
                statuses = [pod.process.poll() for pod in self.pods]
                failed = next((status for status in statuses if status), None)
                if failed is not None:
                    if self._action(self._reason(failed)) == "FailJobSet" or self.restarts >= self._max_restarts():
                        return "Failed"
                    self.stop()  # restartStrategy Recreate: every Job is deleted and made again
                    self.restarts += 1
                    self.start()
                elif all(status == 0 for status in statuses):
                    return "Complete"
                time.sleep(0.05)
        finally:
            self.stop()

    def stop(self):
        """Delete all pods: SIGTERM, and SIGKILL after the grace period."""
        for pod in self.pods:
            pod.process.terminate()
        ends = time.monotonic() + self.pod["terminationGracePeriodSeconds"]
        for pod in self.pods:
            try:
                pod.process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                pod.process.kill()
                pod.process.wait()

    def logs(self):
        return "\n".join(f"== {pod.output.name}\n{pod.output.read_text()[-2000:]}" for pod in self.pods)

    def _max_restarts(self):
        return self.spec["failurePolicy"]["maxRestarts"]

    def _reason(self, status):
        """Why the Job fails when a pod ends with `status` (its backoffLimit is 0)."""
        code = 128 - status if status < 0 else status  # Popen says -9, a container 137
        assert self.template["backoffLimit"] == 0 and self.pod["restartPolicy"] == "Never"
        for rule in self.template["podFailurePolicy"]["rules"]:
            asked = rule["onExitCodes"]
            if asked["containerName"] == self.container["name"]:
                inside = code in asked["values"]
                if inside == (asked["operator"] == "In") and rule["action"] == "FailJob":
                    return "PodFailurePolicy"
        return "BackoffLimitExceeded"

    def _action(self, reason):
        for rule in self.spec["failurePolicy"]["rules"]:
            if reason in rule["onJobFailureReasons"] and self.job["name"] in rule["targetReplicatedJobs"]:
                return rule["action"]
        return "RestartJobSet"

    def _mounted(self, text):
        for path, here in self.mounts.items():
            text = text.replace(f"{path}/", f"{here}/")
        return text


def expand(text):
    """Kubernetes' $$ is $; the manifests here have no reference $(NAME)."""
    return text.replace("$$", "$")


def kill(pod):
    os.kill(pod.process.pid, signal.SIGKILL)
