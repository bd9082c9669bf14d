"""The whole test command: python -m tests.run [--slow] [pytest arguments]

Tests that need several devices fix the number of CPU devices before jax starts, so each folder of them runs in pytest
processes of its own. A file stays in one process, which compiles its programs once. --slow runs the tests marked slow
instead of the others.
"""

import os
import subprocess
import sys

SEPARATE = ("tests/multi_device", "tests/multi_process")
NO_TESTS = 5  # pytest's exit status when a folder holds none of the selected tests


def main(arguments: list[str]) -> int:
    marks = ["-m", "slow"] if "--slow" in arguments else []
    arguments = [argument for argument in arguments if argument != "--slow"]
    folders = [[folder] for folder in SEPARATE if os.path.isdir(folder)]
    rest = ["tests", *(f"--ignore={folder}" for folder in SEPARATE)]
    worst = 0
    for selection in (rest, *folders):
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *selection, *marks, *arguments]
        status = subprocess.run(command, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}).returncode
        worst = worst or (0 if status == NO_TESTS else status)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
