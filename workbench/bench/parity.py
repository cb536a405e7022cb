"""Before anything is timed: what will be timed agrees with the reference at a smaller size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockattn import BlockSummary, attend, sol_attention, sol_scores
from blockattn.impl import triton
from blockattn.quant_formats import quantise_fp8_values, quantise_mxfp8, quantise_nvfp4
from workbench.bench.inputs import KINDS, QKV, Bench, random_mask
from workbench.bench.peers import Absent, Found

MARGIN = 1e-4  # of the threshold, relative: decisions closer than this may differ
DIFFERING_TILES = 1e-3  # share of skip votes that rounding may turn
PEER_ERROR = 1e-2  # relative L2 of a peer in 16-bit numbers


@dataclass(frozen=True)
class Check:
    """One comparison with the reference.

    Attributes:
        rows: which rows time what was compared, and are not measured when it fails.
        error: largest difference, or how many decisions or bytes differ.
        allowed: how large ``error`` may be.
        impl: whose result it is; empty where every implementation shares it.
    """

    rows: tuple[int, ...]
    error: float
    allowed: float
    impl: str = ""

    @property
    def holds(self) -> bool:
        """False for NaN as well."""
        return self.error <= self.allowed


def check_parity(bench: Bench, impls: tuple[str, ...]) -> dict[str, Check]:
    """Every timed operation of every implementation against the float64 reference, by name."""
    found: dict[str, Check] = {}
    for kind in KINDS:
        data = bench.qkv(kind, bench.sizes.check, bench.sizes.check_heads)
        for impl in impls:
            for name, check in _attention(data, impl).items():
                found[f"{impl} {name}, {kind}"] = replace(check, impl=impl)
        for name, check in check_encodings(data[2]).items():
            found[f"{name}, {kind}"] = check
    return found


def broken(checks: Mapping[str, Check], impl: str = "") -> dict[int, str]:
    """Why a row must not be measured, by row: at all, or of one implementation."""
    found: dict[int, list[str]] = {}
    for name, check in checks.items():
        if check.impl == impl and not check.holds:
            for row in check.rows:
                text = f"{name}: {check.error:.3g}, allowed {check.allowed:.3g}"
                found.setdefault(row, []).append(text)
    return {row: "differs from the reference: " + "; ".join(why) for row, why in found.items()}


def _attention(data: QKV, impl: str) -> dict[str, Check]:
    route = random_mask(data[0], 0.3)
    found = {
        "dense": _compare((7, 8), data, impl),
        "block mask": _compare((3,), data, impl, route=route),
    }
    for rows, tau in (((1, 4, 6), 1.0), ((2, 4), 2.0)):
        found |= _sol(rows, data, impl, tau)
    for tile in triton.SKIP_TILES:
        for rows, threshold in (((7,), 0.0), ((6, 8), 1e-3)):
            found |= _skip(rows, data, impl, threshold, tile)
    return found


def _compare(rows: tuple[int, ...], data: QKV, impl: str, **settings: Any) -> Check:
    return Check(rows, *error_rule(attend(*data, impl=impl, **settings), data, settings))


def error_rule(out: Tensor, data: QKV, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Largest error, and what is allowed: twice that of plain PyTorch at the inputs' dtype, plus
    one rounding.

    Raises:
        RuntimeError: the reference is not finite.
    """
    wide = dict(settings)
    if settings.get("tail") is not None:
        wide["tail"] = settings["tail"].to(torch.float64)
    q, k, v = (x.double() for x in data)
    truth = attend(q, k, v, impl="reference", **wide)
    plain = attend(*data, impl="reference", **settings)
    if not torch.isfinite(truth).all():
        raise RuntimeError("the reference is not finite, nothing can be compared with it")
    eps = torch.finfo(data[0].dtype).eps
    own = (plain.double() - truth).abs().max() + eps * data[2].abs().max()
    allowed = 2 * own + eps * truth.abs().max()
    return float((out.double() - truth).abs().max()), float(allowed)


def _sol(rows: tuple[int, ...], data: QKV, impl: str, tau: float) -> dict[str, Check]:
    """The output for the route that was taken, and the route outside the margin."""
    out, trace = sol_attention(*data, tau=tau, impl=impl, return_trace=True)
    scores = sol_scores(data[0], data[1])
    threshold = scores.threshold(tau)[..., None].abs().clamp(min=1)
    sure = (scores.z - tau).abs() * scores.std[..., None] > MARGIN * threshold
    wrong = int(((trace.route.dense() != scores.route(tau).dense()) & sure).sum())
    tail = BlockSummary.of(data[1], data[2])
    rule = error_rule(out, data, {"route": trace.route, "tail": tail})
    return {
        f"sol tau {tau:g}": Check(rows, *rule),
        f"sol tau {tau:g}, block pairs routed otherwise": Check(rows, wrong, 0),
    }


def _skip(
    rows: tuple[int, ...], data: QKV, impl: str, threshold: float, tile: tuple[int, int]
) -> dict[str, Check]:
    settings: dict[str, Any] = {"skip_threshold": threshold, "skip_tile": tile}
    out, trace = attend(*data, impl=impl, return_trace=True, **settings)
    _, expected = attend(*data, impl="reference", return_trace=True, **settings)
    differing = trace.skipped.differing(expected.skipped)
    doubtful = DIFFERING_TILES * int(trace.reachable.counts().sum()) if threshold else 0
    name = f"skip {threshold:g} at {tile[0]} x {tile[1]}"
    return {
        name: Check(rows, *error_rule(out, data, settings)),
        f"{name}, tiles that vote otherwise": Check(rows, differing, doubtful),
    }


def check_encodings(v: Tensor) -> dict[str, Check]:
    """Bytes that the quantisers write otherwise here than on the CPU."""
    found = {}
    for name, encode in (("mxfp8", quantise_mxfp8), ("nvfp4", quantise_nvfp4)):
        here, there = encode(v), encode(v.cpu())
        pairs = ((here.data, there.data), (here.scales, there.scales))
        found[name] = Check((9,), sum(_differing_bytes(a, b) for a, b in pairs), 0)
    for scale in ("tensor", "channel"):
        here, there = (quantise_fp8_values(x, scale=scale).data for x in (v, v.cpu()))
        found[f"fp8 v by {scale}"] = Check((9,), _differing_bytes(here, there), 0)
    return found


def _differing_bytes(x: Tensor, y: Tensor) -> int:
    a, b = (t.cpu().contiguous().view(torch.uint8) for t in (x, y))
    return int((a != b).sum())


def checked_peers(found: Found, data: QKV, settings: Mapping[str, Any]) -> Found:
    """The peers whose output is that of the reference; the others say how far off they are."""
    q, k, v = (x.double() for x in data)
    truth = attend(q, k, v, impl="reference", **settings)
    checked: Found = {}
    for name, call in found.items():
        checked[name] = call
        if not isinstance(call, Absent):
            error = float((call().double() - truth).norm() / truth.norm())
            if not error <= PEER_ERROR:
                checked[name] = Absent(f"differs from the reference by {error:.1e} (relative L2)")
    return checked
