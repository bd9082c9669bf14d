"""Causal depthwise convolution over time, with document masks and an explicit halo between sequence ranks.

Letters: B batch, T time (this rank's part), W window, X channels.

    y_t = sum_j w[j] x_{t - (W-1) + j}      over the taps j whose token lies in the same document as token t

A rank needs the last W-1 tokens of the rank before it and nothing else: one `ppermute` of [B, W-1, X] forward, one of
the same size backward, whatever the length of the sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from app.ops.affine_scan import AxisName, SequenceAxis, sequence_axis


def causal_conv(
    x: jax.Array, w: jax.Array, *, segment_ids: jax.Array | None = None, axis_name: AxisName = None
) -> jax.Array:
    """Causal depthwise convolution before the activation.

    Args:
      x: [B, T, X], any floating dtype. Under `shard_map` this rank's slice; slices lie in rank order.
      w: [W, X]; the last tap is the current token.
      segment_ids: [B, T] int32; a tap never crosses a change of id, also not at a rank border. None: one document.
      axis_name: mesh axis, tuple of axes (major first) or SequenceAxis that time is sharded over; None: not sharded.

    Returns:
      [B, T, X] in x's dtype; products and sums are float32. The backward returns this rank's partial cotangent of `w`
      (not summed over ranks).

    Raises:
      ValueError: shapes disagree, or a rank holds fewer than W-1 tokens while the sequence is sharded.
    """
    if x.ndim != 3 or w.ndim != 2 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"causal_conv: expected x [B, T, X] and w [W, X], got {x.shape} and {w.shape}")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"causal_conv: segment_ids must be [B, T] = {x.shape[:2]}, got {segment_ids.shape}")
    halo, axis = w.shape[0] - 1, sequence_axis(axis_name)
    if axis is not None and x.shape[1] < halo:
        raise ValueError(
            f"causal_conv: a rank holds {x.shape[1]} tokens but the window of {w.shape[0]} needs {halo} from its "
            "neighbour; use fewer sequence ranks or a longer sequence"
        )
    return _conv(axis, x, w, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(axis: SequenceAxis | None, x: jax.Array, w: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    return _conv_forward(axis, x, w, segment_ids)[0]


def _conv_forward(axis: SequenceAxis | None, x: jax.Array, w: jax.Array, segment_ids: jax.Array | None):
    window = w.shape[0]
    x_ext = _with_halo(x, window - 1, axis)
    seg_ext = None if segment_ids is None else _with_halo(segment_ids, window - 1, axis)
    w32 = w.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for j, (tap, mask) in enumerate(_taps(x_ext, seg_ext, window)):
        y += jnp.where(mask, tap * w32[j][None, None], 0.0)
    return y.astype(x.dtype), (x_ext[:, : window - 1], x, w, seg_ext)


def _conv_backward(axis: SequenceAxis | None, residuals: Any, dy: jax.Array):
    halo, x, w, seg_ext = residuals
    window, length = w.shape[0], x.shape[1]
    x_ext = jnp.concatenate([halo, x], axis=1)
    w32, dy32 = w.astype(jnp.float32), dy.astype(jnp.float32)
    dx_ext = jnp.zeros(x_ext.shape, jnp.float32)
    dw = []
    for j, (tap, mask) in enumerate(_taps(x_ext, seg_ext, window)):
        dy_j = jnp.where(mask, dy32, 0.0)
        dw.append(jnp.sum(dy_j * tap, axis=(0, 1)))
        dx_ext += jnp.pad(dy_j * w32[j][None, None], ((0, 0), (j, window - 1 - j), (0, 0)))
    dx = dx_ext[:, window - 1 :]
    if window > 1 and axis is not None:
        # What this rank owes the tokens it borrowed goes home; the last rank receives zeros.
        dx_home = axis.shift(dx_ext[:, : window - 1], -1)
        dx = dx.at[:, length - window + 1 :].add(dx_home)
    d_segments = None if seg_ext is None else np.zeros((x.shape[0], length), jax.dtypes.float0)
    return dx.astype(x.dtype), jnp.stack(dw).astype(w.dtype), d_segments


_conv.defvjp(_conv_forward, _conv_backward)


def _with_halo(x: jax.Array, halo: int, axis: SequenceAxis | None) -> jax.Array:
    """[B, T, ...] -> [B, halo + T, ...]: the last `halo` tokens of the previous rank, zeros before the first token."""
    if halo == 0:
        return x
    if axis is None:
        head = jnp.zeros((x.shape[0], halo, *x.shape[2:]), x.dtype)
    else:
        head = axis.shift(x[:, x.shape[1] - halo :], 1)
    return jnp.concatenate([head, x], axis=1)


def _taps(x_ext: jax.Array, seg_ext: jax.Array | None, window: int):
    """Pairs (tap j as float32 [B, T, X], mask [B, T, 1] or True), j = 0 .. W-1 from the oldest token to the current."""
    length = x_ext.shape[1] - window + 1
    taps = [x_ext[:, j : j + length].astype(jnp.float32) for j in range(window)]
    if seg_ext is None:
        return [(tap, np.True_) for tap in taps]
    # The tap `lag` tokens back counts if no border lies between: equal ids alone would join two runs of one id
    # (padding around a short document).
    joined = seg_ext[:, 1:] == seg_ext[:, :-1]
    masks = [jnp.ones((x_ext.shape[0], length), bool)]
    for lag in range(1, window):
        start = window - 1 - lag
        masks.append(masks[-1] & joined[:, start : start + length])
    return [(tap, mask[..., None]) for tap, mask in zip(taps, reversed(masks), strict=True)]
