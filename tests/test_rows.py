"""Rows of a sample are the rows of the whole call, and tuning on them says what they are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blockattn import TokenGrid, attend, skip_gaps, sol_attention, sol_scores
from workbench import cli, decisions
from workbench.capture import Capture, CaptureSpec, CaptureWriter, Selection, open_capture
from workbench.capture.selection import block_rows
from workbench.masks import capture_masks
from workbench.rows import check_tiles, probe_rows, query_places, row_attention, row_scores
from workbench.synthetic import synthetic_qkv
from workbench.tune import figures
from workbench.tune import run as tune
from workbench.tune.settings import TuneSettings
from workbench.views import draw_rows, new_figure, to_png
from workbench.widgets import TauTuner, ThresholdTuner, texts

GRID = TokenGrid((6, 10, 10))  # 600 tokens: nine whole blocks of 64 and one of 24
BLOCKS = (0, 1, 4, 5, 8, 9)
ROUTING = {"thresh_type": "exact", "sink_start": 130, "sink_tokens": 70}
DATA = synthetic_qkv(GRID, heads=4, head_dim=16, dtype=torch.float32)
ROWS = block_rows(BLOCKS, GRID.tokens)
Q = DATA.q[:, ROWS]


@pytest.mark.parametrize("kind", ["diag", "exact"])
def test_scores_of_chosen_rows_are_those_of_the_whole_call(kind: str):
    whole = sol_scores(DATA.q, DATA.k, **{**ROUTING, "thresh_type": kind})
    some = row_scores(Q, DATA.k, BLOCKS, **{**ROUTING, "thresh_type": kind})
    assert torch.allclose(some.z, whole.z[:, :, list(BLOCKS)], atol=1e-5)
    assert torch.equal(some.always.dense(), whole.always.dense()[:, :, list(BLOCKS)])
    assert torch.equal(some.route(1.0).dense(), whole.route(1.0).dense()[:, :, list(BLOCKS)])


def test_attention_of_chosen_rows_is_that_of_the_whole_call():
    whole, trace = sol_attention(DATA.q, DATA.k, DATA.v, tau=1.0, return_trace=True, **ROUTING)
    some = row_attention(Q, DATA.k, DATA.v, BLOCKS, 1.0, **ROUTING)
    assert trace.density < 1
    assert torch.allclose(some, whole[:, ROWS], atol=1e-5)
    assert not torch.allclose(some, attend(Q, DATA.k, DATA.v), atol=1e-3)


def test_key_heads_may_be_shared():
    k, v = DATA.k[:, :, :2], DATA.v[:, :, :2]
    whole = sol_attention(DATA.q, k, v, tau=0.5)
    some = row_attention(Q, k, v, BLOCKS, 0.5)
    assert torch.allclose(some, whole[:, ROWS], atol=1e-5)


def test_a_probe_of_rows_has_the_density_of_those_rows():
    probe = probe_rows(Q, DATA.k, DATA.v, BLOCKS, 1.0, **ROUTING)
    rows = sol_scores(DATA.q, DATA.k, **ROUTING).route(1.0).dense()[:, :, list(BLOCKS)]
    assert probe.density == pytest.approx(rows.double().mean().item())
    assert 0 < probe.error.total.relative_l2 < 1


def test_gaps_of_whole_tiles_are_those_of_the_whole_call():
    whole, some = skip_gaps(DATA.q, DATA.k), skip_gaps(Q, DATA.k)
    places = query_places(BLOCKS, 128)
    assert places == [0, 2, 4]
    assert torch.allclose(some.gaps, whole.gaps[:, :, places], atol=1e-4)


def test_half_a_tile_is_refused_for_skip_softmax():
    check_tiles(None, 600)
    check_tiles((2, 3), 600)
    check_tiles((8,), 64 * 8 + 5)  # the last tile of that sequence is one block
    with pytest.raises(ValueError, match=r"128 queries together, and blocks \[3\] of those tiles"):
        check_tiles((2,), 600)


@pytest.mark.parametrize("blocks", [(0, 1), (1, 0, 4, 5, 8, 9)])
def test_rows_that_are_not_those_blocks_are_refused(blocks: tuple[int, ...]):
    with pytest.raises(ValueError, match="give each block once, ascending, with all its rows"):
        row_scores(Q, DATA.k, blocks)


def test_a_class_map_of_rows_is_part_of_the_whole_one():
    whole = decisions.classify(sol_scores(DATA.q, DATA.k, **ROUTING), 1.0, 0, 2)
    some = decisions.classify(row_scores(Q, DATA.k, BLOCKS, **ROUTING), 1.0, 0, 2, BLOCKS)
    assert torch.equal(some, whole[list(BLOCKS)])


def test_a_picture_of_rows_refuses_names_that_do_not_fit():
    figure = new_figure()
    with pytest.raises(ValueError, match="places names 2 rows"):
        draw_rows(figure.subplots(), torch.ones(3, 5, dtype=torch.bool), [0, 1])
    draw_rows(figure.subplots(), torch.ones(3, 3000, dtype=torch.bool), [0, 1, 7], "rows")
    assert to_png(figure)


# -- tuning on them --------------------------------------------------------------------------------


def captured(path: Path, blocks: tuple[int, ...] | None) -> Capture:
    spec = CaptureSpec(
        GRID,
        ((0, 0), (2, 1)),
        heads=4,
        head_dim=16,
        source="synthetic",
        selection=Selection(query_blocks=blocks),
    )
    with CaptureWriter(path, spec) as writer:
        for seed, (layer, step) in enumerate(spec.entries):
            made = synthetic_qkv(GRID, heads=4, head_dim=16, seed=seed)
            q = made.q[:, block_rows(blocks, GRID.tokens)]
            writer.write(layer, step, time=1 - step / 2, q=q, k=made.k, v=made.v)
    return open_capture(path)


@pytest.mark.parametrize(
    "settings",
    [
        TuneSettings(values=(0.5, 1.5), repeats=0),
        TuneSettings(algorithm="skip_softmax", values=(0.3, 0.9), repeats=0),
    ],
)
def test_tuning_on_every_block_of_a_sample_equals_tuning_on_the_whole(tmp_path: Path, settings):
    whole = tune.run(captured(tmp_path / "whole", None), settings)
    some = tune.run(captured(tmp_path / "some", tuple(range(10))), settings)
    for one, other in zip(whole.rows, some.rows, strict=True):
        assert other.density_delivered == pytest.approx(one.density_delivered)
        assert other.relative_l2 == pytest.approx(one.relative_l2, rel=1e-3)


def test_tuning_on_rows_says_so_and_takes_no_times(tmp_path: Path):
    result = tune.run(captured(tmp_path / "a", BLOCKS), TuneSettings(values=(1.0,), repeats=1))
    assert all(row.sparse_ms is None for row in result.rows)
    assert any("of 6 of 10 query blocks" in line for line in result.warnings)
    assert 0 < result.choice.line.density < 1


@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_heads_keep_the_numbers_that_the_model_gives_them(tmp_path: Path, algorithm: str):
    spec = CaptureSpec(GRID, ((0, 0),), heads=9, head_dim=16, selection=Selection(heads=(3, 8)))
    with CaptureWriter(tmp_path / "a", spec) as writer:
        q, k, v = (x[:, :, :2] for x in (DATA.q, DATA.k, DATA.v))
        writer.write(0, 0, time=0.5, q=q, k=k, v=v)
    settings = TuneSettings(algorithm=algorithm, values=(0.5,), repeats=0)
    result = tune.run(open_capture(tmp_path / "a"), settings)
    assert {row.head for row in result.choice.rows} == {3, 8}
    figures.write_figures(result, tmp_path / "run")
    assert (tmp_path / "run" / "route.png").is_file()


@pytest.mark.parametrize("panel", [TauTuner, ThresholdTuner])
def test_a_panel_opens_a_sample_of_heads_and_says_so(tmp_path: Path, panel: type):
    spec = CaptureSpec(GRID, ((0, 0),), heads=9, head_dim=16, selection=Selection(heads=(3, 8)))
    with CaptureWriter(tmp_path / "a", spec) as writer:
        q, k, v = (x[:, :, :2] for x in (DATA.q, DATA.k, DATA.v))
        writer.write(0, 0, time=0.5, q=q, k=k, v=v)
    opened = panel(open_capture(tmp_path / "a"), device="cpu")
    assert opened.problem == ""
    assert "heads 3, 8 of 9" in texts.heading(opened.session)


@pytest.mark.parametrize("algorithm", ["sol_attn", "skip_softmax"])
def test_the_tune_command_writes_its_run_folder_from_rows(tmp_path: Path, algorithm: str):
    capture, out = captured(tmp_path / "a.safetensors", BLOCKS), tmp_path / "run"
    options = ["--algorithm", algorithm, "--repeats", "0", "--out", str(out)]
    done = CliRunner().invoke(cli.app, ["tune", str(capture.path), *options])
    assert done.exit_code == 0, done.output
    assert "6 of 10 query blocks" in done.output
    assert (out / "route.png").is_file()


def test_the_route_viewer_refuses_rows_with_the_reason(tmp_path: Path):
    with pytest.raises(ValueError, match="needs every query row"):
        capture_masks(captured(tmp_path / "a", BLOCKS))


def test_tiles_that_are_torn_are_refused_before_anything_is_measured(tmp_path: Path):
    capture = captured(tmp_path / "a", (0, 4))
    with pytest.raises(ValueError, match=r"blocks \[1, 5\] of those tiles are not in the capture"):
        tune.run(capture, TuneSettings(algorithm="skip_softmax", repeats=0))


LARGE = """
    import resource
    import torch
    from blockattn import TokenGrid
    from workbench.capture import spread_blocks
    from workbench.capture.selection import block_rows
    from workbench.rows import probe_rows
    tokens = TokenGrid((25, 50, 80)).tokens
    blocks = spread_blocks(tokens, 4)
    k, v = (torch.randn(1, tokens, 1, 32) for _ in range(2))
    q = torch.randn(1, len(block_rows(blocks, tokens)), 1, 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    probe = probe_rows(q, k, v, blocks, 1.0)
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(taken, probe.density, probe.trace.route.shape[2:])
"""


def test_rows_of_a_hundred_thousand_tokens_need_no_matrix_of_tokens_by_tokens():
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LARGE)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    taken, density, *shape = done.stdout.split()
    assert int(taken) < 2**30  # scores of tokens x tokens would be 40 GB
    assert 0 < float(density) < 1
    assert shape == ["(4,", "1563)"]
