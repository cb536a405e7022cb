"""Attention on Hopper (sm_90a): full range or route, tail, padded blocks, causal, LSE (CuTe DSL).

Plan. A program is persistent and takes items (pair of neighbouring query blocks, head, batch) in
turn. It has 384 threads: a warp group whose first warp fetches, and two that compute, each 64 query
rows of the pair (two query blocks of a route).
  Tiles     K and V of COLUMNS keys: 64 for a route, 128 for the full range. Q of 64 rows a group.
  Shared    rings of STAGES tiles of K and of V, Q and output of both groups: 224 kB at D = 128 with
            5 stages of 64 keys, 192 kB with 2 of 128.
  Registers 24 for the fetching group, 240 for the others: 64 accumulate the output (D = 128), 32 or
            64 hold scores, 16 or 32 probabilities, 32 hold Q where it is an operand from registers.
  Sharing   Both groups walk one ring. A pair's entries come in the order: summaries of the tail,
            key blocks of both query blocks, then those of one alone in turn. From the three counts
            a group knows the place of each of its own entries and looks at no other; the producer
            releases an entry of one group on behalf of the other.
  Overlap   A group issues Q K of its next entry, then P V of the one before, and does the softmax of
            the former while the latter is multiplied; the other group fills what is left.
Who waits for whom (mbarriers; a phase per use of a stage, 8 warps of readers to release):
  q_full[g]  group g for its Q              q_empty[g] producer until the 4 warps of g have read it
  k_full[s]  groups for K, and its number   k_empty[s] producer until both groups have multiplied
  v_full[s]  groups for V                   v_empty[s] likewise
Named barrier 1 + g: group g around its output tile in shared memory, which leaves by TMA.
The maximum is kept in raw units (q . k); the scale enters inside exp2 only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import LayoutEnum
from quack import layout_utils, sm90_utils

from blockattn.impl.cute import softmax
from blockattn.impl.cute.variant import Variant

ROWS = 64  # query rows of a group
GROUPS = 2
GROUP = 128  # threads
BLOCK = 64  # tokens of a block of a route
WARP = 32
READERS = GROUPS * 4  # warps that release a stage
LOG2_E = 1.4426950408889634
SHARED = 227 * 1024  # bytes of shared memory of a program
BARRIERS = {  # arrivals that end a phase: the fetching thread, or every warp that reads
    "q_full": 1, "q_empty": READERS // GROUPS,
    "k_full": 1, "k_empty": READERS, "v_full": 1, "v_empty": READERS,
}  # fmt: skip
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


class Attention:
    """The kernel of one variant; calling it (under ``cute.compile``) launches it.

    Args:
        variant: what is compiled in.
        columns: keys of a tile; by default 64 for a route, 128 else.
        query_in_registers: Q is an operand from registers; by default for tiles of 64 keys, where
            reading Q from shared memory for every product would use all of its bandwidth.
    """

    def __init__(
        self,
        variant: Variant,
        columns: int | None = None,
        query_in_registers: bool | None = None,
    ):
        self.variant = variant
        self.element = ELEMENTS[variant.dtype]
        self.dim = variant.dim
        if columns is None:
            columns = 64 if variant.routed or variant.lengths or variant.skip == 64 else 128
        self.columns = columns
        self.query_rs = columns == 64 if query_in_registers is None else query_in_registers
        tile = columns * self.dim * 2
        fixed = 2 * GROUPS * ROWS * self.dim * 2
        self.stages = min(8, (SHARED - 1024 - fixed) // (2 * tile))

    # Host side

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
        """
        shapes = self._layouts()
        tile = (self.columns, self.dim)
        q, out = self._tokens_first(q), self._tokens_first(out)
        k, v = self._tokens_first(k), self._tokens_first(v)
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        rows = (ROWS, self.dim)
        one = cute.select(shapes["q"], mode=[0, 1])
        ring = cute.select(shapes["kv"], mode=[0, 1])
        load_q, q_tma = cpasync.make_tiled_tma_atom(load, q, one, rows)
        load_k, k_tma = cpasync.make_tiled_tma_atom(load, k, ring, tile)
        load_v, v_tma = cpasync.make_tiled_tma_atom(load, v, ring, tile)
        store_o, out_tma = cpasync.make_tiled_tma_atom(store, out, one, rows)
        load_mean = mean_tma = load_sum = sum_tma = None
        if const_expr(self.variant.tail):
            k_mean, v_sum = self._tokens_first(k_mean), self._tokens_first(v_sum)
            load_mean, mean_tma = cpasync.make_tiled_tma_atom(load, k_mean, ring, tile)
            load_sum, sum_tma = cpasync.make_tiled_tma_atom(load, v_sum, ring, tile)
        queries, keys = q.shape[0], k.shape[0]
        pairs = cute.ceil_div(queries, GROUPS * ROWS)
        items = pairs * q.shape[2] * q.shape[3]
        self._kernel(
            load_q, q_tma, load_k, k_tma, load_v, v_tma, store_o, out_tma,
            load_mean, mean_tma, load_sum, sum_tma,
            lse, pair_index, pair_count, words, tail_lengths, block_lengths, dropped,
            scale, scale_output, limit, queries, keys, pairs, items,
            q.shape[2], q.shape[2] // k.shape[2],
        ).launch(
            grid=(cutlass.min(programs, items), 1, 1),
            block=((GROUPS + 1) * GROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _tokens_first(self, x: cute.Tensor) -> cute.Tensor:
        """``[B, T, H, D]`` as (T, D, H, B), with strides known to be whole 16 bytes."""
        stride = tuple(
            cute.assume(s, divby=8) if not isinstance(s, int) else s for s in x.stride[:3]
        )
        x = cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(*stride, 1)))
        return layout_utils.select(x, [1, 3, 2, 0])

    def _layouts(self) -> dict[str, Any]:
        """Shared-memory layouts: q and output (rows, D, group), K and V (columns, D, stage)."""
        return {
            "q": sm90_utils.make_smem_layout(
                self.element, LayoutEnum.ROW_MAJOR, (ROWS, self.dim), GROUPS
            ),
            "kv": sm90_utils.make_smem_layout(
                self.element, LayoutEnum.ROW_MAJOR, (self.columns, self.dim), self.stages
            ),
        }

    def _storage(self) -> Any:
        """What is in shared memory."""
        shapes = self._layouts()
        barriers = cute.struct.MemRange[cutlass.Int64, self.stages]
        pair = cute.struct.MemRange[cutlass.Int64, GROUPS]

        def tile(name: str) -> Any:
            size = cute.cosize(shapes[name])
            return cute.struct.Align[cute.struct.MemRange[self.element, size], 1024]

        # A class statement would give the fields' types as text, which cute.struct does not read.
        fields = {
            **{name: pair if name in ("q_full", "q_empty") else barriers for name in BARRIERS},
            "entry": cute.struct.MemRange[cutlass.Int32, self.stages],
            "q": tile("q"), "out": tile("q"), "k": tile("kv"), "v": tile("kv"),
        }  # fmt: skip
        return cute.struct(type("Storage", (), {"__annotations__": fields}))

    # Device side

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
        scale: Any, scale_output: Any, limit: Float32,
        queries: Int32, keys: Int32, pairs: Int32, items: Int32, heads: Int32, group: Int32,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (load_q, load_k, load_v, store_o, load_mean, load_sum):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(self._storage())
        bars = SimpleNamespace(**{name: getattr(storage, name).data_ptr() for name in BARRIERS})
        self._init_barriers(bars, warp)
        shapes = self._layouts()
        shared = [
            field.get_tensor(shapes[name].outer, swizzle=shapes[name].inner)
            for field, name in (
                (storage.q, "q"), (storage.out, "q"), (storage.k, "kv"), (storage.v, "kv"),
            )
        ]  # fmt: skip
        s_q, s_out, s_k, s_v = shared
        entry = storage.entry.get_tensor(cute.make_layout(self.stages))
        call = SimpleNamespace(
            bars=bars, entry=storage.entry.get_tensor(cute.make_layout(self.stages)),
            pair_index=pair_index, pair_count=pair_count, words=words, lse=lse,
            tail_lengths=tail_lengths, block_lengths=block_lengths, dropped=dropped, limit=limit,
            queries=queries, keys=keys, pairs=pairs, items=items, heads=heads, group=group,
        )  # fmt: skip
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                sources = (
                    (load_q, q),
                    (load_k, k),
                    (load_v, v),
                    (load_mean, mean),
                    (load_sum, v_sum),
                )
                self._produce(call, s_q, s_k, s_v, sources)
        else:
            cute.arch.setmaxregister_increase(240)
            unit, final = _number(scale) * LOG2_E, _number(scale_output)
            self._consume(call, s_q, s_out, s_k, s_v, store_o, out, unit, final)

    @cute.jit
    def _init_barriers(self, bars: Any, warp: Int32):
        if warp == 0:
            with cute.arch.elect_one():
                for name, arrivals in BARRIERS.items():
                    size = GROUPS if const_expr(name in ("q_full", "q_empty")) else self.stages
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(getattr(bars, name) + i, arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    # Items and places

    @cute.jit
    def _item(self, call: Any, item: Int32) -> tuple[Int32, Int32, Int32]:
        """(pair, head, batch) of an item; programs that run together share a head."""
        pair, line = item % call.pairs, item // call.pairs
        if const_expr(self.variant.causal and not self.variant.routed):
            pair = call.pairs - 1 - pair  # the longest rows first
        return pair, line % call.heads, line // call.heads

    @cute.jit
    def _counts(self, call: Any, pair: Int32, head: Int32, batch: Int32):
        """Entries of a pair: those of both groups, those of the first and of the second alone."""
        both = cute.ceil_div(call.keys, self.columns)
        first, second = Int32(0), Int32(0)
        if const_expr(self.variant.routed):
            count = call.pair_count[batch, head, pair, None]
            both, first, second = count[0], count[1], count[2]
        elif const_expr(self.variant.causal):
            tiles = both
            seen = GROUPS * ROWS // self.columns * (pair + 1)
            if const_expr(self.columns == ROWS):
                both = cutlass.min(tiles, seen - 1)
                second = cutlass.min(tiles, seen) - both
            else:
                both = cutlass.min(tiles, seen)
        return both, first, second

    @cute.jit
    def _place(self, own: Int32, g: Int32, both: Int32, first: Int32, second: Int32) -> Int32:
        """Place in the pair's list of entry number ``own`` of group ``g``."""
        alone = own - both
        fewer = cutlass.min(first, second)
        place = own
        if alone >= 0:
            place = both + (2 * alone + g if alone < fewer else fewer + alone)
        return place

    def _tail_steps(self, call: Any) -> Any:
        """Tiles of block summaries."""
        blocks = cute.ceil_div(call.keys, BLOCK)
        return cute.ceil_div(blocks, self.columns) if self.variant.tail else 0

    # The producer

    @cute.jit
    def _produce(self, call: Any, s_q: Any, s_k: Any, s_v: Any, sources: Any):
        """Fetches Q, summaries and listed tiles of every item, in order, as stages come free."""
        (load_q, q), (load_k, k), (load_v, v), (load_mean, mean), (load_sum, v_sum) = sources
        bars = call.bars
        lane = cute.arch.lane_idx()
        item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        use, q_phase = Int32(0), Int32(1)
        while item < call.items:
            pair, head, batch = self._item(call, item)
            key_head = head // call.group
            from_q, to_q = self._ways(load_q, q, s_q, ROWS, head, batch)
            from_k, to_k = self._ways(load_k, k, s_k, self.columns, key_head, batch)
            from_v, to_v = self._ways(load_v, v, s_v, self.columns, key_head, batch)
            for g in cutlass.range_constexpr(GROUPS):
                cute.arch.mbarrier_wait(bars.q_empty + g, q_phase)
                full = bars.q_full + g
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * self.dim * 2)
                cute.copy(load_q, from_q[None, pair * GROUPS + g], to_q[None, g], tma_bar_ptr=full)
            q_phase ^= 1
            if const_expr(self.variant.tail):
                from_mean, _ = self._ways(load_mean, mean, s_k, self.columns, key_head, batch)
                from_sum, _ = self._ways(load_sum, v_sum, s_v, self.columns, key_head, batch)
                for n in cutlass.range(self._tail_steps(call), unroll=1):
                    self._fetch(
                        call, lane, use, n, False, load_mean, from_mean, to_k,
                        load_sum, from_sum, to_v,
                    )  # fmt: skip
                    use += 1
            both, first, second = self._counts(call, pair, head, batch)
            total = both + first + second
            chunk, ahead = Int32(0), Int32(0)
            if const_expr(self.variant.routed):
                if lane < total:
                    ahead = call.pair_index[batch, head, pair, lane]
            for n in cutlass.range(total, unroll=1):
                tile = n
                if const_expr(self.variant.routed):
                    if n % WARP == 0:
                        chunk = ahead
                        if n + WARP + lane < total:
                            ahead = call.pair_index[batch, head, pair, n + WARP + lane]
                    tile = cute.arch.shuffle_sync(chunk, n % WARP)
                self._fetch(
                    call, lane, use, tile, n >= both, load_k, from_k, to_k, load_v, from_v, to_v
                )
                use += 1
            item += step

    def _ways(
        self, atom: Any, x: Any, shared: Any, rows: int, head: Int32, batch: Int32
    ) -> tuple[Any, Any]:
        """Tiles of ``rows`` tokens of one head, as the copy ``atom`` sees both of its sides."""
        tiles = cute.local_tile(x[None, None, head, batch], (rows, self.dim), (None, 0))
        inner, outer = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )  # fmt: skip
        return outer, inner

    @cute.jit
    def _fetch(
        self, call: Any, lane: Int32, use: Int32, tile: Int32, alone: Any,
        load_k: Any, from_k: Any, to_k: Any, load_v: Any, from_v: Any, to_v: Any,
    ):  # fmt: skip
        """Fills the stage of a use; of an entry of one group it releases the other's share."""
        bars, entry = call.bars, call.entry
        stage, phase = use % self.stages, (use // self.stages & 1) ^ 1
        size = self.columns * self.dim * 2
        for name, atom, source, target in (
            ("k", load_k, from_k, to_k), ("v", load_v, from_v, to_v),
        ):  # fmt: skip
            full = getattr(bars, name + "_full") + stage
            empty = getattr(bars, name + "_empty") + stage
            cute.arch.mbarrier_wait(empty, phase)
            if lane == 0:
                if const_expr(name == "k"):
                    entry[stage] = tile
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                if alone:
                    cute.arch.mbarrier_arrive(empty, arrive_count=READERS // GROUPS)
            cute.copy(atom, source[None, tile], target[None, stage], tma_bar_ptr=full)

    # The consumers

    @cute.jit
    def _consume(
        self, call: Any, s_q: Any, s_out: Any, s_k: Any, s_v: Any, store_o: Any, out: Any,
        unit: Float32, final: Float32,
    ):  # fmt: skip
        """The 64 query rows of a group: products, softmax and output of every item."""
        thread = cute.arch.thread_idx()[0] - GROUP
        g = cute.arch.make_warp_uniform(thread // GROUP)
        thread = thread % GROUP
        lane = cute.arch.lane_idx()
        bars = call.bars
        mma_qk = sm90_utils.make_tiled_mma(
            self.element, "K", "K", self.columns, "RS" if self.query_rs else "SS"
        )
        mma_pv = sm90_utils.make_tiled_mma(self.element, "K", "MN", self.dim, "RS")
        first_thread_qk, first_thread_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        _, q_own, k_all = sm90_utils.partition_fragment_ABC(
            first_thread_qk, (ROWS, self.columns, self.dim), s_q[None, None, g], s_k
        )
        acc, p, v_all = sm90_utils.partition_fragment_ABC(
            first_thread_pv, (ROWS, self.dim, self.columns), None, layout_utils.transpose_view(s_v)
        )
        m, l = softmax.new_state()
        work = SimpleNamespace(
            call=call, g=g, thread=thread, lane=lane, unit=unit, mma_qk=mma_qk, mma_pv=mma_pv,
            thr_qk=mma_qk.get_slice(thread), q=q_own, k=k_all, v=v_all, s_v=s_v, acc=acc, p=p,
            m=m, l=l,
        )  # fmt: skip
        item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        use, q_phase = Int32(0), Int32(0)
        while item < call.items:
            pair, head, batch = self._item(call, item)
            both, first, second = self._counts(call, pair, head, batch)
            own = both + (first if g == 0 else second)
            tail = self._tail_steps(call)
            row = (pair * GROUPS + g) * ROWS
            softmax.clear(m, l, acc)
            cute.arch.mbarrier_wait(bars.q_full + g, q_phase)
            if const_expr(self.query_rs):
                self._read_query(work, s_q)
                self._release(bars.q_empty + g, lane)
            if const_expr(self.variant.tail):
                self._first(work, use, row, head, batch, 0, True)
                for n in cutlass.range(1, tail, unroll=1):
                    self._next(work, use + n, use + n - 1, row, head, batch, n, True)
                before = use + tail - 1
                for i in cutlass.range(own, unroll=1):
                    now = use + tail + self._place(i, g, both, first, second)
                    self._next(work, now, before, row, head, batch, 0, False)
                    before = now
                self._last(work, before)
            elif own > 0:
                before = use + self._place(Int32(0), g, both, first, second)
                self._first(work, before, row, head, batch, 0, False)
                for i in cutlass.range(1, own, unroll=1):
                    now = use + self._place(i, g, both, first, second)
                    self._next(work, now, before, row, head, batch, 0, False)
                    before = now
                self._last(work, before)
            if const_expr(not self.query_rs):
                self._release(bars.q_empty + g, lane)
            self._write(work, s_out, store_o, out, row, head, batch, final)
            use += tail + both + first + second
            q_phase ^= 1
            item += step
        if thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _release(self, barrier: Any, lane: Int32):
        """A warp is done reading what the barrier guards."""
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _read_query(self, work: Any, s_q: Any):
        """Q of the group into registers, as an operand."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element)
        tiled = cute.make_tiled_copy_A(atom, work.mma_qk)
        own = tiled.get_slice(work.thread)
        cute.copy(tiled, own.partition_S(s_q[None, None, work.g]), own.retile(work.q))

    @cute.jit
    def _multiply_keys(self, work: Any, use: Int32) -> cute.Tensor:
        """Starts Q K of a use and gives its scores, which are there after a wait."""
        stage = use % self.stages
        full = work.call.bars.k_full + stage
        cute.arch.mbarrier_wait(full, use // self.stages & 1)
        return sm90_utils.gemm_zero_init(
            work.mma_qk, (ROWS, self.columns), work.q, work.k, B_idx=stage
        )

    @cute.jit
    def _multiply_values(self, work: Any, use: Int32):
        """Starts the accumulation of P V of a use."""
        stage = use % self.stages
        full = work.call.bars.v_full + stage
        cute.arch.mbarrier_wait(full, use // self.stages & 1)
        sm90_utils.gemm_w_idx(work.mma_pv, work.acc, work.p, work.v, False, B_idx=stage)

    @cute.jit
    def _fold(
        self, work: Any, scores: Any, use: Int32, row: Int32, head: Int32, batch: Int32,
        n: Any, is_tail: bool,
    ) -> cute.Tensor:  # fmt: skip
        """Masks the scores of a use, releases its K and takes them into the softmax state."""
        call, stage = work.call, use % self.stages
        weights = None
        tile = call.entry[stage]
        self._release(call.bars.k_empty + stage, work.lane)
        if const_expr(is_tail):
            weights = self._weights(work, row, head, batch, n)
            softmax.keep_weighted(scores, weights)
        else:
            start = tile * self.columns
            valid = call.keys - start
            if const_expr(self.variant.lengths):
                valid = cutlass.min(valid, call.block_lengths[tile])
            if valid < self.columns:
                softmax.keep_columns(scores, work.thr_qk, valid)
            if const_expr(self.variant.causal):
                if row - start < self.columns - 1:
                    softmax.keep_past(scores, work.thr_qk, row - start)
        return softmax.fold(scores, work.m, work.l, work.unit, weights)

    @cute.jit
    def _first(
        self, work: Any, use: Int32, row: Int32, head: Int32, batch: Int32, n: Any, is_tail: bool
    ):
        """The first entry of an item: scores and probabilities."""
        scores = self._multiply_keys(work, use)
        warpgroup.wait_group(0)
        self._fold(work, scores, use, row, head, batch, n, is_tail)
        self._round(work, scores)

    @cute.jit
    def _next(
        self, work: Any, use: Int32, before: Int32, row: Int32, head: Int32, batch: Int32,
        n: Any, is_tail: bool,
    ):  # fmt: skip
        """Any other entry, while the values of the one before are multiplied."""
        scores = self._multiply_keys(work, use)
        self._multiply_values(work, before)
        warpgroup.wait_group(1)
        shrink = self._fold(work, scores, use, row, head, batch, n, is_tail)
        warpgroup.wait_group(0)
        self._release(work.call.bars.v_empty + before % self.stages, work.lane)
        softmax.rescale(work.acc, shrink)
        self._round(work, scores)

    @cute.jit
    def _last(self, work: Any, use: Int32):
        """The values of the last entry."""
        self._multiply_values(work, use)
        warpgroup.wait_group(0)
        self._release(work.call.bars.v_empty + use % self.stages, work.lane)

    def _round(self, work: Any, scores: Any) -> None:
        """Probabilities in the inputs' dtype, as an operand."""
        work.p.store(layout_utils.reshape_acc_to_frgA(scores).load().to(self.element))

    @cute.jit
    def _weights(self, work: Any, row: Int32, head: Int32, batch: Int32, n: Any) -> cute.Tensor:
        """Keys that each summary of tile ``n`` stands for; none where its block is exact."""
        call = work.call
        blocks = cute.size(call.tail_lengths)
        at = softmax.coordinates(work.thr_qk, self.columns)
        columns = cute.size(at, mode=[1])
        weights = cute.make_rmem_tensor(columns, Float32)
        line = cutlass.min(row // BLOCK, call.words.shape[2] - 1)
        for half in cutlass.range_constexpr(self.columns // 32):
            place = n * (self.columns // 32) + half
            word = Int32(-1)
            if place < call.words.shape[3]:
                word = call.words[batch, head, line, place]
            each = columns * 32 // self.columns
            for j in cutlass.range_constexpr(half * each, (half + 1) * each):
                bit = at[0, j][1] - half * 32
                column = place * 32 + bit
                length = Int32(0)
                if column < blocks:
                    length = call.tail_lengths[column]
                weights[j] = Float32(0 if (word >> bit) & 1 else length)
        return weights

    @cute.jit
    def _write(
        self, work: Any, s_out: Any, store_o: Any, out: Any, row: Int32, head: Int32, batch: Int32,
        final: Float32,
    ):  # fmt: skip
        """Output and LSE of an item."""
        call, g = work.call, work.g
        factor, lse = softmax.finish(work.m, work.l, work.unit, final)
        softmax.rescale(work.acc, factor)
        rounded = cute.make_fragment_like(work.acc, self.element)
        rounded.store(work.acc.load().to(self.element))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element)
        tiled = cute.make_tiled_copy_C(atom, work.mma_pv)
        own = tiled.get_slice(work.thread)
        if work.thread < WARP:  # the store before this one has read the shared tile
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=1 + g, number_of_threads=GROUP)
        cute.copy(tiled, own.retile(rounded), own.partition_D(s_out[None, None, g]))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + g, number_of_threads=GROUP)
        if work.thread < WARP:
            to, source = self._ways(store_o, out, s_out, ROWS, head, batch)
            cute.copy(store_o, source[None, g], to[None, row // ROWS])
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(self.variant.lse):
            at, lse_rows = softmax.coordinates(work.thr_qk, self.columns), call.lse
            for r in cutlass.range_constexpr(2):
                if at[r, 0][1] == 0 and row + at[r, 0][0] < call.queries:
                    lse_rows[batch, head, row + at[r, 0][0]] = lse[r]


def _number(x: Any) -> Float32:
    """A scale given by value, or read from the device."""
    return x[0] if isinstance(x, cute.Tensor) else x
