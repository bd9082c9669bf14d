"""Estimated cost of the gated delta rule compiled for TPU v5p, on a machine without a TPU.

    python -m tests.benchmark.gdn_tpu [--ranks 1 16 64 256] [--tokens 4096] [--chunk 64] [--modes forward both]

prints one line a program: libtpu's estimated cycles times loop trips, temporaries, collectives. The cycles say what the
compiler expects of one core: no waiting for collectives, no contention. Compare them with each other, not with a clock.
A published implementation (MaxText 0.2.5) compiled the same way: forward 10.0 / 14.6, both 34.3 / 50.4 million cycles
at 1 / 16 ranks, plus 7.5 for each triangular inverse, a custom call without cycles.
"""

import argparse
import functools
import itertools
import os
from collections.abc import Callable

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from app.ops.gdn import KernelName, gated_delta_rule
from tests.benchmark.hlo_cost import analyze

TOPOLOGIES = {1: "v5p:2x2x1", 4: "v5p:2x2x1", 16: "v5p:4x2x2", 64: "v5p:4x4x4", 256: "v5p:8x8x4"}
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


def compile_for_v5p(mode: str, ranks: int, tokens: int, chunk: int = 64, kernel: KernelName = "xla"):
    """The compiled program of one sequence with `tokens` tokens a rank, q, k, v and dout bfloat16."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[ranks])
    mesh = Mesh(np.array(topology.devices[:ranks]), ("context",))
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
    parser.add_argument("--kernel", default="xla", choices=["xla", "pallas"], help="pallas: cycles of XLA's part only")
    options = parser.parse_args()
    print("mode     ranks  tokens chunk   Mcycles  temp GB  sent MB  custom calls")
    cases = itertools.product(options.modes, options.tokens, options.chunk, options.ranks)
    for mode, tokens, chunk, ranks in cases:
        compiled = compile_for_v5p(mode, ranks, tokens, chunk, options.kernel)
        cost, temporaries = analyze(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes / 1e9
        figures = f"{cost.cycles / 1e6:9.2f} {temporaries:8.3f} {sum(cost.sent.values()) / 1e6:8.1f}"
        print(f"{mode:8s} {ranks:5d} {tokens:7d} {chunk:5d} {figures}  {dict(cost.custom_calls)}", flush=True)


if __name__ == "__main__":
    main()
