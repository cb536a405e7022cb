"""The run folder of `workbench solve`: the setting, its density and error everywhere, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from workbench.calibrate.free_run import Delivery, sparse_config
from workbench.calibrate.probes import Probes
from workbench.calibrate.setting import Setting
from workbench.config import AttentionConfig, VisualGenConfig, dump_config
from workbench.run_folder import whole, write_provenance, write_results, write_summary
from workbench.views import draw_recall, heatmap, new_figure, save

COLUMNS = {
    "label": "class of the video",
    "seed": "of its noise",
    "layer": "0 = first",
    "step": "0 = noisiest",
    "time": "denoising time, 1 = noisiest",
    "batch": "1 is the half without the class, with guidance",
    "head": "0 = first",
    "value": "tau, or lambda (threshold_scale_factor / keys)",
    "density": "exact / valid pairs of the real call, on the dense run's q and k",
    "relative_l2": "|out - dense| / |dense| of the real call",
    "cosine": "between them",
    "max_abs": "largest absolute difference",
    "recall": "softmax mass inside the exact pairs",
    "best_recall": "the most that any router reaches with as many blocks in every row",
    "density_free_run": "of the same call (all heads) where errors feed forward",
}
SETTING = "setting.json"


def write(
    setting: Setting,
    delivery: Delivery,
    probes: Probes,
    folder: Path,
    *,
    summary: str,
    record: Mapping[str, object],
) -> Path:
    """Writes the setting, a row for each head of each real call, the picture and the provenance.

    ``config.yaml`` is written where one value serves all calls; the server has no field for more.

    Raises:
        FileExistsError: the folder exists.
    """
    with whole(folder) as part:
        (part / SETTING).write_text(json.dumps(setting.to_json(), indent=2) + "\n")
        config = server_config(setting, delivery.samples.tokens)
        if config is not None:
            (part / "config.yaml").write_text(dump_config(config))
        rows = (
            {**asdict(row), "density_free_run": float(delivery.density[0, row.layer, row.step])}
            for row in probes.rows
        )
        write_results(part, COLUMNS, rows)
        save(overview(delivery, probes), part / "overview.png")
        write_summary(part, summary, COLUMNS)
        write_provenance(part, record)
    return folder


def server_config(setting: Setting, keys: int) -> VisualGenConfig | None:
    """The setting in the server's schema; ``None`` where it has more than one value."""
    if setting.form.by != "global" or setting.form.shape != "constant":
        return None
    sparse = sparse_config(setting, setting.value(0, 0.0), keys)
    # Without a backend the server's default kernels would be dense; this one has both algorithms.
    attention = AttentionConfig(backend="CUTEDSL", sparse_attention_config=sparse)
    return VisualGenConfig(attention_config=attention)


def overview(delivery: Delivery, probes: Probes) -> Figure:
    """Free-run density and error of real calls by layer and step; recall against its ceiling."""
    density = delivery.density.mean(dim=0)
    figure = new_figure(15, 4.0)
    left, middle, right = figure.subplots(1, 3)
    steps, layers = range(density.shape[1]), range(density.shape[0])
    label = "density (exact / valid pairs)"
    heatmap(left, density, layers, steps, label, title="delivered in free runs")
    errors = probes.table("relative_l2")
    rows, columns = (range(size) for size in errors.shape)
    label = "relative L2 error against dense"
    heatmap(middle, errors, rows, columns, label, title="error of real calls on dense inputs")
    draw_recall(
        right,
        probes.column("recall"),
        probes.column("best_recall"),
        probes.column("density"),
        label="density (exact / valid pairs)",
        title="attention mass kept, a point per head and call",
    )
    return figure
