r"""Qwen3.5-397B-A17B: 396.346 billion parameters, 512 experts of which 10 and the shared one work on a token.

    python -m app.train --config=configs/qwen3_5_397b_a17b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 1,048,576 tokens over all devices, a power of two of them and at least 64, which share the experts as
neighbours in the sequence. Where it fits, by arithmetic: float32 weights, two moments and gradients take 16 bytes a
parameter, 6,342 GB in all; on 512 v5p chips that is 12.4 GB of the 95 of each, beside the activations of 2,048 tokens.
Expected first loss of fresh weights: ln(248320) + 4096 x 0.02^2 / 2 = 13.2 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(1_048_576)
    config.model.update(
        hidden_size=4096,
        intermediate_size=0,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        router_aux_loss_coef=0.001,
        tie_word_embeddings=False,
    )
    config.mesh.expert = 64
    config.optimizer.update(learning_rate=1e-4, final_learning_rate=1e-5)
    return config
