# %% [markdown]
# # 10. Your own model: attach, capture, tune, apply, compare
#
# ← [8. A capture of your own](08_your_own_capture.ipynb)
#
# **What you learn.** How to put sparse attention into a video model of diffusers without changing it, record its calls, choose
# a setting on them, write it for a server, read that file back, and tell whether one setting is better than another: on the same
# prompts and seeds, beside two controls.
#
# **What you need.** The packages of diffusers: `pip install -e '.[diffusers]'`. Without a checkpoint a tiny random Wan 2.2 (two
# transformers) stands in; its videos are noise, but every step is the same. With one (a folder in the form of diffusers, such as
# Wan2.2-T2V-A14B-Diffusers), `MODEL` is all that has to change.
#
# **How long.** Under a minute on two CPU cores with the tiny model. A checkpoint samples 14 videos below, of its own size and in
# its own number of steps: `SIZE` (frames, height and width in pixels) and `STEPS` make them as short as you have time for. A video
# of few blocks of 64 tokens cannot be sparse; it needs a higher `TARGET_DENSITY`.

# %% tags=["parameters"]
import torch

# Parameters: small values without a checkpoint.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
MODEL = None  # folder of a diffusers pipeline or of a Wan transformer; None is a tiny random one
SIZE = None  # (frames, height, width); None is the model's own, as for the next two
STEPS = None
GUIDANCE = None
PROMPTS = ["a red ball rolls over wet grass"]
SEEDS = [0, 1, 2]
RECORD = {"layers": 3, "steps": 2, "heads": 4}  # how many to record, evenly spread
LIMIT = 4 * 2**30  # bytes that the capture may take
TARGET_DENSITY = 0.4
OUT = None  # every run makes a folder of its own in it; None is a temporary one

# %%
import workbench
from workbench import parameters, views
from workbench.capture import open_capture
from workbench.capture.recorder import Recorder
from workbench.config import AttentionConfig, SolAttnConfig, VisualGenConfig
from workbench.export import export_config
from workbench.profiles.compare import compare
from workbench.profiles.models import pipeline
from workbench.profiles.profile import read_file
from workbench.profiles.record import spread_plan
from workbench.profiles.text import between, distance_table, ran_table
from workbench.profiles.understood import understood_table
from workbench.profiles.verdict import verdict
from workbench.tune.run import run
from workbench.tune.settings import TuneSettings

parameters.between("TARGET_DENSITY", TARGET_DENSITY, 0, 1)
parameters.distinct("PROMPTS", PROMPTS)
parameters.distinct("SEEDS", SEEDS)
parameters.at_least("STEPS", STEPS, 2, "the first step of the profile `late` stays dense")
folder = parameters.new_folder(OUT)
model = pipeline(MODEL, size=SIZE, steps=STEPS, guidance=GUIDANCE, device=DEVICE)
print(model.title)
parameters.reachable("TARGET_DENSITY", TARGET_DENSITY, "SIZE", SIZE, model.place.keys)

# %% [markdown]
# ## Attach, and record
#
# `workbench.attach(pipe, config)` replaces the attention function inside the video's self-attention, nothing else, and puts it back
# at the end of the `with` block. `None` is dense: the video stays the same bit for bit, while the calls are counted. A `Recorder`
# looks on and keeps a part of them; how large the file will be is known before. `workbench record FOLDER` does the same.

# %%
spec = spread_plan(model, **RECORD, prompt=PROMPTS[0], seed=SEEDS[0]).spec(model)
calls = f"{len(spec.entries)} calls of {spec.grid.tokens:,} tokens"
print(f"{spec.total_bytes:,} bytes for {calls}, {spec.heads} heads in the model")

# Where guidance is one batch, these pipelines put the half with the text last.
limits = {"limit_bytes": LIMIT, "conditional": "last"}
with Recorder(folder / "mine.safetensors", spec, **limits) as recorder:
    with workbench.attach(model.pipe, None, observe=recorder.observe) as attached:
        recorded = model.run(PROMPTS[0], SEEDS[0])
print(attached.report())

# %% [markdown]
# ## Tune
#
# What `workbench tune` does, on the recorded calls: a density curve from one pass, real calls beside dense ones, and the sparsest
# `tau` whose mean density is not below the target.

# %%
capture = open_capture(folder / "mine.safetensors")
tuned = run(capture, TuneSettings(target_density=TARGET_DENSITY, device=DEVICE, repeats=0))

figure = views.new_figure(11, 3.4)
left, right = figure.subplots(1, 2)
views.draw_curve(
    left, tuned.curve.values, tuned.curve.per_head.flatten(0, -2), title="density, a line per head"
)
errors = [[row.relative_l2 for row in tuned.rows if row.value == tau] for tau in tuned.values]
views.draw_curve(
    right,
    tuned.values,
    torch.tensor(errors).T,
    ylabel="relative L2 error",
    title=f"error of real calls; tau {tuned.choice.value:.3f} is chosen",
)
views.picture(figure, "Density of every head, and error of real calls, against tau.")

# %% [markdown]
# ## Write it for a server, and read it back
#
# Two settings: `flat`, the tuned `tau` everywhere, as a file for SGLang, and `late`, a larger `tau` that begins after a dense phase
# and leaves the first layer dense, as a file for TensorRT-LLM. Servers count in steps, keys and layers; those of this model and this
# schedule are taken from the pipeline's own run.

# %%
tau, times = tuned.choice.value, model.place.times
late = SolAttnConfig(
    tau=tau + 0.5, dense_layers=(0,), disabled_until_timestep=times[len(times) // 4]
)
late = VisualGenConfig(
    attention_config=AttentionConfig(backend="CUTEDSL", sparse_attention_config=late)
)
(folder / "flat.json").write_text(export_config(tuned.config(), "sglang", model.place).text)
(folder / "late.yaml").write_text(export_config(late, "tensorrt_llm", model.place).text)
print((folder / "flat.json").read_text())

# %% [markdown]
# Reading back says what each layer will do. What cannot be honoured here (a sink, a field that nothing knows, a layer that the model
# lacks) is an error and not a setting less.

# %%
profiles = [read_file(folder / name, model.place) for name in ("flat.json", "late.yaml")]
understood_table(profiles[0], model)

# %%
understood_table(profiles[1], model)

# %% [markdown]
# ## Apply and compare
#
# Every prompt and seed is sampled dense, with each profile, and with a **control**: exact attention whose sums run in another order.
# What the control moves is rounding, the floor. What another seed of the same prompt moves is the scale.

# %%
found = compare(model, profiles, PROMPTS, SEEDS)
distance_table(found)

# %%
ran_table(found)

# %%
names = ["dense_control", *found.names, "other_seed"]
figure = views.new_figure(13, 3.8)
left, right = figure.subplots(1, 2)
views.draw_distances(
    left,
    names,
    [found.values(name, "relative_l2") for name in names],
    title="a point and a line per prompt and seed",
)
views.heatmap(
    right,
    [found.pairs[0].runs[name].densities for name in found.names],
    found.names,
    [f"{time:.2f}" for time in times],
    "density (exact / valid pairs)",
    row_label="",
    column_label="denoising time (1 = noisiest)",
    title="delivered density, mean over layers",
    limits=(0.0, 1.0),
)
views.picture(figure, "Distance from dense of every run, and density at every step.")

# %% [markdown]
# The difference is paired: what the seeds have in common drops out. Its interval decides, and the sentence says at what density.

# %%
print(*between(found), sep="\n")
print(verdict(found))

# %% [markdown]
# ## Without a notebook
#
# ```
# workbench apply flat.json late.yaml --model /models/Wan2.2-T2V-A14B-Diffusers --prompt "a red ball rolls over wet grass"
# workbench apply flat.json --check                # what it means for the small bundled model, layer by layer
# papermill notebooks/10_your_own_model.ipynb mine.ipynb -p MODEL /models/Wan2.2-T2V-A14B-Diffusers
# ```

# %%
# What was shown is true: recording changed nothing and the model is as it was, the profiles ran
# sparse in every sampling, the control was exact, and the file says what was tuned.
assert torch.equal(recorded, model.run(PROMPTS[0], SEEDS[0]))
assert capture.entries == sorted(spec.entries)
assert all(density < 1 for name in found.names for density in found.values(name, "density"))
assert all(pair.runs[name].count("sparse") > 0 for pair in found.pairs for name in found.names)
assert found.values("dense_control", "density") == [1.0] * len(found.pairs)
assert profiles[0].config.sparse_attention_config.tau == tau
assert not verdict(found).startswith("No verdict")
