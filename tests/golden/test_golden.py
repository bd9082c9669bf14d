"""What each preset resolves to, as reviewed text. After a change that is meant: python -m tests.golden.regenerate"""

import pytest

from app.config_check import validate
from app.models import params as model_params
from tests.golden import regenerate


@pytest.mark.parametrize("table", regenerate.TABLES)
@pytest.mark.parametrize("preset", regenerate.presets())
def test_preset_is_as_reviewed(preset, table):
    made, reviewed = regenerate.TABLES[table](regenerate.load(preset)), regenerate.path_of(preset, table).read_text()
    assert made == reviewed, "python -m tests.golden.regenerate, then look at the diff"


def test_every_golden_file_belongs_to_a_preset():
    wanted = {regenerate.path_of(preset, table) for preset in regenerate.presets() for table in regenerate.TABLES}
    assert set(regenerate.HERE.glob("*.txt")) == wanted


# Published sizes (the models' config.json): width, layers, query and key/value heads, key and value heads of the
# linear layers, MLP, tied. Written down a second time on purpose, from the published table and not from the presets.
PUBLISHED = {
    "qwen3_5_0_8b": (1024, 24, 8, 2, 16, 16, 3584, True),
    "qwen3_5_2b": (2048, 24, 8, 2, 16, 16, 6144, True),
    "qwen3_5_4b": (2560, 32, 16, 4, 16, 32, 9216, True),
    "qwen3_5_9b": (4096, 32, 16, 4, 16, 32, 12288, False),
    "qwen3_5_27b": (5120, 64, 24, 4, 16, 48, 17408, False),
}
# The sparse ones likewise: ..., vocabulary, experts, experts of a token, hidden of an expert, parameters in billions.
PUBLISHED_SPARSE = {
    "qwen3_5_35b_a3b": (2048, 40, 16, 2, 16, 32, 248320, 256, 8, 512, 34.661),
    "qwen3_5_122b_a10b": (3072, 48, 32, 2, 16, 64, 248320, 256, 8, 1024, 122.112),
    "qwen3_5_397b_a17b": (4096, 60, 32, 2, 16, 64, 248320, 512, 10, 1024, 396.346),
    "qwen3_next_80b_a3b": (2048, 48, 16, 2, 16, 32, 151936, 512, 10, 512, 79.674),
}
COMMON = {
    "vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 1e7,
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": 262144,
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_preset_has_the_published_sizes(preset):
    model = regenerate.load(preset).model
    assert PUBLISHED[preset] == (
        model.hidden_size, model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads,
        model.linear_num_key_heads, model.linear_num_value_heads, model.intermediate_size, model.tie_word_embeddings,
    )  # fmt: skip
    assert {name: getattr(model, name) for name in COMMON} == COMMON


@pytest.mark.parametrize("preset", PUBLISHED)
def test_preset_runs_on_the_device_counts_it_names(preset):
    for devices in (1, 8, 64, 256):
        validate(regenerate.load(preset), num_devices=devices)


@pytest.mark.parametrize("preset", PUBLISHED_SPARSE)
def test_sparse_preset_has_the_published_sizes(preset):
    config = regenerate.load(preset)
    model = config.model
    billions = model_params.count(model_params.describe(model)) / 1e9
    assert PUBLISHED_SPARSE[preset] == (
        model.hidden_size, model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads,
        model.linear_num_key_heads, model.linear_num_value_heads, model.vocab_size, model.num_experts,
        model.num_experts_per_tok, model.moe_intermediate_size, round(billions, 3),
    )  # fmt: skip
    assert model.shared_expert_intermediate_size == model.moe_intermediate_size
    assert {mlp for _, mlp in model.layers} == {"moe"} and not model.tie_word_embeddings
    assert {name: getattr(model, name) for name in COMMON if name != "vocab_size"} == {
        name: value for name, value in COMMON.items() if name != "vocab_size"
    }
    for devices in (config.mesh.expert, 128, 256):
        validate(config, num_devices=devices)
