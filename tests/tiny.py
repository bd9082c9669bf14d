"""The one very small configuration that tests share, so that compiled shapes are shared too."""

from app import config as app_config
from configs import base

TINY = {
    "steps": 10, "seq_len": 48, "global_batch": 4, "seed": 1, "remat": "full", "nonfinite_limit": 3,
    "model.vocab_size": 272, "model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 4,
    "model.num_attention_heads": 4, "model.num_key_value_heads": 2, "model.head_dim": 16,
    "model.linear_num_key_heads": 2, "model.linear_num_value_heads": 4, "model.linear_key_head_dim": 8,
    "model.linear_value_head_dim": 16, "model.tie_word_embeddings": False, "model.initializer_range": 0.02,
    "dtypes.compute": "float32", "ops.gdn_chunk": 16, "ops.attention_block": 16, "loss.chunk": 20,
    "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0, "checkpoint.every_steps": 4, "log.every_steps": 1,
    "mesh.cpu_devices": 1,
}  # fmt: skip

# What makes it a mixture of experts, of two layers: each has 16 experts.
EXPERTS = {
    "model.num_hidden_layers": 2, "model.full_attention_interval": 2, "model.num_experts": 16,
    "model.num_experts_per_tok": 3, "model.moe_intermediate_size": 24, "model.shared_expert_intermediate_size": 16,
    "model.router_aux_loss_coef": 0.02, "loss.router_z_weight": 0.01, "loss.layer_balance_weight": 0.02,
}  # fmt: skip


def tiny_config(**changes) -> app_config.Config:
    """TINY with `changes`, dotted names: tiny_config(**{"mesh.fsdp": 2})."""
    tree = base.get_config()
    tree.unlock()
    tree.update_from_flattened_dict({**TINY, **changes})
    return app_config.from_config_dict(tree)
