"""Compiled code: one graph, no recompilation when a knob turns, the same results and errors."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from blockattn import (
    BlockSummary,
    TokenGrid,
    UnsupportedError,
    attend,
    quantised_attention,
    skip_softmax_attention,
    sol_attention,
    sol_route,
    video_sparse_attention,
)
from blockattn.compiled import one_node, setting
from tests.inputs import drifting

GRID = (5, 5, 8)
OPERATORS = torch.ops.blockattn
CXX = os.environ.get("CXX", "g++")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return drifting(200, dim=32)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# -- every operation with every knob ---------------------------------------------------------------


@dataclass(frozen=True)
class Knob:
    """One number of one operation, values that differ in effect, and the rest of the call."""

    function: Callable
    name: str
    values: tuple
    rest: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.function.__name__}-{self.name}"

    def call(self, value, tensors):
        q, k, v = tensors
        rest = dict(self.rest)
        if self.function is video_sparse_attention:
            rest["gate_compress"] = q * 0.5
        return self.function(q, k, v, **{self.name: value}, **rest) + 1


SCALES = (0.1, 0.2, 0.3, 0.4)
RATIOS = (1e-3, 0.2, 0.5, 0.9)
KNOBS = [
    Knob(sol_attention, "tau", (1.0, 0.5, -0.25, 2.0)),
    Knob(sol_attention, "sink_tokens", (70, 5, 100, 64), {"tau": 2.0}),
    Knob(sol_attention, "sink_start", (2, 70, 100, 150), {"tau": 2.0, "sink_tokens": 40}),
    Knob(sol_attention, "scale", SCALES),
    Knob(skip_softmax_attention, "threshold", RATIOS, {"tile": (64, 64)}),
    Knob(skip_softmax_attention, "threshold_scale_factor", (0.2, 40.0, 100.0, 180.0)),
    Knob(skip_softmax_attention, "scale", SCALES, {"threshold": 0.5, "causal": True}),
    Knob(video_sparse_attention, "sparsity", (0.9, 0.5, 0.25, 0.75), {"grid": GRID}),
    Knob(video_sparse_attention, "scale", SCALES, {"grid": TokenGrid(GRID, order="morton")}),
    Knob(attend, "skip_threshold", RATIOS, {"skip_tile": (64, 64)}),
    Knob(attend, "scale", SCALES),
    Knob(attend, "scale_output", SCALES),
    Knob(quantised_attention, "scale", SCALES),
    Knob(quantised_attention, "skip_threshold", RATIOS, {"qk_dtype": "nvfp4"}),
]


def compilations(backend: str, knob: Knob, wrap: Callable, **options) -> list[int]:
    """How often a call was compiled so far, after each value; results equal uncompiled ones."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(knob.call, backend=counter, fullgraph=True, **options)
    tensors, counts = inputs(), []
    for value in knob.values:
        assert torch.equal(compiled(wrap(value), tensors), knob.call(value, tensors))
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("knob", KNOBS, ids=str)
def test_a_knob_in_a_cpu_tensor_never_recompiles(knob):
    counts = compilations("aot_eager", knob, lambda value: setting(value).reshape(1))
    assert counts == [1, 1, 1, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_that_tensor_may_have_no_axis(backend):
    """AOTAutograd restarts once on a 0-d float64 input, within the first compilation."""
    counts = compilations(backend, KNOBS[0], setting)
    assert counts == [counts[0]] * 4


@pytest.mark.parametrize("knob", KNOBS, ids=str)
def test_a_knob_in_a_python_number_recompiles_at_its_first_change_only(knob):
    assert compilations("aot_eager", knob, lambda value: value) == [1, 2, 2, 2]


@pytest.mark.parametrize("knob", KNOBS[::3], ids=str)
def test_a_knob_in_a_python_number_never_recompiles_with_dynamic_true(knob):
    assert compilations("aot_eager", knob, lambda value: value, dynamic=True) == [1, 1, 1, 1]


@pytest.mark.parametrize("make, expected", [(float, [1, 2, 2, 2]), (number, None)])
def test_a_knob_in_a_module_attribute(make, expected):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sol_attention(q, k, v, tau=self.tau)

    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    layer.tau = make(1.0)
    compiled, counts = torch.compile(layer, backend=counter, fullgraph=True), []
    for value in (1.0, 0.5, 0.25, -1.0):
        layer.tau = make(value)
        assert torch.equal(compiled(*inputs()), sol_attention(*inputs(), tau=value))
        counts.append(counter.frame_count)
    assert counts == (expected or [counts[0]] * 4)


@pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs a C++ compiler: no {CXX} found")
def test_inductor_keeps_a_changing_float_out_of_the_code():
    knob = Knob(sol_attention, "tau", (1.0, 0.5, 0.0, -1.0))
    assert compilations("inductor", knob, lambda value: value) == [1, 2, 2, 2]


@pytest.mark.parametrize("knob", KNOBS, ids=str)
def test_a_call_is_one_node_of_one_graph(knob):
    counter = CompileCounterWithBackend("eager")
    torch.compile(knob.call, backend=counter, fullgraph=True)(knob.values[0], inputs())
    (graph,) = counter.graphs
    nodes = [str(node.target) for node in graph.graph.nodes if "blockattn" in str(node.target)]
    assert nodes == [f"blockattn.{knob.function.__name__}"]


def test_another_sequence_length_needs_no_third_compilation():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: sol_attention(*x), backend=counter, fullgraph=True)
    for tokens in (200, 130, 333, 64):
        tensors = drifting(tokens, dim=32)
        assert torch.equal(compiled(*tensors), sol_attention(*tensors))
    assert counter.frame_count == 2


def test_a_route_and_its_tail_enter_the_graph_as_values():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, route, tail: attend(q, k, v, route, tail=tail),
        backend=counter,
        fullgraph=True,
    )
    q, k, v = inputs()
    tail = BlockSummary.of(k, v)
    for tau in (1.0, 0.0, -1.0):
        route = sol_route(q, k, tau=tau)
        assert torch.equal(compiled(q, k, v, route, tail), sol_attention(q, k, v, tau=tau))
    assert counter.frame_count == 1


def test_block_lengths_and_device_scales_enter_as_tensors():
    q, k, v = inputs()
    route = sol_route(q, k, tau=1.0)
    lengths, scale = torch.tensor([64, 10, 64, 8], dtype=torch.int32), torch.tensor([0.3])
    call = lambda: attend(q, k, v, route, block_lengths=lengths, scale=scale, scale_output=scale)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(), call())


# -- settings in tensors, also outside compiled code -----------------------------------------------


@pytest.mark.parametrize("knob", KNOBS, ids=str)
def test_outside_compiled_code_a_cpu_tensor_is_the_number_in_it(knob):
    for value in knob.values:
        assert torch.equal(knob.call(setting(value), inputs()), knob.call(value, inputs()))


@pytest.mark.parametrize(
    "value, dtype", [(1.5, torch.float64), (3, torch.int64), (True, torch.bool)]
)
def test_a_setting_keeps_the_type_of_the_number(value, dtype):
    assert setting(value).dtype == dtype
    assert setting(value).item() == value


def test_a_setting_must_be_one_element_that_the_host_can_read():
    with pytest.raises(ValueError, match=r"tau: shape \(2,\) has 2 elements, need 1"):
        sol_attention(*inputs(), tau=torch.ones(2))
    with pytest.raises(ValueError, match="tau: on meta, but it is read on the host"):
        sol_attention(*inputs(), tau=torch.ones((), device="meta"))
    with pytest.raises(TypeError, match="tau=True: expected a number"):
        sol_attention(*inputs(), tau=torch.tensor(True))
    with pytest.raises(TypeError, match=r"sink_tokens=1\.5: expected an integer"):
        sol_attention(*inputs(), sink_tokens=number(1.5))


# -- errors ---------------------------------------------------------------------------------------

WRONG_VALUES = [
    (TypeError, "tau=True: expected a number", {"tau": True}),
    (TypeError, "tau=None: expected a number", {"tau": None}),
    (ValueError, "tau=nan: must be finite", {"tau": float("nan")}),
    (ValueError, "tau=inf: must be finite", {"tau": float("inf")}),
    (ValueError, "thresh_type='mean': must be one of", {"thresh_type": "mean"}),
    (ValueError, "sink_tokens=201: must be at least 0 and at most 200", {"sink_tokens": 201}),
    (TypeError, "sink_tokens=1.0: expected an integer", {"sink_tokens": 1.0}),
    (ValueError, "scale=-1.0: must be greater than 0", {"scale": -1.0}),
    (ValueError, "impl='fast': must be one of", {"impl": "fast"}),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("error, message, arguments", WRONG_VALUES)
def test_a_wrong_value_raises_the_same_error_from_compiled_code(error, message, arguments, backend):
    call = lambda q, k, v: sol_attention(q, k, v, **arguments)
    for run in (call, torch.compile(call, backend=backend, fullgraph=True)):
        with pytest.raises(error, match=message):
            run(*inputs())


def test_a_wrong_tensor_raises_the_same_error_from_compiled_code():
    q, k, v = inputs()
    call = torch.compile(lambda *x: attend(*x), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"q: shape .* has rank 3"):
        call(q[0], k, v)
    with pytest.raises(TypeError, match=r"q: dtype torch.int32 is not served"):
        call(q.int(), k, v)
    with pytest.raises(ValueError, match="v: shape"):
        call(q, k, v[:, 1:])


def test_an_unsupported_call_raises_the_same_error_from_compiled_code():
    call = lambda q, k, v: attend(q, k, v, skip_threshold=2.0, impl="eager")
    with pytest.raises(UnsupportedError, match="eager: skip_threshold=2 is above 1"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs())


def test_a_missing_gate_raises_the_same_error_from_compiled_code():
    call = lambda *x: video_sparse_attention(*x, grid=GRID, gate_compress=None)
    with pytest.raises(ValueError, match="to_gate_compress"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs())


NOT_A_NODE = [
    (TypeError, "expected a number, got str", "tau is str", {"tau": "1"}),
    (TypeError, "unexpected keyword argument 'sigma'", "no other arguments", {"sigma": 1.0}),
    (TypeError, "thresh_type=3", "thresh_type is int", {"thresh_type": 3}),
    (TypeError, "return_trace=1", "return_trace is int", {"return_trace": 1}),
]


@pytest.mark.parametrize("error, message, obstacle, arguments", NOT_A_NODE)
def test_an_argument_of_a_wrong_type_breaks_the_graph_and_raises_the_same_error(
    error, message, obstacle, arguments
):
    call = lambda q, k, v: sol_attention(q, k, v, **arguments)
    with pytest.raises(error, match=message):
        torch.compile(call, backend="eager")(*inputs())
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=f"blockattn.sol_attention cannot be.*{obstacle}"):
        torch.compile(call, backend="eager", fullgraph=True)(*inputs())


def test_positional_settings_and_missing_tensors_are_refused_as_outside():
    too_many = lambda q, k, v: sol_attention(q, k, v, 1.0)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        torch.compile(too_many, backend="eager")(*inputs())
    too_few = lambda q, k, v: sol_attention(q, k)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        torch.compile(too_few, backend="eager")(*inputs())


def test_a_trace_breaks_the_graph_and_is_complete():
    call = lambda q, k, v: sol_attention(q * 2, k, v, return_trace=True)
    out, trace = torch.compile(call, backend="eager")(*inputs())
    expected, expected_trace = call(*inputs())
    assert torch.equal(out, expected)
    assert torch.equal(trace.route.words, expected_trace.route.words)
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="return_trace=True; ask for traces outside"):
        torch.compile(call, backend="eager", fullgraph=True)(*inputs())


def test_gradients_are_refused_in_compiled_code_too():
    q, k, v = inputs()
    q.requires_grad_()
    call = lambda q, k, v: sol_attention(q, k, v)
    with pytest.raises(ValueError, match="q: requires_grad=True"):
        torch.compile(call, backend="aot_eager")(q, k, v)
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(out, call(q.detach(), k, v))


# -- the operators themselves ----------------------------------------------------------------------


def operator_calls() -> dict[str, tuple]:
    q, k, v = inputs()
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    route, tail = sol_route(q, k, tau=1.0), BlockSummary.of(k, v)
    words = (route.words, route.block, route.seqlens)
    summary = (tail.k_mean, tail.v_sum, tail.lengths, tail.block)
    no_route, no_tail = (None, (), ()), (None, None, None, 0)
    skip = ((64, 64), "exact")
    both = (number(0.2), torch.tensor([2.0]))
    none, text = (None, None), (0, 0)
    gates = (strided.clone(), strided.clone())
    return {
        "attend": (q, k, v, *words, *summary, number(0.5), *skip, None, *both, False, "auto"),
        "attend dense": (
            strided,
            k,
            v,
            *no_route,
            *no_tail,
            None,
            *skip,
            None,
            *none,
            True,
            "auto",
        ),
        "sol_attention": (strided, k, v, number(1), "diag", None, torch.tensor(5), None, "auto"),
        "skip_softmax_attention": (q, k, v, number(100), None, False, None, *skip, "auto"),
        "video_sparse_attention": (
            *(q, k, v, GRID, text, "raster", *gates, number(0.5), None, "float32", "auto"),
        ),
        "quantised_attention": (
            *(q, k, v, "mxfp8", "fp8", "channel", None, *words, True, None, *skip),
            *(None, None, False, False, "auto"),
        ),
    }


@pytest.mark.parametrize("name", list(operator_calls()))
def test_opcheck(name):
    operator = getattr(OPERATORS, name.split()[0]).default
    opcheck(operator, operator_calls()[name])


def test_every_operator_of_the_library_is_checked():
    assert {name.split()[0] for name in operator_calls()} == {
        name.removeprefix("blockattn::").removesuffix(".default")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("blockattn::")
    }


@pytest.mark.parametrize("function", sorted({knob.function for knob in KNOBS}, key=str))
def test_sol_weakness_43_an_operator_takes_every_parameter_of_its_function(function):
    schema = getattr(OPERATORS, function.__name__).default._schema
    names = (argument.name for argument in schema.arguments)
    parts = ("route_", "tail_", "grid_")
    whole = {x.split("_")[0] if x.startswith(parts) else x for x in names}
    assert whole == set(inspect.signature(function).parameters) - {"return_trace"}


def test_an_exported_program_holds_the_operator():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return sol_attention(q, k, v, tau=0.5)

    program = torch.export.export(Layer(), inputs())
    assert torch.equal(program.module()(*inputs()), sol_attention(*inputs(), tau=0.5))
    assert "blockattn.sol_attention" in str(program.graph)


def test_backward_through_an_operator_is_an_error_and_never_a_wrong_gradient():
    q, k, v = inputs()
    out = OPERATORS.sol_attention(
        q.requires_grad_(), k, v, number(1), "diag", None, torch.tensor(0), None, "auto"
    )
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


def test_the_decorator_keeps_name_and_documentation():
    assert sol_attention.__name__ == "sol_attention"
    assert "tau" in sol_attention.__doc__
    assert one_node(attend).__name__ == "attend"


def test_importing_the_package_does_not_import_the_compiler():
    code = "import sys, blockattn; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("make", [float, number])
def test_on_a_gpu_every_new_tau_takes_effect(mode, make):
    """Nothing reads a setting once and replays it: the operators stay out of CUDA graphs."""
    tensors = [x.cuda() for x in inputs()]
    call = lambda q, k, v, tau: sol_attention(q * 1.5, k, v, tau=tau) * 2
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for tau in (2.0, 2.0, 2.0, -1.0, 0.0, 2.0, -1000.0, 0.5):
        assert torch.equal(compiled(*tensors, make(tau)), call(*tensors, tau))
