"""Cost of a compiled program from its HLO text, with the trips of its loops counted.

XLA's own cost_analysis counts the body of a loop once. TPU programs carry the compiler's estimated cycles of each
instruction; custom calls (Pallas kernels, triangular solves) carry none and are listed apart.
"""

import dataclasses
import math
import re
from collections import Counter

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# Custom calls that do no work of their own.
FREE_CALLS = (
    "AllocateBuffer",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "AssumeGatherIndicesInBound",
)


@dataclasses.dataclass
class Cost:
    """Of one device: cycles (TPU only), bytes and number of collectives by kind, number of working custom calls."""

    cycles: int = 0
    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    custom_calls: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class _Instruction:
    result: str
    operation: str
    rest: str


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


def analyze(text: str) -> Cost:
    """text: `compiled.as_text()`."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            current = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            found = _INSTRUCTION.match(line)
            if found:
                current.append(_Instruction(*found.groups()))
    if entry is None:
        raise ValueError("no ENTRY computation in the HLO text")
    cost = Cost()
    _add(cost, computations, entry, 1)
    return cost


def _add(cost: Cost, computations: dict[str, list[_Instruction]], name: str, times: int) -> None:
    for x in computations.get(name, []):
        kind = x.operation.removesuffix("-start")
        cycles = re.search(r'"estimated_cycles":"(\d+)"', x.rest)
        if cycles and not x.operation.endswith("-start"):
            cost.cycles += times * int(cycles[1])
        if kind in COLLECTIVES:
            # The type of an asynchronous start has its operand, its result and scalars of the hardware.
            arrays = re.sub(r"\b[a-z]+\d*\[\]", "", x.result)
            cost.sent[kind] += times * shape_bytes(arrays) // (1 if kind == x.operation else 2)
            cost.collectives[kind] += times
        if x.operation == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', x.rest)
            if target and target[1] not in FREE_CALLS:
                cost.custom_calls[target[1]] += times
        if x.operation == "while":
            _add(cost, computations, _called(x, "body"), times * _trips(computations, x))
        elif x.operation in ("call", "async-start"):
            _add(cost, computations, _called(x, "to_apply") or _called(x, "calls"), times)
        elif x.operation == "conditional":
            raise ValueError("a conditional has no fixed cost")


def _called(x: _Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=%?([\w.\-]+)", x.rest)
    return found[1] if found else ""


def _trips(computations: dict[str, list[_Instruction]], loop: _Instruction) -> int:
    """Of a counting loop: the number in its attributes, else the bound its condition compares with."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    todo, bounds = [_called(loop, "condition")], []
    while todo:
        for x in computations.get(todo.pop(), []):
            if x.operation == "constant":
                bounds += re.findall(r"^(\d+)\)", x.rest)
            todo += [_called(x, "calls")] if x.operation == "fusion" else []
    if not bounds:
        raise ValueError(f"no bound found for the loop {loop.rest[:80]}")
    return max(map(int, bounds))


def shape_bytes(text: str) -> int:
    """Bytes of all arrays in an HLO type such as (f32[2,3]{1,0}, bf16[4])."""
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text)
    return sum(BYTES[kind] * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in arrays if kind in BYTES)
