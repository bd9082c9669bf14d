"""Experts: each token's MLPs are those that its router chose, and these may lie on other ranks.

Assignments (a token and one of its experts) are sorted by expert, so that one rank's share is a contiguous part of the
list, and the products over all experts are grouped matmuls. Every move of rows is a gather, forward and backward.
The rule of the rounds, bytes and gradients: README_experts.md.

Letters: N tokens, K experts of one token, D width, F hidden of one expert (this rank's part), E experts (weights: of
this rank), P expert ranks, A places for assignments between two ranks in one round, R rows of a grouped matmul.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.grouped_matmul import (
    KernelName,
    Tiles,
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_outer,
    tile_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """gate_up [E,D,2F], gate in the first half, and down [E,F,D], in the compute dtype."""

    gate_up: jax.Array
    down: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The mesh axis over whose ranks the experts are shared out, and the rule of the rounds (README_experts.md).

    together: the mesh axes over which ranks may have other tokens; all of them go through as many rounds.
    """

    axis: str | None = None
    together: tuple[str, ...] = ()
    capacity: float = 1.25
    max_rounds: int = 0

    def places(self, tokens: int, experts_per_token: int, own: int, ranks: int) -> int:
        """A, for `tokens` of one rank and `own` experts of another: at most all that can go there."""
        most = tokens * min(experts_per_token, own)
        return min(most, max(8, math.ceil(self.capacity * tokens * experts_per_token / ranks)))


def expert_mlp(
    x_ND: jax.Array,
    experts_NK: jax.Array,
    weights_NK: jax.Array,
    matrices: ExpertWeights,
    *,
    num_experts: int,
    exchange: Exchange = Exchange(),
    kernel: KernelName = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum over k of weight * MLP of expert k [N,D] in x's dtype, rounds, dropped assignments of this rank).

    x [N,D] in the compute dtype; experts int32 [N,K], `num_experts` for none; weights [N,K] float32; matrices of this
    rank's experts, rank r of `exchange.axis` having the r-th part of them. rounds and dropped: float32 scalars.
    """
    ranks = 1 if exchange.axis is None else lax.axis_size(exchange.axis)
    if ranks == 1:
        result_ND = own_experts(x_ND, experts_NK, weights_NK, matrices, kernel)
        return result_ND, jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
    (N, K), own = experts_NK.shape, num_experts // ranks
    places = exchange.places(N, K, own, ranks)
    assignments = assign(experts_NK, own, ranks)
    # The same number on every rank of the mesh: they meet in each round's exchanges.
    rounds = lax.pmax(jnp.max((assignments.count + places - 1) // places), exchange.together)
    if exchange.max_rounds:
        rounds = jnp.minimum(rounds, exchange.max_rounds)
    result_ND = _all_rounds(x_ND, weights_NK, matrices, assignments, rounds, exchange.axis, places, kernel)
    dropped = jnp.sum(jnp.maximum(assignments.count - rounds * places, 0), dtype=jnp.int32)
    return result_ND, rounds.astype(jnp.float32), dropped.astype(jnp.float32)


# ---- moving rows: every move is a gather, and its gradient is the opposite move --------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Move:
    """Copies of source rows to places: the source row of each place, int32 [places] (of a free place: any row); and the
    places of each row, int32 [rows, copies], with whether that copy is there, bool [rows, copies]."""

    source: jax.Array
    place: jax.Array
    there: jax.Array


@jax.custom_vjp
def spread(x: jax.Array, move: Move) -> jax.Array:
    """x [rows, ...] -> [places, ...]. Free places hold some row's numbers; what they get back is not looked at."""
    return jnp.take(x, move.source, axis=0, mode="clip")


@jax.custom_vjp
def collect(x: jax.Array, move: Move) -> jax.Array:
    """Sum of the copies of each row: x [places, ...] -> [rows, ...], in x's dtype, added in float32."""
    copies = jnp.take(x, move.place, axis=0, mode="clip").astype(jnp.float32)
    there = move.there.reshape(*move.there.shape, *[1] * (x.ndim - 1))
    return jnp.sum(jnp.where(there, copies, 0.0), axis=1).astype(x.dtype)


spread.defvjp(lambda x, move: (spread(x, move), move), lambda move, grad: (collect(grad, move), None))
collect.defvjp(lambda x, move: (collect(x, move), move), lambda move, grad: (spread(grad, move), None))


def sorted_by(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(order, place) of int32 keys [R], stable: order[i] is what stands at i, place[j] where j stands."""
    index = jnp.arange(keys.size, dtype=jnp.int32)
    _, order = lax.sort((keys, index), num_keys=1, is_stable=True)
    return order, lax.sort((order, index), num_keys=1, is_stable=False)[1]


def _picked(index: jax.Array, table: jax.Array) -> jax.Array:
    """table[index] of a short int32 table, 0 for an index outside: by comparison, which is faster than a gather."""
    is_it = index[..., None] == jnp.arange(table.size, dtype=jnp.int32).reshape(*[1] * index.ndim, -1)
    return jnp.sum(jnp.where(is_it, table.reshape(*[1] * index.ndim, -1), 0), axis=-1, dtype=jnp.int32)


# ---- the experts of one rank -----------------------------------------------------------------------------------------


def own_experts(
    x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, matrices: ExpertWeights, kernel: KernelName
) -> jax.Array:
    """`expert_mlp` where all experts are this rank's: experts outside [0, E) are none. [N,D] in x's dtype."""
    (N, K), groups = experts_NK.shape, matrices.down.shape[0]
    flat = experts_NK.reshape(-1)
    source, place, real_R, tiles = _aligned(flat, groups, tile_rows(flat.size, groups, kernel))
    there_NK = (experts_NK >= 0) & (experts_NK < groups)
    of_tokens = Move(source // K, place.reshape(N, K), there_NK)
    of_weights = Move(source, place.reshape(-1, 1), there_NK.reshape(-1, 1))
    weight_R = jnp.where(real_R, spread(weights_NK.reshape(-1), of_weights), 0.0)
    return collect(_grouped_mlp(spread(x_ND, of_tokens), weight_R, matrices, tiles, kernel), of_tokens)


def _aligned(experts_J: jax.Array, groups: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array, Tiles]:
    """Rows sorted by expert, every expert's from the beginning of a tile: (source [R], place [J], real [R], tiles).

    R = (J // tile + groups) x tile is what any routing of J assignments needs, each expert having a tile at least.
    """
    order, place_J = sorted_by(jnp.where((experts_J >= 0) & (experts_J < groups), experts_J, groups))
    group_E = jnp.arange(groups, dtype=jnp.int32)
    size_E = jnp.sum(experts_J[None] == group_E[:, None], axis=1, dtype=jnp.int32)
    tiles_E = jnp.maximum((size_E + tile - 1) // tile, 1)
    end_E, before_E = jnp.cumsum(tiles_E), jnp.cumsum(size_E) - size_E
    first_row_E = (end_E - tiles_E) * tile

    tile_M = jnp.arange(experts_J.size // tile + groups, dtype=jnp.int32)
    group_M = jnp.sum(tile_M[:, None] >= end_E[None], axis=1, dtype=jnp.int32)
    group_M = jnp.minimum(group_M, groups - 1)
    within_MT = (tile_M * tile - _picked(group_M, first_row_E))[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]
    real_MT = within_MT < _picked(group_M, size_E)[:, None]
    sorted_MT = _picked(group_M, before_E)[:, None] + jnp.where(real_MT, within_MT, 0)
    source_R = jnp.take(order, sorted_MT.reshape(-1), mode="clip")
    return source_R, place_J + _picked(experts_J, first_row_E - before_E), real_MT.reshape(-1), Tiles(
        group_M, end_E[-1], tile
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped_mlp(
    x_RD: jax.Array, weight_R: jax.Array, matrices: ExpertWeights, tiles: Tiles, kernel: KernelName
) -> jax.Array:
    """weight * down(silu(gate x) * up x) of every row with its tile's matrices: [R,D] in x's dtype.

    Rows that pad a tile have weight 0, so they add nothing to a gradient. The backward forms d weight from the gradient
    of the hidden values, so it needs no output of `down`.
    """
    return _grouped_mlp_fwd(x_RD, weight_R, matrices, tiles, kernel)[0]


def _hidden(gate_up_RF):
    gate_RF, up_RF = jnp.split(gate_up_RF.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate_RF) * up_RF


def _grouped_mlp_fwd(x_RD, weight_R, matrices, tiles, kernel):
    gate_up_RF = grouped_matmul(x_RD, matrices.gate_up, tiles, kernel)
    out_RD = grouped_matmul(_hidden(gate_up_RF).astype(x_RD.dtype), matrices.down, tiles, kernel)
    weighted_RD = (out_RD.astype(jnp.float32) * weight_R[:, None]).astype(x_RD.dtype)
    return weighted_RD, (x_RD, weight_R, matrices, tiles, gate_up_RF)


def _grouped_mlp_bwd(kernel, residuals, grad_RD):
    x_RD, weight_R, matrices, tiles, gate_up_RF = residuals
    dtype, groups, weight_R1 = x_RD.dtype, matrices.down.shape[0], weight_R[:, None]
    hidden_RF, pull_hidden = jax.vjp(_hidden, gate_up_RF)
    back_RF = grouped_matmul_transposed(grad_RD, matrices.down, tiles, kernel).astype(jnp.float32)
    grad_weight_R = jnp.sum(hidden_RF * back_RF, axis=1)
    (grad_gate_up_RF,) = pull_hidden(back_RF * weight_R1)
    grad_matrices = ExpertWeights(
        grouped_outer(x_RD, grad_gate_up_RF, groups, tiles, kernel),
        grouped_outer((hidden_RF * weight_R1).astype(dtype), grad_RD, groups, tiles, kernel),
    )
    grad_x_RD = grouped_matmul_transposed(grad_gate_up_RF, matrices.gate_up, tiles, kernel)
    grad_matrices = jax.tree.map(lambda grad, matrix: grad.astype(matrix.dtype), grad_matrices, matrices)
    return grad_x_RD, grad_weight_R, grad_matrices, None


_grouped_mlp.defvjp(_grouped_mlp_fwd, _grouped_mlp_bwd)


# ---- the experts of all ranks, in rounds -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignments:
    """All assignments of this rank (a number: token x K + k) sorted by expert, int32: expert and assignment at each
    place of that order, the rank and the place in the order of each assignment [N,K], and for every rank where its part
    of the order begins and how long it is [P]."""

    experts: jax.Array
    order: jax.Array
    owner: jax.Array
    place: jax.Array
    start: jax.Array
    count: jax.Array


def assign(experts_NK: jax.Array, own: int, ranks: int) -> Assignments:
    """`own`: experts of each rank; an expert that is no rank's (padding) is in no part."""
    flat, rank_P1 = experts_NK.reshape(-1), jnp.arange(ranks, dtype=jnp.int32)[:, None]
    order, place = sorted_by(flat)
    owner = flat // own
    count = jnp.sum(owner[None] == rank_P1, axis=1, dtype=jnp.int32)
    start = jnp.cumsum(count) - count
    sorted_experts = jnp.take(flat, order, mode="clip")
    return Assignments(
        sorted_experts, order, owner.reshape(experts_NK.shape), place.reshape(experts_NK.shape), start, count
    )


def _one_round(number, x_ND, weights_NK, matrices, assignments, axis, places, kernel):
    """What round `number` adds to the result, [N,D] in x's dtype; differentiable in x, weights and matrices.

    Of every rank's part of the assignments those at [number A, (number + 1) A) travel to it, and their results back.
    """
    a, ranks, K, own = assignments, assignments.start.size, weights_NK.shape[1], matrices.down.shape[0]
    first_P = a.start + number * places

    def parts(values):
        """Of values in sorted order, what goes to each rank: [P,A]."""
        padded = jnp.pad(values, (0, places))
        return jax.vmap(lambda first: lax.dynamic_slice(padded, (first,), (places,)))(first_P)

    def exchanged(rows):
        return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)

    within_NK = a.place - _picked(a.owner, first_P)
    there_NK = (a.owner < ranks) & (within_NK >= 0) & (within_NK < places)
    place_NK = a.owner * places + within_NK
    source = parts(a.order).reshape(-1)
    of_tokens = Move(source // K, place_NK, there_NK)
    of_weights = Move(source, place_NK.reshape(-1, 1), there_NK.reshape(-1, 1))
    free_PA = jnp.arange(places, dtype=jnp.int32)[None] >= (a.count - number * places)[:, None]
    experts_PA = jnp.where(free_PA, own * ranks, parts(a.experts))

    x_RD, weight_R = exchanged(spread(x_ND, of_tokens)), exchanged(spread(weights_NK.reshape(-1), of_weights))
    expert_R = exchanged(experts_PA.reshape(-1)) - lax.axis_index(axis) * own
    out_RD = own_experts(x_RD, expert_R[:, None], weight_R[:, None], matrices, kernel)
    return collect(exchanged(out_RD), of_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _all_rounds(x_ND, weights_NK, matrices, assignments, rounds, axis, places, kernel):
    """The sum of all rounds, in x's dtype. A loop whose length is known only when it runs has no gradient of its own:
    the backward is a second loop, over the gradients of the rounds, and keeps nothing of the first."""
    return _all_rounds_fwd(x_ND, weights_NK, matrices, assignments, rounds, axis, places, kernel)[0]


def _all_rounds_fwd(x_ND, weights_NK, matrices, assignments, rounds, axis, places, kernel):
    def add(number, total_ND):
        part_ND = _one_round(number, x_ND, weights_NK, matrices, assignments, axis, places, kernel)
        return total_ND + part_ND.astype(jnp.float32)

    total_ND = _loop(rounds, add, jnp.zeros(x_ND.shape, jnp.float32))
    return total_ND.astype(x_ND.dtype), (x_ND, weights_NK, matrices, assignments, rounds)


def _all_rounds_bwd(axis, places, kernel, residuals, grad_ND):
    x_ND, weights_NK, matrices, assignments, rounds = residuals
    operands = x_ND, weights_NK, matrices

    def add(number, total):
        def result(x_ND, weights_NK, matrices):
            return _one_round(number, x_ND, weights_NK, matrices, assignments, axis, places, kernel)

        _, pull = jax.vjp(result, *operands)
        return jax.tree.map(lambda sum_, grad: sum_ + grad.astype(jnp.float32), total, pull(grad_ND))

    total = _loop(rounds, add, jax.tree.map(lambda operand: jnp.zeros(operand.shape, jnp.float32), operands))
    return (*jax.tree.map(lambda sum_, operand: sum_.astype(operand.dtype), total, operands), None, None)


_all_rounds.defvjp(_all_rounds_fwd, _all_rounds_bwd)


def _loop(rounds, add, start):
    """`start`, and what add(number, total) makes of it in every round."""
    return lax.while_loop(
        lambda state: state[0] < rounds,
        lambda state: (state[0] + 1, add(*state)),
        (jnp.zeros((), jnp.int32), start),
    )[1]
