"""attn_implementation="headwise" in compiled models: the exact mask, without a tensor of pairs."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402

import headwise.transformers  # noqa: E402, F401  registers the implementation
from headwise.watching.adapters import traced_masks  # noqa: E402
from headwise.watching.adapters.traced_rules import read_rule  # noqa: E402
from tests.thinned import thinned  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*doesn't take boxed arguments"),
    pytest.mark.skipif(
        "q_length" not in inspect.signature(sdpa_mask).parameters,
        reason="this transformers tells a mask's positions in a tensor, so masks are written out",
    ),
]

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 64, "vocab_size": 99, "head_dim": 8, "pad_token_id": 0,
    "use_cache": False,
}  # fmt: skip
ENCODER = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
ENCODER["max_position_embeddings"] = 2000
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SIZES),
    "Mistral": ("MistralConfig", SIZES | {"sliding_window": 5}),
    "Bert": ("BertConfig", ENCODER),
    "Llama4Text": ("Llama4TextConfig", SIZES | {
        "attention_chunk_size": 6, "intermediate_size_mlp": 64, "num_local_experts": 2}),
    "Qwen3": ("Qwen3Config", SIZES | {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
        "num_hidden_layers": 2}),
    "Gemma3Text": ("Gemma3TextConfig", SIZES | {
        "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "Gemma2": ("Gemma2Config", SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "GptOss": ("GptOssConfig", SIZES | {
        "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
        "experts_implementation": "batched_mm"}),  # the others' backward can't be compiled
    "ModernBert": ("ModernBertConfig", ENCODER | {
        "local_attention": 6, "global_attn_every_n_layers": 2, "num_hidden_layers": 2}),
}  # fmt: skip
QUICK = (("Llama", "holes"), ("Mistral", "plain"), ("Llama4Text", "packed"), ("Llama4Text", "left"))
EAGER = ("Gemma2", "GptOss")  # have no sdpa, and run in float32
CASES = ("plain", "left", "holes", "packed")


def made(family: str) -> tuple[nn.Module, nn.Module]:
    """A model with PyTorch's attention, and the same with headwise's."""
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    models = []
    for implementation in ("eager" if family in EAGER else "sdpa", "headwise"):
        config = getattr(transformers, name)(**sizes, attn_implementation=implementation)
        model = getattr(transformers, f"{family}Model")(config).eval()
        models.append(model if family in EAGER else model.double())
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


def inputs(case: str, length: int, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (1 if case == "packed" else batch, length))
    if case == "plain":
        return {"input_ids": ids}
    if case == "packed":
        parts = (length // 3, length // 4, length - length // 3 - length // 4)
        return {"input_ids": ids, "position_ids": torch.cat([*map(torch.arange, parts)])[None]}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    if case == "holes":  # and at the end
        mask[-1, 7:9], mask[-1, -2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def outputs(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What a model says of tokens that are not padding, and the gradients of its parameters."""
    model.zero_grad()
    out = model(**given).last_hidden_state
    if "attention_mask" in given:
        out = out[given["attention_mask"].bool()]
    out.square().sum().backward()
    return out.detach(), [x.new_zeros(()) if x.grad is None else x.grad for x in parameters(model)]


def parameters(model: nn.Module) -> list[Tensor]:
    return [x for name, x in model.named_parameters() if "pooler" not in name]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for case in CASES
        if case != "packed" or "Bert" not in family
    ],
)
def test_a_compiled_model_computes_what_pytorch_does(family: str, case: str) -> None:
    torch._dynamo.reset()
    other, model = made(family)
    given = inputs(case, 20)
    expected, slopes = outputs(other, given)
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, own_slopes = outputs(fast, given)
    close = {"rtol": 1e-3, "atol": 1e-3} if family in EAGER else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found, expected, **close)
    for own, slope in zip(own_slopes, slopes, strict=True):
        torch.testing.assert_close(own, slope, **close)


@pytest.mark.parametrize("family", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_other_padding_and_other_documents_need_no_new_graph(family: str) -> None:
    torch._dynamo.reset()
    _, model = made(family)
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    for case in ("left", "packed"):
        given = inputs(case, 20)
        outputs(fast, given)
        with torch.compiler.set_stance("fail_on_recompile"):
            for name in given.keys() - {"input_ids"}:  # the padding, or the positions
                outputs(fast, given | {name: given[name].roll(3, 1)})


def pairs(family: str, given: dict[str, Tensor]) -> list[str]:
    """The operations of a compiled forward that make one entry per query and key."""
    found: list[str] = []
    length = given["input_ids"].shape[1]

    def compiler(graph: GraphModule, _: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.shape[-2:] == (length, length):
                found.append(str(node.target))
        return graph.forward

    torch._dynamo.reset()
    _, model = made(family)
    fast: Any = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        fast(**given)
    return found


@pytest.mark.parametrize(
    ("family", "case"),
    [("Llama", "holes"),
     *(pytest.param(x, y, marks=pytest.mark.slow) for x in ("Mistral", "Bert") for y in CASES[:2]),
     pytest.param("Llama4Text", "packed", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_graph_holds_nothing_with_one_entry_per_pair(family: str, case: str) -> None:
    # long enough that no engine writes a mask out
    assert pairs(family, inputs(case, 2100 if case == "packed" else 1500)) == []


@pytest.mark.slow
def test_lengths_may_be_dynamic() -> None:
    torch._dynamo.reset()
    other, model = made("Mistral")
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (20, 33):
        for case in ("packed", "left"):
            given = inputs(case, length)
            torch.testing.assert_close(outputs(fast, given)[0], outputs(other, given)[0])


CACHES = {
    "DynamicCache": ("Llama", lambda config: transformers.DynamicCache(config=config)),
    "StaticCache": ("Llama", lambda config: transformers.StaticCache(config, max_cache_len=30)),
    "sliding": ("Mistral", lambda config: transformers.StaticCache(config, max_cache_len=30)),
}


@pytest.mark.parametrize(("kind", "padded"), thinned(CACHES, [True, False], keep=4))
def test_a_compiled_model_reads_its_cache(kind: str, padded: bool) -> None:
    torch._dynamo.reset()
    family, make = CACHES[kind]
    other, model = made(family)
    fast: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, shown = torch.randint(3, 99, (2, 19)), torch.ones(2, 19, dtype=torch.long)
    shown[0, :3] = 0
    caches = [make(copy.deepcopy(x.config)) for x in (other, model)]
    with torch.no_grad():
        for first, last in ((0, 11), (11, 18), (18, 19)):
            given = {"attention_mask": shown[:, :last]} if padded else {}
            expected, found = (
                run(ids[:, first:last], past_key_values=cache, use_cache=True, **given)
                for run, cache in zip((other, fast), caches, strict=True)
            )
            real = shown[:, first:last].bool() if padded else slice(None)
            torch.testing.assert_close(found[0][real], expected[0][real])


def test_a_number_that_may_fall_from_a_token_to_the_next_groups_none() -> None:
    start, table = torch.tensor([3]), torch.tensor([4, 0, 7, 1, 5, 2, 6, 3])

    def groups(number: Any, of_key: Any = None) -> Any:
        torch._dynamo.reset()
        of_key = of_key or number

        @torch.compile(fullgraph=True, backend="eager")
        def found(x: Tensor) -> Any:
            rule = read_rule(lambda b, h, i, j: number(b, i) == of_key(b, j), 1, 0, 8, x.device)
            return None if rule is None else rule.groups

        return found(torch.zeros(()))

    assert groups(lambda b, token: (token - start[b]) // 2).tolist() == [[0, 1, 1, 2, 2, 3, 3, 4]]
    for number in (
        lambda b, token: (table[token] - start[b]) // 2,
        lambda b, token: (start[b] - token) // 2,
        lambda b, token: (token - start[b]) // -2,
        lambda b, token: (token - table[token]) // 2,
        lambda b, token: (token - start[b]) // start[b],
    ):
        assert groups(number) is None
    assert groups(lambda b, token: (token - start[b]) // 2, lambda b, token: token // 2) is None
    assert groups(lambda b, token: token // 2, lambda b, token: token // 3) is None


def test_a_mask_is_read_once_for_all_layers_that_read_it_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced_masks, "RUNNING", [None])
    monkeypatch.setattr(traced_masks, "is_in_main_graph", lambda: True)
    mask, read = torch.ones(1, 1, 2, 2), []

    def made(heads: int) -> int:
        read.append(heads)
        return heads

    layers = (4, 2, 4, 4)
    assert [traced_masks.recall(lambda h=h: made(h), mask, h) for h in layers] == [4, 2, 4, 4]
    assert read == [4, 2]
    traced_masks.forget()
    assert traced_masks.recall(lambda: made(4), mask, 4) == 4
    assert read == [4, 2, 4]
