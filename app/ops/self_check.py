"""Start-up check: the sharded recurrence and convolution against one rank, on a short made-up sequence.

A wrong order of devices or a rank that talks to the wrong neighbour would train without any error message. The trainer
runs `sequence_errors` once inside its shard_map and hands the result to `require_small`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from app.ops.affine_scan import AxisName, sequence_axis
from app.ops.conv import causal_conv
from app.ops.gdn import gated_delta_rule

# float32 on both sides: the errors seen are below 1e-6, a swapped pair of ranks gives about 1.
TOLERANCE = 1e-4


def sequence_errors(
    axis_name: AxisName, *, tokens: int = 12, key_dim: int = 16, value_dim: int = 8, window: int = 4
) -> dict[str, jax.Array]:
    """Relative errors of outputs and gradients, over all ranks; call it inside shard_map.

    The sequence has `tokens` tokens a rank (at least window - 1), documents that cross ranks, and is the same on every
    rank, which works it out whole and its own part with the others.

    Returns:
      name -> float32 scalar, the same on every rank of the axis; zeros where time is not sharded.
    """
    axis = sequence_axis(axis_name)
    names = ("gated_delta_rule", "gated_delta_rule gradient", "causal_conv", "causal_conv gradient")
    if axis is None:
        return {name: jnp.zeros((), jnp.float32) for name in names}
    whole = _example(tokens * axis.size, key_dim, value_dim)
    weight = jnp.linspace(-1.0, 1.0, window * value_dim, dtype=jnp.float32).reshape(window, value_dim)

    def part(x):
        return lax.dynamic_slice_in_dim(x, axis.rank * tokens, tokens, axis=1)

    def rule(v, example, axis_name):
        q, k, g, beta, ids = (example[name] for name in ("q", "k", "g", "beta", "ids"))
        return gated_delta_rule(q, k, v, g, beta, segment_ids=ids, axis_name=axis_name, chunk_size=8)

    def conv(v, example, axis_name):
        return causal_conv(v[:, :, 0], weight, segment_ids=example["ids"], axis_name=axis_name)[:, :, None]

    parts = {name: part(x) for name, x in whole.items()}
    found = []
    for function in (rule, conv):
        wanted, pull = jax.vjp(lambda v, f=function: f(v, whole, None), whole["v"])
        got, pull_part = jax.vjp(lambda v, f=function: f(v, parts, axis), parts["v"])
        # The cotangents depend on the place in the sequence, as the values do.
        found += [_relative(got, part(wanted), axis.names)]
        found += [_relative(pull_part(parts["v"])[0], part(pull(whole["v"])[0]), axis.names)]
    return dict(zip(names, found, strict=True))


def require_small(errors: Mapping[str, float], setting: str) -> None:
    """Stop on a mismatch.

    Args:
      errors: what `sequence_errors` returned, as host numbers.
      setting: the configuration to name, such as "mesh.context=8, mesh.expert=1".

    Raises:
      ValueError: an error is above TOLERANCE or not a number.
    """
    wrong = {name: float(value) for name, value in errors.items() if not float(value) <= TOLERANCE}
    if wrong:
        listed = ", ".join(f"{name} {value:.2g}" for name, value in wrong.items())
        raise ValueError(
            f"{setting}: the sharded sequence does not match a single rank (relative errors: {listed}; allowed "
            f"{TOLERANCE:g}). A sequential recurrence needs contiguous slices in rank order: check the order of the "
            "devices along the sequence axes and any reordering of the batch."
        )


def _example(tokens: int, key_dim: int, value_dim: int) -> dict[str, jax.Array]:
    """One row, one key head and one value head; documents of uneven lengths, some longer than a rank's part."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (1, tokens, 1, key_dim), jnp.float32) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    starts = jax.random.bernoulli(keys[5], 1 / 30, (1, tokens))
    return {
        "q": q,
        "k": k,
        "v": jax.random.normal(keys[2], (1, tokens, 1, value_dim), jnp.float32),
        "g": -0.1 * jax.random.uniform(keys[3], (1, tokens, 1), jnp.float32),
        "beta": jax.random.uniform(keys[4], (1, tokens, 1), jnp.float32),
        "ids": jnp.cumsum(starts.astype(jnp.int32), axis=1),
    }


def _relative(got: jax.Array, wanted: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Norm of the difference over the norm of what is wanted, over all ranks."""
    squares = jnp.stack([jnp.sum(jnp.square(got - wanted)), jnp.sum(jnp.square(wanted))])
    difference, size = lax.psum(squares, names)
    return jnp.sqrt(difference / size)
