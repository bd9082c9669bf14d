"""Grouped matrix products as TPU kernels; the interface is that of app.ops.grouped_matmul.

Letters: R rows, E groups, K and N the dims of a group's matrix, M tiles of rows.

Why kernels of our own. XLA's own kernel for ragged_dot (libtpu 0.0.50, jax 0.12) has tiles of 128 rows, gives the two
cores of a v5p chip nothing to share where a matrix is 512 wide, and copies all weights to transpose them in the
backward. Here a tile belongs to one group (the caller aligns the rows), so nothing is masked; the columns, the leading
grid dim, are shared by the cores; the tiles of a group follow each other, so its matrix is fetched once a column block.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
VMEM_BYTES = 60 << 20
# Elements of the blocks of a matrix (bfloat16, and float32 where it is a sum) that VMEM holds twice.
MATRIX_ELEMENTS, SUM_ELEMENTS = 4 << 20, 2 << 20


def grouped_matmul(
    x_RK: jax.Array, w: jax.Array, group_M: jax.Array, active: jax.Array, transposed: bool, interpret: bool
) -> jax.Array:
    """x w (w [E,K,N]), or with `transposed` x w^T (w [E,N,K]), of each tile with its group's matrix: [R,N].

    K and N must be multiples of 128. Rows of tiles that are not active get zeros.
    """
    R, K = x_RK.shape
    N = w.shape[1] if transposed else w.shape[2]
    rows, block = R // group_M.size, _columns(N, K, MATRIX_ELEMENTS)
    contracted = ((1,), (1,)) if transposed else ((1,), (0,))

    def kernel(group_ref, active_ref, x_ref, w_ref, out_ref):
        is_active = pl.program_id(1) < active_ref[0]

        @pl.when(is_active)
        def _():
            out_ref[...] = lax.dot_general(
                x_ref[...], w_ref[...], (contracted, ((), ())), preferred_element_type=jnp.float32
            ).astype(out_ref.dtype)

        @pl.when(jnp.logical_not(is_active))
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

    if transposed:
        w_spec = pl.BlockSpec((None, block, K), lambda n, m, group, active: (group[m], n, 0))
    else:
        w_spec = pl.BlockSpec((None, K, block), lambda n, m, group, active: (group[m], 0, n))
    return _call(
        kernel,
        (N // block, group_M.size),
        [pl.BlockSpec((rows, K), _last_active), w_spec],
        pl.BlockSpec((rows, block), lambda n, m, group, active: (m, n)),
        jax.ShapeDtypeStruct((R, N), x_RK.dtype),
        interpret,
        2 * R * K * N,
    )(group_M, active.reshape(1), x_RK, w)


def grouped_outer(
    x_RK: jax.Array, y_RN: jax.Array, groups: int, group_M: jax.Array, active: jax.Array, interpret: bool
) -> jax.Array:
    """x^T y over the rows of each group, [E,K,N] float32; every group has a tile. K and N: multiples of 128."""
    (R, K), N = x_RK.shape, y_RN.shape[1]
    rows, block = R // group_M.size, _columns(N, K, SUM_ELEMENTS)

    def kernel(group_ref, active_ref, x_ref, y_ref, sum_ref):
        tile = pl.program_id(1)

        @pl.when((tile == 0) | (group_ref[tile] != group_ref[jnp.maximum(tile - 1, 0)]))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(tile < active_ref[0])
        def _():
            sum_ref[...] += lax.dot_general(
                x_ref[...], y_ref[...], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

    return _call(
        kernel,
        (N // block, group_M.size),
        [
            pl.BlockSpec((rows, K), _last_active),
            pl.BlockSpec((rows, block), lambda n, m, group, active: (jnp.minimum(m, active[0] - 1), n)),
        ],
        pl.BlockSpec((None, K, block), lambda n, m, group, active: (group[m], 0, n)),
        jax.ShapeDtypeStruct((groups, K, N), jnp.float32),
        interpret,
        2 * R * K * N,
    )(group_M, active.reshape(1), x_RK, y_RN)


def _last_active(n, m, group, active):
    """The block of tile m; past the active ones no new block is fetched."""
    return jnp.minimum(m, active[0] - 1), 0


def _columns(N: int, K: int, elements: int) -> int:
    """Columns of a block: the most that divide N into an even number of blocks (a share for each core) and fit.

    Raises ValueError if N or K is no multiple of 128.
    """
    if N % LANES or K % LANES:
        raise ValueError(
            f"the pallas kernel for experts works on matrices whose sides are multiples of {LANES}, not {K} x {N} "
            "(hidden_size, moe_intermediate_size / mesh.tensor)"
        )
    parts = N // LANES
    fitting = [n for n in range(1, parts + 1) if parts % n == 0 and n * LANES * K <= elements]
    shared = [n for n in fitting if parts // n % 2 == 0]
    return LANES * max(shared or fitting or [1])


def _call(kernel, grid, in_specs, out_spec, out_shape, interpret, flops):
    moved = out_shape.size * out_shape.dtype.itemsize
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, grid=grid, in_specs=in_specs, out_specs=out_spec),
        out_shape=out_shape,
        # The cores share the columns; along the tiles the matrix of a group stays where it is.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
    )
