"""Small layers against float64, and the description of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.models import layers
from app.models import params as model_params
from app.models.gdn_mixer import l2_normalise
from tests.tiny import tiny_config


@pytest.mark.parametrize("position, bound", [(4095, 1e-4), (1_048_575, 5e-2)])
def test_rotary_tables_far_out(position, bound):
    """float32 positions are exact there; what is lost is the angle's last bits, as in every float32 formula."""
    cos, sin = layers.rotary_tables(jnp.array([[position]], jnp.int32), 64, 1e7)
    angle = position * 1e7 ** -(np.arange(0, 64, 2, dtype=np.float64) / 64)
    assert np.abs(np.asarray(cos)[0, 0] - np.cos(angle)).max() < bound
    assert np.abs(np.asarray(sin)[0, 0] - np.sin(angle)).max() < bound


def test_rotation_is_partial_and_relative():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 3, 2, 16)), jnp.float32)
    turned = layers.rotate(x, *layers.rotary_tables(jnp.array([[5, 9, 1000]], jnp.int32), 4, 1e4))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    assert (turned[..., :4] != x[..., :4]).any()
    moved = layers.rotate(x, *layers.rotary_tables(jnp.array([[15, 19, 1010]], jnp.int32), 4, 1e4))
    np.testing.assert_allclose(
        np.einsum("thk,shk->ths", turned[0], turned[0]), np.einsum("thk,shk->ths", moved[0], moved[0]), atol=1e-4
    )


def test_norm_is_centred_at_one():
    norm = layers.RMSNorm(8, 1e-6, layers.Runtime())
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    plain = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), plain, rtol=1e-5)
    norm.weight[...] = jnp.full(8, 0.5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), 1.5 * plain, rtol=1e-5)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_l2_norm_at_zero_has_a_finite_gradient():
    slope = jax.grad(lambda x: jnp.sum(l2_normalise(x)))(jnp.zeros((1, 4)))
    np.testing.assert_allclose(slope, 1000.0)


def test_a_mesh_axis_is_used_once():
    spec = model_params.ParamSpec((4, 4), "float32", ("width", "width"), lambda *_: None)
    with pytest.raises(ValueError, match="fsdp"):
        _ = spec.partition


def test_init_depends_on_seed_and_name_only():
    from jax.sharding import Mesh

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), ("data", "fsdp", "context", "expert", "tensor"))
    specs = model_params.describe(tiny_config().model)
    some = {name: specs[name] for name in ("embed", "groups.blocks.0.mixer.A_log", "groups.blocks.1.mixer.q_proj")}
    first, again = model_params.init(some, 3, mesh), model_params.init(dict(reversed(some.items())), 3, mesh)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    assert abs(float(first["embed"].std()) - 0.02) < 1e-3
    decay = np.exp(first["groups.blocks.0.mixer.A_log"])
    assert ((decay >= 0.01) & (decay <= 16)).all()
    assert (model_params.init(some, 4, mesh)["embed"] != first["embed"]).any()


def test_build_names_what_does_not_fit():
    config = tiny_config().model
    with pytest.raises(ValueError, match=r"missing: \['embed'\].*unknown: \['embedding'\]"):
        values = {name: jnp.zeros(spec.shape) for name, spec in model_params.describe(config).items()}
        values["embedding"] = values.pop("embed")
        model_params.build(config, layers.Runtime(), values)
