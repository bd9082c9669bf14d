"""Cost of a compiled program in the few figures that tests compare, by the plan's reading of its text.

TPU programs carry the compiler's estimated cycles of each instruction; custom calls (Pallas kernels, triangular solves)
carry none and are listed apart.
"""

import dataclasses
from collections import Counter

from app.planning.hlo import FREE_CALLS, Module, exchange


@dataclasses.dataclass
class Cost:
    """Of one device: cycles (TPU only), bytes and number of collectives by kind, number of working custom calls."""

    cycles: int = 0
    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    custom_calls: Counter[str] = dataclasses.field(default_factory=Counter)


def analyze(text: str) -> Cost:
    """text: `compiled.as_text()`. Loops count by their trips."""
    cost = Cost()
    for x, computation, times in Module.parse(text).executed():
        cost.cycles += times * x.cycles
        if x.collective:
            cost.sent[x.collective] += times * exchange(x, computation, devices=1).bytes
            cost.collectives[x.collective] += times
        if x.operation == "custom-call" and x.target not in FREE_CALLS:
            cost.custom_calls[x.target] += times
    return cost
