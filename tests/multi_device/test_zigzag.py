"""Contiguous order <-> zigzag order on fake CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops.zigzag import from_zigzag, to_zigzag, zigzag_rank

HALF = 3


def over_ranks(function, P, specs, axes=("context",)):
    shape = (P,) if len(axes) == 1 else (P // 2, 2)
    mesh = Mesh(np.array(jax.devices()[:P]).reshape(shape), axes)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))


@pytest.mark.parametrize(("P", "axes"), [(P, ("context",)) for P in (1, 2, 3, 4, 8)] + [(8, ("context", "expert"))])
def test_every_rank_gets_a_half_block_and_its_mirror_image_and_gives_them_back(P, axes):
    name = axes if len(axes) > 1 else axes[0]
    T = 2 * P * HALF
    index = np.stack([np.arange(T), np.arange(T)[::-1]]).astype(np.int32)  # stream index; ids, positions are alike
    hidden = np.random.default_rng(P).normal(size=(T, 2, 5)).astype(jnp.bfloat16)

    def there_and_back(index, hidden):
        zigzag = to_zigzag(index, name), to_zigzag(hidden, name, axis=0)
        return zigzag, (from_zigzag(zigzag[0], name), from_zigzag(zigzag[1], name, axis=0))

    specs = (PS(None, axes), PS(axes))
    mesh_fn = over_ranks(lambda a, b: there_and_back(a, b)[0], P, specs, axes)
    back_fn = over_ranks(lambda a, b: there_and_back(a, b)[1], P, specs, axes)
    zigzag, back = mesh_fn(index, hidden), back_fn(index, hidden)
    halves = np.arange(T).reshape(2 * P, HALF)
    order = np.concatenate([np.concatenate([halves[r], halves[2 * P - 1 - r]]) for r in range(P)])
    np.testing.assert_array_equal(zigzag[0], index[:, order])
    np.testing.assert_array_equal(np.asarray(zigzag[1]).view(np.uint16), hidden[order].view(np.uint16))
    np.testing.assert_array_equal(back[0], index)
    np.testing.assert_array_equal(np.asarray(back[1]).view(np.uint16), hidden.view(np.uint16))


def test_two_permutes_each_way_and_their_transposes():
    """A gradient travels back the way its operand came: no gather, no sum."""

    def loss(x):
        return jnp.sum(jnp.square(to_zigzag(x, "context")))

    P, T = 3, 6 * HALF
    x = np.arange(T, dtype=np.float32)[None]
    gradient = over_ranks(jax.grad(loss), P, PS(None, "context"))
    np.testing.assert_array_equal(gradient(x), 2 * x)
    text = str(jax.make_jaxpr(gradient)(x))
    assert text.count("ppermute[") == 4 and "all_gather" not in text and "psum" not in text


def test_holders_and_odd_lengths():
    assert [zigzag_rank(half, 3) for half in range(6)] == [0, 1, 2, 2, 1, 0]
    with pytest.raises(ValueError, match=r"seq_len=10 over 2 sequence ranks is 5 tokens a rank.*seq_len % 4 == 0"):
        over_ranks(lambda x: to_zigzag(x, "context"), 2, PS(None, "context"))(jnp.zeros((1, 10)))
