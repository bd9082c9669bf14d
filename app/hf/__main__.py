"""Published checkpoints in and out.

    python -m app.hf import --checkpoint DIR --out WEIGHTS [--mesh fsdp=8,tensor=2] [--mtp]
    python -m app.hf export --workdir RUN|WEIGHTS --out DIR [--step N] [--source WEIGHTS] [--tokenizer DIR]

Import writes a directory of weights that a run starts from with --config.init_from=WEIGHTS; export writes a directory
that transformers and the tools around it load. Models: Qwen3.5 (dense and mixture of experts, also the language model
of a multimodal checkpoint) and Qwen3-Next. Only safetensors are read. Exit status: 0 done, 1 a bug, 2 a checkpoint or
option that cannot be used, with everything that is wrong with it; then nothing was written.
"""

import argparse
import sys
from collections.abc import Sequence

from app.cluster import runtime
from app.config import MESH_AXES
from app.config_flags import command_parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    runtime.use_cpu_devices(1)  # files to files: an accelerator is left alone
    from app import hf

    try:
        if arguments.command == "import":
            lines = hf.import_checkpoint(arguments.checkpoint, arguments.out, arguments.mesh, arguments.mtp)
        else:
            lines = hf.export_checkpoint(
                arguments.workdir, arguments.out, arguments.step, arguments.source, arguments.tokenizer
            )
    except hf.CheckpointError as error:
        print(error, file=sys.stderr)
        return runtime.EXIT_CONFIG
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("app.hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", allow_abbrev=False)
    importer.add_argument("--checkpoint", required=True, help="directory with config.json and safetensors")
    importer.add_argument("--out", required=True, help="the weights directory to write")
    importer.add_argument("--mesh", type=_mesh, default={}, help="mesh to store the shards of, as fsdp=8,tensor=2")
    importer.add_argument("--mtp", action="store_true", help="train mtp.* too (config.loss.mtp_weight above 0)")
    exporter = commands.add_parser("export", allow_abbrev=False)
    exporter.add_argument("--workdir", required=True, help="a run's directory, or imported weights")
    exporter.add_argument("--out", required=True, help="the directory to write")
    exporter.add_argument("--step", type=int, help="checkpoint of the run to export; the newest if not given")
    exporter.add_argument("--source", help="the weights the run started from, if they were moved")
    exporter.add_argument("--tokenizer", help="directory of tokenizer files to put beside the weights")
    return parser


def _mesh(text: str) -> dict[str, int]:
    sizes = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis not in MESH_AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise argparse.ArgumentTypeError(f"{item!r}: expected AXIS=SIZE with AXIS one of {', '.join(MESH_AXES)}")
        sizes[axis] = int(size)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
