"""The dataclasses, the rules between keys, and what the messages say."""

import dataclasses
import json
import math
import re

import pytest

from app.config import (
    ConfigError,
    DcnConfig,
    MeshConfig,
    did_you_mean,
    diff,
    flatten,
    from_config_dict,
    key_types,
    resolve_mesh,
)
from app.config_check import CHOICES, MINIMUM, validate
from configs import base
from tests.tiny import tiny_config


def problems(num_devices=None, devices_per_slice=None, **changes) -> tuple[str, ...]:
    """What validate says about the tiny config with `changes` (dotted names)."""
    try:
        validate(tiny_config(**changes), num_devices, devices_per_slice)
    except ConfigError as error:
        return error.problems
    return ()


# ---- dataclasses -----------------------------------------------------------------------------------------------------


def test_base_names_exactly_the_keys_of_the_dataclasses():
    flat = flatten(base.get_config().to_dict())
    assert {key: type(value) for key, value in flat.items()} == key_types()
    validate(from_config_dict(base.get_config()))


def test_the_tiny_config_is_valid():
    assert problems() == ()


def test_a_config_survives_json():
    config = tiny_config()
    assert from_config_dict(json.loads(config.to_json())) == config
    assert hash(config) == hash(tiny_config())  # static arguments of jax


def test_configs_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().model.vocab_size = 5


def test_wrong_keys_and_types_are_reported_together():
    tree = base.get_config().to_dict()
    tree["model"]["hiden_size"] = tree["model"].pop("hidden_size")
    tree |= {"steps": "ten", "seed": True, "mesh": 3, "eval": {**tree["eval"], "batches": 2.0}, "remat": None}
    tree |= {"controller": 3, "loss": {**tree["loss"], "z_weight": "small"}}
    with pytest.raises(ConfigError) as error:
        from_config_dict(tree)
    assert error.value.problems == (
        "steps='ten' has type str, expected type int",
        "seed=True has type bool, expected type int",
        "controller=3 has type int, expected type str",
        "remat is missing: every key needs a value (defaults: configs/base.py)",
        "model.hiden_size is not a key of the config, did you mean model.hidden_size?",
        "model.hidden_size is missing: every key needs a value (defaults: configs/base.py)",
        "mesh=3 has type int, expected a section of keys",
        "loss.z_weight='small' has type str, expected type float",
        "eval.batches=2.0 has type float, expected type int",
    )


def test_a_whole_number_becomes_the_float_that_its_key_is():
    weight = tiny_config(**{"loss.z_weight": 0}).loss.z_weight
    assert type(weight) is float


def test_diff_names_keys_and_both_values():
    one, other = tiny_config(), tiny_config(steps=11, **{"mesh.dcn.data": 2})
    assert diff(one.to_dict(), one.to_dict()) == []
    assert diff(one.to_dict(), other.to_dict()) == [("steps", 10, 11), ("mesh.dcn.data", 1, 2)]
    older = one.to_dict()
    del older["loss"]
    assert ("loss.chunk", None, 20) in diff(older, one.to_dict())


def test_layer_pattern():
    dense, experts = tiny_config().model, {"model.num_experts": 4, "model.num_hidden_layers": 8}
    linear, full = ("linear_attention", "dense"), ("full_attention", "dense")
    assert dense.layer_pattern == (linear,) * 3 + (full,)
    sparse = tiny_config(**experts).model
    assert sparse.layer_pattern == (("linear_attention", "moe"),) * 3 + (("full_attention", "moe"),)
    every_second = tiny_config(**experts, **{"model.decoder_sparse_step": 2}).model
    assert [mlp for _, mlp in every_second.layer_pattern] == ["dense", "moe"] * 2
    one_dense = tiny_config(**experts, **{"model.mlp_only_layers": (5,)}).model
    assert one_dense.layer_pattern == one_dense.layers and len(one_dense.layers) == 8  # no shorter period
    assert [n for n, (_, mlp) in enumerate(one_dense.layers) if mlp == "dense"] == [5]


def test_one_problem_is_the_message_and_several_are_a_list():
    assert str(ConfigError("a")) == "a"
    assert str(ConfigError("a", "b")) == "2 problems with the configuration:\n  - a\n  - b"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("model.hiden_size", "model.hidden_size"),
        ("hidden_size", "model.hidden_size"),
        ("learning_rat", "optimizer.learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("data.every_steps", "eval.every_steps"),
        ("eps", "optimizer.eps"),  # "steps" is more similar
        ("mesh.dcn.contxt", "mesh.dcn.context"),
    ],
)
def test_nearest_key(name, expected):
    assert did_you_mean(name, key_types()) == f", did you mean {expected}?"


def test_nothing_is_suggested_for_what_is_like_nothing():
    assert did_you_mean("zzzzzz", key_types()) == ""


# ---- the mesh --------------------------------------------------------------------------------------------------------


def test_a_mesh_made_in_code_names_only_the_axes_it_has():
    assert MeshConfig() == MeshConfig(1, 1, 1, 1, 1, cpu_devices=0, dcn=DcnConfig(1, 1, 1, 1, 1))


def test_the_rest_is_filled():
    assert resolve_mesh(MeshConfig(fsdp=-1, context=2), 8) == MeshConfig(fsdp=4, context=2)
    assert resolve_mesh(MeshConfig(context=8), 8) == MeshConfig(context=8)
    spanning = MeshConfig(fsdp=2, context=-1, dcn=DcnConfig(context=2))
    assert resolve_mesh(spanning, 16).context == 8
    assert resolve_mesh(spanning, 16).per_slice == {"data": 1, "fsdp": 2, "expert": 1, "context": 4, "tensor": 1}


@pytest.mark.parametrize(
    "mesh, devices, message",
    [
        (MeshConfig(data=3, fsdp=-1), 8, r"mesh.fsdp=-1 has no size: mesh.data=3 .* makes 3, which does not divide 8"),
        (MeshConfig(data=2, tensor=2), 8, r"mesh.data=2 .* x mesh.tensor=2 makes 4, but there are 8 devices"),
        (MeshConfig(data=-1, tensor=-1), 8, r"mesh.data and mesh.tensor are -1: only one axis"),
        (MeshConfig(data=0), 8, r"mesh.data=0: must be at least 1, or -1"),
        (MeshConfig(dcn=DcnConfig(data=0)), 8, r"mesh.dcn.data=0: must be at least 1"),
        (MeshConfig(data=5, dcn=DcnConfig(data=3)), 5, r"mesh.data=5 is not a multiple of mesh.dcn.data=3.*data=6$"),
        (MeshConfig(data=1, dcn=DcnConfig(data=2)), 2, r"mesh.data=1 is not a multiple of mesh.dcn.data=2.*data=2$"),
        (MeshConfig(fsdp=-1, dcn=DcnConfig(fsdp=2)), 3, r"mesh.fsdp=3 is not a multiple of mesh.dcn.fsdp=2"),
        (MeshConfig(context=2, expert=2, dcn=DcnConfig(expert=2)), 4, r"mesh.dcn.expert=2 with 2 context ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers(mesh, devices, message):
    with pytest.raises(ConfigError, match=message):
        resolve_mesh(mesh, devices)


def test_expert_over_slices_is_fine_where_the_sequence_stays_in_order():
    mesh = MeshConfig(context=2, expert=2, dcn=DcnConfig(context=2, expert=2))
    assert resolve_mesh(mesh, 4) == mesh


# ---- rules -----------------------------------------------------------------------------------------------------------

# Changes to the tiny config (48 tokens, 4 rows, 4/2 heads, 2/4 linear heads, 32 wide, 48 MLP, 272 vocabulary), devices,
# and the one message that they cause: field, numbers and remedy.
REFUSED = [
    ({"model.num_hidden_layers": 6}, None,
     r"model.num_hidden_layers=6 is not a multiple of model.full_attention_interval=4.*use 4 or 8"),
    ({"model.num_hidden_layers": 3}, None, r"model.num_hidden_layers=3 is not a multiple .*: use 4$"),
    ({"model.linear_num_value_heads": 3}, None,
     r"model.linear_num_value_heads=3 is not a multiple of model.linear_num_key_heads=2.*use 2 or 4"),
    ({"model.num_attention_heads": 5}, None,
     r"model.num_attention_heads=5 is not a multiple of model.num_key_value_heads=2.*use 4 or 6"),
    ({"model.head_dim": 12}, None, r"model.head_dim=12 x model.partial_rotary_factor=0.25 makes 3 rotary dims.*even"),
    ({"model.head_dim": 4}, None, r"makes 1 rotary dims"),
    ({"model.partial_rotary_factor": 2.0}, None, r"partial_rotary_factor=2.0 makes 32 rotary dims.*at most head_dim"),
    ({"model.vocab_size": 256}, None, r"model.vocab_size=256 is smaller than the 257 ids of data.tokenizer='bytes'"),
    ({"data.tokenizer": "ids:300"}, None, r"model.vocab_size=272 is smaller than the 300 ids of data.tokenizer='ids:"),
    ({"data.tokenizer": ""}, None, r"data.tokenizer is empty: use 'bytes'"),
    ({"mesh.expert": 2}, 2, r"mesh.expert=2: the model has no experts.*use mesh.expert=1"),
    ({"model.num_experts": 6, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 8, "mesh.expert": 4,
      "model.shared_expert_intermediate_size": 8}, 4, r"model.num_experts=6 does not divide over mesh.expert=4: use a"),
    ({"model.num_experts": 4, "model.num_experts_per_tok": 5, "model.moe_intermediate_size": 8}, None,
     (r"model.num_experts_per_tok=5 of model.num_experts=4: must be", r"shared_expert_intermediate_size=0 with")),
    ({"model.mlp_only_layers": (1, 4)}, None, r"model.mlp_only_layers=\(1, 4\): there are no layers \[4\]; use"),
    ({"model.intermediate_size": 0}, None, r"model.intermediate_size=0, but there are layers with an MLP"),
    ({"mesh.tensor": 4, "model.num_attention_heads": 6, "model.num_key_value_heads": 1,
      "model.linear_num_key_heads": 4}, 4,
     (r"model.num_attention_heads=6 does not divide over mesh.tensor=4", r"model.num_key_value_heads=1 does not")),
    ({"mesh.tensor": 4}, 4, (r"model.num_key_value_heads=2 does not divide over mesh.tensor=4: use a mesh.tensor that",
                             r"model.linear_num_key_heads=2 does not divide over mesh.tensor=4")),
    ({"mesh.tensor": 2, "model.linear_num_value_heads": 3, "model.linear_num_key_heads": 1}, 2,
     (r"model.linear_num_key_heads=1 does not", r"model.linear_num_value_heads=3 does not divide over mesh.tensor=2")),
    ({"mesh.tensor": 2, "model.intermediate_size": 47}, 2,
     r"model.intermediate_size=47 does not divide over mesh.tensor=2"),
    ({"mesh.tensor": 2, "model.vocab_size": 273}, 2, r"model.vocab_size=273 does not divide over mesh.tensor=2"),
    ({"mesh.context": 4, "mesh.fsdp": 2, "model.hidden_size": 36}, 8,
     r"model.hidden_size=36 does not divide over mesh.fsdp=2 x mesh.context=4 x mesh.expert=1 = 8.*mesh.data"),
    ({"mesh.context": 3}, None, r"model.hidden_size=32 does not divide over mesh.fsdp=1 x mesh.context=3 x .*1 = 3"),
    ({"global_batch": 3, "mesh.data": 2}, 2,
     r"global_batch=3 does not divide over mesh.data=2 x mesh.fsdp=1 x accumulation=1 = 2: use a .* of 2 or 4, or"),
    ({"mesh.fsdp": -1}, 8,
     r"global_batch=4 does not divide over mesh.data=1 x mesh.fsdp=8 .* = 8: use a global_batch of 8"),
    ({"accumulation": 3}, None, r"global_batch=4 does not divide over .* x accumulation=3 = 3"),
    ({"mesh.context": 4, "seq_len": 44}, 4,
     r"seq_len=44 is not a multiple of 8, two blocks for each of mesh.context=4 x mesh.expert=1 = 4 .*use 40 or 48"),
    ({"mesh.context": 8, "seq_len": 16}, 8,
     r"seq_len=16 over mesh.context=8 .* leaves 2 tokens a rank, fewer than the 3 that model.linear_conv_kernel_dim=4"),
    ({"seq_len": 2**24 + 1, "global_batch": 1}, 1, r"seq_len=16777217: positions are exact up to 16777216 only"),
    ({"seq_len": 2**24, "global_batch": 128}, 1, r"global_batch=128 x seq_len=16777216 makes 2147483648 tokens.*int32"),
    ({"mesh.data": 2, "mesh.fsdp": 1}, 8, r"mesh.data=2 .* makes 2, but there are 8 devices"),
    ({"mesh.data": -1, "mesh.fsdp": -1}, None, r"mesh.data and mesh.fsdp are -1"),
    ({"remat": "ful"}, None, r"remat='ful': must be one of 'full', .*, did you mean full\?"),
    ({"controller": "multy"}, None, r"controller='multy': must be one of 'multi', 'single', did you mean multi\?"),
    ({"ops.gdn_chunk": 48}, None, r"ops.gdn_chunk=48: must be a power of two .* such as 32"),
    ({"data.documents": "seperate"}, None, r"data.documents='seperate': must be one of .*, did you mean separate\?"),
    ({"dtypes.compute": "float16"}, None, r"dtypes.compute='float16': its range is too small.*use 'bfloat16'"),
    ({"dtypes.params": "bf16"}, None, r"dtypes.params='bf16': must be one of 'float32', .*, did you mean bfloat16"),
    ({"optimizer.b1": 1.0}, None, r"optimizer.b1=1.0: a decay rate must be at least 0 and below 1"),
    ({"optimizer.b2": -0.1}, None, r"optimizer.b2=-0.1: a decay rate"),
    ({"optimizer.learning_rate": 1e-6}, None,
     r"optimizer.final_learning_rate=3e-05 is above optimizer.learning_rate=1e-06.*lower it"),
    ({"optimizer.clip_norm": math.inf}, None, r"optimizer.clip_norm=inf: must be a finite number"),
    ({"optimizer.weight_decay": -1.0}, None, r"optimizer.weight_decay=-1.0: must be at least 0"),
    ({"optimizer.eps": 0.0}, None, r"optimizer.eps=0.0: must be above 0"),
    ({"data.holdout": -0.1}, None, r"data.holdout=-0.1: a share of documents, must be at least 0 and below 1"),
    ({"data.holdout": 1.0}, None, r"data.holdout=1.0: a share of documents"),
    ({"data.workers": 2, "data.prefetch": 0}, None, r"data.prefetch=0 with data.workers=2.*use data.prefetch=1"),
    ({"eval.batches": 0}, None, r"eval.batches=0: must be at least 1, or -1"),
    ({"checkpoint.keep_every": 6}, None,
     r"checkpoint.keep_every=6 is not a multiple of checkpoint.every_steps=4.*use 4 or 8, or 0"),
    ({"checkpoint.local_directory": "/ram", "checkpoint.local_every_steps": 4}, None,
     r"checkpoint.local_every_steps=4 is not below checkpoint.every_steps=4"),
    ({"checkpoint.local_directory": "/ram", "checkpoint.local_every_steps": 2, "controller": "single",
      "mesh.cpu_devices": 0}, None, r"checkpoint.local_directory with controller='single'"),
    ({"seed": 2**32}, None, r"seed=4294967296: must be at most 4294967295"),
]  # fmt: skip


@pytest.mark.parametrize("changes, devices, messages", REFUSED, ids=lambda value: str(value)[:60])
def test_a_broken_rule_is_reported_with_field_numbers_and_remedy(changes, devices, messages):
    expected = (messages,) if isinstance(messages, str) else messages
    found = problems(devices, **changes)
    assert len(found) == len(expected), found
    for message, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, message), message


@pytest.mark.parametrize(
    "changes, devices",
    [
        ({"model.head_dim": 18}, None),  # 4.5 rotary dims are 4, as published
        ({"mesh.context": 8, "mesh.fsdp": 1}, 8),  # 6 tokens a rank
        ({"mesh.context": 8, "mesh.fsdp": -1, "accumulation": 4}, 8),
        ({"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2, "accumulation": 2}, 8),
        ({"seq_len": 49}, 1),  # one rank: any length
        ({"seq_len": 1}, 1),  # shorter than the convolution
        ({"seq_len": 2**24, "global_batch": 127}, 1),
        ({"mesh.fsdp": 1, "mesh.data": 4, "mesh.dcn.data": 2}, 4),
        ({"mesh.fsdp": 1, "mesh.context": 4, "mesh.dcn.context": 2}, 4),
        ({"steps": 2, "optimizer.warmup_steps": 100}, 1),  # a trial run of a long schedule
        ({"data.tokenizer": "ids:272"}, 1),
        ({"data.tokenizer": "some/tokenizer.json"}, 1),
        ({"model.max_position_embeddings": 10}, 1),
        ({"checkpoint.keep_every": 8}, 1),
        ({"checkpoint.local_directory": "/ram", "checkpoint.local_every_steps": 3}, 1),
        ({"optimizer.final_learning_rate": 0.0, "optimizer.weight_decay": 0.0, "optimizer.b1": 0.0}, 1),
        ({"seed": 2**32 - 1}, 1),
        ({"data.holdout": 0.0, "data.prefetch": 0}, 1),
    ],
    ids=str,
)
def test_what_the_rules_allow(changes, devices):
    assert problems(devices, **changes) == ()


def test_what_may_be_none_at_all():
    assert {key for key, least in MINIMUM.items() if least == 0} == {
        "seed", "mesh.cpu_devices", "optimizer.warmup_steps", "data.workers", "data.prefetch", "eval.every_steps",
        "checkpoint.keep_every", "elastic.min_slices", "experts.max_rounds", "model.intermediate_size",
        "model.num_experts", "model.num_experts_per_tok", "model.moe_intermediate_size",
        "model.shared_expert_intermediate_size", "log.profile_step",
    }  # fmt: skip
    assert set(MINIMUM.values()) == {0, 1}


@pytest.mark.parametrize("key", MINIMUM)
def test_every_number_has_its_least_value(key):
    least = MINIMUM[key]
    assert [m for m in problems(**{key: least - 1}) if m.startswith(f"{key}={least - 1}: must be at least {least}")]
    assert not [m for m in problems(**{key: least}) if m.startswith(f"{key}={least}: must be at least")]


def test_every_key_with_a_range_is_checked():
    """A key is a switch, or text that only the data can tell right from wrong, or some value of its type is refused."""
    free = {"data.path", "data.source", "data.weights", "init_from", "compile_cache", "checkpoint.directory",
            "checkpoint.local_directory"}  # fmt: skip
    bad = {int: -2, float: math.nan, str: "", tuple: (-1,)}
    for key, kind in key_types().items():
        if key not in free and kind is not bool:
            assert any(key in message for message in problems(**{key: bad[kind]})), key


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_accepted(key):
    for choice in CHOICES[key]:
        assert problems(**{"mesh.cpu_devices": 0, key: choice}) == ()


def test_slices_are_checked_against_devices_per_slice():
    spanning = {"mesh.fsdp": 2, "mesh.data": 2, "mesh.dcn.data": 2}
    assert problems(4, 2, **spanning) == ()
    assert problems(4, 4, **{"mesh.fsdp": 2, "mesh.data": 2}) == ()
    (message,) = problems(4, 2, **{"mesh.fsdp": 2, "mesh.data": 2})
    assert "mesh.dcn.data=1" in message
    assert "makes 1 slices, but 4 devices at 2 a slice are 2" in message
    assert "mesh.dcn.data=2" in message
    assert len(problems(4, 4, **spanning)) == 1


def test_all_errors_come_at_once():
    """Rules on different keys do not hide each other."""
    together = [
        {"model.num_hidden_layers": 6}, {"model.head_dim": 12}, {"model.num_attention_heads": 5}, {"mesh.context": 3},
        {"accumulation": 3}, {"remat": "ful"}, {"dtypes.compute": "float16"}, {"optimizer.b1": 1.0},
        {"data.holdout": 1.0}, {"eval.batches": 0}, {"checkpoint.keep_every": 6}, {"seed": -1}, {"seq_len": 2**25},
    ]  # fmt: skip
    each = {message for changes in together for message in problems(**changes)}
    found = problems(**{key: value for changes in together for key, value in changes.items()})
    assert len(each) >= len(together)
    assert each <= set(found)


def test_wrong_signs_never_crash_the_rules():
    for key, kind in key_types().items():
        for value in (0, -1, -7) if kind is int else (0.0, -1.0, math.nan, math.inf) if kind is float else ():
            problems(8, **{key: value})
