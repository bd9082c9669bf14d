r"""Qwen3.5-4B: 4.206 billion parameters, embedding and head tied.

    python -m app.train --config=configs/qwen3_5_4b.py --workdir=DIR \
        --config.data.path=PREPARED --config.data.tokenizer=PREPARED/tokenizer.json

One sequence of 262,144 tokens over all devices, a power of two of them. Where it fits, by arithmetic: float32
weights, two moments and gradients take 16 bytes a parameter, 67 GB in all; on 32 v5p chips that is 2.1 GB of the 95
of each, beside the activations of 8,192 tokens. Expected first loss of fresh weights: ln(248320) + 2560 x 0.02^2 / 2
= 12.9 nats a token.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.one_long_row(262_144)
    config.model.update(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=True,
    )
    config.optimizer.update(learning_rate=3e-4, final_learning_rate=3e-5)
    return config
