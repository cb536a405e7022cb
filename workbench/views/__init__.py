"""Pictures as plain functions: each draws data into a given Axes or Figure, without pyplot.

``new_figure`` makes a figure, ``save`` writes it, ``picture`` shows it in a notebook, ``to_png``
gives its bytes.
"""

from workbench.views.agreement import draw_agreement, draw_exact
from workbench.views.bench import draw_break_even, draw_rates, draw_split, draw_targets
from workbench.views.calibration import (
    draw_delivery,
    draw_fit,
    draw_recall,
    draw_residuals,
    draw_transfer,
)
from workbench.views.coarse import draw_coarse
from workbench.views.cubes import cubes_size, draw_cubes, draw_slots
from workbench.views.curve import draw_curve
from workbench.views.distances import draw_distances
from workbench.views.formats import draw_formats, draw_rounding
from workbench.views.frames import draw_frames, frames_size
from workbench.views.heads import draw_heads
from workbench.views.heat import heatmap
from workbench.views.histogram import draw_histogram
from workbench.views.mask import draw_mask, looks
from workbench.views.methods import draw_methods
from workbench.views.orders import draw_orders
from workbench.views.pareto import draw_pareto
from workbench.views.route_map import draw_route
from workbench.views.rows import draw_rows
from workbench.views.schedule import describe_schedule, draw_schedule
from workbench.views.schedule_map import draw_schedule_map
from workbench.views.skip_map import draw_skip
from workbench.views.style import Picture, new_figure, picture, save, to_png
from workbench.views.table import Table
from workbench.views.threshold_units import add_threshold_units, units_table
from workbench.views.tradeoff import draw_tradeoff
from workbench.views.videos import Strip, draw_videos, videos_size

__all__ = [
    "Picture",
    "Strip",
    "Table",
    "add_threshold_units",
    "cubes_size",
    "describe_schedule",
    "draw_agreement",
    "draw_break_even",
    "draw_coarse",
    "draw_cubes",
    "draw_curve",
    "draw_delivery",
    "draw_distances",
    "draw_exact",
    "draw_fit",
    "draw_recall",
    "draw_residuals",
    "draw_transfer",
    "draw_formats",
    "draw_frames",
    "draw_heads",
    "draw_histogram",
    "draw_mask",
    "draw_methods",
    "draw_orders",
    "draw_pareto",
    "draw_rates",
    "draw_rounding",
    "draw_route",
    "draw_rows",
    "draw_schedule",
    "draw_schedule_map",
    "draw_skip",
    "draw_split",
    "draw_targets",
    "draw_slots",
    "draw_tradeoff",
    "draw_videos",
    "frames_size",
    "heatmap",
    "looks",
    "new_figure",
    "picture",
    "save",
    "to_png",
    "units_table",
    "videos_size",
]
