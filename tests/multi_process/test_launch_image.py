"""The Dockerfile's steps, run one by one without a Docker engine.

The file system is a throw-away layer over this machine's own (so the base image is played by what is installed here,
with its Python), the context is what .dockerignore lets through, and what the image's user then runs is the real
program. Needs root. Not checked: the base image itself, and what its own Debian packages are.
"""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps():
    """(instruction, text) of every line of the Dockerfile."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def context(folder):
    """Copy what .dockerignore lets through (patterns in order, the last that matches decides)."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    command = ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        keep = True
        parts = [name, *map(str, list(Path(name).parents)[:-1])]
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            tried = [Path(part).name for part in parts] if "**/" in rule else parts
            if any(fnmatch.fnmatchcase(part, pattern) for part in tried):
                keep = rule.startswith("!")
        if keep and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def script():
    """The steps as a shell script, to run inside the layer; the context is at /context."""
    user, where, out = "root", "/", ["set -euo pipefail"]
    for instruction, text in steps():
        if instruction == "RUN":
            out.append(f"cd {where} && bash -c {shlex.quote(text.replace('--no-cache ', ''))}")  # this machine's cache
        elif instruction == "WORKDIR":
            where = text
            out.append(f"mkdir -p {text}")
        elif instruction == "COPY":
            *sources, target = text.split()
            target = where if target == "./" else f"{where}/{target}"
            copied = [f"/context/{name}/." if (ROOT / name).is_dir() else f"/context/{name}" for name in sources]
            out.append(f"mkdir -p {target} && cp -r {' '.join(copied)} {target}")
        elif instruction == "ENV":
            out.append(f"export {text}")
        elif instruction == "USER":
            user = text
        elif instruction == "ENTRYPOINT":
            out.append(f"ENTRYPOINT=({' '.join(re.findall(r'"([^"]*)"', text))})")
        else:
            assert instruction in ("FROM", "ARG"), instruction
    as_user = f"setpriv --reuid={user} --regid={user} --clear-groups env HOME=/home/{user} JAX_PLATFORMS=cpu"
    out += [
        f"cd {where}",
        f'as_user="{as_user}"',
        '$as_user "${ENTRYPOINT[@]}" --config=configs/demo.py --workdir=/tmp/run --config.steps=2 --config.seq_len=64 '
        "--config.eval.batches=1",
        "$as_user python -m launch.preflight --config=configs/demo.py --workdir=/tmp/run",
        "$as_user python -c 'import gcsfs, libtpu, pathwaysutils; print(\"extras are there\")'",
        "$as_user bash -c 'echo runs as $(id -u)'",
        "! ls -d tests .git 2>/dev/null",
        "! $as_user touch app/x 2>/dev/null",
    ]
    return "\n".join(out)


def test_every_folder_that_the_program_is_made_of_is_in_the_context(tmp_path):
    context(tmp_path)
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"app", "configs", "data", "launch", "pyproject.toml", "requirements.lock"}
    copied = {name for kind, text in steps() if kind == "COPY" for name in text.split()[:-1]}
    assert copied == found


def test_signals_reach_python_and_nobody_is_root():
    kinds = dict(steps())
    assert kinds["ENTRYPOINT"].startswith("[") and "CMD" not in kinds
    assert kinds["USER"] == "longscan" and "--uid 1000" in (ROOT / "Dockerfile").read_text()


@pytest.mark.slow
def test_the_steps_make_an_image_that_trains(tmp_path):
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare for a throw-away layer of the file system")
    (tmp_path / "context").mkdir()
    context(tmp_path / "context")
    (tmp_path / "steps").write_text(script())
    layer = f"""
        set -e
        cd {tmp_path} && mkdir layer && mount -t tmpfs layer layer && cd layer && mkdir upper work root
        mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
        mkdir -p root/context root/opt && mount --bind {tmp_path}/context root/context
        mount -t proc proc root/proc && mount --rbind /dev root/dev
        ! getent passwd 1000 >/dev/null || chroot root userdel --force "$(getent passwd 1000 | cut -d: -f1)"
        chmod a+rx root/root && rm -rf root/opt/longscan root/work
        cp {tmp_path}/steps root/steps && chroot root bash /steps
    """
    environ = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TERM")}
    names = ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE")
    environ |= {key: os.environ[key] for key in names if key in os.environ}
    environ["PATH"] = f"{sys.base_prefix}/bin:{environ['PATH']}"  # the base image's python is 3.12
    command = ["unshare", "--mount", "bash", "-c", layer]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in ("extras are there", "runs as 1000", "preflight passed"):
        assert words in done.stdout
