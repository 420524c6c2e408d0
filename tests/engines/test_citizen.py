"""Attention behaves as a PyTorch function should: compiled, exported, counted, cast and copied."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import Problem, pose
from headwise.core.row_sums import ENTROPY, RowResults, unpacked
from headwise.engines import sdpa
from headwise.engines.streaming import backward_loop as backward
from tests.problems import Call, Recipe, small_blocks
from tests.thinned import thinned

ENGINES = ("auto", "streaming", "reference")
EVERYTHING = Recipe(
    score="additive", mask="sinks and window", bias="buckets", softcap="cap", sinks="sinks",
    dropout="dropout", heads="grouped", widths="wide values", layout="strided", longest=8,
)  # fmt: skip
CALLS = {
    "plain": Recipe(longest=8),
    "causal, heads last": Recipe(mask="causal", layout="heads last", dtype="float32", longest=8),
    "dense, a bias tensor": Recipe(mask="dense", bias="tensor", layout="expanded", longest=8),
    "documents, alibi, bfloat16": Recipe(
        mask="documents", bias="alibi", dtype="bfloat16", layout="heads last", longest=8
    ),
    "padding, cosine, sinks": Recipe(mask="padding", score="cosine", sinks="sinks", longest=8),
    "everything": EVERYTHING,
}


def causal(engine: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: hw.attention(q, k, v, mask=hw.mask.causal(), engine=engine)


def three(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(torch.randn(3, 1, 2, 5, 8, dtype=dtype).unbind(0))


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.requires_grad_() for x in three(dtype)]


def posed(call: Call) -> Problem:
    return pose("attention", call.q, call.k, call.v, Options(**call.options()))


@contextmanager
def their_warnings() -> Iterator[None]:
    """Ignore torch's warnings about itself: its forward mode compiles with the old torch.jit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=Warning)
        warnings.filterwarnings("ignore", message=".*performance drop.*", category=UserWarning)
        yield


# The operators


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("wants", [0, 1, 7], ids=["out", "entropy", "every sum"])
def test_the_forward_operator_passes_pytorchs_own_check(case: str, wants: int) -> None:
    problem = posed(CALLS[case].call())
    arguments = tuple(
        x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in (problem.q, problem.k, problem.v, *problem.terms(), wants)
    )
    found = torch.library.opcheck(torch.ops.headwise.streaming.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("learns", "entropy", "case"), thinned([True, False], [True, False], CALLS)
)
def test_the_backward_operator_passes_it_too(case: str, entropy: bool, learns: bool) -> None:
    problem = posed(CALLS[case].call())
    given = (problem.q, problem.k, problem.v, *problem.terms())
    found = torch.ops.headwise.streaming(*given, ENTROPY if entropy else 0)
    sums = RowResults(*unpacked(found))
    grads = [torch.randn_like(x) for x in (sums.out, sums.lse, sums.lse)]
    learns = learns and problem.terms().bias is not None
    last = grads[2] if entropy else None
    known = (sums.out, sums.lse, sums.max_logit, sums.log_total, sums.entropy)
    arguments = (*given, *known, grads[0], grads[1], last, learns)
    checked = torch.library.opcheck(torch.ops.headwise.streaming_backward.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("learns", [True, False])
def test_only_a_bias_that_learns_is_differentiated(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    usual = backward.Backward.added_terms

    def listens(loop: backward.Backward, *given: object) -> None:
        made.append(loop.grad_bias)
        usual(loop, *given)

    monkeypatch.setattr(backward.Backward, "added_terms", listens)
    q, k, v = leaves()
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=learns)
    hw.attention(q, k, v, bias=bias, engine="streaming").sum().backward()
    assert all((x is not None) == learns for x in made)
    assert len(made) > 0
    assert (bias.grad is not None) == learns


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_are_known_without_numbers(engine: str, where: str) -> None:
    if where == "meta":
        out = causal(engine)(*(x.to("meta") for x in three()))
    else:
        with FakeTensorMode():
            out = causal(engine)(*three())
    assert out.shape == (1, 2, 5, 8)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_those_of_finite_differences(engine: str) -> None:
    assert torch.autograd.gradcheck(causal(engine), leaves())


@pytest.mark.parametrize("engine", ["streaming", "reference"])
@pytest.mark.parametrize(
    ("score", "bias", "mask"),
    [
        ("additive", "buckets", "sinks and window"),
        ("general", "tensor", "documents"),
        ("cosine", "alibi", "causal"),
    ],
)
def test_every_learnable_part_passes_gradcheck_through_out_lse_and_entropy(
    engine: str, score: str, bias: str, mask: str
) -> None:
    tiny = replace(EVERYTHING, score=score, bias=bias, mask=mask, longest=4, layout="packed")
    call = tiny.call().copy()
    names = list(call.learnable())

    def run(*parts: Tensor) -> tuple[Tensor, ...]:
        copied = replace(call, **dict(zip(names, parts, strict=True)))
        out, seen = copied.observe(engine, stats=("lse", "entropy"))
        return out, seen.lse, seen.entropy

    # random directions instead of every entry; every entry is compared with the reference elsewhere
    with small_blocks(keys=2):
        assert torch.autograd.gradcheck(run, tuple(call.learnable().values()), fast_mode=True)


# torch.compile and torch.export


def compiled_like_eager(
    run: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], backend: str
) -> None:
    """Assert that compiling gives one graph, the same numbers and the same gradients."""
    torch.compiler.reset()
    twins = [x.detach().clone().requires_grad_() for x in tensors]
    found, wanted = torch.compile(run, fullgraph=True, backend=backend)(*tensors), run(*twins)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    for results in (found, wanted):
        sum((x * x).sum() for x in results if x.requires_grad).backward()
    for x, twin in zip(tensors, twins, strict=True):
        torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("case", ["causal, heads last", "everything"])
@pytest.mark.parametrize("engine", ["auto", "streaming"])
def test_attention_and_observe_compile_into_one_graph(engine: str, case: str) -> None:
    call = CALLS[case].call().copy()
    options = replace(call, **{n: x.detach() for n, x in call.learnable().items()}).options()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, seen = hw.observe(q, k, v, engine=engine, sink_keys=2, **options)
        plain = hw.attention(q, k, v, engine=engine, **options)
        return plain, out, seen.entropy, seen.lse, seen.sink_mass, seen.logit_var

    compiled_like_eager(run, [call.q, call.k, call.v], "aot_eager")


def test_the_reference_compiles_too() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), engine="reference")
        return out, seen.entropy, seen.distance

    compiled_like_eager(run, leaves(), "aot_eager")


@pytest.mark.slow  # a C++ compiler takes its time
def test_generated_code_reads_gradients_by_their_strides() -> None:
    # Keys are a view with heads after positions, and their gradients go into generated code.
    layer = nn.Linear(8, 24).double()

    def run(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (3, B, H, N, D)
        out = hw.attention(q, k, v, mask=hw.mask.causal(), softcap=5.0)
        return (out.transpose(1, 2).flatten(2),)

    with their_warnings():
        compiled_like_eager(run, [torch.randn(2, 5, 8).double().requires_grad_()], "inductor")


def test_a_compiled_call_takes_other_lengths_without_another_graph() -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(causal("streaming"), fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (5, 7, 9):
        q, k, v = torch.randn(3, 1, 2, n, 8, dtype=torch.float64).unbind(0)
        torch.testing.assert_close(run(q, k, v), causal("reference")(q, k, v))
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_compilers_do_not_trace_the_query_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(sdpa, "_HOPPER", {})
    found = torch.compile(lambda x: x + sdpa._is_hopper(0), fullgraph=True, backend="aot_eager")(
        torch.zeros(2)
    )
    assert torch.equal(found, torch.ones(2))


class Layer(nn.Module):
    """A module to export: attention and a statistic."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = hw.mask.causal() & hw.mask.window(3)
        out, seen = hw.observe(q, k, v, mask=mask, engine=self.engine)
        return out, seen.entropy


@pytest.mark.parametrize("engine", ["streaming", "reference"])
def test_attention_can_be_exported(engine: str) -> None:
    tensors = tuple(three())
    program = torch.export.export(Layer(engine), tensors)
    for found, wanted in zip(program.module()(*tensors), Layer(engine)(*tensors), strict=True):
        torch.testing.assert_close(found, wanted)


class Plain(nn.Module):
    """Attention on the engine that the plan chooses."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal())


def test_the_chosen_engine_exports_with_any_length() -> None:
    n = torch.export.Dim("n", min=2, max=64)
    shapes = {name: {2: n} for name in "qkv"}
    program = torch.export.export(Plain(), tuple(three()), dynamic_shapes=shapes)
    longer = tuple(torch.randn(3, 1, 2, 11, 8, dtype=torch.float64).unbind(0))
    torch.testing.assert_close(program.module()(*longer), causal("reference")(*longer))


def test_attention_exports_with_any_length() -> None:
    n = torch.export.Dim("n", min=2, max=64)
    shapes = {name: {2: n} for name in "qkv"}
    program = torch.export.export(Layer("streaming"), tuple(three()), dynamic_shapes=shapes)
    longer = tuple(torch.randn(3, 1, 2, 11, 8, dtype=torch.float64).unbind(0))
    torch.testing.assert_close(program.module()(*longer)[0], Layer("reference")(*longer)[0])


# Floating-point operations


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (None, 6 * 6),
        (hw.mask.causal(), 21),
        (hw.mask.causal() & hw.mask.window(1), 11),
        (hw.mask.causal() & (hw.mask.window(0) | hw.mask.prefix(1)), 11),
        (hw.mask.lengths(4), 24),
        (hw.mask.dense(torch.eye(6, dtype=torch.bool)), 6),
    ],
)
def test_streaming_counts_the_pairs_that_the_mask_shows(mask: hw.mask.Mask, pairs: int) -> None:
    q, k, v = (torch.randn(2, heads, 6, width) for heads, width in ((4, 8), (2, 8), (2, 12)))
    forward = 2 * 4 * pairs * 2 * (8 + 12)
    assert counted(lambda: hw.attention(q, k, v, mask=mask, engine="streaming")) == forward
    for x in (q, k, v):
        x.requires_grad_()
    whole = counted(lambda: hw.attention(q, k, v, mask=mask, engine="streaming").sum().backward())
    assert whole == forward * 7 // 2  # backward: 5 products where forward has 2


def test_pairs_count_by_batch_entry_and_head() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    mask = hw.mask.lengths([6, 2])
    found = counted(lambda: hw.attention(q, k, v, mask=mask, engine="streaming"))
    assert found == 4 * 6 * (6 + 2) * 2 * 16


def test_every_pair_counts_where_the_mask_is_fake() -> None:
    with FakeTensorMode():
        q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
        found = counted(lambda: hw.attention(q, k, v, mask=hw.mask.causal(), engine="streaming"))
    assert found == 2 * 4 * 36 * 2 * 16


def test_pytorchs_kernel_on_the_cpu_is_counted_too() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 6, 8).unbind(0))
    found = counted(lambda: hw.attention(q, k, v, engine="sdpa").sum().backward())
    assert found == 2 * 4 * 36 * 2 * 16 * 7 // 2


def test_the_reference_counts_its_two_products() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    assert counted(lambda: hw.attention(q, k, v, engine="reference")) == 2 * 4 * 36 * 2 * 16


# Autocast, no_grad, checkpoints


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [*ENGINES, "sdpa"])
def test_autocast_gives_what_16_bit_inputs_give(engine: str, dtype: torch.dtype) -> None:
    tensors = [x.requires_grad_() for x in three(torch.float32)]
    halves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype):
        out = causal(engine)(*tensors)
    out.float().sum().backward()
    wanted = causal(engine)(*halves)
    wanted.float().sum().backward()
    assert out.dtype == dtype
    assert torch.equal(out, wanted)
    for x, half in zip(tensors, halves, strict=True):
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad, half.grad.float())


def test_a_backward_called_inside_autocast_sums_in_float32_too() -> None:
    inside = leaves(torch.bfloat16)
    outside = [x.detach().clone().requires_grad_() for x in inside]
    causal("streaming")(*outside).float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        causal("streaming")(*inside).float().sum().backward()
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("engine", ["streaming", "reference"])
def test_statistics_under_autocast_are_float32_and_exact(engine: str) -> None:
    tensors = three(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, seen = hw.observe(*tensors, score=hw.Additive(torch.ones(8)), engine=engine)
    halves = [x.bfloat16() for x in tensors]
    _, wanted = hw.observe(*halves, score=hw.Additive(torch.ones(8)), engine=engine)
    for name in hw.STATISTICS:
        assert getattr(seen, name).dtype == torch.float32
        assert torch.equal(getattr(seen, name), getattr(wanted, name))


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_leaves_float64_alone(engine: str) -> None:
    tensors = three()
    with torch.autocast("cpu", torch.bfloat16):
        out = causal(engine)(*tensors)
    assert torch.equal(out, causal(engine)(*tensors))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_for_them(
    engine: str, context: Callable[[], object]
) -> None:
    tensors = leaves()
    with context():
        out, seen = hw.observe(*tensors, engine=engine)
        assert not out.requires_grad
        assert not seen.entropy.requires_grad
    torch.testing.assert_close(out.clone(), causal_free(tensors))


def causal_free(tensors: list[Tensor]) -> Tensor:
    return hw.attention(*(x.detach() for x in tensors), engine="reference")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_recomputes_the_same(engine: str, reentrant: bool, dropout: float) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), dropout=dropout, engine=engine)

    first = leaves()
    second = [x.detach().clone().requires_grad_() for x in first]
    torch.manual_seed(4)
    checkpoint(run, *first, use_reentrant=reentrant).sum().backward()
    torch.manual_seed(4)
    run(*second).sum().backward()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.grad, b.grad)


# Other derivatives and transforms


def test_the_reference_has_every_derivative() -> None:
    tensors, run = leaves(), causal("reference")
    assert torch.autograd.gradgradcheck(run, tensors)
    with their_warnings():
        assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True)


def test_streaming_says_that_it_has_no_second_derivative() -> None:
    q, k, v = leaves()
    (grad,) = torch.autograd.grad(causal("streaming")(q, k, v).pow(2).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; use engine='reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("call", [hw.attention, hw.observe, hw.partial])
def test_forward_mode_is_refused_where_it_would_be_lost(call: Callable[..., object]) -> None:
    q, k, v = three()
    options = {} if call is hw.partial else {"engine": "streaming"}
    with their_warnings(), forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="no forward-mode derivative"):
            call(dual, k, v, **options)


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["sdpa's", "streaming's"])
def test_auto_gives_such_derivatives_to_the_reference(
    softcap: float | None,
) -> None:
    q, k, v = three()

    def run(x: Tensor, engine: str = "auto") -> Tensor:
        return hw.attention(x, k, v, softcap=softcap, engine=engine).pow(2).sum()

    with their_warnings():
        _, tangent = torch.func.jvp(run, (q,), (torch.ones_like(q),))
        grad = torch.func.grad(run)(q)
    q.requires_grad_()
    run(q, "reference").backward()
    torch.testing.assert_close(tangent, q.grad.sum())
    torch.testing.assert_close(grad, q.grad)


def test_streaming_refuses_functional_gradients_with_a_reason() -> None:
    q, k, v = three()
    with pytest.raises(ValueError, match=r"torch\.func\.grad does not support"):
        torch.func.grad(lambda x: causal("streaming")(x, k, v).sum())(q)


@pytest.mark.parametrize("engine", ["streaming", "reference"])
def test_vmap_agrees_with_a_loop(engine: str) -> None:
    tensors = torch.randn(3, 4, 1, 2, 5, 8, dtype=torch.float64).unbind(0)
    with their_warnings():
        found = torch.func.vmap(causal(engine))(*tensors)
    wanted = torch.stack([causal("reference")(*each) for each in zip(*tensors, strict=True)])
    torch.testing.assert_close(found, wanted)


# Copies


def test_everything_a_caller_holds_can_be_copied_and_pickled() -> None:
    tensors = three()
    out, seen = hw.observe(*tensors, mask=hw.mask.causal())
    held = [
        hw.mask.causal([1]) & (hw.mask.window(2) | hw.mask.prefix(1)),
        hw.mask.documents(torch.tensor([0, 0, 1])),
        hw.Dot(0.3),
        hw.Additive(torch.ones(8)),
        hw.General(torch.ones(8, 8)),
        hw.Cosine(3.0),
        hw.ALiBi(2),
        hw.RelativeBuckets(torch.ones(8, 2)),
        hw.Dropout(0.1, 3),
        hw.explain(*tensors),
        hw.partial(*tensors),
        seen,
        out,
    ]
    for thing in held:
        assert type(copy.deepcopy(thing)) is type(thing)
        assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


def test_a_copied_parameter_is_another_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return hw.attention(q, k, v, score=hw.Additive(self.weight))

    model = Model()
    twin = copy.deepcopy(model)
    twin(*three()).sum().backward()
    assert model.weight.grad is None
    assert twin.weight.grad is not None


# Memory, determinism


@pytest.mark.parametrize("engine", ["streaming", "reference", "sdpa"])
def test_the_same_call_twice_is_the_same_to_the_bit(engine: str) -> None:
    tensors = [x.requires_grad_() for x in torch.randn(3, 2, 4, 50, 16).unbind(0)]
    runs = []
    for _ in range(2):
        out = causal(engine)(*tensors)
        runs.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_streaming_changes_none_of_its_inputs() -> None:
    call = EVERYTHING.call()
    before = {name: x.clone() for name, x in call.learnable().items()}
    call.copy().observe("streaming")[0].sum().backward()
    for name, x in call.learnable().items():
        assert torch.equal(x, before[name])
