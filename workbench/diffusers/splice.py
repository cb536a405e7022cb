"""The model's own attention processor, around another attention function.

A processor of diffusers projects and rotates, calls one function for the attention itself, and
projects back. Only that function is replaced: the processor's own code runs in a namespace where
the function's name means ours. Nothing of diffusers is changed or copied, and every version,
fused projection or LoRA does what it does without us.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

DISPATCH = "dispatch_attention_fn"  # takes [B, T, H, D]
NATIVE = "scaled_dot_product_attention"  # of F, takes [B, H, T, D]
ARGUMENTS = 6  # self, module, tokens, other tokens, mask, rotation


@dataclass  # not frozen: Dynamo of torch 2.11 cannot call a frozen one that it has made itself
class OwnAttention:
    """What the model itself would have called, as a function of q, k, v [B, T, H, D].

    Attributes:
        function: diffusers' dispatcher, or PyTorch's attention.
        mask: the mask of the call, `None` without one.
        options: the call's other arguments.
    """

    function: Callable[..., Tensor]
    mask: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v, attn_mask=self.mask, **self.options)


class Attend(Protocol):
    """Takes the place of the model's attention: [B, T, H, D] in and out."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, own: OwnAttention) -> Tensor: ...


class SplicedProcessor:
    """Stands in for a processor, and is that processor in everything but the attention.

    A copy or a pickle of it is the processor itself: models are copied and saved without us.

    Args:
        inner: the module's processor.
        attend: called instead of the model's attention function.

    Raises:
        ValueError: the processor calls no attention function that can be replaced; see `obstacle`.
    """

    def __init__(self, inner: Any, attend: Attend) -> None:
        reason = obstacle(inner)
        if reason is not None:
            raise ValueError(f"inner: {reason}")
        self.inner = inner
        self._run = _respliced(inner, attend)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        **kwargs: Any,
    ) -> Any:
        tokens = (hidden_states, encoder_hidden_states)
        return self._run(self.inner, attn, *tokens, attention_mask, image_rotary_emb, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Backend and parallel settings are the processor's, which reads them itself."""
        if name == "inner":  # not there yet, while an instance is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        holder = self if name in ("inner", "_run") else self.inner
        object.__setattr__(holder, name, value)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self.inner,)


def obstacle(processor: Any) -> str | None:
    """Why the attention function of a processor cannot be replaced; `None` if it can."""
    call = _code_of(processor)
    name = type(processor).__name__
    if isinstance(processor, nn.Module) or call is None:
        return f"processor {name} is no plain diffusers processor"
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    given = [p for p in inspect.signature(call).parameters.values() if p.kind in positional]
    if len(given) < ARGUMENTS:
        return f"processor {name} takes {[p.name for p in given[1:]]}, not a mask and a rotation"
    names = call.__code__.co_names
    if DISPATCH not in names and not ("F" in names and NATIVE in names):
        return f"processor {name} calls neither {DISPATCH} nor F.{NATIVE} itself"
    return None


def _code_of(processor: Any) -> FunctionType | None:
    call = inspect.getattr_static(type(processor), "__call__", None)
    return call if isinstance(call, FunctionType) else None


def _respliced(processor: Any, attend: Attend) -> Callable[..., Any]:
    """The processor's `__call__`, with its attention function replaced."""
    call: Any = _code_of(processor)
    # Dynamo resolves the names of a function in the module that __name__ gives, where they mean
    # diffusers' own functions. Without it, it reads this namespace.
    scope = {name: value for name, value in call.__globals__.items() if name != "__name__"}
    if DISPATCH in call.__code__.co_names:
        scope[DISPATCH] = _Dispatched(scope[DISPATCH], attend)
    else:
        functional = ModuleType("functional")
        functional.__dict__.update(F.__dict__)
        functional.__dict__[NATIVE] = _Native(attend)
        scope["F"] = functional
    code = _copied(call.__code__)
    run = FunctionType(code, scope, call.__name__, call.__defaults__, call.__closure__)
    run.__kwdefaults__ = call.__kwdefaults__
    return run


def _copied(code: CodeType) -> CodeType:
    """The same code as an object of its own, with that of inner functions.

    Dynamo keeps what it has compiled with the code object and looks for it in the namespace of the
    first function that ran it, so two namespaces need two objects.
    """
    inner = tuple(_copied(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=inner)


class _Dispatched:
    """In the place of diffusers' dispatcher."""

    def __init__(self, original: Callable[..., Tensor], attend: Attend) -> None:
        self._original, self._attend = original, attend

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        own = OwnAttention(self._original, attn_mask, options)
        return self._attend(query, key, value, own)


class _Native:
    """In the place of PyTorch's attention, whose heads come before the tokens."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._attend(q, k, v, OwnAttention(_native, attn_mask, options)).transpose(1, 2)


def _native(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _itself(processor: Any) -> Any:
    return processor
