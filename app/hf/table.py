"""The one table between published tensors and parameters: names, shapes, and the order of rows inside them.

A torch weight is [out, in]; a parameter of ours has the input first and every dim by itself. One rule covers all: the
rows of a published tensor belong to one or several parameters, part after part, or slice by slice of every part for
each index of a group; the parameter is the columns' dims, then the rows' dims. Letters (`dims`): D width, V vocabulary
(root) or value head dim (linear attention), H heads, G key/value or key heads, K head dim, W conv window, F MLP
hidden, S hidden of the shared expert, E experts.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from app.config import LayerKind, ModelConfig

Dims = Mapping[str, int]
Region = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor.

    name: below its layer (`{e}`: number of the expert that it belongs to alone). parts: (parameter, dims of its rows).
    columns: dims of the columns. group: the dim each of whose indices holds a slice of every part; "": part after part.
    lead: a dim in front of both sides. cut: a dim, first in the tensor, by which it may be handled in blocks.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    columns: str = "D"
    group: str = ""
    lead: str = ""
    cut: str = ""

    def published_shape(self, dims: Dims) -> tuple[int, ...]:
        rows = sum(math.prod(_sizes(part, dims)) for _, part in self.parts)
        if not self.columns:
            return _sizes(self.parts[0][1], dims)
        middle = (1,) if self.columns == "W" else ()  # torch's Conv1d counts the channels that one output mixes
        return (*_sizes(self.lead, dims), rows, *middle, math.prod(_sizes(self.columns, dims)))

    def param_shape(self, part: int, dims: Dims) -> tuple[int, ...]:
        return _sizes(self._letters(part), dims)

    def split(self, x: np.ndarray, dims: Dims) -> list[np.ndarray]:
        """The parameters that the published tensor `x` holds (views where numpy can)."""
        lead, group, rows = _sizes(self.lead, dims), self._group(dims), self._rows(dims)
        x = x.reshape(*lead, group, sum(rows), math.prod(_sizes(self.columns, dims)))
        parts = np.split(x, np.cumsum(rows)[:-1], axis=-2)
        return [
            part.reshape(*lead, -1, part.shape[-1]).swapaxes(-1, -2).reshape(self.param_shape(i, dims))
            for i, part in enumerate(parts)
        ]

    def join(self, parts: Sequence[np.ndarray], dims: Dims) -> np.ndarray:
        """The published tensor that holds `parts`: the inverse of `split`."""
        lead, group, rows = _sizes(self.lead, dims), self._group(dims), self._rows(dims)
        columns = math.prod(_sizes(self.columns, dims))
        whole = [
            part.reshape(*lead, columns, group * n).swapaxes(-1, -2).reshape(*lead, group, n, columns)
            for part, n in zip(parts, rows, strict=True)
        ]
        return np.concatenate(whole, axis=-2).reshape(self.published_shape(dims))

    def cut_axis(self, part: int) -> int:
        """Where the dim `cut` is in the parameter of `part`."""
        return self._letters(part).split().index(self.cut)

    def _letters(self, part: int) -> str:
        return " ".join((self.lead, self.columns, self.parts[part][1]))

    def _group(self, dims: Dims) -> int:
        return dims[self.group] if self.group else 1

    def _rows(self, dims: Dims) -> list[int]:
        """Rows of each part for one index of the group."""
        return [math.prod(_sizes(part, dims)) // self._group(dims) for _, part in self.parts]


def _sizes(letters: str, dims: Dims) -> tuple[int, ...]:
    return tuple(dims[letter] if letter != "1" else 1 for letter in letters.split())


def _one(name: str, param: str, rows: str, columns: str = "D", **options: str) -> Tensor:
    return Tensor(name, ((param, rows),), columns, **options)


def _vector(name: str, param: str, dim: str) -> Tensor:
    return Tensor(name, ((param, dim),), columns="")


_QKV = (("q", "G K"), ("k", "G K"), ("v", "H V"))

TABLE: dict[str, tuple[Tensor, ...]] = {
    "root": (
        _one("embed_tokens.weight", "embed", "V D", "", cut="V"),
        _vector("norm.weight", "final_norm.weight", "D"),
    ),
    "head": (_one("lm_head.weight", "lm_head", "V", cut="V"),),
    # The layer of multi-token prediction, whose block is like any other. I: the widths of its two inputs.
    "mtp": (
        _one("mtp.fc.weight", "mtp.fc", "D", "I"),
        _vector("mtp.pre_fc_norm_embedding.weight", "mtp.embedding_norm.weight", "D"),
        _vector("mtp.pre_fc_norm_hidden.weight", "mtp.hidden_norm.weight", "D"),
        _vector("mtp.norm.weight", "mtp.norm.weight", "D"),
    ),
    "block": (
        _vector("input_layernorm.weight", "input_norm.weight", "D"),
        _vector("post_attention_layernorm.weight", "post_norm.weight", "D"),
    ),
    "full_attention": (
        Tensor("self_attn.q_proj.weight", (("mixer.q_proj", "H K"), ("mixer.gate_proj", "H K")), group="H"),
        _one("self_attn.k_proj.weight", "mixer.k_proj", "G K"),
        _one("self_attn.v_proj.weight", "mixer.v_proj", "G K"),
        _one("self_attn.o_proj.weight", "mixer.o_proj", "D", "H K"),
        _vector("self_attn.q_norm.weight", "mixer.q_norm.weight", "K"),
        _vector("self_attn.k_norm.weight", "mixer.k_norm.weight", "K"),
    ),
    "linear_attention": (
        Tensor("linear_attn.conv1d.weight", tuple((f"mixer.{x}_conv", rows) for x, rows in _QKV), columns="W"),
        _vector("linear_attn.A_log", "mixer.A_log", "H"),
        _vector("linear_attn.dt_bias", "mixer.dt_bias", "H"),
        _vector("linear_attn.norm.weight", "mixer.norm", "V"),
        _one("linear_attn.out_proj.weight", "mixer.out_proj", "D", "H V"),
    ),
    # The projections into the recurrence: Qwen3.5 stores them one after another, Qwen3-Next key head by key head.
    "linear_inputs": (
        Tensor("linear_attn.in_proj_qkv.weight", tuple((f"mixer.{x}_proj", rows) for x, rows in _QKV)),
        _one("linear_attn.in_proj_z.weight", "mixer.z_proj", "H V"),
        _one("linear_attn.in_proj_b.weight", "mixer.b_proj", "H"),
        _one("linear_attn.in_proj_a.weight", "mixer.a_proj", "H"),
    ),
    "linear_inputs_grouped": (
        Tensor(
            "linear_attn.in_proj_qkvz.weight",
            tuple((f"mixer.{x}_proj", rows) for x, rows in (*_QKV, ("z", "H V"))),
            group="G",
        ),
        Tensor("linear_attn.in_proj_ba.weight", (("mixer.b_proj", "H"), ("mixer.a_proj", "H")), group="G"),
    ),
    "dense": (
        _one("mlp.gate_proj.weight", "mlp.gate_proj", "F"),
        _one("mlp.up_proj.weight", "mlp.up_proj", "F"),
        _one("mlp.down_proj.weight", "mlp.down_proj", "D", "F"),
    ),
    "moe": (
        _one("mlp.gate.weight", "mlp.router", "E"),
        _one("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.gate_proj", "S"),
        _one("mlp.shared_expert.up_proj.weight", "mlp.shared_expert.up_proj", "S"),
        _one("mlp.shared_expert.down_proj.weight", "mlp.shared_expert.down_proj", "D", "S"),
        _one("mlp.shared_expert_gate.weight", "mlp.shared_expert_gate", "1"),
    ),
    "experts_fused": (
        Tensor(
            "mlp.experts.gate_up_proj",
            (("mlp.experts.gate_proj", "F"), ("mlp.experts.up_proj", "F")),
            lead="E",
            cut="E",
        ),
        _one("mlp.experts.down_proj", "mlp.experts.down_proj", "D", "F", lead="E", cut="E"),
    ),
    "experts_apart": (
        _one("mlp.experts.{e}.gate_proj.weight", "mlp.experts.gate_proj", "F"),
        _one("mlp.experts.{e}.up_proj.weight", "mlp.experts.up_proj", "F"),
        _one("mlp.experts.{e}.down_proj.weight", "mlp.experts.down_proj", "D", "F"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of one checkpoint: its full name and the places in the parameters that it fills.

    params: their full names. index: in front of the tensor's own dims (number in the stack of layers, expert).
    """

    name: str
    tensor: Tensor
    params: tuple[str, ...]
    index: tuple[int, ...]
    dims: Dims

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.published_shape(self.dims)

    def blocks(self, step: int | None = None) -> Iterator["Block"]:
        """The tensor in blocks of `step` indices of its first dim; None, or where it cannot be cut: in one."""
        size = self.dims[self.tensor.cut] if self.tensor.cut else 1
        step = step or size
        for start in range(0, size, step):
            yield Block(self, start, min(start + step, size))


@dataclasses.dataclass(frozen=True)
class Block:
    """Indices start to stop of the dim that `entry` is cut along (0 to 1 of one that is not)."""

    entry: Entry
    start: int
    stop: int

    @property
    def dims(self) -> Dims:
        cut = self.entry.tensor.cut
        return {**self.entry.dims, cut: self.stop - self.start} if cut else self.entry.dims

    @property
    def rows(self) -> slice:
        """Of the published tensor."""
        return slice(self.start, self.stop) if self.entry.tensor.cut else slice(None)

    def region(self, part: int) -> Region:
        """Where in the whole parameter of `part` the block lies."""
        entry = self.entry
        inner: list[int | slice] = [slice(None)] * len(entry.tensor.param_shape(part, entry.dims))
        if entry.tensor.cut:
            inner[entry.tensor.cut_axis(part)] = slice(self.start, self.stop)
        return (*entry.index, *inner)

    def split(self, x: np.ndarray) -> list[np.ndarray]:
        return self.entry.tensor.split(x, self.dims)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self.entry.tensor.join(parts, self.dims)


def dims_of(config: ModelConfig) -> dict[str, dict[str, int]]:
    """The letters of every kind of layer part."""
    shared = {"D": config.hidden_size}
    linear = {
        "G": config.linear_num_key_heads,
        "H": config.linear_num_value_heads,
        "K": config.linear_key_head_dim,
        "V": config.linear_value_head_dim,
        "W": config.linear_conv_kernel_dim,
    }
    attention = {"G": config.num_key_value_heads, "H": config.num_attention_heads, "K": config.head_dim}
    moe = {
        "E": config.num_experts,
        "F": config.moe_intermediate_size,
        "S": config.shared_expert_intermediate_size,
    }
    kinds = {
        "root": {"V": config.vocab_size, "I": 2 * config.hidden_size},
        "linear_attention": linear,
        "full_attention": attention,
        "dense": {"F": config.intermediate_size},
        "moe": moe,
    }
    return {kind: shared | letters for kind, letters in kinds.items()}


def plan(config: ModelConfig, grouped: bool, names: Collection[str], mtp: bool = False) -> list[Entry]:
    """Every tensor that a checkpoint of `config` has, in the layout that its `names` show.

    grouped: Qwen3-Next's order of rows. mtp: with the layer of multi-token prediction. From the names are taken: the
    prefix of the text model, and for every layer whether its experts are fused; nothing else.
    """
    dims, names = dims_of(config), set(names)
    prefix = "model.language_model." if any(name.startswith("model.language_model.") for name in names) else "model."
    entries = [_entry(tensor, prefix, "", (), dims["root"]) for tensor in TABLE["root"]]
    if not config.tie_word_embeddings:
        entries += [_entry(tensor, "", "", (), dims["root"]) for tensor in TABLE["head"]]
    for layer, kind in enumerate(config.layers):
        group, place = divmod(layer, len(config.layer_pattern))
        entries += _layer(f"{prefix}layers.{layer}.", f"groups.blocks.{place}.", (group,), kind, dims, grouped, names)
    if mtp:
        kind = ("full_attention", "moe" if config.num_experts else "dense")
        entries += [_entry(tensor, "", "", (), dims["root"]) for tensor in TABLE["mtp"]]
        entries += _layer("mtp.layers.0.", "mtp.block.", (), kind, dims, grouped, names)
    return entries


def _layer(
    prefix: str,
    params: str,
    index: tuple[int, ...],
    kind: LayerKind,
    dims: Mapping[str, Dims],
    grouped: bool,
    names: Collection[str],
) -> list[Entry]:
    """The tensors of one layer: their names start with `prefix`, those of the parameters with `params`."""
    mixer, mlp = kind
    inputs = "linear_inputs_grouped" if grouped else "linear_inputs"
    parts = [("block", mixer), (mixer, mixer), (mlp, mlp)] + ([(inputs, mixer)] if mixer == "linear_attention" else [])
    fused = mlp == "moe" and any(prefix + tensor.name in names for tensor in TABLE["experts_fused"])
    if fused:
        parts.append(("experts_fused", mlp))
    entries = [
        _entry(tensor, prefix, params, index, dims[letters]) for part, letters in parts for tensor in TABLE[part]
    ]
    if mlp == "moe" and not fused:
        entries += [
            _entry(tensor, prefix, params, (*index, expert), dims[mlp], expert)
            for tensor in TABLE["experts_apart"]
            for expert in range(dims[mlp]["E"])
        ]
    return entries


def _entry(
    tensor: Tensor, prefix: str, params: str, index: tuple[int, ...], dims: Dims, expert: int | None = None
) -> Entry:
    name = tensor.name if expert is None else tensor.name.format(e=expert)
    return Entry(prefix + name, tensor, tuple(params + param for param, _ in tensor.parts), index, dims)
