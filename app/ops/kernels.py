"""Which form of an operation runs: the one that XLA compiles, or our kernel for TPUs."""

from typing import Literal

KernelName = Literal["xla", "pallas", "interpret"]  # "interpret": the pallas kernel on any platform, slowly (tests)


def resolve_kernel(name: str, platform: str) -> KernelName:
    """The kernel that a config's "auto" | "xla" | "pallas" means on a platform ("tpu", "cpu", "gpu").

    Raises ValueError for another name, or for "pallas" where there is no TPU.
    """
    if name not in ("auto", "xla", "pallas"):
        raise ValueError(f"a kernel is 'auto', 'xla' or 'pallas', not {name!r}")
    if name == "pallas" and platform != "tpu":
        raise ValueError(f"pallas kernels run on TPUs, not on {platform!r}: choose 'auto' or 'xla'")
    return "pallas" if platform == "tpu" and name != "xla" else "xla"
