"""VSA: video sparse attention over 4x4x4 cubes, coarse stage, top-k, fine stage.

Method of "VSA: Faster Video Diffusion with Trainable Sparse Attention" (arXiv:2505.13389). Tokens
of a (T, H, W) grid are regrouped so that a block of 64 is a cube; a cube on a ragged edge holds its
valid tokens first and zeros after them, so that "column < size" is its exact mask. The query's own
cube is not forced into the selection, and every query cube keeps the same number of key cubes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockattn import checks
from blockattn.attend import attend
from blockattn.compiled import one_node
from blockattn.impl import registry
from blockattn.layout import TILE_EDGE, TokenGrid, num_blocks
from blockattn.precision import own_precision
from blockattn.route import BlockRoute

CUBE = TILE_EDGE**3
SELECT_DTYPES = ("float32", "input")


@dataclass(frozen=True)
class CubeLayout:
    """Where every token of a grid goes when cubes become blocks.

    Attributes:
        cubes: cubes along (t, h, w).
        sizes: int32 ``[N]`` valid tokens of each cube, 1..64, cubes in t, h, w order.
        slots: int64 ``[tokens]`` padded position of each token of the sequence.
    """

    cubes: tuple[int, int, int]
    sizes: Tensor
    slots: Tensor

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def padded_tokens(self) -> int:
        return self.count * CUBE

    def tile(self, x: Tensor) -> Tensor:
        """``[B, tokens, H, D]`` in sequence order -> ``[B, 64 N, H, D]``, padding exactly zero."""
        padded = x.new_zeros(x.shape[0], self.padded_tokens, *x.shape[2:])
        return padded.index_copy_(1, self.slots, x)

    def untile(self, x: Tensor) -> Tensor:
        """``[B, 64 N, H, D]`` -> ``[B, tokens, H, D]`` in sequence order."""
        return x.index_select(1, self.slots)

    def means(self, tiled: Tensor) -> Tensor:
        """Mean over the valid tokens of each cube, summed in float32, in the input's dtype."""
        wide = torch.promote_types(tiled.dtype, torch.float32)
        sums = tiled.unflatten(1, (self.count, CUBE)).sum(dim=2, dtype=wide)
        return (sums / self.sizes[None, :, None, None]).to(tiled.dtype)

    def valid_words(self) -> Tensor:
        """int64 ``[N, 2]``, each a 32-bit word: bit b of word w = slot 32 w + b holds a token."""
        slot = torch.arange(CUBE, device=self.sizes.device)
        valid = (slot < self.sizes[:, None]).long().unflatten(1, (2, 32))
        return (valid << torch.arange(32, device=valid.device)).sum(dim=-1)


@lru_cache(maxsize=16)
def cube_layout(grid: TokenGrid, device: torch.device) -> CubeLayout:
    """Cube layout of a grid without text, cached per (grid, device); the cache holds 16 shapes.

    A captured CUDA graph reads these tables: build them before the capture, and keep the layout as
    long as the graph, because the cache lets go of the one that was used least recently.

    Raises:
        ValueError: the grid has text tokens.
    """
    if grid.prefix or grid.suffix:
        raise ValueError(
            f"grid: has {grid.prefix} + {grid.suffix} text tokens, but VSA serves video tokens "
            "alone; attend to the text separately"
        )
    frames, rows, columns = (num_blocks(size, TILE_EDGE) for size in grid.shape)
    cubes = (frames, rows, columns)
    raster_to_tile = TokenGrid(grid.shape, order="tile")
    t, h, w = raster_to_tile.coordinates.unbind(dim=1)
    cube = (t // TILE_EDGE * cubes[1] + h // TILE_EDGE) * cubes[2] + w // TILE_EDGE
    sizes = torch.bincount(cube, minlength=math.prod(cubes))
    first = sizes.cumsum(0) - sizes
    # Tile order lists each cube's tokens together, so a token's rank in its cube is a difference.
    compact = cube * CUBE + torch.arange(len(cube)) - first[cube]
    slots = compact[raster_to_tile.inverse][grid.permutation]
    return CubeLayout(cubes, sizes.int().to(device), slots.to(device))


def kept_cubes(sparsity: float, cubes: int) -> int:
    """Cubes each query cube keeps: max(1, ceil((1 - sparsity) * cubes)), evaluated in floats.

    The float product is part of the definition: 10 cubes at 0.7 keep 4, 1,440 at 0.9 keep 144.
    """
    share = checks.finite_number("sparsity", sparsity, minimum=0.0)
    if share > 1:
        raise ValueError(f"sparsity={sparsity!r}: must be in [0, 1]")
    return max(1, math.ceil((1.0 - share) * checks.integer("cubes", cubes, minimum=1)))


@own_precision()
def vsa_route(
    q: Tensor,
    k: Tensor,
    *,
    grid: TokenGrid | Sequence[int],
    sparsity: float = 0.9,
    scale: float | Tensor | None = None,
    select_dtype: str = "float32",
) -> BlockRoute:
    """Top-k key cubes of every query cube, in the padded cube layout (``64 N`` tokens).

    Args:
        q, k: ``[B, T * H * W, heads, D]`` in the grid's order.
        grid: a :class:`TokenGrid` without text, or (T, H, W) in raster order.
        sparsity: share of the cubes to drop, in [0, 1].
        scale: softmax scale of the coarse stage, default D ** -0.5.
        select_dtype: ``float32`` selects on float32 probabilities, ``input`` on probabilities
            rounded to q's dtype as upstream kernels do. Ties go to the lower cube index.

    A NaN in a token of q makes its whole query cube NaN, whose selection is then the lowest cubes;
    a NaN in k makes every row NaN.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    query, key = checks.query_key(q, k)
    layout = checked_layout(query, key, grid)
    keep = kept_cubes(sparsity, layout.count)
    checks.one_of("select_dtype", select_dtype, SELECT_DTYPES)
    own = checks.default_scale(query.shape[3])
    factor = checks.scale_argument("scale", scale, query, default=own)
    shares = coarse_shares(layout, layout.tile(query), layout.tile(key), factor)
    return _top_cubes(layout, shares, keep, query.dtype if select_dtype == "input" else None)


@one_node
def video_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: TokenGrid | Sequence[int],
    gate_compress: Tensor,
    gate_fine: Tensor | None = None,
    sparsity: float = 0.9,
    scale: float | Tensor | None = None,
    select_dtype: str = "float32",
    impl: str = "auto",
    return_trace: bool = False,
) -> Any:
    """VSA self-attention (arXiv:2505.13389): gate_compress * coarse + gate_fine * fine.

    Args:
        q, k, v: ``[B, T * H * W, heads, D]`` in the grid's order, equal head counts.
        grid: a :class:`TokenGrid` without text, or (T, H, W) in raster order.
        gate_compress: like q; the model's learned gate of the coarse branch. A zero tensor switches
            the branch off; sparsity 0 with it equals dense attention.
        gate_fine: like q, or ``None`` for 1.
        sparsity, scale, select_dtype: as for :func:`vsa_route`.
        impl, return_trace: as for :func:`blockattn.attend`; the trace is the fine stage's: its
            route and density in the padded cube layout, its LSE in sequence order.

    Returns:
        The output ``[B, T * H * W, heads, D]``, or ``(output, AttentionTrace)``.

    Raises:
        TypeError, ValueError, UnsupportedError: before any work is done.
    """
    query, key, value = checks.query_key_value(q, k, v)
    layout = checked_layout(query, key, grid)
    keep = kept_cubes(sparsity, layout.count)
    checks.one_of("select_dtype", select_dtype, SELECT_DTYPES)
    own = checks.default_scale(query.shape[3])
    factor = checks.scale_argument("scale", scale, query, default=own)
    registry.check_name(impl)
    checks.flag("return_trace", return_trace)
    compress = _checked_gate("gate_compress", gate_compress, query)
    fine_gate = None if gate_fine is None else _checked_gate("gate_fine", gate_fine, query)
    q_cubes, k_cubes, v_cubes = (layout.tile(x) for x in (query, key, value))
    shares = coarse_shares(layout, q_cubes, k_cubes, factor)
    route = _top_cubes(layout, shares, keep, query.dtype if select_dtype == "input" else None)
    fine = attend(
        q_cubes,
        k_cubes,
        v_cubes,
        route,
        block_lengths=layout.sizes,
        scale=factor,
        impl=impl,
        return_trace=return_trace,
    )
    fine, trace = fine if return_trace else (fine, None)
    fine = layout.untile(fine)
    out = compress * _coarse_output(layout, shares, v_cubes)
    out = out + (fine if fine_gate is None else fine_gate * fine)
    if trace is None:
        return out
    return out, replace(trace, algorithm="vsa", lse=trace.lse.index_select(2, layout.slots))


def coarse_shares(layout: CubeLayout, q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    """Softmax over key cubes of the cube means: float32 or wider ``[B, H, N, N]``, with gradients.

    Args:
        layout: of the grid.
        q, k: ``[B, 64 N, H, D]`` as :meth:`CubeLayout.tile` gives them.
        scale: softmax scale.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q_mean, k_mean = (layout.means(x).to(wide).transpose(1, 2) for x in (q, k))
    return torch.softmax(q_mean @ k_mean.transpose(2, 3) * scale, dim=-1)


def _coarse_output(layout: CubeLayout, shares: Tensor, v: Tensor) -> Tensor:
    """Coarse attention output, repeated for the tokens of each cube, in sequence order."""
    v_mean = layout.means(v).to(shares.dtype).transpose(1, 2)
    per_cube = (shares @ v_mean).transpose(1, 2).to(v.dtype)
    return per_cube.index_select(1, layout.slots // CUBE)


def _top_cubes(
    layout: CubeLayout, shares: Tensor, keep: int, dtype: torch.dtype | None
) -> BlockRoute:
    ranked = (shares if dtype is None else shares.to(dtype)).sort(
        dim=-1, descending=True, stable=True
    )
    mask = torch.zeros_like(shares, dtype=torch.bool)
    mask.scatter_(-1, ranked.indices[..., :keep], True)
    length = layout.padded_tokens
    return BlockRoute.from_dense(mask, block=(CUBE, CUBE), seqlens=(length, length))


def checked_layout(q: Tensor, k: Tensor, grid: TokenGrid | Sequence[int]) -> CubeLayout:
    """Cube layout for self-attention with equal head counts over a grid that holds q's tokens.

    Raises:
        TypeError, ValueError: q, k and grid do not fit together.
    """
    checks.self_attention("video_sparse_attention", q, k)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"k: {k.shape[2]} heads, but q has {q.shape[2]}; VSA does not serve GQA or MQA"
        )
    tokens = _checked_grid(grid)
    if tokens.tokens != q.shape[1]:
        raise ValueError(
            f"grid={tokens.shape}: has {tokens.tokens} tokens, but q has {q.shape[1]}; "
            "give the latent frames, rows and columns after patching"
            + checks.layout_hint(tokens.tokens == q.shape[2])
        )
    return cube_layout(tokens, q.device)


def _checked_grid(grid: object) -> TokenGrid:
    if isinstance(grid, TokenGrid):
        return grid
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 3:
        raise TypeError(f"grid={grid!r}: expected a TokenGrid or three integers (T, H, W)")
    t, h, w = (checks.integer(f"grid[{n}]", size, minimum=1) for n, size in enumerate(grid))
    return TokenGrid((t, h, w))


def _checked_gate(name: str, gate: object, q: Tensor) -> Tensor:
    if gate is None:
        raise ValueError(
            f"{name}=None: the gate is learned; wire the model's to_gate_compress projection, or "
            "pass torch.zeros_like(q) to switch the coarse branch off"
        )
    if not isinstance(gate, Tensor):
        raise TypeError(f"{name}: expected a tensor like q, got {type(gate).__name__}")
    if gate.shape != q.shape or gate.dtype != q.dtype or gate.device != q.device:
        raise ValueError(
            f"{name}: {tuple(gate.shape)} {gate.dtype} on {gate.device}, expected q's "
            f"{tuple(q.shape)} {q.dtype} on {q.device}"
        )
    checks.forward_only(**{name: gate})
    return gate
