"""What a launch refuses or escapes, before anything is called."""

import json
import os
import random
import shlex
import stat
import subprocess
import sys

import pytest
import yaml

from app.config import ConfigError, key_types
from launch import render
from launch.inputs import FLAGS, TARGETS
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
        (("--workdir=/other/a",), ("--workdir=/other/a is in no mount", "gs://BUCKET/...", "--mounts")),
        (("--config.compile_cache=/tmp/cache",), ("compile_cache=/tmp/cache is in no mount",)),
        (("--config.data.path=/elsewhere",), ("data.path=/elsewhere",)),
        (("--config.data.tokenizer=/data/../etc/x",), ("data.tokenizer='/data/../etc/x'", "not of the form")),
        (("--config.init_from=weights",), ("init_from='weights' is not of the form",)),
        (("--mounts=/usr=gs://bkt",), ("/usr would hide",)),
        (("--mounts=/gcs/my-runs=pvc:x",), ("/gcs/my-runs would hide",)),
        (("--mounts=/data=gs://bkt,/data/x=gs://bkt2",), ("/data/x lies in the mount /data",)),
        (("--config.checkpoint.local_directory=/tmp/x",), ("/tmp/x would hide",)),
        (("--config.checkpoint.local_directory=/local", "--workdir=/local/x"), ("--workdir=/local/x is in no mount",)),
        (("--config.checkpoint.local_directory=x",), ("checkpoint.local_directory='x' is not of the form",)),
        (("--mounts=/data=host",), ("/data=host is not for --target=gke-jobset",)),
        (("--service_account=a@b.c",), ("--service_account=a@b.c", "Kubernetes service account")),
        (("--reservation=p/r",), ("--reservation=p/r",)),
        (("--form=pathwaysjob", "--scratch=gs://bkt/x"), ("--form means nothing", "--scratch means nothing")),
        (("--zone=us-east5-a",), ("--zone means nothing to --target=gke-jobset",)),
        (("--max_restarts=99999999999999",), ("must be between 0 and 1000000",)),
        (("--image=Registry/Name",), ("--image='Registry/Name'",)),
        (("--workdir=gs://B/x",), ("--workdir='gs://B/x'",)),
        (("--workdir=gs://my-runs/ä",), ("--workdir='gs://my-runs/ä'",)),
        (("--name=LC_1m",), ("--name='LC_1m'",)),
        (("--name=" + "a" * 45,), ("45 characters", "at most 42")),
        (("-image",), ("--image is missing",)),
        (("--max_restarts=-1",), ("--max_restarts=-1",)),
        (("--topology=v5p:99999999999x4x4",), ("99999999999x4x4", "no such slice")),
        (("--slices=" + "9" * 5000,), ("expected an integer",)),
        (("--env=TPU_WORKER_ID=0",), ("TPU_WORKER_ID is set by",)),
        (("--env=LIBTPU_INIT_ARGS=x",), ("LIBTPU_INIT_ARGS",)),
        (("--env=A=1,A=2",), ("A is given twice",)),
        (("--env=A=1,2",), ("the part of '2'", "NAME=VALUE")),
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
    claimed = ("--workdir=/runs/x", "--mounts=/runs=pvc:runs")
    assert "use gs://BUCKET/PATH" in refusal(*changed(pathways, *claimed))
    local = "--config.checkpoint.directory=/gcs/my-runs/x"
    assert "workers write to gs:// only" in refusal(*changed(pathways, local))
    assert "--head_pool" in refusal(*changed(pathways, "--form=pathwaysjob", "--head_pool=mine"))
    assert "at most 22" in refusal(*changed(pathways, "--name=" + "a" * 23))
    vm = ["--target=tpu-vm", "--topology=tpu7x:2x2x2", "--queue=q", "--mounts=/data=pvc:x", "--service_account=x"]
    message = refusal(*changed(DEMO, *vm))
    words = ("tpu7x", "--project is missing", "--zone", "--queue", "/data=pvc:x is not for", "--service_account=x")
    assert all(word in message for word in words)


def test_a_single_controller_is_set_by_its_target_alone():
    """So rules for it hold without --config.controller, and another one is not overruled in silence."""
    job = read_job(cases.arguments("gke-pathways", "v5p", 2, "--config.elastic.min_slices=1"))
    assert job.config.controller == "single" and "--config.controller=single" in job.command
    message = refusal(*cases.arguments("gke-pathways", "v5p", 2, "--config.controller=multi"))
    assert "controller='multi' with --target=gke-pathways" in message


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


def test_any_text_in_any_place_makes_a_manifest_or_a_message(capsys):
    """Up to three flags or keys with texts drawn from all that is odd, and from what is right elsewhere."""
    draw = random.Random(1)
    odd = [*HOSTILE, *ESCAPED, "", "0", "-1", "3", "9" * 30, "nan", "true", "a" * 300, "ä", "\udcff", "\x00", "//",
           "/data/x", "../x", "gs://b", "gs://bkt/a/../b", "A=1,A=2", "/x=gs://bkt", "/x=host", "s/k", "v6e:2x4",
           "v5e:1x1", "tpu7x:4x4x4", "v5p:0x0x0", *TARGETS, "pathwaysjob", "preflight", "configs/demo.py"]  # fmt: skip
    names = [*(flag.name for flag in FLAGS if flag.name != "apply"), *(f"config.{key}" for key in key_types())]
    bases = [JOBSET, cases.arguments("gke-pathways", "v6e", 1), cases.arguments("gke-jobset", "v6e", 1)]
    statuses = set()
    for _ in range(150):
        more = [f"--{draw.choice(names)}={draw.choice(odd)}" for _ in range(draw.choice((1, 1, 2, 3)))]
        statuses.add(status := render.main(changed(draw.choice(bases), *more)))
        out, err = capsys.readouterr()
        assert bool(yaml.safe_load(out)) == (status == 0) and (status == 0 or (status == 2 and err.strip())), more
    assert statuses == {0, 2}


NAMES = ("name", "workdir", "image", "namespace", "queue", "priority", "service_account", "reservation", "xla_flags")


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


@pytest.mark.parametrize("text", ["a\nIMAGE=b", "a\x00b", "\udcff", "a\x85b", "\u2028"])
def test_what_cannot_be_printed_is_refused(text):
    """A line break would be a setting of its own for tpu_vm.sh."""
    for more in (f"--env=NOTE={text}", f"--config.data.weights={text}"):
        assert more.partition("=")[0] in refusal(*changed(JOBSET, more))


def test_a_bucket_is_mounted_where_its_address_stands():
    """Paths inside the pod are those of the mount; a mount of the user's own is used instead of a second one."""
    more = ("--config.data.tokenizer=gs://my-corpus/t.json", "--config.init_from=gs://weights/step",
            "--config.compile_cache=gs://my-runs/cache")  # fmt: skip
    job = read_job(changed(JOBSET, *more))
    assert job.mounts == {f"/gcs/{name}": f"gs://{name}" for name in ("my-corpus", "my-runs", "weights")}
    assert job.cache == "/gcs/my-runs/cache" and job.workdir == "/gcs/my-runs/lc-1m"
    assert "--workdir=/gcs/my-runs/lc-1m" in job.command
    inside = {"data.path": "my-corpus/prepared", "data.tokenizer": "my-corpus/t.json", "init_from": "weights/step"}
    assert all(f"--config.{key}=/gcs/{path}" in job.command for key, path in inside.items())
    own = read_job(changed(JOBSET, "--mounts=/runs=gs://my-runs,/spare=pvc:x"))
    assert own.mounts == {"/runs": "gs://my-runs", "/spare": "pvc:x", "/gcs/my-corpus": "gs://my-corpus"}
    assert own.workdir == "/runs/lc-1m" and own.cache == "/runs/lc-1m/xla_cache"
    pathways = read_job(cases.arguments("gke-pathways", "v5p", 1, "--config.checkpoint.directory=gs://ckpt/x"))
    assert "--config.checkpoint.directory=gs://ckpt/x" in pathways.command and "/gcs/ckpt" not in pathways.mounts
    assert pathways.scratch == "gs://my-runs/lc-1m/pathways"


def test_the_shell_of_a_tpu_vm_gets_the_arguments_as_they_are():
    """A real shell reads the line that the VMs run."""
    hostile = "a' $(touch pwned) `id` ; rm x"
    vm = ("--target=tpu-vm", "--topology=v5e:4x4", "--project=my-project", "--zone=us-central2-b",
          f"--env=NOTE={hostile}", f"--config.data.weights={hostile}", "--config.global_batch=16")  # fmt: skip
    vm += ("--config.checkpoint.local_directory=/local", "--config.checkpoint.local_every_steps=10")
    for image in ("", cases.DIGEST):
        text = render.render(read_job(changed(DEMO, *vm, f"--image={image}" if image else "-image")))
        command = dict(line.split("=", 1) for line in text.splitlines())["COMMAND"]
        show = f"{sys.executable} -c 'import json,sys;print(json.dumps(sys.argv[1:]))' {command}"
        got = json.loads(subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True).stdout)
        assert got == shlex.split(command)
        assert f"--config.data.weights={hostile}" in got
        assert (f"--env=NOTE={hostile}" if image else f"NOTE={hostile}") in got
        volumes = [part for part in got if part.startswith("--volume=")]  # else the container would keep the run
        assert volumes == (["--volume=/data:/data", "--volume=/dev/shm:/local"] if image else [])


SECRETS = ["ghp_" + "a" * 36, "hf_" + "b" * 34, "AIza" + "c" * 35, "https://me:pw@host/x"]


@pytest.mark.parametrize("secret", SECRETS)
def test_credentials_reach_neither_manifest_nor_message(secret, capsys):
    for more in (f"--env=NOTE={secret}", f"--config.data.tokenizer={secret}", f"--image={secret}", f"--env={secret}"):
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
