"""What a launch refuses or escapes, before anything is called."""

import json
import os
import shlex
import stat
import subprocess
import sys

import pytest
import yaml

from app.config import ConfigError
from launch import render
from launch.job import read_job
from tests.unit.launch import cases

JOBSET = cases.arguments("gke-jobset", "v5p", 2)
DEMO = ("--config=configs/demo.py", "--config.mesh.cpu_devices=0", "--workdir=/data/x", "--name=demo",
        "--image=i", "--mounts=/data=gs://bkt", "--config.data.path=/data/p")  # fmt: skip


def changed(arguments, *more):
    """`arguments` with flags replaced or added; "-image" removes --image."""
    names = {part.partition("=")[0] for part in more}
    names |= {f"-{part}" for part in more if not part.startswith("--")}
    kept = [part for part in arguments if part.partition("=")[0] not in names]
    return kept + [part for part in more if part.startswith("--")]


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        read_job(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "more, words",
    [
        (("--topology=v5p:4x4x9",), ("v5p:4x4x9", "144 chips", "the nearest")),
        (("--topology=v7:4x4x8",), ("unknown TPU generation",)),
        (("--topology=v5p-256",), ("v5p-256",)),
        (("--slices=3",), ("slices", "128 a slice are 3")),
        (("--slices=1",), ("mesh.dcn.data=2",)),
        (("--topology=v5p:2x2x1",), ("one host",)),
        (("--config.mesh.context=64", "--config.mesh.fsdp=1"), ("makes 128", "256 devices")),
        (("--config.global_batch=3",), ("global_batch=3", "2 or 4")),
        (("--config.controller=single",), ("controller='single'", "gke-pathways")),
        (("--config.mesh.cpu_devices=8",), ("mesh.cpu_devices=8",)),
        (("--target=gke",), ("--target='gke'", "gke-jobset")),
        (("--program=eval",), ("--program='eval'",)),
        (("--workdir=/other/a",), ("lost with the container", "--mounts")),
        (("--workdir=gs://my-runs/a",), ("gs:// cannot be appended to", "--mounts=/runs")),
        (("--cache=/tmp/cache",), ("--cache=/tmp/cache is lost",)),
        (("--config.data.path=/elsewhere",), ("data.path=/elsewhere",)),
        (("--config.data.path=gs://bkt/p",), ("mount the bucket",)),
        (("--name=LC_1m",), ("--name='LC_1m'",)),
        (("--name=" + "a" * 45,), ("45 characters", "at most 42")),
        (("-image",), ("--image is missing",)),
        (("--max_restarts=-1",), ("--max_restarts=-1",)),
        (("--env=TPU_WORKER_ID=0",), ("TPU_WORKER_ID is set by",)),
        (("--env=LIBTPU_INIT_ARGS=x",), ("LIBTPU_INIT_ARGS",)),
        (("--env=A=1,A=2",), ("A is given twice",)),
        (("--env=A=1", "--secrets=A=s/k"), ("both set A",)),
        (("--mounts=/data=nfs",), ("--mounts: the part of '/data'", "pvc:CLAIM")),
        (("--config=/etc/passwd.py",), ("no such file",)),
        (("--nam=x",), ("--nam is no flag", "--name")),
    ],
)
def test_what_does_not_fit_is_refused(more, words):
    message = refusal(*changed(JOBSET, *more))
    assert all(word in message for word in words), message


def test_a_config_that_the_image_does_not_hold_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from configs.demo import get_config\n")
    assert "that folder is what the image holds" in refusal(*changed(JOBSET, f"--config={path}"))


def test_pathways_and_tpu_vm_have_rules_of_their_own():
    pathways = cases.arguments("gke-pathways", "v5p", 1)
    mounted = "--mounts=/data=gs://my-corpus,/runs=pvc:runs"
    assert "mount a bucket above it" in refusal(*changed(pathways, mounted))
    assert "at most 22" in refusal(*changed(pathways, "--name=" + "a" * 23))
    vm = ["--target=tpu-vm", "--topology=tpu7x:2x2x2", "--queue=q"]
    message = refusal(*changed(DEMO, *vm))
    assert all(word in message for word in ("tpu7x", "--project is missing", "--zone", "--queue", "--mounts"))


def test_all_problems_at_once_and_exit_status_2(capsys):
    status = render.main(changed(JOBSET, "--name=B_", "--topology=v5p:1x1x1", "--env=X=1,", "--workdir=x", "--foo=1"))
    assert status == 2
    assert "--foo" in capsys.readouterr().err
    assert render.main(changed(JOBSET, "--name=B_", "--topology=v5p:1x1x1", "--workdir=x")) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("--name='B_'", "v5p:1x1x1", "--workdir='x'"))


HOSTILE = [
    "x; rm -rf /", "$(reboot)", "`id`", "a\nkind: Pod", "a' b", 'a" b', "{{x}}", "&x", "*x", "!!python/x", "a b", "--x",
]  # fmt: skip
ESCAPED = ["$(reboot)", "$$(A)", "`id`; rm -rf /", "a' b\" c", "{a: b}", "#x", "- y", "*alias", "!!int 3"]


NAMES = ("name", "workdir", "image", "namespace", "queue", "priority", "service_account", "reservation", "cache")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_paths_are_refused(text):
    message = refusal(*changed(JOBSET, *(f"--{flag}={text}" for flag in NAMES)))
    assert [flag for flag in NAMES if f"--{flag}={text!r} is not of the form" not in message] == []


@pytest.mark.parametrize("text", ESCAPED)
def test_hostile_values_are_escaped(text):
    """Environment and config texts come back exactly, after YAML and after Kubernetes' expansion of $(NAME)."""
    job = read_job(changed(JOBSET, f"--env=NOTE={text}", f"--config.data.weights={text}"))
    jobset = yaml.safe_load(render.render(job))
    main = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    value = next(entry["value"] for entry in main["env"] if entry["name"] == "NOTE")
    assert expanded(value, {"A": "leaked"}) == text
    assert f"--config.data.weights={text}" in [expanded(part, {"A": "leaked"}) for part in main["args"]]


def expanded(text, names):
    """Kubernetes' own expansion: $(NAME) is a reference, $$ is $."""
    out, index = "", 0
    while index < len(text):
        end = text.find(")", index)
        if text.startswith("$$", index):
            out, index = out + "$", index + 2
        elif text.startswith("$(", index) and end > 0:
            name = text[index + 2 : end]
            out, index = out + names.get(name, text[index : end + 1]), end + 1
        else:
            out, index = out + text[index], index + 1
    return out


def test_a_line_break_in_a_value_is_refused():
    assert "--env" in refusal(*changed(JOBSET, "--env=NOTE=a\nb"))


def test_the_shell_of_a_tpu_vm_gets_the_arguments_as_they_are():
    """A real shell reads the line that the VMs run."""
    hostile = "a' $(touch pwned) `id` ; rm x"
    vm = ("--target=tpu-vm", "--topology=v5e:4x4", "--project=my-project", "--zone=us-central2-b",
          f"--env=NOTE={hostile}", f"--config.data.weights={hostile}", "-mounts",
          "--config.global_batch=16")  # fmt: skip
    for image in ("", cases.DIGEST):
        text = render.render(read_job(changed(DEMO, *vm, f"--image={image}" if image else "-image")))
        command = dict(line.split("=", 1) for line in text.splitlines())["COMMAND"]
        show = f"{sys.executable} -c 'import json,sys;print(json.dumps(sys.argv[1:]))' {command}"
        got = json.loads(subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout)
        assert got == shlex.split(command)
        assert f"--config.data.weights={hostile}" in got
        assert (f"--env=NOTE={hostile}" if image else f"NOTE={hostile}") in got


SECRETS = ["ghp_" + "a" * 36, "hf_" + "b" * 34, "AIza" + "c" * 35, "https://me:pw@host/x"]


@pytest.mark.parametrize("secret", SECRETS)
def test_credentials_reach_neither_manifest_nor_message(secret, capsys):
    for more in (f"--env=NOTE={secret}", f"--config.data.tokenizer={secret}"):
        assert render.main(changed(JOBSET, more)) == 2
        captured = capsys.readouterr()
        assert "looks like a credential" in captured.err
        assert secret not in captured.err + captured.out
    message = refusal(*changed(JOBSET, "--env=HF_TOKEN=1234"))
    assert "--secrets=HF_TOKEN=SECRET/KEY" in message and "1234" not in message


def test_warnings(capsys):
    assert render.main(changed(JOBSET, "--image=gcr.io/p/i:latest", "--privileged", "--spot")) == 0
    err = capsys.readouterr().err
    assert all(word in err for word in ("not pinned", "--privileged", "checkpoint.every_steps=500"))
    assert render.main(JOBSET) == 0
    assert capsys.readouterr().err == ""


def stand_in(folder, name, body=""):
    """An executable `name` that writes its arguments and input to calls.json, a line a call, then runs `body`."""
    path = folder / name
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "text = '' if sys.stdin.isatty() else sys.stdin.read()\n"
        f"open({str(folder / 'calls.json')!r}, 'a').write(json.dumps([sys.argv[1:], text]) + '\\n')\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(folder):
    path = folder / "calls.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_apply_calls_kubectl_once_with_the_manifest(tmp_path, monkeypatch, capfd):
    stand_in(tmp_path, "kubectl", "print('jobset created')")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert render.main([*JOBSET, "--apply", "--namespace=team"]) == 0
    ((arguments, text),) = calls(tmp_path)
    assert arguments == ["apply", "--namespace=team", "--filename=-"]
    assert yaml.safe_load(text)["metadata"] == {"name": "lc-1m", "namespace": "team"}
    assert "jobset created" in capfd.readouterr().out


def test_apply_that_fails_says_so(tmp_path, monkeypatch, capfd):
    stand_in(tmp_path, "kubectl", "sys.exit('field is immutable')")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert render.main([*JOBSET, "--apply"]) == 1
    err = capfd.readouterr().err
    assert "field is immutable" in err and "kubectl delete jobset lc-1m --namespace=default" in err
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert render.main([*JOBSET, "--apply"]) == 1
    assert "kubectl is not installed" in capfd.readouterr().err


def test_apply_calls_nothing_when_the_launch_is_wrong(tmp_path, monkeypatch):
    stand_in(tmp_path, "kubectl")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert render.main(changed([*JOBSET, "--apply"], "--topology=v5p:4x4x5")) == 2
    assert calls(tmp_path) == []


def test_rendering_needs_no_jax():
    code = f"import sys\nfrom launch import render\nrender.main({JOBSET!r})\nassert 'jax' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
