"""From a compiled step to the plan: memory, FLOPs, what moves, seconds. Everything is of one device and one step."""

from collections import Counter, defaultdict
from typing import Any

from app.cluster.hardware import Topology
from app.config import Config
from app.planning import compiler, kernels, timeline
from app.planning.compiler import Compiled
from app.planning.hlo import (
    FREE_CALLS,
    Computation,
    Instruction,
    Module,
    arrays,
    exchange,
    flops,
    hbm_bytes,
    inner_collectives,
)
from app.planning.network import Network
from app.planning.sources import Sources
from app.planning.traffic import bytes_moved
from app.training.flops import forward_flops_per_token, training_flops_per_token

Plan = dict[str, Any]  # JSON data
LARGEST = 6  # buffers named in a plan
# Results that are no buffer of their own.
_NO_BUFFER = {"bitcast", "get-tuple-element", "parameter", "tuple", "while", "optimization-barrier", "opt-barrier"}
ASSUMPTIONS = (
    "one core timeline a device in the compiler's schedule; cycles at the clock at which the matrix units reach their "
    "peak; kernels by bundles, both sides of a branch counted",
    "collectives at link rates over the physical topology plus 1 microsecond a hop; synchronous ones stop the core, "
    "asynchronous ones only where the schedule waits for them; the longest message decides",
    "gathers of rows on the SparseCores at 0.8 of the HBM's rate; waited for like asynchronous collectives",
    "not counted: waiting for copies between HBM and VMEM, stragglers, the input pipeline, rounds of the experts' "
    "exchange after the first",
)


def estimate(config: Config, topology: Topology, slices: int, compiled: Compiled) -> Plan:
    """config: with its mesh resolved. Compiles the kernels that are not in the cache yet (about 10 s each)."""
    module, sources = Module.parse(compiled.text), Sources(compiled.text)
    network = Network(compiler.mesh_of(config, topology, slices), topology.generation)
    kernel_cycles = cycles_of_kernels(module, topology)
    clock = topology.generation.cycles_per_second

    def core_seconds(x: Instruction) -> float:
        return (kernel_cycles.get(x.name, 0) if x.operation == "custom-call" else x.cycles) / clock

    spent = timeline.walk(module, network, core_seconds, sources.part)
    tokens = config.global_batch * config.seq_len
    model_flops = training_flops_per_token(config.model, config.seq_len) * tokens
    devices, chips = topology.devices * slices, topology.chips * slices
    peak = topology.generation.peak_bf16_flops * devices
    return {
        "topology": str(topology),
        "slices": slices,
        "chips": chips,
        "mesh": {axis: size for axis, size in config.mesh.sizes.items() if size > 1},
        "seq_len": config.seq_len,
        "global_batch": config.global_batch,
        "accumulation": config.accumulation,
        "remat": config.remat,
        "compile": {"seconds": compiled.seconds, "resident_bytes": compiled.resident_bytes},
        "memory": _memory(module, sources, compiled, topology),
        "model_flops_per_token": forward_flops_per_token(config.model, config.seq_len),
        "compiled": work(module, kernel_cycles),
        "collectives": _collectives(module, network),
        "step": {
            "seconds": spent.seconds,
            "busy": _sorted(spent.busy),
            "exposed": _sorted(spent.exposed),
            "moving": _sorted(spent.moving),
        },
        "tokens_per_second_per_chip": tokens / spent.seconds / chips,
        "mfu": model_flops / spent.seconds / peak,
        "assumptions": ASSUMPTIONS,
    }


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def cycles_of_kernels(module: Module, topology: Topology) -> dict[str, int]:
    """Cycles of every kernel by the name of its instruction."""
    one_host = "x".join(map(str, topology.generation.topologies()[0]))
    where = f"{topology.generation.name}:{one_host}"
    return {
        x.name: kernels.cycles(kernels.request(x, computation, where))
        for x, computation, _ in module.executed()
        if x.target == kernels.TARGET
    }


def work(module: Module, kernel_cycles: dict[str, int]) -> dict[str, Any]:
    """What the device does in a step, loops by their trips. FLOPs are those of XLA's matrix products, not kernels'."""
    total: Counter[str] = Counter()
    other_calls: set[str] = set()
    for x, computation, times in module.executed():
        total["flops"] += times * flops(module, x, computation)
        total["hbm_bytes"] += times * bytes_moved(module, x, computation)
        total["xla_cycles"] += times * (x.cycles if x.operation != "custom-call" else 0)
        if x.name in kernel_cycles:
            total["kernel_cycles"] += times * kernel_cycles[x.name]
            total["kernel_calls"] += times
        elif x.operation == "custom-call" and x.target not in FREE_CALLS:
            other_calls.add(x.target)
    return {**total, "calls_without_cost": sorted(other_calls)}


def _memory(module: Module, sources: Sources, compiled: Compiled, topology: Topology) -> dict[str, Any]:
    total = sum(compiled.memory.values())
    seen: dict[tuple[str, str], int] = {}
    for x, _, _ in module.executed():
        if x.operation not in _NO_BUFFER and not x.operation.endswith("-done"):
            kinds = [f"{kind}[{','.join(map(str, dims))}]" for kind, dims, _ in arrays(x.result)]
            seen.setdefault((" ".join(kinds[:2]), sources.line(x) or x.operation), hbm_bytes(x.result))
    largest = sorted(seen.items(), key=lambda item: -item[1])[:LARGEST]
    limit = topology.generation.hbm_bytes
    return {
        **compiled.memory,
        "total": total,
        "limit": limit,
        "fits": total <= limit,
        "largest": [{"bytes": bytes_, "arrays": shape, "source": where} for (shape, where), bytes_ in largest],
    }


def _collectives(module: Module, network: Network) -> list[dict[str, Any]]:
    """One row for each kind, set of mesh axes and network, by seconds on the network."""
    rows: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(int))
    for x, computation, times in module.executed():
        found: list[tuple[Instruction, Computation]] = [(x, computation)] if x.collective else []
        for y, inside in found or inner_collectives(module, x):
            one = exchange(y, inside, network.size)
            transfer = network.transfer(one)
            row = rows[one.kind, transfer.axes, transfer.network]
            row["count"] += times
            row["bytes"] += times * one.bytes
            row["seconds"] += times * transfer.seconds
            row["hops"] = max(row["hops"], transfer.hops)
            row["contention"] = max(row["contention"], transfer.contention)
    ordered = sorted(rows.items(), key=lambda item: -item[1]["seconds"])
    return [{"kind": kind, "axes": axes, "network": network, **row} for (kind, axes, network), row in ordered]
