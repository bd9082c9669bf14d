"""Attention over a sharded sequence against whole score matrices, on fake CPU devices.

The TPU kernel runs here interpreted, with small blocks; that the compiled program overlaps and moves what it should is
in test_ring_hlo.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops.pallas import attention as pallas_attention
from app.ops.ring_attention import ring_attention
from app.ops.zigzag import from_zigzag, to_zigzag
from tests.reference.attention_reference import attention_with_gradients, example, relative_error


@pytest.fixture(autouse=True)
def small_pallas_blocks(monkeypatch):
    for name in ("QUERY_BLOCK", "KEY_BLOCK", "KEY_PIECE"):
        monkeypatch.setattr(pallas_attention, name, 128)


def attend(q, k, v, ids, axis_name, layout, **options):
    """Contiguous order in and out, whatever the attention's own order."""
    if layout == "contiguous":
        return ring_attention(q, k, v, segment_ids=ids, axis_name=axis_name, layout=layout, **options)
    there = functools.partial(to_zigzag, axis_name=axis_name)
    ids = None if ids is None else there(ids)
    out = ring_attention(there(q), there(k), there(v), segment_ids=ids, axis_name=axis_name, **options)
    return from_zigzag(out, axis_name)


def run(P, axes, operands, ids, layout, gradient="inside", **options):
    """numpy (out, dq, dk, dv) of the whole sequence"""
    mesh = Mesh(np.array(jax.devices()[:P]).reshape((P,) if len(axes) == 1 else (P // 2, 2)), axes)
    sequence = PS(None, axes)
    name = axes if len(axes) > 1 else axes[0]

    def sharded(function, count):
        specs = (sequence,) * count + (None if ids is None else sequence,)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=sequence, check_vma=False)

    def forward(q, k, v, ids):
        return attend(q, k, v, ids, name, layout, **options)

    def out_and_gradients(function):
        def both(q, k, v, d_out, ids):
            out, vjp = jax.vjp(lambda *x: function(*x, ids), q, k, v)
            return out, *vjp(d_out)

        return both

    whole = sharded(out_and_gradients(forward), 4) if gradient == "inside" else out_and_gradients(sharded(forward, 3))
    return [np.asarray(x) for x in jax.jit(whole)(*operands, ids)]


def check(P, got, wanted, bound=5e-6):
    """Per rank and per tensor."""
    for x, want in zip(got, wanted, strict=True):
        assert np.isfinite(x).all()
        for rank, (part, of) in enumerate(zip(np.split(x, P, 1), np.split(want, P, 1), strict=True)):
            assert relative_error(part, of) <= bound, f"rank {rank}"


def documents(rng, B, T):
    """Documents of uneven lengths that cross rank borders; padding left, right and between."""
    ids = np.sort(rng.integers(1, 5, (B, T)), axis=1).astype(np.int32)
    ids[0, -T // 8 :] = ids[-1, :5] = ids[0, T // 4 : T // 4 + 4] = 0
    return ids


ONE, PAIR = ("context",), ("context", "expert")
# P, axes, layout, kind, H, G, packed, gradient
CASES = [
    (1, ONE, "zigzag", "ring", 4, 1, True, "inside"),
    (2, ONE, "zigzag", "ring", 4, 4, True, "outside"),
    (3, ONE, "zigzag", "ring", 6, 1, False, "inside"),
    (4, PAIR, "zigzag", "ring", 8, 1, True, "inside"),
    (8, ONE, "zigzag", "ring", 4, 2, False, "outside"),
    (8, PAIR, "zigzag", "ring", 6, 1, True, "inside"),
    (2, ONE, "contiguous", "ring", 4, 1, False, "inside"),
    (8, PAIR, "contiguous", "ring", 8, 1, True, "inside"),
    (3, ONE, "zigzag", "all_gather", 4, 4, True, "outside"),
    (4, ONE, "contiguous", "all_gather", 8, 1, True, "inside"),
]


@pytest.mark.parametrize(("P", "axes", "layout", "kind", "H", "G", "packed", "gradient"), CASES)
def test_equals_whole_score_matrices(P, axes, layout, kind, H, G, packed, gradient):
    rng = np.random.default_rng(P)
    T = 2 * P * 6  # half-blocks of 6 tokens in tiles of 3
    operands = example(rng, 2, T, H, G, 8, 12)
    ids = documents(rng, 2, T) if packed else None
    wanted = attention_with_gradients(*operands, ids)
    check(P, run(P, axes, operands, ids, layout, gradient, kind=kind, block_size=4), wanted)


def test_the_tpu_kernel_does_the_same():
    rng = np.random.default_rng(0)
    P, T = 2, 512
    operands = example(rng, 1, T, 4, 2, 128, 128)
    ids = documents(rng, 1, T)
    wanted = attention_with_gradients(*operands, ids)
    check(P, run(P, ONE, operands, ids, "zigzag", kernel="interpret"), wanted)


def test_documents_are_isolated_over_ranks_bit_for_bit():
    rng = np.random.default_rng(0)
    P, T = 4, 48
    operands = example(rng, 1, T, 2, 1, 8, 8)
    ids = np.repeat([1, 2, 3], [17, 20, 11])[None].astype(np.int32)
    before = run(P, ONE, operands, ids, "zigzag", block_size=4)
    for x in operands:
        x[:, 16] += 5.0  # the last token of document 1
    after = run(P, ONE, operands, ids, "zigzag", block_size=4)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[ids > 1], new[ids > 1])
        assert (old[0, 16] != new[0, 16]).any()


def test_what_does_not_fit_is_refused():
    operands = [jnp.zeros((1, 12, 2, 8), jnp.float32)] * 4
    with pytest.raises(ValueError, match="layout='striped' must be"):
        ring_attention(*operands[:3], axis_name="context", layout="striped")
    with pytest.raises(ValueError, match="kind='ulysses' must be"):
        ring_attention(*operands[:3], axis_name="context", kind="ulysses")
    with pytest.raises(ValueError, match="halves each rank's tokens: 3 of them"):
        ring_attention(*(x[:, :3] for x in operands[:3]), axis_name="context")
    with pytest.raises(ValueError, match="a rank has 12 tokens in 2 part"):
        run(1, ONE, operands, None, "zigzag", kernel="pallas")
