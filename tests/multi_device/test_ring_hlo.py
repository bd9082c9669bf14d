"""What the ring's program does, counted from the program: block products per rank, messages, collectives, memory.

Tracing and compiling for a TPU topology need no such devices. Not covered: speed on hardware.
"""

import json
import math
import os
import subprocess
import sys
import textwrap
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as PS

from app.ops import attention
from app.ops.ring_attention import _ring_products, ring_attention

T, H, G, K, V = 8, 4, 2, 8, 8  # of a rank; half-blocks of one tile


def sharded(mesh, layout="zigzag", gradient=False, kind="ring", tokens=T, policy=None, dtype=jnp.float32):
    """(function, its operands' shapes)"""
    P, sequence = mesh.size, PS(None, "context")

    def body(q, k, v, d_out):
        def function(q, k, v):
            return ring_attention(q, k, v, axis_name="context", layout=layout, kind=kind)

        if not gradient:
            return function(q, k, v)
        if policy is not None:
            function = jax.checkpoint(function, policy=policy)
        return jax.vjp(function, q, k, v)[1](d_out)

    shapes = [(1, tokens * P, heads, dim) for heads, dim in ((H, K), (G, K), (G, V), (H, V))]
    function = jax.shard_map(body, mesh=mesh, in_specs=(sequence,) * 4, out_specs=sequence, check_vma=False)
    return function, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def counted(jaxpr, times=1) -> Counter:
    """Primitives of a jaxpr, scans by their length; a branch counts as its dearest side; messages by dtype in bytes."""
    counts = Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += times
        if eqn.primitive.name == "ppermute":
            for var in eqn.outvars:
                counts[f"{var.aval.dtype} sent"] += times * var.aval.size * var.aval.dtype.itemsize
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        if eqn.primitive.name == "cond":
            counts += max((counted(b.jaxpr, inner) for b in eqn.params["branches"]), key=lambda c: c["dot_general"])
            continue
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    counts += counted(part, inner)
    return counts


def traced(P, **options) -> Counter:
    function, shapes = sharded(AbstractMesh((P,), ("context",), axis_types=(AxisType.Auto,)), **options)
    return counted(jax.make_jaxpr(function)(*shapes).jaxpr)


@pytest.mark.parametrize("P", [8, 64, 256])
def test_work_is_equal_on_every_rank_in_zigzag_order_and_twice_the_mean_on_the_last_in_contiguous_order(P):
    zigzag = traced(P)
    assert zigzag["cond"] == 0  # one program without branches: max / mean = 1 over the ranks
    assert zigzag["dot_general"] == 2 * (2 * P + 1)  # two a product: 2 diagonal ones, 1 inside, 2 (P-1) in the ring

    products = jax.vmap(lambda rank: jax.vmap(lambda s: _ring_products(False, rank, (rank - s) % P))(jnp.arange(1, P)))
    executed = 1 + np.sum(np.asarray(products(jnp.arange(P)))[:, :, 0, 1] >= 0, axis=1)
    assert executed.max() / executed.mean() == pytest.approx(2 * P / (P + 1))


@pytest.mark.parametrize("P", [2, 8])
def test_messages_are_the_formula_and_gradients_travel_in_float32(P):
    element = T * G * (K + V)
    forward, backward = traced(P, dtype=jnp.bfloat16), traced(P, dtype=jnp.bfloat16, gradient=True)
    assert forward["bfloat16 sent"] == 2 * (P - 1) * element and forward["float32 sent"] == 0
    assert backward["bfloat16 sent"] == 2 * ((P - 1) + P) * element
    assert backward["float32 sent"] == 4 * (P - 1) * element


def test_kept_output_and_logsumexp_save_the_second_ring():
    keep = jax.checkpoint_policies.save_only_these_names(attention.OUT_NAME, attention.LSE_NAME)
    plain = traced(8, gradient=True)
    assert traced(8, gradient=True, policy=keep)["ppermute"] == plain["ppermute"]
    assert traced(8, gradient=True, policy=jax.checkpoint_policies.nothing_saveable)["ppermute"] > plain["ppermute"]


def test_compiled_for_cpu_nothing_is_gathered_and_memory_does_not_grow_with_the_ranks():
    temporaries = []
    for P in (4, 8):
        function, shapes = sharded(Mesh(np.array(jax.devices()[:P]), ("context",)), gradient=True, tokens=64)
        compiled = jax.jit(function).lower(*shapes).compile()
        text = compiled.as_text()
        assert "collective-permute" in text and "all-gather" not in text and "all-reduce" not in text
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] <= 1.05 * temporaries[0]


TPU_PROGRAM = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as PS
    from app.ops.ring_attention import ring_attention

    P, tokens = int(sys.argv[1]), int(sys.argv[2])
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:8x8x4").devices
    mesh, sequence = Mesh(np.array(devices[:P]), ("context",)), PS(None, "context")

    def body(q, k, v, d_out):
        out, vjp = jax.vjp(lambda *x: ring_attention(*x, axis_name="context", kernel="pallas"), q, k, v)
        return out, *vjp(d_out)

    function = jax.shard_map(body, mesh=mesh, in_specs=(sequence,) * 4, out_specs=sequence, check_vma=False)
    q, k = (
        jax.ShapeDtypeStruct((1, tokens * P, heads, 256), jnp.bfloat16, sharding=NamedSharding(mesh, sequence))
        for heads in (24, 4)
    )
    compiled = jax.jit(function).lower(q, k, k, q).compile()
    text = compiled.as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute-start")
    print(json.dumps({
        "temporaries": compiled.memory_analysis().temp_size_in_bytes, **{kind: text.count(kind + "(") for kind in kinds}
    }))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="libtpu compiles for TPU topologies on Linux only")
def test_compiled_for_v5p_nothing_is_gathered_and_memory_is_flat():
    """27B's softmax layer (24 query, 4 key/value heads of 256), 4,096 tokens a rank: 16 ranks and 256."""
    pytest.importorskip("libtpu")
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    temporaries = []
    for P in (16, 256):
        command = [sys.executable, "-c", textwrap.dedent(TPU_PROGRAM), str(P), "4096"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=600)
        figures = json.loads(result.stdout.splitlines()[-1])
        temporaries.append(figures.pop("temporaries"))
        assert figures.pop("collective-permute-start") > 0
        assert not any(figures.values()), figures
    assert temporaries[1] <= 1.02 * temporaries[0]
    assert temporaries[1] < 2 * math.prod((4096, 24, 256)) * 4 * 4  # eight float32 copies of the rank's q
