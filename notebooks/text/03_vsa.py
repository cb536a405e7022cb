# %% [markdown]
# # 3. VSA: coarse attention chooses cubes, fine attention computes them
#
# ← [2. SkipSoftmax](02_skip_softmax.ipynb)  ·  [4. Quantised attention](04_quantised_attention.ipynb) →
#
# **What you learn.** How video sparse attention cuts a video into cubes of 4x4x4 tokens, what its coarse stage sees,
# which cubes a query keeps, what sparsity costs a model that was never trained for it, and what fine-tuning changes.
#
# **What you need.** Routes from notebook 1; the same bundled attention calls, and the bundled model fine-tuned with
# VSA.
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
RAGGED = (7, 15, 18)  # a grid that cubes do not fill
SPARSITIES = [0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 0.9375]
SPARSITY = 0.75
HEAD = 0
QUERY_CUBE = 5
VIDEOS = 64 if GPU else 4  # for the fine-tuned model
TIMES = (0.3, 0.5, 0.8, 0.95) if GPU else (0.8,)

# %%
from blockattn import TokenGrid, attend, checks, kept_cubes, video_sparse_attention, vsa_route
from workbench import decisions, views
from workbench.capture import open_capture
from workbench.mechanisms import cubes
from workbench.mechanisms.probes import probe_vsa
from workbench.mechanisms.vsa import vsa_effect
from workbench.probe import attention_error

capture = open_capture(CAPTURE)
grid = capture.grid
checks.integer("HEAD", HEAD, maximum=capture.heads - 1)
checks.integer("QUERY_CUBE", QUERY_CUBE, maximum=len(cubes.filled_slots(grid)[0]) - 1)
capture

# %% [markdown]
# ## Cubes instead of rows
#
# In raster order 64 neighbouring tokens are a few rows of one frame. VSA regroups them: a block is a **cube** of 4 latent frames x 4 rows x
# 4 columns, so that what moves a little stays in one block. The numbers are the cubes' places in the new sequence.

# %%
figure = views.new_figure(*views.cubes_size(grid.shape))
views.draw_cubes(figure, cubes.cube_index(grid), capture.video, title=f"Cubes of grid {grid.shape}")
views.picture(figure, cubes.describe_cubes(grid))

# %% [markdown]
# A grid whose sides are no multiples of 4 has cubes that are not full (tinted, with the number of their tokens):

# %%
ragged = TokenGrid(RAGGED)
figure = views.new_figure(*views.cubes_size(ragged.shape))
views.draw_cubes(figure, cubes.cube_index(ragged), title=f"Cubes of grid {ragged.shape}")
views.picture(figure, cubes.describe_cubes(ragged))

# %% [markdown]
# Where the edge cuts a cube, its 64 slots have holes. VSA stores the valid tokens first (**prefix compaction**): the mask of a
# cube is then simply "slot < size", one number that a kernel compares with, and padding is exactly zero.

# %%
natural, stored = cubes.filled_slots(ragged)
figure = views.new_figure(10, 4.4)
left, right = figure.subplots(1, 2)
views.draw_slots(left, natural, "as the tokens lie in the cube")
views.draw_slots(right, stored, "as VSA stores them: valid tokens first")
views.picture(
    figure, "Slots of each cube: with holes before, and filled from the left after compaction."
)

# %% [markdown]
# ## Coarse stage: every cube is one token
#
# Queries, keys and values are averaged over each cube, and dense attention runs between these means. Each query cube then keeps
# its K = max(1, ceil((1 - sparsity) * N)) largest key cubes (framed). Its own cube is not forced in. The marked row is the query
# cube that is painted below.

# %%
calls = {entry: capture.load(*entry).to(DEVICE) for entry in capture.entries}
call = calls[capture.entries[-1]]
shares = cubes.coarse_attention(call.q, call.k, grid=grid)[0]
route = vsa_route(call.q, call.k, grid=grid, sparsity=SPARSITY)

figure = views.new_figure(12, 5.2)
for head, ax in enumerate(figure.subplots(1, capture.heads, squeeze=False)[0]):
    title = f"layer {call.layer}, step {call.step}, head {head}, sparsity {SPARSITY:g}"
    kept = route.dense()[0, head]
    views.draw_coarse(ax, shares[head], kept, query=QUERY_CUBE, title=title)
views.picture(figure, f"Coarse attention between cubes; the kept ones at sparsity {SPARSITY:g}.")

# %% [markdown]
# ## What one query cube attends
#
# The kept key cubes of the marked query cube on the frames of the video. A cube spans four latent frames, so each panel shows a slice of it.

# %%
selected = cubes.cube_tokens(route.dense()[0, HEAD, QUERY_CUBE], grid)
own = cubes.one_cube(QUERY_CUBE, grid)

figure = views.new_figure(*views.frames_size(grid.shape))
title = f"query cube {QUERY_CUBE}, sparsity {SPARSITY:g}, layer {call.layer}, step {call.step}"
views.draw_frames(figure, selected, own, capture.video, title=title, rest="dropped")
views.picture(figure, decisions.describe_selection(selected, own))

# %% [markdown]
# ## What sparsity costs without training
#
# Fine attention computes the kept cubes alone. The coarse branch has a learned gate; a model that was never trained with VSA has none,
# so its gate is zero here and what was dropped is gone. That is **training-free top-k**. At sparsity 0 what is left is the
# rounding of two exact implementations.

# %%
probes = {
    entry: [probe_vsa(c.q, c.k, c.v, s, grid=grid, dense=dense) for s in SPARSITIES]
    for entry, c in calls.items()
    for dense in [attend(c.q, c.k, c.v)]
}
names = [f"layer {layer}, step {step}" for layer, step in probes]
densities = torch.tensor([[p.density for p in row] for row in probes.values()])
errors = torch.tensor([[p.error.total.relative_l2 for p in row] for row in probes.values()])

figure = views.new_figure(10, 3.5)
left, right = figure.subplots(1, 2)
views.draw_curve(
    left,
    SPARSITIES,
    densities[:1],
    xlabel="sparsity asked for",
    ylabel="density (kept / all cube pairs)",
    title="delivered density, the same for every call",
)
views.draw_curve(
    right,
    SPARSITIES,
    errors,
    labels=names,
    xlabel="sparsity asked for",
    ylabel="relative L2 error against dense",
    title="error, zero gate",
    log=True,
)
views.picture(figure, "Density and error of training-free top-k against sparsity, a line per call.")

# %%
N = len(route.dense()[0, 0])
views.Table(
    ["sparsity", "cubes kept of each row", "density", "mean error", "ran on"],
    [
        (
            f"{s:g}",
            f"{kept_cubes(s, N)} of {N}",
            f"{float(densities[0, n]):.4f}",
            f"{float(errors[:, n].mean()):.4f}",
            probes[capture.entries[0]][n].trace.impl,
        )
        for n, s in enumerate(SPARSITIES)
    ],
    "Training-free top-k, mean over the recorded calls",
)

# %% [markdown]
# ## What fine-tuning changes
#
# Fine-tuning with VSA trains the gate of the coarse branch, and all other weights along with the selection. Where such weights are bundled
# (`data/tiny_video_dit_vsa.safetensors`), they are compared here with training-free top-k on new videos: the error of the predicted
# velocity, at the sparsity of the fine-tuning. Where they are not, the picture says so and the rest of this notebook stands.

# %%
effect = vsa_effect(videos=VIDEOS, times=TIMES, device=DEVICE)

figure = views.new_figure(9, 2.8)
views.draw_methods(
    figure.subplots(),
    effect.names,
    effect.mean,
    effect.standard_error,
    highlight=3,
    label="velocity error (MSE) with the standard error over videos",
    title="New videos, the same noise for every method",
    missing=effect.missing,
)
views.picture(figure, str(effect))

# %%
print(effect)

# %% [markdown]
# ## On a whole video
#
# `workbench sample --algorithm vsa` samples a video with VSA and with dense attention from the same noise and reports how far apart they are:
#
# ```
# workbench sample --algorithm vsa --sparsity 0.75
# ```

# %%
# What was shown is true: compaction keeps every token, each row keeps K cubes, sparsity 0 with a
# zero gate is dense attention (full and ragged grid, float32), and a sparse call differs from it.
assert int(stored.sum()) == int(natural.sum()) == ragged.tokens
assert bool((stored.sum(1, keepdim=True) > torch.arange(64)).eq(stored).all())
assert bool((route.dense().sum(-1) == kept_cubes(SPARSITY, N)).all())

small = TokenGrid((5, 6, 7))
exact = call.to(dtype=torch.float32)
for where in (grid, small):
    q, k, v = (part[:, : where.tokens] for part in (exact.q, exact.k, exact.v))
    out = video_sparse_attention(
        q, k, v, grid=where, sparsity=0.0, gate_compress=torch.zeros_like(q)
    )
    assert attention_error(out, attend(q, k, v)).total.relative_l2 < 1e-5

assert bool((densities[:, -1] < 1).all())
assert bool((errors[:, -1] > 10 * errors[:, 0]).all())
