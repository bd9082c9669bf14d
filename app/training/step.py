"""One optimizer step and one evaluation step: pure functions of state and batch.

Loss and gradient are computed inside one shard_map over the whole mesh (see `app.cluster.sharding`); the optimizer is
elementwise on the sharded arrays outside of it. Letters: A micro-batches, B rows, T time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.cluster import sharding
from app.cluster.hardware import compiler_options
from app.cluster.mesh import line_length
from app.config import Config, ConfigError
from app.models import params as model_params
from app.models.layers import Precision, Runtime
from app.models.moe import Routing
from app.models.mtp import second_targets
from app.ops import self_check
from app.ops.kernels import resolve_kernel
from app.training import optim
from app.training.loss import chunked_cross_entropy, router_losses, router_metrics

Batch = dict[str, jax.Array]
LossSums = tuple[jax.Array, jax.Array]  # what is minimised, and the cross entropy in it
Leaf = Any  # an array, its abstract shape, or its PartitionSpec: the same tree of each exists
REPLICATED = PartitionSpec()
BATCH_FIELDS = {
    "tokens": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "stream_index": "int32",
    "loss_mask": "bool",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds: finished steps, parameters, optimizer state, non-finite steps in a row."""

    step: Leaf
    params: dict[str, Leaf]
    opt_state: Any
    nonfinite: Leaf


def runtime_of(config: Config, platform: str) -> Runtime:
    """The part of the config that layers see, with the sharded rules and "auto" resolved for the platform."""
    return Runtime(
        rules=sharding.SHARDED,
        sequence_slices=config.mesh.dcn.context * config.mesh.dcn.expert,
        precision=Precision(config.dtypes.params, config.dtypes.compute, config.dtypes.reduce),
        remat=config.remat,
        gdn_chunk=config.ops.gdn_chunk,
        gdn_kernel=resolve_kernel(config.ops.gdn_kernel, platform),
        attention_block=config.ops.attention_block,
        attention_kernel=resolve_kernel(config.ops.attention_kernel, platform),
        expert_kernel=resolve_kernel("auto", platform),
        expert_capacity=config.experts.capacity,
        expert_rounds=config.experts.max_rounds,
        mtp=config.loss.mtp_weight > 0,
    )


class Program:
    """The step functions of one config on one mesh, with the shardings of all they take and give.

    Attributes: specs (parameter descriptions), state (abstract TrainState with shardings), batch (abstract Batch with
    shardings), train_step and eval_step (jitted).
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        runtime = runtime_of(config, mesh.devices.flat[0].platform)
        self.runtime = dataclasses.replace(runtime, line=line_length(mesh))
        self.specs = model_params.describe(config.model, self.runtime)
        self.partitions = {name: spec.partition for name, spec in self.specs.items()}
        self.direction = optim.direction(config.optimizer, self.specs)
        self.schedule = optim.schedule(config.optimizer, config.steps)
        self.batch_sharding = NamedSharding(mesh, sharding.BATCH_SPEC)
        shape = (config.global_batch, config.seq_len)
        self.batch = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, dtype in BATCH_FIELDS.items()
        }
        self.state = self._abstract_state()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        options = compiler_options(mesh.devices.flat[0].device_kind)
        self.train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options
        )
        self.eval_step = jax.jit(self._eval_step, compiler_options=options)

    def init(self, params: dict[str, jax.Array] | None = None) -> TrainState:
        """Step 0 with `params` (given away), or with fresh parameters, sharded from birth."""
        if params is None:
            params = model_params.init(self.specs, self.config.seed, self.mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(self._fresh, out_shardings=shardings, donate_argnums=0)(params)

    def _fresh(self, params: dict[str, jax.Array]) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, self.direction.init(params), zero)

    def check_sequence(self) -> None:
        """Compare the sharded recurrence and convolution with a single rank on a short made-up sequence.

        Raises ConfigError if they differ: an order of devices that is not the order of the sequence trains silently.
        """
        axis = self.runtime.time_axis
        errors = self._on_ranks(lambda: self_check.sequence_errors(axis), (), REPLICATED)
        sizes = self.config.mesh.sizes
        try:
            self_check.require_small(
                {name: error.item() for name, error in jax.jit(errors)().items()},
                f"mesh.context={sizes['context']}, mesh.expert={sizes['expert']}",
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; every moment is sharded like its parameter."""
        params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in self.specs.items()}
        state = jax.eval_shape(self._fresh, params)
        moments = optax.tree.map_params(
            self.direction.init,
            lambda _, partition: partition,
            state.opt_state,
            self.partitions,
            transform_non_params=lambda _: REPLICATED,
        )
        partitions = TrainState(REPLICATED, self.partitions, moments, REPLICATED)
        return jax.tree.map(
            lambda leaf, partition: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, partition)
            ),
            state,
            partitions,
        )

    def _on_ranks(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _batch_specs(self) -> dict[str, PartitionSpec]:
        return dict.fromkeys(BATCH_FIELDS, sharding.BATCH_SPEC)

    def _loss_sums(self, params, batch: Batch) -> tuple[LossSums, LossSums | None, list[Routing]]:
        """This rank's (loss, entropy) sums over its tokens, the same of the tokens after the next (None: the model does
        not predict them), and what the routers did."""
        model = model_params.build(self.config.model, self.runtime, params)
        hidden, routings = model.hidden_and_routing(batch["tokens"], batch["positions"], batch["segment_ids"])
        cross_entropy = functools.partial(
            chunked_cross_entropy,
            chunk=self.config.loss.chunk,
            z_weight=self.config.loss.z_weight,
            vocab_axes=self.runtime.rules.vocab,
            width_axes=self.runtime.rules.width,
            reduce_dtype=self.runtime.precision.reduce,
            line=self.runtime.line,
        )
        first = cross_entropy(hidden, model.head_part(), batch["targets"], batch["loss_mask"])
        if not self.runtime.mtp:
            return first, None, routings
        further, more = model.second_hidden(hidden, batch["targets"], batch["positions"], batch["segment_ids"])
        return first, cross_entropy(further, model.head_part(), *self._second_targets(batch)), routings + more

    def _second_targets(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return second_targets(batch["targets"], batch["loss_mask"], self.runtime.time_axis)

    def _gradients(self, params, batch: Batch) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """On every rank: gradient of the mean loss over the valid targets (of the routers: over the real tokens) of the
        global batch, and the global counts, losses and router statistics."""
        counts = _token_counts(batch)
        valid, tokens = (jnp.maximum(counts[name], 1).astype(jnp.float32) for name in ("loss_tokens", "tokens"))
        model, experts = self.config.model, self.config.model.num_experts > 0
        router_weights = {
            "balance_loss": model.router_aux_loss_coef,
            "layer_balance_loss": self.config.loss.layer_balance_weight,
            "router_z_loss": self.config.loss.router_z_weight,
        }
        if self.runtime.mtp:
            second_tokens = lax.psum(jnp.sum(self._second_targets(batch)[1], dtype=jnp.int32), sharding.DATA_AXES)
            second_valid = jnp.maximum(second_tokens, 1).astype(jnp.float32)

        def scaled_loss(params, micro):
            (loss, entropy), second, routings = self._loss_sums(params, micro)
            total, sums = loss / valid, {"loss": entropy / valid}
            if second is not None:
                total += self.config.loss.mtp_weight * second[0] / second_valid
                sums |= {"mtp_loss": second[1] / second_valid}
            if experts:
                losses = router_losses(routings, model.num_experts_per_tok, tokens, sharding.DATA_AXES)
                total += sum(weight * losses[name] for name, weight in router_weights.items())
                sums |= losses
            return total, ({"total_loss": total, **sums}, routings)

        def accumulate(gradient, micro):
            (_, reported), micro_gradient = jax.value_and_grad(scaled_loss, has_aux=True)(params, micro)
            return jax.tree.map(jnp.add, gradient, micro_gradient), reported

        micros = jax.tree.map(lambda x: x.reshape(self.config.accumulation, -1, *x.shape[1:]), batch)
        gradient, reported = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), micros)
        gradient = sharding.reduce_gradients(gradient, self.partitions)
        sums, routings = lax.psum(jax.tree.map(lambda x: jnp.sum(x, axis=0), reported), sharding.DATA_AXES)
        if experts:
            exchanges = sharding.axes_size(sharding.DATA_AXES) * self.config.accumulation
            sums |= router_metrics(routings, exchanges)
        return gradient, {**sums, **counts}

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """(state, batch) -> (next state, metrics). A step whose loss or gradient is not finite changes no parameter."""
        gradient, metrics = self._on_ranks(
            self._gradients, (self.partitions, self._batch_specs()), (self.partitions, REPLICATED)
        )(state.params, batch)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(metrics["total_loss"]) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax raises python floats to its integer counters
            updates, opt_state = self.direction.update(gradient, state.opt_state, state.params)
            rate = jnp.asarray(self.schedule(state.step + 1), jnp.float32)
        params = jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        nonfinite = jnp.where(finite, 0, state.nonfinite + 1)
        metrics |= {"grad_norm": norm, "learning_rate": rate, "nonfinite_steps": nonfinite}
        return TrainState(state.step + 1, params, opt_state, nonfinite), metrics

    def _eval_step(self, params, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the global batch: entropy (nats) and counts. No division: a padded batch weighs what it holds."""

        def sums(params, batch):
            (_, entropy), _, _ = self._loss_sums(params, batch)
            return {"entropy": lax.psum(entropy, sharding.DATA_AXES), **_token_counts(batch)}

        return self._on_ranks(sums, (self.partitions, self._batch_specs()), REPLICATED)(params, batch)


def _token_counts(batch: Batch) -> dict[str, jax.Array]:
    """Of the global batch: real tokens, padding, and targets that count for the loss (int32)."""
    real = jnp.sum(batch["segment_ids"] != 0, dtype=jnp.int32)
    local = {
        "tokens": real,
        "padding": batch["segment_ids"].size - real,
        "loss_tokens": jnp.sum(batch["loss_mask"], dtype=jnp.int32),
    }
    return lax.psum(local, sharding.DATA_AXES)


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes a device of a compiled program by kind, {} where the backend does not tell.

    jax's own temp_size_in_bytes is not what a TPU needs: it holds VMEM, too, and twice what the packing of HBM leaves
    unused (27B on 32 v5p chips: 126 GB; 84 GB are allocated).
    """
    found = compiled.memory_analysis()
    if found is None:
        return {}
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": outputs,
        "temporaries": found.total_allocation_bytes - found.argument_size_in_bytes - outputs,
        "code": found.generated_code_size_in_bytes,
    }
