"""The schedule, what decays, and the moments' dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.config import OptimizerConfig
from app.models.params import ParamSpec
from app.training import optim
from tests.tiny import tiny_config


def config(**changes) -> OptimizerConfig:
    return tiny_config(**{f"optimizer.{name}": value for name, value in changes.items()}).optimizer


def test_schedule_warms_up_and_ends_where_it_says():
    rate = optim.schedule(config(learning_rate=1.0, warmup_steps=10, final_learning_rate=0.1), steps=100)
    values = np.array([rate(update) for update in range(101)])
    assert values[1] == pytest.approx(0.1)  # the first update is not wasted
    assert values[10] == pytest.approx(1.0)
    assert values[55] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)
    assert (np.diff(values[10:]) <= 0).all()


def test_decay_reaches_matrices_only():
    def spec(*logical):
        return ParamSpec((2,) * len(logical), "float32", logical, lambda *_: None)

    specs = {
        "projection": spec("layers", "width", "heads"),
        "norm": spec("layers", None),
        "A_log": spec("heads"),
        "embed": spec("vocab", "width"),
        "conv": spec("layers", None, "heads", None),
    }
    params = {name: jnp.full(s.shape, 3.0) for name, s in specs.items()}
    chain = optim.direction(config(weight_decay=0.5, clip_norm=1.0), specs)
    zeros = {name: jnp.zeros(s.shape) for name, s in specs.items()}
    with jax.numpy_dtype_promotion("standard"):  # as in the training step
        updates, _ = chain.update(zeros, chain.init(params), params)
    decayed = {name for name, update in updates.items() if update.any()}
    assert decayed == {"projection", "embed", "conv"}
    np.testing.assert_allclose(updates["embed"], 1.5)


def test_only_the_first_moment_takes_the_short_dtype():
    specs = {"w": ParamSpec((4, 4), "float32", ("width", "mlp"), lambda *_: None)}
    state = optim.direction(config(moment_dtype="bfloat16"), specs).init({"w": jnp.ones((4, 4))})
    adam = next(part for part in state if hasattr(part, "mu"))
    assert adam.mu["w"].dtype == jnp.bfloat16
    assert adam.nu["w"].dtype == jnp.float32
