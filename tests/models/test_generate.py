"""Generation: with and without cache the same tokens, and each strategy as it is defined."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import (
    GPT,
    LSTM,
    Beam,
    Conv,
    ConvConfig,
    FixedGPT,
    FixedGPTConfig,
    GPTConfig,
    Greedy,
    LSTMConfig,
    Sample,
    Strategy,
    Transformer,
    TransformerConfig,
)
from headwise.models.generate import generate

V, B, N, COUNT = 24, 3, 6, 9
LENGTHS = torch.tensor([6, 2, 4])
STRATEGIES = [Greedy(), Beam(3), Beam(4, penalty=0.0), Sample(seed=3), Sample(0.7, 10, 0.9, seed=4)]
CACHES = [None, hw.nn.FixedCache(N + COUNT), hw.nn.SlidingCache(64)]
strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


def randomised(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def gpt(**options: object) -> GPT:
    config = GPTConfig(V, d_model=32, layers=2, heads=4, feed_forward=hw.nn.SwiGLU(48), **options)
    return randomised(GPT(config))


def transformer(**options: object) -> Transformer:
    small = {"encoder_layers": 2, "decoder_layers": 2, "feed_forward": hw.nn.ReLU(48)}
    return randomised(Transformer(TransformerConfig(V, d_model=32, heads=4, **small, **options)))


GPTS = {
    "modern": {"kv_heads": 2, "qk_norm": hw.nn.RMSNorm(), "end": 5},
    "learned": {"position": hw.nn.Learned(N + COUNT), "norm": hw.nn.LayerNorm(), "bias": True},
    "alibi": {"position": hw.nn.ALiBi(), "softcap": 4.0, "sinks": True},
    "windowed": {"window": 4, "tied": False},
    "nowhere": {"position": None},
}


@strategies
@pytest.mark.parametrize("kind", GPTS)
def test_a_gpt_generates_the_same_with_and_without_cache(kind: str, strategy: Strategy) -> None:
    model = gpt(**GPTS[kind])
    prompt = torch.randint(V, (B, N))
    for lengths in (None, LENGTHS):
        expected = model.generate(prompt, COUNT, strategy=strategy, lengths=lengths)
        for cache in CACHES:
            made = model.generate(prompt, COUNT, strategy=strategy, lengths=lengths, cache=cache)
            assert torch.equal(made, expected)


@strategies
@pytest.mark.parametrize("padded", [False, True])
def test_a_transformer_generates_the_same_with_and_without_cache(
    padded: bool, strategy: Strategy
) -> None:
    model, source = transformer(), torch.randint(V, (B, N))
    given = {"strategy": strategy, "source_lengths": LENGTHS if padded else None}
    expected = model.generate(source, COUNT, **given)
    for cache in CACHES:
        assert torch.equal(model.generate(source, COUNT, cache=cache, **given), expected)


@strategies
def test_fixed_weights_generate_the_same_with_and_without_cache(strategy: Strategy) -> None:
    model = randomised(FixedGPT(FixedGPTConfig(V, 20, d_model=32, layers=2, heads=4)))
    prompt = torch.randint(V, (B, N))
    expected = model.generate(prompt, COUNT, strategy=strategy)
    for cache in CACHES:
        assert torch.equal(model.generate(prompt, COUNT, strategy=strategy, cache=cache), expected)


def greedily(logits_of: object, prompt: Tensor, count: int) -> Tensor:
    """The definition: recompute the whole sequence for every token."""
    tokens = prompt
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, logits_of(tokens)[:, -1:].argmax(-1)), 1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("kind", ["gpt", "conv", "dilated", "fixed", "lstm", "bare lstm", "2017"])
def test_greedy_is_the_most_likely_token_of_a_plain_forward(kind: str) -> None:
    prompt = torch.randint(3, V, (B, N))
    source, start = torch.randint(3, V, (B, 5)), torch.ones(B, 1, dtype=torch.long)
    languages = {
        "gpt": lambda: gpt(),
        "conv": lambda: Conv(ConvConfig(V, 32, 2, kernel=3)),
        "dilated": lambda: Conv(ConvConfig(V, 32, 3, kernel=2, growth=2)),
        "fixed": lambda: FixedGPT(FixedGPTConfig(V, 20, d_model=32, layers=2, heads=4)),
    }
    translators = {
        "lstm": lambda: LSTM(LSTMConfig(V, 32, attention=hw.nn.Bahdanau(16), end=-1)),
        "bare lstm": lambda: LSTM(LSTMConfig(V, 32, attention=None, end=-1)),
        "2017": lambda: transformer(end=-1),
    }
    if kind in languages:
        model = randomised(languages[kind]()).eval()
        assert torch.equal(model.generate(prompt, COUNT), greedily(model, prompt, COUNT))
    else:
        model = randomised(translators[kind]()).eval()
        made = model.generate(source, COUNT, strategy=Greedy())
        assert torch.equal(made, greedily(lambda tokens: model(source, tokens), start, COUNT))


def test_entries_of_a_batch_do_not_disturb_each_other() -> None:
    prompt, source = torch.randint(V, (B, N)), torch.randint(V, (B, N))
    for kind, strategy in itertools.product(GPTS, (Greedy(), Beam(3))):
        model = gpt(**GPTS[kind])
        together = model.generate(prompt, COUNT, lengths=LENGTHS, strategy=strategy)
        for entry, length in enumerate(LENGTHS.tolist()):
            alone = model.generate(prompt[entry : entry + 1, :length], COUNT, strategy=strategy)
            assert torch.equal(together[entry, : alone.shape[1]], alone[0])
    translators = (transformer(), randomised(LSTM(LSTMConfig(V, 32, attention=hw.nn.Bahdanau(8)))))
    for model in translators:
        together = model.generate(source, COUNT, source_lengths=LENGTHS)
        for entry, length in enumerate(LENGTHS.tolist()):
            alone = model.generate(source[entry : entry + 1, :length], COUNT)
            assert torch.equal(together[entry, : alone.shape[1]], alone[0])


def test_nothing_follows_the_end() -> None:
    model = gpt(end=2)
    for strategy in STRATEGIES:
        for row in model.generate(torch.randint(V, (8, N)), 20, strategy=strategy).tolist():
            if 2 in row:
                assert set(row[row.index(2) :]) == {2}


class Table:
    """A decoder whose logits depend on the last token: small enough to try everything."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.last = table, None

    def step(self, tokens: Tensor) -> Tensor:
        self.last = tokens[:, -1]
        return self.table[self.last]

    def reorder(self, index: Tensor) -> None:
        assert self.last is not None
        self.last = self.last[index]


def exhaustive(table: Tensor, start: int, count: int, penalty: float, end: int) -> float:
    """The best score of any sequence."""
    log_p, scores = table.log_softmax(-1), []
    for sequence in itertools.product(range(len(table)), repeat=count):
        total, last, length = 0.0, start, 0
        for token in sequence:
            total, last, length = total + float(log_p[last, token]), token, length + 1
            if token == end:
                break
        scores.append(total / length**penalty)
    return max(scores)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_sequence_there_is(penalty: float, seed: int) -> None:
    table = 2 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    count, end = 4, 3
    made = generate(Table(table), torch.tensor([[0]]), count, Beam(4**count, penalty), end)[0]
    log_p, total, last, length = table.log_softmax(-1), 0.0, 0, 0
    for token in made.tolist():
        total, last, length = total + float(log_p[last, token]), token, length + 1
        if token == end:
            break
    best = exhaustive(table, 0, count, penalty, end)
    assert total / length**penalty == pytest.approx(best, abs=1e-5)


def test_a_beam_of_one_is_greedy() -> None:
    model, prompt = gpt(end=2), torch.randint(V, (B, N))
    greedy = model.generate(prompt, COUNT)
    beam = model.generate(prompt, COUNT, strategy=Beam(1))
    assert torch.equal(greedy, beam)


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = Sample(temperature=0.5).probabilities(logits)
    torch.testing.assert_close(p, (logits / 0.5).softmax(-1))
    assert (Sample(top_k=2).probabilities(logits) > 0).tolist() == [[True, True, False, False]]
    some = Sample(top_p=0.8).probabilities(logits)  # 0.64 + 0.24 is the first sum above it
    assert (some > 0).tolist() == [[True, True, False, False]]
    torch.testing.assert_close(some.sum(-1), torch.ones(1))
    assert (Sample(top_p=1e-6).probabilities(logits) > 0).sum() == 1
    table = logits.expand(4, 4)
    drawn = generate(Table(table), torch.zeros(5000, 1).long(), 1, Sample(seed=0))
    share = torch.bincount(drawn.flatten(), minlength=4) / 5000
    torch.testing.assert_close(share, logits[0].softmax(-1), rtol=0, atol=0.03)


def test_a_seed_repeats_and_the_global_generator_is_left_alone() -> None:
    model, prompt = gpt(), torch.randint(V, (B, N))
    state = torch.get_rng_state()
    one, two = (model.generate(prompt, COUNT, strategy=Sample(seed=5)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, model.generate(prompt, COUNT, strategy=Sample(seed=6)))


def test_generating_leaves_the_model_in_its_mode() -> None:
    model = gpt(dropout=0.5).train()
    prompt = torch.randint(V, (B, N))
    assert torch.equal(model.generate(prompt, COUNT), model.generate(prompt, COUNT))
    assert model.training
    with pytest.raises(ValueError, match="count=0 must be a positive integer"):
        model.generate(prompt, 0)
    assert model.training


def test_bad_arguments_are_refused() -> None:
    model, prompt = gpt(), torch.randint(V, (B, N))
    with pytest.raises(ValueError, match=r"prompt of shape \(3, 0\)"):
        model.generate(prompt[:, :0], 3)
    with pytest.raises(ValueError, match="lengths must lie between 1 and 6, not 0"):
        model.generate(prompt, 3, lengths=torch.tensor([6, 0, 4]))
    with pytest.raises(ValueError, match="is full"):
        model.generate(prompt, COUNT, cache=hw.nn.FixedCache(N + 2))
    for make in (lambda: Sample(0.0), lambda: Sample(top_k=0), lambda: Sample(top_p=0.0)):
        with pytest.raises(ValueError, match=r"Greedy\(\)|top_p"):
            make()
    with pytest.raises(ValueError, match="keeps no sequence"):
        Beam(0)
    fixed = FixedGPT(FixedGPTConfig(V, 20, d_model=32, layers=1, heads=4))
    with pytest.raises(ValueError, match="prompts of one length at a time"):
        fixed.generate(prompt, 3, lengths=LENGTHS)


@torch.no_grad()
def test_a_step_that_some_layers_refuse_leaves_all_caches_as_they_were() -> None:
    """Layers that share a pool take pages one after the other, until there are none."""
    model, tokens = gpt(), torch.randint(V, (1, 9))
    pool = hw.nn.PagePool(pages=3, page=8)
    caches = [hw.nn.PagedCache(pool) for _ in model.blocks]
    expected = model(tokens)
    first = model(tokens[:, :8], caches=caches)
    with pytest.raises(ValueError, match="does not have 1 free pages"):
        model(tokens[:, 8:], caches=caches)
    assert [cache.length for cache in caches] == [8, 8]
    pool.give_back(pool.take(1))  # the page that the first layer took is free again
    for cache in caches:
        cache.rollback(4)
    rest = model(tokens[:, 4:8], caches=caches)
    torch.testing.assert_close(torch.cat((first[:, :4], rest), 1), expected[:, :8])


@torch.no_grad()
def test_a_compiled_step_of_a_model_equals_eager() -> None:
    torch._dynamo.reset()
    model, tokens = gpt(), torch.randint(V, (B, N))
    caches = [hw.nn.FixedCache(N) for _ in model.blocks]
    for cache in caches:
        cache.reserve(*torch.zeros(2, B, 4, 0, 8))
    step = torch.compile(lambda t: model(t, caches=caches), backend="aot_eager", fullgraph=True)
    steps = [step(tokens[:, i : i + 1]) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens))
    with pytest.raises(ValueError, match="is full"):
        step(tokens[:, :1])
