"""Estimated cost of the loss compiled for TPU v5p, beside tokamax's kernel for the same, on a machine without a TPU.

    python -m tests.benchmark.loss_tpu

One chip, 4,096 tokens, width 5,120, vocabulary 248,320 (Qwen3.5-27B), bfloat16 operands: loss and gradients of hidden
states and head. Prints libtpu's estimated cycles and the bundles of the kernels (one core's: hlo_cost), temporaries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tokamax
from jax.sharding import Mesh, use_abstract_mesh

from app.cluster.hardware import parse_topology
from app.planning import compiler
from app.training.loss import chunked_cross_entropy
from tests.benchmark.hlo_cost import analyze, compile_for

TOPOLOGY, TOKENS, WIDTH, VOCABULARY = "v5p:2x2x1", 4096, 5120, 248_320


def ours(hidden, head, targets):
    mask = jnp.ones((1, TOKENS), bool)
    return chunked_cross_entropy(hidden[None], head, targets[None], mask, chunk=2048)[0]


def theirs(hidden, head, targets):
    return tokamax.linear_softmax_cross_entropy_loss(hidden, targets, head, implementation="mosaic_tpu")


def main() -> None:
    arguments = (
        jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.bfloat16),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
    )
    mesh = Mesh(np.array(compiler.devices(parse_topology(TOPOLOGY))[:1]), ("one",))
    for name, loss in {"chunked": ours, "tokamax": theirs}.items():
        with tokamax.config.cross_compile(True), use_abstract_mesh(mesh.abstract_mesh):  # it looks for a TPU otherwise
            compiled = compile_for(TOPOLOGY, jax.value_and_grad(loss, argnums=(0, 1)), *arguments)
        cost = analyze(compiled.as_text() or "", TOPOLOGY)
        print(
            f"{name}: {cost.cycles / 1e6:.1f} Mcycles XLA + {cost.kernels.total() / 1e6:.1f} kernels, "
            f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB temporaries", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
