"""Argument checks shared by every public function: each error names argument, value and fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HOST_DTYPES = (torch.float64, torch.int64, torch.bool)  # what Python numbers turn into
MAX_HEAD_DIM = 256


def host_value(name: str, value: object) -> object:
    """The number in a one-element CPU tensor; anything else as it is.

    Settings may be such tensors: inside ``torch.compile`` their value is data, so that changing it
    recompiles nothing. A tensor on another device is refused, because reading it would stall.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise ValueError(f"{name}: shape {shape} has {value.numel()} elements, need 1")
    if value.device.type != "cpu":
        raise ValueError(
            f"{name}: on {value.device}, but it is read on the host; "
            "keep it in a number or a one-element CPU tensor"
        )
    return value.item()


def finite_number(name: str, value: object, *, minimum: float | None = None) -> float:
    """A host number, never bool, NaN or infinity. ``minimum`` is inclusive."""
    value = host_value(name, value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r}: must be finite")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}={value!r}: must be at least {minimum:g}")
    return number


def integer(name: str, value: object, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A host integer in ``[minimum, maximum]``, never bool."""
    value = host_value(name, value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected an integer, got {type(value).__name__}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        top = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name}={value!r}: must be at least {minimum}{top}")
    return number


def flag(name: str, value: object) -> bool:
    """True or False; numbers are not taken for flags."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False, got {type(value).__name__}")
    return value


def numbers(name: str, values: object) -> list[float]:
    """A sequence or 1-D tensor of finite host numbers; each is named by its index when refused."""
    if isinstance(values, Tensor):
        if values.dtype == torch.bool:
            raise TypeError(f"{name}: dtype torch.bool, expected numbers")
        values = values.flatten().tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r}: expected a sequence of numbers")
    return [finite_number(f"{name}[{n}]", value) for n, value in enumerate(values)]


def integer_pair(name: str, value: object, *, minimum: int = 1) -> tuple[int, int]:
    """A pair of host integers such as a block or tile ``(queries, keys)``."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"{name}={value!r}: expected a pair of integers (queries, keys)")
    first, second = (integer(f"{name}[{n}]", item, minimum=minimum) for n, item in enumerate(value))
    return first, second


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of a few strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def attention_tensor(name: str, value: object) -> Tensor:
    """One float tensor ``[B, T, H, D]`` with B, H >= 1 and 1 <= D <= 256; T may be 0."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor [B, T, H, D], got {type(value).__name__}")
    shape = tuple(value.shape)
    if value.dim() != 4:
        raise ValueError(f"{name}: shape {shape} has rank {value.dim()}, expected [B, T, H, D]")
    if value.dtype not in FLOAT_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise TypeError(f"{name}: dtype {value.dtype} is not served; use one of {names}")
    if shape[0] < 1 or shape[2] < 1:
        raise ValueError(f"{name}: shape {shape} [B, T, H, D] needs at least one batch and head")
    if not 1 <= shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: head dim {shape[3]} must be in 1..{MAX_HEAD_DIM} (last axis)")
    return value


def same_kind(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Both tensors share dtype, device, batch and head dim."""
    if value.dtype != like.dtype:
        raise TypeError(f"{name}: dtype {value.dtype} differs from {like_name}'s {like.dtype}")
    if value.device != like.device:
        raise ValueError(f"{name}: on {value.device}, but {like_name} is on {like.device}")
    if value.shape[0] != like.shape[0] or value.shape[3] != like.shape[3]:
        raise ValueError(
            f"{name}: shape {tuple(value.shape)} must match {like_name}'s {tuple(like.shape)} "
            "in batch (axis 0) and head dim (axis 3)"
        )


def query_key(q: object, k: object) -> tuple[Tensor, Tensor]:
    """Checked q ``[B, Tq, Hq, D]`` and k ``[B, Tk, Hk, D]`` with Hq a multiple of Hk.

    Forward only: refuses inputs that want gradients.
    """
    query, key = attention_tensor("q", q), attention_tensor("k", k)
    same_kind("k", key, "q", query)
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"k: {key.shape[2]} heads do not divide q's {query.shape[2]}; "
            f"grouped-query attention needs Hq a multiple of Hk{layout_hint(_swapped(query, key))}"
        )
    forward_only(q=query, k=key)
    return query, key


def layout_hint(likely: bool) -> str:
    """The end of an error whose cause is likely that a call took axis 1, heads, for tokens."""
    fix = "tensors are [B, T, H, D]; give [B, H, T, D], torch's SDPA layout, as x.transpose(1, 2)"
    return f"; {fix}" if likely else ""


def _swapped(q: Tensor, k: Tensor) -> bool:
    """Whether both have more heads than tokens, and would fit with these axes swapped.

    Heads of k may be one; one query is a step of decoding.
    """
    many = q.shape[2] > q.shape[1] > 1 and k.shape[2] > k.shape[1] > 0
    return many and q.shape[1] % k.shape[1] == 0


def forward_only(**tensors: Tensor) -> None:
    """Refuses tensors that want gradients while gradients are being recorded."""
    for name, value in tensors.items():
        if torch.is_grad_enabled() and value.requires_grad:
            raise ValueError(
                f"{name}: requires_grad=True, but these operations are forward only; "
                "wrap the call in torch.no_grad() or detach the tensor"
            )


def query_key_value(q: object, k: object, v: object) -> tuple[Tensor, Tensor, Tensor]:
    """Checked q, k, v; v has exactly k's shape. Forward only, as :func:`query_key`."""
    query, key = query_key(q, k)
    value = attention_tensor("v", v)
    same_kind("v", value, "k", key)
    if value.shape != key.shape:
        raise ValueError(f"v: shape {tuple(value.shape)} must equal k's {tuple(key.shape)}")
    forward_only(v=value)
    return query, key, value


def self_attention(name: str, q: Tensor, k: Tensor) -> None:
    """Query and key sequences are one and the same non-empty sequence."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{name} is self-attention: q has {q.shape[1]} tokens but k has {k.shape[1]}; "
            f"use attend() without a route for cross-attention{layout_hint(_swapped(q, k))}"
        )
    if q.shape[1] == 0:
        raise ValueError(f"{name}: empty sequence, q has shape {tuple(q.shape)} with 0 tokens")


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D) in the steps of torch's own attention: ``D ** -0.5`` may differ in the last bit,
    and a dense float64 call would then differ from torch's."""
    return 1.0 / math.sqrt(head_dim)


def scale_argument(name: str, value: object, like: Tensor, *, default: float) -> float | Tensor:
    """A positive finite float, or one float32 element on ``like``'s device (never read).

    One float64 element on the CPU is a host number (:func:`host_value`).
    """
    if value is None:
        return default
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in HOST_DTYPES:
        value = host_value(name, value)
    if not isinstance(value, Tensor):
        number = finite_number(name, value)
        if number <= 0:
            raise ValueError(f"{name}={value!r}: must be greater than 0")
        return number
    if value.numel() != 1:
        raise ValueError(f"{name}: shape {tuple(value.shape)} has {value.numel()} elements, need 1")
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: dtype {value.dtype}, a scale tensor must be float32")
    if value.device != like.device:
        raise ValueError(f"{name}: on {value.device}, but q is on {like.device}; move it there")
    forward_only(**{name: value})
    return value.reshape(())
