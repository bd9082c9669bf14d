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

from app.ops.grouped_matmul import (
    KernelName,
    Tiles,
    expert_hidden,
    expert_hidden_backward,
    grouped_matmul,
    grouped_matmul_transposed,
    grouped_outer,
    tile_rows,
)

Shards = Any  # this rank's parts of the experts' matrices: a tree of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """gate and up [E,D,F], down [E,F,D]: whole, in the compute dtype; as gradients float32."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


@dataclasses.dataclass(frozen=True)
class Access:
    """How the whole matrices come from this rank's parts, and how the parts' gradient comes from the matrices'.

    Handed in, and not differentiated through, because the matrices are in the compute dtype while their gradient is a
    float32 sum that goes to the reduction as it is: a cast there and back reads and writes it all.
    """

    whole: Callable[[Shards], ExpertWeights] = lambda shards: shards
    reduced: Callable[[ExpertWeights], Shards] = lambda gradient: gradient


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
    shards: Shards,
    *,
    num_experts: int,
    access: Access = Access(),
    exchange: Exchange = Exchange(),
    kernel: KernelName = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum over k of weight * MLP of expert k [N,D] in x's dtype, rounds, dropped assignments of this rank).

    x [N,D] in the compute dtype; experts int32 [N,K], `num_experts` for none; weights [N,K] float32; shards: what
    `access` makes matrices of, rank r of `exchange.axis` having the r-th part of the experts. rounds and dropped:
    float32 scalars.
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
    result_ND = _all_rounds(x_ND, weights_NK, shards, assignments, rounds, rule)
    dropped = jnp.sum(jnp.maximum(assignments.count - rounds * places, 0), dtype=jnp.int32)
    return result_ND, rounds.astype(jnp.float32), dropped.astype(jnp.float32)


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
    rank's part. arriving [P,E]: how many assignments each of this rank's experts gets from each rank.
    """

    order: jax.Array
    start: jax.Array
    count: jax.Array
    owner: jax.Array
    within: jax.Array
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
    return Assignments(order, start, count, owner.reshape(shape), within.reshape(shape), rule.exchanged(count_PE))


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
    and whether it is one at all or fills a tile [R]; of each slot its row [P A] (of a free slot: any)."""

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

    def home(self, rows: jax.Array) -> list[jax.Array]:
        """Of the experts' rows [R,...] each token's, K times [N,...] float32, 0 for what is not there."""
        place = self.place
        if self.rule.axis is None:
            place = _rows(self.layout.row, place)
        else:
            rows = self.rule.exchanged(_rows(rows, self.layout.row))
        copies = _rows(rows, place)
        there = self.there.reshape(*self.there.shape, *[1] * (rows.ndim - 1))
        return [jnp.where(there[k], copies[k].astype(jnp.float32), 0.0) for k in range(place.shape[0])]


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="clip")


# ---- the rounds ------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _all_rounds(x_ND, weights_NK, shards, assignments, rounds, rule):
    """The sum of all rounds, in x's dtype. A loop whose length is known only when it runs has no gradient of its own:
    the backward is a second loop, which keeps nothing of the first."""
    return _all_rounds_fwd(x_ND, weights_NK, shards, assignments, rounds, rule)[0]


def _all_rounds_fwd(x_ND, weights_NK, shards, assignments, rounds, rule):
    matrices, x = rule.access.whole(shards), rule.of_all(x_ND) if rule.all_tokens else x_ND

    def add(number, total_ND):
        moves = _Round(number, assignments, rule)
        tiles, kernel = moves.layout.tiles, rule.kernel
        hidden_RF = expert_hidden(moves.to_experts(x), matrices.gate, matrices.up, tiles, kernel)
        results = moves.home(grouped_matmul(hidden_RF, matrices.down, tiles, kernel))
        weighted = [weights_NK[:, k, None] * result_ND for k, result_ND in enumerate(results)]
        return _added(total_ND, weighted, number == 0)

    total_ND = _rounds(rounds, add, lax.empty(x_ND.shape, x_ND.dtype), rule)
    return total_ND, (x_ND, weights_NK, shards, assignments, rounds)


def _all_rounds_bwd(rule, residuals, grad_ND):
    x_ND, weights_NK, shards, assignments, rounds = residuals
    matrices, kernel = rule.access.whole(shards), rule.kernel
    x, grad = (rule.of_all(z) if rule.all_tokens else z for z in (x_ND, grad_ND))

    def add(number, total):
        total_x_ND, total_weights_NK, sums = total
        moves = _Round(number, assignments, rule)
        tiles, is_first, m = moves.layout.tiles, number == 0, matrices
        x_RD, grad_RD = moves.to_experts(x), moves.to_experts(grad)
        grad_gate_RF, grad_up_RF, weighted_RF, grad_weight_R = expert_hidden_backward(
            x_RD, grad_RD, moves.weights(weights_NK), m.gate, m.up, m.down, tiles, kernel
        )
        grads_RF = grad_gate_RF, grad_up_RF
        grad_x_RD = grouped_matmul_transposed(grads_RF, (m.gate, m.up), tiles, kernel)
        return (
            _added(total_x_ND, moves.home(grad_x_RD), is_first),
            _added(total_weights_NK, [jnp.stack(moves.home(grad_weight_R), axis=1)], is_first),
            ExpertWeights(
                *grouped_outer(x_RD, grads_RF, (sums.gate, sums.up), is_first, tiles, kernel),
                *grouped_outer(weighted_RF, (grad_RD,), (sums.down,), is_first, tiles, kernel),
            ),
        )

    sums = jax.tree.map(lambda matrix: lax.empty(matrix.shape, jnp.float32), matrices)
    start = lax.empty(x_ND.shape, x_ND.dtype), lax.empty(weights_NK.shape, jnp.float32), sums
    grad_x_ND, grad_weights_NK, grad_matrices = _rounds(rounds, add, start, rule)
    return grad_x_ND, grad_weights_NK, rule.access.reduced(grad_matrices), None, None


_all_rounds.defvjp(_all_rounds_fwd, _all_rounds_bwd)


def _added(total: jax.Array, parts: list[jax.Array], is_first: jax.Array) -> jax.Array:
    """total, which the first round looks away from, and float32 parts: a float32 sum, rounded to total's dtype."""
    start = jnp.where(is_first, 0.0, total.astype(jnp.float32))
    return functools.reduce(jnp.add, parts, start).astype(total.dtype)


def _rounds(rounds, add, start, rule):
    """What add(number, total) makes of `start` in every round. There is one at least, which has to look away from what
    `start` holds; it stands before the loop, so that the compiler can run other work beside its moves."""
    total = add(jnp.zeros((), jnp.int32), start)
    if rule.axis is None:
        return total
    with jax.named_scope("usually_skipped"):  # so app.plan counts a loop whose number of trips no program tells
        return lax.while_loop(
            lambda state: state[0] < rounds,
            lambda state: (state[0] + 1, add(*state)),
            (jnp.ones((), jnp.int32), total),
        )[1]
