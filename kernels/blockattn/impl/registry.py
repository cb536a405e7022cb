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
from blockattn.impl import cudnn, cute, eager, flash, reference, triton
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
        cause: the exception with which its package failed to import, once it has been tried.
    """

    name: str
    summary: str
    obstacles: Callable[[Problem | None], list[str]]
    run: Callable[[Problem], Result]
    rounds_p: bool = False
    takes_codes: bool = False
    cause: Callable[[], Exception | None] = lambda: None

    def why_not(self) -> str | None:
        """Why nothing can run on this machine with it, ``None`` when it works here."""
        return "; ".join(self.obstacles(None)) or None


_FASTEST_FIRST = (
    Implementation(
        "triton", triton.SUMMARY, triton.obstacles, triton.run, rounds_p=True, takes_codes=True
    ),
    Implementation("cute", cute.SUMMARY, cute.obstacles, cute.run, cause=cute.cause),
    Implementation("cudnn", cudnn.SUMMARY, cudnn.obstacles, cudnn.run, cause=cudnn.LIBRARY.cause),
    Implementation("flash", flash.SUMMARY, flash.obstacles, flash.run, cause=flash.LIBRARY.cause),
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
    """Fastest first. A plain dense call is faster in torch's own attention, which eager calls, than
    in the kernels of this project; on a Hopper GPU a library is faster still for some calls."""
    library = _faster_library(problem)
    plain = problem.plain and not problem.round_p

    def place(item: Implementation) -> int:
        if item.name == library:
            return -1
        return int(plain and item.name in ("triton", "cute"))

    return tuple(sorted(_FASTEST_FIRST, key=place))


def _faster_library(problem: Problem) -> str | None:
    """What was measured to be ahead of everything else (docs/bench/h200.json): flash-attn-4 on
    dense calls, cuDNN on plain block masks of 64 x 64; flash-attn-4 also on larger blocks, which
    only libraries serve. With a tail or padded blocks neither was measured."""
    if problem.plain:
        return "flash"
    if problem.algorithm != "block_mask" or problem.block_lengths is not None:
        return None
    return "cudnn" if problem.block == (64, 64) else "flash"


def choose(problem: Problem, impl: str = "auto") -> tuple[Implementation, tuple[Reason, ...]]:
    """The implementation for a call and the reasons against each faster one.

    Raises:
        UnsupportedError: a named ``impl`` cannot serve the call; all its reasons are listed, and
            the failed import of a package is its cause.
    """
    check_name(impl)
    against: list[Reason] = []
    cause: Exception | None = None
    for item in _order(problem):
        if impl not in ("auto", item.name):
            continue
        found = [Reason(item.name, text) for text in item.obstacles(problem)]
        if problem.round_p and not item.rounds_p:
            found.append(Reason(item.name, "does not round probabilities to e4m3 (round_p=True)"))
        if not found:
            return item, tuple(against)
        against += found
        cause = cause or item.cause()
    text = f"impl={impl!r} cannot serve this {problem.algorithm} call"
    raise UnsupportedError(text, against) from cause
