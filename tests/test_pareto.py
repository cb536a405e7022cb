"""Gates, the front of cost and quality, the choice, and the points of a sweep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import views
from workbench.config import QuantAttentionConfig, SkipSoftmaxConfig, SolAttnConfig
from workbench.pareto import Gate, Point, choose, dominates, front, missed
from workbench.sweep.front import COSTS, configuration, front_table, points
from workbench.sweep.metrics import METRICS
from workbench.sweep.table import SweepCase, SweepTable

GATE = Gate("psnr", 30)


def point(name: str, gain: float, quality: float, *against: str, control: bool = False) -> Point:
    return Point(name, gain, quality, quality, quality, against, control)


# --- gates


@pytest.mark.parametrize(
    ("text", "value", "passes"),
    [
        ("psnr=30", 30.0, True),
        ("psnr=30", 29.99, False),
        ("psnr=30", math.inf, True),
        ("ssim=0.9", 0.91, True),
        ("lpips=0.25", 0.25, True),
        ("lpips=0.25", 0.251, False),
        ("relative_l2=0.1", 0.2, False),
        *[(f"{metric}=1", math.nan, False) for metric in ("psnr", "ssim", "lpips", "relative_l2")],
    ],
)
def test_a_gate_knows_which_way_is_better(text: str, value: float, passes: bool):
    assert Gate.read(text).passes(value) == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("density=0.1", "metric='density': must be one of psnr, ssim"),
        ("psnr", "expected METRIC=LIMIT"),
        ("psnr=", "expected METRIC=LIMIT"),
        ("psnr>30", "expected METRIC=LIMIT"),
        ("psnr=inf", "must be finite"),
        ("psnr=nan", "must be finite"),
    ],
)
def test_a_gate_that_is_none_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Gate.read(text)


def test_the_worst_video_has_to_pass():
    videos = [{"psnr": 40.0, "relative_l2": 0.01}, {"psnr": 29.0, "relative_l2": 0.2}]
    assert missed(videos, [GATE]) == ("psnr >= 30 dB: worst 29",)
    assert missed(videos, [Gate("relative_l2", 0.2)]) == ()
    assert missed(videos, [Gate("relative_l2", 0.1)]) == ("relative_l2 <= 0.1: worst 0.2",)
    assert missed([*videos, {"psnr": math.nan}], [GATE]) == ("psnr >= 30 dB: worst nan",)


def test_what_was_not_measured_does_not_pass():
    assert missed([{"psnr": 40.0}], [Gate("lpips", 0.25)]) == ("lpips <= 0.25: not measured",)
    assert missed([{"lpips": 0.1}, {}], [Gate("lpips", 0.25)]) == ("lpips <= 0.25: not measured",)
    assert missed([], [GATE]) == ("psnr >= 30 dB: not measured",)


# --- the front

values = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])
clouds = st.lists(st.tuples(values, values), min_size=1, max_size=12)


def cloud_of(pairs: list[tuple[float, float]]) -> list[Point]:
    return [point(f"p{n}", gain, quality) for n, (gain, quality) in enumerate(pairs)]


@given(clouds)
def test_the_front_is_what_no_other_point_beats(pairs: list[tuple[float, float]]):
    found = {p.name for p in front(cloud_of(pairs), "psnr")}
    beaten = {
        f"p{n}"
        for n, (gain, quality) in enumerate(pairs)
        for other in pairs
        if other[0] >= gain and other[1] >= quality and other != (gain, quality)
    }
    assert found == {f"p{n}" for n in range(len(pairs))} - beaten
    assert found


@given(clouds)
def test_a_metric_where_less_is_better_has_the_mirrored_front(pairs: list[tuple[float, float]]):
    mirrored = [(gain, -quality) for gain, quality in pairs]
    high, low = front(cloud_of(pairs), "psnr"), front(cloud_of(mirrored), "relative_l2")
    assert [p.name for p in high] == [p.name for p in low]


@given(clouds)
def test_along_the_front_gain_costs_quality(pairs: list[tuple[float, float]]):
    found = front(cloud_of(pairs), "psnr")
    for before, after in zip(found, found[1:]):  # noqa: RUF007
        same = (before.gain, before.quality) == (after.gain, after.quality)
        assert same or (before.gain < after.gain and before.quality > after.quality)


def test_the_control_and_what_cannot_be_compared_are_no_candidates():
    good = point("good", 1.5, 30)
    rest = [
        point("control", 9, 90, control=True),
        point("broken", 2, math.nan),
        point("untimed", math.nan, 50),
        point("instant", math.inf, 50),
    ]
    assert front([*rest, good], "psnr") == [good]


def test_a_video_equal_to_dense_may_have_infinite_psnr():
    exact, fast = point("exact", 1, math.inf), point("fast", 2, 30)
    assert front([fast, exact, point("slow", 0.5, math.inf)], "psnr") == [exact, fast]
    assert not dominates(exact, exact, "psnr")


def test_the_choice_is_the_cheapest_that_passes():
    cloud = [point("dense", 1, 60), point("middle", 2, 40), point("fast", 3, 20, "psnr")]
    assert choose(cloud, "psnr").name == "middle"
    assert choose([replace(p, missed=()) for p in cloud], "psnr").name == "fast"


def test_no_choice_names_the_nearest_and_what_it_misses():
    with pytest.raises(ValueError, match="against near: psnr >= 30 dB: worst 29"):
        choose(
            [point("near", 1, 29, "psnr >= 30 dB: worst 29"), point("far", 2, 9, "a", "b")], "psnr"
        )
    with pytest.raises(ValueError, match="no setting has results"):
        choose([point("control", 1, 90, control=True)], "psnr")


# --- from a sweep


def case(setting: str, seed: int, state: str = "done", **changes: Any) -> SweepCase:
    metrics = {"psnr": 40.0, "density": 0.5, "seconds": 4.0, "dense_seconds": 6.0,
               "attention_seconds": 1.0, "dense_attention_seconds": 2.0}  # fmt: skip
    metrics |= {name: value for name, value in changes.items() if name in METRICS}
    attention = {} if setting == "dense_control" else {"algorithm": "sol_attn", "tau": 1.5}
    return SweepCase(
        key=f"{setting}{seed}",
        setting=setting,
        attention=changes.get("attention", attention),
        sampling={},
        seed=seed,
        prompt="disc",
        control=setting == "dense_control",
        state=state,  # pyright: ignore[reportArgumentType]
        reason=None if state == "done" else "it broke",
        metrics=metrics if state == "done" else {},
        flags=changes.get("flags", ()),
    )


def table(*cases: SweepCase) -> SweepTable:
    return SweepTable("test", cases, METRICS)


def test_a_point_is_the_median_over_seeds_and_keeps_the_range():
    cases = [case("sol", n, psnr=psnr, attention_seconds=s)
             for n, (psnr, s) in enumerate([(30, 1.0), (50, 2.0), (35, 0.5)])]  # fmt: skip
    (found,) = points(table(*cases), gates=[Gate("psnr", 31)])
    assert (found.gain, found.quality, found.worst, found.best) == (2.0, 35, 30, 50)
    assert found.missed == ("psnr >= 31 dB: worst 30",)


@pytest.mark.parametrize(("cost", "gain"), [("attention", 2.0), ("video", 1.5), ("density", 2.0)])
def test_the_gain_compares_with_the_dense_twin(cost: str, gain: float):
    assert points(table(case("sol", 0)), cost=cost)[0].gain == gain


def test_a_setting_with_a_failed_case_keeps_that_reason_and_one_without_results_has_no_point():
    found = points(table(case("sol", 0), case("sol", 1, "failed"), case("vsa", 0, "failed")))
    assert [p.name for p in found] == ["sol"]
    assert found[0].missed == ("1 of 2 cases have no result",)


@pytest.mark.parametrize("cost", ["attention", "density"])
def test_what_costs_as_much_as_dense_is_no_choice(cost: str):
    slow = {"attention_seconds": 2.0, "density": 1.0}
    found = points(table(case("sol", 0, **slow), case("dense_control", 0, **slow)), cost=cost)
    assert [p.missed for p in found] == [("no gain over dense",), ()]


def test_flags_of_a_run_count_against_it():
    assert points(table(case("sol", 0, flags=("skipped nothing",))))[0].missed == (
        "skipped nothing",
    )


def test_the_control_is_marked_and_a_nan_is_the_worst():
    found = points(table(case("dense_control", 0), case("sol", 0, psnr=math.nan)))
    assert [p.control for p in found] == [True, False]
    assert math.isnan(found[1].worst)
    assert math.isnan(found[1].quality)


def test_an_unknown_metric_or_cost_is_named():
    with pytest.raises(ValueError, match="metric='density'"):
        points(table(case("sol", 0)), "density")
    with pytest.raises(ValueError, match="cost='money': must be one of attention, video, density"):
        points(table(case("sol", 0)), cost="money")


def test_every_cost_is_a_metric_of_the_sweep():
    assert {name for dense, own, _ in COSTS.values() for name in (dense, own) if name} <= set(
        METRICS
    )


def test_the_configuration_of_a_setting_comes_back_with_kernels_that_serve_it():
    skip = {"algorithm": "skip_softmax", "threshold_scale_factor": 400.0}
    int8 = {"qk_dtype": "int8", "q_block_size": 1, "k_block_size": 16, "v_block_size": 1}
    swept = table(
        case("dense_control", 0),
        case("sol", 0),
        case("skip", 0, attention={**skip, "qk_dtype": "mxfp8"}),
        case("sage", 0, attention={**skip, **int8}),
        case("dense", 0, attention={"algorithm": "dense"}),
    )
    found = {name: configuration(swept, name).attention_config for name in swept.settings[1:]}
    assert found["sol"].sparse_attention_config == SolAttnConfig(tau=1.5)
    assert found["sage"].sparse_attention_config == SkipSoftmaxConfig(threshold_scale_factor=400)
    assert found["sage"].quant_attention_config == QuantAttentionConfig.model_validate(int8)
    backends = {"sol": "CUTEDSL", "skip": "CUTEDSL", "sage": "TRTLLM", "dense": None}
    assert {name: attention.backend for name, attention in found.items()} == backends


def test_the_control_and_a_wrong_name_have_no_configuration():
    swept = table(case("dense_control", 0), case("sol", 0))
    with pytest.raises(ValueError, match="is the control"):
        configuration(swept, "dense_control")
    with pytest.raises(KeyError, match="setting='sola'"):
        configuration(swept, "sola")


def test_the_table_says_place_and_what_speaks_against_each():
    least = "psnr >= 30 dB: worst 20"
    cloud = [
        point("fast", 3, 20, least),
        point("good", 2, 40),
        point("bad", 1.5, 35),
        point("control", 1, 20, least, control=True),
    ]
    rows = {row[0]: row[-2:] for row in front_table(cloud, "psnr").rows}
    assert rows == {
        "fast": ("front", least),
        "good": ("front", "—"),
        "bad": ("dominated", "—"),
        "control": ("control", least),
    }


@pytest.mark.parametrize(
    ("cost", "head"),
    [
        ("attention", "attention time, dense / sparse"),
        ("video", "time of the whole video, dense / sparse"),
        ("density", "block pairs, all / exact"),
    ],
)
def test_the_column_of_the_gain_is_headed_by_its_cost(cost: str, head: str):
    assert front_table([point("one", 3, 20)], "psnr", cost).columns[1] == head


# --- the picture

CLOUD = [
    point("fast", 3, 20, "psnr >= 30 dB: worst 20"),
    point("good", 2, 40),
    point("bad", 1.5, 35),
    point("dense_control", 1, 60, control=True),
]


def drawn(cloud: list[Point], metric: str = "psnr", **options: Any):
    ax = views.new_figure().subplots()
    views.draw_pareto(ax, cloud, metric, **options)
    return ax


def test_the_picture_marks_front_gate_and_control():
    ax = drawn(CLOUD, gates=[GATE, Gate("ssim", 0.9)])
    marks = {line.get_xdata()[0]: line for line in ax.lines if line.get_marker() in ("o", "D")}
    assert marks[3].get_markerfacecolor() == "white"
    assert marks[2].get_markerfacecolor() == marks[2].get_markeredgecolor() != "white"
    assert marks[1.5].get_color() != marks[2].get_color()
    assert marks[1].get_marker() == "D"
    assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [30]
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "gate: ssim >= 0.9" in texts
    assert texts[-2:] == ["1  good", "2  fast"]
    assert [text.get_text() for text in ax.texts] == ["60 ↑", "1", "2"]


def test_better_is_always_up():
    assert not drawn(CLOUD).yaxis_inverted()
    assert drawn(CLOUD, "relative_l2").yaxis_inverted()


def test_a_value_far_above_all_settings_stands_at_the_edge_with_its_number():
    ax = drawn([*CLOUD, point("exact", 1.1, math.inf)])
    heights = {n.get_xdata()[0]: n.get_ydata()[0] for n in ax.lines if n.get_marker() in "oD"}
    assert 40 < heights[1.1] == heights[1] < 60  # exact, and the control at 60
    assert [text.get_text() for text in ax.texts][:2] == ["60 ↑", "inf ↑"]


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="none has a finite gain"):
        drawn([point("broken", 1, math.nan)])
