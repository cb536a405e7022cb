# %% [markdown]
# # 8. Bring a capture of your own
#
# ← [7. Sweep, front and export](07_sweep_pareto_export.ipynb)  ·  [10. Your own model](10_your_own_model.ipynb) →
#
# **What you learn.** How to record q, k and v of your model's attention calls without changing what it samples, what a
# capture file says about itself, and how to look at it, tune on it, time it on your machine and leave with a
# configuration.
#
# **What you need.** `tau` and the viewer from notebook 1, and a model whose attention you can reach; the bundled one
# stands in for it here.
#
# **How long.** Under a minute on two CPU cores, with the small values below.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
OUT = None  # every run makes a folder of its own in it; None is a temporary one
GRID = (8, 16, 16) if GPU else (4, 16, 16)  # tokens along (t, h, w)
LABEL, SEED = "ring", 7
STEPS = 20 if GPU else 6
KEEP = [(0, 1), (0, 4), (3, 1), (3, 4)]  # (layer, step) of the calls to record
TARGET_DENSITY = 0.3
ROUNDS = 5  # of the timing

# %%
from blockattn import TokenGrid, checks
from workbench import parameters, views
from workbench.bench.split import describe_split, measure
from workbench.capture import CaptureSpec, CaptureWriter, open_capture
from workbench.capture.recorder import Recorder
from workbench.config import dump_config, load_config
from workbench.masks import capture_masks
from workbench.models import load_model, sample
from workbench.tune.run import run
from workbench.tune.settings import TuneSettings
from workbench.widgets import Doctor, RouteViewer, TauTuner, TimeSplit
from workbench.widgets.time_split import SplitPanel

model = load_model(device=DEVICE)  # stands in for yours
KEEP = parameters.calls("KEEP", KEEP, model.config.depth, STEPS)
parameters.blocks("GRID", GRID, TokenGrid(GRID).tokens)
parameters.between("TARGET_DENSITY", TARGET_DENSITY, 0, 1)
checks.integer("ROUNDS", ROUNDS, minimum=1)
folder = parameters.new_folder(OUT)
doctor = Doctor()
doctor

# %% [markdown]
# What this machine can run is above. The table says the same without a kernel:

# %%
views.Table(
    ["implementation", "runs here"],
    [
        (i.name, "yes" if i.why_not is None else f"no: {i.why_not}")
        for i in doctor.report.implementations
    ],
    "Implementations of attention",
)

# %% [markdown]
# ## Say what will be recorded
#
# A capture holds q, k, v of chosen calls as `[B, T, H, D]` in bfloat16, the denoising time of each, and where they came from. Its
# size is known before anything runs, and a file that exists is never replaced.

# %%
frames, height, width = (tokens * pixels for tokens, pixels in zip(GRID, model.config.patch))
spec = CaptureSpec(
    grid=TokenGrid(GRID),
    entries=tuple(KEEP),
    heads=model.config.heads,
    head_dim=model.config.head_dim,
    video_shape=(frames, height, width),
    title=f"my model, {LABEL}, seed {SEED}",
    details={"model": "tiny video DiT", "prompt": LABEL, "seed": str(SEED)},
)
print(f"{spec.total_bytes:,} bytes for {len(spec.entries)} calls of {spec.grid.tokens:,} tokens")

# %% [markdown]
# ## Record
#
# A `Recorder` stands where your model calls attention: `recorder(q, k, v, AttentionCall(layer, step, time, grid))`. It hands the
# tensors on to the attention inside it and keeps what the spec asks for; the sampled video stays the same bit for bit. With
# classifier-free guidance in one batch it keeps the half that knows the prompt.

# %%
options = {"labels": [LABEL], "grid": GRID, "steps": STEPS, "seed": SEED}
with Recorder(folder / "mine.safetensors", spec) as recorder:
    video = sample(model, attention=recorder, **options)
    recorder.write_video(video[0])

unrecorded = sample(model, **options)

# %% [markdown]
# Where a model hands you q, k and v but lets nothing stand in for its attention, write them yourself. These are random, and the
# capture says so wherever it is shown:

# %%
by_hand = CaptureSpec(TokenGrid((2, 8, 8)), ((0, 0),), heads=1, head_dim=64, source="synthetic")
q, k, v = torch.randn(3, 1, 128, 1, 64, generator=torch.Generator().manual_seed(0))
with CaptureWriter(folder / "by_hand.safetensors", by_hand) as writer:
    writer.write(0, 0, time=0.9, q=q, k=k, v=v)

open_capture(folder / "by_hand.safetensors").title

# %% [markdown]
# ## Open it
#
# Opening reads the header alone; `verify` reads everything and compares the checksums.

# %%
capture = open_capture(folder / "mine.safetensors")
capture.verify()
times = [f"layer {layer}, step {step}: {capture.time(layer, step):.3f}" for layer, step in KEEP]
views.Table(
    ["what", "in the file"],
    [
        ("title", capture.title),
        ("source", capture.source),
        ("grid (t, h, w)", capture.grid.shape),
        ("heads, head dim", f"{capture.heads}, {capture.head_dim}"),
        ("denoising times", "; ".join(times)),
    ],
    "A capture of your own",
)

# %% [markdown]
# ## Look at it
#
# The viewer of notebook 1, on every recorded call: masks, densities, and the error of a real call for each of them.

# %%
viewer = RouteViewer(capture_masks(capture, errors=True))
viewer

# %% [markdown]
# The last call, beside the density of the others:

# %%
viewer.layer, viewer.step = KEEP[-1]
viewer.flush()
views.picture(viewer.figure(), viewer.summary())

# %% [markdown]
# ## Tune it
#
# The tuner of notebook 1 takes any capture.

# %%
tuner = TauTuner(capture, device=DEVICE)
tuner

# %% [markdown]
# What `workbench tune` does: a density curve from one pass, real calls, and the sparsest tau whose mean density is not below the
# target.

# %%
result = run(capture, TuneSettings(target_density=TARGET_DENSITY, device=DEVICE, repeats=0))
views.Table(
    ["tau", "density", "mean error", "largest error"],
    [
        (f"{line.value:g}", f"{line.density:.3f}", f"{line.error:.4f}", f"{line.error_max:.4f}")
        for line in [*result.lines(), result.choice.line]
    ],
    f"The last row is the choice for density {TARGET_DENSITY}: relative L2 errors of real calls",
)

# %% [markdown]
# ## What it costs here
#
# Parts of a call, the whole call and dense attention, timed in turn on this machine. The **break-even density** is where sparse
# and dense take equally long: above it, sparse attention is slower. It depends on machine and shape, so measure where you serve.

# %%
call = capture.load(*KEEP[-1]).to(DEVICE)
split = measure((call.q, call.k, call.v), result.choice.value, repeats=ROUNDS, where="this machine")

print(*describe_split(split), sep="\n")
views.Picture(
    SplitPanel().draw(split), "Parts of one call, and speed-up over dense against density."
)

# %% [markdown]
# The panel measures any call of the capture, and shows committed benchmarks of other machines:

# %%
TimeSplit(capture, device=DEVICE)

# %% [markdown]
# ## Take it with you
#
# The choice as the configuration that every command and every notebook here reads:

# %%
config = dump_config(result.config())
print(config)

# %% [markdown]
# Every notebook of this course takes your capture as a parameter, with papermill as from the command line:
#
# ```
# workbench capture --out mine.safetensors --label ring --seed 7    # records the bundled model
# workbench tune mine.safetensors --target-density 0.3
# papermill notebooks/02_skip_softmax.ipynb mine_02.ipynb -p CAPTURE mine.safetensors
# ```

# %%
# What was shown is true: recording changed nothing, the file holds what the model computed, the
# choice keeps its promise and is really sparse, and the configuration means the same when read.
assert torch.equal(video, unrecorded)
assert capture.entries == sorted(KEEP)
assert "synthetic" in open_capture(folder / "by_hand.safetensors").title
assert result.choice.line.density < 1, f"{TARGET_DENSITY=}: that is dense; take less"
assert result.choice.line.density >= TARGET_DENSITY
assert result.choice.line.error > 0
assert viewer.problem == tuner.problem == doctor.problem == ""
assert load_config(config) == result.config()
