"""Sol-Attn and SkipSoftmax a second time, from their definitions: plain loops, numpy, float64.

Written from the formulas alone and sharing no code with blockattn. It collects the columns that a
query tile attends and takes one softmax over them at the end, where blockattn keeps a running one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
LOG2_E = math.log2(math.e)


def to_bfloat16(x: Array) -> Array:
    """Rounds to the nearest bfloat16, ties to even, and returns float64."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def spans(tokens: int, size: int) -> list[slice]:
    """Token ranges of the blocks of a sequence."""
    return [slice(a, min(a + size, tokens)) for a in range(0, tokens, size)]


@dataclass
class Summary:
    """Mean key and summed value ``[B, N, H, D]`` of each block, and its number of keys."""

    k_mean: Array
    v_sum: Array
    lengths: list[int]


def summarise(k: Array, v: Array, block: int = 64, rounding=to_bfloat16) -> Summary:
    """Block summaries as a kernel sees them."""
    parts = spans(k.shape[1], block)
    k_mean = np.stack([k[:, s].mean(axis=1) for s in parts], axis=1)
    v_sum = np.stack([v[:, s].sum(axis=1) for s in parts], axis=1)
    return Summary(rounding(k_mean), rounding(v_sum), [s.stop - s.start for s in parts])


def sol_plan(
    q: Array,
    k_mean: Array,
    tau: float,
    thresh_type: str,
    *,
    scale: float,
    sink: tuple[int, int] = (0, 0),
    block: int = 64,
) -> tuple[Array, Array, Array]:
    """Threshold ``[B, H, N]``, score and exact blocks ``[B, H, N, N]`` of one tau."""
    batch, _, heads, _ = q.shape
    group = heads // k_mean.shape[2]
    parts = spans(q.shape[1], block)
    count, unit = len(parts), scale * LOG2_E
    theta = np.zeros((batch, heads, count))
    score = np.zeros((batch, heads, count, count))
    for b, h, i in np.ndindex(batch, heads, count):
        means = k_mean[b, :, h // group]
        query = q[b, parts[i], h].mean(axis=0)
        mu = means.mean(axis=0)
        if thresh_type == "exact":
            variance = query @ np.cov(means.T, bias=True).reshape(len(mu), len(mu)) @ query
        else:
            variance = (query**2 * means.var(axis=0)).sum()
        theta[b, h, i] = unit * (query @ mu) + tau * math.sqrt(variance * unit**2 + 1e-6)
        score[b, h, i] = unit * (means @ query)
    index = np.arange(count)
    band = np.abs(index[:, None] - index[None, :]) <= 1
    sunk = (index >= sink[0]) & (index < sink[1])
    return theta, score, (score > theta[..., None]) | band | sunk[None, :]


@dataclass
class Attention:
    """Output ``[B, Tq, H, D]``, LSE ``[B, H, Tq]``, dropped tiles ``[B, H, tiles, tiles]``."""

    out: Array
    lse: Array
    dropped: Array


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    exact: Array | None = None,
    block: int = 64,
    tail: Summary | None = None,
    causal: bool = False,
    threshold: float | None = None,
    tile: tuple[int, int] = (128, 128),
    lagging: bool = False,
) -> Attention:
    """Every combination of block mask, summaries, causal mask and skip threshold."""
    batch, queries, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    rows, columns = spans(queries, tile[0]), spans(keys, tile[1])
    out, lse = np.zeros((batch, queries, heads, dim)), np.full((batch, heads, queries), -np.inf)
    dropped = np.zeros((batch, heads, len(rows), len(columns)), dtype=bool)
    for b, h, i in np.ndindex(batch, heads, len(rows)):
        token = np.arange(rows[i].start, rows[i].stop)
        allowed = np.ones((len(token), keys), dtype=bool)
        if exact is not None:
            allowed = exact[b, h][token // block][:, np.arange(keys) // block]
        if causal:
            allowed = allowed & (np.arange(keys)[None, :] <= token[:, None])
        scores = np.where(allowed, q[b, token, h] @ k[b, :, h // group].T, -np.inf) * scale
        logits, values, weights = [], [], []
        if tail is not None and exact is not None:
            absent = exact[b, h][token // block]
            mean = np.where(absent, -np.inf, q[b, token, h] @ tail.k_mean[b, :, h // group].T)
            logits.append(mean * scale)
            values.append(tail.v_sum[b, :, h // group])
            weights.append(np.array(tail.lengths, dtype=float))
        vote = _Vote(logits[0] if logits else None, len(token), threshold, lagging)
        for j, part in enumerate(columns):
            if not allowed[:, part].any():
                continue
            if vote.drops(scores[:, part].max(axis=1)):
                dropped[b, h, i, j] = True
                continue
            logits.append(scores[:, part])
            values.append(v[b, part, h // group])
            weights.append(np.ones(part.stop - part.start))
        if logits:
            result = _softmax(np.hstack(logits), np.vstack(values), np.concatenate(weights))
            out[b, token, h], lse[b, h, token] = result
    return Attention(out, lse, dropped)


class _Vote:
    """Decides tile by tile, in natural units; rows keep a true and a lagging maximum."""

    def __init__(self, first: Array | None, rows: int, threshold: float | None, lagging: bool):
        self.threshold, self.lagging = threshold, lagging
        self.true = np.full(rows, -np.inf)
        self.lag = np.full(rows, -np.inf)
        if first is not None:
            self._raise(first.max(axis=1))

    def drops(self, top: Array) -> bool:
        before = self.lag if self.lagging else self.true
        if self.threshold is not None and all(map(self._wants, top, before)):
            return True
        self._raise(top)
        return False

    def _wants(self, top: float, before: float) -> bool:
        if top == -np.inf:
            return True
        return before > -np.inf and math.exp(top - before) < self.threshold

    def _raise(self, top: Array) -> None:
        self.true = np.maximum(self.true, top)
        for row, value in enumerate(top):
            if value > -np.inf and not (value - self.lag[row]) * LOG2_E <= 8:
                self.lag[row] = value


def _softmax(logits: Array, values: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted softmax of each row; rows without a finite logit give 0 and -inf."""
    out, lse = np.zeros((len(logits), values.shape[1])), np.full(len(logits), -np.inf)
    for row, line in enumerate(logits):
        top = line.max()
        if top == -np.inf:
            continue
        p = np.exp(line - top)
        total = (p * weights).sum()
        out[row], lse[row] = p @ values / total, top + math.log(total)
    return out, lse
