"""Gathering a weight and scattering its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from app.cluster import sharding


@pytest.mark.parametrize("line", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_and_its_gradient(dim, line):
    """Every rank multiplies the whole weight by a matrix of its own; the gradient is the sum of these, cut again."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("fsdp", "context"))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((16, 16)).astype(np.float32)
    own = rng.standard_normal((8, 16, 16)).astype(np.float32)
    spec = PartitionSpec(*[("fsdp", "context") if d == dim else None for d in (0, 1)])

    def body(shard, mine):
        def loss(shard):
            whole = sharding.gather(shard, ("fsdp", "context"), dim, "float32", "float32", line)
            return jnp.sum(whole * mine[0]), whole

        (_, whole), gradient = jax.value_and_grad(loss, has_aux=True)(shard)
        return whole[None], gradient

    ranks = PartitionSpec("context")
    program = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)(
        body, in_specs=(spec, ranks), out_specs=(ranks, spec)
    )
    whole, gradient = jax.jit(program)(weight, own)
    assert all(np.array_equal(one, weight) for one in whole)
    np.testing.assert_allclose(gradient, own.sum(0), rtol=1e-5, atol=1e-5)
