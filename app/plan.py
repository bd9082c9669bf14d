"""Whether a run fits and what a step costs, without its chips.

    python -m app.plan --config=configs/qwen3_5_27b.py --topology=v5p:8x8x4 [--slices=2] [--json=FILE] [--search=6]

Compiles the real train step for the TPU topology with libtpu on this machine (minutes; kept, so that a second call is
quick) and reports memory, FLOPs, collectives and estimated seconds. --search=N compiles up to N variations of mesh,
remat and accumulation and compares them.
Exit status: 0 it fits, 1 a bug, 2 bad config, unknown topology or it does not fit, 4 libtpu is missing or fails.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from app.cluster.hardware import Topology, parse_topology
from app.cluster.runtime import EXIT_COMPILER, EXIT_CONFIG
from app.config import Config, ConfigError, resolve_mesh
from app.config_check import validate
from app.config_flags import Flag, load_config
from app.planning import compiler, search
from app.planning.compiler import CompilerError, DoesNotFit

FLAGS = (
    Flag("topology", str, "generation and sides of one slice, as v5p:8x8x4", required=True),
    Flag("slices", int, "number of slices (the product of mesh.dcn.*)", default=1),
    Flag("json", str, "a file for the whole plan as JSON"),
    Flag("search", int, "compile up to so many variations of mesh, remat and accumulation", default=0),
)
REMEDIES = (
    "more chips: --topology, mesh.context (a longer cut of the sequence) or mesh.fsdp (rows, global_batch)",
    "remat='full' keeps less for the backward pass",
    "accumulation (rows of a step one after the other) if there are several rows a device",
    "mesh.tensor cuts heads, MLP and vocabulary; loss.chunk is the tokens whose logits exist at a time",
    "optimizer.moment_dtype='bfloat16' halves the first moment; --search=N tries meshes",
)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config, flags = load_config(sys.argv[1:] if argv is None else argv, FLAGS)
        topology = _topology(flags.topology)
        if flags.search:
            plans = [*_search(config, topology, flags.slices, flags.search)]
        else:
            plans = [_one(config, topology, flags.slices)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except DoesNotFit as error:
        print("\n".join([str(error), "what would help:", *(f"  - {line}" for line in REMEDIES)]), file=sys.stderr)
        return EXIT_CONFIG
    except CompilerError as error:
        print(error, file=sys.stderr)
        return EXIT_COMPILER
    if flags.json:
        Path(flags.json).write_text(json.dumps(plans if flags.search else plans[0], indent=1) + "\n")
    return 0 if any(plan["memory"]["fits"] for plan in plans) else EXIT_CONFIG


def _topology(text: str) -> Topology:
    try:
        return parse_topology(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plan(config: Config, topology: Topology, slices: int) -> dict:
    """The plan as JSON data (app.planning.estimate). Raises ConfigError, DoesNotFit or CompilerError."""
    from app.planning.estimate import estimate

    validate(config, topology.devices * slices, topology.devices)
    config = dataclasses.replace(config, mesh=resolve_mesh(config.mesh, topology.devices * slices))
    return estimate(config, topology, slices, compiler.compile_step(config, topology, slices))


def _one(config: Config, topology: Topology, slices: int) -> dict:
    from app.planning import report

    found = plan(config, topology, slices)
    print(report.table(found))
    if not found["memory"]["fits"]:
        print("\n".join(["what would help:", *(f"  - {line}" for line in REMEDIES)]))
    return found


def _search(config: Config, topology: Topology, slices: int, most: int) -> list[dict]:
    """Plans of the first `most` candidates, fastest first; prints a line for each and why others dropped out."""
    from app.planning import report

    found, tried = [], search.candidates(config, topology, slices)
    if not tried:
        raise ConfigError(
            f"no mesh of {topology.devices * slices} devices fits seq_len={config.seq_len} x "
            f"global_batch={config.global_batch}: change one of them, or mesh.expert and mesh.dcn"
        )
    print(f"{len(tried)} variations are valid; compiling {min(most, len(tried))}")
    for one in tried[:most]:
        try:
            found.append(plan(one, topology, slices))
            print(report.row(found[-1]), flush=True)
        except DoesNotFit as error:
            print(f"{one.mesh.sizes} remat={one.remat} accumulation={one.accumulation}: {error}", flush=True)
    if not found:
        raise DoesNotFit(f"none of the {min(most, len(tried))} variations fits")
    found.sort(key=lambda plan: (not plan["memory"]["fits"], plan["step"]["seconds"]))
    print("best:", *(report.row(plan) for plan in found[:3]), sep="\n  ")
    return found


if __name__ == "__main__":
    sys.exit(main())
