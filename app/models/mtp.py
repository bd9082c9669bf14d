"""Multi-token prediction: one more layer that says the token after the next, for a second loss beside the first.

Letters: B batch, T time, D width, I two widths. The layer is that of published checkpoints (`mtp.*`) in the order in
which vLLM evaluates it: u_t = fc [norm(embedding of x_{t+1}) | norm(the model's output at t)], one softmax layer, a
norm, and the model's own head; position t predicts x_{t+2}.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from app.config import ModelConfig
from app.models import layers
from app.models.attn_mixer import AttentionInputs
from app.models.moe import Routing
from app.ops.affine_scan import SequenceAxis


class Mtp(nnx.Module):
    """Output of the model and embeddings of the next tokens [B,T,D] -> [B,T,D] for the head, Routing (None: dense)."""

    def __init__(self, block: nnx.Module, config: ModelConfig, runtime: layers.Runtime):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.runtime = runtime
        init = layers.normal(config.initializer_range)
        self.embedding_norm = layers.RMSNorm(D, eps, runtime)
        self.hidden_norm = layers.RMSNorm(D, eps, runtime)
        self.fc = layers.make_param((2 * D, D), ("width", None), init, runtime.precision.params)
        self.block = block
        self.norm = layers.RMSNorm(D, eps, runtime)

    def __call__(
        self, hidden_BTD: jax.Array, next_BTD: jax.Array, segment_ids_BT: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, Routing | None]:
        both_BTI = jnp.concatenate([self.embedding_norm(next_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        u_BTD = jnp.einsum("bti,id->btd", both_BTI, layers.gathered(self.fc, self.runtime))
        out_BTD, routing = self.block(u_BTD, segment_ids_BT, inputs)
        return self.norm(out_BTD), routing


def second_targets(
    targets_BT: jax.Array, mask_BT: jax.Array, axis: SequenceAxis | None
) -> tuple[jax.Array, jax.Array]:
    """Each position's token after the next and whether it counts, from those of the next tokens.

    It counts where the next token does and the one after it is of the same document. The last position of the whole
    sequence has none: the batch looks one token ahead, not two. Under shard_map `axis` is the sequence's.
    """

    def from_next(x_BT):
        first_B1 = x_BT[:, :1]
        after_B1 = axis.shift(first_B1, -1) if axis is not None else jnp.zeros_like(first_B1)
        return jnp.concatenate([x_BT[:, 1:], after_B1], axis=1)

    counts_BT = mask_BT & (from_next(mask_BT.astype(jnp.int32)) > 0)
    return from_next(targets_BT), counts_BT
