"""Resumable sweeps: many attention settings x seeds x prompts, results in one SQLite file."""

from workbench.sweep.metrics import METRICS, Metric
from workbench.sweep.table import SweepCase, SweepTable, load

__all__ = ["METRICS", "Metric", "SweepCase", "SweepTable", "load"]
