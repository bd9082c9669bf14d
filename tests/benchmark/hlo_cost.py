"""Cost of a compiled program in the few figures that tests and tables compare, by the plan's reading of its text.

XLA's instructions of a TPU program carry the compiler's estimated cycles. Pallas kernels carry none: given the
topology, each is compiled alone and its final bundles are counted (app.planning.kernels). Both times the loops' trips.
Estimates are those of all cores of a device, bundles those of one core: where two cores work as one device (v4, v5p) a
grid's "parallel" dims are shared out, and a kernel's bundles are one core's share. `Cost.harsh` adds both cores'.

    python -m tests.benchmark.hlo_cost [--topology v5p:2x2x1]

checks that on programs whose counts are known, and prints them.
"""

import argparse
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PS

from app.cluster.hardware import parse_topology
from app.planning import compiler, kernels
from app.planning.hlo import FREE_CALLS, Module, exchange, inner_collectives

# libtpu as a compiler only, read when it is loaded.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@dataclasses.dataclass
class Cost:
    """Of one device: cycles of XLA's instructions (TPU only), bundles of one core by kernel, bytes and number of
    collectives by kind, number of working custom calls by target (of which only Pallas kernels are counted)."""

    cycles: int = 0
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    collectives: Counter[str] = dataclasses.field(default_factory=Counter)
    custom_calls: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def total(self) -> int:
        """With the kernels' bundles of one core: the cycles that pass, each core doing its share."""
        return self.cycles + self.kernels.total()

    def harsh(self, cores: int) -> int:
        """With the kernels' bundles of all cores added up."""
        return self.cycles + cores * self.kernels.total()


def analyze(text: str, topology: str | None = None) -> Cost:
    """text: `compiled.as_text()`; topology (that it was compiled for): count the kernels too."""
    cost, module = Cost(), Module.parse(text)
    for x, computation, times in module.executed():
        cost.cycles += times * x.cycles
        for y, inside in [(x, computation)] if x.collective else inner_collectives(module, x):
            one = exchange(y, inside, devices=1)
            cost.sent[one.kind] += times * one.bytes
            cost.collectives[one.kind] += times
        if x.operation == "custom-call" and x.target not in FREE_CALLS:
            cost.custom_calls[x.target] += times
            if topology and x.target == kernels.TARGET:
                name = x.name.split(".")[0]
                cost.kernels[name] += times * kernels.cycles(kernels.request(x, computation, topology))
    return cost


def cores(topology: str) -> int:
    """TensorCores that work as one device."""
    return compiler.devices(parse_topology(topology))[0].num_cores


def compile_for(topology: str, function: Callable, *arguments: jax.ShapeDtypeStruct):
    """`function` compiled for one device of a topology."""
    mesh = Mesh(np.array(compiler.devices(parse_topology(topology))[:1]), ("one",))
    place = NamedSharding(mesh, PS())
    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arguments]
    return jax.jit(function).lower(*shaped).compile()


def cost_of(topology: str, function: Callable, *arguments: jax.ShapeDtypeStruct) -> Cost:
    return analyze(compile_for(topology, function, *arguments).as_text() or "", topology)


def check(topology: str) -> dict[str, float]:
    """Figures of programs with known counts. Raises AssertionError where one is not what it must be."""
    chip = parse_topology(topology).generation
    size, trips = 4096, 7
    square = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    product = cost_of(topology, jnp.matmul, square, square).cycles
    peak = 2 * size**3 / chip.flops_per_cycle  # of all cores of a device

    def repeated(count: int) -> int:
        def loop(x, y):
            return lax.fori_loop(0, count, lambda _, z: (z @ y).astype(z.dtype), x)

        return cost_of(topology, loop, square, square).cycles

    short, long = repeated(trips), repeated(3 * trips)
    assert 1 <= product / peak < 1.35, (product, peak)
    assert math.isclose(long, 3 * short, rel_tol=0.03), (short, long)

    def kernel(steps: int, calls: int, shared: Literal["parallel", "arbitrary"]) -> int:
        def body(x_ref, y_ref):
            y_ref[...] = jnp.exp(x_ref[...])

        block = pl.BlockSpec((None, 8, 128), lambda i, j: (i, j, 0))
        semantics = pltpu.CompilerParams(dimension_semantics=[shared, "arbitrary"])
        x = jax.ShapeDtypeStruct((2, 8 * steps, 128), jnp.float32)
        call = pl.pallas_call(body, grid=(2, steps), in_specs=[block], out_specs=block, out_shape=x,
                              compiler_params=semantics)  # fmt: skip
        return cost_of(topology, lambda y: lax.fori_loop(0, calls, lambda _, z: call(z), y), x).kernels.total()

    once, twice, more = (kernel(steps, 1, "parallel") for steps in (16, 32, 64))
    whole = [kernel(steps, 1, "arbitrary") for steps in (16, 32)]
    step = (twice - once) / 16
    assert more - twice == 2 * (twice - once), (once, twice, more)  # bundles x trips, exactly
    assert kernel(16, trips, "parallel") == trips * once
    split = (whole[1] - whole[0]) / (twice - once)
    assert math.isclose(split, cores(topology), rel_tol=0.1), split
    return {"product cycles": product, "product at peak": peak, "loop of 7": short, "kernel, a step": step,
            "kernel, all steps on one core": split * step}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x1"])
    for topology in parser.parse_args().topology:
        for name, figure in check(topology).items():
            print(f"{topology:12s} {name:32s} {figure:14,.1f}", flush=True)


if __name__ == "__main__":
    main()
