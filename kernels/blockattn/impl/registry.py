"""What each implementation serves, and why it does not serve the rest.

An implementation is a module with two functions: ``obstacles(problem)``, every static reason why it
cannot serve a call (empty: it can), and ``run(problem)``. Reasons are facts known before a launch;
an exception from ``run`` always propagates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockattn import checks
from blockattn.errors import Reason, UnsupportedError
from blockattn.impl import eager, reference, triton
from blockattn.problem import Problem, Result


@dataclass(frozen=True)
class Implementation:
    """One way to execute the operation.

    Attributes:
        name: the word used in ``impl=`` and in traces.
        summary: what it is, in one line.
        obstacles: reasons why it cannot serve a call; with ``None``, why it cannot run here at all.
        run: executes a call that has no obstacles.
        rounds_p: can round probabilities to e4m3, as kernels with FP8 values do.
        takes_codes: reads the encoded operands of a quantised call, not decoded ones.
    """

    name: str
    summary: str
    obstacles: Callable[[Problem | None], list[str]]
    run: Callable[[Problem], Result]
    rounds_p: bool = False
    takes_codes: bool = False

    def why_not(self) -> str | None:
        """Why nothing can run on this machine with it, ``None`` when it works here."""
        return "; ".join(self.obstacles(None)) or None


_FASTEST_FIRST = (
    Implementation(
        "triton", triton.SUMMARY, triton.obstacles, triton.run, rounds_p=True, takes_codes=True
    ),
    Implementation("eager", eager.SUMMARY, eager.obstacles, eager.run),
    Implementation(
        "reference", reference.SUMMARY, reference.obstacles, reference.run, rounds_p=True
    ),
)


def implementations() -> tuple[Implementation, ...]:
    """All of them, fastest first."""
    return _FASTEST_FIRST


def names() -> tuple[str, ...]:
    """Words that ``impl=`` takes besides ``auto``, fastest first."""
    return tuple(item.name for item in _FASTEST_FIRST)


def check_name(impl: object) -> str:
    """``auto`` or the name of an implementation."""
    return checks.one_of("impl", impl, ("auto", *names()))


def _order(problem: Problem) -> tuple[Implementation, ...]:
    """Fastest first; a plain dense call is fastest in torch's own attention, which eager calls."""
    if problem.plain and not problem.round_p:
        return tuple(sorted(_FASTEST_FIRST, key=lambda item: item.name == "triton"))
    return _FASTEST_FIRST


def choose(problem: Problem, impl: str = "auto") -> tuple[Implementation, tuple[Reason, ...]]:
    """The implementation for a call and the reasons against each faster one.

    Raises:
        UnsupportedError: a named ``impl`` cannot serve the call; all its reasons are listed.
    """
    check_name(impl)
    against: list[Reason] = []
    for item in _order(problem):
        if impl not in ("auto", item.name):
            continue
        found = [Reason(item.name, text) for text in item.obstacles(problem)]
        if problem.round_p and not item.rounds_p:
            found.append(Reason(item.name, "does not round probabilities to e4m3 (round_p=True)"))
        if not found:
            return item, tuple(against)
        against += found
    raise UnsupportedError(f"impl={impl!r} cannot serve this {problem.algorithm} call", against)
