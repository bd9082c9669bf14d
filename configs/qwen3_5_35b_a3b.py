r"""Qwen3.5-35B-A3B: 34.661 billion parameters, 256 experts of which 8 and the shared one work on a token.

    python -m app.train --config=configs/qwen3_5_35b_a3b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 262,144 tokens over all devices, a power of two of them and at least 8: eight neighbours in the sequence
share the experts. Where it fits, by arithmetic: float32 weights, two moments and gradients take 16 bytes a parameter,
555 GB in all; on 128 v5p chips that is 4.3 GB of the 95 of each, beside the activations of 2,048 tokens. Expected
first loss of fresh weights: ln(248320) + 2048 x 0.02^2 / 2 = 12.8 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(262_144)
    config.model.update(
        hidden_size=2048,
        intermediate_size=0,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        router_aux_loss_coef=0.001,
        tie_word_embeddings=False,
    )
    config.mesh.expert = 8
    config.optimizer.update(learning_rate=2e-4, final_learning_rate=2e-5)
    return config
