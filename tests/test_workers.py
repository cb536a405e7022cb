"""Work is shared over threads once each, under the caller's modes, and errors come back."""

from __future__ import annotations

import threading

import pytest
import torch

from blockattn import attend, sol_attention, sol_route
from blockattn.impl.workers import share


def test_every_item_is_done_once_with_single_threaded_torch():
    done, counts = [], set()

    def work(items):
        for item in items:
            done.append(item)
            counts.add(torch.get_num_threads())

    before = torch.get_num_threads()
    share(range(100), work)
    assert sorted(done) == list(range(100))
    assert counts == {1}
    assert torch.get_num_threads() == before


def test_an_error_of_a_thread_is_raised_and_the_thread_count_restored():
    def work(items):
        for item in items:
            if item == 7:
                raise KeyError("seven")

    before = torch.get_num_threads()
    with pytest.raises(KeyError, match="seven"):
        share(range(20), work)
    assert torch.get_num_threads() == before


def test_a_thread_started_later_has_all_cores_again():
    share(range(4), lambda items: list(items))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [torch.get_num_threads()]


@pytest.mark.parametrize("inference", [False, True])
def test_inputs_that_want_gradients_are_served_where_gradients_are_off(inference):
    q = torch.randn(1, 200, 2, 16, requires_grad=True)
    with torch.inference_mode(inference), torch.no_grad():
        out = sol_attention(q, q, q, impl="eager")
    assert not out.requires_grad
    assert out.is_inference() == inference


def test_results_do_not_depend_on_the_number_of_threads():
    q, k, v = (torch.randn(1, 300, 2, 64) for _ in range(3))
    route, before = sol_route(q, k), torch.get_num_threads()
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(attend(q, k, v, route, impl="eager"))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_calls_from_several_threads_at_once_are_right():
    q, k, v = (torch.randn(1, 300, 2, 64) for _ in range(3))
    expected, outs = sol_attention(q, k, v, impl="eager"), []
    threads = [
        threading.Thread(target=lambda: outs.append(sol_attention(q, k, v, impl="eager")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 4
    assert all(torch.equal(out, expected) for out in outs)
