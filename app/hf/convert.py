"""Published checkpoint -> weights directory or module, and back, a block at a time.

A weights directory holds the orbax items `params` (flat: name -> array, in the dtype of the source) and `facts` (model
config, config.json of the source, its tensors with shard, dtype and shape), and beside them `carried.safetensors` (what
is no part of the language model here) and `files/` (tokenizer and the like). Training starts from one with
`--config.init_from`.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from app.config import ModelConfig
from app.hf import store
from app.hf.config import MOE, NEXT, model_config, published_config, text_config
from app.hf.published import (
    DTYPES,
    SIDE_FILES,
    SINGLE,
    CheckpointError,
    Published,
    Stored,
    named,
    raw,
    read_header,
    write_index,
    write_shards,
)
from app.hf.table import Entry, plan
from app.models import params as model_params
from app.models.layers import Precision, Runtime
from app.models.qwen import Qwen
from app.training import checksums

CARRIED = ("mtp.", "model.visual.")  # prefixes of what is kept as it is
CARRIED_FILE = "carried.safetensors"
SIDE_DIRECTORY = "files"
_BLOCK = 16 << 20  # elements of a tensor that are in memory at a time, where it can be cut
_KEPT_BYTES = 1 << 30  # decoded chunks of a run's checkpoint
_SHARD_BYTES = 5_000_000_000  # of an export that has no source to follow

Axes = Mapping[str, int]


def open_checkpoint(directory: str | Path, mtp: bool = False) -> tuple[Published, ModelConfig, list[Entry]]:
    """A published checkpoint, its model, and where each of the model's tensors belongs; mtp: those of mtp.* too.

    Raises CheckpointError with everything about the files, the config or the tensors that does not fit together.
    """
    source = Published(directory)
    try:
        config = model_config(source.config)
    except CheckpointError as error:
        raise CheckpointError(source.directory / "config.json", error.problems) from error
    entries = plan(config, text_config(source.config)["model_type"] == NEXT, source.tensors, mtp)
    if problems := mismatches(config, entries, source.tensors):
        raise CheckpointError(directory, problems)
    return source, config, entries


def mismatches(config: ModelConfig, entries: Iterable[Entry], tensors: Mapping[str, Stored]) -> list[str]:
    """What is missing, unexpected, or of another shape or dtype than the model's."""
    wanted = {entry.name: entry for entry in entries}
    carried = _carried(tensors, entries)
    found = {name: stored for name, stored in tensors.items() if name not in carried}
    both = sorted(wanted.keys() & found.keys())
    problems = []
    tied, head = config.tie_word_embeddings, "lm_head.weight" in found
    if tied == head:
        problems.append(f"tie_word_embeddings is {tied}, but lm_head.weight is {'there' if head else 'missing'}")
    problems += named("are missing", wanted.keys() - found.keys())
    problems += named("are unexpected", found.keys() - wanted.keys())
    problems += [
        f"{name} has the shape {list(found[name].shape)}, the config makes it {list(wanted[name].shape)}"
        for name in both
        if found[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} has the dtype {found[name].dtype}, not one of {', '.join(DTYPES)}"
        for name in both
        if found[name].dtype not in DTYPES
    ]
    return problems


def _carried(tensors: Iterable[str], entries: Iterable[Entry]) -> list[str]:
    """The tensors that are kept as they are: of parts that the model does not have."""
    own = {entry.name for entry in entries}
    return [name for name in tensors if name.startswith(CARRIED) and name not in own]


def import_checkpoint(
    checkpoint: str | Path, out: str | Path, mesh: Axes | None = None, mtp: bool = False
) -> list[str]:
    """Write the weights directory `out` of a published checkpoint; returns lines that say what was done.

    mesh: sizes of the axes of a mesh whose shards are stored as one piece each; any other mesh can read them too.
    mtp: make parameters of the layer of multi-token prediction, for runs that train it (loss.mtp_weight above 0).
    Raises CheckpointError; then nothing is left behind.
    """
    source, config, entries = open_checkpoint(checkpoint, mtp)
    mesh = mesh or {}
    out = Path(out)
    specs = model_params.describe(config, Runtime(mtp=mtp))
    dtypes: dict[str, np.dtype] = {}
    for entry in entries:
        dtype = DTYPES[source.tensors[entry.name].dtype]
        for param in entry.params:
            # Layers that differ are stacked in float32, which holds every value of the others.
            dtypes[param] = dtype if dtypes.get(param, dtype) == dtype else DTYPES["F32"]
    streamed = {
        name: store.Streamed(spec.shape, dtypes[name], _chunk(name, spec, mesh)) for name, spec in specs.items()
    }
    order = sorted(entries, key=lambda entry: (source.tensors[entry.name].file, source.tensors[entry.name].start))

    def pieces() -> store.Pieces:
        for entry in order:
            for block in entry.blocks(_step(entry, streamed[entry.params[0]].chunk)):
                for part, values in enumerate(block.split(source.read(entry.name, block.rows))):
                    yield entry.params[part], block.region(part), values

    carried = {name: source.tensors[name] for name in _carried(source.tensors, entries)}
    facts = {
        "model": dataclasses.asdict(config),
        "mtp": mtp,
        "source": {
            "config": source.config,
            "has_index": source.has_index,
            "tensors": {
                name: [stored.file, stored.dtype, list(stored.shape), stored.nbytes]
                for name, stored in source.tensors.items()
            },
        },
    }
    with _whole_or_nothing(out) as directory:
        store.write(directory, streamed, pieces(), facts)
        if carried:
            moved = {name: dataclasses.replace(stored, file=CARRIED_FILE) for name, stored in carried.items()}
            write_shards(
                directory,
                moved,
                ((name, raw(source.directory / stored.file, stored)) for name, stored in carried.items()),
            )
        copied = _copy_files(source.directory, directory / SIDE_DIRECTORY)
        checksums.seal(epath.Path(directory), out.name)
    size = sum(stored.nbytes for stored in source.tensors.values())
    return [
        f"imported {len(entries)} tensors of {checkpoint} ({size / 1e9:.3f} GB) as {len(specs)} parameters into {out}",
        *(
            f"{count} tensors {prefix}* are not part of the model here: carried to the export unchanged"
            for prefix in CARRIED
            if (count := sum(name.startswith(prefix) for name in carried))
        ),
        *([f"carried files: {', '.join(copied)}"] if copied else []),
    ]


def load_model(checkpoint_dir: str | Path, dtype: str = "float32", mtp: bool = False) -> Qwen:
    """A ready module for one device: module(tokens [B,T], positions=None, segment_ids=None) -> logits [B,T,V].

    checkpoint_dir: a published checkpoint. dtype: of parameters and products. mtp: with the layer of multi-token
    prediction, for `Qwen.second_hidden`.
    """
    source, config, entries = open_checkpoint(checkpoint_dir, mtp)
    runtime = Runtime(precision=Precision(params=dtype, compute=dtype), mtp=mtp)
    specs = model_params.describe(config, runtime)
    arrays = {name: np.empty(spec.shape, dtype) for name, spec in specs.items()}
    for entry in entries:
        for block in entry.blocks():
            for part, values in enumerate(block.split(source.read(entry.name, block.rows))):
                arrays[entry.params[part]][block.region(part)] = values
    return model_params.build(config, runtime, {name: jnp.asarray(arrays.pop(name)) for name in specs})


def export_checkpoint(
    workdir: str | Path,
    out: str | Path,
    step: int | None = None,
    source: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> list[str]:
    """Write the published checkpoint `out` of a run's checkpoint or of a weights directory; returns what was done.

    Names, dtypes, shards and config.json are those of the published weights that the run started from; of a run that
    started from none, those of the published classes. step: of a run, None is the newest. source: the weights
    directory that the run started from, where it is not in its old place. tokenizer: a directory of tokenizer files.
    Raises CheckpointError; then nothing is left behind.
    """
    params, config, mtp, origin = _trained(Path(workdir), step, source)
    published, tensors, indexed = _default_layout(config, mtp) if origin is None else _recorded_layout(origin)
    entries = plan(config, text_config(published)["model_type"] == NEXT, tensors, mtp)
    if problems := mismatches(config, entries, tensors):
        raise CheckpointError(workdir, [f"its model is not that of the weights in {origin}", *problems])

    def blocks(entry: Entry) -> Iterator[np.ndarray]:
        dtype = DTYPES[tensors[entry.name].dtype]
        for block in entry.blocks(_step(entry)):
            values = block.join([params.read(param, block.region(i)) for i, param in enumerate(entry.params)])
            cast = values.astype(dtype)
            if dtype == np.float16 and np.isfinite(values).all() and not np.isfinite(cast).all():
                raise CheckpointError(workdir, [f"{entry.name} is published in float16, which cannot hold its values"])
            yield cast

    def contents() -> Iterator[tuple[str, Iterator[np.ndarray]]]:
        carried = _carried(tensors, entries)
        if origin is not None and carried:
            places = read_header(origin / CARRIED_FILE)
            yield from ((name, raw(origin / CARRIED_FILE, places[name])) for name in carried)
        # Layers of one stack after each other: what is decoded for one is still at hand for the next.
        yield from ((entry.name, blocks(entry)) for entry in sorted(entries, key=lambda e: (e.params, e.index)))

    with _whole_or_nothing(Path(out)) as directory:
        directory.mkdir()
        write_shards(directory, tensors, contents())
        if indexed:
            write_index(directory, tensors)
        (directory / "config.json").write_text(json.dumps(published, indent=2) + "\n")
        for files in (origin / SIDE_DIRECTORY if origin is not None else None, tokenizer):
            _copy_files(files, directory)
    size = sum(stored.nbytes for stored in tensors.values())
    return [f"exported {len(tensors)} tensors ({size / 1e9:.3f} GB) to {out}"]


def _trained(
    workdir: Path, step: int | None, source: str | Path | None
) -> tuple[store.Slices, ModelConfig, bool, Path | None]:
    """The parameters to export, their model, whether it predicts several tokens, and the weights directory that they
    come from (None: from none)."""
    if store.is_weights(workdir):
        _check_files(workdir)
        facts = store.facts(workdir)
        return store.Slices(workdir / "params"), _model(facts["model"]), facts["mtp"], workdir
    steps = sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit())
    if not steps:
        raise CheckpointError(workdir, ["it holds neither imported weights nor the checkpoints of a run"])
    if step is not None and step not in steps:
        raise CheckpointError(workdir, [f"there is no checkpoint of step {step}, only of {', '.join(map(str, steps))}"])
    checkpoint = workdir / "checkpoints" / str(steps[-1] if step is None else step)
    _check_files(checkpoint)
    config = store.facts(checkpoint)["config"]
    origin = _origin(str(source) if source is not None else config["init_from"])
    params = store.Slices(checkpoint / "state", "params.", keep=_KEPT_BYTES)
    return params, _model(config["model"]), config["loss"]["mtp_weight"] > 0, origin


def _check_files(directory: Path) -> None:
    if (problem := checksums.find_damage(epath.Path(directory))) is not None:
        raise CheckpointError(directory, [problem])


def _origin(path: str) -> Path | None:
    """The weights directory at the end of the chain of runs that `path`, an init_from, begins."""
    if not path:
        return None
    if store.is_weights(Path(path)):
        return Path(path)
    if not (Path(path) / "facts").is_dir():
        raise CheckpointError(
            path, ["the run started from it and it is not there any more: name its weights directory with --source"]
        )
    return _origin(store.facts(Path(path))["config"]["init_from"])


def _model(fields: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig as json has it."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return ModelConfig(**values)


# config.json, tensors (what lies where, offsets left out), and whether there is an index
PublishedLayout = tuple[dict[str, Any], dict[str, Stored], bool]


def _recorded_layout(origin: Path) -> PublishedLayout:
    """The layout of the checkpoint that the weights directory `origin` was imported from."""
    recorded = store.facts(origin)["source"]
    tensors = {
        name: Stored(file, dtype, tuple(shape), 0, size)
        for name, (file, dtype, shape, size) in recorded["tensors"].items()
    }
    return recorded["config"], tensors, recorded["has_index"]


def _default_layout(config: ModelConfig, mtp: bool) -> PublishedLayout:
    """The layout of the architecture's published checkpoints, in float32 shards of at most 5 GB."""
    published = published_config(config, "float32") | ({"mtp_num_hidden_layers": 1} if mtp else {})
    kind = published["model_type"]
    layers = [f"model.layers.{n}" for n in range(config.num_hidden_layers)] + ["mtp.layers.0"]
    fused = [f"{layer}.mlp.experts.down_proj" for layer in layers if kind == MOE]
    entries = plan(config, kind == NEXT, fused, mtp)
    sizes = {entry.name: math.prod(entry.shape) * DTYPES["F32"].itemsize for entry in entries}
    shard, filled, shards = 0, 0, {}
    for name, size in sizes.items():
        if filled and filled + size > _SHARD_BYTES:
            shard, filled = shard + 1, 0
        filled += size
        shards[name] = shard
    files = [f"model-{n + 1:05d}-of-{shard + 1:05d}.safetensors" for n in range(shard + 1)] if shard else [SINGLE]
    tensors = {e.name: Stored(files[shards[e.name]], "F32", e.shape, 0, sizes[e.name]) for e in entries}
    return published, tensors, shard > 0


@contextlib.contextmanager
def _whole_or_nothing(out: Path) -> Generator[Path]:
    """A path that is not there yet, to write the directory `out` as; in its place only if nothing is raised."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(out, ["it exists already and is not empty: name another directory"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        directory = Path(scratch) / out.name
        yield directory
        directory.rename(out)


def _copy_files(source: str | Path | None, target: Path) -> list[str]:
    """Copy the files of a checkpoint that are not its weights; returns their names."""
    found = [name for name in SIDE_FILES if source is not None and (Path(source) / name).is_file()]
    for name in found:
        target.mkdir(exist_ok=True)
        shutil.copyfile(Path(str(source)) / name, target / name)
    return found


def _chunk(name: str, spec: model_params.ParamSpec, mesh: Axes) -> tuple[int, ...]:
    """The shape of what is stored as one piece: of the shard on `mesh` one layer, expert, block of the vocabulary."""
    chunk = []
    for size, axes in zip(spec.shape, spec.partition, strict=True):
        cuts = {axis: mesh.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes or ())}
        parts = math.prod(cuts.values())
        if size % parts:
            raise CheckpointError(
                f"mesh {dict(mesh)}", [f"{name} {list(spec.shape)}: {size} is not a multiple of {cuts}"]
            )
        chunk.append(size // parts)
    for dim, logical in enumerate(spec.logical):
        if logical in ("layers", "experts"):
            chunk[dim] = 1
        elif logical == "vocab":
            chunk[dim] = min(chunk[dim], max(1, _BLOCK * chunk[dim] // math.prod(chunk)))
    return tuple(chunk)


def _step(entry: Entry, chunk: tuple[int, ...] | None = None) -> int:
    """Rows of a block: as many as fit, in whole chunks where given."""
    rows = max(1, _BLOCK // math.prod(entry.shape[1:]))
    if chunk is None or not entry.tensor.cut:
        return rows
    unit = chunk[len(entry.index) + entry.tensor.cut_axis(0)]
    return max(unit, rows // unit * unit)
