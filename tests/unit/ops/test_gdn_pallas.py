"""The TPU kernels of the gated delta rule, interpreted, on the cases that every implementation has to pass."""

import functools

from app.ops.gdn import gated_delta_rule
from tests.unit.ops.gdn_base import RuleCases


class TestPallasKernels(RuleCases):
    rule = staticmethod(functools.partial(gated_delta_rule, kernel="pallas_interpret"))
