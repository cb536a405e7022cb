"""ipywidgets around the plain functions of workbench.decisions and workbench.views."""

from workbench.widgets.session import TunerState
from workbench.widgets.tau_tuner import TauTuner

__all__ = ["TauTuner", "TunerState"]
