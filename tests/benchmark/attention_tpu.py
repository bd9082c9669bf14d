"""Estimated cost of ring attention compiled for TPU v5p, on a machine without a TPU: zigzag against contiguous.

    python -m tests.benchmark.attention_tpu [--topology v5p:8x8x4] [--tokens 4096 16384] [--modes forward both]

prints one line a program, for one rank: libtpu's estimated cycles of XLA's instructions and the bundles of the Pallas
kernels, both x trips; temporaries; bytes sent against the formula of app/ops/README_attention.md. The zigzag program
has no branch: every rank does all of it. Of the contiguous one the LAST rank is counted, which takes every product.
"""

import argparse
import functools
import itertools
import os
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from app.cluster.hardware import Topology, parse_topology
from app.ops.ring_attention import Layout, ring_attention
from app.planning import compiler
from app.planning.estimate import cycles_of_kernels, work
from app.planning.hlo import Module
from tests.benchmark.hlo_cost import analyze

HEADS = {"H": 24, "G": 4, "K": 256}  # Qwen3.5-27B


def compile_ring(layout: Layout, mode: str, topology: Topology, tokens: int) -> Any:
    """One sequence of `tokens` tokens a rank over all chips; mode "both": loss and gradients of q, k and v."""
    mesh = Mesh(np.array(compiler.devices(topology)), ("context",))
    attend = functools.partial(ring_attention, axis_name="context", layout=layout, kernel="pallas")

    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    sequence, (H, G, K) = PS(None, "context"), HEADS.values()
    q, k = (
        jax.ShapeDtypeStruct((1, tokens * mesh.size, heads, K), jnp.bfloat16, sharding=NamedSharding(mesh, sequence))
        for heads in (H, G)
    )
    body, arguments = (both, (q, k, k, q)) if mode == "both" else (attend, (q, k, k))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=sequence, out_specs=sequence, check_vma=False)
    return jax.jit(mapped).lower(*arguments).compile()


def formula_bytes(mode: str, ranks: int, tokens: int) -> int:
    """A rank sends (P-1) n bfloat16 forward; (P-1) n more and n home, and (P-1) n float32, backward."""
    n = tokens * HEADS["G"] * 2 * HEADS["K"]
    backward = (ranks - 1) * n * 2 + n * 2 + (ranks - 1) * n * 4
    return (ranks - 1) * n * 2 + (backward if mode == "both" else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=parse_topology, default="v5p:8x8x4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="tokens a rank")
    parser.add_argument("--modes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--layouts", nargs="+", default=get_args(Layout), choices=get_args(Layout))
    options = parser.parse_args()
    os.environ.update(compiler.environment())
    print("mode     layout      tokens  XLA Mcycles  kernel Mcycles  temp GB   sent MB  formula")
    for mode, tokens, layout in itertools.product(options.modes, options.tokens, options.layouts):
        compiled = compile_ring(layout, mode, options.topology, tokens)
        text, temporaries = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
        module = Module.parse(text)
        done = work(module, cycles_of_kernels(module, options.topology))
        sent = sum(analyze(text).sent.values())
        expected = formula_bytes(mode, options.topology.chips, tokens)
        print(
            f"{mode:8s} {layout:10s} {tokens:7d} {done['xla_cycles'] / 1e6:12.1f} {done['kernel_cycles'] / 1e6:15.1f}"
            f" {temporaries / 1e9:8.3f} {sent / 1e6:9.1f} {expected / 1e6:8.1f}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
