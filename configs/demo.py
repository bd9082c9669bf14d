"""A small hybrid model on the Python standard library's own sources, as bytes: minutes on a laptop, nothing to fetch.

    python -m app.train --config=configs/demo.py --workdir=runs/demo

The loss starts at 6.1 nats a byte (ln(272) = 5.6, and the random logits add to it); the held-out loss ends near 1.58.
A parallel run: --config.mesh.cpu_devices=4 --config.mesh.fsdp=1 --config.mesh.context=4.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.update(steps=1000, seq_len=512, global_batch=2, remat="none")
    config.model.update(
        vocab_size=272,  # 256 bytes, end of document, and up to a multiple of 16 for mesh.tensor
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size): 0.02 is for wide models
    )
    config.dtypes.compute = "float32"  # CPUs are slower in bfloat16
    config.mesh.cpu_devices = 1
    config.loss.chunk = 1024
    config.ops.attention_block = 128
    config.optimizer.update(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=30, weight_decay=0.05)
    config.data.source = "stdlib"
    config.eval.update(every_steps=0, batches=-1)
    config.checkpoint.every_steps = 100
    return config
