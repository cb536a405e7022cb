# %% [markdown]
# # 4. Quantised attention: what each format costs (emulated)
#
# ← [3. VSA](03_vsa.ipynb)  ·  [5. A whole video](05_whole_video.ipynb) →
#
# **What you learn.** How MXFP8, NVFP4 and FP8 store queries, keys and values, how large the error of each is for every
# layer, step and head, what smooth-QK and finer scales change, and how the errors of quantisation and sparsity add up.
#
# **What you need.** Sol-Attn and SkipSoftmax from notebooks 1 and 2; the same bundled attention calls.
#
# **Emulated.** The operands are encoded and decoded bit for bit as the formats define, and then multiplied in a wider
# one, because no matrix unit here takes block-scaled operands. The errors are those of the formats; **nothing here says
# anything about speed**.
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
TOKEN, HEAD = 700, None  # whose key is shown; None is the last head
CHANNELS = 64
QK_DTYPES = ["bf16", "mxfp8", "nvfp4"]
TAU = 1.0  # of Sol-Attn
THRESHOLD = 0.25  # lambda of SkipSoftmax

# %%
from blockattn import checks, quantised_attention, sol_route
from blockattn.quant_formats import quantise_mxfp8, quantise_nvfp4
from workbench import parameters, views
from workbench.capture import open_capture
from workbench.mechanisms.combinations import combination_errors
from workbench.mechanisms.formats import (
    ERROR_COLUMNS,
    SIZE_COLUMNS,
    Format,
    format_errors,
    format_sizes,
)

capture = open_capture(CAPTURE)
HEAD = parameters.head("HEAD", HEAD, capture.head_indices)
checks.integer("TOKEN", TOKEN, maximum=capture.grid.tokens - 1)
capture

# %% [markdown]
# ## The formats
#
# A block-scaled format stores small elements and one scale for each block of the head dim. **MXFP8** has 8-bit elements and a
# power of two per 32 channels, **NVFP4** 4-bit elements, an 8-bit scale per 16 channels and one for the whole tensor. Values (V) are
# **FP8** with one scale for the tensor, or one per head and channel. The bits are counted from the encoded tensors.

# %%
call = capture.load(*capture.entries[0]).to(DEVICE)
views.Table(SIZE_COLUMNS, format_sizes(call.q, call.k, call.v), "Bits of a value, scales included")

# %% [markdown]
# ## What rounding does to one key
#
# The first channels of one key, and what each format makes of them. A scale fits the largest value of its block; e2m1 has only 0, 0.5, 1, 1.5, 2, 3, 4, 6
# and their negatives, so small values beside a large one fall to zero.

# %%
key = call.k[:, TOKEN : TOKEN + 1, HEAD : HEAD + 1]
after = {
    "MXFP8 (emulated)": quantise_mxfp8(key).dequantise()[0, 0, 0, :CHANNELS],
    "NVFP4 (emulated)": quantise_nvfp4(key).dequantise()[0, 0, 0, :CHANNELS],
}
figure = views.new_figure(11, 3.2)
title = f"key of token {TOKEN}, layer {call.layer}, step {call.step}, head {HEAD} (emulated)"
values = key[0, 0, 0, :CHANNELS].float()
views.draw_rounding(figure.subplots(), values, after, 16, title=title)
views.picture(figure, "A key before and after each format (emulated): NVFP4 is visibly coarser.")

# %% [markdown]
# ## Error of every format
#
# Each format runs on each recorded call and is compared with dense attention over the unquantised operands. **Smooth-QK** takes the mean
# key off and moves range from k to q before they are encoded (on by default for MXFP8 and NVFP4); softmax does not see it.

# %%
formats = [
    Format("bf16"),
    Format("mxfp8"),
    Format("mxfp8", smooth=False),
    Format("mxfp8", "channel"),
    Format("nvfp4"),
    Format("nvfp4", smooth=False),
    Format("nvfp4", "channel"),
]
errors = format_errors(capture, formats, device=DEVICE)

figure = views.new_figure(11, 4.2)
title = "Error of every format, call and head (emulated)"
views.draw_formats(
    figure.subplots(), errors.relative_l2, errors.names, errors.calls, errors.label, title=title
)
views.picture(figure, "Error of each format on every call and head (emulated), with its mean.")

# %%
views.Table(ERROR_COLUMNS, errors.rows(), "All recorded calls and heads (emulated)")

# %% [markdown]
# ## Per layer, step and head
#
# The same errors, cell by cell. On the bundled capture layers and heads differ several times over, one scale or many for V hardly
# matter, and smoothing helps some heads and hurts others: choose per model, not by name.

# %%
figure = views.new_figure(10, 4.2)
views.heatmap(
    figure.subplots(),
    errors.relative_l2.flatten(1).T,
    errors.cells,
    errors.columns,
    errors.label,
    row_label="",
    column_label="",
    title="Error per layer, step and head (emulated)",
)
views.picture(
    figure, "Relative L2 error of every format (emulated), a row per layer, step and head."
)

# %% [markdown]
# ## Probabilities in FP8
#
# A kernel with FP8 values also rounds the probabilities P before they meet V. By default this workbench does not, and the trace says
# so; the reference implementation can (`round_p=True`).

# %%
pairs = [Format(name, round_p=p) for name in QK_DTYPES for p in (False, True)]
rounded = format_errors(capture, pairs, device=DEVICE)
views.Table(ERROR_COLUMNS, rounded.rows(), "All recorded calls and heads (emulated)")

# %% [markdown]
# ## Together with a sparse mechanism
#
# Quantised operands go with any route, tail and skip threshold. Sol-Attn routes on the original q and k; the summaries it adds and the vote of
# SkipSoftmax see the quantised ones. Where the two errors are independent their squares add, so the larger one decides.

# %%
call = capture.load(*capture.entries[:2][-1]).to(DEVICE)
together = combination_errors(
    call.q,
    call.k,
    call.v,
    [Format("bf16"), Format("mxfp8"), Format("nvfp4")],
    tau=TAU,
    threshold=THRESHOLD,
)
figure = views.new_figure(8.4, 3.4)
views.heatmap(
    figure.subplots(),
    together.relative_l2,
    together.rows,
    together.columns,
    errors.label,
    row_label="",
    column_label="",
    title=f"Mechanism x format, layer {call.layer}, step {call.step} (emulated)",
)
views.picture(figure, "Error of each mechanism in each format (emulated).")

# %% [markdown]
# What ran is never in doubt: the trace names the mechanism, the implementation, the density and what was emulated.

# %%
route = sol_route(call.q, call.k, tau=TAU)
out, trace = quantised_attention(
    call.q, call.k, call.v, qk_dtype="nvfp4", route=route, with_tail=True, return_trace=True
)
print(trace)

# %% [markdown]
# ## On a whole video
#
# ```
# workbench sample --algorithm quant --qk-dtype nvfp4
# workbench sample --algorithm skip_softmax --qk-dtype mxfp8
# ```

# %%
# What was shown is true: 4 bits are wrong by more than 8, those by more than FP8 values alone; all
# of it was emulated and says so; the sparse calls were sparse, and quantising changed the output.
by_name = dict(zip(errors.names, errors.mean.tolist()))
assert by_name[formats[4].name] > by_name[formats[1].name] > by_name[formats[0].name] > 0
assert all(errors.emulated)
assert "fp8 P" in rounded.emulated[-1]
assert "nvfp4 QK" in trace.emulated
assert trace.density < 1
assert bool((together.relative_l2[:, -1] > together.relative_l2[:, 0]).all())
assert bool((together.density[1:] < 1).all())
