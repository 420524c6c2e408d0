"""A watch with effects=True tells which edges mattered, and real knock-outs agree."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.watching import (
    log_probability,
    logit_difference,
    runner_up,
    sequence_loss,
)


class Block(nn.Module):
    """One layer of attention and a head; `attend` is the way in which it attends."""

    def __init__(self, attend: str, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend, self.heads = attend, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        if self.attend == "sdpa":
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.attend == "own":
            y = hw.attention(q, k, v, mask=hw.mask.causal())
        else:
            s = q @ k.mT / q.shape[-1] ** 0.5
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            y = s.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Torch(nn.Module):
    """PyTorch's own attention."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        length = x.shape[1]
        causal = torch.full((length, length), -torch.inf).triu(1)
        found = self.attn(y, y, y, attn_mask=causal, need_weights=False)[0]
        return found if self.batch_first else found.transpose(0, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: Block("own"),
    "sdpa": lambda: Block("sdpa"),
    "written out": lambda: Block("written"),
    "headwise": lambda: hw.nn.MultiHeadAttention(16, 2, mask=hw.mask.causal()),
    "torch": lambda: Torch(True),
    "torch, length first": lambda: Torch(False),
}


def linear(x: Tensor) -> Tensor:
    """A scalar of the last layer's output to which first order is exact."""
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
    return (x * weights.sin()).sum()


@pytest.mark.parametrize("kind", MODELS)
def test_a_linear_scalar_changes_by_exactly_the_effect_of_the_edge(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with hw.watch(model, effects=True) as seen:
        before = linear(model(x))
        before.backward()
    heads = [[seen.effects(0, h, b)[0, 0] for h in (0, 1)] for b in (0, 1)]
    every = torch.stack([torch.stack(entry) for entry in heads])
    changed = model
    if kind == "written out":  # nothing can be hidden from it, but from one with its weights
        changed = Block("own").double()
        changed.load_state_dict(model.state_dict())
    for head, key, query in ((0, 0, 0), (0, 1, 3), (1, 2, 4), (1, 4, 4)):
        with torch.no_grad(), hw.knock_out(changed, [(0, head, key, query)]):
            real = linear(changed(x)) - before
        torch.testing.assert_close(every[:, head, query, key].sum(), real.detach())
    row = seen.heads()[1]
    with torch.no_grad(), hw.knock_out(changed, [(0, 1, (0, 5))]):
        off = linear(changed(x)) - before
    assert math.isclose(row["effect"], off.item(), rel_tol=1e-9)
    assert seen.effect_bytes >= (2 if kind == "written out" else 4) * 2 * 5 * 16 * 8
    edges = seen.edges(5)
    assert edges["effect"] == sorted(edges["effect"], key=abs, reverse=True)
    top = edges[0]
    place = top["batch"], top["head"], top["query"], top["key"]
    assert top["effect"] == pytest.approx(every[place].item())
    assert abs(top["effect"]) == pytest.approx(every.abs().max().item())
    weights = seen.map(0, top["head"], top["batch"])[0, 0]
    assert top["weight"] == pytest.approx(weights[top["query"], top["key"]].item())


def test_effects_rank_the_edges_of_the_built_in_gpt_as_knock_outs_do() -> None:
    gpt = hw.load("gpt")
    text = "to be or not to be, that is the question: to be or"
    ids = gpt.encode(text)
    with hw.watch(gpt.model, effects=True) as seen:
        before = runner_up(gpt.model(ids))
        before.backward()
    pieces = gpt.pieces(text)
    assert seen.edges(1, tokens=pieces)[0]["key_token"] in pieces
    with pytest.raises(ValueError, match=r"lists of pieces, not a text"):
        seen.edges(1, tokens=text)
    with pytest.raises(ValueError, match=r"tokens names 1 pieces; give one per position"):
        seen.edges(1, tokens=pieces[:1])
    edges = seen.edges(12)
    assert edges.columns == [
        "layer", "name", "kind", "head", "batch", "query", "key", "query_token", "key_token",
        "weight", "effect",
    ]  # fmt: skip
    answer = int(gpt.model(ids)[0, -1].argmax())
    real = []
    for row in edges:
        assert row["key_token"] == int(ids[0, row["key"]])
        with (
            torch.no_grad(),
            hw.knock_out(gpt.model, [(row["layer"], row["head"], row["key"], row["query"])]),
        ):
            real.append(float(runner_up(gpt.model(ids), answer) - before))
    found = torch.tensor([edges["effect"], real])
    assert torch.corrcoef(found)[0, 1] > 0.8
    assert (found.sign().prod(0) > 0).float().mean() > 0.9


def test_backward_passes_through_one_forward_add_up_and_a_new_forward_begins_anew() -> None:
    torch.manual_seed(0)
    model, x = Block("own"), torch.randn(1, 6, 16)
    with hw.watch(model, effects=True) as seen:
        out = model(x)
        out.sum().backward(retain_graph=True)
        once = seen.effects(0, 0).to_tensor()
        out.sum().backward()
        torch.testing.assert_close(seen.effects(0, 0).to_tensor(), 2 * once)
        out = model(x)
        with pytest.raises(ValueError, match="no backward pass has come by since its last forward"):
            seen.effects(0, 0)
        (3 * out.sum()).backward()
        torch.testing.assert_close(seen.effects(0, 0).to_tensor(), 3 * once)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("own"), Block("sdpa")])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_has_the_same_effects(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    plain = nn.Sequential(*model.blocks)
    x = torch.randn(1, 6, 16, requires_grad=True)
    found = []
    for each in (plain, model):
        with hw.watch(each, effects=True) as seen:
            linear(each(x)).backward()
        found.append([seen.effects(layer, 1).to_tensor() for layer in (0, 1)])
    torch.testing.assert_close(found[1], found[0])


def test_a_compiled_model_has_effects() -> None:
    torch.manual_seed(0)
    model, x = Block("sdpa"), torch.randn(1, 6, 16)
    with hw.watch(model, effects=True) as seen:
        linear(model(x)).backward()
    plain = seen.effects(0, 1).to_tensor()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with hw.watch(compiled, effects=True) as seen:
        linear(compiled(x)).backward()
    torch.testing.assert_close(seen.effects(0, 1).to_tensor(), plain)


def test_only_the_layers_and_heads_asked_for_are_held() -> None:
    model = nn.Sequential(Block("own"), Block("own"))
    x = torch.randn(1, 6, 16)
    with hw.watch(model, effects=True, layers=1, heads=[1]) as seen:
        linear(model(x)).backward()
    assert seen.effect_bytes == 4 * 6 * 16 * 4
    edges = seen.edges(8)
    assert set(edges["layer"]) == {1}
    assert set(edges["head"]) == {1}
    whole = seen.effects(1, 1)
    row = edges[0]
    assert row["effect"] == pytest.approx(whole[0, 0, row["query"], row["key"]].item())


def test_sampled_rows_name_their_own_numbers_and_say_so() -> None:
    torch.manual_seed(0)
    model, x = Block("own"), torch.randn(1, 40, 16)
    with hw.watch(model, effects=True, rows=8) as seen:
        linear(model(x)).backward()
    edges = seen.edges(6)
    assert "of 8 sampled rows" in str(edges.note)
    rows = hw.observe(*torch.zeros(3, 1, 2, 40, 8).unbind(), rows=8)[1].rows.tolist()
    assert set(edges["query"]) <= set(rows)
    for row in edges:
        here = seen.effects(0, row["head"])[0, 0, row["query"], row["key"]].item()
        assert row["effect"] == pytest.approx(here)


def test_rows_of_padding_have_no_effects() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (2, 9))
    shown = torch.ones_like(ids)
    shown[0, :4] = 0
    with hw.watch(model, effects=True) as seen:
        logits = model(input_ids=ids, attention_mask=shown).logits
        logits.sum().backward()
    assert (seen.effects(0, 0, batch=0)[0, 0, :4] == 0).all()
    assert (seen.effects(0, 0, batch=0)[0, 0, 4:, :4] == 0).all()
    assert (seen.effects(0, 0, batch=1)[0, 0].tril() != 0).any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "headwise"])
def test_transformers_models_have_effects_in_every_implementation(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401

    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, attn_implementation=implementation)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval().double()
    ids = torch.randint(0, 50, (1, 9))

    assert_slopes(model, lambda: model(ids).logits[0, -1, 3])


def assert_slopes(model: nn.Module, scalar: Callable[[], Tensor], layers: int = 1) -> None:
    """The largest edge of some layers is worth what steering it a little says."""
    with hw.watch(model, effects=True) as seen:
        scalar().backward()
    rows = {row["layer"]: row for row in reversed(seen.edges(500))}
    assert len(rows) >= layers
    for row in list(rows.values())[-layers:]:
        sides, eps = [], 0.02  # the derivative along the edge, by steering it a little
        for factor in (math.exp(eps), math.exp(-eps)):
            steer = [(row["layer"], row["head"], row["key"], factor, row["query"])]
            with torch.no_grad(), hw.steer(model, steer):
                sides.append(float(scalar()))
        slope = (sides[0] - sides[1]) / (2 * eps)
        p = row["weight"]  # d/dlog(factor) of first order is -effect (1 - p), of any size of p
        assert slope == pytest.approx(-row["effect"] * (1 - p), rel=1e-2)


def test_images_have_effects_alone_and_among_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hw.models.ViTConfig(d_model=16, layers=2, heads=2, image=8, patch=2, classes=3)
    own, image = hw.models.ViT(config).eval().double(), torch.randn(1, 3, 8, 8).double()
    assert_slopes(own, lambda: runner_up(own(image)), layers=2)
    small = {"intermediate_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    vision = transformers.CLIPVisionConfig(
        image_size=16, patch_size=8, num_attention_heads=2, **small
    )
    text = transformers.LlamaConfig(vocab_size=99, num_attention_heads=4, **small)
    both = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=98, vision_feature_layer=-1
        )
    )
    both = both.eval().double()
    ids = torch.cat((torch.full((1, 4), 98), torch.arange(6)[None]), 1)
    pixels = torch.randn(1, 3, 16, 16).double()
    assert_slopes(
        both, lambda: runner_up(both(input_ids=ids, pixel_values=pixels).logits), layers=2
    )
    with hw.watch(both, effects=True) as seen:
        runner_up(both(input_ids=ids, pixel_values=pixels).logits).backward()
    tower, words = seen.effects(0), seen.effects(1)
    assert tower.shape == (1, 2, 5, 5)  # patches and a class token
    on_image = words.pool(10)[..., :4].abs().sum((1, 2, 3))
    assert (on_image > 0).all()  # the image's tokens in the prompt


def test_the_effects_of_a_layer_are_those_of_its_heads() -> None:
    model, x = Block("own"), torch.randn(2, 9, 16)
    with hw.watch(model, effects=True) as seen:
        model(x).square().sum().backward()
    every = seen.effects(0, batch=1)
    assert every.shape == (1, 2, 9, 9)
    for head in range(2):
        one = seen.effects(0, head, batch=1)
        torch.testing.assert_close(every.pool(4, how="max")[:, head], one.pool(4, how="max")[:, 0])
    with pytest.raises(ValueError, match="there is no batch entry 2"):
        seen.effects(0, batch=2)


def test_dropout_and_missing_gradients_are_said_in_words() -> None:
    model = hw.nn.MultiHeadAttention(16, 2, dropout=0.5)
    x = torch.randn(1, 6, 16)
    with hw.watch(model, effects=True) as seen:
        model(x).sum().backward()
    with pytest.raises(ValueError, match=r"its weights are dropped at random; call model.eval"):
        seen.effects(0, 0)
    assert math.isnan(seen.heads()[0]["effect"])
    model.eval()
    with hw.watch(model, effects=True) as seen:
        with torch.no_grad():
            model(x)
        with pytest.raises(ValueError, match="its forward ran without gradients"):
            seen.edges()
    with hw.watch(model) as seen:
        model(x).sum().backward()
    with pytest.raises(ValueError, match=r"use hw.watch\(model, effects=True\)"):
        seen.edges()
    assert "effect" not in seen.heads().columns


def test_effects_inside_an_experiment_are_those_of_the_changed_call() -> None:
    torch.manual_seed(0)
    model, x = Block("own").double(), torch.randn(1, 6, 16, dtype=torch.float64)
    with hw.knock_out(model, [(0, 0, 1, 4)]), hw.watch(model, effects=True) as seen:
        before = linear(model(x))
        before.backward()
    assert seen.effects(0, 0)[0, 0, 4, 1] == 0
    with torch.no_grad(), hw.knock_out(model, [(0, 0, 1, 4), (0, 0, 2, 4)]):
        real = float(linear(model(x)) - before)
    assert seen.effects(0, 0)[0, 0, 4, 2].item() == pytest.approx(real)


def test_steps_of_a_training_keep_the_effects_of_their_heads() -> None:
    torch.manual_seed(0)
    model, x = Block("own"), torch.randn(1, 6, 16)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with hw.watch(model, effects=True) as seen:
        for _ in range(2):
            linear(model(x)).backward()
            expected.append(seen.heads()["effect"])
            optimiser.step()
            optimiser.zero_grad()
    assert [entry.table["effect"] for entry in seen.series] == expected


def test_the_bits_of_a_watched_model_and_its_gradients_stay() -> None:
    torch.manual_seed(0)
    model, x = Block("sdpa"), torch.randn(1, 6, 16)
    linear(model(x)).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with hw.watch(model, effects=True):
        linear(model(x)).backward()
    for found, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(found.grad, expected)


def test_targets_are_what_their_names_say() -> None:
    logits = torch.randn(2, 4, 7)
    best = logits[:, -1].topk(2).values
    torch.testing.assert_close(runner_up(logits), (best[:, 0] - best[:, 1]).sum())
    answers = torch.tensor([3, 5])
    others = logits[:, 1].scatter(1, answers[:, None], -9e9).argmax(1)
    expected = logit_difference(logits[:, 1], answers, others)
    torch.testing.assert_close(runner_up(logits, answers, at=1), expected)
    torch.testing.assert_close(log_probability(logits[0, 0], 2), logits[0, 0].log_softmax(0)[2])
    ids = torch.randint(0, 7, (2, 4))
    expected = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
    torch.testing.assert_close(sequence_loss(logits, ids), expected)
    with pytest.raises(ValueError, match="answers are numbers from 0 to 6"):
        runner_up(logits, 7)
    with pytest.raises(ValueError, match="there are 4 positions"):
        runner_up(logits, at=4)
    with pytest.raises(ValueError, match="it takes logits"):
        sequence_loss(logits, ids[:, 1:])
