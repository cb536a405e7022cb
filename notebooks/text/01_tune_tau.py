# %% [markdown]
# # 1. Tune tau of Sol-Attn on a real video model
#
# [2. SkipSoftmax](02_skip_softmax.ipynb) →
#
# **What you learn.** How Sol-Attn decides which blocks of an attention call stay exact, what `tau` does to density and
# to the error, how to choose it, and where in the video the exact blocks lie.
#
# **What you need.** This package and nothing else: attention calls of a small trained video diffusion transformer are
# bundled. A GPU is used when there is one, here and in every notebook of this course.
#
# **How long.** Under a minute on two CPU cores, then as long as you like to turn the knobs.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CAPTURE = None  # path of a capture file; None is the bundled one
TAUS = [0.25 * n for n in range(17)] if GPU else [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
TAU = 1.0
HEAD = 0
QUERY_BLOCK = 9

# %%
from blockattn import attend, checks, sol_scores
from workbench import decisions, parameters, views
from workbench.capture import open_capture
from workbench.curves import sol_curve
from workbench.masks import capture_masks
from workbench.probe import probe_sol
from workbench.widgets import RouteViewer, TauTuner

capture = open_capture(CAPTURE)
TAUS, TAU = parameters.rising("TAUS", TAUS), checks.finite_number("TAU", TAU)
checks.integer("HEAD", HEAD, maximum=capture.heads - 1)
blocks = parameters.blocks("CAPTURE", CAPTURE, capture.grid.tokens)
checks.integer("QUERY_BLOCK", QUERY_BLOCK, maximum=blocks - 1)
capture

# %% [markdown]
# ## Density follows from one pass
#
# Sol-Attn cuts the tokens into blocks of 64. A query block keeps a key block **exact** when their mean score lies more than
# `tau` standard deviations above the mean over all key blocks; blocks beside the diagonal are always exact. Every other block
# enters through a **summary** of its keys and values, so nothing is dropped.
#
# Density = exact (query block, key block) pairs / valid pairs. The scores are computed once and serve every tau.

# %%
calls = {entry: capture.load(*entry).to(DEVICE) for entry in capture.entries}
curves = {entry: sol_curve(call.q, call.k, TAUS) for entry, call in calls.items()}

figure = views.new_figure(12, 3.2)
axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
for ax, ((layer, step), curve) in zip(axes, curves.items()):
    names = [f"head {head}" for head in range(curve.per_head.shape[1])]
    title = f"layer {layer}, step {step}"
    views.draw_curve(ax, TAUS, curve.per_head[0], labels=names, xlabel="tau (std)", title=title)
views.picture(figure, "Density against tau for every recorded layer and step, a line per head.")

# %% [markdown]
# ## Turn the knobs
#
# Move **tau** with the mouse or the arrow keys. The map shows every pair's decision, the charts show density, scores and each
# head; when the controls rest, the real sparse call runs and its error against dense attention appears. Below, the
# chosen **query block** is painted on the frames of the sampled video.

# %%
tuner = TauTuner(capture, device=DEVICE)
tuner

# %% [markdown]
# ## What it costs: error of the real call
#
# For each tau the sparse call is run and compared with dense attention on the same inputs, for every head.

# %%
call = calls[capture.entries[-1]]
dense = attend(call.q, call.k, call.v)
probes = [probe_sol(call.q, call.k, call.v, tau, dense=dense) for tau in TAUS]
densities = torch.stack([probe.density_per_head[0] for probe in probes], dim=1)
errors = torch.stack([probe.error.relative_l2[0] for probe in probes], dim=1)

figure = views.new_figure(9, 3.4)
left, right = figure.subplots(1, 2)
names = [f"head {head}" for head in range(len(errors))]
views.draw_curve(left, TAUS, densities, labels=names, title="delivered density")
views.draw_curve(
    right,
    TAUS,
    errors,
    labels=names,
    ylabel="relative L2 error against dense",
    ylim=None,
    title="error",
)
views.picture(figure, "Delivered density falls and relative L2 error rises with tau.")

# %%
print(probe_sol(call.q, call.k, call.v, TAU, dense=dense).trace)

# %% [markdown]
# Heads and layers differ, so one tau is not equally hard on all of them. The worst ones decide which layers stay dense.

# %%
at_tau = {entry: probe_sol(c.q, c.k, c.v, TAU) for entry, c in calls.items()}
table = torch.stack([probe.error.relative_l2[0] for probe in at_tau.values()])

figure = views.new_figure(6, 2.6)
views.heatmap(
    figure.subplots(),
    table,
    [f"layer {layer}, step {step}" for layer, step in at_tau],
    [f"head {head}" for head in range(table.shape[1])],
    "relative L2 error",
    row_label="",
    column_label="",
    title=f"Error at tau {TAU}",
)
views.picture(figure, "Relative L2 error of every recorded layer, step and head.")

# %% [markdown]
# ## Which video positions one query block attends
#
# The same picture as in the widget, from plain functions: take one row of the route, find its tokens, paint them.

# %%
route = sol_scores(call.q, call.k).route(TAU)
selected = decisions.selected_tokens(route.dense()[0, HEAD, QUERY_BLOCK], capture.grid)
own = decisions.own_tokens(QUERY_BLOCK, capture.grid)

figure = views.new_figure(*views.frames_size(capture.grid.shape))
title = f"query block {QUERY_BLOCK}, tau {TAU}"
views.draw_frames(figure, selected, own, capture.video, title=title)
views.picture(figure, decisions.describe_selection(selected, own))

# %% [markdown]
# ## Masks of any size
#
# The viewer below holds the masks of all recorded calls as bits and draws them in the browser, at this size and at 100,000
# tokens with 40 heads: scroll to zoom, drag to pan, hover for the boxes, score and reason of a pair, and click a cell of the
# index to open that layer and step. `tau` moves the mask and the index without asking Python, so it also works in a
# saved notebook (in JupyterLab: Settings, Save Widget State Automatically).

# %%
viewer = RouteViewer(capture_masks(capture, TAU, errors=True))
viewer

# %% [markdown]
# It follows Python as well. For a paper, the same view is a figure: here the last recorded call, zoomed to its corner.

# %%
viewer.layer, viewer.step = capture.entries[-1]
viewer.window = [0, min(12, blocks)] * 2
viewer.flush()
views.picture(viewer.figure(), viewer.summary())

# %% [markdown]
# ## Take the setting with you
#
# The tuner's setting as the configuration that every command here reads; the panel above has a link that saves it.

# %%
print(tuner.config)

# %% [markdown]
# `workbench tune` does all of this for every layer, step and head without a notebook, and writes figures, a table and a
# `config.yaml` for the serving stack:
#
# ```
# workbench tune --target-density 0.25
# workbench tune --target-error 0.05
# ```

# %%
# What was shown is true: density falls with tau, the error at the smallest tau is below that at
# the largest, and the sparse call is really sparse and really differs from dense.
assert all(bool((curve.per_head.diff(dim=-1) <= 0).all()) for curve in curves.values())
assert float(errors[:, 0].mean()) < float(errors[:, -1].mean()), f"{TAUS=}: too near together"
assert probes[-1].density < 1, f"{TAUS=}: the largest is still dense; go on to a larger one"
assert probes[-1].error.total.max_abs > 0
assert tuner.measured is not None
assert tuner.problem == ""
assert viewer.problem == ""
delivered = at_tau[capture.entries[-1]].density_per_head[0].cpu()
assert torch.allclose(viewer.mask.density().float(), delivered.float())
