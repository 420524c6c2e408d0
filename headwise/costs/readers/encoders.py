"""Encoders (BERT and its kin, ViT) and models with an encoder and a decoder (T5, Whisper)."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.layers import (
    AttentionLayer,
    ConvolutionLayer,
    DropoutStep,
    EmbeddingLayer,
    FeedForwardLayer,
    LayerStack,
    LinearLayer,
    LooseWeight,
    NormLayer,
    StackedLayer,
    Step,
    SubLayer,
)
from headwise.costs.readers.fields import HEADS, HIDDEN, LAYERS, WIDTH, Fields, unknown_head
from headwise.messages import say

Head = str  # the end of a class name: Model, ForMaskedLM, …


def read_bert(fields: Fields, head: Head) -> tuple[LayerStack, ...]:
    """BERT, RoBERTa, XLM-R and DistilBERT."""
    fields.needs(WIDTH, HEADS, LAYERS, HIDDEN, ("vocab_size",), ("max_position_embeddings",))
    width, rows = fields.size(*WIDTH), fields.size("max_position_embeddings")
    longest = rows
    if fields.kind in ("roberta", "xlm-roberta"):
        longest = rows - int(fields.need("pad_token_id")) - 1  # positions start after the padding
    norm = NormLayer(width)
    before: list[Step] = [
        EmbeddingLayer("embedding", fields.size("vocab_size"), width, split=True),
        EmbeddingLayer("positions", rows, width, per_batch=False),
    ]
    if fields.kind != "distilbert":
        before.append(EmbeddingLayer("segments", fields.size("type_vocab_size"), width))
    dropout = fields.rate("hidden_dropout_prob", "dropout")
    before += [norm, DropoutStep(dropout)]
    attention = _attention(fields, bias=True, causal=bool(fields.get("is_decoder")))
    feed_forward = FeedForwardLayer(width, fields.size(*HIDDEN), fields.activation())
    layer = StackedLayer(
        (
            SubLayer("attention", attention, post=norm, dropout=dropout),
            SubLayer("feed-forward", feed_forward, post=norm, dropout=dropout),
        ),
        label="layers",
    )
    layers = (layer,) * fields.size(*LAYERS)
    after = bert_head(fields, head, width, dropout)
    return (LayerStack("encoder", tuple(before), layers, after, longest=longest, width=width),)


def bert_head(fields: Fields, head: Head, width: int, dropout: float) -> tuple[Step, ...]:
    """The steps after the last layer, by the end of the class's name."""
    dense = LinearLayer("pooler", width, width, True, activation="tanh", first_only=True)
    relu = LinearLayer("pre-classifier", width, width, True, activation="relu", first_only=True)
    labels = fields.get("num_labels") or len(fields.get("id2label") or {}) or 2
    if head == "ForMaskedLM":
        vocabulary = fields.size("vocab_size")
        tied = fields.flag("tie_word_embeddings")
        steps: tuple[Step, ...] = (
            LinearLayer("transform", width, width, True, activation="gelu"),
            NormLayer(width),
            LinearLayer("head", width, vocabulary, True, tied, split="columns"),
        )
        if not tied and fields.kind != "distilbert":  # the bias is tied with the matrix
            steps = (LooseWeight("unused bias", (vocabulary,)), *steps)
        return steps
    first = LinearLayer("classifier", width, labels, True, first_only=True)
    if head == "ForSequenceClassification":
        pooled = relu if fields.kind == "distilbert" else dense
        return (pooled, DropoutStep(dropout), first)
    if head in ("ForTokenClassification", "ForQuestionAnswering"):
        return (LinearLayer("classifier", width, labels, True),)
    if head == "Model":
        return () if fields.kind == "distilbert" else (dense,)
    raise unknown_head(
        fields, head, "Model, ForMaskedLM, ForSequenceClassification, ForTokenClassification, "
        "ForQuestionAnswering",
    )  # fmt: skip


def _attention(
    fields: Fields, bias: bool, causal: bool = False, caches: bool = False, key_bias: bool = True
) -> AttentionLayer:
    width, heads = fields.size(*WIDTH), fields.size(*HEADS)
    head_dim = fields.head_dim(width, heads)
    return AttentionLayer(
        width,
        heads,
        heads,
        head_dim,
        head_dim,
        causal=causal,
        query_bias=bias,
        key_bias=bias and key_bias,
        value_bias=bias,
        out_bias=bias,
        dropout=fields.rate("attention_probs_dropout_prob", "attention_dropout", "dropout_rate"),
        caches=caches or causal,
    )


def read_vit(fields: Fields, head: Head) -> tuple[LayerStack, ...]:
    """ViT: patches of an image and a class token."""
    fields.needs(WIDTH, HEADS, LAYERS, HIDDEN, ("image_size",), ("patch_size",), ("num_channels",))
    width, image, patch = fields.size(*WIDTH), fields.size("image_size"), fields.size("patch_size")
    channels, tokens = fields.size("num_channels"), (image // patch) ** 2 + 1
    norm, bias = NormLayer(width), fields.flag("qkv_bias")
    plain = _attention(fields, bias=True)
    attention = replace(plain, query_bias=bias, key_bias=bias, value_bias=bias)
    feed_forward = FeedForwardLayer(width, fields.size(*HIDDEN), fields.activation())
    dropout = fields.rate("hidden_dropout_prob")
    layer = StackedLayer(
        (
            SubLayer("attention", attention, before=norm, dropout=dropout),
            SubLayer("feed-forward", feed_forward, before=norm, dropout=dropout),
        ),
        label="layers",
    )
    labels = fields.get("num_labels") or len(fields.get("id2label") or {}) or 2
    last: dict[str, Step] = {
        "Model": LinearLayer(
            "pooler", width, int(fields.get("pooler_output_size") or width), True,
            activation="tanh", first_only=True,
        ),
        "ForImageClassification": LinearLayer("classifier", width, labels, True, first_only=True),
    }  # fmt: skip
    if head not in last:
        raise unknown_head(fields, head, ", ".join(last))
    if image < patch:
        raise fields.contradiction(
            say("an image of {image} has no patch of {patch}", image=image, patch=patch)
        )
    patches = ConvolutionLayer(
        "patches", channels, width, patch**2, tokens - 1, channels * image**2, learns_input=False
    )
    before: tuple[Step, ...] = (
        patches,
        LooseWeight("class token", (1, 1, width)),
        LooseWeight("positions", (1, tokens, width)),
        DropoutStep(dropout),
    )
    layers = (layer,) * fields.size(*LAYERS)
    stack = LayerStack("encoder", before, layers, (norm, last[head]), tokens, width=width)
    return (stack,)


def read_t5(fields: Fields, head: Head) -> tuple[LayerStack, ...]:
    """T5: no biases, RMS norms, and learned buckets of distances in the first layers."""
    fields.needs(WIDTH, HEADS, LAYERS, ("d_ff",), ("vocab_size",))
    width, heads = fields.size(*WIDTH), fields.size(*HEADS)
    buckets = fields.size("relative_attention_num_buckets") * heads
    distance = fields.size("relative_attention_max_distance")
    norm, rate = NormLayer(width, "rms"), fields.rate("dropout_rate")
    gated = fields.get("is_gated_act")
    if gated is None:
        gated = str(fields.get("feed_forward_proj")).startswith("gated")
    name = fields.get("dense_act_fn") or str(fields.need("feed_forward_proj")).split("-")[-1]
    kind = Fields({"model_type": "t5", "hidden_act": name}).activation()
    feed_forward = FeedForwardLayer(
        width, fields.size("d_ff"), kind, gated, bias=False, dropout=rate
    )

    def layer(number: int, decoder: bool) -> StackedLayer:
        own = _attention(fields, bias=False, causal=decoder)
        own = replace(
            own,
            bias_kind="buckets",
            bias_length=distance,
            bias_params=buckets if number == 0 else 0,
        )
        subs = [SubLayer("attention", own, before=norm, dropout=rate)]
        if decoder:
            cross = _attention(fields, bias=False, caches=True)
            cross = replace(cross, context=(width, width))
            subs.append(SubLayer("cross-attention", cross, before=norm, dropout=rate))
        subs.append(SubLayer("feed-forward", feed_forward, before=norm, dropout=rate))
        label = "first layer" if number == 0 else "layers"
        return StackedLayer(tuple(subs), label=label)

    def stack(name: str, count: int, decoder: bool, after: tuple[Step, ...]) -> LayerStack:
        table = EmbeddingLayer("embedding", fields.size("vocab_size"), width, split=True)
        if decoder:
            table = replace(table, tied=True)
        layers = tuple(layer(number, decoder) for number in range(count))
        steps = (norm, DropoutStep(rate), *after)
        return LayerStack(name, (table, DropoutStep(rate)), layers, steps, width=width)

    encoder = stack("encoder", fields.size(*LAYERS), False, ())
    if head == "EncoderModel":
        if fields.get("is_decoder"):
            raise ValueError(
                say("{kind!r} with {name}={value} is not supported", kind=fields.kind,
                    name="is_decoder", value=True)
            )  # fmt: skip
        return (encoder,)
    count = int(fields.get("num_decoder_layers") or fields.size(*LAYERS))
    return encoder, stack("decoder", count, True, seq2seq_head(fields, head, width))


def seq2seq_head(fields: Fields, head: Head, width: int) -> tuple[Step, ...]:
    """The output layer of a model that translates."""
    if head == "Model":
        return ()
    if head != "ForConditionalGeneration":
        raise unknown_head(fields, head, "Model, ForConditionalGeneration")
    tied = fields.flag("tie_word_embeddings")
    vocabulary = fields.size("vocab_size")
    return (LinearLayer("head", width, vocabulary, False, tied, split="columns"),)


def read_whisper(fields: Fields, head: Head) -> tuple[LayerStack, ...]:
    """Whisper: two convolutions over sound, an encoder, and a decoder of text."""
    width, norm = fields.size("d_model"), NormLayer(fields.size("d_model"))
    frames, rate = fields.size("max_source_positions"), fields.rate("dropout")
    bands, kind = fields.size("num_mel_bins"), fields.activation("activation_function")
    stacks = []
    for half in ("encoder", "decoder"):
        decoder = half == "decoder"
        part = Fields(
            {
                **fields.given,
                "num_attention_heads": fields.size(f"{half}_attention_heads"),
                "hidden_size": width,
            }
        )
        own = _attention(part, bias=True, causal=decoder, key_bias=False)
        feed_forward = FeedForwardLayer(width, fields.size(f"{half}_ffn_dim"), kind)
        subs = [SubLayer("attention", own, before=norm, dropout=rate)]
        if decoder:
            cross = _attention(part, bias=True, caches=True, key_bias=False)
            cross = replace(cross, context=(width, width))
            subs.append(SubLayer("cross-attention", cross, before=norm, dropout=rate))
        subs.append(SubLayer("feed-forward", feed_forward, before=norm, dropout=rate))
        layers = (StackedLayer(tuple(subs), label="layers"),) * fields.size(f"{half}_layers")
        if decoder:
            longest = fields.size("max_target_positions")
            before: tuple[Step, ...] = (
                EmbeddingLayer("embedding", fields.size("vocab_size"), width, split=True),
                EmbeddingLayer("positions", longest, width, per_batch=False),
                DropoutStep(rate),
            )
            after = (norm, *seq2seq_head(fields, head, width))
            stacks.append(LayerStack(half, before, layers, after, longest=longest, width=width))
        else:
            before = (
                ConvolutionLayer("first convolution", bands, width, 3, 2 * frames,
                                 2 * frames * bands, activation="gelu", learns_input=False),
                ConvolutionLayer("second convolution", width, width, 3, frames, activation="gelu"),
                LooseWeight("positions", (frames, width)),
                DropoutStep(rate),
            )  # fmt: skip
            stacks.append(LayerStack(half, before, layers, (norm,), frames, width=width))
    return tuple(stacks)
