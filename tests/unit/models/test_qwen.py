"""The whole model on one device: documents and padding cannot reach each other, remat policies agree, dtypes hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.config_check import CHOICES
from app.models import params as model_params
from app.models import qwen
from app.models.layers import Precision, Runtime
from tests.tiny import tiny_config

CONFIG = tiny_config().model
B, T = 2, 48
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [13, 11, 20, 4], axis=1).astype(np.int32)


@functools.cache
def fresh_params():
    """Random parameters away from their first values, so that every gate and norm takes part."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=spec.shape) * 0.3, spec.dtype)
        for name, spec in model_params.describe(CONFIG).items()
    }


@functools.cache
def tokens():
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)


def positions(segments):
    index = np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape)
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


@functools.cache
def compiled():
    runtime = Runtime(gdn_chunk=16, attention_block=16)
    return jax.jit(lambda params, *batch: model_params.build(CONFIG, runtime, params)(*batch))


def logits(tokens, segments=SEGMENTS):
    return np.asarray(compiled()(fresh_params(), tokens, positions(segments), segments))


def changed(where, value=7):
    other = tokens().copy()
    other[where] = (other[where] + value) % CONFIG.vocab_size
    return other


@pytest.mark.parametrize("row, last", [(0, 12), (0, 23), (1, 23)])
def test_documents_are_isolated_to_the_bit(row, last):
    """The last token of a document is what the convolution, the state and attention would leak."""
    before, after = logits(tokens()), logits(changed((row, last)))
    assert (before[row, last] != after[row, last]).any()
    np.testing.assert_array_equal(before[row, last + 1 :], after[row, last + 1 :])
    np.testing.assert_array_equal(before[1 - row], after[1 - row])


def test_a_document_in_a_row_equals_the_document_alone():
    alone = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    alone[0][0, :20], alone[1][0, :20] = tokens()[0, 24:44], 1
    np.testing.assert_allclose(logits(tokens())[0, 24:44], logits(*alone)[0, :20], rtol=2e-4, atol=2e-5)


def test_padding_reaches_nothing():
    """Any token in a padded place, left, between or right, changes no real token by one bit."""
    segments = np.array([[0] * 9 + [1] * 14 + [0] * 6 + [2] * 19, [1] * 40 + [0] * 8], np.int32)
    before, after = logits(tokens(), segments), logits(changed(segments == 0), segments)
    np.testing.assert_array_equal(before[segments != 0], after[segments != 0])
    assert np.isfinite(before).all()


def test_segment_numbers_do_not_matter():
    np.testing.assert_array_equal(logits(tokens()), logits(tokens(), np.where(SEGMENTS, SEGMENTS * 5 + 2, 0)))


def test_causal():
    before, after = logits(tokens(), np.ones((B, T), np.int32)), logits(changed((0, 30)), np.ones((B, T), np.int32))
    np.testing.assert_array_equal(before[0, :30], after[0, :30])
    assert (before[0, 30:] != after[0, 30:]).any(axis=-1).all()  # and everything after it hears of it


def loss(params, remat):
    runtime = Runtime(remat=remat, gdn_chunk=16, attention_block=16)
    hidden = model_params.build(CONFIG, runtime, params).hidden(tokens(), positions(SEGMENTS), SEGMENTS)
    return jnp.sum(jnp.square(hidden))


def test_remat_policies_agree_and_save_memory():
    names = CHOICES["remat"]
    assert set(qwen.REMAT_POLICIES) | {"none"} == set(names)
    kept, wanted = {}, None
    for remat in ("none", "exchanges", "full"):
        value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, remat=remat)))(fresh_params())
        wanted = wanted or (value, gradient)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        for name, want in wanted[1].items():
            error = np.linalg.norm(gradient[name] - want)
            assert error <= 1e-4 * np.linalg.norm(want), (remat, name, error)
        pullback = jax.eval_shape(
            lambda params, remat=remat: jax.vjp(lambda p: loss(p, remat), params)[1], fresh_params()
        )
        kept[remat] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    assert kept["full"] < kept["exchanges"] < 0.5 * kept["none"], kept


def embedded(params):
    rows = model_params.build(CONFIG, Runtime(), params)._embedded(tokens())
    return jnp.sum(rows * jnp.arange(rows.size, dtype=rows.dtype).reshape(rows.shape)), rows


def test_an_embedding_in_pieces_is_the_same(monkeypatch):
    """Rows and gradient, to the bit: every token's row comes from one piece, and the others add 0."""
    V, D = CONFIG.vocab_size, CONFIG.hidden_size
    assert qwen._pieces(V, D) == 1 and qwen._pieces(248_320, 5_120) == 5
    (_, whole), whole_gradient = jax.value_and_grad(embedded, has_aux=True)(fresh_params())
    monkeypatch.setattr(qwen, "EMBEDDING_PIECE", V * D // 4)
    assert qwen._pieces(V, D) == 4
    (_, rows), gradient = jax.value_and_grad(embedded, has_aux=True)(fresh_params())
    np.testing.assert_array_equal(rows, whole)
    np.testing.assert_array_equal(rows, fresh_params()["embed"][tokens()])
    for name, want in whole_gradient.items():
        np.testing.assert_array_equal(gradient[name], want)


def test_gates_and_states_stay_float32_in_bfloat16():
    """A decay of 0.9995 is 1.0 in bfloat16: the log decay, beta and every carried state have to be float32."""
    runtime = Runtime(precision=Precision("float32", "bfloat16", "float32"), gdn_chunk=16, attention_block=16)
    shapes = jax.eval_shape(
        lambda params: model_params.build(CONFIG, runtime, params).hidden(tokens(), positions(SEGMENTS), SEGMENTS),
        fresh_params(),
    )
    assert shapes.dtype == jnp.bfloat16
    text = str(
        jax.make_jaxpr(
            lambda params: model_params.build(CONFIG, runtime, params).hidden(tokens(), positions(SEGMENTS), SEGMENTS)
        )(fresh_params())
    )
    H, K, V = CONFIG.linear_num_value_heads, CONFIG.linear_key_head_dim, CONFIG.linear_value_head_dim
    assert f"f32[{B},{T},{H}]" in text  # g and beta
    assert f"bf16[{B},{T},{H}]" not in text
    assert f"bf16[{B},{H},{K},{V}]" not in text
