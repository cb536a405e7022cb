# %% [markdown]
# # 5. A whole video: which steps and layers stay dense
#
# ← [4. Quantised attention](04_quantised_attention.ipynb)  ·  [6. Calibrate and solve](06_calibrate_and_solve.ipynb) →
#
# **What you learn.** What a sparse attention setting does to a sampled video, not only to one call; how much a schedule
# (first steps dense, first layers dense) gives back, and what density it costs; and why no verdict is worth anything
# without a dense-against-dense control.
#
# **What you need.** `tau` from notebook 1 and the cutoff from notebook 2; the bundled video model, which is sampled
# here.
#
# **How long.** Under a minute on two CPU cores, with the small values below.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
GRID = (8, 16, 16) if GPU else (4, 16, 16)  # tokens along (t, h, w)
STEPS = 20 if GPU else 5
LABEL, SEED = "disc", 4
TAU = 1.0
DENSE_LAYERS = [0, 1, 2, 4] if GPU else [0, 3]
DENSE_STEPS = [0, 2, 5, 10] if GPU else [0, 1, 3]

# %%
from workbench import views
from workbench.models import load_model
from workbench.sample import report as sample_report
from workbench.sample.schedules import cutoff_of, schedule_grid
from workbench.sample.settings import SampleSettings
from workbench.sample.text import quality_table, what_ran_table
from workbench.schedule import Schedule, describe
from workbench.widgets import ScheduleEditor

model = load_model(device=DEVICE)
settings = SampleSettings(label=LABEL, seeds=(SEED,), grid=GRID, steps=STEPS)
{steps: cutoff_of(settings.times, steps) for steps in DENSE_STEPS}

# %% [markdown]
# The server counts dense steps by **denoising time** (1 = noisiest): `disabled_until_timestep` is the time down to which
# every step stays dense. Above, number of dense steps and the cutoff that gives it for this schedule. Samplers
# spend many steps near the noise, so a cutoff of 0.9 is more than a tenth of the steps.
#
# ## Steps x layers
#
# A schedule is a choice of calls. Every cell is one attention call of the sampling:

# %%
schedule = Schedule(
    tuple(settings.times), model.config.depth, cutoff_of(settings.times, DENSE_STEPS[-2]), (0,)
)
figure = views.new_figure(8, 3.4)
views.draw_schedule_map(figure.subplots(), schedule, title="one dense phase, one dense layer")
views.picture(figure, describe(schedule))

# %% [markdown]
# Move the cutoff and the dense layers, as a time or as a number of steps, and see the configuration that says so; the button
# samples a video with it.

# %%
editor = ScheduleEditor(model, settings)
editor

# %% [markdown]
# ## Sample every schedule from the same noise
#
# Rows keep the first layers dense, columns the first steps. The dense baseline and the control run too.

# %%
grid = schedule_grid(model, settings, dense_layers=DENSE_LAYERS, dense_steps=DENSE_STEPS, tau=TAU)
quality_table(grid.result)

# %% [markdown]
# **Read the control first.** `dense_control` is exact attention, computed block by block instead of in one piece. What it
# differs from `dense` is rounding, which grows along the sampling: the floor under every other row. Here the model runs in float32; in
# bfloat16, as served models run, the floor is far higher (`workbench sample --dtype bfloat16`). PSNR and SSIM against the dense
# run say how far the video moved, not whether it is worse.
#
# ## Quality and density of a schedule

# %%
figure = views.new_figure(11, 3.2)
left, right = figure.subplots(1, 2)
axes = {"row_label": "first layers dense", "column_label": "first steps dense"}
views.heatmap(
    left, grid.psnr(), DENSE_LAYERS, DENSE_STEPS, "PSNR against dense (dB)", title="quality", **axes
)
views.heatmap(
    right,
    grid.density(),
    DENSE_LAYERS,
    DENSE_STEPS,
    "density (exact / valid pairs)",
    title="what it costs",
    limits=(0.0, 1.0),
    **axes,
)
views.picture(figure, "PSNR and density for every number of dense layers and dense steps.")

# %%
figure = views.new_figure(6.4, 3.8)
floor = grid.control.quality
views.draw_tradeoff(
    figure.subplots(), grid.density(), grid.psnr(), DENSE_LAYERS, DENSE_STEPS, control=floor.psnr
)
views.picture(figure, "PSNR against density: a point per schedule, a line per number of layers.")

# %% [markdown]
# A schedule is worth its density when its point lies above and left of the others.
#
# ## Look at the videos
#
# Frames of every run, and beside them where they differ from dense.

# %%
figure = sample_report.comparison(grid.result)
views.picture(figure, "Frames of every schedule and their difference from the dense run.")

# %%
figure = sample_report.densities(grid.result)
views.picture(figure, "Delivered density of every schedule at every step.")

# %%
what_ran_table(grid.result)

# %% [markdown]
# ## Every mechanism, without a notebook
#
# ```
# workbench sample                                   # all mechanisms and what composes, one table
# workbench sample --algorithm sol_attn --tau 1.5 --cutoff 0.9 --dense-layers 0,1
# workbench sample --config my_server.yaml --seed 0,1,2,3
# ```
#
# Each writes the videos (GIF), contact sheets, `results.csv`, a `config.yaml` per variant and the provenance.

# %%
# What was shown is true: the control is exact and closer to dense than every sparse schedule,
# every schedule is really sparse, and a longer dense phase really makes it denser.
assert all(row.quality.relative_l2 > floor.relative_l2 for row in grid.sparse)
assert grid.control.sampled.density == 1
assert all(0 < row.sampled.density < 1 for row in grid.sparse)
assert all(row.sampled.counts.sparse > 0 for row in grid.sparse)
assert not any(row.sampled.counts.ineligible for row in grid.sparse)
assert all(line == sorted(line) for line in grid.density())
assert not any(row.flags for row in grid.result.rows)
assert editor.problem == ""
assert 0 < schedule.sparse_share < 1
