"""The hybrid Qwen3.5 text model: the layer pattern is data, layers are scanned in groups of one pattern.

Letters: B batch, T time, D width, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from app.cluster import sharding
from app.config import LayerKind, ModelConfig
from app.models import layers
from app.models.attn_mixer import AttentionInputs, AttnMixer, attention_inputs
from app.models.gdn_mixer import GdnMixer
from app.models.moe import MoE, Routing
from app.models.mtp import Mtp
from app.ops import attention, experts, gdn

# What a layer keeps for its backward, by the name in the config. "exchanges" keeps the small results that came out of
# communication along the sequence (the recurrence's entry states, attention's output and logsumexp), and the experts'
# routes: the backward then recomputes everything local, but repeats no collective of the sequence and no sort.
REMAT_POLICIES: dict[str, Callable] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "exchanges": jax.checkpoint_policies.save_only_these_names(
        *gdn.STATE_NAMES, attention.OUT_NAME, attention.LSE_NAME, experts.ROUTE_NAME
    ),
}

# Elements of the embedding that are gathered at once: whole, it is the largest array of a model. A small table stays in
# one piece: between several CPU processes the collectives of such a loop met those beside it (Gloo ended them).
EMBEDDING_PIECE = 2**28


def _pieces(rows: int, width: int) -> int:
    """The smallest number that divides `rows` into pieces of at most EMBEDDING_PIECE elements."""
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n * width <= EMBEDDING_PIECE)


def rematerialised(apply: Callable, remat: str) -> Callable:
    """`apply` under the remat policy named `remat` ("none": everything is kept)."""
    if remat == "none":
        return apply
    return jax.checkpoint(apply, policy=REMAT_POLICIES[remat], prevent_cse=False)  # only ever called inside a scan


class Block(nnx.Module):
    """One pre-norm layer: h + mixer(norm(h)), then h + mlp(norm(h)). [B,T,D] -> [B,T,D], Routing (None: no experts)."""

    def __init__(self, kind: LayerKind, config: ModelConfig, runtime: layers.Runtime):
        mixers: dict[str, type[GdnMixer] | type[AttnMixer]] = {
            "linear_attention": GdnMixer,
            "full_attention": AttnMixer,
        }
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = layers.RMSNorm(D, eps, runtime)
        mixer, mlp = kind
        self.mixer = mixers[mixer](config, runtime)
        self.post_norm = layers.RMSNorm(D, eps, runtime)
        if mlp == "moe":
            self.mlp = MoE(config, runtime)
        else:
            self.mlp = layers.MLP(D, config.intermediate_size, layers.normal(config.initializer_range), runtime)

    def __call__(
        self, h_BTD: jax.Array, segment_ids_BT: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, Routing | None]:
        x_BTD = self.input_norm(h_BTD)
        if isinstance(self.mixer, AttnMixer):
            h_BTD = h_BTD + self.mixer(x_BTD, inputs)
        else:
            h_BTD = h_BTD + self.mixer(x_BTD, segment_ids_BT)
        x_BTD = self.post_norm(h_BTD)
        if isinstance(self.mlp, MoE):
            mixed_BTD, routing = self.mlp(x_BTD, segment_ids_BT)
            return h_BTD + mixed_BTD, routing
        return h_BTD + self.mlp(x_BTD), None


class Group(nnx.Module):
    """The blocks of one period of the layer pattern."""

    def __init__(self, config: ModelConfig, runtime: layers.Runtime):
        self.runtime = runtime
        self.blocks = nnx.List([Block(kind, config, runtime) for kind in config.layer_pattern])

    def __call__(
        self, h_BTD: jax.Array, segment_ids_BT: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, list[Routing | None]]:
        routings = []
        for block in self.blocks:
            graphdef, state = nnx.split(block)

            def apply(state, h_BTD, segment_ids_BT, inputs, graphdef=graphdef):
                return nnx.merge(graphdef, state)(h_BTD, segment_ids_BT, inputs)

            h_BTD, routing = rematerialised(apply, self.runtime.remat)(state, h_BTD, segment_ids_BT, inputs)
            routings.append(routing)
        return h_BTD, routings


class Qwen(nnx.Module):
    """tokens, positions, segment ids [B,T] int32 -> logits [B,T,V] (float32).

    With `runtime.rules` = SHARDED it runs inside shard_map on this rank's part of everything; by default on one device.
    """

    def __init__(self, config: ModelConfig, runtime: layers.Runtime = layers.Runtime()):
        self.config = config
        self.runtime = runtime
        D, V, dtype = config.hidden_size, config.vocab_size, runtime.precision.params
        init = layers.normal(config.initializer_range)
        groups = config.num_hidden_layers // len(config.layer_pattern)

        @nnx.vmap(in_axes=(), axis_size=groups, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked_groups():
            return Group(config, runtime)

        self.embed = layers.make_param((V, D), ("vocab", "width"), init, dtype)
        self.groups = stacked_groups()
        self.final_norm = layers.RMSNorm(D, config.rms_norm_eps, runtime)
        if not config.tie_word_embeddings:
            self.lm_head = layers.make_param((D, V), ("width", "vocab"), init, dtype)
        if runtime.mtp:
            kind = ("full_attention", "moe" if config.num_experts else "dense")
            self.mtp = Mtp(Block(kind, config, runtime), config, runtime)

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """Logits of every token, for small inputs: training never forms them (see `app.training.loss`)."""
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        hidden_BTD = self.hidden(tokens_BT, positions_BT, segment_ids_BT)
        return jnp.einsum("btd,dv->btv", hidden_BTD, self.head(), preferred_element_type=jnp.float32)

    def hidden(self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """[B,T,D] after the final norm, in the compute dtype."""
        return self.hidden_and_routing(tokens_BT, positions_BT, segment_ids_BT)[0]

    def hidden_and_routing(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> tuple[jax.Array, list[Routing]]:
        """`hidden`, and for each place of the pattern that has experts the Routing of its layers, stacked by group."""
        inputs = attention_inputs(self.config, self.runtime, positions_BT, segment_ids_BT)
        graphdef, stacked = nnx.split(self.groups)

        def one_group(h_BTD, state):
            # Tied to the stream on purpose. Differentiating a scan evaluates ahead, and keeps, whatever follows from
            # its constants alone: of attention that is the mask of every pair of tiles, tokens x tokens numbers.
            tied = lax.optimization_barrier((lax.stop_gradient(h_BTD), segment_ids_BT, inputs))
            return nnx.merge(graphdef, state)(h_BTD, *tied[1:])

        h_BTD, routings = lax.scan(one_group, self._embedded(tokens_BT), stacked)
        return self.final_norm(h_BTD), [routing for routing in routings if routing is not None]

    def second_hidden(
        self, hidden_BTD: jax.Array, next_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> tuple[jax.Array, list[Routing]]:
        """Like `hidden_and_routing`, for the token after the next: from `hidden` and the next tokens."""
        inputs = attention_inputs(self.config, self.runtime, positions_BT, segment_ids_BT)
        graphdef, state = nnx.split(self.mtp)

        def apply(state, hidden_BTD, next_BTD, segment_ids_BT, inputs):
            return nnx.merge(graphdef, state)(hidden_BTD, next_BTD, segment_ids_BT, inputs)

        out_BTD, routing = rematerialised(apply, self.runtime.remat)(
            state, hidden_BTD, self._embedded(next_BT), segment_ids_BT, inputs
        )
        return out_BTD, [jax.tree.map(lambda x: x[None], routing)] if routing is not None else []

    def head(self) -> jax.Array:
        """The output projection [D, V / tensor] in the compute dtype, whole in its width."""
        return layers.gathered_part(self.head_part(), 0, self.runtime)

    def head_part(self) -> jax.Array:
        """This rank's part of it as it is stored, cut along D over `rules.width`."""
        return self.embed[...].T if self.config.tie_word_embeddings else self.lm_head[...]

    def _embedded(self, tokens_BT):
        """Rows of the embedding; each tensor rank looks up the part of the vocabulary that it holds, a piece of it at a
        time: neither the gathered table nor its gradient ever exists whole."""
        axes, part_VD = self.runtime.rules.vocab, self.embed[...]
        pieces_NVD = part_VD.reshape(_pieces(part_VD.shape[0], self.config.hidden_size), -1, part_VD.shape[1])
        size, start = pieces_NVD.shape[1], lax.axis_index(axes) * part_VD.shape[0] if axes else 0

        def add(rows_BTD, piece):
            piece_VD, number = piece
            table_VD = layers.gathered_part(piece_VD, 1, self.runtime)
            local_BT = tokens_BT - (start + number * size)
            mine_BT = (local_BT >= 0) & (local_BT < size)
            # float32 rows: the gradient is a sum over all tokens with the same id, which bfloat16 would not hold.
            found_BTD = jnp.take(table_VD.astype(jnp.float32), jnp.where(mine_BT, local_BT, 0), axis=0)
            return rows_BTD + jnp.where(mine_BT[:, :, None], found_BTD, 0.0).astype(rows_BTD.dtype), None

        zeros_BTD = jnp.zeros((*tokens_BT.shape, self.config.hidden_size), self.runtime.precision.compute)
        numbers_N = jnp.arange(pieces_NVD.shape[0], dtype=jnp.int32)
        rows_BTD, _ = lax.scan(add, zeros_BTD, (pieces_NVD, numbers_N))
        return sharding.leave_parallel(rows_BTD, axes)
