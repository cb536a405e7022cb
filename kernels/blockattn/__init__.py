"""Sparse attention for video diffusion: routes as values, one operation, several implementations."""

from blockattn.attend import attend
from blockattn.errors import Reason, UnsupportedError
from blockattn.layout import BLOCK, Box, TokenGrid
from blockattn.problem import BlockSummary
from blockattn.route import BlockRoute
from blockattn.skip import SkipGaps, skip_gaps, skip_softmax_attention
from blockattn.sol import BlockScores, sol_attention, sol_route, sol_scores
from blockattn.trace import AttentionTrace

__all__ = [
    "BLOCK",
    "AttentionTrace",
    "BlockRoute",
    "BlockScores",
    "BlockSummary",
    "Box",
    "Reason",
    "SkipGaps",
    "TokenGrid",
    "UnsupportedError",
    "attend",
    "skip_gaps",
    "skip_softmax_attention",
    "sol_attention",
    "sol_route",
    "sol_scores",
]
