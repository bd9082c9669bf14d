"""Which form of an operation a config's word means."""

import pytest

from app.ops.kernels import resolve_kernel


def test_the_kernel_is_an_explicit_choice():
    assert resolve_kernel("auto", "tpu") == "pallas" and resolve_kernel("auto", "cpu") == "xla"
    assert resolve_kernel("xla", "tpu") == "xla" and resolve_kernel("pallas", "tpu") == "pallas"
    with pytest.raises(ValueError, match="not on 'cpu'"):
        resolve_kernel("pallas", "cpu")
    with pytest.raises(ValueError, match="not 'flash'"):
        resolve_kernel("flash", "cpu")
