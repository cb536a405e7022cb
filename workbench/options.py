"""Texts of command line options as integers; needs no torch, which `--help` must not wait for."""

from __future__ import annotations


def integers(option: str, text: str) -> tuple[int, ...]:
    """``0,2,4`` -> (0, 2, 4), in their order.

    Args:
        option: for the message, such as ``--layers``.

    Raises:
        ValueError: a part that is no integer from 0 on.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text}: expected integers from 0 on, such as 0,2,4")
    return tuple(int(part) for part in parts)


def fitting(option: str, text: str | None, default: tuple[int, ...], count: int) -> tuple[int, ...]:
    """As :func:`integers`; where nothing is given, those of a default that count from 0 reaches.

    Args:
        default: rising. Where all of it lies beyond, the last that there is.
        count: how many there are.
    """
    if text is not None:
        return integers(option, text)
    return tuple(n for n in default if n < count) or (max(count, 1) - 1,)


def three_sizes(
    option: str, text: str, example: str = "t,h,w such as 8,16,16"
) -> tuple[int, int, int]:
    """``8,16,16`` -> (8, 16, 16).

    Raises:
        ValueError: another number of sizes, or one below 1; the example says what they are.
    """
    sizes = integers(option, text)
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"{option} {text}: expected three sizes {example}, each at least 1")
    return sizes[0], sizes[1], sizes[2]


def video_size(option: str, text: str) -> tuple[int, int, int]:
    """Frames, height and width of a video in pixels, likewise."""
    return three_sizes(option, text, "frames,height,width such as 81,480,832")
