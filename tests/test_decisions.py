"""Decisions about block pairs: classes, explanations, and which video tokens a row selects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn import BlockRoute, BlockScores, TokenGrid, skip_gaps, sol_scores
from workbench import decisions
from workbench.decisions import Decision, TileState


def scores_of(tokens: int, *, seed: int = 0, heads: int = 2, **settings_) -> BlockScores:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, tokens, heads, 16, generator=generator)
    return sol_scores(q, k, **settings_)


def scores_with(z: list[list[float]], sink: tuple[int, int]) -> BlockScores:
    """One head with given z-scores, mean 10 and standard deviation 2 in every row."""
    values = torch.tensor(z)[None, None]
    size = values.shape[2]
    index = torch.arange(size)
    band = (index[:, None] - index[None, :]).abs() <= 1
    always = band | ((index >= sink[0]) & (index < sink[1]))[None, :]
    route = BlockRoute.from_dense(always[None, None])
    rows = torch.ones(1, 1, size)
    return BlockScores(values, 10 * rows, 2 * rows, route, sink, "diag")


FIVE = [
    [0.0, 0.0, 2.0, 0.0, 0.0],
    [0.0, 2.0, 0.0, 1.0, 2.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [1.5, 0.0, 0.0, 0.0, 0.0],
]


@pytest.mark.parametrize(
    ("pair", "decision", "reason"),
    [
        ((0, 2), Decision.ROUTED, "z = 2.00 is above tau = 1"),
        ((1, 1), Decision.ROUTED, "z = 2.00 is above tau = 1"),  # also in the band
        ((1, 4), Decision.ROUTED, "z = 2.00 is above tau = 1"),  # also in the sink
        ((0, 1), Decision.DIAGONAL, "within 1 block of the diagonal"),
        ((4, 4), Decision.DIAGONAL, "within 1 block of the diagonal"),  # also in the sink
        ((0, 4), Decision.SINK, "the key block is in the sink"),
        ((1, 3), Decision.APPROXIMATE, "z = 1.00 is not above tau = 1"),  # a tie
        ((2, 0), Decision.APPROXIMATE, "z = 0.00 is not above tau = 1"),
    ],
)
def test_a_pair_has_one_decision_and_its_reason(pair, decision, reason):
    scores = scores_with(FIVE, sink=(4, 5))
    assert decisions.classify(scores, 1.0)[pair] == decision
    explained = decisions.explain(scores, 1.0, TokenGrid((5, 8, 8)), *pair)
    assert explained.decision is decision
    assert reason in explained.reason
    assert decision.name.lower() in str(explained)


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 700),
    tau=st.floats(-3, 5),
    seed=st.integers(0, 99),
    sink=st.integers(0, 200),
    kind=st.sampled_from(["diag", "exact"]),
)
def test_exact_classes_are_the_route(tokens, tau, seed, sink, kind):
    scores = scores_of(tokens, seed=seed, sink_tokens=min(sink, tokens), thresh_type=kind)
    classes = decisions.classify(scores, tau, head=1)
    exact = classes != Decision.APPROXIMATE
    assert torch.equal(exact, scores.route(tau).dense()[0, 1])
    assert torch.equal(classes == Decision.ROUTED, scores.passing(tau).dense()[0, 1])
    assert sum(decisions.count(classes).values()) == classes.numel()
    assert decisions.density(classes) == pytest.approx(scores.density([tau])[0, 1].item())


def test_the_explanation_of_every_pair_agrees_with_the_map():
    grid = TokenGrid((5, 8, 9), prefix=3, suffix=7)
    scores = scores_of(grid.tokens, sink_tokens=70)
    classes = decisions.classify(scores, 0.4, head=1)
    for i in range(classes.shape[0]):
        for j in range(classes.shape[1]):
            pair = decisions.explain(scores, 0.4, grid, i, j, head=1)
            assert pair.decision == classes[i, j]
            assert pair.query_box == grid.box(i)
            assert pair.key_box == grid.box(j)
            assert pair.score == pytest.approx(scores.scores()[0, 1, i, j].item(), abs=1e-5)
            assert pair.threshold == pytest.approx(scores.threshold(0.4)[0, 1, i].item(), abs=1e-5)


def test_a_block_of_text_alone_is_called_text():
    scores = scores_of(192)
    grid = TokenGrid((1, 8, 8), prefix=64, suffix=64)
    explained = decisions.explain(scores, 1.0, grid, 0, 1)
    assert "Query block 0 (text) and key block 1 (t 0, h 0-7, w 0-7)" in str(explained)


def test_the_summary_counts_every_class_and_names_the_extreme_rows():
    classes = decisions.classify(scores_with(FIVE, sink=(4, 5)), 1.0)
    assert decisions.describe(classes) == (
        "Density 0.7200: 18 of 25 block pairs are exact (4 routed, 12 diagonal, 2 sink), "
        "7 approximate. A query block attends 3 to 4 of 5 key blocks exactly."
    )


@pytest.mark.parametrize("order", ["raster", "tile", "morton"])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (5, 70)])
def test_selected_tokens_are_those_whose_block_is_selected(order, prefix, suffix):
    grid = TokenGrid((7, 5, 6), prefix, suffix, order)
    blocks = -(-grid.tokens // 64)
    row = torch.rand(blocks, generator=torch.Generator().manual_seed(3)) < 0.5
    selected = decisions.selected_tokens(row, grid)
    for t, h, w in torch.cartesian_prod(*(torch.arange(n) for n in grid.shape)).tolist():
        assert selected[t, h, w] == row[grid.position(t, h, w) // 64]


def test_the_own_tokens_of_all_blocks_cover_the_video_once():
    grid = TokenGrid((7, 5, 6), prefix=5, suffix=70, order="tile")
    own = [decisions.own_tokens(index, grid) for index in range(-(-grid.tokens // 64))]
    assert torch.stack(own).sum(dim=0).eq(1).all()


def test_the_selection_is_told_in_numbers_and_frames():
    grid = TokenGrid((6, 8, 8))
    row = torch.tensor([True, True, False, True, False, False])
    selected = decisions.selected_tokens(row, grid)
    assert decisions.describe_selection(selected, decisions.own_tokens(1, grid)) == (
        "192 of 384 video tokens are attended exactly, in frames 0-1, 3; "
        "the query block lies in frame 1."
    )
    nothing = torch.zeros_like(selected)
    assert "in no frame; the query block lies in the text" in decisions.describe_selection(
        nothing, nothing
    )


@pytest.mark.parametrize(
    ("grid", "edges"),
    [
        (TokenGrid((2, 8, 16)), [0, 2, 4]),
        (TokenGrid((2, 8, 8), prefix=32), [0.5, 1.5, 2.5]),
        (TokenGrid((2, 8, 8), order="tile"), []),  # a block may hold several frames
    ],
)
def test_frames_begin_where_the_token_order_says(grid, edges):
    assert decisions.frame_edges(grid) == edges


def test_a_pooled_map_is_small_and_keeps_the_density():
    classes = decisions.classify(scores_of(64 * 40), 0.5)
    picture, factor = decisions.pooled_density(classes, size=10)
    assert (tuple(picture.shape), factor) == ((10, 10), 4)
    assert picture.mean().item() == pytest.approx(decisions.density(classes))
    assert decisions.pooled_density(classes[:, :37], size=10)[0].shape == (10, 10)


def test_skip_states_follow_the_gaps_and_the_causal_mask():
    # Scores fall by 4 nats with every key tile, so every tile but a row's first is dropped.
    q, k = torch.zeros(2, 1, 300, 1, 16)
    q[..., 0], k[..., 0] = 8.0, -2.0 * (torch.arange(300) // 64)[None, :, None]
    gaps = skip_gaps(q, k, causal=True, tile=(64, 64))
    states = decisions.skip_states(gaps.skipped(0.5), gaps.reachable)
    assert torch.equal(states == TileState.MASKED, torch.ones(5, 5).triu(1).bool())
    assert torch.equal(states == TileState.COMPUTED, torch.eye(5)[[0] * 5].bool())
    assert decisions.describe_skip(states) == (
        "Density 0.3333: 10 of 15 tiles skipped. A query tile computes 1 to 1 of 5 key tiles."
    )


def test_a_run_that_skipped_nothing_says_that_it_ran_dense():
    q, k = torch.randn(2, 1, 256, 1, 16)
    gaps = skip_gaps(q, k, tile=(64, 64))
    states = decisions.skip_states(gaps.skipped(0.0), gaps.reachable)
    assert decisions.describe_skip(states).endswith("Nothing was skipped: this ran dense.")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, g: decisions.classify(s, float("nan")), ValueError, "tau=nan: must be finite"),
        (lambda s, g: decisions.classify(s, True), TypeError, "tau=True: expected a number"),
        (lambda s, g: decisions.classify(s, 1.0, head=2), ValueError, "head=2.*at most 1"),
        (lambda s, g: decisions.classify(s, 1.0, batch=1), ValueError, "batch=1.*at most 0"),
        (lambda s, g: decisions.explain(s, 1.0, g, 9, 0), ValueError, "i=9.*at most 3"),
        (lambda s, g: decisions.explain(s, 1.0, g, 0, -1), ValueError, "j=-1.*at least 0"),
        (
            lambda s, g: decisions.explain(s, 1.0, TokenGrid((1, 8, 8)), 0, 0),
            ValueError,
            r"grid: \(1, 8, 8\) .* has 64 tokens, but q has 256",
        ),
        (
            lambda s, g: decisions.selected_tokens(torch.ones(3, dtype=torch.bool), g),
            ValueError,
            r"row: torch.bool \(3,\), expected bool \(4,\)",
        ),
        (lambda s, g: decisions.own_tokens(4, g), ValueError, "index=4.*at most 3"),
        (
            lambda s, g: decisions.skip_states(s.always, s.always.refine((32, 32))),
            ValueError,
            "differ in geometry",
        ),
    ],
)
def test_bad_input_is_refused_with_name_value_and_range(call, error, message):
    with pytest.raises(error, match=message):
        call(scores_of(256), TokenGrid((4, 8, 8)))
