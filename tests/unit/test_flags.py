"""The command line: what is read, and that everything wrong with it is reported at once with a remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.config import ConfigError
from app.config_flags import RUN_FLAGS, Flag, load_config, load_file

DEMO = "--config=configs/demo.py"
WORKDIR = "--workdir=runs/x"


def problems(*arguments: str, flags=RUN_FLAGS) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load_config(arguments, flags)
    return error.value.problems


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """Relative --config paths count from the repository's root."""
    monkeypatch.chdir(Path(__file__).parents[2])
    for name in ("JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def write(directory: Path, text: str) -> str:
    path = directory / "mine.py"
    path.write_text("from configs import base\n\n\ndef get_config():\n    config = base.get_config()\n" + text)
    return str(path)


def test_file_overrides_and_flags():
    config, flags = load_config(
        [DEMO, WORKDIR, "--config.seq_len", "64", "--config.mesh.fsdp", "-1", "--config.optimizer.eps=1e-3",
         "--config.optimizer.b1=0", "--config.log.tensorboard=False", "--config.data.path=", "--num_processes=1"]
    )  # fmt: skip
    assert (config.steps, config.model.hidden_size) == (1000, 128)  # the file's
    assert (config.seq_len, config.mesh.fsdp, config.optimizer.eps, config.optimizer.b1) == (64, -1, 1e-3, 0.0)
    assert (config.log.tensorboard, config.data.path) == (False, "")
    assert vars(flags) == {"workdir": "runs/x", "coordinator": None, "num_processes": 1, "process_id": None}


def test_a_command_has_flags_of_its_own():
    own = (Flag("topology", str, "a slice", required=True), Flag("slices", int, "slices", default=1))
    _, flags = load_config([DEMO, "--topology=v5p:2x2x1"], own)
    assert vars(flags) == {"topology": "v5p:2x2x1", "slices": 1}
    assert problems(DEMO, "--slices=two", flags=own) == (
        "--slices='two': expected an integer (int)",
        "--topology is missing: a slice",
    )


def test_everything_wrong_is_reported_at_once():
    found = problems(
        "--config=configs/demo.py", "--config.model.hiden_size=3", "--config.learning_rate=1", "--config.steps=many",
        "--config.seed=1", "--config.seed=2", "--config.model=3", "--steps=3", "--zzzzzzzz=1", "demo",
        "--config.log.tensorboard=yes", "--config.optimizer.b1=half", "--config.global_batch=3", "--config.mesh.data=2",
        "--config.eval.batches=2.0", "--num_processes",
    )  # fmt: skip
    assert found == (
        "--config.model.hiden_size is no key of the config, did you mean --config.model.hidden_size?",
        "--config.learning_rate is no key of the config, did you mean --config.optimizer.learning_rate?",
        "--config.steps='many': expected an integer (int)",
        "--config.seed is given twice, '1' and '2': leave one out",
        "--config.model=3 is a section, not a key: set one of its keys, as --config.model.vocab_size=...",
        "--steps is no flag, did you mean --config.steps?",
        "--zzzzzzzz is no flag",
        "'demo' is no flag: expected --name=value",
        "--config.log.tensorboard='yes': expected true or false (bool)",
        "--config.optimizer.b1='half': expected a number (float)",
        "--config.eval.batches='2.0': expected an integer (int)",
        "--num_processes has no value: expected --num_processes=value",
        "--workdir is missing: directory of the run's config, metrics and checkpoints; a second run resumes",
        "mesh.fsdp=-1 has no size: mesh.data=2 x mesh.expert=1 x mesh.context=1 x mesh.tensor=1 makes 2, which does "
        "not divide 1 devices; change one of these sizes",
        "global_batch=3 does not divide over mesh.data=2 x mesh.fsdp=1 x accumulation=1 = 2: use a global_batch of 2 "
        "or 4, or put devices on mesh.context",
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([WORKDIR], "--config is missing: a file with get_config(), as in configs/"),
        (["--config=", WORKDIR], "--config has no value: expected --config=value"),
        ([DEMO, DEMO, WORKDIR], "--config is given twice, 'configs/demo.py' and 'configs/demo.py': leave one out"),
        ([DEMO, WORKDIR, WORKDIR], "--workdir is given twice, 'runs/x' and 'runs/x': leave one out"),
        ([DEMO, "--work_dir=x", WORKDIR], "--work_dir is no flag, did you mean --workdir?"),
        ([DEMO, WORKDIR, "-v"], "'-v' is no flag: expected --name=value"),
        ([DEMO, WORKDIR, "--config.mesh.dcn=2"],
         "--config.mesh.dcn=2 is a section, not a key: set one of its keys, as --config.mesh.dcn.data=..."),
        ([DEMO, WORKDIR, "--config.seq_len="], "--config.seq_len='': expected an integer (int)"),
        ([DEMO, WORKDIR, "--config.nonfinite_limit"],
         "--config.nonfinite_limit has no value: expected --config.nonfinite_limit=value"),
    ],
)  # fmt: skip
def test_one_thing_wrong_is_one_message(arguments, message):
    assert problems(*arguments) == (message,)


def test_a_missing_file_lists_the_presets():
    (message,) = problems("--config=configs/deno.py", WORKDIR)
    assert message.startswith("--config=configs/deno.py: no such file, did you mean configs/demo.py? (there are ")
    for name in ("configs/demo.py", "configs/qwen3_5_27b.py", "configs/base.py"):
        assert name in message
    assert "__init__" not in message


@pytest.mark.parametrize(
    "body, message",
    [
        ("    config.model.hiden_size = 3\n    return config\n",
         r":6: AttributeError: Key \"hiden_size\" does not exist and cannot be added since the config is "
         r"locked. Did you mean \"hidden_size\" instead of \"hiden_size\"\?$"),
        ("    config.update(stepps=3)\n    return config\n",
         r":6: KeyError: Key \"stepps\" .* locked. Did you mean \"steps\" instead of \"stepps\"\?$"),
        ("    config.steps = 'many'\n    return config\n", r":6: TypeError: .*'steps'"),
        ("    config.steps = missing\n    return config\n", r":6: NameError: name 'missing'"),
        ("    config.steps = (\n", r":6: SyntaxError"),
        ("    return 3\n", r": get_config\(\) returned int, expected an ml_collections.ConfigDict"),
        ("    config.steps = 1\n    config.seed = 1\n    config.steps = 2\n    return config\n",
         r":8: config.steps is given a second time \(first in line 6\)"),
        ("    config.update({'steps': 1,\n        'steps': 2})\n    return config\n",
         r":7: 'steps' is given a second time \(first in line 6\)"),
        ("    with config.unlocked():\n        config.extra = 1\n        del config.steps\n    return config\n",
         r"extra is not a key of the config"),
        ("    config.steps = True\n    return config\n", r"steps=True has type bool, expected type int"),
    ],
)  # fmt: skip
def test_errors_in_a_file_name_the_line(tmp_path, body, message):
    path = write(tmp_path, body)
    with pytest.raises(ConfigError, match=message):
        load_config([f"--config={path}", WORKDIR])


def test_a_file_without_get_config_is_refused(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"AttributeError: .*get_config"):
        load_file(str(path))


def test_the_same_key_in_two_branches_is_no_repetition(tmp_path):
    body = "    if True:\n        config.steps = 1\n    else:\n        config.steps = 2\n    return config\n"
    config, _ = load_config([f"--config={write(tmp_path, body)}", WORKDIR])
    assert config.steps == 1


def test_a_file_is_read_anew_each_time(tmp_path):
    for steps in (11, 12):
        path = write(tmp_path, f"    config.steps = {steps}\n    return config\n")
        assert load_config([f"--config={path}", WORKDIR])[0].steps == steps


def test_the_command_line_may_set_what_the_file_sets_with_another_type(tmp_path):
    path = write(tmp_path, "    with config.ignore_type():\n        config.steps = 'x'\n    return config\n")
    with pytest.raises(ConfigError, match="steps='x' has type str"):
        load_config([f"--config={path}", WORKDIR])
    assert load_config([f"--config={path}", WORKDIR, "--config.steps=3"])[0].steps == 3


EIGHT = [DEMO, WORKDIR, "--config.mesh.cpu_devices=8", "--config.mesh.fsdp=1", "--config.mesh.context=8"]


def test_the_mesh_is_checked_against_the_cpu_devices(monkeypatch):
    load_config(EIGHT)
    expected = "makes 8, but there are 16 devices"
    assert expected in problems(*EIGHT, "--num_processes=2")[0]
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    assert expected in problems(*EIGHT)[0]
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    load_config([*EIGHT[:3], "--config.mesh.fsdp=1", "--config.mesh.context=16", "--coordinator=host:1"])  # unknown
    load_config([*EIGHT[:1], "--config.mesh.fsdp=1", "--config.mesh.context=8"], ())  # not a command that runs


def test_help_names_flags_and_keys(capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for line in ("  --workdir=STR", "  --config=STR", "  --config.mesh.dcn.context=INT"):
        assert line in text


def test_a_config_is_ready_within_a_second_and_without_jax():
    code = (
        "import sys, time\n"
        "from app.config_flags import load_config\n"
        f"load_config(['--config=configs/qwen3_5_27b.py', {WORKDIR!r}])\n"
        "heavy = {'jax', 'flax', 'numpy', 'orbax', 'grain', 'tensorflow_datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 1, time.process_time()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
