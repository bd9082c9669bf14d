"""Chunked cross entropy against the plain one, value and gradients, and what it must never allocate."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.training.loss import chunked_cross_entropy

B, T, D, V = 2, 37, 16, 50  # 74 tokens: no chunk below divides them all


def plain(hidden, head, targets, mask, z_weight):
    """float64 numpy-style reference: the whole tokens x vocabulary matrix."""
    logits = jnp.einsum("btd,dv->btv", hidden, head)
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    weight = mask.astype(logits.dtype)
    entropy = jnp.sum((lse - target) * weight)
    return entropy + z_weight * jnp.sum(jnp.square(lse) * weight), entropy


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    mask = rng.random((B, T)) < 0.7
    mask[1, 20:] = False  # whole chunks without a valid token
    return tuple(map(jnp.asarray, (hidden, head, targets, mask)))


@pytest.mark.parametrize("chunk", [5, 74, 1000])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_equals_plain(example, chunk, z_weight):
    def chunked(hidden, head):
        return chunked_cross_entropy(hidden, head, *example[2:], chunk=chunk, z_weight=z_weight)

    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in example]
        wanted, wanted_grads = jax.value_and_grad(
            lambda h, w: plain(h, w, *wide[2:], z_weight), argnums=(0, 1), has_aux=True
        )(*wide[:2])
    got, grads = jax.value_and_grad(
        lambda h, w: (lambda loss, e: (3.0 * loss, e))(*chunked(h, w)), argnums=(0, 1), has_aux=True
    )(*example[:2])
    wanted = [float(number) for number in wanted]
    assert float(got[0]) == pytest.approx(3.0 * wanted[0], rel=1e-6)
    assert float(got[1]) == pytest.approx(wanted[1], rel=1e-6)
    assert float(chunked(*example[:2])[0]) == pytest.approx(wanted[0], rel=1e-6)  # without a gradient: the other branch
    for grad, want in zip(map(np.asarray, grads), map(np.asarray, wanted_grads), strict=True):
        assert np.linalg.norm(grad - 3.0 * want) <= 2e-6 * np.linalg.norm(3.0 * want)


def test_masked_tokens_cannot_poison_the_loss(example):
    hidden, head, targets, mask = example
    poisoned = jnp.where(mask[:, :, None], hidden, jnp.inf)
    loss, _ = chunked_cross_entropy(poisoned, head, targets, mask, chunk=8)
    clean, _ = chunked_cross_entropy(hidden, head, targets, mask, chunk=8)
    assert float(loss) == pytest.approx(float(clean))


def test_all_masked_is_zero(example):
    hidden, head, targets, mask = example
    (loss, entropy), grads = jax.value_and_grad(
        lambda h, w: chunked_cross_entropy(h, w, targets, jnp.zeros_like(mask), chunk=8), argnums=(0, 1), has_aux=True
    )(hidden, head)
    assert loss == 0 and entropy == 0
    assert all(not grad.any() for grad in grads)


def test_no_buffer_of_tokens_by_vocabulary():
    tokens, vocab, chunk = 512, 1024, 64
    shapes = (
        jax.ShapeDtypeStruct((1, tokens, 8), "float32"),
        jax.ShapeDtypeStruct((8, vocab), "float32"),
        jax.ShapeDtypeStruct((1, tokens), "int32"),
        jax.ShapeDtypeStruct((1, tokens), "bool"),
    )

    def largest(function):
        text = jax.jit(function).lower(*shapes).compile().as_text()
        return max(np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\[(\d[\d,]*)\]", text))

    def train(hidden, head, targets, mask):
        return jax.value_and_grad(
            lambda h, w: chunked_cross_entropy(h, w, targets, mask, chunk=chunk), argnums=(0, 1), has_aux=True
        )(hidden, head)

    assert largest(train) <= chunk * vocab
    assert largest(lambda *args: chunked_cross_entropy(*args, chunk=chunk)) <= chunk * vocab
    assert largest(lambda *args: plain(*args, 0.0)) >= tokens * vocab  # the measurement sees what it looks for
