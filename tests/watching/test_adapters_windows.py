"""Attention through windows, chunks and streams: read as exactly as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw
from headwise.apps.look.show import session_of
from headwise.watching import WatchedLayer, open_run

IDS = torch.randint(5, 90, (2, 22), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, -7:] = 0
SMALL: dict[str, Any] = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def spread(model: Any) -> Any:
    """The model with weights that are large enough to tell keys apart."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


def led() -> Any:
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "d_model": 16, "attention_window": [4, 8]}
    inner = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_encoder_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.LEDConfig(**SMALL, **sizes, **inner, **heads)
    return spread(transformers.LEDForConditionalGeneration(config))


def longformer() -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "attention_window": [4, 8]}
    inner = {"intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    return spread(
        transformers.LongformerModel(transformers.LongformerConfig(**SMALL, **sizes, **inner))
    )


def longt5(kind: str = "local") -> Any:
    sizes = {"num_layers": 2, "num_decoder_layers": 1, "d_model": 16, "d_kv": 8, "num_heads": 2}
    more = {"d_ff": 16, "local_radius": 3, "global_block_size": 4, "decoder_start_token_id": 0}
    config = transformers.LongT5Config(**SMALL, **sizes, **more, encoder_attention_type=kind)
    return spread(transformers.LongT5ForConditionalGeneration(config))


def prophetnet() -> Any:
    sizes = {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 2, "ngram": 3}
    heads = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
    inner = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
    config = transformers.ProphetNetConfig(**SMALL, **sizes, **heads, **inner)
    return spread(transformers.ProphetNetForConditionalGeneration(config))


def band(p: Tensor, side: int) -> Tensor:
    """(B, H, N, 2 · side + 1) weights as (B, H, N, N): slot s of row i is key i + s - side."""
    batch, heads, rows, slots = p.shape
    whole = p.new_zeros(batch, heads, rows, rows + 2 * side)
    for row in range(rows):
        whole[:, :, row, row : row + slots] = p[:, :, row]
    return whole[..., side : side + rows]


def blocks(p: Tensor) -> Tensor:
    """(B, C, H, w, 3 w) weights as (B, H, N, N): each block sees itself and both neighbours."""
    batch, chunks, heads, rows, _ = p.shape
    whole = p.new_zeros(batch, heads, chunks * rows, (chunks + 2) * rows)
    for chunk in range(chunks):
        here = slice(chunk * rows, (chunk + 1) * rows)
        whole[:, :, here, chunk * rows : (chunk + 3) * rows] = p[:, chunk]
    return whole[..., rows:-rows]


def check(layer: WatchedLayer, p: Tensor, counted: Tensor) -> None:
    """Every statistic of weights (B, H, N, N) is the layer's, in the rows (B, N) that count."""
    seen = layer.observation
    where = torch.arange(p.shape[-1])
    distance = where[:, None] - where
    before = p.diagonal(-1, -2, -1)
    wanted = {
        "entropy": torch.special.entr(p).sum(-1),
        "top_prob": p.amax(-1),
        "self_mass": p.diagonal(dim1=-2, dim2=-1),
        "previous_mass": F.pad(before, (1, 0)),
        "sink_mass": p[..., 0],
        "distance": (p * distance).sum(-1),
    }
    rows = counted[:, None].expand_as(seen.entropy)
    assert torch.equal(seen.sees, rows)
    for name, value in wanted.items():
        torch.testing.assert_close(seen.values[name][rows], value[rows], rtol=1e-4, atol=1e-5)
        mean = torch.stack([value[:, head][counted].double().mean() for head in range(p.shape[1])])
        torch.testing.assert_close(layer.figures()[f"{name}_mean"], mean, rtol=1e-4, atol=1e-5)


def watched(model: Any, **given: Tensor) -> tuple[hw.Watch, Any]:
    """The model's heads, none left out, its bits unchanged, and its own weights."""
    options = {"use_cache": False} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        before = model(**given, **options)
        with hw.watch(model, strict=True) as seen:
            after = model(**given, **options)
        assert torch.equal(before[0], after[0])
        return seen, model(**given, **options, output_attentions=True)


@pytest.mark.parametrize("make", [led, longformer])
@pytest.mark.parametrize("length", [22, 5])
def test_sliding_windows_are_read_with_their_positions(
    make: Callable[[], Any], length: int
) -> None:
    model, mask = make(), PADDED[:, -length:]
    more = {"decoder_input_ids": IDS[:, :6]} if make is led else {}
    seen, own = watched(model, input_ids=IDS[:, :length], attention_mask=mask, **more)
    layers = [x for x in seen.layers if x.kind == "window"]
    weights = own.encoder_attentions if make is led else own.attentions
    assert len(layers) == len(weights) == 2
    for layer, p, window in zip(layers, weights, (4, 8), strict=True):
        more_rows = layer.observation.sees.shape[2] - length  # a multiple of the window
        p = band(F.pad(p[:, :, :length], (0, 0, 0, more_rows)), window // 2)
        check(layer, p, F.pad(mask, (0, more_rows)).bool())


@pytest.mark.parametrize("length", [22, 3])
def test_blocks_that_see_their_neighbours_are_read_with_their_positions(length: int) -> None:
    given = {"input_ids": IDS[:, :length], "attention_mask": PADDED[:, -length:]}
    seen, own = watched(longt5(), **given, decoder_input_ids=IDS[:, :6])
    layers = [x for x in seen.layers if x.kind == "window"]
    assert len(layers) == 2
    for layer, p in zip(layers, own.encoder_attentions, strict=True):
        rows = layer.observation.sees.shape[2]
        check(layer, blocks(p), F.pad(given["attention_mask"], (0, rows - length)).bool())


def plain(layer: WatchedLayer, p: Tensor) -> None:
    """The statistics of weights (B, H, N, K) that need no positions; the others are NaN."""
    seen = layer.observation
    assert torch.equal(seen.sees, torch.ones_like(seen.sees))
    torch.testing.assert_close(seen.entropy, torch.special.entr(p).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.top_prob, p.amax(-1), rtol=1e-4, atol=1e-5)
    for name in ("self_mass", "previous_mass", "sink_mass", "distance"):
        assert seen.values[name].isnan().all()
    assert torch.isnan(layer.figures()["distance_mean"]).all()


def test_prophetnets_streams_are_read_beside_its_main_one() -> None:
    seen, own = watched(prophetnet(), input_ids=IDS, decoder_input_ids=IDS[:, :6])
    streams = [x for x in seen.layers if x.kind == "window"]
    assert [x.module for x in streams] == [
        f"prophetnet.decoder.layers.{n}.self_attn" for n in (0, 1)
    ]
    for layer, p in zip(streams, own.decoder_ngram_attentions, strict=True):
        plain(layer, p.transpose(1, 2).flatten(2, 3))  # (B, streams, H, N, 2 N)
    assert len(seen.types()) == len(seen.heads())


def test_keys_that_all_rows_see_beside_their_windows_leave_positions_unknown() -> None:
    model, everywhere = longformer(), torch.zeros_like(IDS)
    everywhere[:, 3] = 1
    seen, own = watched(model, input_ids=IDS, global_attention_mask=everywhere)
    layers = [x for x in seen.layers if x.kind == "window"]
    rows = torch.arange(IDS.shape[1]) != 3  # that one sees everything, by weights of its own
    for layer, p in zip(layers, own.attentions, strict=True):
        entropy = layer.observation.entropy[:, :, : IDS.shape[1]]
        wanted = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(entropy[:, :, rows], wanted[:, :, rows], rtol=1e-4, atol=1e-5)
        assert layer.observation.distance[:, :, :20].isnan().all()


def test_side_keys_of_long_t5_leave_positions_unknown() -> None:
    mask = torch.ones_like(IDS[:, :20])
    given = {"input_ids": IDS[:, :20], "attention_mask": mask}
    seen, own = watched(longt5("transient-global"), **given, decoder_input_ids=IDS[:, :6])
    layers = [x for x in seen.layers if x.kind == "window"]
    for layer, p in zip(layers, own.encoder_attentions, strict=True):
        plain(layer, p.transpose(1, 2).flatten(2, 3))


class Local(nn.Module):
    """Heads that see their own block and the one before it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.block, self.num_heads, self.dropout = 4, 2, nn.Dropout(dropout)
        self.qkv = nn.Linear(16, 48)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, H, C, w, 2 w) and values (B, H, C, 2 w, D)."""
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        size = self.block
        k, v = (F.pad(y, (0, 0, size, 0)).unfold(2, 2 * size, size) for y in (k, v))
        slot, chunk = torch.arange(2 * size), torch.arange(k.shape[2])[:, None, None]
        later = slot > torch.arange(size)[:, None] + size
        s = q.unflatten(2, (-1, size)) @ k
        return s.masked_fill(later | ((chunk == 0) & (slot < size)), -torch.inf), v.mT

    def forward(self, x: Tensor) -> Tensor:
        s, v = self.parts(x)
        return (self.dropout(s.softmax(-1)) @ v).flatten(2, 3)  # (B, H, N, D)


def local_weights(model: Local, x: Tensor) -> Tensor:
    """The weights of `Local` as (B, H, N, N)."""
    p = model.parts(x)[0].softmax(-1)
    p = F.pad(p, (0, model.block)).transpose(1, 2)  # as if it saw the next block too
    return blocks(p)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_hand_written_blocks_are_read_with_their_positions(dropout: float) -> None:
    model, x = Local(dropout=dropout), torch.randn(2, 12, 16)
    with hw.watch(model, strict=True) as seen:
        out = model(x)
    check(seen.layers[0], local_weights(model, x), torch.ones(2, 12, dtype=torch.bool))
    if not dropout:
        norm = out.norm(dim=-1)
        torch.testing.assert_close(seen.layers[0].observation.output_norm, norm)
    slots = model.parts(x)[0].softmax(-1).flatten(2, 3)
    torch.testing.assert_close(seen.layers[0].map().to_tensor(), slots, rtol=1e-4, atol=1e-6)


def test_some_rows_of_windows_are_a_sample_of_them() -> None:
    model, x = Local(), torch.randn(2, 24, 16)
    with hw.watch(model) as seen:
        model(x)
    with hw.watch(model, rows=5, sink_keys=3, stats=("distance", "sink_mass")) as few:
        model(x)
    whole, some = seen.layers[0].observation, few.layers[0].observation
    torch.testing.assert_close(some.distance, whole.distance[:, :, some.rows])
    sink = local_weights(model, x)[..., :3].sum(-1)[:, :, some.rows]
    torch.testing.assert_close(some.sink_mass, sink, rtol=1e-4, atol=1e-6)


def test_a_head_is_switched_off_in_every_window() -> None:
    model, x = Local(), torch.randn(2, 12, 16)
    whole = model(x)
    with hw.watch(model) as seen:
        model(x)
        table = seen.importance(lambda: model(x).square().mean())
        seen._recorder.interventions.silenced = {"": 1}
        out = model(x)
    assert torch.equal(out[:, 0], whole[:, 0])
    assert not out[:, 1].any()
    wanted = [-whole.detach()[:, head].square().sum() / whole.numel() for head in (0, 1)]
    assert table["importance"] == pytest.approx([float(x) for x in wanted], rel=1e-4)


def test_values_that_are_all_alike_leave_positions_unknown() -> None:
    model, x = Local(), torch.randn(2, 12, 16)
    nn.init.zeros_(model.qkv.weight)
    nn.init.zeros_(model.qkv.bias)
    with hw.watch(model, strict=True) as seen:
        model(x)
    assert seen.layers[0].observation.distance.isnan().all()
    assert seen.layers[0].observation.entropy.isfinite().all()


def test_windows_that_can_not_be_read_do_not_end_a_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    model, x = nn.Sequential(Local(), nn.Flatten(), nn.LazyLinear(3)), torch.randn(2, 12, 16)
    whole = model(x)
    with hw.watch(model[0]) as fine:
        model[0](x)
    assert fine.layers[0].kind == "window"
    for name in ("SoftmaxRows.add_product", "WindowedCall.known"):
        module = "softmax_rows" if "product" in name else "written_attention"
        with monkeypatch.context() as patched:
            patched.setattr(f"headwise.watching.adapters.written.{module}.{name}", broken)
            watch = hw.watch(model).attach()
            with pytest.warns(UserWarning, match="out of order"):
                out = model(x)
            out.sum().backward()
            assert torch.equal(out, whole)
            assert watch.unread == ["0"]
            watch.detach()


def test_a_windowed_layer_is_saved_and_opened_as_one(tmp_path: Path) -> None:
    model, x = Local(), torch.randn(2, 12, 16)
    with hw.watch(model) as seen:
        model(x)
    seen.save(tmp_path / "run")
    assert [layer.kind for layer in open_run(tmp_path / "run").layers] == ["window"]


def test_the_page_shows_maps_of_tokens_and_leaves_windows_out() -> None:
    x = torch.randn(1, 12, 16)
    pair = nn.ModuleList([Local(), hw.nn.MultiHeadAttention(16, 4)])
    with hw.watch(pair) as seen:
        for part in pair:
            part(x)
    assert [layer.kind for layer in seen.layers] == ["window", "self"]
    (group,) = session_of(seen).atlases["0"].input.groups
    assert {head.module for head in group.heads} == {"1"}
    with hw.watch(pair[0]) as seen:
        pair[0](x)
    with pytest.raises(ValueError, match="all heads of this model look through windows"):
        session_of(seen)
