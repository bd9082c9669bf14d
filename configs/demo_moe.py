"""The demo with experts: 8 of them in every layer, 2 and a shared one for each byte. Minutes on a laptop.

    python -m app.train --config=configs/demo_moe.py --workdir=runs/demo_moe

metrics.jsonl tells expert_load, the busiest expert's tokens / the mean in the worst layer (1 is balance), and
balance_loss and layer_balance_loss, 2 in balance. Experts on several devices: --config.mesh.cpu_devices=4
--config.mesh.fsdp=1 --config.mesh.expert=4.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.update(steps=300, seq_len=512, global_batch=2, remat="none")
    config.model.update(
        vocab_size=272,  # 256 bytes, end of document, and up to a multiple of 16 for mesh.tensor
        hidden_size=128,
        intermediate_size=0,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        tie_word_embeddings=False,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size): 0.02 is for wide models
    )
    config.dtypes.compute = "float32"  # CPUs are slower in bfloat16
    config.mesh.cpu_devices = 1
    config.loss.update(chunk=1024, layer_balance_weight=0.1, router_z_weight=1e-3)
    config.ops.attention_block = 128
    config.optimizer.update(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=30, weight_decay=0.05)
    config.data.source = "stdlib"
    config.eval.update(every_steps=0, batches=8)
    config.checkpoint.every_steps = 100
    return config
