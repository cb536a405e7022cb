"""This project's kernels called below `attend`: lists made before, a vote switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from blockattn.problem import Problem, Result

Call = Callable[[], object]
Lists = tuple[Tensor, Tensor]


def make_lists(impl: str, problem: Problem) -> Lists:
    """Lists of the route of a problem, as the kernel of ``impl`` walks them."""
    if impl == "cute":
        from blockattn.impl.cute import launch

        return launch.route_lists(problem)
    from blockattn.impl.triton.lists import row_lists

    route = problem.route
    if route is None:
        raise ValueError("problem: has no route, so that there are no lists to make")
    return row_lists(route.words, route.grid[1])


def run_with(impl: str, problem: Problem, lists: Lists) -> Result:
    """The kernel of ``impl`` on lists made before."""
    if impl == "cute":
        from blockattn.impl.cute import launch as hopper

        return hopper.run(problem, lists)
    from blockattn.impl.triton import launch

    return launch.run(replace(problem, lists=lists))


def vote_calls(impl: str, vote: Problem, dense: Problem) -> dict[str, Call]:
    """``vote`` of one implementation, and ``no vote``: its dense attention as a call gets it.

    Triton's dense kernel is timed in the tiles of the vote as well (``no vote, its tiles``).
    """
    if impl == "cute":
        from blockattn.impl.cute import launch as hopper

        return {"vote": lambda: hopper.run(vote), "no vote": lambda: hopper.run(dense)}
    from blockattn.impl.triton import launch

    config = launch.configuration(
        launch.capability_of(vote.q.device), plain=False, skip_tile=vote.skip_tile
    )
    return {
        "vote": lambda: launch.run(vote),
        "no vote": lambda: launch.run(dense),
        "no vote, its tiles": lambda: launch.run(dense, config),
    }


def kernel_of_vote(vote: Problem) -> str:
    """The Triton kernel that serves a vote."""
    from blockattn.impl.triton import launch

    return "vote_groups" if launch.votes_in_groups(vote) else "attention"
