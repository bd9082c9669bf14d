"""Model FLOPs per token by part: what the mathematics needs, not what a program happens to do.

A multiply-add counts two. Recomputation, padding and the chunked form's extra work are not credited. Letters:
D width, F hidden of an MLP or expert, E experts, H/G heads, K/V head dims, T sequence length.
"""

from collections import Counter

from app.config import ModelConfig


def forward_flops_per_token(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Forward FLOPs of one token, averaged over a sequence of `seq_len` tokens, by part of the whole model.

    GDN projections 2D(2GK + 2HV + 2H) + 2HVD, convolution 2W(2GK + HV), core 6HKV (S^T k, k d^T, S^T q);
    attention projections 2D(2HK + 2GK) + 2HKD, scores and values 4HK x (T + 1)/2 (causal); MLP 6DF; experts: router
    2DE, the chosen and the shared ones 6DF each, the shared one's gate 2D; head 2DV.
    """
    D = model.hidden_size
    mixers, mlps = (Counter(kinds) for kinds in zip(*model.layers, strict=True))
    attention_layers, gdn_layers = mixers["full_attention"], mixers["linear_attention"]
    G, H = model.linear_num_key_heads, model.linear_num_value_heads
    K, V, W = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_conv_kernel_dim
    gdn_projections = 2 * D * (2 * G * K + 2 * H * V + 2 * H) + 2 * H * V * D
    gdn_conv = 2 * W * (2 * G * K + H * V)
    gdn_core = 6 * H * K * V
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    attention_projections = 2 * D * (2 * heads * head_dim + 2 * kv_heads * head_dim) + 2 * heads * head_dim * D
    attention_core = 4 * heads * head_dim * (seq_len + 1) / 2
    expert_hidden = model.num_experts_per_tok * model.moe_intermediate_size + model.shared_expert_intermediate_size
    moe = 2 * D * model.num_experts + 6 * D * expert_hidden + 2 * D
    return {
        "gdn_projections": gdn_layers * (gdn_projections + gdn_conv),
        "gdn_core": gdn_layers * gdn_core,
        "attention_projections": attention_layers * attention_projections,
        "attention_core": attention_layers * attention_core,
        "mlp": mlps["dense"] * 6 * D * model.intermediate_size + mlps["moe"] * moe,
        "head": 2 * D * model.vocab_size,
    }


def training_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward: three times the forward."""
    return 3.0 * sum(forward_flops_per_token(model, seq_len).values())
