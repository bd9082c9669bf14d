"""Affine maps of a recurrent state, and their exclusive prefix composition over the ranks of a mesh axis.

A rank's part of a linear recurrence is one affine map, state_out = transition state_in + bias. Which state enters a rank
is then an exclusive prefix composition over the ranks before it. The maps are associative, not commutative: order counts.

Letters: B batch, H heads, K key dim, V value dim, P ranks. Maps and states are float32, products have HIGHEST precision.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...] | None


class AffineMap(NamedTuple):
    """state -> transition state + bias, with transition [..., K, K] and bias [..., K, V]."""

    transition: jax.Array
    bias: jax.Array


def axis_size(axis_name: AxisName) -> int:
    """Number of ranks along the axis or the product over a tuple of axes; 1 for None."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def neighbour_permute(x: jax.Array, axis_name: AxisName, distance: int) -> jax.Array:
    """What the rank `distance` places before this one holds (after it, if negative); zeros where there is none."""
    size = axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(r, r + distance) for r in range(size) if 0 <= r + distance < size])


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """The map that applies `earlier` first: (A2 A1, A2 B1 + B2)."""
    return AffineMap(matmul(later.transition, earlier.transition), apply(later, earlier.bias))


def apply(affine: AffineMap, state: jax.Array) -> jax.Array:
    """transition state + bias, [..., K, V]."""
    return matmul(affine.transition, state) + affine.bias


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched float32 product with HIGHEST precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def exclusive_scan(local, axis_name, initial_state=None, reverse=False):
    """The state that enters this rank's part of the sequence (stage 1: plain form)."""
    size = axis_size(axis_name)
    rank = lax.axis_index(axis_name)
    sign = -1 if reverse else 1
    rank = size - 1 - rank if reverse else rank
    a, b = local
    if initial_state is not None:
        b = jnp.where(rank == 0, matmul(a, initial_state) + b, b)
    d = 1
    while d < size - 1:
        a_in, b_in = neighbour_permute(a, axis_name, sign * d), neighbour_permute(b, axis_name, sign * d)
        has = rank >= d
        b = jnp.where(has, matmul(a, b_in) + b, b)
        a = jnp.where(has, matmul(a, a_in), a)
        d *= 2
    state = neighbour_permute(b, axis_name, sign)
    return state if initial_state is None else jnp.where(rank == 0, initial_state, state)
