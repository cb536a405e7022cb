# %% [markdown]
# # 7. From a sweep to a server's file
#
# ← [6. Calibrate and solve](06_calibrate_and_solve.ipynb)  ·  [8. A capture of your own](08_your_own_capture.ipynb) →
#
# **What you learn.** How many settings are compared on the same noise in one resumable database; which of them no other
# one beats (the Pareto front); how quality gates and the dense-against-dense control decide; and how the chosen setting
# leaves for each serving stack, or why it cannot.
#
# **What you need.** Videos, control and schedules from notebook 5; the bundled video model.
#
# **How long.** Under a minute on two CPU cores, with the small values below.

# %% tags=["parameters"]
import torch

# Parameters: small values without a GPU.
GPU = torch.cuda.is_available()
if not GPU:
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread costs time
PLAN = {
    "name": "front",
    "seeds": [0, 1, 2, 3] if GPU else [0, 1],
    "prompts": ["disc", "ring"] if GPU else ["disc"],
    "sampling": {"grid": [8, 16, 16], "steps": 12} if GPU else {"grid": [4, 8, 8], "steps": 3},
    "base": {"algorithm": "sol_attn", "disabled_until_timestep": 1.0},
    "grid": {"tau": [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0] if GPU else [-0.5, 0.5, 1.5]},
    "cases": [{"algorithm": "skip_softmax", "threshold_scale_factor": 400 if GPU else 40}],
}
GATES = ["psnr=20", "relative_l2=0.5"]

# %%
import math
import tempfile
from pathlib import Path

import yaml

from workbench import sweep, views
from workbench.export import Deployment, export_all, export_config, import_config
from workbench.export.commands import targets_table
from workbench.pareto import Gate, choose, front
from workbench.sweep.choice import config_text, draw
from workbench.sweep.front import configuration, front_table, points
from workbench.sweep.plan import make_plan
from workbench.sweep.run import local_workers, visible_gpus
from workbench.sweep.session import run_sweep
from workbench.widgets import SweepExplorer

folder = Path(tempfile.mkdtemp())
plan, database = folder / "plan.yaml", folder / "front.db"
plan.write_text(yaml.safe_dump(PLAN, sort_keys=False))
cases = make_plan(PLAN).cases()
[case.setting for case in cases[: len(cases) // len(PLAN["seeds"]) // len(PLAN["prompts"])]]

# %% [markdown]
# The plan names settings (a grid over a base, and some written out) and runs each with every seed and prompt. The
# control, dense against dense by a second exact implementation, is always among them.
#
# ## Run it
#
# Each case is a process of its own and one row of the database, written whole when it ends. A run that is killed goes on
# where it stopped, and a database refuses a plan that has changed.

# %%
first = run_sweep(plan, database, local_workers(gpus=visible_gpus(cases)), command=["notebook 07"])
again = run_sweep(plan, database, local_workers(gpus=visible_gpus(cases)), command=["notebook 07"])
first, again

# %% [markdown]
# The second call had nothing left to do.
#
# ## Gates and front
#
# A gate is a limit that the *worst* video of a setting has to keep. A setting is dominated when another one costs no more and is no
# worse, and better in one of them. The gain here is all block pairs / exact ones: it follows from the
# setting alone.

# %%
gates = [Gate.read(text) for text in GATES]
table = sweep.load(database)
by_density = points(table, "psnr", gates, cost="density")
front_table(by_density, "psnr", "density")

# %%
views.picture(
    draw(by_density, "psnr", gates, "density"),
    "PSNR against dense over all / exact block pairs: front, dominated settings, gate, control.",
)

# %% [markdown]
# The same picture to point at: hover for the full configuration of a setting, click to open it.

# %%
explorer = SweepExplorer(database, gates=", ".join(GATES))
explorer.cost.value = "density"
explorer.flush()
explorer

# %% [markdown]
# **Read the control first.** What it differs from dense is rounding; a setting is judged by what it loses beyond that. A gate that
# the control misses could not be passed by anything.
#
# Time is another matter: the same settings, but measured attention time beside the dense twin of the same process, routing
# included. On a CPU with so few tokens sparse attention gains nothing, and the table says so: what counts is the
# time on the GPU that will serve (the same plan, run there).

# %%
front_table(points(table, "psnr", gates, cost="attention"), "psnr", "attention")

# %% [markdown]
# ## The chosen setting
#
# The cheapest setting of the front that passes every gate, as the configuration that all commands here read.

# %%
best = choose(by_density, "psnr")
config = configuration(table, best.name)
print(config_text(table, best, gates, "psnr", "density"))

# %% [markdown]
# ## To the servers
#
# Some servers count what a configuration does not name: SGLang and vLLM-Omni count dense *steps*, which depend on the schedule, and
# ComfyUI's node numbers blocks. The deployment tells them. What a target cannot say is an error with
# its reason, never a field that is quietly left out.

# %%
sampling = cases[-1].sampling.settings(seed=0, prompt="disc")
place = Deployment(times=tuple(sampling.times), keys=math.prod(sampling.grid), layers=6)
targets_table(config, place)

# %%
made = export_config(config, "sglang", place)
print(made.text, *made.notes, sep="\n")

# %% [markdown]
# ## Without a notebook
#
# ```
# workbench sweep run plan.yaml --out front.db
# workbench sweep front front.db --gate psnr=30 --gate ssim=0.9 --figure front.png --choose chosen.yaml
# workbench export chosen.yaml
# workbench export chosen.yaml --to sglang --times 1.0,0.9,0.75,0.5
# workbench import sglang.json --from sglang --times 1.0,0.9,0.75,0.5
# ```

# %%
# What was shown is true: nothing failed or ran twice, the choice is on the front and passes, and
# what was exported means the same when it is read back.
assert first == again
assert first["done"] == len(cases)
assert best in front(by_density, "psnr")
assert explorer.problem == ""
assert all(gate.passes(case.metrics[gate.metric]) for gate in gates for case in table.of(best.name))
assert all(p.quality < c.quality for p in by_density for c in by_density if c.control > p.control)
sparse = config.attention_config.sparse_attention_config
back = import_config(made.text, "sglang", place).config
assert back.attention_config.sparse_attention_config == sparse
assert sum(hasattr(target, "text") for target in export_all(config, place).values()) >= 2
