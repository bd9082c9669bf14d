"""AdamW with global-norm clipping, and the learning-rate schedule.

The learning rate is applied by the training step from its own step number, so the rate that is logged is the rate that
was used, after a resume and after skipped steps too.
"""

from collections.abc import Mapping

import optax

from app.config import OptimizerConfig
from app.models.params import ParamSpec


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Update number (1, 2, ..., steps) -> learning rate: linear warm-up, then cosine to final_learning_rate."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),  # a trial run may end inside the warm-up
        end_value=config.final_learning_rate,
    )


def direction(config: OptimizerConfig, specs: Mapping[str, ParamSpec]) -> optax.GradientTransformation:
    """Gradient -> step direction before the learning rate: clip, Adam, decoupled weight decay.

    Only matrices decay (embedding, projections, convolution), not norms, A_log, dt_bias or other vectors.
    `moment_dtype` is that of the first moment; the second stays float32, because at b2 = 0.999 a bfloat16 sum no longer
    moves.
    """
    decayed = {name: spec.is_matrix for name, spec in specs.items()}
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.moment_dtype),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )
