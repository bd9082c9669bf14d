"""The flags of launch.render, and what may stand in each: a pattern, a choice, a range, no credentials.

A text that fits its pattern needs no quotes in a shell or in YAML; texts without one (environment values, the config's
own) are escaped where they are used, and hold only characters that can be printed.
"""

import re
import types
from collections.abc import Iterator, Mapping

from app.config import Config, flatten
from app.config_flags import Flag

TARGETS = ("gke-jobset", "gke-pathways", "tpu-vm")
COMMON_FLAGS = (
    Flag("target", str, f"one of {', '.join(TARGETS)}", required=True),
    Flag("topology", str, "one slice, as v5p:8x8x4", required=True),
    Flag("slices", int, "number of slices; 0: as many as mesh.dcn.* makes", default=0),
    Flag("name", str, "name of the job; running it again with the same workdir resumes", required=True),
    Flag("workdir", str, "gs://BUCKET/PATH, or a directory below one of --mounts", required=True),
    Flag("image", str, "container image, REGISTRY/NAME@sha256:...; tpu-vm without it copies the sources", default=""),
    Flag("program", str, "train, or preflight: the checks to run on the nodes first", default="train"),
    Flag("mounts", str, "PATH=gs://BUCKET, PATH=pvc:CLAIM (GKE) or PATH=host (tpu-vm), comma separated", default=""),
    Flag("env", str, "NAME=VALUE, comma separated; no secrets", default=""),
    Flag("xla_flags", str, "further --xla_NAME=VALUE, space separated; they win over launch/xla_flags.py", default=""),
    Flag("service_account", str, "Kubernetes service account (GKE) or its e-mail address (tpu-vm)", default=""),
    Flag("max_restarts", int, "how often the whole job starts again after a lost host or a stop", default=20),
    Flag("grace_seconds", int, "from SIGTERM to SIGKILL: longer than one step and a checkpoint", default=600),
    Flag("spot", bool, "spot capacity", default=False),
    Flag("reservation", str, "name of a reservation", default=""),
)
GKE_FLAGS = (
    Flag("secrets", str, "GKE: NAME=SECRET/KEY of a Kubernetes secret, comma separated", default=""),
    Flag("privileged", bool, "GKE before 1.28: privileged containers, as root", default=False),
    Flag("namespace", str, "GKE: namespace", default="default"),
    Flag("queue", str, "GKE: Kueue local queue", default=""),
    Flag("priority", str, "GKE: priority class", default=""),
    Flag("host_network", bool, "GKE: the nodes' own network; default: where there are several slices"),
    Flag("apply", bool, "GKE: hand the manifest to kubectl", default=False),
)
PATHWAYS_FLAGS = (
    Flag("form", str, "gke-pathways: jobset, or pathwaysjob for clusters with its controller", default="jobset"),
    Flag("scratch", str, "gke-pathways: gs:// directory of Pathways' own files; default: WORKDIR/pathways", default=""),
    Flag("pathways_tag", str, "gke-pathways: tag of Pathways' images; as new as jaxlib", default="latest"),
    Flag("head_pool", str, "gke-pathways: CPU node pool of the controller", default="cpu-np"),
    Flag("head_cpu", int, "gke-pathways: CPUs of the trainer on the controller", default=24),
    Flag("head_memory", str, "gke-pathways: memory of the trainer on the controller", default="100G"),
)
TPU_VM_FLAGS = (
    Flag("project", str, "tpu-vm: Google Cloud project", default=""),
    Flag("zone", str, "tpu-vm: zone", default=""),
)
FLAGS = (*COMMON_FLAGS, *GKE_FLAGS, *PATHWAYS_FLAGS, *TPU_VM_FLAGS)
OF_OTHERS = {  # flags that mean nothing to a target
    "gke-jobset": (*PATHWAYS_FLAGS, *TPU_VM_FLAGS),
    "gke-pathways": TPU_VM_FLAGS,
    "tpu-vm": (*GKE_FLAGS, *PATHWAYS_FLAGS),
}
# Keys of the config that name files and directories.
FILE_KEYS = ("data.path", "data.tokenizer", "init_from", "compile_cache", "checkpoint.directory")


def _word(most: int, first: str, inner: str) -> str:
    return rf"(?=.{{1,{most}}}$)[{first}]([{inner}]*[a-z0-9])?"


_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035
PATH = r"(/(?!\.\.?(/|$))[\w.=+-]+)+"  # no "." and no ".." on the way
GS = r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
FILE = rf"({GS})?{PATH}"
_PARTS = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
PATTERNS = {
    "name": _LABEL,
    "workdir": FILE,
    "image": rf"(?=.{{1,500}}$){_PARTS}(:\d+)?(/{_PARTS})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "scratch": GS + PATH,
    "xla_flags": r"--\w+=[\w.,:/-]+( +--\w+=[\w.,:/-]+)*",
    "service_account": _word(253, "a-z0-9", "-a-z0-9.@"),
    "reservation": _word(253, "a-z0-9", "-a-z0-9/"),
    "namespace": _word(63, "a-z", "-a-z0-9"),
    "queue": _word(63, "a-z0-9", "-a-z0-9."),
    "priority": _word(253, "a-z0-9", "-a-z0-9."),
    "pathways_tag": r"\w[\w.-]{0,127}",
    "head_pool": _word(40, "a-z", "-a-z0-9"),
    "head_memory": r"[1-9]\d{0,5}(G|Gi)",
    "project": _word(63, "a-z", "-a-z0-9.:"),
    "zone": r"[a-z]+-[a-z]+\d+-[a-z]",
}
PAIRS = {
    "mounts": (PATH, rf"{GS}|pvc:{_LABEL}|host"),
    "env": (r"[A-Za-z_]\w{0,255}", r".*"),
    "secrets": (r"[A-Za-z_]\w{0,255}", rf"{_LABEL}/[\w.-]+"),
}
CHOICES = {"target": TARGETS, "program": ("train", "preflight"), "form": ("jobset", "pathwaysjob")}
RANGES = {"slices": (0, 1024), "max_restarts": (0, 10**6), "grace_seconds": (1, 86400), "head_cpu": (1, 1024)}
# Set by the launcher or by the platform: another value would silently detach a host from the others.
_OWN_ENV = re.compile(r"(JAX|TPU|MEGASCALE|PATHWAYS|IFRT|XCLOUD|LIBTPU|JOBSET|XLA|ENABLEPATHWAYS)(_.*)?|PATH|LD_.*")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.I)
_SECRET_VALUE = re.compile(
    r"AIza[\w-]{30}|gh[pousr]_\w{30}|github_pat_\w{20}|glpat-[\w-]{20}|hf_\w{30}|ya29\.|sk-\w{20}|-----BEGIN|://[^/\s]+:[^/\s]+@"
)


def fits(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None


def shown(text: str) -> str:
    """`text` in a message: a credential is not told."""
    return "'...'" if _SECRET_VALUE.search(text) else repr(text)


def text_problems(flags: types.SimpleNamespace, config: Config) -> Iterator[str]:
    """Every text by itself."""
    for name, pattern in PATTERNS.items():
        value = getattr(flags, name)
        if value and not fits(pattern, value):
            yield f"--{name}={shown(value)} is not of the form {pattern}"
    for name, choices in CHOICES.items():
        if getattr(flags, name) not in choices:
            yield f"--{name}={shown(getattr(flags, name))}: must be one of {', '.join(choices)}"
    for name, (least, most) in RANGES.items():
        if not least <= getattr(flags, name) <= most:
            yield f"--{name}={getattr(flags, name)}: must be between {least} and {most}"
    texts = {f"--{name}": value for name, value in vars(flags).items()}
    texts |= {f"--config.{key}": value for key, value in flatten(config.to_dict()).items()}
    for name, value in texts.items():
        if isinstance(value, str) and not value.isprintable():
            yield f"{name} holds a line break or another character that cannot be printed"
        if isinstance(value, str) and _SECRET_VALUE.search(value):
            yield f"{name} looks like a credential: keep it in a Kubernetes secret and name that with --secrets"


def read_pairs(name: str, text: str, problems: list[str]) -> dict[str, str]:
    """{left: right} of "left=right,left=right", the value of --`name`; what is wrong is added to `problems`."""
    pairs: dict[str, str] = {}
    for part in text.split(",") if text else []:
        left, equals, right = part.partition("=")
        if not (equals and fits(PAIRS[name][0], left) and fits(PAIRS[name][1], right)):
            wanted = next(flag.help for flag in FLAGS if flag.name == name)
            problems.append(f"--{name}: the part of {shown(left)} is not of the form {wanted}")
        elif left in pairs:
            problems.append(f"--{name}: {left} is given twice")
        else:
            pairs[left] = right
    return pairs


def env_problems(env: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[str]:
    for name in (*env, *secrets):
        if _OWN_ENV.fullmatch(name):
            yield f"--env: {name} is set by the launcher or the platform; leave it out (XLA's flags: --xla_flags)"
    for name in env:
        if _SECRET_NAME.search(name):
            yield f"--env: {name} sounds like a secret, which no manifest may hold: use --secrets={name}=SECRET/KEY"
        if name in secrets:
            yield f"--env and --secrets both set {name}: leave one out"
