"""Bad input is refused before any work, by an error that names the argument, its value, the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from blockattn import (
    BlockRoute,
    BlockSummary,
    attend,
    problem,
    skip,
    skip_gaps,
    skip_softmax_attention,
    sol,
    sol_attention,
    sol_route,
    sol_scores,
)
from blockattn.impl import reference, registry
from blockattn.impl.registry import Implementation
from tests.inputs import gaussian

NAN, INF = float("nan"), float("inf")
Q, K, V = gaussian(200)
ROUTE = BlockRoute.causal((1, 2), seqlens=(200, 200))
TAIL = BlockSummary.of(K, V)
SCORES = sol_scores(Q, K)
GAPS = skip_gaps(Q, K)
META = Q.to("meta")


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Whatever computes raises: an error that a test sees came before it."""

    def work(*args, **kwargs):
        raise AssertionError("work was done on bad input")

    never = Implementation("reference", "planted", reference.obstacles, work)
    monkeypatch.setattr(registry, "_FASTEST_FIRST", (never,))
    monkeypatch.setattr(sol, "block_mean", work)
    monkeypatch.setattr(sol, "score_statistics", work)
    monkeypatch.setattr(skip, "tile_gaps", work)
    monkeypatch.setattr(problem, "block_mean", work)
    monkeypatch.setattr(problem, "block_sum", work)


def test_good_input_does_reach_the_work():
    for call in (
        lambda: attend(Q, K, V, ROUTE, tail=TAIL),
        lambda: skip_softmax_attention(Q, K, V, threshold=0.5),
        lambda: sol_attention(Q, K, V),
        lambda: sol_scores(Q, K),
        lambda: skip_gaps(Q, K),
        lambda: BlockSummary.of(K, V),
    ):
        with pytest.raises(AssertionError, match="work was done"):
            call()


class Bad(NamedTuple):
    """A call that must be refused with exactly this type and a message that matches."""

    call: Callable[[], Any]
    error: type[Exception]
    message: str


def every_call(q, k, v, error: type[Exception], message: str) -> list[Bad]:
    """The same bad tensors given to each public function that takes all three."""
    calls = (attend, sol_attention, skip_softmax_attention)
    return [Bad(lambda call=call: call(q, k, v), error, message) for call in calls]


def routing(q, k, error: type[Exception], message: str) -> list[Bad]:
    """The same bad tensors given to each public function that takes q and k."""
    calls = (sol_route, sol_scores, skip_gaps)
    return [Bad(lambda call=call: call(q, k), error, message) for call in calls]


HALF = K.half()
TENSORS = [
    *every_call([1, 2], K, V, TypeError, "q: expected a torch.Tensor .* got list"),
    *every_call(Q, None, V, TypeError, "k: expected a torch.Tensor .* got NoneType"),
    *every_call(Q[0], K, V, ValueError, r"q: shape \(200, 2, 32\) has rank 3, expected \[B, T"),
    *every_call(Q, K, V[..., None], ValueError, "v: shape .* has rank 5, expected"),
    *every_call(
        Q.long(), K, V, TypeError, "q: dtype torch.int64 is not served; use one of float64"
    ),
    *every_call(Q, HALF, V, TypeError, "k: dtype torch.float16 differs from q's torch.float32"),
    *every_call(Q, K, V.double(), TypeError, "v: dtype torch.float64 differs from k's"),
    *every_call(META, K, V, ValueError, "k: on cpu, but q is on meta"),
    *every_call(Q, K, META, ValueError, "v: on meta, but k is on cpu"),
    *every_call(Q, K[..., :16], V, ValueError, r"k: shape \(1, 200, 2, 16\) must match q's.*head"),
    *every_call(Q, K, V[..., :16], ValueError, "v: shape .* must match k's .* head dim"),
    *every_call(Q, torch.cat([K, K]), V, ValueError, r"k: shape \(2, 200, 2, 32\) .* batch"),
    *every_call(Q, K, V[:, :199], ValueError, r"v: shape \(1, 199, 2, 32\) must equal k's"),
    *every_call(Q, K[:, :, [0, 0, 0]], V, ValueError, "k: 3 heads do not divide q's 2"),
    *every_call(Q[:0], K, V, ValueError, r"q: shape \(0, 200, 2, 32\) .* at least one batch"),
    *every_call(Q[:, :, :0], K, V, ValueError, "q: shape .* at least one batch and head"),
    *every_call(Q[..., :0], K, V, ValueError, r"q: head dim 0 must be in 1\.\.256"),
    *every_call(torch.zeros(1, 9, 1, 257), K, V, ValueError, "q: head dim 257 must be in"),
    *every_call(Q.clone().requires_grad_(), K, V, ValueError, "q: requires_grad=True.*no_grad"),
    *every_call(Q, K, V.clone().requires_grad_(), ValueError, "v: requires_grad=True.*detach"),
    *routing("q", K, TypeError, "q: expected a torch.Tensor .* got str"),
    *routing(Q, K[0], ValueError, "k: shape .* has rank 3"),
    *routing(Q, HALF, TypeError, "k: dtype torch.float16 differs"),
    *routing(Q, META, ValueError, "k: on meta, but q is on cpu"),
    *routing(Q, K.clone().requires_grad_(), ValueError, "k: requires_grad=True"),
    *routing(Q[..., :16], K, ValueError, "k: shape .* must match q's .* head dim"),
]

# Tensors of torch's SDPA, [B, H, T, D]: what is refused anyway says so where it is likely.
SDPA = Q.transpose(1, 2)
HINT = r"torch's SDPA layout, as x\.transpose\(1, 2\)"
SDPA_LAYOUT = [
    Bad(lambda: attend(SDPA, SDPA, SDPA, ROUTE), ValueError, rf"anew; .*{HINT}"),
    Bad(lambda: sol_attention(SDPA, SDPA[:, :1], SDPA[:, :1]), ValueError, HINT),
    Bad(lambda: attend(SDPA, SDPA[:, :, :9], SDPA[:, :, :9]), ValueError, HINT),
    Bad(lambda: attend(Q, K[:, :, [0, 0, 0]], V[:, :, [0, 0, 0]]), ValueError, r"multiple of Hk$"),
    Bad(lambda: sol_attention(Q, K[:, :9], V[:, :9]), ValueError, "for cross-attention$"),
]

EMPTY = Q[:, :0]
SELF_ATTENTION = [
    Bad(
        lambda: sol_attention(EMPTY, EMPTY, EMPTY),
        ValueError,
        r"empty sequence, q .*\(1, 0, 2, 32\)",
    ),
    Bad(lambda: sol_scores(EMPTY, EMPTY), ValueError, "empty sequence"),
    Bad(lambda: sol_attention(Q, K[:, :9], V[:, :9]), ValueError, "q has 200 tokens but k has 9"),
    Bad(lambda: sol_scores(Q, K[:, :9]), ValueError, "self-attention.*use attend"),
]

NUMBERS = [
    *[
        Bad(lambda call=call, tau=tau: call(tau), error, f"tau={tau!r}: {what}")
        for call in (
            lambda tau: sol_attention(Q, K, V, tau=tau),
            lambda tau: sol_route(Q, K, tau=tau),
            SCORES.route,
            SCORES.passing,
            SCORES.threshold,
        )
        for tau, error, what in (
            (NAN, ValueError, "must be finite"),
            (INF, ValueError, "must be finite"),
            (-INF, ValueError, "must be finite"),
            (True, TypeError, "expected a number, got bool"),
            ("1", TypeError, "expected a number, got str"),
            (None, TypeError, "expected a number, got NoneType"),
        )
    ],
    Bad(lambda: SCORES.density([0.0, NAN]), ValueError, r"taus\[1\]=nan: must be finite"),
    Bad(lambda: SCORES.density(torch.tensor([INF])), ValueError, r"taus\[0\]=inf"),
    Bad(lambda: SCORES.density([True]), TypeError, r"taus\[0\]=True"),
    Bad(lambda: SCORES.density(torch.tensor([True])), TypeError, "taus: dtype torch.bool"),
    Bad(lambda: SCORES.density(1.0), TypeError, "taus=1.0: expected a sequence of numbers"),
    Bad(lambda: SCORES.density("12"), TypeError, "taus='12': expected a sequence of numbers"),
    *[
        Bad(lambda call=call, value=value: call(value), error, f"{name}{what}")
        for name, call in (
            ("skip_threshold", lambda x: attend(Q, K, V, skip_threshold=x)),
            ("threshold", lambda x: skip_softmax_attention(Q, K, V, threshold=x)),
            (
                "threshold_scale_factor",
                lambda x: skip_softmax_attention(Q, K, V, threshold_scale_factor=x),
            ),
            ("threshold", GAPS.skipped),
            (r"thresholds\[1\]", lambda x: GAPS.sparsity([0.5, x])),
        )
        for value, error, what in (
            (NAN, ValueError, "=nan: must be finite"),
            (INF, ValueError, "=inf: must be finite"),
            (True, TypeError, "=True: expected a number"),
            ("a", TypeError, "='a': expected a number"),
        )
    ],
    Bad(
        lambda: attend(Q, K, V, skip_threshold=-0.1),
        ValueError,
        "skip_threshold=-0.1: .* at least 0",
    ),
    Bad(lambda: skip_softmax_attention(Q, K, V, threshold=-1), ValueError, "threshold=-1: must be"),
    Bad(
        lambda: skip_softmax_attention(Q, K, V, threshold_scale_factor=-1),
        ValueError,
        "threshold_scale_factor=-1: must be at least 0",
    ),
    Bad(lambda: GAPS.skipped(-1), ValueError, "threshold=-1: must be at least 0"),
    Bad(
        lambda: skip_softmax_attention(Q, K, V, threshold=0.5, threshold_scale_factor=100),
        ValueError,
        "threshold=0.5 and threshold_scale_factor=100 .* give one of them",
    ),
]

CHOICES = [
    *[
        Bad(lambda call=call, value=value: call(value), error, f"thresh_type={value!r}.*'exact'")
        for call in (
            lambda x: sol_attention(Q, K, V, thresh_type=x),
            lambda x: sol_route(Q, K, thresh_type=x),
            lambda x: sol_scores(Q, K, thresh_type=x),
        )
        for value, error in (("full", ValueError), ("Diag", ValueError), (None, TypeError))
    ],
    *[
        Bad(lambda call=call, value=value: call(value), error, f"impl={value!r}.*'reference'")
        for call in (
            lambda x: attend(Q, K, V, impl=x),
            lambda x: sol_attention(Q, K, V, impl=x),
            lambda x: skip_softmax_attention(Q, K, V, impl=x),
        )
        for value, error in (("fastest", ValueError), (None, TypeError))
    ],
    Bad(lambda: attend(Q, K, V, skip_reference="latest"), ValueError, "skip_reference='latest'"),
    Bad(
        lambda: skip_softmax_attention(Q, K, V, threshold=0.5, skip_reference=1),
        TypeError,
        "skip_reference=1: expected one of 'exact', 'lagging'",
    ),
    *[
        Bad(lambda call=call: call(1), TypeError, "causal=1: expected True or False, got int")
        for call in (
            lambda x: attend(Q, K, V, causal=x),
            lambda x: skip_softmax_attention(Q, K, V, threshold=0.5, causal=x),
            lambda x: skip_gaps(Q, K, causal=x),
        )
    ],
    Bad(lambda: attend(Q, K, V, return_trace=1), TypeError, "return_trace=1: expected True or"),
    Bad(lambda: sol_attention(Q, K, V, return_trace="no"), TypeError, "return_trace='no'"),
]

SINKS = [
    Bad(lambda call=call, settings=settings: call(**settings), error, message)
    for call in (
        lambda **x: sol_attention(Q, K, V, **x),
        lambda **x: sol_route(Q, K, **x),
        lambda **x: sol_scores(Q, K, **x),
    )
    for settings, error, message in (
        ({"sink_tokens": 201}, ValueError, "sink_tokens=201: .* at most 200"),
        ({"sink_tokens": -1}, ValueError, "sink_tokens=-1: must be at least 0"),
        ({"sink_tokens": True}, TypeError, "sink_tokens=True: expected an integer, got bool"),
        ({"sink_tokens": 1.0}, TypeError, "sink_tokens=1.0: expected an integer, got float"),
        ({"sink_start": 201}, ValueError, "sink_start=201: .* at most 200"),
        ({"sink_start": False, "sink_tokens": 1}, TypeError, "sink_start=False"),
        (
            {"sink_start": 150, "sink_tokens": 51},
            ValueError,
            "sink_start=150, sink_tokens=51: the range ends at token 201, .* has 200",
        ),
    )
]

SCALES = [
    Bad(lambda call=call, value=value: call(value), error, message)
    for name, call in (
        ("scale", lambda x: attend(Q, K, V, scale=x)),
        ("scale_output", lambda x: attend(Q, K, V, scale_output=x)),
        ("scale", lambda x: skip_softmax_attention(Q, K, V, threshold=0.5, scale=x)),
        ("scale", lambda x: skip_gaps(Q, K, scale=x)),
        ("scale", lambda x: sol_attention(Q, K, V, scale=x)),
        ("scale", lambda x: sol_scores(Q, K, scale=x)),
    )
    for value, error, message in (
        (0, ValueError, f"{name}=0: must be greater than 0"),
        (-1.0, ValueError, f"{name}=-1.0: must be greater than 0"),
        (NAN, ValueError, f"{name}=nan: must be finite"),
        (True, TypeError, f"{name}=True: expected a number"),
        (torch.ones(2), ValueError, rf"{name}: shape \(2,\) has 2 elements, need 1"),
        (torch.ones(1).half(), TypeError, f"{name}: dtype torch.float16, .* must be float32"),
        (torch.ones((), device="meta"), ValueError, f"{name}: on meta, but q is on cpu; move it"),
        (torch.ones(1, requires_grad=True), ValueError, f"{name}: requires_grad=True"),
    )
]
SCALES.append(
    Bad(lambda: sol_scores(Q, K, scale=torch.ones(1)), TypeError, "scale: .* routing takes a float")
)


def other_route(**settings) -> BlockRoute:
    shape = settings.pop("shape", (1, 2))
    return BlockRoute.full(shape, **{"seqlens": (200, 200), **settings})


LENGTHS = torch.tensor([64, 64, 64, 8], dtype=torch.int32)
ROUTES = [
    Bad(
        lambda: attend(Q, K, V, ROUTE.dense()),
        TypeError,
        "route: expected a BlockRoute, got Tensor",
    ),
    Bad(
        lambda: attend(Q, K, V, other_route(seqlens=(264, 200))),
        ValueError,
        r"route: made for \(Tq, Tk\) = \(264, 200\), but q and k have \(200, 200\)",
    ),
    Bad(
        lambda: attend(Q, K, V, other_route(shape=(1, 3))),
        ValueError,
        r"route: made for \(B, H\) = \(1, 3\), but q has \(1, 2\)",
    ),
    Bad(lambda: attend(Q, K, V, other_route(shape=(2, 2))), ValueError, r"route: .* = \(2, 2\)"),
    Bad(lambda: attend(Q, K, V, ROUTE.to("meta")), ValueError, "route: on meta, .* use route.to"),
    Bad(lambda: attend(Q, K, V, tail=TAIL), ValueError, "tail: summaries need a route"),
    Bad(
        lambda: attend(Q, K, V, ROUTE, tail=TAIL, causal=True),
        ValueError,
        "tail: .* causal=True has no tail",
    ),
    Bad(
        lambda: attend(Q, K, V, ROUTE, tail=TAIL.k_mean), TypeError, "tail: expected a BlockSummary"
    ),
    Bad(
        lambda: attend(Q, K, V, other_route(block=(128, 128)), tail=TAIL),
        ValueError,
        "tail: blocks of 64 keys, but the route's key block is 128",
    ),
    Bad(
        lambda: attend(Q, K, V, ROUTE, tail=replace(TAIL, v_sum=TAIL.v_sum[:, :3])),
        ValueError,
        r"tail.v_sum: shape \(1, 3, 2, 32\), expected \(1, 4, 2, 32\)",
    ),
    Bad(
        lambda: attend(Q, K, V, ROUTE, tail=TAIL.to(torch.float64)),
        TypeError,
        "tail.k_mean: dtype torch.float64 differs",
    ),
    Bad(
        lambda: attend(Q, K, V, ROUTE, tail=replace(TAIL, lengths=LENGTHS.long())),
        TypeError,
        "tail.lengths: expected an int32 tensor .* got torch.int64",
    ),
    Bad(
        lambda: attend(Q, K, V, block_lengths=[64, 8]),
        TypeError,
        "block_lengths: expected an int32 tensor .* got list",
    ),
    Bad(
        lambda: attend(Q, K, V, block_lengths=LENGTHS[:3]),
        ValueError,
        r"block_lengths: shape \(3,\), expected \(4,\), one per key block",
    ),
    Bad(
        lambda: attend(Q, K, V, other_route(block=(64, 32)), block_lengths=LENGTHS),
        ValueError,
        r"block_lengths: shape \(4,\), expected \(7,\)",
    ),
    Bad(
        lambda: attend(Q, K, V, block_lengths=LENGTHS.to("meta")),
        ValueError,
        "block_lengths: on meta, but q is on cpu",
    ),
    Bad(lambda: BlockSummary.of(K, V[:, :9]), ValueError, "v: shape .* must equal k's"),
    Bad(lambda: BlockSummary.of(K, V, 0), ValueError, "block=0: must be at least 1"),
    Bad(lambda: sol_scores(Q, K, block=0), ValueError, "block=0: must be at least 1"),
    Bad(lambda: sol_scores(Q, K, block=64.0), TypeError, "block=64.0: expected an integer"),
]

TILES = [
    Bad(lambda call=call, value=value: call(value), error, f"{name}{what}")
    for name, call in (
        ("skip_tile", lambda x: attend(Q, K, V, skip_tile=x)),
        ("skip_tile", lambda x: attend(Q, K, V, skip_threshold=0.5, skip_tile=x)),
        ("tile", lambda x: skip_softmax_attention(Q, K, V, threshold=0.5, tile=x)),
        ("tile", lambda x: skip_gaps(Q, K, tile=x)),
    )
    for value, error, what in (
        (128, TypeError, "=128: expected a pair of integers"),
        ((128,), TypeError, r"=\(128,\): expected a pair"),
        ((128, 0), ValueError, r"\[1\]=0: must be at least 1"),
        ((True, 128), TypeError, r"\[0\]=True: expected an integer, got bool"),
        ((128.0, 128), TypeError, r"\[0\]=128.0"),
    )
]
TILES.append(
    Bad(
        lambda: attend(Q, K, V, ROUTE, skip_threshold=0.5, skip_tile=(96, 128)),
        ValueError,
        r"skip_tile=\(96, 128\): must be whole blocks of the route, which are \(64, 64\)",
    )
)

GROUPS = {
    "tensors": TENSORS,
    "sdpa_layout": SDPA_LAYOUT,
    "self_attention": SELF_ATTENTION,
    "numbers": NUMBERS,
    "choices": CHOICES,
    "sinks": SINKS,
    "scales": SCALES,
    "routes": ROUTES,
    "tiles": TILES,
}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, id=f"{group}-{n}")
        for group, bads in GROUPS.items()
        for n, bad in enumerate(bads)
    ],
)
def test_bad_input_is_refused_by_name_before_any_work(bad):
    with pytest.raises(bad.error, match=bad.message) as caught:
        bad.call()
    assert caught.type is bad.error


def test_gradients_are_fine_where_none_are_recorded(monkeypatch):
    q = Q.clone().requires_grad_()
    with torch.no_grad(), pytest.raises(AssertionError, match="work was done"):
        attend(q, K, V)
