"""Sparse attention for video diffusion: routes as values, one operation, many implementations."""

from blockattn import ops
from blockattn.attend import attend
from blockattn.errors import Reason, UnsupportedError
from blockattn.layout import BLOCK, Box, TokenGrid
from blockattn.problem import BlockSummary
from blockattn.quant import QuantRecipe, quantised_attention
from blockattn.route import BlockRoute
from blockattn.skip import SkipGaps, skip_gaps, skip_softmax_attention
from blockattn.sol import BlockScores, sol_attention, sol_route, sol_scores
from blockattn.trace import AttentionTrace
from blockattn.vsa import CubeLayout, cube_layout, kept_cubes, video_sparse_attention, vsa_route

__all__ = [
    "BLOCK",
    "AttentionTrace",
    "BlockRoute",
    "BlockScores",
    "BlockSummary",
    "Box",
    "CubeLayout",
    "QuantRecipe",
    "Reason",
    "SkipGaps",
    "TokenGrid",
    "UnsupportedError",
    "attend",
    "cube_layout",
    "kept_cubes",
    "ops",
    "quantised_attention",
    "skip_gaps",
    "skip_softmax_attention",
    "sol_attention",
    "sol_route",
    "sol_scores",
    "video_sparse_attention",
    "vsa_route",
]
