"""Weaknesses that show in the code as text: guards, pins, caches, tests; see test_weaknesses.py."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement

from tests.test_imports import SOURCES, imports
from workbench.config import sparse
from workbench.doctor import GpuInfo, diagnose
from workbench.doctor.lanes import CUTE_PACKAGES, LANES, fix, pins
from workbench.doctor.versions import REQUIRED_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
TESTS = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
GUARDS = {"ImportError", "OSError"}


# -- optional packages ----------------------------------------------------------------------------


def import_guards(tree: ast.AST) -> Iterator[ast.ExceptHandler]:
    """Handlers of every ``try`` whose body imports something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            inside = [x for statement in node.body for x in ast.walk(statement)]
            if any(isinstance(x, ast.Import | ast.ImportFrom) for x in inside):
                yield from node.handlers


def caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"everything"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds}


def test_skip_weakness_16_an_import_guard_lets_an_attribute_error_through():
    bad = "try:\n    import cutlass\nexcept (ImportError, AttributeError):\n    cutlass = None"
    assert [caught(x) - GUARDS for x in import_guards(ast.parse(bad))] == [{"AttributeError"}]
    for name, tree in TREES.items():
        wrong = [x.lineno for x in import_guards(tree) if not caught(x) <= GUARDS]
        assert not wrong, name


def unchained(tree: ast.AST) -> list[int]:
    """Lines in handlers that raise another error without naming its cause."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    raises = [x for node in handlers for x in ast.walk(node) if isinstance(x, ast.Raise)]
    return [x.lineno for x in raises if x.exc is not None and _cause_is_lost(x)]


def _cause_is_lost(node: ast.Raise) -> bool:
    return node.cause is None or ast.unparse(node.cause) == "None"


def test_skip_weakness_18_an_error_raised_for_another_one_chains_its_cause():
    bad = "try:\n    import x\nexcept ImportError:\n    raise RuntimeError('not importable')"
    assert unchained(ast.parse(bad)) == [4]
    assert {name: lines for name, tree in TREES.items() if (lines := unchained(tree))} == {}
    assert sum(ast.unparse(tree).count(" from error") for tree in TREES.values()) > 5


def test_skip_weakness_17_no_exported_name_is_none():
    exporting = [name for name, path in SOURCES.items() if "__all__" in path.read_text()]
    assert {"blockattn", "workbench.attention"} <= set(exporting)
    for name in exporting:
        module = importlib.import_module(name)
        assert [x for x in module.__all__ if getattr(module, x) is None] == [], name


def test_sol_weakness_42_no_package_shares_a_name_with_a_kernel_package():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(x).name for x in wheel["packages"]} == {"workbench", "blockattn"}
    for name in SOURCES:
        others = {x.split(".")[0] for x in imports(name)} & {"sol_attn", "kernels", "vsa", "skip"}
        assert not others, name


# -- pins -----------------------------------------------------------------------------------------


def test_skip_weakness_19_packages_that_follow_each_other_are_pinned_exactly_with_a_reason():
    lines = PYPROJECT.splitlines()
    for lane in LANES:
        extra = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"][lane]]
        assert [x.name for x in extra][:3] == list(CUTE_PACKAGES)
        for requirement in extra:
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
    for name in CUTE_PACKAGES:
        at = next(n for n, line in enumerate(lines) if line.strip().startswith(f'"{name}'))
        assert lines[at - 1].strip().startswith("#"), name


@pytest.mark.parametrize("moved", CUTE_PACKAGES)
def test_skip_weakness_20_moving_any_one_package_of_the_stack_is_noticed(moved: str):
    good = {**dict.fromkeys(REQUIRED_PACKAGES, "99"), "python": "3.11.7", "triton": "3.7.1"}
    good |= {"torch": "2.13.0", "numpy": "2.4.6", "ipykernel": "6.31.0"}
    stack = pins("cute")
    for part in ("base", "cu12", "cu13"):
        good[f"nvidia-cutlass-dsl-libs-{part}"] = stack["nvidia-cutlass-dsl"]
    gpu = GpuInfo("H200", (9, 0), 141 * 2**30)
    assert diagnose({**good, **stack}, gpu) == []
    for version in ("0.0.1", "99.0"):
        found = diagnose({**good, **stack, moved: version}, gpu)
        assert any(x.fix == fix("cute") for x in found), version


# -- caches ---------------------------------------------------------------------------------------


def unbounded_caches(tree: ast.AST) -> list[str]:
    """Functions with arguments whose results are kept without a limit."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        takes = node.args.args or node.args.kwonlyargs or node.args.posonlyargs
        for decorator in map(ast.unparse, node.decorator_list):
            endless = re.fullmatch(r"(functools\.)?cache|.*lru_cache\((maxsize=)?None\)", decorator)
            if takes and endless:
                found.append(node.name)
    return found


def test_skip_weakness_25_every_cache_that_is_keyed_by_its_arguments_is_bounded():
    bad = "@cache\ndef kernel(tokens): ...\n@lru_cache(maxsize=None)\ndef plan(shape): ..."
    assert unbounded_caches(ast.parse(bad)) == ["kernel", "plan"]
    assert {name: x for name, tree in TREES.items() if (x := unbounded_caches(tree))} == {}


# -- documents and tests --------------------------------------------------------------------------


def test_skip_weakness_7_the_readme_names_every_algorithm_a_configuration_can_have():
    readme = (ROOT / "README.md").read_text()
    classes = [sparse.SolAttnConfig, sparse.SkipSoftmaxConfig, sparse.VideoSparseAttentionConfig]
    names = {get_args(x.model_fields["algorithm"].annotation)[0] for x in classes}
    assert names == {"sol_attn", "skip_softmax", "vsa"}
    for name in names:
        assert f"`algorithm: {name}`" in readme
    for word in ("quantised_attention", "MXFP8", "NVFP4", "SparseAttention"):
        assert word in readme


def test_skip_weakness_8_every_test_file_lies_where_pytest_and_ci_look():
    assert "tests" in PROJECT["tool"]["pytest"]["ini_options"]["testpaths"]
    assert re.search(r"^pytest$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    for path, tree in TESTS.items():
        functions = [x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
        has_tests = any(name.startswith("test_") for name in functions)
        assert has_tests == path.name.startswith("test_"), path.name
        assert "collect_ignore" not in {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}


def optional_imports(tree: ast.Module) -> set[str]:
    """Packages that importing a test file needs and that a CPU-only installation may lack.

    After ``pytest.importorskip`` of a package, which skips the file and names it, it may be used,
    also by the files of inputs that are imported then.
    """
    needed: set[str] = set()
    guarded: set[str] = set()
    for node in tree.body:
        guarded |= set(re.findall(r"pytest\.importorskip\('(\w+)", ast.unparse(node)))
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names} - guarded
        elif isinstance(node, ast.ImportFrom):
            package, _, inputs = (node.module or "").partition(".")
            needed |= {package} - guarded
            names = [inputs] if inputs else [alias.name for alias in node.names]
            for name in names if package == "tests" else ():
                needed |= optional_imports(TESTS[ROOT / "tests" / f"{name}.py"]) - guarded
    return needed & {"cutlass", "quack", "flash_attn", "cudnn", "diffusers", "lpips", "triton"}


@pytest.mark.parametrize(
    "path", [x for x in TESTS if x.name.startswith("test_")], ids=lambda path: path.name
)
def test_skip_weakness_9_importing_a_test_needs_no_optional_package(path: Path):
    late = "import cutlass.cute\npytest.importorskip('cutlass')\nimport cutlass"
    assert optional_imports(ast.parse(late)) == {"cutlass"}
    assert optional_imports(TESTS[path]) == set()


def needs_a_gpu(function: ast.FunctionDef) -> bool:
    """It moves tensors to a GPU whatever machine it runs on."""
    return bool(re.search(r"\.cuda\(\)|device=['\"]cuda['\"]", ast.unparse(function)))


def test_skip_weakness_10_a_test_that_needs_a_gpu_says_so_and_runs_nowhere_else():
    marked = 0
    for path, tree in TESTS.items():
        functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
        for function in functions:
            marks = " ".join(map(ast.unparse, function.decorator_list))
            has_marker = re.search(r"mark\.(gpu|sm90|sm100)\b", marks) is not None
            if function.name.startswith("test_") and needs_a_gpu(function):
                assert has_marker, f"{path.name}: {function.name}"
                marked += 1
    assert marked > 3
