"""Golden text of every preset, so that a review shows what a change does to each: python -m tests.golden.regenerate

A table is a function from a preset's Config to text; it is kept in tests/golden/<preset>.<table>.txt.
"""

from collections.abc import Callable
from pathlib import Path

from app.config import Config, flatten, from_config_dict
from app.config_flags import load_file
from app.models import params as model_params

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"


def config_table(config: Config) -> str:
    """Every key and its value, a line each."""
    return "".join(f"{key} = {value!r}\n" for key, value in flatten(config.to_dict()).items())


def params_table(config: Config) -> str:
    """Every parameter with its shape, dtype and logical dims, and their number."""
    return model_params.table(model_params.describe(config.model))


TABLES: dict[str, Callable[[Config], str]] = {"config": config_table, "params": params_table}


def presets() -> list[str]:
    """The files in configs/ besides the defaults."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem not in ("__init__", "base"))


def load(preset: str) -> Config:
    return from_config_dict(load_file(str(CONFIGS / f"{preset}.py")))


def path_of(preset: str, table: str) -> Path:
    return HERE / f"{preset}.{table}.txt"


def main() -> None:
    wanted = {path_of(preset, table): make(load(preset)) for preset in presets() for table, make in TABLES.items()}
    for path in set(HERE.glob("*.txt")) - set(wanted):
        path.unlink()
        print(f"removed {path.name}")
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
