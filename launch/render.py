"""A launch as text: python -m launch.render --config=FILE --target=TARGET --topology=v5p:8x8x4 --name=... --workdir=...

Prints the manifest (GKE) or the settings of launch/tpu_vm.sh; --apply hands a manifest to kubectl instead. Everything
is checked first, so a wrong launch calls nothing. Needs no jax and no TPU. Exit status: 0 done, 1 kubectl failed, 2 bad
input.
"""

import subprocess
import sys
from collections.abc import Sequence

import yaml

from app.config import ConfigError
from launch import check, multi, single, tpu_vm
from launch.job import Job, read_job

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    try:
        job = read_job(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    for warning in job.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    text = render(job)
    if not job.flags.apply:
        print(text, end="")
        return 0
    return apply(text, job)


def render(job: Job) -> str:
    """What the job's target needs. A manifest that breaks a rule of launch.check is a bug here, and raises."""
    if job.flags.target == "tpu-vm":
        return tpu_vm.settings(job)
    if job.flags.target == "gke-jobset":
        manifest = multi.manifest(job)
    elif job.flags.form == "pathwaysjob":
        return _yaml(single.pathways_job(job))
    else:
        manifest = single.manifest(job)
    if found := list(check.problems(manifest)):
        raise AssertionError("; ".join(found))
    return _yaml(manifest)


def apply(text: str, job: Job) -> int:
    """Create or update the job in the cluster that kubectl's current context names."""
    command = ["kubectl", "apply", f"--namespace={job.flags.namespace}", "--filename=-"]
    try:
        done = subprocess.run(command, input=text, text=True, check=False)
    except FileNotFoundError:
        print("kubectl is not installed: install it, or pipe this command's output to where it is", file=sys.stderr)
        return EXIT_FAILED
    if done.returncode:
        print(
            f"kubectl apply failed with status {done.returncode}. A JobSet that exists cannot be changed: delete it "
            f"first (kubectl delete jobset {job.flags.name} --namespace={job.flags.namespace}); the workdir stays",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes a list or mapping that is used twice out twice: kubectl reads aliases, people do not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(manifest: object) -> str:
    # Innermost lists and mappings on one line: the restart statuses alone would be 129 lines.
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


if __name__ == "__main__":
    sys.exit(main())
