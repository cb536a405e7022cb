"""Another token order in the blocks of an attached model: once in front of them, once behind them.

    with workbench.attach(pipe, config) as attached, token_order(attached, "tile"):
        video = pipe(prompt).frames

The video tokens and their rotations are put in the order before the first block and the tokens are
put back after the last, so that attention blocks of 64 tokens are compact in (t, h, w). Everything
between works token by token, so the video is the same but for rounding. Text tokens stay in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from blockattn import TokenGrid, UnsupportedError, checks
from blockattn.layout import ORDERS
from workbench.diffusers.attach import Attachment
from workbench.diffusers.families import Family
from workbench.diffusers.model import AttachedModel

ROTATION = "image_rotary_emb"  # argument of models that get their rotations from the pipeline
TOKENS = "hidden_states"
# Of Wan, it returns (temb of the last layer, that of the blocks, text, image).
CONDITION = "condition_embedder"


@contextmanager
def token_order(attached: Attachment, order: str) -> Iterator[None]:
    """Runs the blocks of every attached transformer in an order, until the `with` block ends.

    Args:
        attached: what `workbench.attach` returned, still attached.
        order: ``raster``, ``tile`` (4 x 4 x 4) or ``morton``, see :class:`blockattn.TokenGrid`.

    Raises:
        ValueError: no such order. UnsupportedError: a model that is compiled, or whose blocks treat
            tokens by their place in the sequence.
        RuntimeError: an order is set already, or the model is detached.
    """
    checks.one_of("order", order, ORDERS)
    reorders = [Reorder(model, order) for model in attached.models]
    try:
        for reorder in reorders:
            reorder.start()
        yield
    finally:
        for reorder in reorders:
            reorder.stop()


class Reorder:
    """The hooks of one transformer. Making it checks everything and changes nothing.

    Args:
        model: attached. order: of its tokens.
    """

    def __init__(self, model: AttachedModel, order: str) -> None:
        self.name, self.order = model.name, order
        self.family, self.forward = model.family, model.forward
        self._model = model.transformer
        self._names = tuple(inspect.signature(type(self._model).forward).parameters)[1:]
        self._handles: list[RemovableHandle] = []
        self._grid: TokenGrid | None = None
        self._by_token = False
        if not model.attached:
            raise RuntimeError(
                f"{self.name} is detached, so nothing would know of the order; set it inside the "
                "`with` block of workbench.attach"
            )
        self._check(compiled=model.compiled)

    def start(self) -> None:
        """Puts the hooks in."""
        if self.order == "raster":
            return
        first, last = _ends(self._model, self.family)
        self._handles.append(
            self._model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        )
        for name, hook in (("rope", self._after_rope), (CONDITION, self._after_condition)):
            part = getattr(self._model, name, None)
            if isinstance(part, nn.Module):
                self._handles.append(part.register_forward_hook(hook))
        self._handles.append(first.register_forward_pre_hook(self._before_first, with_kwargs=True))
        self._handles.append(last.register_forward_hook(self._after_last))
        self.forward.order = self.order

    def stop(self) -> None:
        """Takes them out again."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.forward.order = "raster"
        self._handles = []

    def _check(self, *, compiled: bool) -> None:
        if self.forward.order != "raster":
            raise RuntimeError(
                f"{self.name} runs in {self.forward.order} order already; leave that `with` block "
                "first"
            )
        if compiled:
            raise UnsupportedError(
                f"{self.name} is compiled, and its graph has no place for another token order; "
                "set the order on the model as it was before torch.compile"
            )
        if getattr(self._model.config, "image_condition_type", None) == "token_replace":
            raise UnsupportedError(
                f"{self.name}: image_condition_type='token_replace' treats the first tokens of the "
                "sequence in its own way, so they must stay first; use raster order"
            )

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Refuses what is told apart by place, and turns rotations that the pipeline made."""
        del module
        given = {**dict(zip(self._names, args)), **kwargs}
        self._grid = self._places(given)
        if given.get(ROTATION) is None:
            return args, kwargs
        given[ROTATION] = self._turned(given[ROTATION])
        return (), given

    def _places(self, given: Mapping[str, Any]) -> TokenGrid:
        time = given.get("timestep")
        times = tuple(time.shape) if isinstance(time, Tensor) else ()
        self._by_token = len(times) > 1 and times[1] > 1
        if self._by_token and not hasattr(self._model, CONDITION):
            raise UnsupportedError(
                f"{self.name}: timestep has shape {times}, one for each token, which "
                f"is put in another order for Wan alone, not for {self.family.model}; use raster "
                "order"
            )
        shape = self.family.grid(self._model.config, given)
        if shape is None:
            raise UnsupportedError(
                f"{self.name}: the forward call does not say how its tokens lie in (t, h, w), so "
                "they cannot be put in another order"
            )
        return TokenGrid(shape, order=self.order)

    def _after_rope(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        return self._turned(output)

    def _after_condition(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Times of the single tokens follow the tokens; the last layer works in raster order."""
        del module, args
        if not self._by_token:
            return output
        last, blocks, *others = output
        return (last, self._at_work().arrange(blocks), *others)

    def _before_first(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        del module
        if TOKENS in kwargs:
            return args, {**kwargs, TOKENS: self._arrange(kwargs[TOKENS])}
        return (self._arrange(args[0]), *args[1:]), kwargs

    def _after_last(self, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        back = self._at_work().restore
        return (back(output[0]), *output[1:]) if isinstance(output, tuple) else back(output)

    def _arrange(self, tokens: Tensor) -> Tensor:
        grid = self._at_work()
        if tokens.shape[1] != grid.tokens:
            raise UnsupportedError(
                f"{self.name}: the blocks get {tokens.shape[1]} tokens of {grid.tokens}; a "
                "sequence that is shared out over several GPUs keeps raster order"
            )
        return grid.arrange(tokens)

    def _turned(self, rotation: Any) -> Any:
        """Cosines and sines [S, ...] or [1 or B, S, ...] of the tokens in the order."""
        grid = self._at_work()
        return tuple(grid.arrange(x, _token_axis(x, grid.tokens)) for x in rotation)

    def _at_work(self) -> TokenGrid:
        if self._grid is None:
            raise RuntimeError(f"{self.name}: a block ran outside of the transformer's forward")
        return self._grid


def _ends(model: nn.Module, family: Family) -> tuple[nn.Module, nn.Module]:
    """The first and the last block."""
    blocks = [
        block
        for name in dict.fromkeys(name for name, _ in family.blocks)
        for block in model.get_submodule(name).children()
    ]
    return blocks[0], blocks[-1]


def _token_axis(x: Tensor, tokens: int) -> int:
    """The axis of a rotation that counts tokens."""
    for axis, size in enumerate(x.shape[:2]):
        if size == tokens:
            return axis
    raise UnsupportedError(
        f"rotation of shape {tuple(x.shape)}: neither of its first axes has the {tokens} tokens "
        "of the grid"
    )
