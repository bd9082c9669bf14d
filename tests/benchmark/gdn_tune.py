"""Chooses the block sizes of the recurrence's kernels for each TPU generation, by bundle counts of the real compiler.

    python -m tests.benchmark.gdn_tune [--generations v5p] [--chunks 128] [--heads 3 6 12 24] [--kernels forward]

prints, for one row of 4,096 tokens and Qwen3.5-27B's heads, the kernel's million bundles on one core for every size of
chunk and number of value heads in flight, "-" where the vector memory does not hold it, and the best as an entry of
app.ops.pallas.gdn.TUNINGS. No TPU is needed; counts are kept on disk (app.planning.kernels).
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from app.ops.pallas import gdn
from tests.benchmark.gdn_tpu import HEADS
from tests.benchmark.hlo_cost import cost_of

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
KERNELS = ("forward", "mapped", "backward")
TOKENS = 4096


def bundles(generation: str, kernel: str, chunk: int, heads: int) -> int | None:
    """Of one kernel on one core; None where it needs more vector memory than the generation's tuning allows."""
    G, H, K, V = HEADS.values()
    array = jax.ShapeDtypeStruct
    q, v = (array((1, TOKENS, *x), jnp.bfloat16) for x in ((G, K), (H, V)))
    mapped = kernel == "mapped"
    tuning = dataclasses.replace(gdn.TUNINGS[generation], chunk=chunk)
    shape = gdn.Shape.of(q, v, tuning, heads=heads, mapped=mapped, scale=K**-0.5, documents=True, interpret=False)
    gates = array((1, shape.groups, shape.chunks, shape.rows, chunk), jnp.float32)
    state = array((1, H, K, shape.width), jnp.float32)
    per_chunk = [array((1, shape.chunks, H, *x), jnp.bfloat16) for x in ((K, V), (chunk, chunk))]
    try:
        if kernel == "backward":
            arguments = (q, q, v, gates, *per_chunk, v, state)
            cost = cost_of(TOPOLOGIES[generation], lambda *x: gdn.backward(shape, *x), *arguments)
        else:
            cost = cost_of(TOPOLOGIES[generation], lambda *x: gdn.forward(shape, *x), q, q, v, gates, state)
    except jax.errors.JaxRuntimeError as error:
        if "vmem" not in str(error).lower():
            raise
        return None
    return cost.kernels.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", nargs="+", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--chunks", nargs="+", type=int, default=[128])
    parser.add_argument("--heads", nargs="+", type=int, default=[3, 6, 12, 24], help="value heads of a grid step")
    options = parser.parse_args()
    for generation in options.generations:
        best: dict[str, tuple[int, int, int]] = {}
        for kernel in options.kernels:
            for chunk in options.chunks:
                found = {heads: bundles(generation, kernel, chunk, heads) for heads in options.heads}
                row = "".join(f"{'-' if n is None else f'{n / 1e6:.3f}':>9s}" for n in found.values())
                print(f"{generation:6s} {kernel:9s} chunk {chunk:4d}{row}", flush=True)
                fitting = [(n, chunk, heads) for heads, n in found.items() if n is not None]
                best[kernel] = min([*fitting, *([best[kernel]] if kernel in best else [])])
        print(f"{generation:6s} best:", {kernel: x[1:] for kernel, x in best.items()}, flush=True)


if __name__ == "__main__":
    main()
