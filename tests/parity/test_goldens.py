"""The model against the real transformers classes, through reference models made with them.

`goldens/` beside this file is made by make_goldens.py; where torch and transformers can be imported, others are made
on the spot; ../shared/goldens, where it lies beside the repository, has more of the kind (both marked slow).

Bounds: logits no further from float64 than three times the real classes' own float32 error (or 2e-5), gradients within
four times the recorded float32 error of that tensor (or 1e-4); bfloat16 logits no further from float64 than 1.5 times
the real classes' bfloat16 error.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from app import hf
from app.hf import convert, table
from app.models import params as model_params
from app.models.attn_mixer import attention_inputs
from app.models.layers import Runtime
from app.training.loss import chunked_cross_entropy, router_losses

OWN = Path(__file__).parent / "goldens"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "goldens"
LIVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
DIRECTORIES = [
    *(
        # Untied heads are in the sparse models too.
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name == "dense_untied" else [])
        for path in sorted(OWN.glob("*/"))
    ),
    *(pytest.param(path, id=f"shared-{path.name}", marks=pytest.mark.slow) for path in sorted(SHARED.glob("*/"))),
    *(pytest.param(path.name, id=f"live-{path.name}", marks=pytest.mark.slow) for path in OWN.glob("*/") if LIVE),
]


@dataclasses.dataclass(frozen=True)
class Golden:
    """One reference model: its arrays by "case/what", its parameters (float32) by our names, and meta.json."""

    directory: Path
    arrays: dict
    meta: dict
    config: object
    grouped: bool
    params: dict

    @property
    def cases(self):
        return sorted({key.split("/")[0] for key in self.arrays if key.endswith("/input_ids") and key[0] == "s"})

    def published(self, arrays, names):
        """Arrays by our names -> by published names (those of `names`, which also decide the layout of experts)."""
        entries = table.plan(self.config, self.grouped, names)
        return {
            entry.name: block.join([np.asarray(arrays[p])[block.region(i)] for i, p in enumerate(entry.params)])
            for entry in entries
            for block in entry.blocks()
        }


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Goldens of the same models with other weights and tokens, made now."""
    from tests.parity import make_goldens

    directory = tmp_path_factory.mktemp("live")
    make_goldens.main(directory, seed=1000)
    return directory


@pytest.fixture(scope="module", params=DIRECTORIES)
def golden(request):
    live = isinstance(request.param, str)
    directory = request.getfixturevalue("live") / request.param if live else request.param
    source, config, _ = convert.open_checkpoint(directory)
    model = hf.load_model(directory)
    meta = directory / "meta.json"
    return Golden(
        directory,
        dict(np.load(directory / "golden.npz")),
        json.loads(meta.read_text()) if meta.exists() else {},
        config,
        source.config["model_type"] == "qwen3_next",
        {name: variable[...] for name, variable in flat(model).items()},
    )


def flat(model):
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))}


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def loss_and_logits(params, config, tokens, lengths):
    """Mean next-token cross entropy the way training computes it, and the logits; rows are padded after `lengths`."""
    model = model_params.build(config, Runtime(), params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden = model.hidden(tokens, positions, (positions < lengths[:, None]).astype(jnp.int32))
    mask = positions < lengths[:, None] - 1
    loss, _ = chunked_cross_entropy(hidden, model.head(), jnp.roll(tokens, -1, axis=1), mask, chunk=64)
    logits = jnp.einsum("btd,dv->btv", hidden, model.head())
    return loss / jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32), logits


def layer_errors(golden, case):
    """Relative error of the residual stream after each layer, for the message of a failure."""
    if f"{case}/hidden" not in golden.arrays:
        return "no hidden states recorded"
    model = model_params.build(golden.config, Runtime(), golden.params)
    tokens = jnp.asarray(golden.arrays[f"{case}/input_ids"], jnp.int32)
    segments = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    inputs = attention_inputs(golden.config, model.runtime, positions, segments)
    graphdef, stacked = nnx.split(model.groups)
    h = jnp.take(model.embed[...], tokens, axis=0)
    states = [h]
    for group in range(golden.config.num_hidden_layers // len(golden.config.layer_pattern)):
        for block in nnx.merge(graphdef, jax.tree.map(lambda x, group=group: x[group], stacked)).blocks:
            h, _ = block(h, segments, inputs)
            states.append(h)
    wanted = golden.arrays[f"{case}/hidden"]
    places = ["embedding", *(f"layer {n}" for n in range(len(states) - 1))]
    return "\n".join(f"{place}: {relative(x, want):.2e}" for place, x, want in zip(places, states, wanted, strict=True))


@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_float32_against_the_real_classes(golden, padded):
    """padded: every case in the shape of the longest, which is compiled once; a padded token changes nothing."""
    config, arrays = golden.config, golden.arrays
    cases = [case for case in golden.cases if golden.meta.get("dtype") != "torch.bfloat16"]
    kept = {}
    longest = max((arrays[f"{case}/input_ids"].shape[1] for case in golden.cases), default=0)
    step = jax.jit(jax.value_and_grad(lambda p, t, n: loss_and_logits(p, config, t, n), has_aux=True))
    for case in cases:
        tokens = arrays[f"{case}/input_ids"]
        length = tokens.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, longest - length if padded else 0)))
        lengths = np.full(len(tokens), length, np.int32)
        (loss, logits), grads = step(golden.params, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths))
        kept[case] = logits[:, :length], grads
        check_logits(golden, case, logits[:, :length])
        assert float(loss) == pytest.approx(float(arrays[f"{case}/loss"]), rel=1e-5), layer_errors(golden, case)
        check_gradients(golden, case, grads)
    if "s300" in cases and padded:  # both checks do see a small error
        for check, wrong in ((check_logits, kept["s300"][0] * 1.0001), (check_gradients, spoiled(kept["s300"][1]))):
            with pytest.raises(AssertionError):
                check(golden, "s300", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("golden", sorted(SHARED.glob("*moe")), indirect=True, ids=lambda path: path.name)
def test_the_balance_loss_is_that_of_the_real_classes(golden):
    """And its gradient with respect to the routers, which is what recorded gradients with and without it differ by."""
    config, case = golden.config, "s130"
    tokens = jnp.asarray(golden.arrays[f"{case}/input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

    def balance(params):
        model = model_params.build(config, Runtime(), params)
        _, routings = model.hidden_and_routing(tokens, positions, jnp.ones_like(tokens))
        return router_losses(routings, config.num_experts_per_tok, jnp.float32(tokens.size), ("data",))["balance_loss"]

    mesh, everywhere = jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec()
    step = jax.shard_map(
        jax.value_and_grad(balance), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    loss, grads = jax.jit(step)(golden.params)
    assert float(loss) == pytest.approx(float(golden.arrays[f"{case}/aux"]), rel=1e-5)
    got = golden.published(grads, {key.removeprefix(f"{case}/grad/") for key in golden.arrays})
    routers = [key.split("/")[-1] for key in golden.arrays if key.startswith(f"{case}/grad_total/")]
    errors, shares = {}, {}
    for name in routers:
        together, alone = (np.float64(golden.arrays[f"{case}/{kind}/{name}"]) for kind in ("grad_total", "grad"))
        errors[name] = relative(alone + config.router_aux_loss_coef * np.float64(got[name]), together)
        shares[name] = relative(alone, together)
    # Both recorded gradients are float32, and the balance loss's share of them is no more than this in some layers.
    assert routers and max(errors.values()) < 2e-6 and min(shares.values()) > 2e-5, (errors, shares)


def spoiled(grads):
    """One parameter's gradient with an error of a thousandth."""
    name = "groups.blocks.0.mixer.out_proj"
    return grads | {name: grads[name] * 1.001}


def check_logits(golden, case, logits):
    if truth_of(golden, case) is not None:
        recorded = golden.meta["cases"][case]["logits_vs_f64"]
        error, bound = relative(logits, truth_of(golden, case)), max(3 * recorded, 2e-5)
    else:  # the published layouts in ../shared have the real classes' float32 logits only
        error, bound = relative(logits, golden.arrays[f"{case}/logits"]), 1e-4
    assert error <= bound, f"{case}: {error:.2e} > {bound:.2e}\n{layer_errors(golden, case)}"


def check_gradients(golden, case, grads):
    prefix = f"{case}/grad/"
    wanted = {key.removeprefix(prefix): x for key, x in golden.arrays.items() if key.startswith(prefix)}
    if not wanted:
        return
    got = golden.published(grads, wanted)
    assert got.keys() == wanted.keys()
    noise = golden.meta["cases"][case]["grad_vs_f64"]
    wrong = {
        name: (error, bound)
        for name in wanted
        if not (error := relative(got[name], wanted[name])) <= (bound := max(1e-4, 4 * noise[name]))
    }
    assert not wrong, f"{case}: {wrong}\n{layer_errors(golden, case)}"


def truth_of(golden, case):
    """The float64 logits, None where there are none. (Our own goldens hold nothing else.)"""
    own = golden.directory.parent != SHARED
    return golden.arrays[f"{case}/logits"] if own else golden.arrays.get(f"{case}/logits64")


def test_bfloat16_is_as_near_to_float64_as_the_real_classes(golden):
    errors = {case: error for case in golden.cases if (error := bfloat16_error(golden, case)) is not None}
    if not errors:
        pytest.skip("this reference model has no bfloat16 run")
    case = min(errors, key=lambda case: int(case[1:]))  # one shape: a run is seconds of compiling
    model = hf.load_model(golden.directory, "bfloat16")
    logits = jax.jit(lambda tokens: model(tokens))(jnp.asarray(golden.arrays[f"{case}/input_ids"], jnp.int32))
    truth = truth_of(golden, case)
    error = relative(logits, golden.arrays[f"{case}/logits"] if truth is None else truth)
    assert error <= 1.5 * errors[case], (case, error, errors[case])


@pytest.mark.parametrize(
    "directory",
    [
        pytest.param(OWN / "moe", id="moe"),
        *(pytest.param(path, id=path.name, marks=pytest.mark.slow) for path in sorted(SHARED.glob("*_published"))),
    ],
)
def test_multi_token_prediction(directory):
    """The logits of the token after the next, against the layers of the real classes put together in vLLM's order."""
    arrays = np.load(directory / "golden.npz")
    model = hf.load_model(directory, mtp=True)
    tokens = jnp.asarray(arrays["s77/input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None], (2, tokens.shape[1] - 1))
    hidden = model.hidden(tokens[:, :-1], positions, jnp.ones_like(positions))
    further, _ = model.second_hidden(hidden, tokens[:, 1:], positions, jnp.ones_like(positions))
    logits = jnp.einsum("btd,dv->btv", further, model.head())
    # ../shared holds float32 logits, ours float64 ones
    assert relative(logits, arrays["mtp/logits"]) <= (2e-5 if directory.parent == OWN else 1e-4)


def bfloat16_error(golden, case):
    """Of the real classes' bfloat16 logits, against the most exact ones there are."""
    arrays = golden.arrays
    if golden.meta.get("dtype") == "torch.bfloat16":
        return relative(arrays[f"{case}/logits"], arrays[f"{case}/logits64"])
    if f"{case}/logits_bf16" in arrays:
        return relative(arrays[f"{case}/logits_bf16"], arrays[f"{case}/logits"])
    return golden.meta.get("cases", {}).get(case, {}).get("logits_bf16_vs_f64")
