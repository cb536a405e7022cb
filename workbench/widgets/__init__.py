"""ipywidgets around the plain functions of workbench.decisions and workbench.views."""

from workbench.widgets.compare import Compare
from workbench.widgets.doctor import Doctor
from workbench.widgets.route_viewer import RouteViewer
from workbench.widgets.schedule_editor import ScheduleEditor
from workbench.widgets.session import TunerState
from workbench.widgets.sweep_explorer import SweepExplorer
from workbench.widgets.tau_tuner import TauTuner
from workbench.widgets.threshold_tuner import ThresholdTuner
from workbench.widgets.time_split import TimeSplit

__all__ = [
    "Compare",
    "Doctor",
    "RouteViewer",
    "ScheduleEditor",
    "SweepExplorer",
    "TauTuner",
    "ThresholdTuner",
    "TimeSplit",
    "TunerState",
]
