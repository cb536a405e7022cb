"""Public functions inside ``torch.compile``: each call becomes one node of the graph.

Dynamo cannot look into kernels, and must not: the decorator below hands it ``blockattn::<name>``,
the custom operator of :mod:`blockattn.ops`, whose body runs as it would outside. Numbers that one
tunes (tau, sparsity, thresholds, sinks, scales) enter as one-element CPU tensors: they are data of
the graph, not part of its code, so another value runs the same graph.

What a caller gives decides how often Dynamo compiles. A Python number, argument or attribute of a
module, is guarded: its first change compiles once more, with a symbol in its place, and later ones
do not (with ``torch.compile(dynamic=True)`` not even the first). A one-element CPU tensor, float64
for numbers and int64 for sinks, is never guarded: ``self.tau = torch.tensor(1.0,
dtype=torch.float64)``. Keep it a plain attribute: a buffer would move to the GPU with its module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from blockattn.layout import TokenGrid
from blockattn.precision import own_precision
from blockattn.problem import BlockSummary
from blockattn.route import BlockRoute

P = ParamSpec("P")
R = TypeVar("R")

SETTINGS = frozenset(
    {"tau", "sink_start", "sink_tokens", "sparsity", "scale", "scale_output"}
    | {"skip_threshold", "threshold", "threshold_scale_factor"}
)
TENSORS = frozenset({"q", "k", "v", "gate_compress", "gate_fine", "block_lengths"})
TEXTS = frozenset(
    {"impl", "thresh_type", "skip_reference", "select_dtype", "qk_dtype", "v_dtype", "v_scale"}
)
FLAGS = frozenset({"causal", "return_trace", "with_tail", "round_p"})
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(TENSORS, Tensor),
    **dict.fromkeys(SETTINGS, (bool, int, float, Tensor)),
    **dict.fromkeys(TEXTS, str),
    "route": BlockRoute,
    "tail": BlockSummary,
    "smooth": bool,
}
REQUIRED = TEXTS | {"q", "k", "v"}


def one_node(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a public function one node, ``blockattn::<its name>``, of every compiled graph.

    Outside ``torch.compile`` the function itself runs, without autocast. Wrong values raise the
    function's own errors when the graph runs. A call that the operator cannot express
    (``return_trace=True``, gradients, an argument of a wrong type) breaks the graph and runs
    outside it, with the same result or error; with ``fullgraph=True`` Dynamo raises
    ``Unsupported``, whose message says why.
    """
    parameters = inspect.signature(function).parameters
    names, empty = tuple(parameters), inspect.Parameter.empty
    by_position = tuple(x.name for x in parameters.values() if x.kind is not x.KEYWORD_ONLY)
    defaults = {x.name: x.default for x in parameters.values() if x.default is not empty}
    operator = function.__name__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            with own_precision():
                return function(*args, **kwargs)
        given = {**defaults, **dict(zip(by_position, args)), **kwargs}
        obstacle = _obstacle(given, names)
        if len(args) > len(by_position):
            obstacle = f"only {', '.join(by_position)} may be given by position"
        if obstacle is not None:
            reason = f"blockattn.{operator} cannot be a node of a graph: {obstacle}"
            torch._dynamo.graph_break(msg=reason)
            outside: Any = torch.compiler.disable(call)
            return outside(*args, **kwargs)
        return getattr(torch.ops.blockattn, operator)(**_flat(given))

    return call


def setting(value: Any) -> Tensor | None:
    """A host number as a 0-d CPU tensor that keeps its type: float64, int64 or bool.

    Tensors and ``None`` stay as they are. A float is added to a zero because that form stays
    symbolic down to the code generator; a float argument would be burned in there again.
    """
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, bool):
        return torch.scalar_tensor(value, dtype=torch.bool, device="cpu")
    if isinstance(value, int):
        return torch.scalar_tensor(value, dtype=torch.int64, device="cpu")
    return torch.zeros((), dtype=torch.float64, device="cpu") + value


def _obstacle(given: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Why the operator's schema cannot take a call; values are checked when it runs."""
    for name in names:
        if name not in given:
            return f"{name} is missing"
        if not _fits(name, given[name]):
            return f"{name} is {type(given[name]).__name__}, which it does not take"
        if _wants_grad(given[name]):
            return f"{name} requires grad, and it is forward only"
    if len(given) != len(names):
        return f"it takes no other arguments than {', '.join(names)}"
    if given["return_trace"]:
        return "return_trace=True; ask for traces outside the compiled region"
    return None


def _fits(name: str, value: Any) -> bool:
    if name in FLAGS:
        return isinstance(value, bool)
    if name in ("tile", "skip_tile"):
        return _are_integers(value) and len(value) == 2
    if name == "grid":
        return isinstance(value, TokenGrid) or (_are_integers(value) and len(value) == 3)
    return (value is None and name not in REQUIRED) or isinstance(value, KINDS[name])


def _wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _are_integers(value: Any) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the operator takes them: tensors, lists of integers, strings."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name == "route":
            flat.update(_flat_route(value))
        elif name == "tail":
            flat.update(_flat_tail(value))
        elif name == "grid":
            flat.update(_flat_grid(value))
        elif name != "return_trace":
            flat[name] = setting(value) if name in SETTINGS else value
    return flat


def _flat_route(route: BlockRoute | None) -> dict[str, Any]:
    if route is None:
        return {"route_words": None, "route_block": (), "route_seqlens": ()}
    return {
        "route_words": route.words,
        "route_block": route.block,
        "route_seqlens": route.seqlens,
    }


def _flat_tail(tail: BlockSummary | None) -> dict[str, Any]:
    if tail is None:
        return {"tail_k_mean": None, "tail_v_sum": None, "tail_lengths": None, "tail_block": 0}
    return {
        "tail_k_mean": tail.k_mean,
        "tail_v_sum": tail.v_sum,
        "tail_lengths": tail.lengths,
        "tail_block": tail.block,
    }


def _flat_grid(grid: Any) -> dict[str, Any]:
    if not isinstance(grid, TokenGrid):
        return {"grid_shape": tuple(grid), "grid_text": (0, 0), "grid_order": "raster"}
    return {
        "grid_shape": grid.shape,
        "grid_text": (grid.prefix, grid.suffix),
        "grid_order": grid.order,
    }
