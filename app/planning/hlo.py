"""Compiled HLO text as instructions, how often each of them runs, and what it computes, moves and keeps busy.

XLA's own cost_analysis counts the body of a loop once; here loops count by their trips. A TPU program is scheduled: the
instructions of a computation stand in the order in which they are issued. It carries the compiler's estimated cycles of
every instruction except custom calls (Pallas kernels, see app.planning.kernels).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4,
    "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
# Custom calls that do no work of their own.
FREE_CALLS = frozenset(
    {"AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AssumeGatherIndicesInBound"}
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$", re.DOTALL)
_OPERATION = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `result` is its type, `operands` the names, `inside` the text between its parentheses."""

    name: str
    result: str
    operation: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @property
    def collective(self) -> str | None:
        """The kind of a collective, of its start if it is asynchronous; None for everything else. Between slices libtpu
        makes a send and a receive of each; the receive stands for it."""
        between = re.search(r'_xla_megascale_transfer_type="(\w+)"', self.attributes)
        if between and self.operation == "recv":
            return {"ONE_TO_ONE": "collective-permute"}.get(between[1], between[1].lower().replace("_", "-"))
        kind = self.operation.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 for an asynchronous start, whose work runs beside the core."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return 0 if found is None or self.operation.endswith("-start") else min(int(found[1]), 2**60) % 2**60

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The jax operation and line that it comes from: "jit(..)/.../dot_general FILE:LINE", "" if unknown."""
        name = re.search(r'op_name="([^"]*)"', self.attributes)
        return name[1] if name else ""

    def called(self, key: str) -> str:
        """The computation that attribute `key` names, "" if there is none."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """Computations by name; instructions of each by name, in schedule order."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Module":
        """text: `compiled.as_text()`. Raises ValueError if it has no entry."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in _whole_lines(text):
            start = _COMPUTATION.match(line)
            if start:
                current = computations.setdefault(start[2], {})
                entry = start[2] if start[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (instruction := _read(line)) is not None:
                current[instruction.name] = instruction
        if not entry:
            raise ValueError("no ENTRY computation in the HLO text")
        return cls(computations, entry)

    def root(self, computation: str) -> Instruction | None:
        return next((x for x in self.computations.get(computation, {}).values() if x.is_root), None)

    def executed(self) -> Iterator[tuple[Instruction, Computation, int]]:
        """(instruction, its computation, times it runs) of everything outside fusions, loops unrolled in number."""
        yield from self._executed(self.entry, 1)

    def _executed(self, name: str, times: int) -> Iterator[tuple[Instruction, Computation, int]]:
        computation = self.computations.get(name, {})
        for x in computation.values():
            yield x, computation, times
            for inner, trips in self.inner(x, computation):
                yield from self._executed(inner, times * trips)

    def inner(self, x: Instruction, computation: Computation) -> list[tuple[str, int]]:
        """(computation, trips) that an instruction runs: a loop's body, a call, the dearest branch."""
        if x.operation == "while":
            return [(x.called("body"), self.trips(x, computation))]
        if x.operation in ("call", "async-start"):
            return [(x.called("to_apply") or x.called("calls"), 1)]
        if x.operation == "conditional":
            lists = re.findall(r"branch_computations=\{([^}]*)\}", x.attributes)
            names = re.findall(r"[\w.\-]+", lists[0]) if lists else []
            names = names or re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", x.attributes)
            return [(max(names, key=self._weight), 1)]
        return []

    def _weight(self, name: str) -> int:
        return sum(x.cycles * times for x, _, times in self._executed(name, 1))

    def trips(self, loop: Instruction, computation: Computation) -> int:
        """Of a counting loop. Raises ValueError for one whose number of trips the text does not tell."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        test = self.root(loop.called("condition"))
        condition, body = (self.computations.get(loop.called(key), {}) for key in ("condition", "body"))
        while test is not None and test.operation == "fusion":  # its operands are the condition's values
            outer, test = test, self.root(test.called("calls"))
            condition = self._substituted(condition, outer)
        if test is not None and test.operation == "compare" and "direction=LT" in test.attributes:
            index, offset = self._linear(condition, test.operands[0])
            none, bound = self._linear(condition, test.operands[1])
            after, before = self.root(loop.called("body")), computation.get(loop.operands[0])
            if index is not None and none is None and after is not None and after.operation == "tuple":
                _, step = self._linear(body, after.operands[index])
                start = 0
                if before is not None and before.operation == "tuple":
                    start = self._linear(computation, before.operands[index])[1]
                if step > 0:
                    return max(0, math.ceil((bound - offset - start) / step))
        if "usually_skipped" in loop.source:  # app.ops.experts: the rounds after the first
            return 0
        raise ValueError(f"the number of trips of loop {loop.name} is not in the program's text")

    def _substituted(self, outer: Computation, fusion: Instruction) -> Computation:
        """A fusion's computation with its parameters replaced by the operands' instructions."""
        inner = dict(self.computations.get(fusion.called("calls"), {}))
        for name, x in list(inner.items()):
            if x.operation == "parameter":
                inner[name] = outer[fusion.operands[int(x.inside)]]
        return {**outer, **inner}

    def _linear(self, computation: Computation, name: str) -> tuple[int | None, int]:
        """A scalar as (element of the loop's state or None, plus a constant)."""
        x = computation.get(name)
        if x is None:
            return None, 0
        if x.operation == "constant":
            return None, int(x.inside) if re.fullmatch(r"-?\d+", x.inside) else 0
        if x.operation == "get-tuple-element":
            found = re.search(r"index=(\d+)", x.attributes)
            return (int(found[1]) if found else None), 0
        if x.operation == "add":
            terms = [self._linear(computation, operand) for operand in x.operands]
            return next((index for index, _ in terms if index is not None), None), sum(value for _, value in terms)
        if x.operation in ("copy", "bitcast", "convert"):
            return self._linear(computation, x.operands[0])
        if x.operation == "fusion":
            root = self.root(x.called("calls"))
            return self._linear(self._substituted(computation, x), root.name) if root is not None else (None, 0)
        return None, 0


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, with those that continue an instruction (Pallas calls print attributes over several) joined to it."""
    held = ""
    for line in text.splitlines():
        if held and line != "}" and not _INSTRUCTION.match(line) and not _COMPUTATION.match(line):
            held += "\n" + line
            continue
        if held:
            yield held
        held = ""
        if _INSTRUCTION.match(line):
            held = line
        else:
            yield line
    if held:
        yield held


def _read(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    text = found[3]
    blank = _COMMENT.sub(lambda comment: " " * len(comment[0]), text) if "/*" in text else text
    operation = _OPERATION.search(blank)
    if operation is None:
        return None
    depth, end = 1, operation.end()
    while depth and end < len(text):
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    inside = text[operation.end() : end - 1]
    return Instruction(
        found[2], text[: operation.start()], operation[1], tuple(re.findall(r"%([\w.\-]+)", inside)), inside,
        text[end:], bool(found[1]),
    )  # fmt: skip


# --- shapes


@functools.lru_cache(maxsize=1 << 16)
def arrays(text: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """(dtype, dims, layout) of every array in a type such as (f32[2,3]{1,0}, bf16[4])."""
    return tuple(
        (kind, tuple(int(d) for d in dims.split(",") if d), layout)
        for kind, dims, layout in _ARRAY.findall(text)
        if kind in BYTES
    )


def shape_bytes(text: str) -> int:
    """Bytes of all arrays in a type."""
    return sum(BYTES[kind] * math.prod(dims) for kind, dims, _ in arrays(text))


def hbm_bytes(text: str) -> int:
    """The same without arrays that live in another memory than HBM: layout ...S(n)."""
    return sum(BYTES[kind] * math.prod(dims) for kind, dims, at in arrays(text) if not re.search(r"S\([1-9]", at))


# --- FLOPs


def flops(module: Module, x: Instruction, computation: Computation) -> int:
    """Of matrix products and convolutions, those inside a fusion too; a multiply-add counts two."""
    if x.operation in ("dot", "convolution"):
        return _product_flops(x, computation)
    if x.operation == "fusion":
        inner = module.computations.get(x.called("calls"), {})
        return sum(flops(module, y, inner) for y in inner.values() if y.operation in ("dot", "convolution", "fusion"))
    return 0


def _product_flops(x: Instruction, computation: Computation) -> int:
    left, right = (arrays(computation[name].result)[0][1] for name in x.operands[:2])
    out = arrays(x.result)[0][1]
    if x.operation == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
        sizes = [left[int(dim)] for dim in contracted[1].split(",") if dim] if contracted else []
        return 2 * math.prod(out) * math.prod(sizes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    if labels is None:
        return 0
    lhs, rhs, result = labels.groups()
    spatial = sorted(label for label in rhs if label.isdigit())
    window = re.search(r"window=\{([^}]*)\}", x.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}

    def sizes(field: str, default: int) -> list[int]:
        return [int(v.split("_")[0]) for v in fields[field].split("x")] if field in fields else [default] * len(spatial)

    positions = 1
    dims = zip(spatial, sizes("size", 1), sizes("stride", 1), sizes("pad", 0), sizes("lhs_dilate", 1),
               sizes("rhs_dilate", 1), strict=True)  # fmt: skip
    for label, *rest in dims:
        positions *= _positions(left[lhs.index(label)], out[result.index(label)], *rest)
    return 2 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")] * positions


@functools.cache
def _positions(size_in: int, size_out: int, window: int, stride: int, pad: int, dilate_in: int, dilate: int) -> int:
    """Pairs (output, tap) of one dim of a convolution that read an element, not padding or a hole."""
    last, count = (size_in - 1) * dilate_in, 0
    outputs = np.arange(size_out, dtype=np.int64) * stride - pad
    for tap in range(window):
        place = outputs + tap * dilate
        count += int(np.sum((place >= 0) & (place <= last) & (place % dilate_in == 0)))
    return count


# --- collectives


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One collective instruction: kind, bytes a device puts in or takes out (the larger of the two: an all-gather's
    result, the others' operand), who talks to whom, either groups of device numbers or pairs (source, target), and the
    one-way rings that the SparseCores send it round (0: the TensorCores do it, over all links). Between slices: `dcn`,
    and the bytes are those received."""

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    rings: int = 0
    dcn: bool = False


def exchange(x: Instruction, computation: Computation, devices: int) -> Exchange:
    """Of a collective (its start if asynchronous) over numbers 0..devices-1.

    A collective of whose groups the text says nothing spans all of them.
    """
    kind = x.collective
    assert kind is not None
    if x.operation == "recv":
        return Exchange(kind, shape_bytes(re.sub(r"\bu32\[\]", "", x.result)), (), (), dcn=True)
    sent = sum(shape_bytes(computation[name].result) for name in x.operands if name in computation)
    if kind == "all-gather":
        whole = shape_bytes(re.sub(r"\b[a-z]+\d*\[\]", "", x.result))
        sent = whole - sent if x.operation.endswith("-start") else whole
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", x.attributes)
    if pairs:
        numbers = tuple(int(n) for n in re.findall(r"\d+", pairs[1]))
        return Exchange(kind, sent, (), tuple(zip(numbers[::2], numbers[1::2], strict=True)))
    return Exchange(kind, sent, _groups(x.attributes, devices), (), x.attributes.count('"phase_rings"'))


@functools.lru_cache(maxsize=4096)
def _groups_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Of mesh['a'=2,'b'=4] {'b'}, of [4,2]<=[2,4]T(1,0) or of {{0,1},{2,3}}."""
    mesh = re.fullmatch(r"mesh\[(.*)\] \{(.*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        inside = re.findall(r"'(\w+)'", mesh[2])
        axes = [list(sizes).index(name) for name in [*(n for n in sizes if n not in inside), *inside]]
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values())).transpose(axes)
        return tuple(map(tuple, numbers.reshape(-1, math.prod(sizes[name] for name in inside)).tolist()))
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, source = ([int(n) for n in part.split(",")] for part in iota.group(1, 2))
        numbers = np.arange(math.prod(source)).reshape(source)
        if iota[3]:
            numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
        return tuple(map(tuple, numbers.reshape(shape[0], -1).tolist()))
    return tuple(tuple(int(n) for n in part.split(",") if n) for part in re.findall(r"\{([\d,]*)\}", text[1:-1]))


def _groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    form = r"mesh\[[^\]]*\] \{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\}"
    found = re.search(f"replica_groups=({form})", attributes)
    groups = tuple(group for group in _groups_of(found[1]) if group) if found else ()
    return groups or (tuple(range(devices)),)


def inner_collectives(module: Module, x: Instruction) -> list[tuple[Instruction, Computation]]:
    """Collectives inside a fusion (libtpu fuses some with the products that use them) or inside what a "call-start"
    has the SparseCores do beside the core, at any depth."""
    found = []
    if x.operation in ("fusion", "call-start"):
        inner = module.computations.get(x.called("calls") or x.called("to_apply"), {})
        for y in inner.values():
            found += [(y, inner)] if y.collective else inner_collectives(module, y)
    return found


def gathered_bytes(module: Module, x: Instruction) -> int:
    """HBM bytes that the gather of a "call-start" on the SparseCores reads and writes, 0 if it calls none."""
    for y in module.computations.get(x.called("to_apply"), {}).values():
        if y.operation == "fusion" and "gather_offload" in y.name:
            return 2 * hbm_bytes(y.result)
        if inner := gathered_bytes(module, y):
            return inner
    return 0
