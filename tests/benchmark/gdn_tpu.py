"""Estimated cost of the gated delta rule compiled for TPUs, on a machine without one.

    python -m tests.benchmark.gdn_tpu [--kernel pallas] [--ranks 1 16 64 256] [--tokens 4096] [--modes forward both]
        [--generation v5p]

prints one line a program: libtpu's estimated cycles and the bundles of Pallas kernels, both times loop trips
(hlo_cost.py says of which cores), temporaries, collectives. They say what the compiler expects: no waiting for
collectives, no contention. Compare them with each other, not with a clock.
A published implementation (MaxText 0.2.5) compiled the same way: forward 10.0 / 14.6, both 34.3 / 50.4 million cycles
at 1 / 16 ranks, plus 7.5 for each triangular inverse, a custom call without cycles.
"""

import argparse
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from app.cluster.hardware import parse_topology
from app.ops.gdn import gated_delta_rule
from app.ops.kernels import KernelName
from app.planning import compiler
from tests.benchmark.hlo_cost import analyze, cores

TOPOLOGIES = {1: "v5p:2x2x1", 4: "v5p:2x2x1", 16: "v5p:4x2x2", 64: "v5p:4x4x4", 256: "v5p:8x8x4"}
SMALL = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
HEADS = {"G": 16, "H": 48, "K": 128, "V": 128}  # Qwen3.5-27B


def forward(ranks: int, chunk: int, kernel: KernelName) -> Callable:
    axis_name = "context" if ranks > 1 else None
    return functools.partial(gated_delta_rule, axis_name=axis_name, chunk_size=chunk, kernel=kernel)


def both(ranks: int, chunk: int, kernel: KernelName) -> Callable:
    """Outputs and all five gradients."""

    def call(dout, *inputs):
        out, pull = jax.vjp(forward(ranks, chunk, kernel), *inputs)
        return out, *pull(dout)

    return call


def compile_rule(
    mode: str, ranks: int, tokens: int, chunk: int = 64, kernel: KernelName = "xla", topology: str | None = None
):
    """The compiled program of one sequence with `tokens` tokens a rank, q, k, v and dout bfloat16; v5p by default."""
    devices = compiler.devices(parse_topology(topology or TOPOLOGIES[ranks]))
    mesh = Mesh(np.array(devices[:ranks]), ("context",))
    time = PS(None, "context")

    def argument(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, tokens * ranks, *shape), dtype, sharding=NamedSharding(mesh, time))

    G, H, K, V = HEADS.values()
    gate = argument(H, dtype=jnp.float32)
    arguments = [argument(G, K), argument(G, K), argument(H, V), gate, gate]
    body = forward(ranks, chunk, kernel)
    if mode == "both":
        arguments.insert(0, argument(H, V))
        body = both(ranks, chunk, kernel)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=time, out_specs=time, check_vma=False)
    return jax.jit(mapped).lower(*arguments).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="tokens a rank")
    parser.add_argument("--chunk", type=int, nargs="+", default=[64])
    parser.add_argument("--modes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--kernel", default="xla", choices=["xla", "pallas"])
    parser.add_argument("--generation", default="v5p", choices=list(SMALL), help="others than v5p: one rank")
    options = parser.parse_args()
    if options.generation != "v5p" and options.ranks != [1]:
        parser.error("--generation other than v5p needs --ranks 1")
    small = SMALL[options.generation]
    print("mode     ranks  tokens chunk   Mcycles    XLA  kernels  kernels of all cores  temp GB  sent MB")
    cases = itertools.product(options.modes, options.tokens, options.chunk, options.ranks)
    for mode, tokens, chunk, ranks in cases:
        topology = small if ranks == 1 else TOPOLOGIES[ranks]
        compiled = compile_rule(mode, ranks, tokens, chunk, options.kernel, topology)
        memory = compiled.memory_analysis()
        assert memory is not None
        cost, temporaries = analyze(compiled.as_text() or "", small), memory.temp_size_in_bytes / 1e9
        one = cost.kernels.total() / 1e6
        figures = f"{cost.total / 1e6:9.3f} {cost.cycles / 1e6:6.3f} {one:8.3f} {cores(small) * one:21.3f}"
        figures += f" {temporaries:8.3f} {sum(cost.sent.values()) / 1e6:8.1f}"
        parts = {name: round(n / 1e6, 3) for name, n in cost.kernels.items()}
        print(f"{mode:8s} {ranks:5d} {tokens:7d} {chunk:5d} {figures}  {parts or dict(cost.custom_calls)}", flush=True)


if __name__ == "__main__":
    main()
