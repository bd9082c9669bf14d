"""Attention of one rank, XLA and Pallas (interpreted) kernels over the same cases, against whole score matrices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.ops import attention
from app.ops.attention import causal_attention
from app.ops.attention_xla import HIDDEN, Keys, Queries, XlaKernel, _Place
from app.ops.pallas import attention as pallas_attention
from tests.reference.attention_reference import attention_with_gradients, example, relative_error

# kernel -> (T, K, V, block_size): an odd length cut into unequal tiles; the TPU kernel takes multiples of 128.
SHAPES = {"xla": (67, 8, 24, 16), "interpret": (256, 128, 128, 512)}
KERNELS = pytest.mark.parametrize("kernel", SHAPES)


@pytest.fixture(autouse=True)
def small_pallas_blocks(monkeypatch):
    """Several blocks in each direction, and backward calls that hold a part of the keys."""
    for name, value in {"QUERY_BLOCK": 128, "KEY_BLOCK": 128, "KEY_PIECE": 128, "KEY_GRADIENT_BYTES": 1}.items():
        monkeypatch.setattr(pallas_attention, name, value)


def documents(rng, B, T):
    """Sorted ids 1..4 with padding left, right and between."""
    ids = np.sort(rng.integers(1, 5, (B, T)), axis=1).astype(np.int32)
    ids[0, -9:] = ids[-1, :5] = ids[0, T // 3 : T // 3 + 6] = 0
    return ids


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def out_and_gradients(kernel, block_size, scale, q, k, v, d_out, ids):
    def function(q, k, v):
        return causal_attention(q, k, v, segment_ids=ids, block_size=block_size, kernel=kernel, scale=scale)

    out, vjp = jax.vjp(function, q, k, v)
    return out, *vjp(d_out)


def run(kernel, q, k, v, d_out, ids=None, block_size=16, scale=None):
    """numpy (out, dq, dk, dv)"""
    return [np.asarray(x) for x in out_and_gradients(kernel, block_size, scale, q, k, v, d_out, ids)]


@pytest.mark.parametrize(
    ("kernel", "H", "G", "packed"),
    [
        ("xla", 4, 4, False),
        ("xla", 4, 1, True),
        ("xla", 6, 1, False),
        ("xla", 8, 1, True),
        ("interpret", 4, 2, False),
        ("interpret", 6, 1, True),
    ],
)
def test_equals_whole_score_matrices(kernel, H, G, packed):
    rng = np.random.default_rng(H)
    T, K, V, block = SHAPES[kernel]
    operands = example(rng, 2 if packed else 1, T, H, G, K, V)
    ids = documents(rng, 2, T) if packed else None
    wanted = attention_with_gradients(*operands, ids)
    got = run(kernel, *operands, ids, block)
    assert [x.dtype for x in got] == [np.float32] * 4
    for x, want in zip(got, wanted, strict=True):
        assert np.isfinite(x).all()
        assert relative_error(x, want) <= 5e-6


@KERNELS
def test_documents_and_padding_are_isolated_bit_for_bit(kernel):
    rng = np.random.default_rng(1)
    T, K, V, block = SHAPES[kernel]
    operands = example(rng, 1, T, 2, 1, K, V)
    ids = np.repeat([1, 2, 0], [T // 2 - 3, T // 3, T - T // 2 + 3 - T // 3])[None].astype(np.int32)
    before = run(kernel, *operands, ids, block)
    border = T // 2 - 4  # the last token of document 1
    other = [x.copy() for x in operands]
    for x in other:
        x[:, border] += 3.0
        x[ids == 0] *= -7.0
    after = run(kernel, *other, ids, block)
    renumbered = run(kernel, *operands, np.where(ids > 0, ids * 7 + 2, 0).astype(np.int32), block)
    for old, new, same in zip(before, after, renumbered, strict=True):
        np.testing.assert_array_equal(old[ids == 2], new[ids == 2])
        np.testing.assert_array_equal(old, same)
        assert not old[ids == 0].any() and not new[ids == 0].any()  # output and gradients of padding
    assert (before[0][0, border] != after[0][0, border]).any()


@KERNELS
def test_a_row_of_padding_contributes_exactly_zero(kernel):
    T, K, V, block = SHAPES[kernel]
    operands = example(np.random.default_rng(2), 1, T, 2, 1, K, V)
    for x in run(kernel, *operands, np.zeros((1, T), np.int32), block):
        assert not x.any()


@KERNELS
def test_large_scores_and_bfloat16(kernel):
    rng = np.random.default_rng(3)
    T, K, V, block = SHAPES[kernel]
    operands = example(rng, 1, T, 2, 1, K, V)
    operands[0][:] *= 1e4
    for x in run(kernel, *operands, np.ones((1, T), np.int32), block):
        assert np.isfinite(x).all()
    operands[0][:] /= 1e4
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in operands]
    wanted = attention_with_gradients(*(np.asarray(x.astype(jnp.float32)) for x in narrow))
    for x, want in zip(run(kernel, *narrow, None, block), wanted, strict=True):
        assert x.dtype == jnp.bfloat16
        # bf16 keeps 2^-9 = 2e-3; p and d_scores are rounded too
        assert relative_error(x.astype(np.float32), want) <= 8e-3


def test_only_the_lower_triangle_is_computed_and_no_whole_matrix_exists():
    T, block = 1024, 64
    q, k, v, d_out = (jnp.asarray(x) for x in example(np.random.default_rng(4), 1, T, 2, 1, 8, 8))

    def both(q, k, v, d_out):
        out, vjp = jax.vjp(lambda *x: causal_attention(*x, block_size=block), q, k, v)
        return out, vjp(d_out)

    blocks = T // block
    lengths = [int(x) for x in re.findall(r"length=(\d+)", str(jax.make_jaxpr(both)(q, k, v, d_out)))]
    assert lengths == [blocks * (blocks + 1) // 2] * 2
    text = jax.jit(both).lower(q, k, v, d_out).compile().as_text()
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"[a-z]\d+\[([\d,]+)\]", text)]
    assert max(sizes) < T * T


@pytest.mark.parametrize("start", [1_048_576 - 16, 2**24 + 1, 2**30])
def test_the_causal_predicate_is_exact_far_out(start):
    """int32 indices: bfloat16 would merge 4,096 of them at a million, float32 two at 2^24."""
    kernel = XlaKernel(16, 1, 1, 1.0, 16)
    ones = jnp.ones((1, 1, 1, 16, 8))
    place = _Place(jnp.int32(0), jnp.int32(0), jnp.int32(start))
    keys = Keys(jnp.ones((1, 1, 1, 16, 16)), None)
    scores = kernel._scores(Queries(ones, None), keys, place, place, "diagonal")[0, 0]
    np.testing.assert_array_equal(np.asarray(scores) > HIDDEN, np.triu(np.ones((16, 16), bool)))

    shape = pallas_attention._Shape(1, 1, 2**31 - 128, 128, 128, 128, 128, 1.0, "diagonal", False, False, True)
    block = start // 128
    scores = shape.hide(jnp.zeros((128, 128)), None, None, jnp.int32(block), jnp.int32(block * 128), keys_dim=1)
    np.testing.assert_array_equal(np.asarray(scores) > HIDDEN, np.tril(np.ones((128, 128), bool)))


def test_kept_residuals_replace_the_forward_pass():
    q, k, v, _ = (jnp.asarray(x) for x in example(np.random.default_rng(5), 1, 32, 2, 1, 8, 8))

    def forward_passes(policy):
        function = jax.checkpoint(lambda *x: jnp.sin(causal_attention(*x, block_size=16)), policy=policy)
        gradient = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1, 2)))(q, k, v)
        return len(re.findall(r"= scan\[", str(gradient)))

    keep = jax.checkpoint_policies.save_only_these_names(attention.OUT_NAME, attention.LSE_NAME)
    assert forward_passes(keep) == 2  # one forward and one backward
    assert forward_passes(None) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (1, 8, 3, 8)}, "divide query heads"),
        ({"k": (1, 7, 2, 8)}, "differ in batch, tokens"),
        ({"v": (1, 8, 8)}, r"\[B,T,G,V\]"),
        ({"segment_ids": jnp.ones((1, 9), jnp.int32)}, r"must be \[B,T\] = \(1, 8\)"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"scale": -1.0}, "scale=-1.0 must be positive"),
        ({"kernel": "flash"}, "kernel='flash' must be"),
        ({"kernel": "pallas"}, "8 tokens in 1 part"),
        ({"q": (1, 128, 4, 8), "k": (1, 128, 2, 8), "v": (1, 128, 2, 8), "kernel": "pallas"}, "multiples of 128; q"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    shapes = {"q": (1, 8, 4, 8), "k": (1, 8, 2, 8), "v": (1, 8, 2, 8)}
    arrays = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    options = {name: value for name, value in change.items() if name not in shapes}
    with pytest.raises(ValueError, match=message):
        causal_attention(*arrays.values(), **options)
    with pytest.raises(ValueError, match="one dtype"):
        causal_attention(jnp.zeros(shapes["q"], jnp.bfloat16), jnp.zeros(shapes["k"]), jnp.zeros(shapes["v"]))
