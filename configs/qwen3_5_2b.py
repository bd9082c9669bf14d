r"""Qwen3.5-2B: 1.882 billion parameters, embedding and head tied.

    python -m app.train --config=configs/qwen3_5_2b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 262,144 tokens over all devices, a power of two of them. Where it fits, by arithmetic: float32
weights, two moments and gradients take 16 bytes a parameter, 30 GB in all; on 16 v5p chips that is 1.9 GB of the 95
of each, beside the activations of 16,384 tokens. Expected first loss of fresh weights: ln(248320) + 2048 x 0.02^2 / 2
= 12.8 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(262_144)
    config.model.update(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    )
    config.optimizer.update(learning_rate=3e-4, final_learning_rate=3e-5)
    return config
