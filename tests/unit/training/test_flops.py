"""The FLOPs formula against counts made by hand."""

import dataclasses

import pytest

from app.training import flops
from tests.tiny import tiny_config


def test_hand_count():
    # D 32, F 48, V 272, 4 layers (3 GDN + 1 attention), GDN 2 key heads of 8, 4 value heads of 16, conv 4; attention
    # 4 query and 2 key/value heads of 16; T = 7: a token sees (1 + ... + 7) / 7 = 4 keys.
    parts = flops.forward_flops_per_token(tiny_config().model, seq_len=7)
    qkv, z, gates, out = 32 * (16 + 16 + 64), 32 * 64, 2 * 32 * 4, 64 * 32
    assert parts["gdn_projections"] == 3 * 2 * (qkv + z + gates + out + 4 * 96)
    assert parts["gdn_core"] == 3 * 4 * 3 * 2 * 8 * 16
    assert parts["attention_projections"] == 2 * (32 * 64 * 2 + 32 * 32 * 2 + 64 * 32)
    assert parts["attention_core"] == 4 * 2 * 2 * 16 * 4
    assert parts["mlp"] == 4 * 3 * 2 * 32 * 48
    assert parts["head"] == 2 * 32 * 272
    total = flops.training_flops_per_token(tiny_config().model, seq_len=7)
    assert total == pytest.approx(3 * sum(parts.values()))


def test_only_attention_grows_with_length():
    model = tiny_config().model
    short, long = (flops.forward_flops_per_token(model, length) for length in (1000, 2000))
    assert {part for part in short if short[part] != long[part]} == {"attention_core"}
    assert long["attention_core"] / short["attention_core"] == pytest.approx(2, rel=1e-3)


def test_experts_count_those_that_work_on_a_token():
    # 8 experts of hidden 24, 2 of them and a shared one of 40 work; router 2 x 32 x 8, gate of the shared one 2 x 32.
    changes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = dataclasses.replace(tiny_config().model, **changes, shared_expert_intermediate_size=40)
    parts = flops.forward_flops_per_token(model, seq_len=7)
    assert parts["mlp"] == 4 * (2 * 32 * 8 + 3 * 2 * 32 * (2 * 24 + 40) + 2 * 32)
