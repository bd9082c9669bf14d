"""Cycles of Pallas kernels, which carry no estimate: each distinct one is compiled alone and its bundles are counted.

libtpu can write the final VLIW bundles of what it compiles. A bundle takes about a cycle, an empty one too (it is
latency), times the trips of the loops around it; both sides of a branch count, so that kernels which skip blocks are
upper bounds. Bundles of a whole step would be gigabytes: a kernel is cut out of the program's text and compiled in a
process of its own. Cycles are kept on disk under the kernel's code, operands, generation and libtpu.

    python -m app.planning.kernels REQUEST.json DUMPS    (started by `cycles`)
"""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from app.cluster.hardware import parse_topology
from app.planning import compiler, hlo

JAX_NAMES = {"pred": "bool", "s8": "int8", "u8": "uint8", "bf16": "bfloat16", "f16": "float16", "s32": "int32",
             "u32": "uint32", "f32": "float32"}  # fmt: skip
TARGET = "tpu_custom_call"
COMPILE_SECONDS = 600
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2}:? ?)*):?\s*(>*)\s*\{")


def request(x: hlo.Instruction, computation: hlo.Computation, topology: str) -> dict:
    """All that the kernel's cost depends on, as JSON data."""
    start = x.attributes.index("backend_config=") + len("backend_config=")
    config = json.JSONDecoder().raw_decode(x.attributes, start)[0]
    config["custom_call_config"].pop("debug_locations", None)  # lines of the sources, which change nothing
    types = [hlo.arrays(computation[name].result)[0] for name in x.operands]
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)?)\}, ", x.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", aliases[1]) if aliases else []
    return {
        "topology": topology,
        "kernel": {name: config[name] for name in ("custom_call_config", "scoped_memory_configs")},
        "operands": [[JAX_NAMES[kind], list(dims)] for kind, dims, _ in types],
        "results": [[JAX_NAMES[kind], list(dims)] for kind, dims, _ in hlo.arrays(x.result)],
        "aliases": {int(operand): int(result or 0) for result, operand in pairs},
    }


def cycles(wanted: dict) -> int:
    """Of a `request`, from the cache or by compiling it. Raises CompilerError with libtpu's words if it fails."""
    key = hashlib.sha256(json.dumps([wanted, compiler.versions()], sort_keys=True).encode()).hexdigest()[:32]
    kept = compiler.cache_directory() / "kernels" / f"{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())["cycles"]
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        question = Path(folder, "request.json")
        question.write_text(json.dumps(wanted))
        dumps = Path(folder, "dumps")
        dumps.mkdir()
        arguments = ("xla_jf_dump_to=" + str(dumps), "xla_jf_dump_hlo_text=true", "xla_jf_dump_llo_text=true",
                     "xla_jf_emit_annotations=true")  # fmt: skip
        environment = compiler.environment() | {"LIBTPU_INIT_ARGS": " ".join(f"--{x}" for x in arguments)}
        command = [sys.executable, "-m", "app.planning.kernels", str(question), str(dumps)]
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS)
        if found.returncode:
            raise compiler.CompilerError(compiler.last_words(found.stderr))
        answer = json.loads(found.stdout.splitlines()[-1])
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer))
    partial.replace(kept)
    return answer["cycles"]


def compile_alone(wanted: dict, dumps: Path) -> int:
    """Cycles of the kernel; runs in the process that has the dump flags."""
    import jax
    import jax.numpy as jnp

    mesh = jax.sharding.Mesh(compiler.devices(parse_topology(wanted["topology"]))[:1], ("one",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shaped(entry):
        return jax.ShapeDtypeStruct(tuple(entry[1]), jnp.dtype(entry[0]), sharding=place)

    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(tuple(dims), jnp.dtype(kind)) for kind, dims in wanted["results"]],
        input_output_aliases={int(operand): result for operand, result in wanted["aliases"].items()},
        custom_call_api_version=1,
        legacy_backend_config=json.dumps(wanted["kernel"]),
    )
    text = jax.jit(call).lower(*map(shaped, wanted["operands"])).compile().as_text() or ""
    names = [x.name for x, _, _ in hlo.Module.parse(text).executed() if x.target == TARGET]
    for final in sorted(dumps.glob("*-packed-bundles-post-ra.txt")):
        parts = re.match(r"(\d+)-(.*)-\d+-packed-bundles-post-ra.txt$", final.name)
        if parts and parts[2] in names:
            original = next(dumps.glob(f"{parts[1]}-{parts[2]}-*-original.txt"))
            return count_bundles(final.read_text(errors="replace"), original.read_text(errors="replace"))
    raise RuntimeError(f"libtpu wrote no bundles for {names}: {sorted(x.name for x in dumps.iterdir())[:20]}")


def count_bundles(final: str, original: str) -> int:
    """Bundles x trips. final: the packed bundles, bodies of loops marked > and their heads LB; original: the program
    before, which tells the loops' bounds in the same order."""
    bounds = re.findall(r"^\s*loop: start=(\S+?), step=(\S+?), limit=(\S+)", original, re.MULTILINE)
    trips = [
        max(0, (int(limit) - int(start)) // max(1, int(step)))
        if all(re.fullmatch(r"-?\d+", n) for n in (start, step, limit)) else 1
        for start, step, limit in bounds
    ]  # fmt: skip
    total, loops, stack, last = 0, 0, [], {}
    for line in final.splitlines():
        found = _BUNDLE.match(line)
        if not found:
            continue
        head = "LB" in found[1]
        depth = len(stack) if line.rstrip().endswith("{}") else len(found[2])  # an empty bundle carries no loop mark
        del stack[depth - 1 if head and depth else depth :]
        while len(stack) < depth:
            level = len(stack)
            if head and level == depth - 1:
                last[level] = trips[loops] if loops < len(trips) else 1
                loops += 1
            stack.append(last.get(level, 1))
        total += math.prod(stack)
    return total


if __name__ == "__main__":
    print(json.dumps({"cycles": compile_alone(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))}))
