"""What is exported loads in the real transformers classes: no key missing or unexpected, the same logits to the bit.

Runs where torch and transformers can be imported; they are no dependency of the tests.
"""

import json
from pathlib import Path

import pytest

from app import hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
SHARED = HERE.resolve().parents[2] / "shared" / "goldens"
DIRECTORIES = [*sorted((HERE / "goldens").glob("*/")), *sorted(SHARED.glob("*/"))]


def loaded(directory):
    """The model of the class that config.json names, in float32, and what its loading found amiss."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    return model, {key: sorted(map(str, found)) for key, found in info.items() if found}


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: f"{path.parent.parent.name}-{path.name}")
def test_an_export_loads_and_gives_the_same_logits(directory, tmp_path):
    hf.import_checkpoint(directory, tmp_path / "weights")
    hf.export_checkpoint(tmp_path / "weights", tmp_path / "exported")
    original, expected = loaded(directory)
    exported, found = loaded(tmp_path / "exported")
    assert found == expected and not {"missing_keys", "mismatched_keys", "error_msgs"} & set(found), found
    tokens = torch.arange(2 * 40).reshape(2, 40) * 7 % 48
    with torch.no_grad():
        assert torch.equal(original(input_ids=tokens).logits, exported(input_ids=tokens).logits)
