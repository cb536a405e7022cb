"""How groups of the CuTe kernel find their entries in a shared list by counting.

The functions of the kernel run here as plain Python on numbers; what they find is compared with
lists that are spelled out and with barriers whose phases are counted.
"""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest

WHY = "needs the CuTe DSL stack: pip install -e '.[cute-latest]' or '.[cute]'"
pytest.importorskip("cutlass", reason=WHY)

from blockattn.impl.cute import items  # noqa: E402
from blockattn.impl.cute.shapes import KINDS, Shapes  # noqa: E402
from blockattn.impl.cute.variant import Variant  # noqa: E402


def copy_of_items() -> Any:
    """The module once more: the first compilation in a process rewrites the functions it uses."""
    spec: Any = importlib.util.spec_from_file_location("items_as_python", items.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UNTOUCHED = copy_of_items()


def plain(name: str) -> Any:
    """A function of the kernel, not compiled."""
    return getattr(UNTOUCHED, name).__wrapped__


def kinds_of(both: int, first: int, second: int) -> list[int]:
    """Whose every entry of a list is: 0 of both groups, 1 of the first, 2 of the second."""
    in_turn = zip_longest([1] * first, [2] * second)
    return [0] * both + [kind for two in in_turn for kind in two if kind is not None]


COUNTS = [(b, f, s) for b in (0, 1, 3) for f in (0, 1, 2, 5) for s in (0, 1, 2, 5)]


@pytest.mark.parametrize(("both", "first", "second"), COUNTS)
def test_the_kind_of_a_place_is_that_of_the_list(both, first, second):
    want = kinds_of(both, first, second)
    found = [plain("entry_kind")(n, both, first, second) for n in range(len(want))]
    assert found == want


def own_entries(stages: int, group: int, counts: list[tuple[int, int, int]], ahead=True):
    """What a group finds for each item of a program, and one entry too many, in turn."""
    shapes = SimpleNamespace(stages=stages, ahead=ahead)
    use, phases = 0, 0
    for both, first, second in counts:
        total = both + (second if group else first)
        at = SimpleNamespace(both=both, group=group, fewer=min(first, second), total=total)
        stage, found = use % stages - 1, []
        for n in range(total + 2):  # the walk looks two entries ahead
            entry, phases = plain("next_entry")(shapes, at, n, stage, phases)
            stage = entry[0]
            found.append(tuple(int(x) for x in entry))
        assert all(0 <= entry[0] < stages for entry in found)
        yield found[:total]
        use += both + first + second


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("stages", "ahead"), [(5, True), (6, True), (8, True), (2, False), (3, False), (6, False)]
)
def test_a_group_waits_for_its_own_entries_and_no_other(stages, ahead, group):
    """Tiles of 128 keys, which are not multiplied ahead, are all of both groups."""
    draw = random.Random(stages * 2 + group)
    counts = [COUNTS[0], *(draw.choice(COUNTS) for _ in range(300))]
    if not ahead:
        counts = [(both, 0, 0) for both, _, _ in counts]
    # Each filling of a stage completes a phase of the barrier of its kind.
    use, fillings = 0, Counter()
    for (both, first, second), found in zip(counts, own_entries(stages, group, counts, ahead)):
        want = []
        for kind in kinds_of(both, first, second):
            stage = use % stages
            if kind in (0, 1 + group):
                want.append((stage, stage * KINDS + kind, fillings[stage, kind] % 2))
            fillings[stage, kind] += 1
            use += 1
        assert found == want


@pytest.mark.parametrize("lengths", [False, True])
def test_causal_groups_get_every_tile_that_they_see_and_share_what_both_see(lengths):
    shapes = Shapes.of(Variant(causal=True, lengths=lengths))
    for keys in (1, 63, 64, 65, 128, 129, 500):
        for pair in range(5):
            call = SimpleNamespace(keys=keys)
            both, first, second = plain("entry_counts")(shapes, call, (pair, 0, 0))
            tiles = range(0, keys, shapes.columns)
            seen = [sum(start <= pair * 128 + g * 64 + 63 for start in tiles) for g in range(2)]
            assert (both + first, both + second) == tuple(seen)
            assert min(first, second) == 0


def test_three_causal_groups_get_every_tile_that_one_of_them_sees():
    shapes = Shapes.of(Variant(causal=True, skip=64))
    assert shapes.groups == 3
    for keys in (1, 64, 128, 129, 500, 1000):
        for item in range(5):
            counts = plain("entry_counts")(shapes, SimpleNamespace(keys=keys), (item, 0, 0))
            last = item * 192 + 191
            assert counts == (sum(start <= last for start in range(0, keys, shapes.columns)), 0, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_every_item_is_one_pair_of_one_head_and_causal_ones_begin_with_the_longest(causal):
    shapes, call = Shapes.of(Variant(causal=causal)), SimpleNamespace(pairs=3, heads=4)
    places = [plain("item_place")(shapes, call, item) for item in range(3 * 4 * 2)]
    assert len(set(places)) == len(places)
    assert {
        (pair, head, batch) for pair in range(3) for head in range(4) for batch in range(2)
    } == set(places)
    assert [place[0] for place in places[:3]] == ([2, 1, 0] if causal else [0, 1, 2])
