"""Parameters of a notebook: what cannot be served is refused by name before anything runs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blockattn import BLOCK, checks
from blockattn.layout import num_blocks

FEWEST = 4  # blocks; with fewer hardly a pair lies outside the band that is always exact


def rising(name: str, values: object) -> list[float]:
    """At least two finite numbers, each above the one before.

    Raises:
        TypeError, ValueError: they are not; the message names the parameter.
    """
    found = checks.numbers(name, values)
    if len(found) < 2 or any(a >= b for a, b in itertools.pairwise(found)):
        raise ValueError(f"{name}={found}: must be two numbers or more, in rising order")
    return found


def between(name: str, value: object, low: float, high: float) -> float:
    """A number strictly between two others.

    Raises:
        TypeError, ValueError: it is not; the message names the parameter.
    """
    number = checks.finite_number(name, value)
    if not low < number < high:
        raise ValueError(f"{name}={value!r}: must be above {low:g} and below {high:g}")
    return number


def distinct(name: str, values: Sequence[object]) -> None:
    """At least one value, and none twice.

    Raises:
        ValueError: they are not; the message names the parameter.
    """
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name}={values!r}: must be at least one, without repeats")


def blocks(name: str, value: object, tokens: int) -> int:
    """Blocks of a sequence that is long enough to be sparse.

    Args:
        name, value: the parameter that the sequence comes from.
        tokens: of the sequence.

    Raises:
        ValueError: it has fewer than 4 blocks.
    """
    count = num_blocks(tokens, BLOCK)
    if count < FEWEST:
        raise ValueError(
            f"{name}={value!r}: {tokens} tokens make {count} of the blocks of {BLOCK}, and blocks "
            f"beside the diagonal are always exact; {FEWEST} blocks are the least to be sparse"
        )
    return count


def reachable(name: str, density: float, size_name: str, size: object, tokens: int) -> None:
    """A density that the blocks of a sequence beside its diagonal, always exact, leave room for.

    Args:
        name, density: the parameter that asks for it.
        size_name, size: the parameter that the sequence comes from. tokens: of the sequence.

    Raises:
        ValueError: the sequence is too short for it; the message names both parameters.
    """
    count = num_blocks(tokens, BLOCK)
    least = min(1.0, (3 * count - 2) / count**2)
    if density <= least:
        raise ValueError(
            f"{size_name}={size!r}: {tokens:,} tokens make {count} of the blocks of {BLOCK}, of "
            f"which {least:.0%} of the pairs are always exact, and {name} is {density:g}; take a "
            f"larger {size_name}, or {name} above {least:.2f}"
        )


def at_least(name: str, value: int | None, minimum: int, why: str) -> None:
    """An integer, or ``None`` for somebody else's default.

    Raises:
        TypeError, ValueError: it is too small, and why that matters.
    """
    if value is not None and checks.integer(name, value) < minimum:
        raise ValueError(f"{name}={value}: must be at least {minimum}, because {why}")


def head(name: str, value: int | None, kept: Sequence[int]) -> int:
    """Where a capture holds a head: a number from 0 on, or ``None`` for the last one.

    Args:
        kept: the model's numbers of the heads that it holds, `Capture.head_indices`.

    Raises:
        TypeError, ValueError: there is no such head; the message names those there are.
    """
    found = checks.integer(name, len(kept) - 1 if value is None else value)
    if found >= len(kept):
        numbers = f"head{'' if len(kept) == 1 else 's'} {', '.join(map(str, kept))}"
        raise ValueError(
            f"{name}={found}: the capture holds {numbers} of the model, here counted from 0 "
            f"to {len(kept) - 1}; give one of these, or None for the last"
        )
    return found


def calls(
    name: str, values: Sequence[Sequence[int]], layers: int, steps: int
) -> list[tuple[int, int]]:
    """Pairs (layer, step) that a sampling visits, as tuples; papermill hands lists over.

    Raises:
        TypeError, ValueError: no pair, one of something else, or one that is never visited.
    """
    if not values or any(len(pair) != 2 for pair in values):
        raise ValueError(f"{name}={values!r}: must be pairs (layer, step), one at least")
    found = []
    for n, (layer, step) in enumerate(values):
        checks.integer(f"layer of {name}[{n}]", layer, maximum=layers - 1)
        checks.integer(f"step of {name}[{n}]", step, maximum=steps - 1)
        found.append((layer, step))
    return found


def new_folder(out: str | Path | None) -> Path:
    """A folder of its own for every run: in ``out``, which is made, or a temporary one."""
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="run-", dir=out))
