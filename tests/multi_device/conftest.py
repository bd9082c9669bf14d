"""These tests need eight CPU devices, which is settled when jax starts: they run in pytest processes of their own."""

import jax
import pytest

DEVICES = 8


def require_cpu_devices(count: int) -> None:
    """Make jax start with `count` CPU devices; pytest.UsageError if it has started with fewer."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started
        found = jax.device_count()
        if found < count:
            raise pytest.UsageError(
                f"tests/multi_device needs {count} CPU devices, but jax has already started with {found} in this "
                "process: run it alone (python -m pytest tests/multi_device) or everything with python -m tests.run"
            ) from None


require_cpu_devices(DEVICES)
