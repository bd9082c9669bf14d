"""Estimated seconds of a compiled TPU program: its schedule walked once, every loop's body once times its trips.

A core executes the instructions one after the other, in the schedule's order: estimated cycles of XLA's instructions,
bundles of kernels. A collective occupies its network (ICI or DCN) from the moment it is issued, after those before it;
an asynchronous one costs the core only what is left of it when the schedule waits for it, and that is the exposed time.
So do the gathers of rows that libtpu gives to the SparseCores.
Not counted: waiting for copies between HBM and VMEM, stragglers, transfers inside a loop delaying those issued outside.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from app.planning.hlo import Computation, Instruction, Module, exchange, gathered_bytes, inner_collectives
from app.planning.network import Network
from app.planning.sources import OTHER

GATHER_RATE = 0.8  # of the HBM's rate: libtpu's hbm_bandwidth_adjustment_factor for gathers on SparseCores
OWN = 0.9  # share of a computation's time that makes it one part's

Seconds = dict[str, float]


def _none() -> Seconds:
    return defaultdict(float)


@dataclasses.dataclass
class Spent:
    """Of one run of a computation. busy: seconds of the core by part; exposed: seconds it waits, moving: seconds of the
    network, both by "collective kind, part"."""

    busy: Seconds = dataclasses.field(default_factory=_none)
    exposed: Seconds = dataclasses.field(default_factory=_none)
    moving: Seconds = dataclasses.field(default_factory=_none)

    @property
    def seconds(self) -> float:
        return sum(self.busy.values()) + sum(self.exposed.values())

    def add(self, other: "Spent", times: int) -> None:
        for mine, its in ((self.busy, other.busy), (self.exposed, other.exposed), (self.moving, other.moving)):
            for key, value in its.items():
                mine[key] += value * times


def walk(
    module: Module, network: Network, core_seconds: Callable[[Instruction], float], part: Callable[[Instruction], str]
) -> Spent:
    """Of the whole program. core_seconds: of an instruction on the core; part: what its time is booked under."""
    done: dict[str, Spent] = {}

    def of(name: str) -> Spent:
        if name not in done:
            done[name] = _walk_one(module, module.computations.get(name, {}), network, core_seconds, part, of)
        return done[name]

    return of(module.entry)


def _walk_one(
    module: Module,
    computation: Computation,
    network: Network,
    core_seconds: Callable[[Instruction], float],
    part: Callable[[Instruction], str],
    of: Callable[[str], Spent],
) -> Spent:
    spent = Spent()
    free = {"ici": 0.0, "dcn": 0.0, "sparse cores": 0.0}
    arriving: dict[str, tuple[str, float]] = {}

    def wait(key: str, until: float) -> None:
        spent.exposed[key] += max(0.0, until - spent.seconds)

    def occupy(where: str, seconds: float, key: str) -> tuple[str, float]:
        """The key it is booked under and the time at which it has arrived."""
        free[where] = max(spent.seconds, free[where]) + seconds
        spent.moving[key] += seconds
        return key, free[where]

    def issue(x: Instruction, computation: Computation) -> tuple[str, float]:
        transfer = network.transfer(exchange(x, computation, network.size))
        return occupy(transfer.network, transfer.seconds, f"{x.collective}, {part(x)}")

    for x in computation.values():
        if x.collective:
            arrival = issue(x, computation)
            if x.operation.endswith("-start") or x.operation == "recv":
                arriving[x.name] = arrival
            else:
                wait(*arrival)
            continue
        if x.operation.endswith("-done") and x.operands and x.operands[0] in arriving:
            wait(*arriving.pop(x.operands[0]))
        if x.operation == "call-update":  # gives the SparseCores, called before, what they work on
            start = computation[x.operands[0]]
            for y, inside in inner_collectives(module, start):
                arriving[x.name] = issue(y, inside)
            if moved := gathered_bytes(module, start):
                seconds = moved / (GATHER_RATE * network.generation.hbm_bytes_per_second)
                arriving[x.name] = occupy("sparse cores", seconds, f"gather, {part(start)}")
        if x.operation.startswith("call-"):
            continue
        fused = [issue(y, inside) for y, inside in inner_collectives(module, x)]
        if seconds := core_seconds(x):
            spent.busy[part(x)] += seconds
        for arrival in fused:  # the products of such a fusion hide its collective
            wait(*arrival)
        for inner, trips in module.inner(x, computation):
            spent.add(of(inner), trips)
    _book_copies(spent)
    return spent


def _book_copies(spent: Spent) -> None:
    """What the compiler added to a loop that is all one part's (copies of what it carries) is that part's."""
    known = [(seconds, name) for name, seconds in spent.busy.items() if name != OTHER]
    if known and max(known)[0] > OWN * sum(seconds for seconds, _ in known):
        spent.busy[max(known)[1]] += spent.busy.pop(OTHER, 0.0)
