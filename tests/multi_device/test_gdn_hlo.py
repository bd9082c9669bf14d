"""What the compiled sharded gated delta rule sends, gathers and keeps: from CPU programs, nothing is run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops.affine_scan import SequenceAxis, exchange_rounds
from app.ops.gdn import gated_delta_rule
from tests.benchmark.hlo_cost import analyze

B, G, H, K, V = 2, 1, 2, 8, 4
FLAT = SequenceAxis(("c",))


@functools.cache
def compiled(P, tokens, documents=True, axis=FLAT, extras=False):
    """Forward and backward with `tokens` tokens a rank, bfloat16; extras: initial and final state."""
    mesh = Mesh(np.array(jax.devices()[:P]), ("c",))
    time = PS(None, "c")

    def both(ids, state, dout, *inputs):
        options = {"initial_state": state, "return_final_state": True} if extras else {}
        ids = ids if documents else None

        def rule(*inputs):
            return gated_delta_rule(*inputs, segment_ids=ids, axis_name=axis, chunk_size=16, **options)

        out, pull = jax.vjp(rule, *inputs)
        return out, pull((dout, state) if extras else dout)

    outs = ((time, PS()) if extras else time, (time,) * 5)
    specs = (time, PS(), *[time] * 6)
    call = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    T = tokens * P
    arrays = [jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)]
    arrays += [jax.ShapeDtypeStruct((B, T, *shape), jnp.bfloat16) for shape in ((H, V), (G, K), (G, K), (H, V))]
    arrays += [jax.ShapeDtypeStruct((B, T, H), jnp.float32)] * 2
    return jax.jit(call).lower(*arrays).compile()


def formula(P, documents=True):
    """Bytes a rank sends in a forward and a backward: app/ops/README.md."""
    states, transitions = exchange_rounds(P)
    return 2 * 4 * B * H * K * (states * V + transitions * K) + (4 * B if documents else 0)


@pytest.mark.parametrize("tokens", [512, 1024, 2048])
def test_what_is_sent_does_not_depend_on_the_sequence(tokens):
    cost = analyze(compiled(4, tokens).as_text())
    assert cost.sent == {"collective-permute": formula(4)}


@pytest.mark.parametrize("P", [2, 8])
def test_what_is_sent_grows_with_the_logarithm_of_the_ranks(P):
    cost = analyze(compiled(P, 512, documents=False).as_text())
    assert cost.sent == {"collective-permute": formula(P, documents=False)}
    assert [sum(exchange_rounds(P)) for P in (2, 4, 16, 64, 256)] == [1, 4, 8, 12, 16]


def test_initial_and_final_state_cost_only_the_broadcast_of_the_final_one():
    cost = analyze(compiled(4, 512, extras=True).as_text())
    assert cost.sent == {"collective-permute": formula(4), "all-reduce": 2 * 4 * B * H * K * V}


def test_a_hierarchical_scan_gathers_nothing_either():
    cost = analyze(compiled(8, 512, axis=SequenceAxis(("c",), slices=2)).as_text())
    assert set(cost.sent) == {"collective-permute"}


def test_memory_falls_with_the_number_of_ranks():
    """The same 4,096 tokens over 2 and over 8 ranks."""
    few, many = (compiled(P, 4096 // P, documents=False).memory_analysis().temp_size_in_bytes for P in (2, 8))
    assert many < 0.35 * few
