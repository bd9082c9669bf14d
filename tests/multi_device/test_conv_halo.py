"""The causal convolution over a sharded sequence: values, this rank's own gradients, and what the halo moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops.affine_scan import SequenceAxis
from app.ops.conv import causal_conv
from tests.reference import gdn_reference as reference
from tests.unit.ops.gdn_base import error, random_documents

W, X = 4, 5


def example(P, tokens=6, B=8):
    """Documents shorter than the window are among the rows."""
    rng = np.random.default_rng(P)
    T = tokens * P
    x, w, dout = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, X), (W, X), (B, T, X)))
    return x, w, dout, random_documents(rng, B, T)


def run(P, axis, x, w, dout, ids, gradient="inside", reduce="once"):
    names = axis if isinstance(axis, tuple) else (axis,)
    mesh = Mesh(np.array(jax.devices()[:P]).reshape((P,) if len(names) == 1 else (P // 2, 2)), names)
    time = PS(None, names)
    conv = functools.partial(causal_conv, axis_name=axis)

    def inside(x, w, dout, ids):
        out, pull = jax.vjp(lambda x, w: conv(x, w, segment_ids=ids), x, w)
        dx, dw = pull(dout)
        dw = lax.psum(dw, names)
        return out, dx, dw if reduce == "once" else lax.psum(dw, names)

    id_spec = PS() if ids is None else time
    if gradient == "inside":
        specs, outs = (time, PS(), time, id_spec), (time, time, PS())
        call = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    else:
        sharded = jax.shard_map(
            lambda x, w, ids: conv(x, w, segment_ids=ids),
            mesh=mesh, in_specs=(time, PS(), id_spec), out_specs=time, check_vma=False,
        )  # fmt: skip

        def call(x, w, dout, ids):
            out, pull = jax.vjp(lambda x, w: sharded(x, w, ids), x, w)
            return out, *pull(dout)

    return [np.asarray(y, np.float64) for y in jax.jit(call)(x, w, dout, ids)]


def worst(P, got, x, w, dout, ids):
    """Largest relative error over ranks of out and dx, and of dw."""
    want = (reference.causal_conv(x, w, segment_ids=ids), *reference.causal_conv_vjp(x, w, dout, segment_ids=ids))
    parts = [
        zip(np.array_split(a, P, axis=1), np.array_split(b, P, axis=1), strict=True)
        for a, b in zip(got, want, strict=True)
    ]
    return max(*(error(a, b) for pairs in parts[:2] for a, b in pairs), error(got[2], want[2]))


@pytest.mark.parametrize(("P", "axis"), [(2, "c"), (3, "c"), (8, "c"), (8, ("c", "e"))])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_reference_on_every_rank(P, axis, packed):
    *arrays, ids = example(P)
    ids = ids if packed else None
    for gradient in ("inside", "outside"):
        assert worst(P, run(P, axis, *arrays, ids, gradient=gradient), *arrays, ids) < 1e-6, gradient


def test_a_rank_may_hold_only_the_halo():
    *arrays, ids = example(8, tokens=W - 1)
    assert worst(8, run(8, "c", *arrays, ids), *arrays, ids) < 1e-6


def test_negative_controls(monkeypatch):
    *arrays, ids = example(4)
    assert worst(4, run(4, "c", *arrays, ids, reduce="twice"), *arrays, ids) > 1, "cotangent of w summed twice"
    shift = SequenceAxis.shift
    with monkeypatch.context() as patch:
        patch.setattr(SequenceAxis, "shift", lambda self, x, distance: jnp.zeros_like(x))
        assert worst(4, run(4, "c", *arrays, ids), *arrays, ids) > 0.05, "no halo"
    with monkeypatch.context() as patch:
        patch.setattr(SequenceAxis, "shift", lambda self, x, distance: shift(self, x, -distance))
        assert worst(4, run(4, "c", *arrays, ids), *arrays, ids) > 0.05, "halo of the wrong neighbour"


def test_the_halo_moves_exactly_the_window_but_one():
    """Forward: W-1 tokens and their segment ids; backward: W-1 tokens; at any length."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("c",))
    time = PS(None, "c")

    def both(x, w, dout, ids):
        out, pull = jax.vjp(lambda x, w: causal_conv(x, w, segment_ids=ids, axis_name="c"), x, w)
        return out, *pull(dout)

    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=(time, PS(), time, time), out_specs=(time, time, time), check_vma=False
    )
    for tokens in (64, 256):
        x, ids = jnp.zeros((2, 4 * tokens, X), jnp.bfloat16), jnp.zeros((2, 4 * tokens), jnp.int32)
        jaxpr = jax.make_jaxpr(mapped)(x, jnp.zeros((W, X), jnp.bfloat16), x, ids)
        lines = [line for line in str(jaxpr).splitlines() if "ppermute[" in line]
        sent = sorted(line.split(":")[1].split()[0] for line in lines)
        assert sent == [f"bf16[2,{W - 1},{X}]", f"f32[2,{W - 1},{X}]", f"i32[2,{W - 1}]"]


def test_fewer_tokens_than_the_halo_are_refused():
    mesh = Mesh(np.array(jax.devices()), ("c",))
    mapped = jax.shard_map(
        lambda x, w: causal_conv(x, w, axis_name="c"),
        mesh=mesh, in_specs=(PS(None, "c"), PS()), out_specs=PS(None, "c"), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a rank holds 2 tokens but the window of 4 needs 3 from its neighbour"):
        mapped(jnp.zeros((1, 16, X)), jnp.zeros((W, X)))
