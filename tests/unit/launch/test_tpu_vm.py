"""launch/tpu_vm.sh and launch/tpu_node.sh: calls recorded by stand-ins on PATH, failures, what the node really runs."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import render
from launch.job import read_job

ROOT = Path(__file__).parents[3]
SCRIPT, NODE = ROOT / "launch" / "tpu_vm.sh", ROOT / "launch" / "tpu_node.sh"
BASE = ("--config=configs/demo.py", "--config.mesh.cpu_devices=0", "--target=tpu-vm", "--name=demo",
        "--project=my-project", "--zone=us-east5-a", "--workdir=/mnt/runs/demo", "--config.data.path=gs://bkt/p",
        "--mounts=/mnt/runs=host",
        "--topology=v5p:2x2x4", "--config.mesh.data=2", "--config.mesh.dcn.data=2", "--config.global_batch=32",
        "--service_account=a@b.c")  # fmt: skip
WHERE = ["--project=my-project", "--zone=us-east5-a", "--quiet"]
EVERYWHERE = ["--node=all", "--worker=all", "--batch-size=8"]
QR = ["compute", "tpus", "queued-resources"]
LIST = [*QR, "list", "--filter=name~/demo$", "--format=value(state.state)", *WHERE]
# Answers the n-th `list` with the n-th of STATES (the last one again), fails where FAIL is a part of the arguments.
GCLOUD = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
open(os.environ["CALLS"], "a").write(json.dumps(arguments) + "\\n")
if os.environ.get("FAIL") and os.environ["FAIL"] in " ".join(arguments):
    sys.exit("gcloud: no permission")
if "list" in arguments:
    asked = sum("list" in line for line in open(os.environ["CALLS"])) - 1
    states = os.environ["STATES"].split(",")
    print(states[min(asked, len(states) - 1)])
"""


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "settings"

    def write(*more):
        path.write_text(render.render(read_job([*BASE, *more])))
        return path

    return write


@pytest.fixture
def vm(tmp_path):
    """vm(action, file, states=..., fail=..., dry=False) -> (exit status, gcloud's argument lists, output)."""
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(GCLOUD.format(python=sys.executable))
    gcloud.chmod(gcloud.stat().st_mode | stat.S_IXUSR)

    def run(action, file, states="", fail="", dry=False):
        calls = tmp_path / "calls"
        calls.write_text("")
        environ = {
            **os.environ, "PATH": f"{gcloud.parent}:{os.environ['PATH']}", "CALLS": str(calls), "STATES": states,
            "FAIL": fail, "TPU_VM_POLL_SECONDS": "0",
        }  # fmt: skip
        command = ["bash", SCRIPT, *(["--dry-run"] if dry else []), action, file]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        made = [json.loads(line) for line in calls.read_text().splitlines()]
        return done.returncode, made, done.stdout + done.stderr

    return run


def test_create_asks_once_and_waits(vm, settings):
    file = settings()
    status, calls, output = vm("create", file, ",WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE")
    assert status == 0 and "demo is ACTIVE" in output
    assert calls == [LIST, [
        "alpha", *QR, "create", "demo", "--node-count=2", "--node-prefix=demo", "--type=v5p", "--topology=2x2x4",
        "--runtime-version=v2-alpha-tpuv5", "--service-account=a@b.c", "--async", *WHERE],
        LIST, LIST, LIST]  # fmt: skip
    assert vm("create", file, "ACTIVE")[:2] == (0, [LIST, LIST])  # again: nothing is created


def test_create_of_one_slice_on_spot_or_reserved_capacity(vm, settings):
    one = ("--config.mesh.data=1", "--config.mesh.dcn.data=1", "--config.global_batch=16")
    base = [part for part in BASE if part.partition("=")[0] not in {flag.partition("=")[0] for flag in one}]
    file = settings()
    file.write_text(render.render(read_job([*base, *one, "--spot", "--reservation=pool-1"])))
    create = vm("create", file, ",ACTIVE")[1][1]
    assert "--node-id=demo" in create and not any(part.startswith("--node-count") for part in create)
    assert {"--spot", "--reserved", "--reservation=pool-1"} <= set(create)


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "SUSPENDING"])
def test_create_over_a_dead_request_says_delete(vm, settings, state):
    status, calls, output = vm("create", settings(), state)
    assert (status, calls) == (1, [LIST])
    assert f"demo is {state}" in output and "delete" in output


def test_create_that_dies_while_waiting(vm, settings):
    status, _, output = vm("create", settings(), ",PROVISIONING,FAILED")
    assert status == 1 and "demo is FAILED" in output


def test_setup_with_an_image_and_with_sources(vm, settings):
    status, calls, _ = vm("setup", settings("--image=us-docker.pkg.dev/p/r/i@sha256:" + "0" * 64))
    assert status == 0
    remote = f"--command=bash ./demo/{NODE.name} setup"
    assert calls[0] == [*QR, "ssh", "demo", "--command=mkdir -p ./demo", *EVERYWHERE, *WHERE]
    assert calls[1][:4] == [*QR, "scp"] and calls[1][6:] == ["demo:./demo/", *EVERYWHERE, *WHERE]
    assert [Path(part).name for part in calls[1][4:6]] == [NODE.name, "settings"]
    assert calls[2] == [*QR, "ssh", "demo", remote, *EVERYWHERE, *WHERE]
    status, calls, _ = vm("setup", settings())
    assert status == 0 and [Path(part).name for part in calls[1][4:7]] == [NODE.name, "settings", "source.tar.gz"]


@pytest.mark.parametrize("action", ["start", "stop"])
def test_start_and_stop_reach_all_hosts_at_once(vm, settings, action):
    status, calls, _ = vm(action, settings())
    assert status == 0
    assert calls == [[*QR, "ssh", "demo", f"--command=bash ./demo/tpu_node.sh {action}", *EVERYWHERE, *WHERE]]


def test_status_logs_delete(vm, settings):
    file = settings()
    status, calls, output = vm("status", file, "ACTIVE")
    assert status == 0 and "queued resource: ACTIVE" in output
    assert calls == [LIST, [*QR, "ssh", "demo", "--command=bash ./demo/tpu_node.sh status", *EVERYWHERE, *WHERE]]
    _, calls, _ = vm("logs", file)
    assert calls == [[*QR, "ssh", "demo", "--command=bash ./demo/tpu_node.sh logs", "--node=0", "--worker=0", *WHERE]]
    _, calls, _ = vm("delete", file, "SUSPENDED")
    assert calls == [LIST, [*QR, "delete", "demo", "--force", "--async", *WHERE]]
    status, calls, output = vm("delete", file, "")  # again: it is gone
    assert (status, calls) == (0, [LIST]) and "no such queued resource" in output


@pytest.mark.parametrize(
    "action, fail, words",
    [
        ("create", " list ", "create: cannot list"),
        ("create", " create ", "create: the request failed"),
        ("setup", "mkdir", "setup: cannot reach"),
        ("setup", " scp ", "setup: cannot copy"),
        ("setup", "tpu_node.sh setup", "setup: a host could not install"),
        ("start", " ssh ", "start: a host did not start"),
        ("status", " list ", "status: cannot list"),
        ("status", " ssh ", "status: a host does not answer"),
        ("logs", " ssh ", "logs: the first host"),
        ("stop", " ssh ", "stop: a host did not stop"),
        ("delete", " list ", "delete: cannot list"),
        ("delete", " delete ", "delete: the request failed"),
    ],
)
def test_each_failing_step_is_named_and_ends_the_action(vm, settings, action, fail, words):
    states = "ACTIVE" if action != "create" else ""
    status, calls, output = vm(action, settings(), states, fail)
    assert status == 1 and words in output and "gcloud: no permission" in output
    assert fail in " ".join(calls[-1])  # nothing was called after it


@pytest.mark.parametrize("action", ["create", "setup", "start", "status", "logs", "stop", "delete"])
def test_dry_run_prints_every_command_and_calls_nothing(vm, settings, action):
    status, calls, output = vm(action, settings(), dry=True)
    assert (status, calls) == (0, [])
    assert "gcloud" in output and "--project=my-project" in output


@pytest.mark.slow
@pytest.mark.parametrize("action", ["create", "setup", "delete"])
def test_the_real_gcloud_knows_every_command_and_flag(vm, settings, action):
    """By its own help, which needs no network: create, list, ssh, scp and delete are made by these actions."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        pytest.skip("gcloud is not installed")
    _, calls, _ = vm(action, settings("--spot", "--reservation=pool-1"), "ACTIVE" if action == "delete" else ",ACTIVE")
    for call in {tuple(part.partition("=")[0] for part in call) for call in calls}:
        command = call[: call.index("queued-resources") + 2]
        help_text = subprocess.run([gcloud, *command, "--help"], capture_output=True, text=True, check=True).stdout
        flags = {part for part in call if part.startswith("--") and part not in ("--project", "--quiet")}
        assert [flag for flag in flags if flag not in help_text] == [], command


def test_bad_arguments_and_settings(vm, settings, tmp_path):
    file = settings()
    assert vm("destroy", file)[0] == 2
    assert vm("start", tmp_path / "none")[0] == 2
    file.write_text(file.read_text() + "NAME2=x\n")
    status, calls, output = vm("start", file)
    assert (status, calls) == (2, []) and "NAME2=x" in output
    file.write_text("\n".join(line for line in settings().read_text().splitlines() if "ZONE" not in line) + "\n")
    assert "lacks ZONE" in vm("start", file)[2]


def test_settings_are_text_and_never_run(vm, settings, tmp_path):
    file = settings()
    file.write_text(file.read_text().replace("SPOT=", "SPOT=$(touch pwned)").replace("ZONE=us", "ZONE=`touch pwned`us"))
    vm("create", file, ",ACTIVE")
    vm("delete", file, "ACTIVE")
    assert not list(tmp_path.rglob("pwned")) and not (ROOT / "pwned").exists()


@pytest.mark.parametrize("name, text", [("NAME", "x; touch pwned"), ("SLICES", "a[$(touch pwned)]"), ("HOSTS", "")])
def test_settings_that_bash_would_evaluate_are_refused(vm, settings, name, text):
    file = settings()
    lines = [f"{name}={text}" if line.startswith(f"{name}=") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n")
    status, calls, output = vm("start", file)
    assert (status, calls) == (2, []) and f"{name}={text}" in output
    assert not (ROOT / "pwned").exists() and not Path("pwned").exists()


def test_shellcheck_is_clean():
    found = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(found) if found.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, SCRIPT, NODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def node(tmp_path):
    """node(action) on a directory as `setup` leaves it, with stand-ins for the metadata server, sudo and docker."""
    folder, tools = tmp_path / "demo", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    shutil.copy(NODE, folder)
    log = f'echo "$(basename "$0") $*" >>{tmp_path}/asked; [[ $1 != tee ]] || cat >/dev/null'
    address = "echo \"MEGASCALE_COORDINATOR_ADDRESS: '10.1.2.3'\""
    curl = f"case $* in *tpu-env) {address};; *.gpg) echo key;; *) exit 22;; esac"
    for name, text in {"curl": curl, "sudo": log, "lsb_release": "echo jammy"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TPU_NODE_RESTART_SECONDS": "0"}

    def run(action, program=None, restarts=3, grace=20, mounts=""):
        if program is not None:
            values = {"NAME": "demo", "IMAGE": "", "MOUNTS": mounts, "GRACE_SECONDS": grace, "MAX_RESTARTS": restarts,
                      "COMMAND": f"{sys.executable} -c '{program}'"}  # fmt: skip
            (folder / "settings").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        command = ["bash", folder / "tpu_node.sh", action]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    run.folder, run.asked = folder, tmp_path / "asked"
    yield run
    if (folder / "run.pid").exists():
        run("stop")


def wait_until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


COUNT = 'open("runs", "a").write("x"); n = len(open("runs").read()); '


def test_node_starts_again_by_exit_status(node):
    done = node("start", COUNT + "import sys; sys.exit({1: 42, 2: 134}.get(n, 3))")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: (node.folder / "runs").exists() and (node.folder / "runs").read_text() == "xxx")
    wait_until(lambda: "not running, last exit status 3" in node("status").stdout)
    log = (node.folder / "run.log").read_text()
    assert "exit status 42 after 0 restarts" in log and "exit status 134 after 1 restarts" in log


def test_node_gives_up_after_its_restarts(node):
    node("start", COUNT + "import sys; sys.exit(137)", restarts=2)
    wait_until(lambda: "not running, last exit status 137" in node("status").stdout)
    assert (node.folder / "runs").read_text() == "xxx"


WAITING = (
    "import os, signal, sys, time; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); "
    'open("ready", "w").write(os.environ["JAX_COORDINATOR_ADDRESS"]); time.sleep(60)'
)


def test_node_stop_sends_sigterm_and_does_not_start_again(node):
    assert "started" in node("start", WAITING).stdout
    wait_until(lambda: (node.folder / "ready").exists() and (node.folder / "ready").read_text())
    assert (node.folder / "ready").read_text() == "10.1.2.3:8476"
    assert "already running" in node("start").stdout  # safe to repeat
    assert node("status").stdout.startswith("running")
    assert "stopped, exit status 42" in node("stop").stdout
    assert "not running" in node("stop").stdout
    assert "last exit status 42" in node("status").stdout


def test_node_kills_what_does_not_stop(node):
    program = WAITING.replace("lambda *_: sys.exit(42)", "signal.SIG_IGN")
    node("start", program, grace=1)
    wait_until(lambda: (node.folder / "ready").exists() and (node.folder / "ready").read_text())
    pid = int((node.folder / "run.pid").read_text())
    done = node("stop")
    assert done.returncode == 1 and "killed after 1 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(pid, 0)
            time.sleep(0.1)


def test_node_mounts_buckets_and_misses_what_is_not_mounted(node, tmp_path):
    there, bucket = tmp_path / "there", tmp_path / "bucket"
    there.mkdir()
    both = f"{there}=host {bucket}=gs://runs"
    done = node("start", WAITING, mounts=both)
    assert done.returncode == 1 and f"{bucket} is not there" in done.stdout + done.stderr
    asked = node.asked.read_text()
    assert f"sudo mkdir -p {bucket}" in asked and "--metadata-cache-ttl-secs 0 runs " + str(bucket) in asked
    bucket.mkdir()
    assert "started" in node("start").stdout
    node("stop")
    done = node("start", WAITING, mounts=f"{tmp_path}/nothing=host")
    assert done.returncode == 1 and "nothing is not there: mount it" in done.stderr


def test_node_setup_installs_gcsfuse_and_pulls_the_image(node, tmp_path):
    node("status", "")
    settings = node.folder / "settings"
    (tmp_path / "runs").mkdir()
    text = settings.read_text().replace("IMAGE=", "IMAGE=eu-docker.pkg.dev/p/r/i").replace(
        "MOUNTS=", f"MOUNTS={tmp_path}/runs=gs://runs")  # fmt: skip
    settings.write_text(text)
    done = node("setup")
    assert done.returncode == 0, done.stderr
    asked = node.asked.read_text().splitlines()
    assert [line.split()[1] for line in asked][-3:] == ["gcsfuse", "gcloud", "docker"]
    assert ("sudo apt-get install --quiet --yes gcsfuse" in asked) == (shutil.which("gcsfuse") is None)
    assert asked[-1] == "sudo docker pull eu-docker.pkg.dev/p/r/i"


def test_node_without_a_coordinator_does_not_start(node):
    (node.folder.parent / "tools" / "curl").write_text("#!/bin/bash\nexit 22\n")
    done = node("start", WAITING)
    assert done.returncode == 1 and "did not start" in done.stderr
    assert not (node.folder / "ready").exists()
