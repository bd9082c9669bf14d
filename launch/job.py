"""What a launch is made of: the command line's inputs, checked, and the texts that end up in a manifest.

Everything a user types is matched against a pattern or escaped here, once; the templates paste none of it into a shell
or into YAML. All problems are reported together, before kubectl or gcloud is called.
"""

import dataclasses
import re
import shlex
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import configs
from app.cluster.hardware import Topology, parse_topology
from app.config import Config, ConfigError, Value, diff, from_config_dict
from app.config_check import validate
from app.config_flags import Flag, load_config, load_file

TARGETS = ("gke-jobset", "gke-pathways", "tpu-vm")
FLAGS = (
    Flag("target", str, f"one of {', '.join(TARGETS)}", required=True),
    Flag("topology", str, "one slice, as v5p:8x8x4", required=True),
    Flag("slices", int, "number of slices; 0: as many as mesh.dcn.* makes", default=0),
    Flag("name", str, "name of the job; running it again with the same workdir resumes", required=True),
    Flag("workdir", str, "a directory below one of --mounts; tpu-vm: one that every VM sees", required=True),
    Flag("image", str, "container image, REGISTRY/NAME@sha256:...; tpu-vm without it copies the sources", default=""),
    Flag("program", str, "train, or preflight: the checks to run on the nodes first", default="train"),
    Flag("mounts", str, "PATH=gs://BUCKET or PATH=pvc:CLAIM, comma separated", default=""),
    Flag("env", str, "NAME=VALUE, comma separated; no secrets", default=""),
    Flag("secrets", str, "NAME=SECRET/KEY of a Kubernetes secret, comma separated", default=""),
    Flag("cache", str, "directory of compiled programs; default: compile_cache, or WORKDIR/xla_cache", default=""),
    Flag("xla_flags", str, "further --xla_NAME=VALUE, space separated; they win over launch/xla_flags.py", default=""),
    Flag("service_account", str, "Kubernetes service account (GKE) or its e-mail address (tpu-vm)", default=""),
    Flag("max_restarts", int, "how often the whole job starts again after a lost host or a stop", default=20),
    Flag("grace_seconds", int, "from SIGTERM to SIGKILL: longer than one step and a checkpoint", default=600),
    Flag("spot", bool, "spot capacity", default=False),
    Flag("reservation", str, "name of a reservation", default=""),
    Flag("privileged", bool, "GKE before 1.28: privileged containers, as root", default=False),
    Flag("namespace", str, "GKE: namespace", default="default"),
    Flag("queue", str, "GKE: Kueue local queue", default=""),
    Flag("priority", str, "GKE: priority class", default=""),
    Flag("host_network", bool, "GKE: the nodes' own network; default: where there are several slices"),
    Flag("apply", bool, "GKE: hand the manifest to kubectl", default=False),
    Flag("form", str, "gke-pathways: jobset, or pathwaysjob for clusters with its controller", default="jobset"),
    Flag("scratch", str, "gke-pathways: gs:// directory of Pathways' own files; default: WORKDIR/pathways", default=""),
    Flag("pathways_tag", str, "gke-pathways: tag of Pathways' images; as new as jaxlib", default="latest"),
    Flag("head_pool", str, "gke-pathways: CPU node pool of the controller", default="cpu-np"),
    Flag("head_cpu", int, "gke-pathways: CPUs of the trainer on the controller", default=24),
    Flag("head_memory", str, "gke-pathways: memory of the trainer on the controller", default="100G"),
    Flag("project", str, "tpu-vm: Google Cloud project", default=""),
    Flag("zone", str, "tpu-vm: zone", default=""),
)  # fmt: skip
PROGRAMS = {"train": "app.train", "preflight": "launch.preflight"}
SLICE_JOB, HEAD_JOB, WORKER_JOB = "slice-job", "pathways-head", "pathways-worker"

_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035, what a JobSet's name must be
_PATH = r"(/[\w.=+-]+)+"
_GS = r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
PATTERNS = {
    "name": _LABEL,
    "workdir": _PATH,
    "image": r"[a-z0-9][\w.:/-]*(@sha256:[0-9a-f]{64})?",
    "cache": rf"({_GS})?{_PATH}",
    "scratch": _GS + _PATH,
    "xla_flags": r"--\w+=[\w.,:/-]+( +--\w+=[\w.,:/-]+)*",
    "service_account": r"[a-z0-9]([-a-z0-9.@]*[a-z0-9])?",
    "reservation": r"[a-z0-9]([-a-z0-9/]*[a-z0-9])?",
    "namespace": _LABEL,
    "queue": r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
    "priority": r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
    "pathways_tag": r"\w[\w.-]{0,127}",
    "head_pool": _LABEL,
    "head_memory": r"[1-9]\d*(G|Gi)",
    "project": r"[a-z][-a-z0-9.:]*[a-z0-9]",
    "zone": r"[a-z]+-[a-z]+\d+-[a-z]",
}
CHOICES = {"target": TARGETS, "program": tuple(PROGRAMS), "form": ("jobset", "pathwaysjob")}
# Set by the launcher or by the platform: another value would silently detach a host from the others.
_OWN_ENV = re.compile(r"(JAX|TPU|MEGASCALE|PATHWAYS|IFRT|XCLOUD|LIBTPU|JOBSET|XLA|ENABLE_PATHWAYS)(_.*)?|PATH|LD_.*")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.I)
_SECRET_VALUE = re.compile(r"AIza[\w-]{30}|gh[pousr]_\w{30}|hf_\w{30}|ya29\.|sk-\w{20}|-----BEGIN|://[^/\s]+:[^/\s]+@")


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked launch. Texts are as the user gave them; `command` is an argument vector."""

    flags: types.SimpleNamespace  # the values of FLAGS
    config: Config
    topology: Topology
    slices: int
    command: tuple[str, ...]  # after "python -m"
    env: Mapping[str, str]
    secrets: Mapping[str, tuple[str, str]]  # variable -> (secret, key)
    mounts: Mapping[str, str]  # path -> "gs://BUCKET" or "pvc:CLAIM"

    @property
    def hosts(self) -> int:
        """Virtual machines, and so processes, of one slice."""
        return self.topology.hosts

    @property
    def restarts(self) -> int:
        return 0 if self.flags.program == "preflight" else self.flags.max_restarts

    @property
    def host_network(self) -> bool:
        """Between slices the pods' network would cost bandwidth; inside one it carries next to nothing."""
        return self.slices > 1 if self.flags.host_network is None else self.flags.host_network

    @property
    def cache(self) -> str:
        return self.flags.cache or self.config.compile_cache or f"{self.flags.workdir}/xla_cache"

    @property
    def scratch(self) -> str:
        return self.flags.scratch or f"{stored_at(self.flags.workdir, self.mounts)}/pathways"

    def warnings(self) -> Iterator[str]:
        """What runs, but maybe not as meant."""
        if self.flags.image and "@" not in self.flags.image:
            yield (
                f"--image={self.flags.image} is not pinned: after it is pushed again hosts may run different code; use "
                "REGISTRY/NAME@sha256:..."
            )
        if self.flags.target == "gke-pathways" and self.flags.pathways_tag == "latest":
            yield "--pathways_tag=latest is not pinned: name the tag that matches this image's jaxlib"
        if self.flags.privileged:
            yield "--privileged: containers run as root with every capability; GKE 1.28 and later need it no more"
        if self.flags.spot and self.config.checkpoint.every_steps > 100:
            yield (
                f"--spot with checkpoint.every_steps={self.config.checkpoint.every_steps}: the notice of 15 to 30 "
                "seconds may be shorter than a step; save more often"
            )


def read_job(argv: Sequence[str]) -> Job:
    """The job that the arguments (without the program's name) describe.

    Raises ConfigError with everything that is wrong: arguments, config, topology against mesh and batch, texts.
    """
    bare = {f"--{flag.name}" for flag in FLAGS if flag.kind is bool}
    config, flags = load_config([f"{argument}=true" if argument in bare else argument for argument in argv], FLAGS)
    path = config_path(argv)
    problems = [*_text_problems(flags), *_secret_problems(flags, config)]
    mounts, env, secrets = (_pairs(name, flags, problems) for name in ("mounts", "env", "secrets"))
    problems += [*_storage_problems(flags, config, mounts), *_env_problems(env, secrets)]
    problems += _target_problems(flags, config)
    topology, slices = None, flags.slices or config.mesh.dcn.num_slices
    try:
        topology = parse_topology(flags.topology)
        problems += _slice_problems(flags, topology, slices)
        validate(config, topology.devices * slices, topology.devices)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"--topology: {error}")
    if path is None:
        problems.append(f"--config must be a file in configs/ of {_root()}: that folder is what the image holds")
    if problems or topology is None or path is None:
        raise ConfigError(*problems)
    single = flags.target == "gke-pathways"
    return Job(
        flags=flags,
        config=config,
        topology=topology,
        slices=slices,
        command=_command(path, config, flags, stored_at(flags.workdir, mounts) if single else None),
        env=env,
        secrets={name: (value.partition("/")[0], value.partition("/")[2]) for name, value in secrets.items()},
        mounts=mounts,
    )


def config_path(argv: Sequence[str]) -> str | None:
    """The config's path inside the image, "configs/demo.py"; None if it is not in that folder."""
    given = [argument.removeprefix("--config=") for argument in argv if argument.startswith("--config=")]
    given += [argv[index + 1] for index, argument in enumerate(argv) if argument == "--config"]
    path = Path(given[0]).resolve()
    if not path.is_relative_to(_root() / "configs"):
        return None
    return path.relative_to(_root()).as_posix()


def stored_at(path: str, mounts: Mapping[str, str]) -> str | None:
    """The gs:// address of a mounted path; None if it is not below a mounted bucket."""
    for mount, target in mounts.items():
        if path.startswith(f"{mount}/") and target.startswith("gs://"):
            return target + path.removeprefix(mount)
    return None


def literal(text: str) -> str:
    """`text` as Kubernetes will read it back from `args`, `command` or `env`: $(NAME) would be a reference there."""
    return text.replace("$", "$$")


def _root() -> Path:
    return Path(configs.__path__[0]).resolve().parent


def _command(path: str, config: Config, flags: types.SimpleNamespace, bucket: str | None) -> tuple[str, ...]:
    """Module and arguments: the file, the workdir and every key whose value is not the file's.

    bucket: of a single controller, where its workdir is stored: its workers write checkpoints there themselves.
    """
    of_file = from_config_dict(load_file(str(_root() / path)))
    keys: dict[str, Value] = {key: value for key, _, value in diff(of_file.to_dict(), config.to_dict())}
    if bucket is not None:
        keys |= {"controller": "single", "checkpoint.directory": f"{bucket}/checkpoints"}
    overrides = [f"--config.{key}={_text(value)}" for key, value in keys.items()]
    own = [f"--topology={flags.topology}"] if flags.program == "preflight" else []
    return (PROGRAMS[flags.program], f"--config={path}", f"--workdir={flags.workdir}", *own, *overrides)


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text_problems(flags: types.SimpleNamespace) -> Iterator[str]:
    """Every text by itself: pattern, choice, range."""
    for name, pattern in PATTERNS.items():
        value = getattr(flags, name) or ""
        if name == "workdir" and value.startswith("gs://"):
            yield f"--workdir={value}: gs:// cannot be appended to; add --mounts=/runs=gs://... and use /runs/..."
        elif value and not re.fullmatch(pattern, value):
            yield f"--{name}={value!r} is not of the form {pattern}"
        elif ".." in value.split("/"):
            yield f"--{name}={value!r}: write the path without '..'"
    for name, choices in CHOICES.items():
        if getattr(flags, name) not in choices:
            yield f"--{name}={getattr(flags, name)!r}: must be one of {', '.join(choices)}"
    for name, least in {"slices": 0, "max_restarts": 0, "grace_seconds": 1, "head_cpu": 1}.items():
        if getattr(flags, name) < least:
            yield f"--{name}={getattr(flags, name)}: must be at least {least}"


def _secret_problems(flags: types.SimpleNamespace, config: Config) -> Iterator[str]:
    """Nothing that looks like a credential may reach a manifest or a log: names are told, values are not."""
    texts = {f"--{name}": value for name, value in vars(flags).items()}
    texts |= {f"--config.{key}": value for key, _, value in diff({}, config.to_dict())}
    for name, value in texts.items():
        if isinstance(value, str) and _SECRET_VALUE.search(value):
            yield f"{name} looks like a credential: keep it in a Kubernetes secret and name that with --secrets"


def _pairs(name: str, flags: types.SimpleNamespace, problems: list[str]) -> dict[str, str]:
    """{left: right} of "left=right,left=right"; what is wrong is added to `problems`."""
    patterns = {
        "mounts": (_PATH, rf"{_GS}|pvc:{_LABEL}"),
        "env": (r"[A-Za-z_]\w*", r"[\x20-\x7e]*"),
        "secrets": (r"[A-Za-z_]\w*", rf"{_LABEL}/[\w.-]+"),
    }
    pairs: dict[str, str] = {}
    text = getattr(flags, name)
    for part in text.split(",") if text else []:
        left, _, right = part.partition("=")
        if not (re.fullmatch(patterns[name][0], left) and re.fullmatch(patterns[name][1], right)):
            wanted = next(flag.help for flag in FLAGS if flag.name == name)
            problems.append(f"--{name}: the part of {left!r} is not of the form {wanted}")
        elif left in pairs:
            problems.append(f"--{name}: {left} is given twice")
        pairs[left] = right
    return pairs


def _env_problems(env: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[str]:
    for name in (*env, *secrets):
        if _OWN_ENV.fullmatch(name):
            yield f"--env: {name} is set by the launcher or the platform; leave it out (XLA's flags: --xla_flags)"
    for name in env:
        if _SECRET_NAME.search(name):
            yield f"--env: {name} sounds like a secret, which no manifest may hold: use --secrets={name}=SECRET/KEY"
        if name in secrets:
            yield f"--env and --secrets both set {name}: leave one out"


def _storage_problems(flags: types.SimpleNamespace, config: Config, mounts: Mapping[str, str]) -> Iterator[str]:
    """Every directory must outlive the pod and be the same on all hosts."""
    below = tuple(f"{path}/" for path in mounts)
    if flags.target == "tpu-vm":
        if mounts:
            yield "--mounts: pods have them, TPU VMs do not; mount the directory on every VM"
        return
    for name, value in {"--workdir": flags.workdir, "--cache": flags.cache or config.compile_cache}.items():
        if value and not value.startswith(("gs://", *below)):
            yield f"{name}={value} is lost with the container: add --mounts=PATH=gs://BUCKET (or pvc:CLAIM) above it"
    data = config.data.path
    if data.startswith("gs://"):
        yield f"data.path={data}: token shards are read as files; mount the bucket and name the path below it"
    elif data and not data.startswith(below or "\0"):
        yield f"data.path={data} is not in the container: add --mounts=PATH=gs://BUCKET (or pvc:CLAIM) above it"
    if flags.target == "gke-pathways" and stored_at(flags.workdir, mounts) is None:
        yield f"--workdir={flags.workdir}: Pathways' workers write checkpoints to gs://; mount a bucket above it"


def _target_problems(flags: types.SimpleNamespace, config: Config) -> Iterator[str]:
    if config.mesh.cpu_devices:
        yield f"mesh.cpu_devices={config.mesh.cpu_devices} asks for CPUs: use 0 on TPUs"
    if config.controller == "single" and flags.target != "gke-pathways":
        yield f"controller='single' with --target={flags.target}: use --target=gke-pathways, or controller='multi'"
    if flags.target != "tpu-vm" and not flags.image:
        yield "--image is missing: build it from Dockerfile and push it (launch/README.md)"
    if flags.target == "tpu-vm":
        yield from (f"--{name} is missing: tpu-vm needs it" for name in ("project", "zone") if not getattr(flags, name))
        unused = [name for name in ("apply", "queue", "priority", "secrets") if getattr(flags, name)]
        yield from (f"--{name} is for GKE; tpu-vm has launch/tpu_vm.sh" for name in unused)


def _slice_problems(flags: types.SimpleNamespace, topology: Topology, slices: int) -> Iterator[str]:
    if slices > 1 and topology.hosts == 1:
        yield f"--topology={topology} is one host: several slices must be of several hosts each"
    if flags.target == "tpu-vm" and topology.generation.name == "tpu7x":
        yield "--target=tpu-vm: the Cloud TPU API does not offer tpu7x; use --target=gke-jobset"
    if flags.target == "gke-pathways" and topology.chips_per_host == 1:
        yield f"--topology={topology}: Pathways has no single-chip instance type; use machines of four chips"
    # A pod's name is its job's and five characters more; the coordinator's address NAME-JOB-0-0.NAME is a label value.
    most = f"{slices - 1}-{topology.hosts - 1}"
    room = 63 - len(f"-{SLICE_JOB}-{most}-abcde")
    if flags.target == "gke-pathways":
        room = min(63 - len(f"-{WORKER_JOB}-{most}-abcde"), (63 - len(f"-{HEAD_JOB}-0-0.")) // 2)
    if len(flags.name) > room:
        yield f"--name={flags.name} has {len(flags.name)} characters: with the pods' suffixes at most {room} fit"


def shell(arguments: Sequence[str]) -> str:
    """One line for a POSIX shell."""
    return shlex.join(arguments)
