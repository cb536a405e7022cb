"""Sweeps on a dask cluster: a real LocalCluster with two worker processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.sweep_inputs import results, small, threads, write_plan, write_weights
from workbench.sweep import load
from workbench.sweep.cluster import cluster_workers, workers_of
from workbench.sweep.session import run_sweep
from workbench.sweep.worker import run_content

needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="needs dask: pip install -e '.[dask]'"
)


@needs_dask
def test_a_dask_cluster_finds_the_same_and_fails_the_same(tmp_path: Path):
    from distributed import LocalCluster

    fields = small(
        write_weights(tmp_path), base={"algorithm": "sol_attn"}, grid={"dense_layers": [[0], [7]]}
    )
    written = write_plan(tmp_path / "plan.yaml", **fields)
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:
        workers = cluster_workers(cluster.scheduler_address)
        assert workers.slots == 2
        counts = run_sweep(written, tmp_path / "dask.db", workers)
    assert counts == {"pending": 0, "running": 0, "done": 2, "failed": 1}
    run_sweep(written, tmp_path / "local.db", threads(run_content, 1))
    assert results(tmp_path / "dask.db") == results(tmp_path / "local.db")
    reasons = [case.reason for case in load(tmp_path / "dask.db").cases if case.reason]
    assert reasons == [case.reason for case in load(tmp_path / "local.db").cases if case.reason]


@needs_dask
def test_a_cluster_without_workers_is_refused():
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=0, dashboard_address=None, silence_logs=50) as cluster:
        with Client(cluster) as client:
            with pytest.raises(ValueError, match="has no workers yet"):
                workers_of(client)


def test_without_dask_a_scheduler_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs dask.*\[dask\]"):
        cluster_workers("tcp://nowhere:1")
