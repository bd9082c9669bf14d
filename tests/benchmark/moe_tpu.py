"""Estimated cycles of the mixture-of-experts block on TPU v5p against a dense MLP of the same active FLOPs, on a
machine without a TPU.

    python -m tests.benchmark.moe_tpu [--config configs/qwen3_5_35b_a3b.py] [--tokens 2048 8192] [--topology v5p:4x4x8]

compiles both as they sit in the train step: the module under the preset's mesh, remat and dtypes, in a scan over
layers, forward and backward, weights gathered and their gradients reduced. Cycles of one layer on one device:

    xla     libtpu's estimate of XLA's instructions x trips (sorts carry none; rounds of exchange count once)
    kernel  bundles x trips of the Pallas kernels, x the share of their tiles that even routing uses
    waits   for gathers of rows, which libtpu gives to the SparseCores: bytes at 80 % of the HBM rate (its own
            allowance), less what runs beside them in the compiler's schedule

Beside the ratio stand its bounds: all tiles used and no gather hidden; gathers not counted. "network" is what the
collectives would take alone, hidden or not.
"""

import argparse
import dataclasses
import math
import os
from collections import Counter

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from app.cluster import sharding
from app.cluster.hardware import Topology, parse_topology
from app.config import Config, from_config_dict, resolve_mesh
from app.config_flags import load_file
from app.models.layers import MLP, normal
from app.models.moe import MoE
from app.models.qwen import rematerialised
from app.planning import compiler, kernels
from app.planning.hlo import Computation, Instruction, Module, arrays, exchange, gathered_bytes, inner_collectives
from app.planning.network import Network
from app.planning.sources import Sources
from app.planning.timeline import GATHER_RATE
from app.training.step import runtime_of

LAYERS = 2  # of the scan: a loop of one trip is no loop, and its parts would be merged


def compile_block(config: Config, topology: Topology, kind: str):
    """LAYERS blocks of `kind` ("moe" or "dense"), gradients of input and parameters. config: with its mesh resolved."""
    mesh, runtime = compiler.mesh_of(config, topology, 1), runtime_of(config, "tpu")
    model = config.model
    hidden = model.num_experts_per_tok * model.moe_intermediate_size + model.shared_expert_intermediate_size

    @nnx.vmap(in_axes=(), axis_size=LAYERS, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stacked():
        return MoE(model, runtime) if kind == "moe" else MLP(model.hidden_size, hidden, normal(0.02), runtime)

    graphdef, state = nnx.split(nnx.eval_shape(stacked))
    flat = nnx.to_flat_state(state)
    specs = [sharding.SHARDED.spec(variable.out_sharding) for _, variable in flat]

    def layers(params, h_BTD, segment_ids_BT):
        def apply(state, h_BTD):
            block = nnx.merge(graphdef, state)
            if kind == "dense":
                return h_BTD + block(h_BTD), ()
            out_BTD, routing = block(h_BTD, segment_ids_BT)
            return h_BTD + out_BTD, routing

        stacked = nnx.from_flat_state([(path, v.replace(x)) for (path, v), x in zip(flat, params, strict=True)])
        return lax.scan(lambda h, state: rematerialised(apply, config.remat)(state, h), h_BTD, stacked)

    def body(params, h_BTD, segment_ids_BT, grad_BTD, grad_routing):
        (_, routing), pull = jax.vjp(lambda params, h: layers(params, h, segment_ids_BT), params, h_BTD)
        # The losses of the router have gradients too: everything that it computes has to be differentiated.
        return pull((grad_BTD, jax.tree.map(lambda x: grad_routing.astype(x.dtype) + 0 * x, routing)))

    def argument(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch, stream = sharding.BATCH_SPEC, sharding.SHARDED.spec(("batch", "time", None))
    params = [argument(v.shape, v.dtype, spec) for (_, v), spec in zip(flat, specs, strict=True)]
    segment_ids = argument((config.global_batch, config.seq_len), jnp.int32, batch)
    h = argument((config.global_batch, config.seq_len, model.hidden_size), config.dtypes.compute, stream)
    scalar = argument((), jnp.float32, PartitionSpec())
    in_specs = (specs, stream, batch, stream, PartitionSpec())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=(specs, stream), check_vma=False)
    jitted = jax.jit(mapped, compiler_options=dict(topology.generation.compiler_options))
    return jitted.lower(params, h, segment_ids, h, scalar).compile()


@dataclasses.dataclass
class Cost:
    """Of one layer on one device. cycles: by (part, source line); most: with all tiles used and no gather hidden;
    seconds of the network and bytes: by "kind, axes"."""

    cycles: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    most: float = 0.0
    network: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def total(self) -> float:
        return sum(self.cycles.values())

    def of(self, part: str) -> float:
        return sum(spent for (name, _), spent in self.cycles.items() if name == part)


def cost_of(text: str, config: Config, topology: Topology) -> Cost:
    module, sources, cost = Module.parse(text), Sources(text), Cost()
    network = Network(compiler.mesh_of(config, topology, 1), topology.generation)
    generation = topology.generation
    one_host = f"{generation.name}:{'x'.join(map(str, generation.topologies()[0]))}"
    gather_cycles = generation.cycles_per_second / (GATHER_RATE * generation.hbm_bytes_per_second)
    clock: Counter[int] = Counter()  # of each computation: cycles since it began
    arriving: dict[tuple[int, str], float] = {}

    for x, computation, times in module.executed():
        here, part, spent = id(computation), "xla", float(x.cycles)
        if x.target == kernels.TARGET:
            part, most = "kernel", kernels.cycles(kernels.request(x, computation, one_host))
            spent = most * _used(x, computation, config)
            cost.most += times * (most - spent) / LAYERS
        # The SparseCores are called, given the operands, and waited for.
        start = computation.get(x.operands[0]) if x.operation == "call-update" else None
        if start is not None and (moved := gathered_bytes(module, start)):
            busy = max([clock[here], *(end for (where, _), end in arriving.items() if where == here)])
            arriving[here, x.name] = busy + moved * gather_cycles
            cost.most += times * moved * gather_cycles / LAYERS
        if x.operation == "call-done" and (end := arriving.pop((here, x.operands[0]), None)) is not None:
            part, spent = "waits", max(0.0, end - clock[here])
            cost.most -= times * spent / LAYERS
        clock[here] += round(spent)
        cost.cycles[part, sources.line(x) or x.operation] += times * spent / LAYERS
        for y, inside in [(x, computation)] if x.collective else inner_collectives(module, x):
            one = exchange(y, inside, network.size)
            transfer = network.transfer(one)
            key = f"{one.kind}, {' '.join(transfer.axes)}"
            cost.network[key] += times * transfer.seconds / LAYERS
            cost.bytes[key] += times * one.bytes / LAYERS
    cost.most += cost.total
    return cost


def _used(x: Instruction, computation: Computation, config: Config) -> float:
    """Share of a kernel's tiles that hold rows if the routing is even; every expert's last tile is half full."""
    (tiles,), (rows, _) = (arrays(computation[x.operands[i]].result)[0][1] for i in (0, 2))
    sizes, model = config.mesh.sizes, config.model
    tokens = config.seq_len * config.global_batch // math.prod(size for axis, size in sizes.items() if axis != "tensor")
    own = model.num_experts // sizes["expert"]
    return min(1.0, (tokens * model.num_experts_per_tok * tiles / rows + own / 2) / tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/qwen3_5_35b_a3b.py")
    parser.add_argument("--topology", default="v5p:4x4x8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a device")
    parser.add_argument("--parts", type=int, default=12, help="lines of the source to name")
    options = parser.parse_args()
    topology = parse_topology(options.topology)
    for tokens in options.tokens:
        tree = load_file(options.config)
        tree.update(seq_len=tokens * topology.devices, global_batch=1)
        config = from_config_dict(tree)
        config = dataclasses.replace(config, mesh=resolve_mesh(config.mesh, topology.devices))
        found = {}
        for kind in ("dense", "moe"):
            compiled = compile_block(config, topology, kind)
            found[kind] = cost = cost_of(compiled.as_text() or "", config, topology)
            parts = ", ".join(f"{part} {cost.of(part) / 1e6:.3f}" for part in ("xla", "kernel", "waits"))
            print(
                f"{kind:6s} {tokens} tokens: {cost.total / 1e6:7.3f} Mcycles ({parts}), "
                f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.3f} GB temporaries"
            )
            for key, seconds in cost.network.most_common():
                mcycles = seconds * topology.generation.cycles_per_second / 1e6
                print(f"    network {mcycles:7.3f} Mcycles, {cost.bytes[key] / 1e6:8.1f} MB: {key}")
            for (part, line), spent in cost.cycles.most_common(options.parts):
                print(f"    {spent / 1e6:8.3f} {part:7s} {line}", flush=True)
        moe, dense = found["moe"], found["dense"].total
        print(
            f"ratio at {tokens} tokens: {moe.total / dense:.2f}; at most {moe.most / dense:.2f}; "
            f"gathers not counted {(moe.total - moe.of('waits')) / dense:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
