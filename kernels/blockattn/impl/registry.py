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
    in the kernels of this project; large calls have others ahead of that on a Hopper GPU."""
    ahead = _ahead(problem)
    plain = problem.plain and not problem.round_p

    def place(item: Implementation) -> int:
        if item.name in ahead:
            return ahead.index(item.name) - len(ahead)
        return int(plain and item.name in ("triton", "cute", "cudnn", "flash"))

    return tuple(sorted(_FASTEST_FIRST, key=place))


# Multiplications and additions of a call over its full range from which on others are ahead, on an
# H200 (docs/log.md). Libraries cost the host 0.15 ms (flash) and 0.4 ms (cudnn) a call; the CuTe
# kernel does not share the keys of a short call out. What a route leaves of the range is on the
# device and not read.
FLASH_FROM = 1e11  # dense or causal: a causal call of T = 4,096 with 24 heads of 128 is ahead
CUTE_FROM = 3e12  # of routes and skip votes, the smallest measured: T = 16,384 with such heads
CUDNN_FROM = 3e12  # of a block mask, counted as dense: the same
CUDNN_PADDED_FROM = 1e13  # of one with padded blocks: T = 32,768


def _ahead(problem: Problem) -> tuple[str, ...]:
    """What was measured ahead of the usual order for such a call, fastest first.

    Blocks other than 64 x 64 are served by libraries alone; there flash-attn-4 was ahead at every
    size.
    """
    work = 4.0 * problem.q.numel() * problem.k.shape[1]
    if problem.plain:
        return ("flash",) if (work / 2 if problem.causal else work) >= FLASH_FROM else ()
    mask, padded = problem.algorithm == "block_mask", problem.block_lengths is not None
    if mask and problem.block != (64, 64):
        return ("flash",)
    found = []
    if work >= CUTE_FROM and not padded and problem.operands is None and not problem.round_p:
        found.append("cute")
    if mask and work >= (CUDNN_PADDED_FROM if padded else CUDNN_FROM):
        found.append("cudnn")
    return tuple(found)


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
