"""Calibration formulas: a small grammar, never evaluated as code, always a finite number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config.formula import Formula


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("--1", 1),
        ("7 / 2 - 1.5e0", 2),
        ("exp(0) + log(1) + sqrt(4) + pow(2, 3) + abs(-1)", 12),
        ("min(3, 1, 2) + max(3, 1)", 4),
        (" x * 2 ", 8),
        ("exp(exp)", math.e),  # a name may be called like a function
    ],
)
def test_arithmetic_means_what_it_says(text: str, value: float):
    assert Formula(text)({"x": 4, "exp": 1}) == pytest.approx(value)


def test_names_are_those_that_need_a_value():
    assert Formula("a * exp(b * target_sparsity)").names == {"a", "b", "target_sparsity"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "a.b",
        "a[0]",
        "lambda: 1",
        "(x := 1)",
        "[1 for _ in a]",
        "1 if a else 2",
        "a < 1",
        "a and b",
        "'text'",
        "True",
        "1j",
        "None",
        "+a",
        "~1",
        "a // 2",
        "a % 2",
        "a @ b",
        "sin(a)",
        "exp(x=1)",
        "exp(*a)",
        "f'{a}'",
        "exp()(1)",
    ],
)
def test_nothing_else_is_allowed(text: str):
    with pytest.raises(ValueError, match=r"is not allowed; use numbers|takes 1 argument"):
        Formula(text)


@pytest.mark.parametrize("text", ["", "a b", "1 +", "a; b", "a = 1", "\0", "(" * 300, "import os"])
def test_what_cannot_be_parsed_is_refused(text: str):
    with pytest.raises(ValueError, match="cannot be parsed"):
        Formula(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exp(1, 2)", r"exp takes 1 argument\(s\), got 2"),
        ("pow(1)", r"pow takes 2 argument\(s\), got 1"),
        ("min(1)", r"min takes 2 argument\(s\) or more, got 1"),
        ("1e999", "number that is not finite"),
        ("1" + "0" * 400, "number that is not finite"),
        ("1" * 501, "501 characters, at most 500"),
        ("-" * 250 + "1", "more than 200 parts"),
        ("1+" * 150 + "1", "more than 200 parts"),
    ],
)
def test_arity_numbers_and_size_are_bounded(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        "exp(1000)",
        "9.0 ** 9 ** 9 ** 9",
        "9 ** 9 ** 9 ** 9",  # as integers this would not end
        "log(0)",
        "sqrt(-1)",
        "(-8) ** 0.5",  # complex in Python
        "1e308 * 10",
        "1e308 * 10 - 1e308 * 10",
    ],
)
def test_a_result_that_is_no_finite_real_number_is_refused(text: str):
    with pytest.raises(ValueError, match=r"has no finite value|must be finite"):
        Formula(text)({})


def test_a_missing_name_is_named_with_what_there_is():
    with pytest.raises(ValueError, match="names b, which has no value; given are a"):
        Formula("a + b")({"a": 1})


def test_a_formula_is_text():
    with pytest.raises(TypeError, match="expected text, got float"):
        Formula(1.5)  # pyright: ignore[reportArgumentType]


numbers = st.floats(-50, 50).map(lambda x: round(x, 3))


@given(numbers, numbers, numbers)
def test_agrees_with_python_on_plain_arithmetic(a: float, b: float, c: float):
    got = Formula("a - b * -c + abs(a) / (1 + c ** 2)")({"a": a, "b": b, "c": c})
    assert got == pytest.approx(a - b * -c + abs(a) / (1 + c**2))


@given(st.text(max_size=30))
def test_any_text_is_a_formula_or_a_value_error(text: str):
    try:
        names = Formula(text).names
    except ValueError:
        return
    assert isinstance(names, frozenset)
