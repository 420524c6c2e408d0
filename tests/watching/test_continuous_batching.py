"""transformers' continuous batching is watched: every request reads as if it had run alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.watching.recorder.paged_record import HeldRequest

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers", minversion="5.22")  # whose paged cache is read

pytest.importorskip("headwise.transformers")  # registers the implementation

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [5, 5, 6]]
NEW = 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage twice in every call, which takes a second of it."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def built(family: str = "Llama", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 99}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.to(dtype)  # maps of float64 need no kernel
    for name, x in model.named_parameters():  # so that heads choose
        if "q_proj" in name or "k_proj" in name:
            nn.init.normal_(x, std=0.4)
    return model


def settings() -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=98, pad_token_id=0
    )


def served(
    model: Any, prompts: list[list[int]] = PROMPTS, keep: dict[str, bool] | None = None, **more: Any
) -> dict[str, list[int]]:
    """The new tokens of each request; long prompts are read in parts."""
    options = {
        "num_blocks": 32,
        "page_size": 4,
        "max_batch_tokens": 8,
        "allow_block_sharing": False,
    }
    found = model.generate_batch(
        prompts,
        generation_config=settings(),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**{**options, **more}),
        progress_bar=False,
        **(keep or {}),
    )
    return {name: x.generated_tokens for name, x in found.items()}


def alone(model: Any, prompt: list[int], beyond: int = 0) -> tuple[list[int], Any]:
    """The new tokens of a request that runs alone, and a watch of its text but the last token."""
    model.set_attn_implementation("sdpa" if model.dtype == torch.float64 else "eager")
    given = torch.tensor([prompt], device=model.device)
    text = model.generate(given, generation_config=settings())
    with hw.watch(model) as seen:
        model(text[:, : text.shape[1] - 1 + beyond])
    return text[0, len(prompt) :].tolist(), seen


def check(
    model: Any,
    seen: Any,
    tokens: dict[str, list[int]],
    prompts: list[list[int]] = PROMPTS,
    off: float = 1e-5,
    beyond: int = 0,
) -> None:
    """Compare each request with the same text alone; it ran so many steps beyond its end."""
    assert len(seen.requests) == len(prompts)
    requests = seen.requests
    for number, prompt in enumerate(prompts):
        name, (right, told) = f"req_{number}", alone(model, prompt, beyond)
        request = requests[name]
        assert tokens[name] == right
        text = prompt + right
        assert request.tokens.tolist() == [text[: len(text) - 1 + beyond]]
        assert [layer.number for layer in request.layers] == [0, 1]
        for mine in request.layers:
            theirs = told.layer(mine.number)
            whole = theirs.map()
            close = {"atol": off, "rtol": 10 * off, "check_dtype": False}
            received = request.received(mine.number)
            torch.testing.assert_close(received, whole.received()[0], **close)
            torch.testing.assert_close(mine.map().to_tensor(), whole.to_tensor(), **close)
            for stat in mine.stats:
                torch.testing.assert_close(
                    getattr(mine.observation, stat), getattr(theirs.observation, stat),
                    **close, msg=stat,
                )  # fmt: skip
        entropy = told.heads().where(layer=0)["entropy_mean"]
        assert request.heads()["entropy_mean"][: len(entropy)] == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("implementation", ["headwise", "sdpa"])
def test_requests_are_read_as_if_alone(implementation: str) -> None:
    model = built()
    model.set_attn_implementation(implementation)
    with hw.watch(model, strict=True) as seen:
        tokens = served(model)
    check(model, seen, tokens)
    assert int(seen.layer(0).counted()[0]) == sum(map(len, seen.requests.values()))
    model.set_attn_implementation(implementation)
    assert served(model) == tokens  # unwatched


@pytest.mark.filterwarnings("ignore:The `paged.` prefix is no longer needed:FutureWarning")
def test_implementations_agree() -> None:
    model, found = built(dtype=torch.float32), []
    for implementation in ("paged|eager", "headwise", "paged|headwise"):
        model.set_attn_implementation(implementation)
        with hw.watch(model, strict=True, maps=False) as seen:
            tokens = served(model)
        found.append((tokens, [row["entropy_mean"] for row in seen.heads()]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    assert found[1] == found[2]


def test_caps_and_windows() -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = built(
        "Gemma2", torch.float32, sliding_window=6, layer_types=kinds, attn_logit_softcapping=5.0
    )
    model.set_attn_implementation("headwise")
    with hw.watch(model, strict=True) as seen:
        tokens = served(model)
    check(model, seen, tokens)
    every = [alone(model, prompt)[1] for prompt in PROMPTS]
    joined = torch.cat([x.layer(0).observation.entropy.flatten(2) for x in every], 2).mean(2)
    assert seen.heads()["entropy_mean"][:4] == pytest.approx(joined[0].tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("stamps", "length"), [([1, 2, 3, 0], 3), ([0, 0, 0, 0], None), ([1, 2, 0, 4], None)]
)
def test_a_request_of_which_tokens_were_not_seen_is_refused(
    stamps: list[int], length: int | None
) -> None:
    held = HeldRequest("a", torch.tensor(stamps), torch.tensor(stamps), {}, False)
    if length is not None:
        assert held.length() == length
        return
    with pytest.raises(ValueError, match="'a' holds keys that were copied, or computed before"):
        held.length()


def test_requests_are_whole_without_the_first_layer() -> None:
    model = built(num_hidden_layers=3)
    with hw.watch(model, layers=[1, 2], maps=False) as seen:
        served(model)
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="in another thread"):
            pool.submit(model, torch.tensor([PROMPTS[0]])).result()
    assert [len(x) for x in seen.requests.values()] == [len(x) + NEW - 1 for x in PROMPTS]


def test_eviction_scores_are_there_while_it_decodes() -> None:
    model = built()
    found: list[tuple[int, Tensor, Tensor]] = []

    def look(*_: object) -> None:
        for request in seen.requests.values():
            sums = request.received(1)
            found.append((len(request), sums, request.layer(1).map().received()[0]))

    with hw.watch(model) as seen:
        handle = model.lm_head.register_forward_hook(look)
        served(model, PROMPTS[:1])
        handle.remove()
    assert [length for length, *_ in found] == [5, 6, 7, 8, 9]
    for _, sums, whole in found:
        torch.testing.assert_close(sums.double(), whole, atol=1e-5, rtol=1e-4)


def test_models_whose_layers_all_have_windows_have_no_requests() -> None:
    model = built("Mistral", sliding_window=6)
    model.set_attn_implementation("headwise")
    with hw.watch(model) as seen:
        served(model, PROMPTS[:2])
        with pytest.raises(ValueError, match="every layer of this model has a sliding window"):
            _ = seen.requests
    assert seen.heads()["entropy_mean"][0] > 0


@pytest.mark.parametrize("implementation", ["headwise", "sdpa"])
def test_requests_that_share_pages_are_read_as_if_alone(implementation: str) -> None:
    model, begin = built(), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    model.set_attn_implementation(implementation)
    prompts = [[*begin, 3], [*begin, 4, 5], [5, 5, 6], begin]
    with hw.watch(model) as seen:
        tokens = served(model, prompts, allow_block_sharing=True)
    check(model, seen, tokens, prompts)
    rows = int(seen.layer(0).counted()[0])
    assert rows < sum(map(len, seen.requests.values()))  # some were computed once
    with hw.watch(model, maps=False) as seen:
        served(model, prompts[:1], allow_block_sharing=True)
    with pytest.raises(ValueError, match="maps=True"):
        seen.requests["req_0"].received(0)


def test_pages_that_are_used_again_say_nothing_of_their_last_request() -> None:
    model = built()
    model.set_attn_implementation("headwise")
    prompts = [[n + 3 for n in range(length)] for length in (11, 2, 7, 3, 6)]
    with hw.watch(model) as seen:
        tokens = served(model, prompts, num_blocks=4)  # room for one or two at a time
    check(model, seen, tokens, prompts)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as CUDA graphs need them: padded to few sizes, after a warm-up of made-up requests."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    begin = ModelRunner.__init__

    def padding(self: Any, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        self.pad_inputs = self.inputs_and_outputs.use_cuda_graph_varlen = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(
    ("implementation", "family"), [("headwise", "Llama"), ("sdpa", "Llama"), ("headwise", "Gemma2")]
)
def test_neither_padding_nor_warm_ups_count(implementation: str, family: str) -> None:
    kinds = ["sliding_attention", "full_attention"]
    more = {"sliding_window": 6, "layer_types": kinds} if family == "Gemma2" else {}
    model = built(family, torch.float64 if family == "Llama" else torch.float32, **more)
    model.set_attn_implementation(implementation)
    with hw.watch(model, strict=True) as seen:
        tokens = served(model, max_batch_tokens=16)
    check(model, seen, tokens)
    assert int(seen.layer(0).counted()[0]) == sum(map(len, seen.requests.values()))


def test_graphs_of_a_watch_are_its_own() -> None:
    from transformers.generation.continuous_batching.utils import CudaGraphBuffer

    class Graph:
        def reset(self) -> None:
            pass

    graphs: Any = CudaGraphBuffer()
    before, inside = Graph(), Graph()
    graphs.set_graph((8,), before)
    watch = hw.watch(built())
    for _ in range(2):
        with watch:
            assert graphs.get_graph((8,)) is None
            graphs.set_graph((8,), inside)
            assert graphs.get_graph((8,)) is inside
        assert graphs.get_graph((8,)) is before


def test_experiments_are_refused() -> None:
    model = built()
    model.set_attn_implementation("headwise")
    attention, x = model.model.layers[0].self_attn, torch.zeros(1, 1, 32).double()
    rope = model.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long))
    given = {"position_embeddings": rope, "attention_mask": None, "cache": object()}
    with hw.knock_out(model, [(0, 0, 1)]), pytest.raises(ValueError, match=r"use model\.generate"):
        attention(x, **given)


def test_a_table_of_pages_is_read_without_gathering() -> None:
    """The fast path of decoding, which transformers takes on GPUs, with its own cache."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.requests import RequestState

    from headwise.watching.adapters.implementation import attend

    model = built()
    model.set_attn_implementation("headwise")
    options = {
        "num_blocks": 16,
        "page_size": 4,
        "max_batch_tokens": 16,
        "max_requests_per_batch": 2,
    }
    given = transformers.ContinuousBatchingConfig(
        **options, allow_block_sharing=False, max_blocks_per_request=4, max_memory_percent=0.5
    )
    given.use_cuda_graph = (False, False)
    cache = PagedAttentionCache(
        model.config, given, torch.device("cpu"), DistributedHelper(None, 1), torch.float32
    )
    module, past = model.model.layers[1].self_attn, {"a": 6, "b": 3}
    q, k, v = (torch.randn(1, heads, 11, 8) for heads in (4, 2, 2))
    states = {name: RequestState(request_id=name, initial_tokens=[1]) for name in past}
    for name, state in states.items():
        assert cache.can_store_request_tokens(state, past[name] + 1)

    def ends(*counts: int) -> Tensor:
        return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)

    def step(first: int, last: int, **index: Any) -> Tensor:
        part = (x[:, :, first:last] for x in (q, k, v))
        return attend(module, *part, None, scaling=0.5, cache=cache, **index)[0]

    read: list[list[int]] = [[]]
    write: list[list[int]] = [[]]
    for name, length in past.items():
        cache.extend_read_and_write_indices(name, 0, length, read, write)
    prompt = step(
        0, 9, cu_seq_lens_q=ends(6, 3), cu_seq_lens_k={"full_attention": ends(6, 3)},
        max_length_q=6, max_length_k={"full_attention": 6}, block_table=None,
        read_index=[torch.tensor([], dtype=torch.long)], write_index=[torch.tensor(write[0])],
    )  # fmt: skip
    table = torch.full((1, 2, 4), -1, dtype=torch.int32)
    for row, (name, length) in enumerate(past.items()):
        cache.fill_block_table(name, length, 1, table[:, row])
    decoded = step(
        9, 11, cu_seq_lens_q=ends(1, 1), cu_seq_lens_k={"full_attention": ends(7, 4)},
        max_length_q=1, max_length_k={"full_attention": 1}, block_table=table,
        read_index=[torch.empty(0)], write_index=[torch.empty(0)],
    )  # fmt: skip
    both = torch.cat((prompt, decoded), 1)[0]
    for rows in ([0, 1, 2, 3, 4, 5, 9], [6, 7, 8, 10]):
        part = (x[:, :, rows] for x in (q, k, v))
        right = hw.attention(*part, score=hw.Dot(0.5), mask=hw.mask.causal())
        torch.testing.assert_close(both[rows], right[0].transpose(0, 1))
