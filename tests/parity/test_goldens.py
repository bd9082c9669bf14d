"""The model against the real transformers classes, through reference models made with them.

The reference folder (see its README) lies beside the repository; without it these tests are skipped. Bounds: logits no
further from float64 than three times the real classes' own float32 error (or 2e-5), gradients within four times the
recorded float32 error of that parameter (or 1e-4).
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app import hf
from app.models import params as model_params
from app.models.layers import Runtime
from app.training.loss import chunked_cross_entropy

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens"
MODELS = ["dense_tied", "dense_untied", "dense_d128", "vlm_wrapped"]

pytestmark = pytest.mark.skipif(
    not GOLDENS.is_dir(), reason="the reference models lie beside the repository, not in it"
)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    directory = GOLDENS / request.param
    config = hf.model_config(json.loads((directory / "config.json").read_text()))
    params = {name: jnp.asarray(x) for name, x in hf.to_params(config, hf.read_tensors(directory)).items()}
    return config, params, np.load(directory / "golden.npz"), json.loads((directory / "meta.json").read_text())


def mean_loss(params, config, tokens):
    """Mean next-token cross entropy, the way training computes it."""
    model = model_params.build(config, Runtime(), params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden = model.hidden(tokens, positions, jnp.ones_like(tokens))
    mask = positions < tokens.shape[1] - 1
    loss, _ = chunked_cross_entropy(hidden, model.head(), jnp.roll(tokens, -1, axis=1), mask, chunk=64)
    return loss / jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)


def test_logits(golden):
    config, params, arrays, _ = golden
    cases = [key.removesuffix("/logits64") for key in arrays if key.endswith("/logits64") and key.startswith("s")]
    assert cases
    for case in cases:
        model = model_params.build(config, Runtime(), params)
        logits = jax.jit(lambda tokens, model=model: model(tokens))(jnp.asarray(arrays[f"{case}/input_ids"], jnp.int32))
        truth = arrays[f"{case}/logits64"]
        assert relative(logits, truth) <= max(3 * relative(arrays[f"{case}/logits"], truth), 2e-5)


def test_loss_and_gradients(golden):
    config, params, arrays, meta = golden
    cases = {key.split("/")[0] for key in arrays if "/grad/" in key}
    assert cases
    for case in cases:
        tokens = jnp.asarray(arrays[f"{case}/input_ids"], jnp.int32)
        loss, grads = jax.jit(jax.value_and_grad(lambda p, t: mean_loss(p, config, t)))(params, tokens)
        assert float(loss) == pytest.approx(float(arrays[f"{case}/loss"]), rel=1e-5)
        prefix = f"{case}/grad/"
        published = {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
        wanted = hf.to_params(
            config, {name.replace("model.language_model.", "model.", 1): grad for name, grad in published.items()}
        )
        noise = {
            name.replace("model.language_model.", "model.", 1): error
            for name, error in meta["cases"][case]["grad_vs_f64"].items()
        }
        for name, want in wanted.items():
            for layer in range(len(want)) if name.startswith("groups.") else [...]:
                bound = max(1e-4, 4 * noise_of(name, layer, noise, config))
                assert relative(grads[name][layer], want[layer]) <= bound, (case, name, layer)


def noise_of(name, layer, noise, config):
    """The recorded error of the published tensor that holds parameter `name` of group `layer`."""
    if not name.startswith("groups."):
        published = {
            "embed": "model.embed_tokens.weight",
            "final_norm.weight": "model.norm.weight",
            "lm_head": "lm_head.weight",
        }[name]
        return noise[published]
    place, inner = name.removeprefix("groups.blocks.").split(".", 1)
    kind, number = config.layer_pattern[int(place)], layer * len(config.layer_pattern) + int(place)
    tensor = next(t for t in hf.LAYER_TENSORS[kind] if inner in t.params)
    return noise[f"model.layers.{number}.{tensor.name}"]
