"""The causal convolution on one rank against the tap by tap reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.ops.conv import causal_conv
from tests.reference import gdn_reference as reference
from tests.unit.ops.gdn_base import error, random_documents


def example(seed, B=6, T=40, W=4, X=5):
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(size=(B, T, X)), rng.normal(size=(W, X)), rng.normal(size=(B, T, X)))
    return [x.astype(np.float32) for x in arrays], random_documents(rng, B, T)


def values_and_cotangents(x, w, dout, ids):
    out, pull = jax.vjp(lambda x, w: causal_conv(x, w, segment_ids=ids), x, w)
    return out, *pull(dout)


@pytest.mark.parametrize(("T", "W"), [(40, 4), (2, 4), (1, 1), (9, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_reference(T, W, packed):
    (x, w, dout), ids = example(0, T=T, W=W)
    ids = ids if packed else None
    got = values_and_cotangents(*map(jnp.asarray, (x, w, dout)), None if ids is None else jnp.asarray(ids))
    want = (reference.causal_conv(x, w, segment_ids=ids), *reference.causal_conv_vjp(x, w, dout, segment_ids=ids))
    for name, one, other in zip(("out", "dx", "dw"), got, want, strict=True):
        assert error(one, other) < 1e-6, name


def test_equal_ids_around_a_short_document_are_not_joined():
    """Ids 0 0 1 0 0: the padding after the document does not see the padding before it."""
    x, w = jnp.ones((1, 5, 1)), jnp.ones((4, 1))
    out = causal_conv(x, w, segment_ids=jnp.asarray([[0, 0, 1, 0, 0]], jnp.int32))
    np.testing.assert_array_equal(np.asarray(out)[0, :, 0], [1, 2, 1, 1, 2])


def test_nothing_crosses_a_document_start():
    (x, w, _), _ = example(1, B=1)
    ids = jnp.asarray((np.arange(40) >= 17)[None] + 1, jnp.int32)
    before = causal_conv(jnp.asarray(x), jnp.asarray(w), segment_ids=ids)
    x[:, 14:17] *= -5.0
    after = causal_conv(jnp.asarray(x), jnp.asarray(w), segment_ids=ids)
    np.testing.assert_array_equal(np.asarray(before)[:, 17:], np.asarray(after)[:, 17:])
    grad = jax.grad(lambda x: jnp.sum(causal_conv(x, jnp.asarray(w), segment_ids=ids)[:, 17:] ** 2))(jnp.asarray(x))
    assert not np.asarray(grad)[:, :17].any()


def test_bfloat16_is_summed_in_float32():
    (x, w, dout), ids = example(2, T=400)
    x, w, dout = (np.asarray(jnp.asarray(a).astype(jnp.bfloat16), np.float32) for a in (x, w, dout))
    narrow = [jnp.asarray(a).astype(jnp.bfloat16) for a in (x, w, dout)]
    ids = np.resize(ids, (6, 400))
    out, dx, dw = values_and_cotangents(*narrow, jnp.asarray(ids))
    assert out.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    want = (reference.causal_conv(x, w, segment_ids=ids), *reference.causal_conv_vjp(x, w, dout, segment_ids=ids))
    for one, other in zip((out, dx, dw), want, strict=True):
        assert error(np.asarray(one, np.float32), other) < 2.0**-8


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 8, 3), (4, 2), (1, 8)), "expected x [B, T, X] and w [W, X]"),
        (((1, 8, 3), (4, 3), (1, 7)), "segment_ids must be [B, T] = (1, 8), got (1, 7)"),
    ],
)
def test_wrong_shapes_are_named(shapes, words):
    x, w, ids = shapes
    with pytest.raises(ValueError) as raised:
        causal_conv(jnp.zeros(x), jnp.zeros(w), segment_ids=jnp.zeros(ids, jnp.int32))
    assert words in str(raised.value)
