"""Which versions belong together: data of `workbench.doctor.checkup`, learnt by trying them.

A `Rule` describes a combination that does not work, and the command that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.doctor.lanes import CUTE_PACKAGES

REQUIRED_PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "pydantic", "pyyaml", "matplotlib", "packaging",
    "ipywidgets", "anywidget", "jupyterlab", "ipykernel", "tqdm", "typer", "rich",
)  # fmt: skip
OPTIONAL_PACKAGES = (
    *CUTE_PACKAGES,
    "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi", "nvidia-cudnn-frontend", "nbmake", "pytest", "hypothesis",
    "playwright", "voila", "distributed", "diffusers", "transformers", "accelerate", "ftfy",
)  # fmt: skip
MINIMUMS: Mapping[str, str] = {
    "python": "3.11", "torch": "2.11", "triton": "3.6", "pydantic": "2", "ipywidgets": "8",
    "anywidget": "0.9", "jupyterlab": "4",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A combination that fails: every package of `when` matches and none of `absent` is there.

    Without a fix of its own the command of the nearest CuTe lane mends it.
    """

    when: Mapping[str, str]
    why: str
    fix: str | None = None
    absent: tuple[str, ...] = field(default=())


def _quack(version: str, excluded: str, wanted: str) -> Rule:
    return Rule(
        when={"quack-kernels": version, "nvidia-cutlass-dsl": excluded},
        why=f"this quack-kernels works with cutlass-dsl {wanted} only",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        when={"triton": "==3.6.0", "numpy": ">=2.4"},
        why="triton's interpreter fails on a loop with a run-time bound (compiled kernels work)",
        fix="pip install 'numpy<2.4'  (or triton==3.7.1 beside torch 2.13)",
    ),
    Rule(
        when={"ipykernel": ">=7"},
        why="a notebook with Output and clear_output stalls in about one run in seven",
        fix="pip install 'ipykernel<7'",
    ),
    Rule(
        when={"diffusers": "<0.35.2"},
        why="workbench.attach was tried with diffusers 0.35.2 and later alone",
        fix="pip install 'diffusers>=0.35.2'",
    ),
    Rule(
        when={"diffusers": ">=0"},
        absent=("accelerate",),
        why="without accelerate no Wan transformer can be read from disk",
        fix="pip install accelerate",
    ),
    Rule(
        when={"diffusers": ">=0"},
        absent=("transformers",),
        why="without transformers none of its pipelines can be opened",
        fix="pip install transformers",
    ),
    Rule(
        when={"diffusers": "<0.38"},
        absent=("ftfy",),
        why="without ftfy Wan's pipelines of this version cannot take a prompt",
        fix="pip install ftfy",
    ),
    Rule(
        when={"nvidia-cutlass-dsl": ">=4.6", "flash-attn-4": "==4.0.0b19"},
        absent=("nvidia-cutlass-dsl-libs-cu13",),
        why="without the CUDA 13 libraries the first compilation ends in a TypeError in `fmax`",
    ),
    Rule(
        when={"nvidia-cutlass-dsl": ">=4.6", "flash-attn-4": "<4.0.0b19"},
        why="flash-attn-4 before b19 uses names that cutlass-dsl 4.6 removed",
    ),
    Rule(
        when={"nvidia-cutlass-dsl": "!=4.6.0.dev0", "flash-attn-4": ">=4.0.0b20,<=4.0.0b26"},
        why="flash-attn-4 b20 to b26 require cutlass-dsl 4.6.0.dev0, a development build",
    ),
    Rule(
        when={"nvidia-cutlass-dsl": "<4.6.2", "flash-attn-4": ">=4.0.0b27"},
        why="flash-attn-4 from b27 on requires cutlass-dsl >=4.6.2 (with 4.6.1 sm_100a fails)",
    ),
    Rule(
        when={"nvidia-cudnn-frontend": ">=1.32", "nvidia-cutlass-dsl": "<4.8"},
        why="this cuDNN frontend requires cutlass-dsl >=4.8",
    ),
    _quack(">=0.6.0,<=0.6.1", "!=4.6.0", "4.6.0"),
    _quack("==0.6.2", "!=4.6.1", "4.6.1"),
    _quack("==0.6.3", "<4.6.0", "4.6.x"),
    _quack("==0.6.3", ">=4.7", "4.6.x"),
    _quack("==0.6.4", "!=4.6.2", "4.6.2"),
    _quack(">=0.6.5", "<4.7", ">=4.7"),
    Rule(
        when={"quack-kernels": ">=0"},
        absent=("triton",),
        why="quack-kernels imports triton, which is not installed",
        fix="pip install 'triton>=3.6'",
    ),
    Rule(
        when={"flash-attn-4": ">=0", "apache-tvm-ffi": ">=0.2"},
        why="the cute stack requires apache-tvm-ffi <0.2",
        fix="pip install 'apache-tvm-ffi<0.2'",
    ),
)
