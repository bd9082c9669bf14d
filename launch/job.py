"""What a launch is made of: the command line's inputs, checked against each other, and what a manifest says of them.

All problems are reported together, before kubectl or gcloud is called.
"""

import dataclasses
import itertools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import configs
from app.cluster.hardware import Topology, parse_topology
from app.config import Config, ConfigError, Value, diff, flatten, from_config_dict
from app.config_check import validate
from app.config_flags import load_config, load_file
from launch import inputs

PROGRAMS = {"train": "app.train", "preflight": "launch.preflight"}
SLICE_JOB, HEAD_JOB, WORKER_JOB = "slice-job", "pathways-head", "pathways-worker"
MEMORY = "memory"  # the machine's own, which outlives the containers: for checkpoint.local_directory
BUCKETS = "/gcs"  # below it a bucket is mounted that only an address gs://BUCKET/... names
# Directories that the image or a machine needs: a mount would hide them.
TAKEN = {"bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked launch. Texts are as the user gave them; `command` is an argument vector."""

    flags: types.SimpleNamespace  # the values of inputs.FLAGS
    config: Config
    topology: Topology
    slices: int
    workdir: str  # a path below one of `mounts`
    cache: str  # directory of compiled programs
    command: tuple[str, ...]  # after "python -m"
    env: Mapping[str, str]
    secrets: Mapping[str, tuple[str, str]]  # variable -> (secret, key)
    mounts: Mapping[str, str]  # path -> "gs://BUCKET", "pvc:CLAIM", "host" or MEMORY

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
    def scratch(self) -> str:
        return self.flags.scratch or f"{stored_at(self.workdir, self.mounts)}/pathways"

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
    bare = {f"--{flag.name}" for flag in inputs.FLAGS if flag.kind is bool}
    argv = [f"{argument}=true" if argument in bare else argument for argument in argv]
    if "gke-pathways" in _given(argv, "target") and not _given(argv, "config.controller"):
        argv.append("--config.controller=single")
    config, flags = load_config(argv, inputs.FLAGS)
    path = config_path(argv)
    problems = list(inputs.text_problems(flags, config))
    mounts, env, secrets = (
        inputs.read_pairs(name, getattr(flags, name), problems) for name in ("mounts", "env", "secrets")
    )
    if config.checkpoint.local_directory and flags.image:
        mounts |= {config.checkpoint.local_directory: MEMORY}
    files = _files(flags, config)
    problems += [*_storage_problems(flags, files, mounts), *inputs.env_problems(env, secrets)]
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
    mounts = _with_buckets(mounts, files)
    found = {name: mounted(file, mounts) for name, file in files.items()}
    workdir = found["--workdir"]
    return Job(
        flags=flags,
        config=config,
        topology=topology,
        slices=slices,
        workdir=workdir,
        cache=found.get("compile_cache", f"{workdir}/xla_cache"),
        command=_command(path, config, flags, workdir, _overrides(flags, config, found, mounts)),
        env=env,
        secrets={name: (value.partition("/")[0], value.partition("/")[2]) for name, value in secrets.items()},
        mounts=mounts,
    )


def config_path(argv: Sequence[str]) -> str | None:
    """The config's path inside the image, "configs/demo.py"; None if it is not in that folder."""
    path = Path(_given(argv, "config")[0]).resolve()
    if not path.is_relative_to(_root() / "configs"):
        return None
    return path.relative_to(_root()).as_posix()


def _given(argv: Sequence[str], name: str) -> list[str]:
    """The values of --name=VALUE and --name VALUE."""
    with_equals = [part.removeprefix(f"--{name}=") for part in argv if part.startswith(f"--{name}=")]
    return with_equals + [value for part, value in itertools.pairwise(argv) if part == f"--{name}"]


def mounted(address: str, mounts: Mapping[str, str]) -> str:
    """The path at which gs://BUCKET/... is mounted; another path as it is."""
    target = next((target for target in mounts.values() if address.startswith(f"{target}/")), None)
    if target is None:
        return address
    return next(path for path in mounts if mounts[path] == target) + address.removeprefix(target)


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


def _files(flags: types.SimpleNamespace, config: Config) -> dict[str, str]:
    """The paths and gs:// addresses of the launch, by flag or key, that the program uses as paths of files.

    Workers of a single controller write checkpoints themselves, to gs://: that directory is not mounted.
    """
    values = {"--workdir": flags.workdir} | flatten(config.to_dict())
    named = {name: values[name] for name in ("--workdir", *inputs.FILE_KEYS) if values[name]}
    if config.data.tokenizer == "bytes" or config.data.tokenizer.startswith("ids:"):
        del named["data.tokenizer"]
    if flags.target == "gke-pathways":
        named.pop("checkpoint.directory", None)
    return named


def _with_buckets(mounts: Mapping[str, str], files: Mapping[str, str]) -> dict[str, str]:
    """`mounts`, and the buckets that only addresses among `files` name."""
    named = {match[0] for file in files.values() if (match := re.match(inputs.GS, file))}
    new = sorted(named - set(mounts.values()))
    return {**mounts, **{f"{BUCKETS}/{bucket.removeprefix('gs://')}": bucket for bucket in new}}


def _overrides(
    flags: types.SimpleNamespace, config: Config, found: Mapping[str, str], mounts: Mapping[str, str]
) -> dict[str, Value]:
    """Keys of the config that are others inside a pod: mounted paths, and where a single controller's workers write."""
    keys: dict[str, Value] = {key: path for key, path in found.items() if key in inputs.FILE_KEYS}
    if flags.target == "gke-pathways":
        written = config.checkpoint.directory or f"{stored_at(found['--workdir'], mounts)}/checkpoints"
        keys["checkpoint.directory"] = written
    return keys


def _command(
    path: str, config: Config, flags: types.SimpleNamespace, workdir: str, overrides: Mapping[str, Value]
) -> tuple[str, ...]:
    """Module and arguments: the file, the workdir and every key whose value is not the file's."""
    of_file = from_config_dict(load_file(str(_root() / path))).to_dict()
    keys = {key: value for key, _, value in diff(of_file, config.to_dict())} | dict(overrides)
    plain = flatten(of_file)
    arguments = [f"--config.{key}={_text(value)}" for key, value in keys.items() if value != plain[key]]
    own = [f"--topology={flags.topology}"] if flags.program == "preflight" else []
    return (PROGRAMS[flags.program], f"--config={path}", f"--workdir={workdir}", *own, *arguments)


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _storage_problems(
    flags: types.SimpleNamespace, files: Mapping[str, str], mounts: Mapping[str, str]
) -> Iterator[str]:
    """Every file must be there on all hosts, and outlive the containers."""
    vm = flags.target == "tpu-vm"
    for path, target in mounts.items():
        if not inputs.fits(inputs.PATH, path):
            yield f"checkpoint.local_directory={inputs.shown(path)} is not of the form {inputs.PATH}"
        elif path.split("/")[1] in TAKEN or f"{path}/".startswith(f"{BUCKETS}/"):
            yield f"{path} would hide a directory of the system: mount at another, as /data or /mnt/data"
        if target.startswith("pvc:") if vm else target == "host":
            yield f"--mounts: {path}={target} is not for --target={flags.target}"
        yield from (f"the mount {other} lies in the mount {path}" for other in mounts if other.startswith(f"{path}/"))
    shared = [path for path, target in mounts.items() if target != MEMORY]
    for name, file in files.items():
        if name != "--workdir" and not inputs.fits(inputs.FILE, file):
            yield f"{name}={inputs.shown(file)} is not of the form {inputs.FILE}"
        elif file.startswith("/") and not any(file.startswith(f"{path}/") for path in shared):
            yield f"{name}={file} is in no mount, so no host would share it: use gs://BUCKET/..., or --mounts above it"
    in_bucket = flags.workdir.startswith("gs://") or stored_at(flags.workdir, mounts)
    if flags.target == "gke-pathways" and not in_bucket:
        yield f"--workdir={flags.workdir}: Pathways' workers write checkpoints to gs://: use gs://BUCKET/PATH"


def _target_problems(flags: types.SimpleNamespace, config: Config) -> Iterator[str]:
    vm = flags.target == "tpu-vm"
    if config.mesh.cpu_devices:
        yield f"mesh.cpu_devices={config.mesh.cpu_devices} asks for CPUs: use 0 on TPUs"
    if (config.controller == "single") != (flags.target == "gke-pathways"):
        yield f"controller={config.controller!r} with --target={flags.target}: 'single' goes with gke-pathways only"
    if flags.target == "gke-pathways" and not (config.checkpoint.directory or "gs://").startswith("gs://"):
        yield f"checkpoint.directory={config.checkpoint.directory}: Pathways' workers write to gs:// only"
    if not vm and not flags.image:
        yield "--image is missing: build it from Dockerfile and push it (launch/README.md)"
    if vm:
        yield from (f"--{name} is missing: tpu-vm needs it" for name in ("project", "zone") if not getattr(flags, name))
    if flags.service_account and ("@" in flags.service_account) != vm:
        yield f"--service_account={flags.service_account}: GKE takes a Kubernetes service account, tpu-vm an address"
    if "/" in flags.reservation and not vm:
        yield f"--reservation={flags.reservation}: GKE takes its name only"
    others = [flag for flag in inputs.OF_OTHERS.get(flags.target, ()) if getattr(flags, flag.name) != flag.default]
    yield from (f"--{flag.name} means nothing to --target={flags.target}: leave it out" for flag in others)
    if flags.form == "pathwaysjob" and (flags.privileged or flags.head_pool != "cpu-np"):
        yield "--privileged and --head_pool: the controller of a PathwaysJob decides on both; use --form=jobset"


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
