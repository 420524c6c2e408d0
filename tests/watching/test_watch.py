"""A model of our own modules, watched: it computes what it did, and every head is seen."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.models import GPT, LSTM, GPTConfig, LSTMConfig, Transformer, TransformerConfig

CONFIG = GPTConfig(vocabulary=50, context=64, d_model=32, layers=2, heads=4)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))


def eager(model: GPT, ids: Tensor) -> list[Tensor]:
    """The weights of each layer (B, H, N, M), by the layers' own maps."""
    found: list[Tensor] = []

    def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        found.append(module.attention_map(*given).to_tensor())

    handles = [block.attention.register_forward_pre_hook(look) for block in model.blocks]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def test_the_output_is_the_same_and_the_model_is_restored(model: GPT, ids: Tensor) -> None:
    before, names = model(ids), [set(vars(module)) for module in model.modules()]
    with hw.watch(model):
        during = model(ids)
    torch.testing.assert_close(during, before)
    assert torch.equal(model(ids), before)
    assert [set(vars(module)) for module in model.modules()] == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_statistics_are_those_of_the_weights(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        model(ids)
    for layer, p in zip(seen.layers, eager(model, ids), strict=True):
        entropy = -torch.special.xlogy(p, p).sum(-1)
        torch.testing.assert_close(layer.observation.entropy, entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.observation.sink_mass, p[..., 0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.map().to_tensor(), p)
        mean = entropy.mean((0, 2))
        rows = seen.heads().where(layer=layer.number)
        assert rows["entropy_mean"] == pytest.approx(mean.tolist(), rel=1e-4)


def test_several_passes_are_averaged_over_their_rows(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        model(ids)
        model(ids[:1, :7])
    first, second = eager(model, ids)[1], eager(model, ids[:1, :7])[1]
    top = torch.cat([p.amax(-1).transpose(0, 1).flatten(1) for p in (first, second)], 1)
    assert seen.heads().where(layer=1)["top_prob_mean"] == pytest.approx(top.mean(1).tolist())
    assert seen.layers[1].observation.entropy.shape == (1, 4, 7)  # row by row: the last pass


def test_a_step_that_ends_lets_go_of_the_key_that_told_its_cache() -> None:
    attention, x = hw.nn.MultiHeadAttention(16, 4, mask=hw.mask.causal()), torch.randn(1, 5, 16)
    with torch.no_grad(), hw.watch(attention, maps=False) as seen:
        attention(x, cache=hw.nn.GrowingCache())
        (layer,) = seen.layers
        assert layer.last is not None
        assert layer.last.newest is not None
        seen.step()
        assert layer.last is not None
        assert layer.last.newest is None


def test_generated_tokens_are_rows_of_the_same_pass(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        new = model.generate(ids, 6)
    text = torch.cat((ids, new), 1)[:, :-1]  # the last token was not read any more
    with hw.watch(model) as whole:
        model(text)
    for one, other in zip(seen.layers, whole.layers, strict=True):
        for name in hw.STATISTICS:
            mine, wanted = one.observation.values[name], other.observation.values[name]
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.map().to_tensor(), other.map().to_tensor())


def test_beams_that_changed_places_have_no_map() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(30, d_model=16, encoder_layers=1, decoder_layers=1, heads=2)
    model = Transformer(config).eval()
    with hw.watch(model) as seen:
        model.generate(torch.randint(3, 30, (1, 5)), 6)
    layer = next(layer for layer in seen.layers if layer.name == "decoder.0.attention")
    assert layer.observation.entropy.isfinite().all()
    with pytest.raises(ValueError, match="beams changed places"):
        layer.map()


def test_padding_is_left_out_and_cross_attention_is_told_apart() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(30, d_model=16, encoder_layers=1, decoder_layers=1, heads=2)
    model = Transformer(config).eval()
    source, target = torch.randint(3, 30, (2, 7)), torch.randint(3, 30, (2, 5))
    with hw.watch(model) as seen:
        model(source, target, source_lengths=torch.tensor([7, 4]))
    encoder, decoder, cross = seen.layers
    assert [layer.kind for layer in seen.layers] == ["self", "self", "cross"]
    assert encoder.padding.sum(1).tolist() == [0, 3]
    assert decoder.padding is None
    assert cross.observation.entropy.shape == (2, 2, 5)
    kept = torch.cat([encoder.observation.entropy[0], encoder.observation.entropy[1, :, :4]], 1)
    assert seen.heads()["entropy_mean"][:2] == pytest.approx(kept.double().mean(1).tolist())
    assert "distance" not in cross.observation.values  # between two sequences there is none


def test_a_recurrent_decoder_adds_a_row_a_token() -> None:
    config = LSTMConfig(30, d_model=16, layers=1)
    model = LSTM(config).eval()
    source, target = torch.randint(3, 30, (2, 7)), torch.randint(3, 30, (2, 5))
    with hw.watch(model) as seen:
        model(source, target)
    assert seen.layers[0].observation.entropy.shape == (2, 1, 5)
    assert seen.map(0, 0).shape == (1, 1, 5, 7)


def test_a_layer_that_is_used_twice_is_seen_at_both_depths() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = hw.nn.MultiHeadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    with hw.watch(Shared()) as seen:
        seen.model(torch.randn(1, 5, 16))
    assert [layer.name for layer in seen.layers] == ["layer", "layer#1"]


def test_sampled_rows_say_so(model: GPT, ids: Tensor) -> None:
    with hw.watch(model, rows=5) as seen:
        model(ids)
    assert seen.layers[0].observation.entropy.shape == (2, 4, 5)
    assert "max_logit_max_lower_bound" in seen.heads().columns
    assert seen.map(0, 1).shape == (1, 1, 20, 20)


def test_rows_that_were_generated_are_all_looked_at(model: GPT, ids: Tensor) -> None:
    with hw.watch(model, rows=5) as seen:
        model.generate(ids[:1, :15], 4)
    found = seen.layers[0].observation
    assert found.rows is not None
    assert found.rows[5:].tolist() == [15, 16, 17]
    assert found.entropy.shape == (1, 4, 8)


def test_filters_narrow_what_is_looked_at(model: GPT, ids: Tensor) -> None:
    with hw.watch(model, layers="*.1.*", heads=[2], stats=["entropy"], maps=False) as seen:
        model(ids)
    table = seen.heads()
    assert table["layer"] == [1]
    assert table["head"] == [2]
    assert table.columns[4:] == ["entropy_mean", "entropy_min"]
    with pytest.raises(ValueError, match="maps=True"):
        seen.map(1, 0)


def test_checkpointing_counts_no_row_twice(ids: Tensor) -> None:
    class Saving(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layer, self.reentrant = hw.nn.MultiHeadAttention(16, 2), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        model, x = Saving(reentrant), torch.randn(1, 5, 16, requires_grad=True)
        with hw.watch(model) as seen:
            model(x).sum().backward()
        assert len(seen.layers) == 1
        assert seen.layers[0].counted().tolist() == [5, 5]


def test_steps_make_a_series_and_every_passes_the_others_over(model: GPT, ids: Tensor) -> None:
    watch = hw.watch(model, every=2, maps=False).attach()
    for _ in range(5):
        for part in ids.split(1):  # two micro-batches a step
            model(part)
        watch.step()
    watch.detach()
    assert [entry.step for entry in watch.series] == [0, 2, 4]
    with hw.watch(model) as whole:
        model(ids)
    wanted = whole.heads()["entropy_mean"]
    assert watch.series[1].table["entropy_mean"] == pytest.approx(wanted, rel=1e-5)
    assert watch.heads()["entropy_mean"] == pytest.approx(wanted, rel=1e-5)


def test_gradients_are_those_of_the_unwatched_model(model: GPT, ids: Tensor) -> None:
    other = copy.deepcopy(model)
    model(ids).square().mean().backward()
    with hw.watch(other):
        other(ids).square().mean().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


class Own(nn.Module):
    """A module that may attend, and does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_went_wrong_is_said(model: GPT, ids: Tensor) -> None:
    with pytest.raises(ValueError, match="unknown statistic 'entropie'; choose from lse"):
        hw.watch(model, stats=["entropie"])
    said = "there is no layer 7 in this model; there are 0 blocks.0.attention, 1 blocks.1.att"
    with pytest.raises(ValueError, match=said), hw.watch(model, layers=7):
        model(ids)
    with hw.watch(model) as seen, pytest.raises(ValueError, match="watched already"):
        hw.watch(model.blocks[0]).attach()
    model(ids)  # nobody looks any more
    with pytest.raises(ValueError, match="there is no layer 0; there are none yet"):
        seen.map(0, 0)
    with pytest.raises(ValueError, match="nothing was seen of this GPT: it did not run while it"):
        seen.heads()
    said, own = "no attention was found in this Own", Own()
    with pytest.raises(ValueError, match=said), hw.watch(own):
        own(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"takes a torch.nn.Module, not int"):
        hw.watch(3)


def test_an_exception_in_the_model_leaves_it_as_it_was(model: GPT, ids: Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must lie"), hw.watch(model):
        model(ids + 50)
    assert not any("forward" in vars(module) for module in model.modules())
    with hw.watch(model) as seen:
        model(ids)
    assert len(seen.heads()) == 8


def test_types_name_what_a_head_was_built_to_do() -> None:
    length, heads = 64, 6
    attention = hw.nn.FixedAttention(24, heads, length, mask=hw.mask.causal())
    rows = torch.arange(length)
    with torch.no_grad():
        attention.logits[0, rows[1:], rows[:-1]] = 20  # the token before
        attention.logits[1, rows, rows] = 20  # the token itself
        attention.logits[2, :, 0] = 20  # the first token
        for back in range(4):
            attention.logits[3, rows[back:], rows[: length - back]] = 20  # the last few
        attention.logits[5, :, ::7] = 20  # a few, near and far; the fifth looks everywhere alike
    model = nn.Sequential(nn.Embedding(5, 24), attention)
    with hw.watch(model) as seen:
        model(torch.randint(0, 5, (1, length)))
    types = ["previous-token", "self", "sink", "local", "uniform", "content"]
    assert seen.types()["type"] == types
    alike = seen.similarity(0)
    assert alike.diagonal() == pytest.approx(torch.ones(heads).numpy())
    assert alike[0, 1] < 0.01


def test_heads_of_a_model_that_has_learnt_nothing_are_uniform(model: GPT) -> None:
    attention = hw.nn.MultiHeadAttention(16, 4)
    for watched, given in ((model, (torch.randint(0, 9, (1, 40)),)), (attention, CROSSED)):
        with hw.watch(watched) as seen:
            watched(*given)
        assert set(seen.types()["type"]) == {"uniform"}


CROSSED = (0.3 * torch.randn(1, 20, 16), torch.randn(1, 30, 16))


def test_types_find_the_induction_heads_of_the_built_in_model() -> None:
    gpt = hw.load("gpt")
    text = "Mr Dursley was proud to say that Mrs Potter met Mr Dursley and that Mrs Potter met"
    with torch.no_grad(), hw.watch(gpt.model) as seen:
        gpt.model(gpt.encode(text))
    found = {(row["layer"], row["head"]) for row in seen.types() if row["type"] == "induction"}
    assert (5, 1) in found


def test_an_engine_asked_for_by_name_still_computes_the_output() -> None:
    attention = hw.nn.MultiHeadAttention(16, 2, mask=hw.mask.causal(), engine="sdpa")
    x = torch.randn(1, 9, 16)
    with hw.watch(attention) as seen:
        during = attention(x)
    assert torch.equal(during, attention(x))
    assert seen.layers[0].observation.entropy.shape == (1, 2, 9)


def test_an_unlawful_wish_is_refused_before_anything_runs(model: GPT) -> None:
    for wish in ({"rows": 2.5}, {"layers": []}, {"heads": "one"}, {"alarms": "all"}, {"every": 0}):
        with pytest.raises(ValueError, match=r"use |must be"):
            hw.watch(model, **wish)


def test_a_head_that_is_not_there_is_named(model: GPT, ids: Tensor) -> None:
    with (
        pytest.raises(ValueError, match="there is no head 9; heads are 0 to 3"),
        hw.watch(model, heads=[9]),
    ):
        model(ids)


def test_a_watch_that_is_not_attached_frees_nobody_else(model: GPT) -> None:
    first, second = hw.watch(model).attach(), hw.watch(model)
    second.detach()
    with pytest.raises(ValueError, match="watched already"):
        second.attach()
    first.detach()


def test_parts_of_a_model_that_run_by_themselves_make_a_pass_each() -> None:
    class Loose(nn.Module):
        """Its own forward is never called, as Lightning does it."""

        def __init__(self) -> None:
            super().__init__()
            config = TransformerConfig(30, d_model=16, encoder_layers=1, decoder_layers=1, heads=2)
            self.net = Transformer(config)

        def training_step(self, source: Tensor, target: Tensor) -> Tensor:
            return self.net(source, target)

    model = Loose()
    with hw.watch(model) as seen:
        for _ in range(3):
            model.training_step(torch.randint(3, 30, (2, 7)), torch.randint(3, 30, (2, 5)))
    assert [layer.observation.entropy.shape[2] for layer in seen.layers] == [7, 5, 5]


def test_queries_of_another_sequence_start_a_pass_each_time() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            q = self.latents.expand(len(x), -1, -1).unflatten(-1, (4, 4)).transpose(1, 2)
            k = x.unflatten(-1, (4, 4)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, k, k)

    model = Latents()
    with hw.watch(model) as seen:
        for _ in range(3):
            model(torch.randn(2, 32, 16))
    (layer,) = seen.layers
    assert layer.observation.entropy.shape == (2, 4, 8)


def test_tokens_that_were_taken_back_are_rows_no_more(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        caches = [hw.nn.GrowingCache() for _ in model.blocks]
        model(ids, caches=caches)
        model(ids[:, :4], caches=caches)
        for cache in caches:
            cache.rollback(3)
        model(ids[:, :2], caches=caches)
    assert seen.layers[0].observation.entropy.shape[2] == 23
    with pytest.raises(ValueError, match="takes tokens back"):
        seen.map(0, 0)


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("back", [1, 3])
def test_one_token_after_some_were_taken_back_is_no_full_cache(
    model: GPT, ids: Tensor, back: int, maps: bool
) -> None:
    with hw.watch(model, maps=maps) as seen:
        caches = [hw.nn.GrowingCache() for _ in model.blocks]
        model(ids[:, :10], caches=caches)
        for cache in caches:
            cache.rollback(back)
        model(ids[:, 10:11], caches=caches)
    assert seen.layers[0].length == 11 - back
    kept = torch.cat((ids[:, : 10 - back], ids[:, 10:11]), 1)
    assert seen.tokens is not None
    assert torch.equal(seen.tokens, kept)
    with hw.watch(model) as whole:
        model(kept)
    for one, other in zip(seen.layers, whole.layers, strict=True):
        if maps:
            torch.testing.assert_close(one.observation.entropy, other.observation.entropy)
        else:
            with pytest.raises(ValueError, match="maps=False its figures only"):
                one.observation  # noqa: B018


class Cached(nn.Module):
    """Somebody's own attention with a cache of some kind; nothing says which."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.held, self.way, self.num_heads = torch.zeros(1, 2, 0, 8), way, 2

    def forward(self, x: Tensor, room: int = 99) -> Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        self.held = torch.cat((self.held, q), 2)
        k = self.held[:, :, -max(room, q.shape[2]) :]
        self.held = k
        after = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
        if self.way == "written":
            return (q @ k.mT / 8**0.5).masked_fill(~after, -torch.inf).softmax(-1) @ k
        if self.way == "biased":
            after = torch.arange(k.shape[2]).sin().masked_fill(~after, -torch.inf)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, after)


@pytest.mark.parametrize("way", ["plain", "biased"])
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(("room", "back"), [(4, 0), (99, 0), (99, 1), (99, 5)])
def test_a_foreign_cache_that_slides_is_told_from_one_that_takes_back(
    room: int, back: int, at_once: int, way: str
) -> None:
    model, x = Cached(way), torch.randn(1, 30, 16)
    with hw.watch(model) as seen:
        model(x[:, :10], room)
        model.held = model.held[:, :, : model.held.shape[2] - back]
        model(x[:, 10 : 10 + at_once], room)
        model(x[:, 20:21], room)
    assert seen.layers[0].observation.entropy.shape[2] == 11 - back + at_once


def test_a_full_cache_adds_a_row_a_token_where_attention_is_written_out() -> None:
    model, x = Cached("written"), torch.randn(1, 9, 16)
    with hw.watch(model) as seen:
        model(x[:, :4], 4)
        for token in range(4, 9):
            model(x[:, token : token + 1], 4)
    assert seen.layers[0].observation.entropy.shape[2] == 9


def test_a_refused_call_under_a_watch_leaves_its_cache_as_it_was() -> None:
    attention, cache = hw.nn.MultiHeadAttention(16, 2, mask=hw.mask.causal()), hw.nn.GrowingCache()
    with hw.watch(attention) as seen:
        attention(torch.randn(1, 5, 16), cache=cache)
        with pytest.raises(ValueError, match="bias"):
            attention(torch.randn(1, 2, 16), cache=cache, bias=torch.zeros(3, 3))
        assert cache.length == 5
        attention(torch.randn(1, 2, 16), cache=cache)
    assert seen.layers[0].observation.entropy.shape == (1, 2, 7)


def test_a_cache_that_forgets_still_adds_a_row_a_token() -> None:
    torch.manual_seed(0)
    mask = hw.mask.causal() & hw.mask.window(7)
    attention = hw.nn.MultiHeadAttention(16, 2, mask=mask)
    x, cache = torch.randn(1, 12, 16), hw.nn.SlidingCache(8)
    with hw.watch(attention) as seen:
        attention(x[:, :6], cache=cache)
        for i in range(6, 12):
            attention(x[:, i : i + 1], cache=cache)
    assert seen.layers[0].observation.entropy.shape == (1, 2, 12)
    with pytest.raises(ValueError, match="a cache forgot or rounded them"):
        seen.map(0, 0)


CACHES = {
    "growing": hw.nn.GrowingCache(),
    "fixed": hw.nn.FixedCache(40),
    "fixed, exactly full": hw.nn.FixedCache(20),
    "sliding": hw.nn.SlidingCache(40),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("length", [6, 20])  # with room to spare in the cache, and without
@pytest.mark.parametrize("kind", CACHES)
def test_a_map_stays_when_its_cache_is_used_again(kind: str, length: int, mode: type) -> None:
    attention = hw.nn.MultiHeadAttention(16, 2, mask=hw.mask.causal()).eval()
    cache = CACHES[kind].fresh()
    with mode():
        with hw.watch(attention) as seen:
            attention(torch.randn(1, length, 16), cache=cache)
        before = seen.map(0, 1)[0, 0]
        cache.rollback(length)
        attention(3 * torch.randn(1, 20, 16), cache=cache)
        assert torch.equal(seen.map(0, 1)[0, 0], before)


LEARNED = {
    "slopes": {"position": hw.nn.ALiBi(learned=True)},
    "buckets": {"position": hw.nn.RelativeBuckets(8, 16)},
    "additive": {"score": hw.nn.Additive()},
    "general": {"score": hw.nn.General()},
    "cosine": {"score": hw.nn.Cosine()},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("kind", LEARNED)
def test_a_map_is_of_the_parameters_that_made_it(kind: str) -> None:
    attention = hw.nn.MultiHeadAttention(16, 2, **LEARNED[kind])
    with hw.watch(attention) as seen:
        attention(torch.randn(1, 9, 16)).square().sum().backward()
    before = seen.map(0, 1)[0, 0]
    torch.optim.SGD(attention.parameters(), 1.0).step()
    assert torch.equal(seen.map(0, 1)[0, 0], before)


def test_a_map_of_a_model_that_computes_in_place_is_refused() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x[:, None] + number for number in range(3))
            out = hw.attention(q, k, v)
            k.mul_(0)
            return out

    with hw.watch(Mine()) as seen, torch.no_grad():
        seen.model(torch.randn(1, 9, 16))
    with pytest.raises(ValueError, match="were written over: the model computes in place"):
        seen.map(0, 0)


def test_fresh_queries_and_keys_are_kept_without_a_copy() -> None:
    attention, x = hw.nn.MultiHeadAttention(16, 2), torch.randn(1, 9, 16)
    made: list[Tensor] = []
    for projection in (attention.query, attention.key):
        projection.register_forward_hook(lambda module, given, out: made.append(out))
    with hw.watch(attention) as seen:
        attention(x)
    kept = seen.layers[0].last.call
    assert [kept.q.data_ptr(), kept.k.data_ptr()] == [x.data_ptr() for x in made]


def test_alarms_look_at_a_watch_that_ends_without_a_step() -> None:
    attention = hw.nn.MultiHeadAttention(16, 2)
    nn.init.normal_(attention.query.weight, std=100)
    with hw.watch(attention, alarms=True) as seen:
        attention(10 * torch.randn(1, 9, 16))
    assert "logit growth" in {alarm.rule for alarm in seen.alarms}


def test_alarms_look_at_the_layers_that_ran_at_last() -> None:
    first, second = (hw.nn.MultiHeadAttention(16, 2) for _ in range(2))
    x = torch.randn(1, 9, 16)
    with hw.watch(nn.Sequential(first, second), alarms=True) as seen:
        seen.model(x)
        seen.step()
        assert not seen.alarms
        nn.init.normal_(first.query.weight, std=1000)
        first(x)
    assert {(alarm.rule, alarm.layer) for alarm in seen.alarms} >= {("logit growth", 0)}


def test_no_token_of_a_document_is_padding() -> None:
    mask = hw.mask.documents(torch.tensor([[0, 0, 1, 1, 1]]))
    with hw.watch(hw.nn.MultiHeadAttention(16, 2, mask=mask)) as seen:
        seen.model(torch.randn(1, 5, 16))
    assert seen.layers[0].padding is None


def test_a_sampled_figure_keeps_its_name_where_a_batch_is_short(model: GPT, ids: Tensor) -> None:
    with hw.watch(model, rows=30) as seen:
        model(ids)
    assert "max_logit_max_lower_bound" in seen.heads().columns


def test_nothing_but_queries_and_keys_is_kept_for_maps(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        model(ids)
    assert seen.layers[0].last.call.v.untyped_storage().nbytes() == 0


def test_calls_of_hw_attention_in_a_module_of_ones_own_are_seen_on_every_engine() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
            return hw.attention(heads, heads, heads, mask=hw.mask.causal(), softcap=20.0)

    model, x = Mine(), torch.randn(1, 9, 16)
    before = model(x)
    with hw.watch(model) as seen:
        torch.testing.assert_close(model(x), before)
    (layer,) = seen.layers
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    _, wanted = hw.observe(heads, heads, heads, mask=hw.mask.causal(), softcap=20.0)
    torch.testing.assert_close(layer.observation.entropy, wanted.entropy)


def test_a_watched_model_can_be_copied_and_saved_whole(model: GPT, ids: Tensor) -> None:
    with hw.watch(model) as seen:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            torch.testing.assert_close(other(ids), model(ids))
        assert len(seen.layers) == 2
        assert seen.layers[0].counted().tolist() == [80] * 4  # of the model itself, twice


def test_transforms_of_a_watched_module_work() -> None:
    attention, x = hw.nn.MultiHeadAttention(16, 2), torch.randn(3, 5, 16)
    with hw.watch(attention):
        grad = torch.func.grad(lambda x: attention(x).square().sum())(x)
    x.requires_grad_()
    attention(x).square().sum().backward()
    torch.testing.assert_close(grad, x.grad)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_logged_belongs_to_its_step(tmp_path: Path, every: int, late: bool) -> None:
    model = hw.nn.MultiHeadAttention(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = hw.watch(model, every=every)
    with watch, watch.record(tmp_path / "run"):
        for step in range(7):
            loss = model(torch.randn(1, 5, 16)).square().mean()
            loss.backward()
            if not late:
                watch.log(loss=loss, number=step)
            optimizer.step()
            if late:
                watch.log(loss=loss, number=step)
    run = hw.watching.open_run(tmp_path / "run")
    for seen in (watch, run):
        assert seen.logged["number"] == (list(range(7)), list(range(7)))
    assert run.logged["loss"] == watch.logged["loss"]
    assert run.steps == list(range(0, 7, every))
    assert {row["kind"] for row in run.heads()} == {"self"}
    resumed = hw.watch(model)
    resumed.load_state_dict(watch.state_dict())
    assert resumed.logged == watch.logged


def test_what_is_no_number_can_not_be_logged() -> None:
    watch = hw.watch(hw.nn.MultiHeadAttention(16, 2))
    with pytest.raises(ValueError, match=r"watch.log\(loss=.*is not one number"):
        watch.log(loss=torch.zeros(3))
