"""Small models of transformers' families, and inputs that they run with, both made by rule."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, LENGTH, PARAMETERS = 2, 12, 110_000_000
IMAGE, VIDEO, AUDIO = 95, 96, 97  # ids of placeholders; text has smaller ones

_TWO = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers layers depth "
_TWO += "num_decoder_layers num_encoder_layers num_blocks encoder_num_layers decoder_num_layers "
_TWO += "num_experts_per_tok top_k num_key_value_heads n_kv_heads kv_heads num_kv_heads n_group "
_TWO += "topk_group moe_k moe_topk num_selected_experts attn_layer_period expert_layer_period "
_TWO += "vision_layers hybrid_layer_period mamba_n_groups mamba_ngroups n_groups "
_TWO += "encoder_n_layers n_encoder_layers "
_TWO += "full_attention_interval decoder_depth predictor_num_hidden_layers text_layers "
_TWO += "num_self_attends_per_block num_self_attention_layers encoder_hidden_layers "
_TWO += "num_hidden_layers_pre encoder_depth codebook_layers"
_FOUR = "num_attention_heads n_head n_heads num_heads encoder_attention_heads heads "
_FOUR += "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
_FOUR += "num_experts num_local_experts n_routed_experts moe_num_experts num_decoder_heads "
_FOUR += "num_codebooks mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads "
_FOUR += "predictor_num_attention_heads num_frames num_mel_frames num_encoder_heads"
_WIDE = "hidden_size d_model n_embd dim embed_dim embedding_size d_embed decoder_hidden_size "
_WIDE += "projection_dim word_embed_proj_dim hidden_dim encoder_hidden_size emb_dim "
_WIDE += "out_hidden_size output_dim d_latents embed_dimension predictor_hidden_size "
_WIDE += "output_hidden_size lm_hidden_size text_hidden_size vision_hidden_size "
_WIDE += "cross_attention_hidden_size entity_emb_size upsample_groups"
_INNER = "intermediate_size d_ff d_inner encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner mlp_dim "
_INNER += "moe_intermediate_size ffn_hidden_size feed_forward_size shared_expert_intermediate_size "
_INNER += "expert_ffn_hidden_size adapter_intermediate_size encoder_intermediate_size"
_EIGHT = "head_dim d_kv rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim "
_EIGHT += "sliding_window attention_window window_size num_buckets patch_size mamba_d_state "
_EIGHT += "ssm_state_size state_size linear_key_head_dim linear_value_head_dim mamba_d_head "
_EIGHT += "mamba_headdim mamba_head_dim mamba_chunk_size chunk_size num_latents "
_EIGHT += "num_query_tokens num_queries query_length"
_LONG = "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx "
_LONG += "max_seq_len entity_vocab_size"
SIZES: dict[str, Any] = {
    **dict.fromkeys(_TWO.split(), 2),
    **dict.fromkeys(_FOUR.split(), 4),
    **dict.fromkeys(_WIDE.split(), 32),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_EIGHT.split(), 8),
    **dict.fromkeys(_LONG.split(), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "n_mels", "num_mel_bins"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "padding_idx"), 0),
    **dict.fromkeys(("image_token_id", "image_token_index", "image_soft_token_id"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_id"), 93),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_id"), 94),
    **{"bos_token_id": 1, "eos_token_id": 2, "image_size": 32, "first_k_dense_replace": 1},
    **{
        "image_grid_pinpoints": [[32, 64], [64, 32]],
        "mm_tokens_per_image": 4,
        "attn_layer_indices": [1],
        "num_kv_shared_layers": 0,
        "mamba_d_ssm": 32,
    },
    **{"n_shared_experts": 1, "attn_layer_offset": 1, "n_mamba_heads": 4, "prediction_length": 4},
    **{"mamba_expand": 1, "expand": 1, "crop_size": 32, "default_language": "en_XX"},
    **{"lags_sequence": [1, 2], "context_length": 16, "block_types": ["recurrent", "attention"]},
}
"""Settings that make a config tiny, by the names that families use."""

MAIN = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "inputs_embeds",
        "past_values", "hidden_states")  # fmt: skip
"""What a model may be about, if not text."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
STEPS = ((), ("sections",), ("head_dim", "embed_dim", "patch_size", "window_size", "sections"),
         ("hidden_size", "num_heads", "max_position_embeddings"), tuple(SIZES))  # fmt: skip
"""Settings that are left as they are, in the attempts to build a family.

"sections" gives rotary embeddings sections for time, height and width, which some have unsaid.
"""


def families() -> list[str]:
    """The families that transformers has a model for."""
    return sorted(name for name in auto.MODEL_MAPPING_NAMES if name in CONFIG_MAPPING)


def tiny(kind: Any, without: tuple[str, ...] = (), usual: Any = None) -> Any:
    """A config of this class with small sizes, its parts' too; `without` some of them.

    What has no size is as in `usual`.
    """
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(kind))
    known |= {key for parent in kind.__mro__ for key in getattr(parent, "__annotations__", {})}
    known -= {name for name in known if isinstance(getattr(kind, name, None), property)}
    parts = getattr(kind, "sub_configs", None) or {}
    own = {} if usual is None else usual.to_diff_dict()
    options: dict[str, Any] = {key: own[key] for key in own if key in known - {*parts}}
    options |= {name: SIZES[name] for name in SIZES if name in known - {*without}}
    if "kv_lora_rank" in known:
        options["num_key_value_heads"] = SIZES["num_attention_heads"]
    if usual is None:
        with contextlib.suppress(Exception):  # some are made of parts that must be given
            usual = kind()
    for name in parts:
        part = getattr(usual, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            options[name] = tiny(type(part), without, part).to_dict()
    if usual is not None and "num_hidden_layers" not in without:
        options |= _one_layer_of_each_kind(usual, options)
    for name, kinds in (
        ("layer_types", ("full_attention",) * 2),
        ("mlp_layer_types", ("dense", "sparse")),
    ):
        if name in known and usual is not None and getattr(usual, name, None) is None:
            options[name] = [*kinds]
    if isinstance(getattr(usual, "image_size", None), list | tuple) and "image_size" in options:
        options["image_size"] = [SIZES["image_size"]] * len(usual.image_size)
    linear = {*(getattr(usual, "layer_types", None) or ())} == {"linear_attention"}
    if linear and "layer_types" in known and "num_attention_heads" in known:  # says only half
        options["layer_types"] = ["linear_attention", "full_attention"]
    options |= _positions(usual, options, "sections" in without)
    for _ in range(len(options)):
        try:
            return kind(**options)
        except Exception as error:  # a size that this family checks
            said = f"{error} {error.__cause__}"
            named = [name for name in options if name in said]
            if not named:
                raise
            del options[named[0]]
    return kind()


def _one_layer_of_each_kind(usual: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The number of layers, and lists with an entry per layer, so that every kind is there."""
    name = next(
        (x for x in LAYERS if x in options and isinstance(getattr(usual, x, None), int)), ""
    )
    count = getattr(usual, name, 0)
    lists = {
        key: value
        for key, value in vars(usual).items()
        if isinstance(value, list) and len(value) == count > 1
    }
    if not lists:
        return {}
    kinds = [*zip(*(x for x in lists.values() if isinstance(x[0], str)), strict=True)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    kept = sorted([*first, *(i for i in range(2) if i not in first)][: max(2, len(first))])
    few: dict[str, Any] = {key: [x[i] for i in kept] for key, x in lists.items()}
    for key, value in few.items():
        if key in SIZES and isinstance(value[0], int):
            few[key] = [SIZES[key]] * len(kept)
    return {name: len(kept), **few}


def _positions(usual: Any, options: dict[str, Any], sections: bool) -> dict[str, Any]:
    """The rotary settings, with sections that add up to half of a small head."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(usual, name, None)
        if isinstance(given, dict) and (sections or "mrope_section" in given):
            half = int(options.get("head_dim", 8) * given.get("partial_rotary_factor", 1.0)) // 2
            shares = _shares(given.get("mrope_section") or [2, 3, 3], half)
            return {name: {**given, "mrope_section": shares}}
    return {}


def _shares(sections: list[int], whole: int) -> list[int]:
    """Whole numbers in the proportion of these, as near as they can be, that add up to `whole`."""
    exact = [x * whole / sum(sections) for x in sections]
    shares = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: whole - sum(shares)]:
        shares[i] += 1
    return shares


def ready(family: str) -> tuple[Any, dict[str, Any]]:
    """A model of the family that runs, and its inputs; the first error if none does."""
    first: Exception | None = None
    blind: tuple[Any, dict[str, Any]] | None = None  # runs, though without the pictures it can see
    for without in STEPS:
        for kind in classes(family):
            try:
                model = build(kind, tiny(CONFIG_MAPPING[family], without))
                for given in inputs(model):
                    try:
                        torch.manual_seed(2)
                        model(**given)
                        if "pixel_values" in given or not hasattr(model, "get_image_features"):
                            return model, given
                        blind = blind or (model, given)
                        break
                    except Exception as error:
                        first = first or error
            except ImportError:
                raise
            except Exception as error:
                first = first or error
    if blind is None:
        raise first or ValueError("no class of it has a forward")
    return blind


def classes(family: str) -> list[Any]:
    """The classes of a family: one that generates, if it has one, before the bare one."""
    mappings = (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    )
    found = [mapping[family] for mapping in mappings if family in mapping]
    names = [x[0] if isinstance(x, list | tuple) else x for x in found]
    return [getattr(transformers, name) for name in dict.fromkeys(names) if name != "AutoModel"]


def build(kind: Any, config: Any) -> Any:
    """A model with random weights, for eager attention where it has a choice."""
    with torch.device("meta"):
        count = sum(x.numel() for x in kind(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{count:,} parameters from a tiny config")
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    with contextlib.suppress(Exception):
        model.set_attn_implementation("eager")
    return model


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that a model of this kind may run with, the most telling first."""
    torch.manual_seed(1)
    taken = inspect.signature(model.forward).parameters
    if hasattr(model, "get_image_features") and "input_ids" in taken:
        for picture in pictures(model, taken):
            with contextlib.suppress(Exception):
                yield _beside_text(model, picture, model.get_image_features, IMAGE)
    if "input_ids" in taken:
        yield text(model)
    first = model.main_input_name
    first = first[0] if isinstance(first, list) else first
    for name in dict.fromkeys((first, *MAIN)):
        if name in taken or name == first:
            for main in _mains(model, name, taken):
                yield main
                if "input_ids" in taken and "input_ids" not in main:
                    yield text(model) | main
                if "decoder_input_ids" in taken:
                    yield main | {"decoder_input_ids": torch.randint(5, 90, (BATCH, LENGTH - 3))}


def text(model: Any) -> dict[str, Any]:
    """Two texts, the second one padded on the right."""
    taken = inspect.signature(model.forward).parameters
    ids = torch.randint(5, 90, (BATCH, LENGTH))
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, -4:] = 0
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(5, 90, (BATCH, LENGTH - 3))
    boxes = torch.randint(1, 30, (BATCH, LENGTH, 4)).cumsum(-1)
    given["bbox"] = (
        boxes if setting(model, "coordinate_size", "max_2d_position_embeddings") else boxes / 200.0
    )
    given["visual_feats"] = torch.randn(BATCH, 4, setting(model, "visual_feat_dim") or 8)
    given["visual_pos"] = torch.rand(BATCH, 4, 4)
    given["mm_token_type_ids"] = torch.zeros_like(ids)
    given["qformer_input_ids"] = ids
    return {key: value for key, value in given.items() if key in taken}


def _beside_text(model: Any, picture: dict[str, Any], features: Any, place: int) -> dict[str, Any]:
    """A picture, and texts with as many placeholders as the model makes of it."""
    allowed, given = inspect.signature(features).parameters, text(model)
    found = features(
        **{
            key: value
            for key, value in {**given, **picture}.items()
            if key in allowed and key not in ("input_ids", "attention_mask")
        }
    )
    found = found if isinstance(found, Tensor | list | tuple) else found.pooler_output
    rows = found if isinstance(found, list | tuple) else [found]
    count = sum(x.numel() // x.shape[-1] for x in rows) // BATCH
    holes = torch.full((BATCH, count), place)
    for key, middle in (
        ("input_ids", holes),
        ("attention_mask", torch.ones_like(holes)),
        ("mm_token_type_ids", torch.ones_like(holes)),
    ):
        if key in given:
            given[key] = torch.cat([given[key][:, :4], middle, given[key][:, 4:]], 1)
    taken = inspect.signature(model.forward).parameters
    if "token_type_ids" in taken:
        given["token_type_ids"] = (given["input_ids"] == place).long()
    return given | {key: value for key, value in picture.items() if key in taken}


def pictures(model: Any, taken: Any) -> Iterator[dict[str, Any]]:
    """Two pictures, in the shapes in which models take them."""
    size = setting(model, "image_size", "input_size", "img_size") or 32
    if isinstance(size, dict):
        size = size["height"], size["width"]
    sides = tuple(size[-2:]) if isinstance(size, list | tuple) else (size, size)
    channels = setting(model, "num_channels", "in_channels", "in_chans", "num_image_channels") or 3
    patch = setting(model, "patch_size") or 8
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    time = setting(model, "temporal_patch_size", "tubelet_size") or 1
    time = time[0] if isinstance(time, list | tuple) else time
    flat = torch.randn(32, channels * time * patch * patch)
    one = torch.randn(BATCH, channels, *sides)
    squares = {"image_sizes": torch.tensor([[*sides]] * BATCH), "grid_thw": grid,
               "image_grid_thw": grid, "grid_hws": grid[:, 1:], "image_grid_hws": grid[:, 1:],
               "spatial_shapes": grid[:, 1:], "target_sizes": grid[:, 1:],
               "merge_sizes": torch.tensor([2, 2]),
               "image_merge_sizes": torch.tensor([2, 2])}  # fmt: skip
    squares = {key: value for key, value in squares.items() if key in taken}
    if "grid" in " ".join(taken) or "spatial_shapes" in taken or "target_sizes" in taken:
        yield {"pixel_values": flat, **squares}
        by_image = flat[:, : channels * patch * patch].unflatten(0, (BATCH, 16))
        mask = torch.ones(BATCH, 16, dtype=torch.long)
        more = {key: mask for key in ("pixel_attention_mask",) if key in taken}
        yield {"pixel_values": by_image, **squares, **more}
        yield {
            "pixel_values": flat[:, : channels * patch * patch].unflatten(
                -1, (channels, patch, patch)
            ),
            **squares,
        }
    if "pixel_position_ids" in taken or "image_position_ids" in taken:
        places = (
            torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1).expand(BATCH, 16, 2)
        )
        name = next(x for x in ("pixel_position_ids", "image_position_ids") if x in taken)
        yield {"pixel_values": torch.rand(BATCH, 16, channels * patch * patch), name: places}
    yield {"pixel_values": one, **squares}
    big = torch.randn(BATCH, channels, 64, 64)
    yield {
        "pixel_values": big,
        **{
            k: torch.tensor([[64, 64]] * BATCH) if k == "image_sizes" else v
            for k, v in squares.items()
        },
    }
    yield {"pixel_values": one[:, None], **squares}
    several = torch.randn(BATCH, 3, channels, *sides)
    yield {"pixel_values": several, **squares}
    yield {"pixel_values": several.flatten(0, 1), "num_patches": torch.tensor([3, 3])}
    frames = setting(model, "num_frames", "frames_per_clip") or 4
    yield {"pixel_values": torch.randn(BATCH, frames, channels, *sides)}
    yield {"pixel_values": torch.randn(BATCH, 2, channels, 64, 64)}


def _mains(model: Any, name: str, taken: Any) -> Iterator[dict[str, Any]]:
    """What may be given as the main input of this name, with what is required beside it."""
    config = model.config
    if name == "pixel_values":
        for picture in pictures(model, taken):
            yield picture
            if "prompt_pixel_values" in taken:
                masks = torch.randn_like(picture["pixel_values"])
                yield {**picture, "prompt_pixel_values": masks, "prompt_masks": masks}
    elif name == "pixel_values_videos":
        size = setting(model, "image_size", "crop_size") or 32
        size = size if isinstance(size, int) else size[-1]
        frames = setting(model, "frames_per_clip", "num_frames") or 4
        yield {name: torch.randn(BATCH, frames, 3, size, size)}
    elif name == "hidden_states":
        for picture in pictures(model, taken):
            yield {name: picture.pop("pixel_values"), **picture}
    elif name == "input_values":
        yield {name: torch.randn(BATCH, 2000)}
        yield {name: torch.randn(BATCH, 1, 4000)}
        bins = setting(model, "num_mel_bins", "feat_dim") or 80
        yield {name: torch.randn(BATCH, setting(model, "max_length") or 64, bins)}
    elif name == "input_features":
        names = ("num_mel_bins", "input_feat_per_channel", "n_mels", "input_dim",
                 "feature_projection_input_dim", "model_in_channels")  # fmt: skip
        told = setting(model, *names)
        frames = 2 * (setting(model, "max_source_positions") or 64)
        shapes = [(frames, bins) for bins in (told, 16, 64, 80, 128) if bins]
        for shape in (shapes[0][::-1], *shapes, (1, *shapes[0])):
            x = {name: torch.randn(BATCH, *shape)}
            yield x
            mask = torch.ones(BATCH, frames, dtype=torch.long)
            for key in ("input_features_mask", "attention_mask", "feature_attention_mask"):
                if key in taken:
                    yield {**x, key: mask}
                    yield {**x, key: mask.bool()}
    elif name == "inputs_embeds":
        width = setting(model, "hidden_size", "d_model", "d_latents") or 32
        x = torch.randn(BATCH, LENGTH, width)
        yield {name: x}
        yield {
            "query_embeds": x,
            "encoder_hidden_states": torch.randn(
                BATCH, 6, setting(model, "encoder_hidden_size") or width
            ),
        }
        yield {"query_embeds": x}
        yield {"noise_embeds": x, "context_hidden_states": x}
    elif name == "past_values":
        length = getattr(config, "context_length", 16)
        for shape in ((length,), (length, getattr(config, "num_input_channels", 1))):
            past = torch.randn(BATCH, *shape)
            yield {name: past}
            yield {
                name: past,
                "past_values_padding": torch.zeros(BATCH, length),
                "freq": torch.zeros(BATCH, 1, dtype=torch.long),
            }
        lags = max(getattr(config, "lags_sequence", None) or [0])
        features = getattr(config, "num_time_features", 0)
        past = torch.randn(BATCH, length + lags)
        yield {
            name: past,
            "past_time_features": torch.randn(BATCH, length + lags, features),
            "past_observed_mask": torch.ones_like(past),
            "future_values": torch.randn(BATCH, getattr(config, "prediction_length", 0) or 4),
            "future_time_features": torch.randn(
                BATCH, getattr(config, "prediction_length", 0) or 4, features
            ),
        }


def setting(model: Any, *names: str) -> Any:
    """The first of these settings that a model's config or one of its parts has, or None."""
    parts = [model.config]
    for name in (
        "vision_config",
        "audio_config",
        "encoder_config",
        "backbone_config",
        "text_config",
    ):
        part = getattr(model.config, name, None)
        parts += [part] if isinstance(part, transformers.PreTrainedConfig) else []
    for name in names:
        for part in parts:
            with contextlib.suppress(Exception):
                if getattr(part, name) is not None:
                    return getattr(part, name)
    return None
