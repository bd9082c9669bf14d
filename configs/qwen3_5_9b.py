r"""Qwen3.5-9B: 8.954 billion parameters.

    python -m app.train --config=configs/qwen3_5_9b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 262,144 tokens over all devices, a power of two of them. Where it fits, by arithmetic: float32
weights, two moments and gradients take 16 bytes a parameter, 143 GB in all; on 64 v5p chips that is 2.2 GB of the 95
of each, beside the activations of 4,096 tokens. Expected first loss of fresh weights: ln(248320) + 4096 x 0.02^2 / 2
= 13.2 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(262_144)
    config.model.update(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=False,
    )
    config.optimizer.update(learning_rate=2e-4, final_learning_rate=2e-5)
    return config
