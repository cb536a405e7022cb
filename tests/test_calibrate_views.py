"""The pictures of a calibration show the numbers that they are given."""

from __future__ import annotations

import numpy as np
import pytest

from workbench import views


def axes():
    return views.new_figure(6, 4).subplots()


def lines(ax) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {line.get_label(): line.get_data() for line in ax.get_lines()}


def test_a_fit_is_solid_in_its_domain_and_marked_as_extrapolation_outside():
    ax, x = axes(), np.linspace(0.2, 0.6, 5)
    views.draw_fit(ax, x, 3 * np.exp(5 * x), (3.0, 5.0))
    drawn = lines(ax)
    inside, values = drawn["3 * exp(5 * sparsity)"]
    assert (inside.min(), inside.max()) == (0.2, 0.6)
    np.testing.assert_allclose(values, 3 * np.exp(5 * inside))
    assert drawn["extrapolation"][0].max() == pytest.approx(0.2)
    assert ax.get_yscale() == "log"
    dotted = [line for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert len(dotted) == 2


def test_residuals_are_drawn_around_zero():
    ax = axes()
    views.draw_residuals(ax, [0.1, 0.5], [0.2, -0.1])
    np.testing.assert_array_equal(ax.get_lines()[-1].get_ydata(), [0.2, -0.1])


def test_every_hold_out_has_its_line_and_its_name():
    ax = axes()
    views.draw_transfer(ax, [[0.1, 0.4], [0.2]], [[0.1, 0.3], [0.25]], labels=["4k", "16k"])
    drawn = lines(ax)
    np.testing.assert_array_equal(drawn["4k"][1], [0.1, 0.3])
    np.testing.assert_array_equal(drawn["16k"][1], [0.25])
    with pytest.raises(ValueError, match="must name 2 hold-outs"):
        views.draw_transfer(axes(), [[0.1], [0.2]], [[0.1], [0.2]], labels=["4k"])


def test_delivery_shows_request_prediction_delivery_and_single_videos():
    ax = axes()
    views.draw_delivery(
        ax, ["a", "b"], 0.15, [0.15, 0.16], [0.14, np.nan], spread=[[0.13, 0.1], [0.15, 0.2]]
    )
    drawn = lines(ax)
    np.testing.assert_array_equal(drawn["predicted (dense)"][1], [0.15, 0.16])
    np.testing.assert_array_equal(drawn["delivered (sparse)"][1], [0.14, np.nan])
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b"]
    assert sum(line.get_marker() == "_" for line in ax.get_lines()) == 2


def test_recall_is_a_point_for_each_head_under_its_ceiling():
    ax = axes()
    views.draw_recall(ax, [0.2, 0.5], [0.3, 0.6], [0.1, 0.2], label="density")
    np.testing.assert_array_equal(ax.collections[0].get_offsets(), [[0.3, 0.2], [0.6, 0.5]])
