"""Formulas out of a checkpoint, such as ``a * exp(b * target_sparsity)``, without running code.

A formula is text that somebody else wrote, so it is parsed and walked node by node; only numbers,
names, + - * / **, unary minus and a few functions exist. All arithmetic is float64.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_CHARACTERS = 500
MAX_NODES = 200  # bounds the depth of the walk as well


def _divide(left: float, right: float) -> float:
    if right == 0:
        raise ValueError("division by zero")
    return left / right


# math.pow, because float ** float may turn complex and int ** int may never end.
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: _divide,
    ast.Pow: math.pow,
}
# Name: function, fewest and most arguments.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "exp": (math.exp, 1, 1),
    "log": (math.log, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "pow": (math.pow, 2, 2),
    "abs": (math.fabs, 1, 1),
    "min": (min, 2, MAX_NODES),
    "max": (max, 2, MAX_NODES),
}
_GRAMMAR = f"numbers, names, + - * / **, unary minus and {', '.join(_FUNCTIONS)}"


@dataclass(frozen=True)
class Formula:
    """A parsed formula.

    Args:
        text: at most 500 characters.

    Raises:
        TypeError: the text is no string.
        ValueError: it cannot be parsed, or holds something that is not allowed.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"formula={self.text!r}: expected text, got {type(self.text).__name__}")
        self._check(self._root)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names whose values the formula needs."""
        called = {id(x.func) for x in ast.walk(self._root) if isinstance(x, ast.Call)}
        nodes = (x for x in ast.walk(self._root) if isinstance(x, ast.Name))
        return frozenset(node.id for node in nodes if id(node) not in called)

    def __call__(self, values: Mapping[str, float]) -> float:
        """The finite value of the formula.

        Raises:
            ValueError: a name has no value, or the result is not a finite real number.
        """
        missing = sorted(self.names - set(values))
        if missing:
            raise ValueError(
                f"formula {self.text!r} names {', '.join(missing)}, which has no value; "
                f"given are {', '.join(sorted(values)) or 'none'}"
            )
        try:
            result = self._value(self._root, values)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"formula {self.text!r} has no finite value: {error}") from error
        if not math.isfinite(result):
            raise ValueError(f"formula {self.text!r} gives {result}: must be finite")
        return result

    @cached_property
    def _root(self) -> ast.expr:
        if len(self.text) > MAX_CHARACTERS:
            raise ValueError(f"formula has {len(self.text)} characters, at most {MAX_CHARACTERS}")
        try:
            root = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ValueError(f"formula {self.text!r} cannot be parsed: {error}") from error
        if sum(1 for _ in ast.walk(root)) > MAX_NODES:
            raise ValueError(f"formula {self.text!r} is too long: more than {MAX_NODES} parts")
        return root

    def _check(self, node: ast.expr) -> None:
        """Refuses every node that the walk does not know, before any value is known."""
        if isinstance(node, ast.Constant):
            self._check_number(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._check(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            self._check(node.left)
            self._check(node.right)
        elif isinstance(node, ast.Call):
            self._check_call(node)
        elif not isinstance(node, ast.Name):
            raise self._refused(node)

    def _check_number(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise self._refused(node)
        try:
            finite = math.isfinite(node.value)
        except OverflowError:  # an integer that no float64 holds
            finite = False
        if not finite:
            raise ValueError(f"formula {self.text!r} holds a number that is not finite")

    def _check_call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise self._refused(node)
        _, fewest, most = _FUNCTIONS[name]
        if not fewest <= len(node.args) <= most:
            raise ValueError(
                f"formula {self.text!r}: {name} takes {fewest} argument(s)"
                f"{' or more' if most > fewest else ''}, got {len(node.args)}"
            )
        for argument in node.args:
            self._check(argument)

    def _refused(self, node: ast.expr) -> ValueError:
        return ValueError(
            f"formula {self.text!r}: {ast.unparse(node)!r} is not allowed; use {_GRAMMAR}"
        )

    def _value(self, node: ast.expr, values: Mapping[str, float]) -> float:
        match node:
            case ast.Constant(value=number):
                return float(number)  # pyright: ignore[reportArgumentType]
            case ast.Name(id=name):
                return float(values[name])
            case ast.UnaryOp(operand=operand):
                return -self._value(operand, values)
            case ast.BinOp(left=left, op=op, right=right):
                operator = _OPERATORS[type(op)]
                return operator(self._value(left, values), self._value(right, values))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _FUNCTIONS[name][0](*(self._value(x, values) for x in arguments))
        raise self._refused(node)
