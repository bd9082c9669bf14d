r"""Qwen3.5-27B: 26.896 billion parameters.

    python -m app.train --config=configs/qwen3_5_27b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 1,048,576 tokens over all devices, a power of two of them. Where it fits, by arithmetic: float32
weights, two moments and gradients take 16 bytes a parameter, 430 GB in all; on 256 v5p chips that is 1.7 GB of the 95
of each, beside the activations of 4,096 tokens. Expected first loss of fresh weights: ln(248320) + 5120 x 0.02^2 / 2
= 13.4 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(1_048_576)
    config.model.update(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        tie_word_embeddings=False,
    )
    config.optimizer.update(learning_rate=1.5e-4, final_learning_rate=1.5e-5)
    return config
