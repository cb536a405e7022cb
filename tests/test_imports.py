"""Imports are light, go downwards only, and no code swallows every exception."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for base, folder in ((ROOT, "workbench"), (ROOT / "kernels", "blockattn"))
    for path in sorted((base / folder).rglob("*.py"))
}
OPTIONAL = {
    "cutlass", "quack", "flash_attn", "cudnn", "tvm_ffi", "anywidget", "diffusers", "dask",
    "distributed",
}  # fmt: skip
ADAPTERS = (
    "blockattn.impl.", "workbench.models.", "workbench.widgets.", "workbench.bench.peers",
    "workbench.sweep.cluster", "workbench.diffusers.",
)  # fmt: skip
INTERFACE = {
    "jupyterlab", "ipykernel", "IPython", "ipywidgets", "matplotlib", "pydantic", "yaml", "typer",
    "rich",
}  # fmt: skip

# Highest first. A module imports from its own row or a lower one. What no row names is analysis.
LAYERS = (
    {"workbench.cli"},
    {
        "workbench.widgets",
        "workbench.lab",
        "workbench.doctor",
        "workbench.render",
        "workbench.serve",
    },
    {
        "workbench.tune",
        "workbench.sample",
        "workbench.bench",
        "workbench.sweep",
        "workbench.show",
        "workbench.export",
        "workbench.calibrate",
        "workbench.profiles",
    },
    {"workbench.views"},
    {"analysis"},
    {"workbench.attention", "workbench.capture", "workbench.config", "workbench.synthetic"},
    {"workbench.models", "workbench.fields"},
    {"workbench.paths", "workbench"},
    {"blockattn"},
)


def layer(module: str) -> int:
    names = [".".join(module.split(".")[:2]), module.split(".")[0]]
    if names[1] == "blockattn":
        return len(LAYERS) - 1
    for index, row in enumerate(LAYERS):
        if names[0] in row:
            return index
    return next(index for index, row in enumerate(LAYERS) if "analysis" in row)


def imports(module: str, *, top_level_only: bool = False) -> Iterator[str]:
    """Absolute names that `module` imports; a name imported from a package is resolved."""
    tree = ast.parse(SOURCES[module].read_text())
    skipped = _deferred(tree) if top_level_only else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(module, node)


def _imported_from(module: str, node: ast.ImportFrom) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        is_package = SOURCES[module].name == "__init__.py"
        kept = parts[: len(parts) - node.level + is_package]
        base = ".".join([*kept, base] if base else kept)
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield full if full in SOURCES else base


def _deferred(tree: ast.Module) -> set[ast.AST]:
    """Nodes that do not run at import: bodies of functions and of `if TYPE_CHECKING`."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            found.update(ast.walk(node))
    return found


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_go_downwards_only(module: str):
    ours = [name for name in imports(module) if name.split(".")[0] in {"workbench", "blockattn"}]
    upwards = [name for name in ours if layer(name) < layer(module)]
    assert not upwards


def test_no_two_modules_import_each_other():
    graph = {
        name: {other for other in imports(name, top_level_only=True) if other in SOURCES} - {name}
        for name in SOURCES
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "module", [n for n in sorted(SOURCES) if n.startswith(("blockattn", "workbench.models"))]
)
def test_the_kernels_and_the_model_know_no_user_interface(module: str):
    names = {name.split(".")[0] for name in imports(module)}
    known = sorted(names & INTERFACE)
    assert not known


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_optional_packages_are_imported_only_by_the_adapters(module: str):
    names = {name.split(".")[0] for name in imports(module)} & OPTIONAL
    assert not names or module.startswith(ADAPTERS)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("blockattn", OPTIONAL | INTERFACE),
        ("workbench.models", OPTIONAL | INTERFACE),
        ("workbench", OPTIONAL | INTERFACE | {"torch", "numpy", "blockattn"}),
        ("workbench.cli", OPTIONAL | {"torch", "numpy", "blockattn", "matplotlib", "pydantic"}),
    ],
)
def test_importing_a_package_is_light(module: str, forbidden: set[str]):
    code = f"import sys, {module}; print(*{{n.partition('.')[0] for n in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    loaded = sorted(set(done.stdout.split()) & forbidden)
    assert not loaded


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_no_handler_swallows_every_exception(module: str):
    tree = ast.parse(SOURCES[module].read_text())
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    lines = [node.lineno for node in handlers if _catches_all(node) and not _raises_again(node)]
    assert not lines


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in {"Exception", "BaseException"} for kind in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))
