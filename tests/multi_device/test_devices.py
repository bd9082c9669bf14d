"""The devices that this folder's conftest promises."""

import jax
import pytest


def test_eight_cpu_devices(request):
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    conftest = next(plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "DEVICES"))
    conftest.require_cpu_devices(8)
    with pytest.raises(pytest.UsageError, match="needs 9 CPU devices, but jax has already started with 8"):
        conftest.require_cpu_devices(9)
