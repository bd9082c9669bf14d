"""The command line of every command: --config=FILE, --config.a.b=VALUE, and flags. No jax here.

absl alone answers an unknown key with a traceback, stops at the first error and takes the last of repeated flags in
silence, so the arguments are read here and all that is wrong with them is reported together.
"""

import argparse
import ast
import dataclasses
import os
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import config_dict

import configs
from app.config import Config, ConfigError, Value, did_you_mean, from_config_dict, key_types
from app.config_check import validate

KEY = "config."  # what the name of a key's flag starts with
_EXPECTED = {
    int: "an integer", float: "a number", bool: "true or false", str: "text", tuple: "integers with commas between",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command besides --config. `default` None: it is None where it is not given."""

    name: str
    kind: type  # int, float, bool or str
    help: str
    required: bool = False
    default: Value | None = None


# Of the commands that run on devices.
RUN_FLAGS = (
    Flag("workdir", str, "directory of the run's config, metrics and checkpoints; a second run resumes", required=True),
    Flag("coordinator", str, "HOST:PORT of process 0, for a run of several processes"),
    Flag("num_processes", int, "number of processes of the run"),
    Flag("process_id", int, "number of this process, from 0"),
)
CONFIG_FLAG = Flag("config", str, "a file with get_config(), as in configs/", required=True)


def load_config(argv: Sequence[str], flags: Sequence[Flag] = RUN_FLAGS) -> tuple[Config, types.SimpleNamespace]:
    """The validated config and the values of `flags` (attributes by name) that a command's arguments give.

    argv: without the program's name. A command that runs on devices (one with the flag num_processes) has its mesh
    checked against mesh.cpu_devices; others call `validate` with the devices they mean. Prints a summary and exits for
    --help.
    Raises ConfigError with everything that is wrong with arguments, file and config.
    """
    known = (CONFIG_FLAG, *flags)
    if "--help" in argv or "-h" in argv:
        print(usage(known))
        sys.exit(0)
    problems: list[str] = []
    given = _read_arguments(argv, known, problems)
    values = {flag.name: given.get(flag.name, flag.default) for flag in known}

    config = None
    try:
        path = values.pop("config")
        if isinstance(path, str):
            overrides = {name.removeprefix(KEY): value for name, value in given.items() if name.startswith(KEY)}
            config = from_config_dict(_overridden(load_file(path), overrides))
            validate(config, _cpu_devices(config, values))
    except ConfigError as error:
        problems += error.problems
    if problems or config is None:
        raise ConfigError(*problems)
    return config, types.SimpleNamespace(**values)


def load_file(path: str) -> config_dict.ConfigDict:
    """What get_config() of the file `path` returns. Raises ConfigError, with the line, if it cannot be had."""
    if not os.path.isfile(path):
        presets = sorted(os.path.relpath(file) for file in Path(configs.__path__[0]).glob("[!_]*.py"))
        hint = did_you_mean(path, presets)
        raise ConfigError(f"--config={path}: no such file{hint} (there are {', '.join(presets)})")
    try:
        source = ast.parse(Path(path).read_bytes(), path)
        module = types.ModuleType("config_file")
        exec(compile(source, path, "exec"), module.__dict__)
        tree = module.get_config()
    except Exception as error:  # the file is the user's: whatever it raises is an error in the input
        raise ConfigError(f"{path}{_line_of(error, path)}: {type(error).__name__}: {_message(error)}") from error
    if repeated := [f"{path}:{problem}" for problem in _repeated_in_source(source)]:
        raise ConfigError(*repeated)
    if not isinstance(tree, config_dict.ConfigDict):
        raise ConfigError(f"{path}: get_config() returned {type(tree).__name__}, expected an ml_collections.ConfigDict")
    return tree


def usage(flags: Iterable[Flag]) -> str:
    """What --help prints."""
    lines = [f"  --{flag.name}={flag.kind.__name__.upper()}  {flag.help}" for flag in flags]
    keys = [f"  --config.{key}={kind.__name__.upper()}" for key, kind in key_types().items()]
    return "\n".join(["flags:", *lines, "keys (meaning and defaults: configs/base.py):", *keys])


def _read_arguments(argv: Sequence[str], flags: Sequence[Flag], problems: list[str]) -> dict[str, Value]:
    """Flag name ("config.a.b" for a key) -> its value, of those that are right; adds the others to `problems`."""
    kinds = {flag.name: flag.kind for flag in flags} | {KEY + key: kind for key, kind in key_types().items()}
    texts: dict[str, str] = {}
    values: dict[str, Value] = {}
    for name, text in _split(argv, problems):
        if name in texts:
            problems.append(f"--{name} is given twice, {texts[name]!r} and {text!r}: leave one out")
        texts[name] = text
        if name in kinds:
            _parse(name, text, kinds[name], values, problems)
        elif section := next((known for known in kinds if known.startswith(f"{name}.")), None):
            problems.append(f"--{name}={text} is a section, not a key: set one of its keys, as --{section}=...")
        else:
            what = "key of the config" if name.startswith(KEY) else "flag"
            problems.append(f"--{name} is no {what}{did_you_mean(name, kinds, prefix='--')}")
    problems += [f"--{flag.name} is missing: {flag.help}" for flag in flags if flag.required and flag.name not in texts]
    return values


def _split(argv: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of every --name=text and --name text."""
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            problems.append(f"{argument!r} is no flag: expected --name=value")
        elif equals:
            yield name, text
        elif rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            problems.append(f"--{name} has no value: expected --{name}=value")


def _parse(name: str, text: str, kind: type, values: dict[str, Value], problems: list[str]) -> None:
    """Adds the value of `text` to `values`, or what is wrong with it to `problems`."""
    try:
        if kind is bool:
            values[name] = {"true": True, "false": False}[text.lower()]
        elif kind is tuple:
            values[name] = tuple(int(part) for part in text.split(",")) if text else ()
        elif text or name.startswith(KEY):
            values[name] = kind(text)
        else:
            problems.append(f"--{name} has no value: expected --{name}=value")
    except (ValueError, KeyError):
        problems.append(f"--{name}={text!r}: expected {_EXPECTED[kind]} ({kind.__name__})")


def _overridden(tree: config_dict.ConfigDict, overrides: Mapping[str, Value]) -> config_dict.ConfigDict:
    """The file's config with the command line's values. Their keys and types are right; the file's may be wrong."""
    for key, value in overrides.items():
        *sections, last = key.split(".")
        place: Any = tree
        for section in sections:
            place = place.get(section) if isinstance(place, config_dict.ConfigDict) else None
        if isinstance(place, config_dict.ConfigDict):  # where it is not, from_config_dict says so
            with place.unlocked(), place.ignore_type():
                place[last] = value
    return tree


def _cpu_devices(config: Config, flags: Mapping[str, Any]) -> int | None:
    """The number of devices of the whole run where mesh.cpu_devices says it; None where only jax will know."""
    if config.mesh.cpu_devices < 1 or "num_processes" not in flags:
        return None
    count = str(flags["num_processes"] or os.environ.get("JAX_NUM_PROCESSES", ""))
    if not count and not flags.get("coordinator") and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        count = "1"
    return config.mesh.cpu_devices * int(count) if count.isdecimal() else None


def _repeated_in_source(tree: ast.AST) -> Iterator[str]:
    """The keys that a config file gives twice in one block or one dict, where Python takes the last: LINE: PROBLEM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [(repr(key.value), key.lineno) for key in node.keys if isinstance(key, ast.Constant)]
            yield from _repeated(keys)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                targets = [target for one in block if isinstance(one, ast.Assign) for target in one.targets]
                yield from _repeated((ast.unparse(t), t.lineno) for t in targets if isinstance(t, ast.Attribute))


def _repeated(keys: Iterable[tuple[str, int]]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for key, line in keys:
        if key in seen:
            yield f"{line}: {key} is given a second time (first in line {seen[key]}): leave one out"
        seen.setdefault(key, line)


def _line_of(error: Exception, path: str) -> str:
    """Where in the file `path` the error came from, as ":LINE"."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f":{lines[-1]}" if lines else ""


def _message(error: Exception) -> str:
    """The message. A locked ConfigDict wraps its own in another exception, and quotes all of itself in it."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    text = str(error.args[0]) if error.args else ""
    return re.sub(r" Other fields present: \".*\"(\n|$)", " ", text, flags=re.DOTALL).rstrip()


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Of `python -m MODULE` for a command that has no config."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
