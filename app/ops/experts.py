"""Experts: each token's MLPs are those that its router chose, and these may lie on other ranks.

Assignments (a token and one of its experts) are sorted by expert, so that one rank's share is a contiguous part of the
list, and the products over all experts are grouped matmuls. Every move of rows is a gather, forward and backward.
The rule of the rounds, bytes and gradients: README_experts.md.

Letters: N tokens, K experts of one token, D width, F hidden of one expert (this rank's part), E experts (of a matrix:
this rank's), P expert ranks, A places for assignments between two ranks in one round, R rows of a grouped matmul in M
tiles of T rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from app.ops.grouped_matmul import (
    Tiles,
    expert_hidden,
    expert_hidden_backward,
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_outer,
    tile_rows,
)
from app.ops.kernels import KernelName

# checkpoint_name of the weights and of where every assignment goes: 16 K bytes of a token and some numbers of a rank.
# With it kept, a rematerialised layer sorts nothing again, and its backward can fetch rows before anything else.
ROUTE_NAME = "expert_route"

Shards = Any  # this rank's parts of the experts' matrices: a tree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """gate and up [E,D,F], down [E,F,D]: whole, in the compute dtype; as gradients float32. Or a thing for each."""

    gate: Any
    up: Any
    down: Any


@dataclasses.dataclass(frozen=True)
class Access:
    """How the whole matrices, of this rank's experts and of the shared one ([1,D,F], [1,F,D]), come from this rank's
    parts, and how the parts' gradient comes from the matrices'.

    Handed in, and not differentiated through, because the matrices are in the compute dtype while their gradient is a
    float32 sum that goes to the reduction as it is: a cast there and back reads and writes it all.
    """

    whole: Callable[[Shards], tuple[ExpertWeights, ExpertWeights]] = lambda shards: shards
    reduced: Callable[[tuple[ExpertWeights, ExpertWeights]], Shards] = lambda gradients: gradients


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
    shared_weight_N: jax.Array,
    shards: Shards,
    *,
    num_experts: int,
    access: Access = Access(),
    exchange: Exchange = Exchange(),
    kernel: KernelName = "xla",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum over k of weight * MLP of expert k, and the shared expert's with its weight, [N,D] in x's dtype; and counts
    of this rank, float32: "assignments" of each expert [E], "rounds", "dropped" assignments.

    x [N,D] in the compute dtype; experts int32 [N,K], `num_experts` for none; weights [N,K], [N] float32; shards: what
    `access` makes matrices of, rank r of `exchange.axis` having the r-th part of the experts.
    """
    ranks = 1 if exchange.axis is None else lax.axis_size(exchange.axis)
    (N, K), own = experts_NK.shape, num_experts // ranks
    places = exchange.places(N, K, own, ranks)
    all_tokens = places >= N  # of one rank: they are no more than its assignments' places
    rule = Rule(exchange.axis if ranks > 1 else None, ranks, places, all_tokens, access, kernel)
    assignments = assign(experts_NK, own, rule)
    rounds = jnp.ones((), jnp.int32)
    if ranks > 1:  # The same number on every rank of the mesh: they meet in each round's exchanges.
        needed = (jnp.max(assignments.count) + places - 1) // places
        rounds = jnp.maximum(lax.pmax(needed, exchange.together), 1)
        if exchange.max_rounds:
            rounds = jnp.minimum(rounds, exchange.max_rounds)
    weights_NK, assignments, rounds = checkpoint_name((weights_NK, assignments, rounds), ROUTE_NAME)
    result_ND = _all_rounds(x_ND, weights_NK, shared_weight_N, shards, assignments, rounds, rule)
    dropped = jnp.sum(jnp.maximum(assignments.count - rounds * places, 0), dtype=jnp.int32)
    counts = {"assignments": assignments.of_expert, "rounds": rounds, "dropped": dropped}
    return result_ND, {name: count.astype(jnp.float32) for name, count in counts.items()}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What does not depend on the routing. all_tokens: every rank gets all tokens of the others, not only its
    assignments' (fewer bytes where a token has more experts than there are ranks)."""

    axis: str | None
    ranks: int
    places: int
    all_tokens: bool
    access: Access
    kernel: KernelName

    def exchanged(self, rows: jax.Array) -> jax.Array:
        """[P x n, ...] -> [P x n, ...]: what rank r has for rank s at its s-th part comes to s as the r-th part."""
        if self.axis is None:
            return rows
        return lax.all_to_all(rows, self.axis, split_axis=0, concat_axis=0, tiled=True)

    def of_all(self, x_ND: jax.Array) -> jax.Array:
        """x of all ranks, [P N,D]."""
        return x_ND if self.axis is None else lax.all_gather(x_ND, self.axis, axis=0, tiled=True)


# ---- what goes where -------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assignments:
    """All assignments of this rank (a number: token x K + k) by expert, int32.

    order [N K]: the assignment at each place of the sorted list. start, count [P]: where the part of each rank begins
    in it and how long it is. owner, within [N,K]: the rank that an assignment goes to (P: none) and its place in that
    rank's part. of_expert [P E]: how many each expert gets from this rank; arriving [P,E]: each of this rank's from
    each rank.
    """

    order: jax.Array
    start: jax.Array
    count: jax.Array
    owner: jax.Array
    within: jax.Array
    of_expert: jax.Array
    arriving: jax.Array


def assign(experts_NK: jax.Array, own: int, rule: Rule) -> Assignments:
    """`own`: experts of each rank; an expert that is no rank's (padding) is in no part."""
    flat = experts_NK.reshape(-1)
    index = _from_zero(flat.size)
    order = lax.sort((flat, index), num_keys=2, is_stable=False)[1]
    place = lax.sort((order, index), num_keys=1, is_stable=False)[1]
    of_expert = jnp.sum(flat[None] == _from_zero(rule.ranks * own)[:, None], axis=1, dtype=jnp.int32)
    count_PE = of_expert.reshape(rule.ranks, own)
    count = jnp.sum(count_PE, axis=1, dtype=jnp.int32)
    start, owner = jnp.cumsum(count) - count, flat // own
    within = place - _picked(owner, start)
    shape = experts_NK.shape
    arriving = rule.exchanged(count_PE)
    return Assignments(order, start, count, owner.reshape(shape), within.reshape(shape), of_expert, arriving)


def _picked(index: jax.Array, table: jax.Array) -> jax.Array:
    """table [..., n] at `index` of a short last dim, 0 for an index outside: by comparison, which is faster than a
    gather. index [...], or [..., m] with a table for all m."""
    is_it = index[..., None] == _from_zero(table.shape[-1], index.ndim)
    table = table.reshape(*[1] * (index.ndim + 1 - table.ndim), *table.shape)
    return jnp.sum(jnp.where(is_it, table, 0), axis=-1, dtype=jnp.int32)


def _from_zero(n: int, dims_before: int = 0) -> jax.Array:
    """0 .. n - 1 (int32) along the last of dims that are 1."""
    return jnp.arange(n, dtype=jnp.int32).reshape(*[1] * dims_before, n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of a round on the rank of the experts, int32: of each row the slot that it comes from (rank x A + place),
    and whether it is one at all or fills a tile [R]; of each slot its row [P A] (of a free slot row 0, which is worked
    on: others may hold anything)."""

    slot: jax.Array
    real: jax.Array
    row: jax.Array
    tiles: Tiles


def lay_out(arriving_PE: jax.Array, number: jax.Array, places: int, tile: int) -> Layout:
    """Of round `number`: places [number A, (number + 1) A) of each rank's part, which is sorted by expert.

    The rows of an expert begin at a tile and are ordered by rank. R = (P A // tile + E) x tile is what any routing
    needs, each expert having a tile at least.
    """
    P, E = arriving_PE.shape
    whole_end_PE = jnp.cumsum(arriving_PE, axis=1)
    end_PE, begin_PE = (
        jnp.clip(border - number * places, 0, places) for border in (whole_end_PE, whole_end_PE - arriving_PE)
    )
    until_PE = jnp.cumsum(end_PE - begin_PE, axis=0)  # rows of an expert up to this rank's
    before_PE = until_PE - (end_PE - begin_PE)
    tiles_E = jnp.maximum((until_PE[-1] + tile - 1) // tile, 1)
    last_E = jnp.cumsum(tiles_E)
    first_row_E = (last_E - tiles_E) * tile

    tile_M = _from_zero(P * places // tile + E)
    group_M = jnp.minimum(jnp.sum(tile_M[:, None] >= last_E[None], axis=1, dtype=jnp.int32), E - 1)
    until_MP = _picked(group_M[:, None], until_PE)
    shift_MP = _picked(group_M[:, None], _from_zero(P)[:, None] * places + begin_PE - before_PE)
    within_MT = (tile_M * tile - _picked(group_M, first_row_E))[:, None] + _from_zero(tile, 1)
    rank_MT = jnp.sum(within_MT[:, :, None] >= until_MP[:, None], axis=2, dtype=jnp.int32)
    slot_MT = within_MT + _picked(rank_MT, shift_MP[:, None])

    place_1A = _from_zero(places, 1)
    expert_PA = jnp.sum(place_1A[:, :, None] >= end_PE[:, None], axis=2, dtype=jnp.int32)
    row_PA = place_1A + _picked(expert_PA, (first_row_E[None] + before_PE - begin_PE)[:, None])
    row_PA = jnp.where(expert_PA < E, row_PA, 0)
    return Layout(slot_MT.reshape(-1), (rank_MT < P).reshape(-1), row_PA.reshape(-1), Tiles(group_M, last_E[-1], tile))


class _Round:
    """The moves of round `number`: rows of tokens to their experts' rank, and rows of results home."""

    def __init__(self, number: jax.Array, assignments: Assignments, rule: Rule):
        (N, K), a, A = assignments.owner.shape, assignments, rule.places
        tile = tile_rows(rule.ranks * A, a.arriving.shape[1], rule.kernel)
        self.rule, self.layout = rule, lay_out(a.arriving, number, A, tile)
        first_P = a.start + number * A

        def parts(values):
            """Of values in sorted order, what goes to each rank, [P A]."""
            padded = jnp.pad(values, (0, A))
            return jnp.concatenate([lax.dynamic_slice(padded, (first_P[r],), (A,)) for r in range(rule.ranks)])

        self.assignment = parts(a.order)
        self.sent = self.assignment // K  # token of each place
        if rule.all_tokens:
            self.source = self.layout.slot // A * N + _rows(rule.exchanged(self.sent), self.layout.slot)
        owner_KN, within_KN = a.owner.T, a.within.T - number * A
        self.there = (owner_KN != rule.ranks) & (within_KN >= 0) & (within_KN < A)
        self.place = owner_KN * A + within_KN

    def weights(self, weights_NK: jax.Array) -> jax.Array:
        """Of the experts' rows, 0 for those that fill a tile: [R]."""
        weight = self.rule.exchanged(_rows(weights_NK.reshape(-1), self.assignment))
        return jnp.where(self.layout.real, _rows(weight, self.layout.slot), 0.0)

    def to_experts(self, x: jax.Array) -> jax.Array:
        """Of tokens, [N,D] or with `all_tokens` those of all ranks [P N,D], the experts' rows [R,D]."""
        if self.rule.all_tokens:
            return _rows(x, self.source)
        return _rows(self.rule.exchanged(_rows(x, self.sent)), self.layout.slot)

    def home(self, rows: jax.Array, weights_NK: jax.Array) -> list[jax.Array]:
        """Of the experts' rows [R,...] each token's times its weight, K times [N,...] float32; 0 for those that are
        not there (0 times another row, which is finite: see `Layout`)."""
        place = self.place
        if self.rule.axis is None:
            place = _rows(self.layout.row, place)
        else:
            rows = self.rule.exchanged(_rows(rows, self.layout.row))
        copies = _rows(rows, place)
        weights_NK = jnp.where(self.there.T, weights_NK, 0.0).reshape(*weights_NK.shape, *[1] * (rows.ndim - 1))
        return [weights_NK[:, k] * copies[k].astype(jnp.float32) for k in range(place.shape[0])]


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="clip")


# ---- the products ----------------------------------------------------------------------------------------------------


def _mlp(x_RD: jax.Array, matrices: ExpertWeights, tiles: Tiles, kernel: KernelName) -> jax.Array:
    hidden_RF = expert_hidden(x_RD, matrices.gate, matrices.up, tiles, kernel)
    return grouped_matmul(hidden_RF, matrices.down, tiles, kernel)


def _mlp_backward(x_RD, grad_RD, weight_R, m: ExpertWeights, sums, is_first, tiles, kernel):
    """Of weight * MLP: the gradients of x [R,D] and of the weight [R], and sums (not read if `is_first`) + those of the
    matrices m."""
    *grads_RF, weighted_RF, grad_weight_R = expert_hidden_backward(
        x_RD, grad_RD, weight_R, m.gate, m.up, m.down, tiles, kernel
    )
    grad_x_RD = grouped_matmul_transposed(grads_RF, (m.gate, m.up), tiles, kernel)
    gate, up = grouped_outer(x_RD, grads_RF, (sums.gate, sums.up), is_first, tiles, kernel)
    (down,) = grouped_outer(weighted_RF, (grad_RD,), (sums.down,), is_first, tiles, kernel)
    return grad_x_RD, grad_weight_R, ExpertWeights(gate, up, down)


def _one_group(kernel: KernelName, *rows: jax.Array) -> tuple[Tiles, list[jax.Array]]:
    """Tiles of all rows for one matrix, and the rows, with zeros up to whole tiles."""
    N = rows[0].shape[0]
    T = tile_rows(N, 1, kernel)
    M = -(-N // T)
    padded = [jnp.pad(z, ((0, M * T - N), *[(0, 0)] * (z.ndim - 1))) for z in rows]
    return Tiles(jnp.zeros(M, jnp.int32), jnp.full((), M, jnp.int32), T), padded


# ---- the rounds ------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _all_rounds(x_ND, weights_NK, shared_weight_N, shards, assignments, rounds, rule):
    """The sum of all rounds, in x's dtype. A loop whose length is known only when it runs has no gradient of its own:
    the backward is a second loop, which keeps nothing of the first."""
    return _all_rounds_fwd(x_ND, weights_NK, shared_weight_N, shards, assignments, rounds, rule)[0]


def _all_rounds_fwd(x_ND, weights_NK, shared_weight_N, shards, assignments, rounds, rule):
    (chosen, shared), x = rule.access.whole(shards), rule.of_all(x_ND) if rule.all_tokens else x_ND

    def add(number, total_ND):
        moves = _Round(number, assignments, rule)
        weighted = moves.home(_mlp(moves.to_experts(x), chosen, moves.layout.tiles, rule.kernel), weights_NK)
        return functools.reduce(jnp.add, weighted, total_ND.astype(jnp.float32)).astype(x_ND.dtype)

    every, (x_RD,) = _one_group(rule.kernel, x_ND)
    shared_ND = _mlp(x_RD, shared, every, rule.kernel)[: x_ND.shape[0]].astype(jnp.float32)
    total_ND = _rounds(rounds, add, shared_weight_N[:, None] * shared_ND, rule)
    return total_ND, (x_ND, weights_NK, shared_weight_N, shards, assignments, rounds)


def _all_rounds_bwd(rule, residuals, grad_ND):
    x_ND, weights_NK, shared_weight_N, shards, assignments, rounds = residuals
    (chosen, shared), kernel, N = rule.access.whole(shards), rule.kernel, x_ND.shape[0]
    x, grad = (rule.of_all(z) if rule.all_tokens else z for z in (x_ND, grad_ND))

    def add(number, totals):
        moves = _Round(number, assignments, rule)
        # The second move has to wait for the shared expert's work: or the compiler leaves that for after both moves,
        # which take as long.
        late_grad, (total_x_ND, total_weights_NK, sums) = lax.optimization_barrier((grad, totals))
        x_RD, grad_RD = moves.to_experts(x), moves.to_experts(late_grad)
        grad_x_RD, grad_weight_R, sums = _mlp_backward(
            x_RD, grad_RD, moves.weights(weights_NK), chosen, sums, number == 0, moves.layout.tiles, kernel
        )
        once_NK = jnp.ones_like(weights_NK)
        total_x_ND = functools.reduce(jnp.add, moves.home(grad_x_RD, once_NK), total_x_ND.astype(jnp.float32))
        total_weights_NK += jnp.stack(moves.home(grad_weight_R, once_NK), axis=1)
        return total_x_ND.astype(x_ND.dtype), total_weights_NK, sums

    sums, shared_sums = jax.tree.map(lambda matrix: lax.empty(matrix.shape, jnp.float32), (chosen, shared))
    every, (x_RD, grad_RD, weight_R) = _one_group(kernel, x_ND, grad_ND, shared_weight_N)
    grad_x_RD, grad_weight_R, grad_shared = _mlp_backward(
        x_RD, grad_RD, weight_R, shared, shared_sums, jnp.ones((), bool), every, kernel
    )
    start = grad_x_RD[:N], jnp.zeros_like(weights_NK), sums
    grad_x_ND, grad_weights_NK, grad_chosen = _rounds(rounds, add, start, rule)
    grad_shards = rule.access.reduced((grad_chosen, grad_shared))
    return grad_x_ND, grad_weights_NK, grad_weight_R[:N], grad_shards, None, None


_all_rounds.defvjp(_all_rounds_fwd, _all_rounds_bwd)


def _rounds(rounds, add, start, rule):
    """What add(number, total) makes of `start` in every round. The first, which there always is, stands before the
    loop, so that the compiler can run other work beside its moves."""
    total = add(jnp.zeros((), jnp.int32), start)
    if rule.axis is None:
        return total
    with jax.named_scope("usually_skipped"):  # so app.plan counts a loop whose number of trips no program tells
        return lax.while_loop(
            lambda state: state[0] < rounds,
            lambda state: (state[0] + 1, add(*state)),
            (jnp.ones((), jnp.int32), total),
        )[1]
