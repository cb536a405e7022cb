# %% [markdown]
# # 6. Calibrate once, solve for any target
#
# ← [5. A whole video](05_whole_video.ipynb)  ·  [7. Sweep, front and export](07_sweep_pareto_export.ipynb) →
#
# **What you learn.** How one dense pass over a few sampled videos tells the density of every layer, head and step at
# every threshold; how to solve it for a target, as one value, a value per layer or window, or a schedule over denoising
# time; how far a real sparse run drifts from the prediction; where the error sits, and how much attention mass a route
# keeps against the best that any router could; and how far a fitted formula carries to another sequence length.
#
# **What you need.** Both thresholds from notebooks 1 and 2, denoising time from notebook 5; the bundled video model.
#
# **How long.** Under a minute on two CPU cores, with the small values below.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
GRID = (8, 16, 16)  # tokens along (t, h, w)
OTHER_GRID = (4, 16, 16)  # on which the fit is tried
STEPS = 20 if GPU else 2
SEEDS = (0, 1, 2, 3) if GPU else (0, 1)
HELD_OUT = (100, 101, 102, 103) if GPU else (100, 101)
TARGET = 0.15  # density
EDGE = 0.9  # denoising time between two windows
LEVELS = [n / 4 for n in range(-4, 17)]  # tau, for the curves

# %%
from dataclasses import replace

from workbench import views
from workbench.calibrate.collect import calibrate, plan_for
from workbench.calibrate.fit import SPACES, fit_calibration, transfer
from workbench.calibrate.free_run import deliver, solve_free_run
from workbench.calibrate.probes import probe_setting
from workbench.calibrate.samples import Samples
from workbench.calibrate.setting import Form
from workbench.calibrate.solve import solve_density
from workbench.calibrate.text import delivery_lines, fit_lines, probe_line, worst_table
from workbench.models import load_model

model = load_model(device=DEVICE)
samples = Samples(("disc",), SEEDS, grid=GRID, steps=STEPS)
plan = plan_for(model, "sol_attn", samples)
print(plan)

# %% [markdown]
# Nothing has run yet: the plan says what will be kept and how large it is. Above a limit the scores of a head become quantiles,
# and the plan states the bound on the density that follows.
#
# ## One dense pass
#
# While the model samples densely, every attention call is scored and reduced at once to its sorted scores.

# %%
calibration = calibrate(model, plan)

figure = views.new_figure(12, 3.7)
left, right = figure.subplots(1, 2)
by_layer = torch.stack([calibration.density(tau).mean(dim=(0, 2, 3, 4)) for tau in LEVELS], dim=1)
views.draw_curve(left, LEVELS, by_layer, title="density of every layer, mean over videos and steps")
views.heatmap(
    right,
    calibration.density(1.0).mean(dim=(0, 3, 4)),
    range(calibration.layers),
    range(STEPS),
    "density (exact / valid pairs)",
    title="the same pass at tau = 1",
)
views.picture(figure, "Density against tau for every layer; density by layer and step at tau = 1.")

# %% [markdown]
# ## Solve it: one value, a value per layer, windows, a schedule
#
# Every form below has the same mean density on the calibrated calls. A schedule adds `span * shape(t)` to one level, t being the
# denoising time (1 = noisiest): with a positive span it is sparser at the noise.

# %%
forms = {
    "global": Form(),
    "per layer": Form(by="layer"),
    f"windows at t = {EDGE:g}": Form(by="window", edges=(EDGE,)),
    "linear schedule": Form(shape="linear", span=0.5),
    "cosine schedule": Form(shape="cosine", span=0.5),
    "step schedule": Form(shape="step", span=0.5, at=EDGE),
}
solutions = {name: solve_density(calibration, TARGET, form) for name, form in forms.items()}
views.Table(
    ["form", "requested", "predicted", "levels (tau)"],
    [
        (
            name,
            found.requested,
            f"{found.overall:.4f}",
            ", ".join(f"{level:.3f}" for level in found.setting.levels),
        )
        for name, found in solutions.items()
    ],
    "Solved on the calibration, without running the model again",
)

# %% [markdown]
# ## Predicted is not delivered
#
# The pass predicts, call by call, what happens on the dense run. A sparse run feeds its errors forward: later calls see other q
# and k, and the density drifts. So the calibration's own videos are run sparsely, the drift is measured, and the level is solved
# again with the drift taken off. Then videos with seeds that it has never seen are run.

# %%
best = solve_free_run(model, calibration, TARGET)
setting = best.solution.setting
held_out = deliver(model, setting, replace(samples, seeds=HELD_OUT))

figure = views.new_figure(6.4, 3.8)
views.draw_delivery(
    figure.subplots(),
    ["first solve", "drift taken off", "held-out seeds"],
    TARGET,
    [solutions["global"].overall, best.solution.overall, best.solution.overall],
    [float(run.by_group) for run in (best.delivered[0], best.delivered[-1], held_out)],
    spread=torch.stack(
        [run.by_video for run in (best.delivered[0], best.delivered[-1], held_out)], dim=1
    ),
    title="density of free runs; a dash is a video, the band is half a point",
)
print(*delivery_lines(held_out, TARGET), sep="\n")
views.picture(figure, "Density predicted and delivered, before and after the drift is taken off.")

# %% [markdown]
# ## Where the error sits
#
# Each call runs sparse and is compared with dense on the same inputs; the dense output goes on, so an error is that call's own.
# **Recall** is the attention mass inside the exact blocks; its ceiling takes, for every query block, as many key blocks by their
# true mass. A router below the ceiling chooses the wrong blocks; a low ceiling says that the budget is too small for that head.

# %%
first = replace(samples, seeds=SEEDS[:1])
probes = probe_setting(model, setting, first)
print(probe_line(probes))
worst_table(probes)

# %%
figure = views.new_figure(13, 3.9)
left, right = figure.subplots(1, 2)
views.heatmap(
    left,
    probes.table("relative_l2"),
    range(calibration.layers),
    range(STEPS),
    "relative L2 error against dense",
    title="error of real calls",
)
views.draw_recall(
    right,
    probes.column("recall"),
    probes.column("best_recall"),
    probes.column("density"),
    label="density (exact / valid pairs)",
    title="attention mass kept, a point per head and call",
)
views.picture(figure, "Error by layer and step, and recall against the best router's.")

# %% [markdown]
# ## A formula, and where it stops
#
# Servers turn a target sparsity of SkipSoftmax into a factor by `a * exp(b * sparsity)`. The fit below uses sparsities of 0.1 to 0.9
# only, shows its residuals, and refuses to extrapolate unless asked. The right chart is the honest part: the same formula on
# another sequence length.

# %%
skip = calibrate(model, plan_for(model, "skip_softmax", first))
other = calibrate(model, plan_for(model, "skip_softmax", replace(first, grid=OTHER_GRID)))
for space in SPACES:
    fit = fit_calibration(skip, space=space)
    trials = [transfer(fit, skip), transfer(fit, other)]
    print(*fit_lines(fit, trials[1]), sep="\n")
print("as a checkpoint holds it:", fit.formula())

# %%
figure = views.new_figure(15, 4.0)
left, middle, right = figure.subplots(1, 3)
views.draw_fit(left, fit.sparsity, fit.factor, (fit.a, fit.b), title=f"fit at {fit.source}")
title = f"R2 of ln(factor) {fit.r2_log:.3f}"
views.draw_residuals(middle, fit.sparsity, fit.residuals, title=title)
views.draw_transfer(
    right,
    [trial.requested for trial in trials],
    [trial.delivered for trial in trials],
    labels=[str(trial.target) for trial in trials],
    title="what the fit delivers",
)
views.picture(figure, "Fit with its domain, residuals, and sparsity delivered at two lengths.")

# %% [markdown]
# ## Without a notebook
#
# ```
# workbench calibrate --out sol.safetensors --labels disc,ring --seeds 0,1,2,3
# workbench solve sol.safetensors --target-density 0.15 --held-out 100,101
# workbench solve sol.safetensors --target-error 0.1 --by layer
# workbench calibrate --algorithm skip_softmax --out skip.safetensors --hold-out other.safetensors
# ```
#
# `solve` writes the setting, its error and recall for every head, a picture, and a `config.yaml` where one value serves all calls.

# %%
# What was shown is true: on the dense run the pass predicts the density of the real calls (a score
# that ties with the level may flip a pair), all forms meet the target, held-out runs deliver it,
# and no router beats its ceiling.
levels = setting.level_map(calibration.layers, samples.times)
predicted = calibration.density(levels)[0].mean(dim=(2, 3))
real = torch.from_numpy(probes.table("density"))
assert float((predicted - real).abs().max()) <= 1 / plan.geometry.pairs
assert all(0 <= found.overall - TARGET < 0.002 for found in solutions.values())
assert abs(float(held_out.by_group) - TARGET) < 0.005
assert all(row.recall <= row.best_recall + 1e-9 for row in probes.rows)
assert trials[0].worst < 0.15
assert fit.r2_log > 0.5
