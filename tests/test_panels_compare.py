"""Compare: two settings or implementations side by side, driven without a browser."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colors

from blockattn import BlockRoute, UnsupportedError, attend, skip_softmax_attention, sol_attention
from tests.panel_inputs import PNG, assert_told_apart, capture_of, grey, load
from workbench import views
from workbench.comparison import (
    Agreement,
    Setting,
    agreement,
    delivered,
    describe_agreement,
    flipped_per_head,
)
from workbench.probe import attention_error
from workbench.views.agreement import AGREEMENTS, SIGNED
from workbench.widgets import Compare, compare_session
from workbench.widgets.compare import ComparePanel
from workbench.widgets.compare_session import CompareState, CompareView


def route(mask: torch.Tensor) -> BlockRoute:
    """Of bool ``[H, Nq, Nk]``."""
    return BlockRoute.from_dense(mask[None], block=(64, 64))


# -- plain functions ------------------------------------------------------------------------


def test_agreement_by_hand():
    a = route(torch.tensor([[[1, 1], [0, 0]]], dtype=torch.bool))
    b = route(torch.tensor([[[1, 0], [1, 0]]], dtype=torch.bool))
    both, only_a, only_b, neither = Agreement.BOTH, Agreement.ONLY_A, Agreement.ONLY_B, 0
    codes = agreement(a, b)
    assert codes.tolist() == [[both, only_a], [only_b, neither]]
    assert flipped_per_head(a, b).tolist() == [[2]]
    assert describe_agreement(codes) == (
        "2 of 4 block pairs flipped (50.00%): exact in A alone 1, in B alone 1; in both 1, "
        "in neither 1."
    )


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 40))
def test_flips_are_what_is_in_one_route_alone(seed: int, rows: int, columns: int):
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.rand(2, rows, columns, generator=generator) < 0.4 for _ in range(2))
    a, b = route(one), route(other)
    assert flipped_per_head(a, b)[0].tolist() == (one ^ other).sum(dim=(1, 2)).tolist()
    assert int(flipped_per_head(a, b).sum()) == a.differing(b)
    swapped = {Agreement.ONLY_A: Agreement.ONLY_B, Agreement.ONLY_B: Agreement.ONLY_A}
    ab, ba = agreement(a, b, head=1), agreement(b, a, head=1)
    assert [[swapped.get(Agreement(x), x) for x in row] for row in ab.tolist()] == ba.tolist()


def test_routes_of_other_tensors_are_refused():
    a, b = (route(torch.ones(1, n, n, dtype=torch.bool)) for n in (2, 3))
    with pytest.raises(ValueError, match="differ in geometry"):
        agreement(a, b)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("sol_attn", tau=0.5),
        Setting("sol_attn", tau=1.5, thresh_type="exact", sink_tokens=64),
        Setting("skip_softmax", log2_threshold=-0.5, tile=64),
        Setting("skip_softmax", log2_threshold=-0.5, tile=128, impl="reference"),
        Setting("dense"),
    ],
    ids=str,
)
def test_a_call_delivers_what_was_planned(setting: Setting):
    x = load(4, 9)
    out, trace = setting.run(x)
    assert delivered(trace) == setting.plan(x.q, x.k)
    assert trace.algorithm == setting.algorithm
    if setting.algorithm != "dense":
        assert trace.density < 1
        assert not torch.equal(out, attend(x.q, x.k, x.v))


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="algorithm='sparse'"):
        Setting("sparse")


def test_large_maps_are_pooled_with_their_rule():
    codes = torch.zeros(600, 600, dtype=torch.uint8)
    codes[:300] = Agreement.ONLY_A
    axes = views.new_figure(6, 3).subplots(1, 2)
    views.draw_agreement(axes[0], codes)
    views.draw_exact(axes[1], codes == Agreement.ONLY_A)
    for ax, low in zip(axes, (0.0, 0.0)):
        picture = ax.images[0].get_array()
        assert picture.shape == (300, 300)
        assert (float(picture.max()), float(picture.min())) == (1.0, low)
        assert "2 x 2 pairs" in ax.get_legend().get_texts()[-1].get_text()


def test_a_map_of_single_blocks_without_hatches_still_tells_the_sides_apart():
    codes = torch.arange(4, dtype=torch.uint8).repeat(200, 50)
    ax = views.new_figure().subplots()
    views.draw_agreement(ax, codes)
    signed = torch.from_numpy(ax.images[0].get_array().data)
    assert torch.equal(signed[:, :4], torch.tensor([[0.0, 0.0, 1.0, -1.0]]).expand(200, 4))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "only B",
        "equal",
        "only A",
    ]


def test_every_class_is_told_apart_in_grey_or_by_its_hatch():
    assert_told_apart(AGREEMENTS.values())
    shades = sorted(grey(colors.to_hex(SIGNED(x))) for x in (0.0, 0.5, 1.0))
    assert min(b - a for a, b in pairwise(shades)) > 0.15


def test_the_largest_picture_stays_below_a_megabyte():
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(1, 1, 512, 512, generator=generator) < 0.5 for _ in range(2))
    a, b = (BlockRoute.from_dense(mask, block=(64, 64)) for mask in masks)
    state = CompareState(0, 0, 0, Setting(), Setting(tau=2.0))
    view = CompareView(
        state, (a, b), (True, True), agreement(a, b), flipped_per_head(a, b)[0], (0, 0)
    )
    assert len(ComparePanel().draw(view)) < 1_000_000


# -- the panel ------------------------------------------------------------------------------


@pytest.fixture
def panel() -> Compare:
    return Compare(capture_of(), device="cpu")


def set_side(panel: Compare, side: str, **knobs: object) -> None:
    """As in a notebook, where an event loop runs."""

    async def set_all():
        for knob, value in knobs.items():
            getattr(getattr(panel.controls, side), knob).value = value
        panel.flush()

    asyncio.run(set_all())


def test_it_starts_with_two_taus_and_says_what_ran(panel: Compare):
    assert panel.picture.startswith(PNG)
    assert len(panel.picture) < 1_000_000
    assert panel.problem == ""
    assert (panel.state.a, panel.state.b) == (Setting(tau=1.0), Setting(tau=2.0))
    assert "<b>A ran:</b> sol_attn on implementation" in panel.what_ran
    assert "<b>B ran:</b> sol_attn on implementation" in panel.what_ran


def test_its_numbers_are_those_of_the_plain_functions(panel: Compare):
    panel.controls.layer.value = 4
    set_side(panel, "a", tau=0.25, thresh_type="exact")
    set_side(panel, "b", algorithm="skip_softmax", log2_threshold=-0.5, tile=64)
    x = load(4, 9)
    out_a, a = sol_attention(x.q, x.k, x.v, tau=0.25, thresh_type="exact", return_trace=True)
    out_b, b = skip_softmax_attention(
        x.q, x.k, x.v, threshold=2.0**-0.5, tile=(64, 64), return_trace=True
    )
    view = panel.view
    assert view is not None
    assert view.measured == (True, True)
    assert view.surprises == (0, 0)
    assert torch.equal(view.codes, agreement(delivered(a), delivered(b)))
    assert torch.equal(view.flipped, flipped_per_head(delivered(a), delivered(b))[0])
    assert int(view.flipped.sum()) > 0
    assert describe_agreement(view.codes) in panel.summary
    between = panel.session.difference(panel.state)
    assert between is not None
    assert torch.allclose(between, attention_error(out_a, out_b).relative_l2[0])
    assert f'<td style="text-align:left">{between[0]:.4f}</td>' in panel.table


def test_two_implementations_of_one_setting_flip_nothing(panel: Compare):
    set_side(panel, "a", tau=1.0, impl="eager")
    set_side(panel, "b", tau=1.0, impl="reference")
    view = panel.view
    assert view is not None
    assert view.flipped.tolist() == [0, 0]
    assert "0 of 25 block pairs flipped" in panel.summary
    assert "implementation <b>eager</b>" in panel.what_ran
    assert "implementation <b>reference</b>" in panel.what_ran


def test_a_side_that_cannot_run_says_so_and_the_other_runs(panel: Compare):
    with pytest.raises(UnsupportedError):
        panel.controls.a.impl.value = "triton"
    assert "Error while measuring A" in panel.problem
    assert panel.problem.count("⚠") == 1
    assert "<b>A ran:</b> nothing: the call failed" in panel.what_ran
    assert "<b>B ran:</b> sol_attn on implementation" in panel.what_ran
    assert panel.view is not None
    assert panel.view.measured == (False, True)
    panel.controls.a.impl.value = "auto"
    assert panel.problem == ""
    assert panel.view.measured == (True, True)


def test_a_delivery_that_differs_from_the_plan_is_said(
    panel: Compare, monkeypatch: pytest.MonkeyPatch
):
    full = BlockRoute.full((1, 2), seqlens=(320, 320))
    monkeypatch.setattr(compare_session, "delivered", lambda trace: full)
    set_side(panel, "b", tau=1.05)
    assert "B delivered" in panel.summary
    assert "otherwise than planned" in panel.summary


def test_only_the_knobs_of_the_algorithm_are_shown(panel: Compare):
    side = panel.controls.b
    shown = lambda: {name for name, knob in side.knobs.items() if knob.layout.display != "none"}
    assert shown() == {"algorithm", "impl", "tau", "thresh_type", "sink_tokens"}
    side.algorithm.value = "skip_softmax"
    assert shown() == {"algorithm", "impl", "log2_threshold", "tile"}
    side.algorithm.value = "dense"
    assert shown() == {"algorithm", "impl"}
    assert panel.problem == ""
    assert "exact in A alone 0" in panel.summary


def test_a_burst_of_changes_is_drawn_once_with_the_newest(panel: Compare):
    drawn = []
    panel._measure._wait = 60
    panel._picture.observe(lambda change: drawn.append(change["new"]), names="value")

    async def drag():
        for step in range(30):
            panel.controls.b.tau.value = step * 0.05
        assert drawn == []
        await asyncio.sleep(0.3)

    asyncio.run(drag())
    assert len(drawn) == 1
    assert panel.view is not None
    assert panel.view.state.b.tau == pytest.approx(1.45)
    assert panel.view.measured == (True, False)


def test_long_calls_wait_for_the_button(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare_session.CaptureSession, "automatic", False)
    panel = Compare(SimpleNamespace(**vars(capture_of())), device="cpu")
    assert panel.view is not None
    assert panel.view.measured == (False, False)
    assert "press the button" in panel.what_ran
    (button,) = [child for child in panel.children if type(child).__name__ == "Button"]
    button.click()
    assert panel.view.measured == (True, True)
