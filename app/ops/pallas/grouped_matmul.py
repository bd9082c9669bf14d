"""Grouped products of the experts as TPU kernels; the interface is that of app.ops.grouped_matmul.

Letters: R rows, E groups, M tiles of T rows, D width, F hidden, n blocks of columns.

Why kernels of our own. XLA's own kernel for ragged_dot (libtpu 0.0.50, jax 0.12) has tiles of 128 rows, gives the two
cores of a v5p chip nothing to share where a matrix is 512 wide, and copies all weights to transpose them in the
backward. Here a tile belongs to one group (the caller aligns the rows), so nothing is masked; the columns, the leading
grid dim, are shared by the cores; the tiles of a group follow each other, so its matrix is fetched once a column block;
the arithmetic between two products happens where the first one ends.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
VMEM_BYTES = 60 << 20
# Elements of the blocks of all matrices (bfloat16, and float32 where they are sums) that VMEM holds twice.
MATRIX_ELEMENTS, SUM_ELEMENTS = 6 << 20, 2 << 20


def expert_hidden(x_RD, gate_EDF, up_EDF, group_M, active, interpret: bool) -> jax.Array:
    """silu(x gate) * (x up) of each tile with its group's matrices, [R,F]."""
    (R, D), F = x_RD.shape, gate_EDF.shape[2]
    block = _columns(F, D, MATRIX_ELEMENTS // 2)

    def kernel(x_ref, gate_ref, up_ref, hidden_ref):
        x = x_ref[...]
        hidden_ref[...] = (jax.nn.silu(_product(x, gate_ref[...])) * _product(x, up_ref[...])).astype(hidden_ref.dtype)

    at = _Blocks(R // group_M.size)
    inputs = [(x_RD, at.rows(D)), (gate_EDF, at.matrix_columns(D, block)), (up_EDF, at.matrix_columns(D, block))]
    outputs = [(jax.ShapeDtypeStruct((R, F), x_RD.dtype), at.row_block(block))]
    return _call(kernel, F // block, inputs, outputs, group_M, active, interpret, 4 * R * D * F)[0]


def expert_hidden_backward(
    x_RD, grad_RD, weight_R, gate_EDF, up_EDF, down_EFD, group_M, active, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `app.ops.grouped_matmul.expert_hidden_backward`."""
    (R, D), F = x_RD.shape, gate_EDF.shape[2]
    block = _columns(F, D, MATRIX_ELEMENTS // 3)

    def kernel(x_ref, grad_ref, weight_ref, gate_ref, up_ref, down_ref, *out_refs):
        grad_gate_ref, grad_up_ref, hidden_ref, sum_ref = out_refs
        gate, up = _product(x_ref[...], gate_ref[...]), _product(x_ref[...], up_ref[...])
        back = _product(grad_ref[...], down_ref[...], transposed=True)
        sigmoid = jax.nn.sigmoid(gate)
        # Numbers of rows lie along the lanes in memory; a column of them there would take 128 times its size.
        silu, weight = gate * sigmoid, jnp.broadcast_to(weight_ref[...], (LANES, at.tile)).T[:, :1]
        hidden, weighted_back = silu * up, back * weight
        grad_up_ref[...] = (weighted_back * silu).astype(grad_up_ref.dtype)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad_gate_ref[...] = (weighted_back * up * slope).astype(grad_gate_ref.dtype)
        hidden_ref[...] = (hidden * weight).astype(hidden_ref.dtype)
        products = hidden * back
        lanes = functools.reduce(jnp.add, [products[:, i : i + LANES] for i in range(0, block, LANES)])
        sum_ref[...] = jnp.sum(lanes.T, axis=0, keepdims=True)

    at = _Blocks(R // group_M.size)
    columns, row_block = at.matrix_columns(D, block), at.row_block(block)
    inputs = [
        (x_RD, at.rows(D)), (grad_RD, at.rows(D)), (weight_R[None], at.row_numbers()), (gate_EDF, columns),
        (up_EDF, columns), (down_EFD, at.matrix_rows(block, D)),
    ]  # fmt: skip
    hidden = jax.ShapeDtypeStruct((R, F), x_RD.dtype), row_block
    sums = jax.ShapeDtypeStruct((F // block, 1, R), jnp.float32), at.row_sums()
    outputs = [hidden, hidden, hidden, sums]
    found = _call(kernel, F // block, inputs, outputs, group_M, active, interpret, 6 * R * D * F)
    return found[0], found[1], found[2], jnp.sum(found[3], axis=(0, 1))


def grouped_matmul(
    xs: Sequence[jax.Array], matrices: Sequence[jax.Array], group_M, active, transposed: bool, interpret: bool
) -> jax.Array:
    """Sum of x w over pairs of x [R,K] and w [E,K,N], or with `transposed` of x w^T (w [E,N,K]), each tile with its
    group's matrix: [R,N]."""
    R, K = xs[0].shape
    N = matrices[0].shape[1 if transposed else 2]
    block = _columns(N, K, MATRIX_ELEMENTS // len(xs))

    def kernel(*refs):
        *pairs, out_ref = refs
        x_refs, w_refs = pairs[: len(xs)], pairs[len(xs) :]
        products = [_product(x[...], w[...], transposed) for x, w in zip(x_refs, w_refs, strict=True)]
        out_ref[...] = functools.reduce(jnp.add, products).astype(out_ref.dtype)

    at = _Blocks(R // group_M.size)
    matrix = at.matrix_rows(block, K) if transposed else at.matrix_columns(K, block)
    inputs = [*((x, at.rows(K)) for x in xs), *((w, matrix) for w in matrices)]
    outputs = [(jax.ShapeDtypeStruct((R, N), xs[0].dtype), at.row_block(block))]
    return _call(kernel, N // block, inputs, outputs, group_M, active, interpret, 2 * len(xs) * R * K * N)[0]


def grouped_outer(
    x_RK: jax.Array, ys: Sequence[jax.Array], sums: Sequence[jax.Array], is_first, group_M, active, interpret: bool
) -> list[jax.Array]:
    """Of each y [R,N]: sum [E,K,N] (float32) + x^T y over the rows of each group, in the memory of the sum, which is
    not read where `is_first`. Every group has a tile."""
    (R, K), N, count = x_RK.shape, ys[0].shape[1], len(ys)
    block = _columns(N, K, SUM_ELEMENTS // count)

    def kernel(is_new, is_first, x_ref, *refs):
        y_refs, before_refs, sum_refs = refs[:count], refs[count : 2 * count], refs[2 * count :]
        for y_ref, before_ref, sum_ref in zip(y_refs, before_refs, sum_refs, strict=True):
            before = jnp.where(is_first, 0.0, before_ref[...])
            added = lax.dot_general(
                x_ref[...], y_ref[...], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            sum_ref[...] = jnp.where(is_new, before, sum_ref[...]) + added

    at = _Blocks(R // group_M.size)
    inputs = [
        (x_RK, at.rows(K)), *((y, at.row_block(block)) for y in ys), *((s, at.sum_before(K, block)) for s in sums),
    ]  # fmt: skip
    outputs = [(jax.ShapeDtypeStruct(s.shape, jnp.float32), at.matrix_columns(K, block)) for s in sums]
    flops = 2 * count * R * K * N
    return _call(kernel, N // block, inputs, outputs, group_M, active, interpret, flops, is_first)


def _product(x: jax.Array, w: jax.Array, transposed: bool = False) -> jax.Array:
    contracted = ((1,), (1,)) if transposed else ((1,), (0,))
    return lax.dot_general(x, w, (contracted, ((), ())), preferred_element_type=jnp.float32)


class _Blocks:
    """Which block of an array step (n, m) works on. group [M] and state (active tiles, whether this is the first round)
    lie in scalar memory; past the active tiles nothing new is fetched or written."""

    def __init__(self, tile: int):
        self.tile = tile

    def rows(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((self.tile, width), lambda n, m, group, state: (jnp.minimum(m, state[0] - 1), 0))

    def row_block(self, block: int) -> pl.BlockSpec:
        return pl.BlockSpec((self.tile, block), lambda n, m, group, state: (jnp.minimum(m, state[0] - 1), n))

    def row_numbers(self) -> pl.BlockSpec:
        """Of an array [1,R]."""
        return pl.BlockSpec((1, self.tile), lambda n, m, group, state: (0, jnp.minimum(m, state[0] - 1)))

    def row_sums(self) -> pl.BlockSpec:
        """Of an array [n,1,R]."""
        return pl.BlockSpec((None, 1, self.tile), lambda n, m, group, state: (n, 0, jnp.minimum(m, state[0] - 1)))

    def matrix_columns(self, K: int, block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, K, block), lambda n, m, group, state: (group[m], 0, n))

    def matrix_rows(self, block: int, K: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, block, K), lambda n, m, group, state: (group[m], n, 0))

    def sum_before(self, K: int, block: int) -> pl.BlockSpec:
        """In the first round always the same block, so that nothing is fetched."""
        return pl.BlockSpec(
            (None, K, block), lambda n, m, group, state: (group[m] * (1 - state[1]), 0, n * (1 - state[1]))
        )


def _columns(N: int, K: int, elements: int) -> int:
    """Columns of a block: the most that divide N into an even number of blocks (a share for each core) and fit.

    Raises ValueError if N or K is no multiple of 128.
    """
    if N % LANES or K % LANES:
        raise ValueError(
            f"the pallas kernel for experts works on matrices whose sides are multiples of {LANES}, not {K} x {N} "
            "(model.hidden_size; moe_intermediate_size and shared_expert_intermediate_size / mesh.tensor)"
        )
    parts = N // LANES
    fitting = [n for n in range(1, parts + 1) if parts % n == 0 and n * LANES * K <= elements]
    shared = [n for n in fitting if parts // n % 2 == 0]
    return LANES * max(shared or fitting or [1])


def _call(
    body: Callable, columns: int, inputs, outputs, group_M, active, interpret: bool, flops: int, is_first=None
) -> list[jax.Array]:
    """`body` on every active tile; with `is_first` it is told whether the tile is its group's first, and is_first, and
    the outputs lie in the memory of the last inputs."""

    def kernel(group_ref, state_ref, *refs):
        tile = pl.program_id(1)
        is_new = (tile == 0) | (group_ref[tile] != group_ref[jnp.maximum(tile - 1, 0)])

        @pl.when(tile < state_ref[0])
        def _():
            body(*([] if is_first is None else [is_new, state_ref[1] == 1]), *refs)

    state = jnp.stack([active, jnp.zeros_like(active) if is_first is None else is_first.astype(jnp.int32)])
    (arrays, in_specs), (shapes, out_specs) = zip(*inputs, strict=True), zip(*outputs, strict=True)
    first_alias = 2 + len(arrays) - len(shapes)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(columns, group_M.size), in_specs=in_specs, out_specs=out_specs
        ),
        out_shape=shapes,
        # The cores share the columns; along the tiles the matrix of a group stays where it is.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, bytes_accessed=sum(z.size * z.dtype.itemsize for z in (*arrays, *shapes)), transcendentals=0
        ),
        input_output_aliases={} if is_first is None else {first_alias + i: i for i in range(len(shapes))},
        interpret=interpret,
    )(group_M, state, *arrays)
