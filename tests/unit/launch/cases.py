"""The launches whose manifests are kept as text. After a change that is meant: python -m tests.unit.launch.cases"""

from pathlib import Path

from launch.job import read_job
from launch.render import render

GOLDEN = Path(__file__).parent / "golden"
DIGEST = "europe-docker.pkg.dev/my-project/longscan/trainer@sha256:" + "0123456789abcdef" * 4
COMMON = ("--workdir=gs://my-runs/lc-1m", f"--image={DIGEST}", "--config.data.path=gs://my-corpus/prepared",
          "--service_account=trainer", "--name=lc-1m")  # fmt: skip
TOPOLOGIES = {"v5p": "v5p:4x4x8", "v6e": "v6e:8x16"}  # 128 chips


def arguments(target: str, generation: str, slices: int, *more: str) -> list[str]:
    """Of launch.render: the 27B preset, a row for each slice."""
    mesh = (f"--config.mesh.data={slices}", f"--config.mesh.dcn.data={slices}", f"--config.global_batch={slices}")
    tag = ("--pathways_tag=20261101-jax_0.12.0",) if target == "gke-pathways" else ()
    preset = ("--config=configs/qwen3_5_27b.py", f"--target={target}", f"--topology={TOPOLOGIES[generation]}")
    return [*preset, *COMMON, *(mesh if slices > 1 else ()), *tag, *more]


CASES = {
    f"{target}_{generation}_{slices}": arguments(target, generation, slices)
    for target in ("gke-jobset", "gke-pathways")
    for generation in TOPOLOGIES
    for slices in (1, 2, 4)
} | {"pathwaysjob_v5p_2": arguments("gke-pathways", "v5p", 2, "--form=pathwaysjob")}


def text(name: str) -> str:
    return render(read_job(CASES[name]))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        (GOLDEN / f"{name}.yaml").write_text(text(name))
        print(f"wrote {name}.yaml")
