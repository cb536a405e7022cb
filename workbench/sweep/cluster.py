"""Sweeps on several machines, through dask: the one place that imports it.

One process, the one that owns the database, hands out cases to the workers of a dask cluster and
writes what they bring back. A worker only needs the same version of this package, and the weights
under the same path.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.sweep.run import Workers


def cluster_workers(address: str) -> Workers:
    """The workers of a running dask scheduler, each thread of theirs a case at a time.

    Args:
        address: such as ``tcp://host:8786``.

    Raises:
        ModuleNotFoundError: dask is not installed.
        OSError: no scheduler answers there in time. ValueError: it has no workers.
    """
    try:
        from distributed import Client
    except (ImportError, OSError) as error:
        raise ModuleNotFoundError(
            f"scheduler={address!r}: needs dask, which does not load here ({error}); "
            "pip install 'sparse-video-workbench[dask]'"
        ) from error
    client = Client(address)
    return replace(workers_of(client), close=client.close)


def workers_of(client: object) -> Workers:
    """The workers of a ``distributed.Client``, for clusters made in Python.

    Raises:
        ValueError: it has no workers yet; wait for them with ``client.wait_for_workers(n)``.
    """
    threads = client.nthreads()  # pyright: ignore[reportAttributeAccessIssue]
    if not threads:
        raise ValueError("scheduler: has no workers yet; start some, or wait for them")
    # A case is no pure function to dask: a failed one may be run again.
    executor = client.get_executor(pure=False)  # pyright: ignore[reportAttributeAccessIssue]
    return Workers(executor, sum(threads.values()))
