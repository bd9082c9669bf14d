"""The TPU kernels of the gated delta rule, interpreted, over a sharded sequence against the sequential reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops.gdn import gated_delta_rule
from tests.unit.ops.gdn_base import OUTPUTS, error, make_problem


def test_four_ranks_are_the_sequential_reference():
    """Documents that cross ranks, an initial and a final state, a rank length that is no multiple of the chunk."""
    P, problem = 4, make_problem(11, B=6, T=4 * 40, G=1, H=2, K=8, V=12, documents=True)
    mesh, time = Mesh(np.array(jax.devices()[:P]), ("c",)), PS(None, "c")

    def inside(ids, dout, dstate, initial_state, *inputs):
        rule = functools.partial(gated_delta_rule, axis_name="c", kernel="interpret", return_final_state=True)
        values, pull = jax.vjp(lambda state, *x: rule(*x, segment_ids=ids, initial_state=state), initial_state, *inputs)
        dinitial, *dinputs = pull((dout, jnp.where(lax.axis_index("c") == 0, dstate, 0.0)))
        return (*values, *dinputs, lax.psum(dinitial, "c"))

    call = jax.shard_map(
        inside, mesh=mesh, in_specs=(time, time, PS(), PS(), *[time] * 5),
        out_specs=(time, PS(), *[time] * 5, PS()), check_vma=False,
    )  # fmt: skip
    got = jax.jit(call)(problem.segment_ids, problem.dout, problem.dstate, problem.initial_state, *problem.inputs)
    want = problem.wanted()
    for name, x in zip(OUTPUTS, got, strict=True):
        # Rank by rank: a mistake at one border disappears in the mean of all.
        parts = 1 if name.endswith("state") else P
        for mine, right in zip(np.split(np.asarray(x), parts, 1), np.split(want[name], parts, 1), strict=True):
            assert error(mine, right) <= 5e-6, name
