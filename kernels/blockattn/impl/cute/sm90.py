"""Attention on Hopper (sm_90a): full range or route, tail, padded blocks, causal, LSE (CuTe DSL).

Plan. A program is persistent and takes items (GROUPS neighbouring query blocks, head, batch) as it
gets ready for them. It has a warp group of which one warp fetches Q and K and another V, and two or
three that compute, each 64 query rows of the item (with a route, a query block of it).
  Tiles     K and V of COLUMNS keys: 64 for routes and padded blocks, else 128. Q of 64 rows a
            group.
  Shared    rings of STAGES tiles of K and of V, and Q of the groups, whose place the output takes:
            at D = 128 224 kB with 6 stages of 64 keys or 3 of 128; with three groups 176 kB, 2 of
            128.
  Registers 24 for the fetching group. Two groups have 240: 64 accumulate the output (D = 128); two
            sets of 32, or one of 64, hold scores, as many bits of two sets probabilities; 32 hold Q
            where it is an operand from registers. With votes on 128 x 128 there are two sets of 64.
            Three groups have 160: 64 for the output and 64 for scores, which probabilities replace.
  Sharing   All groups walk one ring. A pair's entries come in the order: summaries of the tail,
            key blocks of both query blocks, then those of one alone in turn. From the three counts
            a group knows the stage of its next entry and looks at no other; the producer releases
            an entry of one group on behalf of the other.
  Overlap   With two groups products run under the softmax of the same group (``walk``,
            ``together``, ``ahead``), the first scores of an item by blocks while the one before is
            written; the other group fills what is left. What limits a group is its chain of
            instructions, so that one looks at no maxima where nothing votes (``softmax``), computes
            places of entries early (``ahead``) and reads a verdict late (``together``). Where each
            group votes alone (``alone``), three share the matrix unit and wait for their products.
Who waits for whom (mbarriers; a phase per use of a stage, 4 warps of each group to release):
  item_full[n]    groups and the warp that fetches V for the item that the other begins;
                  item_empty[n] the other way
  q_full[g]       group g for its Q; q_empty[g] producer until its 4 warps have read it, and the
                  output that lies there has left
  k_full[s][kind] groups for K, and its number; kind: entry of all groups, of the first, of the
                  second, because a group cannot tell phases in which it has no part
  k_empty[s]      producer until all groups have multiplied
  v_full[s][kind], v_empty[s] likewise for V
  vote            warps of both groups for all notes on an entry, where they decide together
Named barriers (numbers in ``shapes``): a group around its output tile, which leaves by TMA; whose
turn it is to multiply; padding of V blanked; a vote on tiles of 64 x 64.
The kernel comes up while the one before it ends (programmatic dependent launch), and waits for it.
The reference of a row is kept in raw units (q . k); the scale enters inside exp2 only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from blockattn.impl.cute import wgmma
from blockattn.impl.cute.consumer import consume
from blockattn.impl.cute.producer import produce_keys, produce_values
from blockattn.impl.cute.shapes import BARRIERS, GROUP, ROWS, SLOTS, WORDS, Shapes
from blockattn.impl.cute.variant import Variant

LOG2_E = 1.4426950408889634


class Attention:
    """The kernel of one variant; calling it (under ``cute.compile``) launches it.

    Args:
        variant: what is compiled in.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.shapes = Shapes.of(variant)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        pair_index: cute.Tensor | None,
        pair_count: cute.Tensor | None,
        words: cute.Tensor | None,
        k_mean: cute.Tensor | None,
        v_sum: cute.Tensor | None,
        tail_lengths: cute.Tensor | None,
        block_lengths: cute.Tensor | None,
        dropped: cute.Tensor | None,
        scale: Any,
        scale_output: Any,
        limit: Float32,
        programs: Int32,
        counter: cute.Tensor,
        stream: Any,
    ):
        """Launches ``programs`` persistent programs (one a processor) on ``stream``.

        Args:
            q, k, v, out: ``[B, T, H, D]``.
            lse: float32 ``[B, H, T]``.
            pair_index, pair_count: as :func:`blockattn.impl.cute.lists.shared_lists` makes them.
            words: of the route, int32 ``[B, H, Nq, W]``, for the tail.
            k_mean, v_sum, tail_lengths: summaries ``[B, N, Hk, D]`` and int32 ``[N]``.
            block_lengths: valid keys of each 64-key block, int32 ``[N]``.
            dropped: int8 ``[B, H, Mq, Mk]`` of zeros; dropped tiles become 1.
            scale, scale_output: numbers or float32 tensors ``[1]``.
            limit: log2 of the skip threshold.
            counter: int32 ``[1]``, zero, and zero again afterwards: numbers that programs took.
        """
        shapes = self.shapes
        q, k, v, out = (_tokens_first(x) for x in (q, k, v, out))
        rows, tile = (ROWS, shapes.variant.dim), (shapes.columns, shapes.variant.dim)
        one = cute.select(shapes.query_layout(), mode=[0, 1])
        stage = cute.select(shapes.key_layout(), mode=[0, 1])
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_q, q_tma = cpasync.make_tiled_tma_atom(load, q, one, rows)
        load_k, k_tma = cpasync.make_tiled_tma_atom(load, k, stage, tile)
        load_v, v_tma = cpasync.make_tiled_tma_atom(load, v, stage, tile)
        store = cpasync.CopyBulkTensorTileS2GOp()
        store_o, out_tma = cpasync.make_tiled_tma_atom(store, out, one, rows)
        load_mean = mean_tma = load_sum = sum_tma = None
        if const_expr(self.variant.tail):
            k_mean, v_sum = _tokens_first(k_mean), _tokens_first(v_sum)
            load_mean, mean_tma = cpasync.make_tiled_tma_atom(load, k_mean, stage, tile)
            load_sum, sum_tma = cpasync.make_tiled_tma_atom(load, v_sum, stage, tile)
        pairs = cute.ceil_div(q.shape[0], shapes.groups * ROWS)
        items = pairs * q.shape[2] * q.shape[3]
        kernel: Any = self._kernel
        kernel(
            load_q, q_tma, load_k, k_tma, load_v, v_tma, store_o, out_tma,
            load_mean, mean_tma, load_sum, sum_tma,
            lse, pair_index, pair_count, words, tail_lengths, block_lengths, dropped,
            scale, scale_output, limit, counter, q.shape[0], k.shape[0], pairs, items,
            q.shape[2], q.shape[2] // k.shape[2],
        ).launch(
            grid=(cutlass.min(programs, items), 1, 1),
            block=((shapes.groups + 1) * GROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def _kernel(
        self,
        load_q: cute.CopyAtom, q: cute.Tensor,
        load_k: cute.CopyAtom, k: cute.Tensor,
        load_v: cute.CopyAtom, v: cute.Tensor,
        store_o: cute.CopyAtom, out: cute.Tensor,
        load_mean: cute.CopyAtom | None, mean: cute.Tensor | None,
        load_sum: cute.CopyAtom | None, v_sum: cute.Tensor | None,
        lse: cute.Tensor | None,
        pair_index: cute.Tensor | None, pair_count: cute.Tensor | None,
        words: cute.Tensor | None, tail_lengths: cute.Tensor | None,
        block_lengths: cute.Tensor | None, dropped: cute.Tensor | None,
        scale: Any, scale_output: Any, limit: Float32, counter: cute.Tensor,
        queries: Int32, keys: Int32, pairs: Int32, items: Int32, heads: Int32, group: Int32,
    ):  # fmt: skip
        shapes = self.shapes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (load_q, load_k, load_v, store_o, load_mean, load_sum):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(shapes.storage())
        # Made outside every branch, as both branches use them.
        bars = SimpleNamespace(**{name: getattr(storage, name).data_ptr() for name in BARRIERS})
        s_q = _shared(storage.q, shapes.query_layout())
        s_k, s_v = (_shared(x, shapes.key_layout()) for x in (storage.k, storage.v))
        call = SimpleNamespace(
            bars=bars, entry=storage.entry.get_tensor(cute.make_layout(shapes.stages)),
            item=storage.item.get_tensor(cute.make_layout((WORDS, SLOTS))), counter=counter,
            pair_index=pair_index, pair_count=pair_count, words=words, lse=lse,
            notes=storage.notes.get_tensor(cute.make_layout(2 * shapes.readers)),
            tail_lengths=tail_lengths, block_lengths=block_lengths, dropped=dropped, limit=limit,
            queries=queries, keys=keys, pairs=pairs, items=items, heads=heads, group=group,
        )  # fmt: skip
        _init_barriers(shapes, bars, warp)
        cute.arch.griddepcontrol_wait()  # until here nothing is read that the kernel before writes
        if warp < GROUP // cute.arch.WARP_SIZE:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                sources = (load_q, q), (load_k, k), (load_mean, mean)
                produce_keys(shapes, call, s_q, s_k, sources)
            elif warp == 1:
                produce_values(shapes, call, s_v, ((load_v, v), (load_sum, v_sum)))
        else:
            cute.arch.setmaxregister_increase(240 if shapes.groups == 2 else 160)
            unit, final = _number(scale) * LOG2_E, _number(scale_output)
            consume(shapes, call, s_q, s_k, s_v, store_o, out, unit, final)


@cute.jit
def _init_barriers(shapes: Shapes, bars: Any, warp: Int32):
    if warp == 0:
        with cute.arch.elect_one():
            for name in BARRIERS:
                for i in cutlass.range_constexpr(shapes.barriers(name)):
                    cute.arch.mbarrier_init(getattr(bars, name) + i, shapes.arrivals(name))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def _tokens_first(x: cute.Tensor) -> cute.Tensor:
    """``[B, T, H, D]`` as (T, D, H, B), with strides known to be whole 16 bytes."""
    stride = tuple(s if isinstance(s, int) else cute.assume(s, divby=8) for s in x.stride[:3])
    x = cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(*stride, 1)))
    return wgmma.reordered(x, 1, 3, 2, 0)


def _shared(field: Any, layout: Any) -> Any:
    """A field of the shared memory as a swizzled tensor."""
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def _number(x: Any) -> Any:
    """A scale given by value, or read from the device."""
    return x[0] if isinstance(x, cute.Tensor) else x
