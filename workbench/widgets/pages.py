"""A panel by its name: what `workbench serve` puts on a page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

import anywidget
import ipywidgets as widgets
import traitlets

from workbench.capture import open_capture
from workbench.masks import capture_masks
from workbench.serve import TITLES, read_request
from workbench.widgets.compare import Compare
from workbench.widgets.doctor import Doctor
from workbench.widgets.route_viewer import RouteViewer
from workbench.widgets.schedule_editor import ScheduleEditor
from workbench.widgets.sweep_explorer import SweepExplorer
from workbench.widgets.tau_tuner import TauTuner
from workbench.widgets.threshold_tuner import ThresholdTuner
from workbench.widgets.time_split import TimeSplit

MAKERS: dict[str, Callable[[str | None], widgets.Widget]] = {
    "tau": lambda file: TauTuner(open_capture(file)),
    "threshold": lambda file: ThresholdTuner(open_capture(file)),
    "masks": lambda file: RouteViewer(capture_masks(open_capture(file))),
    "compare": lambda file: Compare(open_capture(file)),
    "time": lambda file: TimeSplit(open_capture(file)),
    "schedule": lambda file: ScheduleEditor(),
    "sweep": lambda file: SweepExplorer(Path(file or "")),
    "doctor": lambda file: Doctor(),
}


class TabTitle(anywidget.AnyWidget):
    """Names the browser's tab, which else has the name of the page's notebook."""

    _esm = "export default { render({ model }) { document.title = model.get('text'); } };"

    text = traitlets.Unicode("").tag(sync=True)


def page() -> widgets.Widget:
    """The panel that the process was asked for, under its title."""
    name, file = read_request()
    style = "font-size:20px;font-weight:bold;line-height:1.6"
    heading = widgets.HTML(f'<div style="{style}" role="heading">{escape(TITLES[name])}</div>')
    parts = [TabTitle(text=TITLES[name]), heading, MAKERS[name](file)]
    return widgets.VBox(parts, layout={"margin": "8px 24px"})
