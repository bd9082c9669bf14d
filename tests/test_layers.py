"""Who may import whom, and how large files may grow (the layout that keeps the parts apart).

A name may import only what stands to its left, or its own folder:
configs, app.config, app.ops, app.cluster.hardware < app.cluster < app.models, data < app.training < the commands.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("app", "configs", "data", "launch")
MAX_FILE_LINES = 500
MAX_PRODUCT_LINES = 16_000  # docstrings and comments included; a third of the whole

# Layer -> which modules are in it (the first that matches), and the layers it may import.
LAYERS = {
    "configs": (r"configs(\.\w+)?", ("configs",)),
    "config": (r"app\.config(_\w+)?", ("configs", "config")),
    "ops": (r"app\.ops(\..+)?", ("ops", "hardware")),
    "hardware": (r"app\.cluster\.hardware", ()),
    "cluster": (r"app\.cluster(\.\w+)?", ("configs", "config", "ops", "hardware", "cluster")),
    "models": (r"app\.models(\.\w+)?", ("configs", "config", "ops", "hardware", "cluster", "models")),
    "data": (r"data(\.\w+)?", ("configs", "config", "hardware", "cluster", "data")),  # never models or ops
    "training": (
        r"app\.training(\.\w+)?",
        ("configs", "config", "ops", "hardware", "cluster", "models", "data", "training"),
    ),
    "preflight": (
        r"launch\.preflight",  # runs in a pod, unlike the rest of launch
        ("configs", "config", "hardware", "cluster", "data", "launch"),
    ),
    "launch": (r"launch(\.\w+)?", ("configs", "config", "hardware", "launch")),  # runs on a laptop
    "commands": (
        r"app(\.\w+)?|app\.(hf|planning)\.\w+",
        ("configs", "config", "ops", "hardware", "cluster", "models", "data", "training", "commands"),
    ),
}
# What a layer or module must not import, directly or through modules of this project, at any place in the file.
JAX = ("jax", "jaxlib", "flax", "optax", "orbax", "grain")
FORBIDDEN = {
    r"configs(\.\w+)?": JAX,
    r"app\.config(_\w+)?": JAX,
    r"app\.cluster\.(hardware|layout)": JAX,
    r"launch(\.(?!preflight$)\w+)?": JAX,
    r"app\.ops(\..+)?": ("flax", "ml_collections"),
}


def product() -> dict[str, Path]:
    """Module name -> file, of all that ships."""
    paths = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(source: str, module: str, modules: set[str]) -> set[str]:
    """Dotted names that `source`, the text of `module`, imports anywhere; `from a import b` is a.b for a module a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else base for name in names}
    return found


def layer(module: str) -> str | None:
    """The layer of a module of this project; None for other modules."""
    return next((name for name, (pattern, _) in LAYERS.items() if re.fullmatch(pattern, module)), None)


def violations(module: str, source: str, modules: set[str]) -> Iterator[str]:
    own = layer(module)
    assert own is not None, f"{module} belongs to no layer: add it to tests/test_layers.py"
    for name in sorted(imported(source, module, modules)):
        other = layer(name)
        if other is not None and other not in LAYERS[own][1]:
            yield f"{module} ({own}) imports {name} ({other})"


def reached(module: str, sources: dict[str, str]) -> set[str]:
    """Top-level names of every foreign package that `module` imports, also through modules of this project."""
    todo, seen, foreign = [module], set(), set()
    while todo:
        name = todo.pop()
        if name in sources and name not in seen:
            seen.add(name)
            todo += imported(sources[name], name, set(sources))
        elif name not in sources:
            foreign.add(name.split(".")[0])
    return foreign


SOURCES = {module: path.read_text() for module, path in product().items()}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_come_from_the_left(module):
    assert list(violations(module, SOURCES[module], set(SOURCES))) == []


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_forbidden_is_reached(module):
    for pattern, names in FORBIDDEN.items():
        if re.fullmatch(pattern, module):
            assert reached(module, SOURCES) & set(names) == set()


def test_every_layer_is_looked_at():
    found = {layer(module) for module in SOURCES}
    assert {"configs", "config", "ops", "hardware", "cluster", "models", "data", "training", "commands"} <= found


def test_init_files_are_empty():
    filled = [name for name, path in product().items() if path.name == "__init__.py" and path.read_text()]
    assert filled == ["app.hf"]  # the functions of a command that is a folder


def test_files_and_product_stay_small():
    shipped, tests = list(product().values()), list((ROOT / "tests").rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in [*shipped, *tests]}
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}
    assert sum(lines[path] for path in shipped) < MAX_PRODUCT_LINES


@pytest.mark.parametrize(
    "module, line, refused",
    [
        ("app.ops.gdn", "from app.ops import conv", False),
        ("app.ops.gdn", "from app import config", True),
        ("app.ops.gdn", "from app.cluster.mesh import build_mesh", True),
        ("app.ops.pallas.gdn", "from app.ops.affine_scan import x", False),
        ("app.config", "import configs", False),
        ("app.config_flags", "from app.config_check import validate", False),
        ("app.config", "from app.cluster import hardware", True),
        ("app.cluster.hardware", "from app.config import Config", True),
        ("app.cluster.mesh", "from app.cluster import hardware", False),
        ("app.cluster.mesh", "from . import hardware", False),
        ("app.cluster.mesh", "from ..models import qwen", True),
        ("app.cluster.mesh", "from data import pipeline", True),
        ("app.models.qwen", "def f():\n    from app.training import step", True),
        ("app.models.qwen", "from data.pipeline import batches", True),
        ("data.pipeline", "from app.cluster.layout import token_range", False),
        ("data.pipeline", "import app.ops.zigzag", True),
        ("data.pipeline", "from app.models import qwen", True),
        ("app.training.step", "import data.pipeline", False),
        ("app.training.step", "from app import train", True),
        ("app.train", "from app.evaluate import evaluate", False),
        ("app.train", "from launch import render", True),
        ("launch.render", "from app.config import Config", False),
        ("launch.render", "from app.cluster.hardware import GENERATIONS", False),
        ("launch.render", "from app.cluster.mesh import build_mesh", True),
        ("launch.render", "from app.cluster import mesh", True),
        ("launch.templates", "from app.training import step", True),
        ("launch.preflight", "from app.cluster import mesh", False),
        ("configs.demo", "from app.config import Config", True),
    ],
)
def test_the_rule_itself(module, line, refused):
    modules = {
        "app.config", "app.cluster.hardware", "app.cluster.mesh", "app.models.qwen", "app.train", "app.training.step",
        "data.pipeline", "launch.render", "app.ops.conv",
    }  # fmt: skip
    assert bool(list(violations(module, line, modules))) is refused


def test_forbidden_packages_are_found_through_other_modules():
    sources = {
        "app.config": "from app import config_flags",
        "app.config_flags": "def f():\n    import jax.numpy as jnp",
    }
    assert reached("app.config", sources) == {"jax"}
    assert reached("app.cluster.mesh", SOURCES) >= {"jax", "numpy"}
