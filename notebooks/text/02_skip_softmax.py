# %% [markdown]
# # 2. SkipSoftmax: skip tiles that cannot matter
#
# ← [1. Tune tau of Sol-Attn](01_tune_tau.ipynb)  ·  [3. VSA](03_vsa.ipynb) →
#
# **What you learn.** What the threshold of SkipSoftmax means in each of its three units, what one pass over the scores
# says about every threshold, which tiles a real call drops and what that costs, which blocks it computes and Sol-Attn
# does not, and how a denoising cutoff keeps the first steps dense.
#
# **What you need.** Density and exact blocks from notebook 1; the same bundled attention calls.
#
# **How long.** Under a minute on two CPU cores.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
CAPTURE = None  # path of a capture file; None is the bundled one
LADDER = [-n / 4 for n in range(64, -1, -1)]  # log2(lambda), for the curves: one pass serves all
# log2(lambda) of the real calls.
REAL = [-n / 2 for n in range(24, 0, -1)] if GPU else [-12, -10, -8, -6, -4, -3, -2, -1, -0.5]
MAPS = [-8, -2, -0.5]  # log2(lambda) of the skip maps
TAU = 1.0  # of Sol-Attn, to compare with
HEAD = None  # in the order of the capture; None is the last
QUERY_TILE = 3
STEPS = 20
CUTOFF = 0.86  # denoising time: dense at or above it

# %%
from blockattn import attend, checks, skip_gaps, skip_softmax_attention
from blockattn.layout import num_blocks
from workbench import decisions, parameters, views
from workbench.attention import SparseAttention
from workbench.capture import open_capture
from workbench.comparison import Setting, agreement, describe_agreement
from workbench.config.sparse import SkipSoftmaxConfig
from workbench.curves import skip_curve
from workbench.models import AttentionCall, denoising_times
from workbench.probe import probe_skip
from workbench.widgets import Compare, ThresholdTuner

capture = open_capture(CAPTURE)
LADDER, REAL = parameters.rising("LADDER", LADDER), parameters.rising("REAL", REAL)
HEAD = parameters.head("HEAD", HEAD, capture.head_indices)
checks.integer("QUERY_TILE", QUERY_TILE, maximum=num_blocks(capture.grid.tokens, 128) - 1)
capture

# %% [markdown]
# ## One threshold, three units
#
# The keys come in tiles of 128. While a call walks along them it keeps the running maximum of every query's scores. A tile of
# 128 queries x 128 keys is **skipped** when for every query `exp(tile max - running max) < lambda`: no weight in
# it can reach lambda times the largest weight so far. The first tile of a row is always computed.
#
# Kernels compare in base 2, so they hold **log2(lambda)**. Calibrations are fitted in **threshold_scale_factor** =
# lambda * Sk, because longer sequences spread the softmax thinner: the same factor means a smaller lambda there.

# %%
call = capture.load(*capture.entries[:2][-1]).to(DEVICE)
KEYS = call.k.shape[1]
views.units_table(REAL, KEYS)

# %% [markdown]
# ## Sparsity at every threshold from one pass
#
# `skip_gaps` walks over the scores once and keeps, for every tile, the largest (tile max - running max). For lambda up to 1 a
# skipped tile holds no new maximum, so these gaps decide about **every** threshold exactly: no further run is needed.

# %%
calls = {entry: capture.load(*entry).to(DEVICE) for entry in capture.entries}
lambdas = [2.0**n for n in LADDER]
curves = {entry: skip_curve(c.q, c.k, lambdas) for entry, c in calls.items()}

figure = views.new_figure(12, 3.7)
axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
for ax, ((layer, step), curve) in zip(axes, curves.items()):
    views.draw_curve(
        ax,
        LADDER,
        1 - curve.per_head[0],
        labels=[f"head {head}" for head in range(capture.heads)],
        xlabel="log2(lambda)",
        ylabel="sparsity (skipped / valid tiles)",
        title=f"layer {layer}, step {step}",
    )
    views.add_threshold_units(ax, KEYS)
    ax.label_outer()
views.picture(
    figure, "Share of tiles skipped against the threshold, a line per head, in three units."
)

# %% [markdown]
# ## Which tiles a real call skips
#
# The real call runs at three thresholds, and its trace says which tiles it dropped. A walk that has not yet met a row's strongest
# tile cannot know that the ones before it matter little, so the map is not symmetric: here tiles right of the diagonal go first. The running maximum is exact here; some
# kernels let theirs lag by up to 2^8 to save work (`skip_reference="lagging"`) and skip a little less.

# %%
gaps = skip_gaps(call.q, call.k)
runs = {
    n: skip_softmax_attention(call.q, call.k, call.v, threshold=2.0**n, return_trace=True)[1]
    for n in MAPS
}

figure = views.new_figure(12, 4.6)
for ax, (n, trace) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items()):
    states = decisions.skip_states(trace.skipped, trace.reachable, head=HEAD)
    title = f"log2(lambda) = {n:g}, factor {2.0**n * KEYS:.4g}"
    views.draw_skip(ax, states, title)
where = f"layer {call.layer}, step {call.step}, head {HEAD}"
views.picture(figure, f"Skip maps of {where}. The last: {decisions.describe_skip(states)}")

# %% [markdown]
# The map that the one pass predicts is the map of the real call, tile for tile:

# %%
views.Table(
    ["log2(lambda)", "tiles skipped by the call", "tiles that differ from the pass"],
    [
        (n, int(trace.skipped.counts().sum()), trace.skipped.differing(gaps.skipped(2.0**n)))
        for n, trace in runs.items()
    ],
    f"Layer {call.layer}, step {call.step}, all heads, {gaps.gaps.numel()} tiles",
)

# %% [markdown]
# ## Turn the threshold
#
# It starts at the second map above. The map follows the threshold at once, from the gaps; when the controls rest, the real call runs and says what it cost.

# %%
tuner = ThresholdTuner(capture, device=DEVICE)
tuner.controls.step.value, tuner.controls.head.value = call.step, HEAD
tuner.controls.log2_threshold.value = MAPS[1]
tuner.flush()
tuner

# %% [markdown]
# ## The same row on the video
#
# One query tile is half a latent frame here. These are the key tokens it still computes at the largest of the three
# thresholds; what is washed out was skipped and enters nowhere (SkipSoftmax has no summaries).

# %%
row = runs[MAPS[-1]].computed.dense()[0, HEAD, QUERY_TILE]
selected = decisions.selected_tokens(row, capture.grid, block=128)
own = decisions.own_tokens(QUERY_TILE, capture.grid, block=128)

figure = views.new_figure(*views.frames_size(capture.grid.shape))
title = f"query tile {QUERY_TILE}, log2(lambda) = {MAPS[-1]:g}"
views.draw_frames(figure, selected, own, capture.video, title=title, rest="skipped")
views.picture(figure, decisions.describe_selection(selected, own))

# %% [markdown]
# ## What it costs
#
# Real calls at a few thresholds, compared with dense attention on the same inputs. The left end of each error line is rounding: two exact
# implementations differ by as much.

# %%
probes = {
    entry: [probe_skip(c.q, c.k, c.v, 2.0**n, dense=dense) for n in REAL]
    for entry, c in calls.items()
    for dense in [attend(c.q, c.k, c.v)]
}
names = [f"layer {layer}, step {step}" for layer, step in probes]
sparsities = torch.tensor([[1 - p.density for p in row] for row in probes.values()])
errors = torch.tensor([[p.error.total.relative_l2 for p in row] for row in probes.values()])

figure = views.new_figure(10, 3.9)
left, right = figure.subplots(1, 2)
views.draw_curve(
    left,
    REAL,
    sparsities,
    labels=names,
    xlabel="log2(lambda)",
    ylabel="sparsity (skipped / valid tiles)",
    title="delivered sparsity",
)
views.draw_curve(
    right,
    REAL,
    errors,
    labels=names,
    xlabel="log2(lambda)",
    ylabel="relative L2 error against dense",
    title="error of the real call",
    log=True,
)
for ax in (left, right):
    views.add_threshold_units(ax, KEYS)
views.picture(figure, "Sparsity and error of real calls against the threshold, a line per call.")

# %% [markdown]
# ## Against Sol-Attn: who computes which blocks
#
# Two mechanisms with the same inputs. Blue blocks are exact for Sol-Attn alone, orange ones for SkipSoftmax alone. The two differ
# in kind as well: Sol-Attn adds a summary of what is not exact, SkipSoftmax drops it.

# %%
a, b = Setting("sol_attn", tau=TAU), Setting("skip_softmax", log2_threshold=MAPS[-1])
codes = agreement(a.plan(call.q, call.k), b.plan(call.q, call.k), head=HEAD)

figure = views.new_figure(6, 5.4)
views.draw_agreement(figure.subplots(), codes, title=f"A: {a}\nB: {b}")
views.picture(figure, describe_agreement(codes))

# %% [markdown]
# The same with knobs, for any two settings or implementations; both really run, and the table holds the error of every head.

# %%
compare = Compare(capture, device=DEVICE)
compare.controls.step.value, compare.controls.head.value = call.step, HEAD
compare.controls.b.algorithm.value = b.algorithm
compare.controls.b.log2_threshold.value = b.log2_threshold
compare.flush()
compare

# %% [markdown]
# ## Denoising cutoff: dense first, then sparse
#
# Early steps decide what the video shows, and errors made there grow. `disabled_until_timestep` keeps every step dense whose
# denoising time is **at or above** it. It is a time, not a share of the steps: a shifted schedule spends more steps near the
# noise, so the same cutoff keeps many more of them dense.

# %%
figure = views.new_figure(11, 3.2)
for ax, shift in zip(figure.subplots(1, 2, sharey=True), (1.0, 3.0)):
    times = denoising_times(STEPS, shift)[:-1]
    views.draw_schedule(ax, times, CUTOFF, title=f"{STEPS} steps, shift {shift:g}")
views.picture(figure, f"With shift 3, {views.describe_schedule(times, CUTOFF)}")

# %%
print(views.describe_schedule(denoising_times(STEPS, 1.0)[:-1], CUTOFF))
print(views.describe_schedule(times, CUTOFF))

# %% [markdown]
# The same decision inside a model: `SparseAttention` takes the configuration, sees each call's denoising time, and counts what
# it did. The recorded calls stand in for a model here.

# %%
config = SkipSoftmaxConfig(
    threshold_scale_factor=2.0 ** MAPS[-1] * KEYS, disabled_until_timestep=CUTOFF
)
policy = SparseAttention(config, num_layers=6, record=True)
for c in calls.values():
    policy(c.q, c.k, c.v, AttentionCall(c.layer, c.step, c.time, capture.grid.shape))

print(policy.counts())
views.Table(
    ["layer", "step", "denoising time", "ran", "because", "density"],
    [
        (r.layer, r.step, f"{r.time:.3f}", r.algorithm, r.reason, f"{r.density:.3f}")
        for r in policy.records
    ],
    f"Cutoff {CUTOFF:g}",
)

# %% [markdown]
# ## Take the setting with you
#
# `workbench tune` solves the threshold for a wanted density or error over all recorded calls and writes a `config.yaml`;
# `workbench sample` runs it on a whole video:
#
# ```
# workbench tune --algorithm skip_softmax --target-density 0.8
# workbench sample --algorithm skip_softmax
# ```

# %%
# What was shown is true: the pass equals the real calls, sparsity rises with the threshold and
# with it the error, something was really skipped, and the cutoff kept the early steps dense.
assert all(trace.skipped == gaps.skipped(2.0**n) for n, trace in runs.items())
assert all(bool((curve.per_head.diff(dim=-1) <= 0).all()) for curve in curves.values())
assert bool((errors[:, -1] > errors[:, 0]).all())
assert bool((sparsities[:, -1] > 0).all())
assert all((r.algorithm == "skip_softmax") == (r.time < CUTOFF) for r in policy.records)
assert 0 < policy.counts().sparse < policy.counts().total, (
    f"{CUTOFF=}: recorded times {sorted({round(c.time, 4) for c in calls.values()})} all lie on "
    "one side; set CUTOFF above the least and not above the largest, or record two times or more"
)
assert tuner.measured is not None
assert tuner.problem == compare.problem == ""
assert 0 < int((codes > 1).sum()) < codes.numel()
