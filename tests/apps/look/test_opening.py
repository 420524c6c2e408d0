"""Models by name: the built-in ones, runs, and transformers models of every kind."""

import io
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.apps.look.readers import opening
from headwise.apps.look.readers.builtin import ImageReader
from headwise.apps.look.readers.image_bytes import MOST_PIXELS, pixels
from headwise.apps.look.readers.reader import Illustrated, silent
from headwise.apps.look.readers.transformers_reader import pieces
from headwise.apps.look.scene import Input
from headwise.core.edges import Edge
from headwise.models import ViT, ViTConfig
from headwise.models.trained import ASSETS, checkpoints, loading

transformers = pytest.importorskip("transformers", reason="its models are looked at here")
Image = pytest.importorskip("PIL.Image", reason="images are read with Pillow")

TEXT = "The cat sat on the mat. The cat sat on the hat."
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, model: Any) -> str:
    """A transformers model with the built-in GPT's tokeniser."""
    tokeniser = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "gpt" / "tokenizer.json"), pad_token="!", eos_token="."
    )
    model.save_pretrained(folder)
    tokeniser.save_pretrained(folder)
    return str(folder)


def picture(*size: int) -> bytes:
    out = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(out, "PNG")
    return out.getvalue()


def test_a_decoder_with_fewer_key_heads_is_read_beyond_its_context(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=4200,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        **SMALL,
    )
    reader = opening.opened(saved(tmp_path, transformers.LlamaForCausalLM(config)), "cpu")
    read = reader.read(TEXT, silent)
    assert reader.description.heads == len(read.main.heads) == 8
    assert read.main.causal
    assert "".join(read.main.rows) == TEXT
    assert read.notes[0].endswith("the model was trained on 8 at a time")
    weights = read.main.head("1.3").map[0, 0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))


def test_a_model_with_learnt_places_reads_as_far_as_they_go(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=4200,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    read = opening.opened(saved(tmp_path, transformers.GPT2Model(config)), "cpu").read(TEXT, silent)
    assert len(read.main.rows) == 8
    assert read.notes[0].startswith("the first 8 of ")


def test_an_encoder_looks_both_ways_and_agrees_with_eager_attention(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=4200, intermediate_size=32, **SMALL)
    model = transformers.BertModel(config).eval()
    folder = saved(tmp_path, model)
    read = opening.opened(folder, "cpu").read(TEXT, silent)
    assert not read.main.causal
    model.set_attn_implementation("eager")
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    with torch.no_grad():
        eager = model(torch.tensor([ids]), output_attentions=True).attentions
    torch.testing.assert_close(read.main.head("1.2").map[0, 0], eager[1][0, 2])


def test_an_encoder_and_a_decoder_have_three_groups(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=4200,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    reader = opening.opened(
        saved(tmp_path, transformers.BartForConditionalGeneration(config)), "cpu"
    )
    read = reader.read("The cat", silent)
    assert [group.id for group in read.groups] == ["encoder", "decoder", "cross"]
    assert reader.description.heads == sum(len(group.heads) for group in read.groups)
    assert read.groups[2].rows == read.groups[1].rows
    assert read.groups[2].columns == read.groups[0].rows


def test_a_vision_model_sees_an_image_as_patches(tmp_path: Path) -> None:
    config = transformers.ViTConfig(image_size=32, patch_size=8, intermediate_size=32, **SMALL)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    reader = opening.opened(str(tmp_path), "cpu")
    read = reader.read(picture(50, 40), silent)
    (shown,) = read.main.pictures
    assert (shown.grid, shown.runs) == ((4, 4), [(0, 1, 16)])
    assert read.main.rows[:3] == ("⟨class⟩", "0,0", "0,1")
    head = read.main.heads[0]
    weights = head.map[0, 0, 1:, 1:]  # without the class token
    far = [[math.dist(divmod(i, 4), divmod(j, 4)) for j in range(16)] for i in range(16)]
    mean = float((weights * torch.tensor(far)).sum() / weights.sum())
    assert head.figures["patch_distance_mean"] == pytest.approx(mean, rel=1e-5)
    assert "distance_mean" not in head.figures
    assert Image.open(io.BytesIO(read.images[0])).size == (32, 32)
    with pytest.raises(ValueError, match="a text was given"):
        reader.read("hello", silent)


def test_classifiers_masked_models_and_translators_predict(tmp_path: Path) -> None:
    small = {"vocab_size": 4200, "intermediate_size": 32} | SMALL
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**small))
    read = opening.opened(saved(tmp_path / "bert", bert), "cpu").read(TEXT, silent)
    assert read.predictor is not None
    assert (read.predictor.predicts, read.predictor.groups) == ("same", ("self",))
    outcomes, moved = read.predictor.compare(3, [Edge(read.main.heads[0].module, 0, (0, 9))])
    assert len(outcomes) >= 8
    assert moved > 0

    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=32,
            patch_size=8,
            intermediate_size=32,
            id2label={0: "cat", 1: "dog"},
            **SMALL,
        )
    )
    vit.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": [32, 32]})
    )
    read = opening.opened(str(tmp_path / "vit"), "cpu").read(picture(32, 32), silent)
    assert read.predictor is not None
    assert read.predictor.predicts == "class"
    outcomes, _ = read.predictor.compare(0, [Edge(read.main.heads[0].module, 0, (0, 9))])
    assert {outcome.name for outcome in outcomes} == {"cat", "dog"}

    read = opening.opened("translate", "cpu").read("The cat is black.", silent)
    assert read.predictor is not None
    assert read.predictor.groups == ("decoder", "cross")
    module = read.groups[2].head("6.0").module
    outcomes, moved = read.predictor.compare(0, [Edge(module, None, (0, 2))])
    assert moved > 0
    assert outcomes[0].name.strip() == "Le"


def save_llava(folder: Path, patches: int = 4) -> str:
    """A small LLaVA: a CLIP of some patches by some patches, a Llama, and their processor."""
    side, small = 8 * patches, {"intermediate_size": 32, "hidden_size": 16}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            image_size=side, patch_size=8, num_hidden_layers=2, num_attention_heads=2, **small
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=4300, num_hidden_layers=2, num_attention_heads=4, **small
        ),
        image_token_index=4200,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    tokeniser = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "gpt" / "tokenizer.json"), pad_token="!", eos_token="."
    )
    missing = 4200 - len(tokeniser)
    tokeniser.add_tokens([f"<{number}>" for number in range(missing)])
    tokeniser.add_tokens(["<image>"], special_tokens=True)
    sizes = {"height": side, "width": side}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=sizes),
        tokeniser,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return str(folder)


def test_a_language_model_sees_an_image_among_its_tokens(tmp_path: Path) -> None:
    reader = opening.opened(save_llava(tmp_path), "cpu")
    read = reader.read(Illustrated((picture(40, 30),), "What is round?"), silent)
    (shown,) = read.main.pictures
    assert shown.grid == (4, 4)
    rows, first = read.main.rows, shown.cells[0]
    assert [name.strip() for name in rows[first : first + 5]] == ["0,0", "0,1", "0,2", "0,3", "1,0"]
    assert "".join(rows[first + 16 :]).strip() == "What is round?"
    assert len(read.main.heads) == 8  # those of the language model
    assert {head.layer for head in read.main.heads} == {2, 3}  # as in a watch of the whole model
    assert "layers 0 to 1 are not shown" in read.notes[0]
    assert read.main.causal
    assert read.predictor is not None
    edge = Edge(read.main.heads[0].module, None, (first, first + 16))
    assert read.predictor.compare(len(rows) - 1, [edge])[1] > 0
    assert len(reader.read(picture(40, 30), silent).main.rows) != len(rows)  # another question
    two = reader.read(Illustrated((picture(40, 30), picture(30, 40)), "Which is round?"), silent)
    assert [str(x.name) for x in two.main.pictures] == ["image 1", "image 2"]
    assert len(two.images) == 2
    assert two.main.pictures[1].cells[0] > two.main.pictures[0].cells[-1]
    with pytest.raises(ValueError, match="a text was given; use --image"):
        reader.read("hello", silent)


def test_pieces_of_words_stand_with_their_spaces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "light", "##house", "the", "."]
    made = Tokenizer(models.WordPiece({x: i for i, x in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokeniser = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    ids = tokeniser("the lighthouse .")["input_ids"]
    assert pieces(tokeniser, ids) == ["the", " light", "house", " ."]


def test_a_vit_that_was_trained_here_sees_an_image(tmp_path: Path) -> None:
    config = ViTConfig(image=16, patch=4, d_model=16, layers=1, heads=2, classes=3)
    asked = {"task": "vision", "model": config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(asked))
    checkpoints.save(tmp_path / "model.safetensors", ViT(config).state_dict(), {})
    read, shown = seen_by(tmp_path)
    assert [shown.grid for shown in read.main.pictures] == [(4, 4)]
    assert len(read.main.rows) == 17
    assert "the run has saved no others" in read.notes[0]
    assert shown.mean((1, 2)).abs().max() < 1e-5  # by its own mean
    asked["pixels"] = {"mean": [0.5, 0.4, 0.3], "deviation": [0.2, 0.1, 0.2]}
    (tmp_path / "config.json").write_text(json.dumps(asked))
    read, scaled = seen_by(tmp_path)
    assert read.notes == ()
    expected = pixels(picture(30, 20), 16, 3) - torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    torch.testing.assert_close(scaled, expected / torch.tensor([0.2, 0.1, 0.2])[:, None, None])


def seen_by(folder: Path) -> tuple[Input, torch.Tensor]:
    """An image as a ViT was shown it, (C, H, W)."""
    reader = opening.opened(str(folder), "cpu")
    assert isinstance(reader, ImageReader)
    shown: list[torch.Tensor] = []
    reader.loaded.model.register_forward_pre_hook(lambda _, given: shown.append(given[0][0]))
    return reader.read(picture(30, 20), silent), shown[0]


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n broken", picture(8, 8)[:60]]
)
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    from headwise.apps.look.readers import image_bytes as images

    with pytest.raises(ValueError, match="not a PNG or JPEG"):
        images.opened(content)


def test_an_image_that_would_unpack_to_too_much_is_refused() -> None:
    from headwise.apps.look.readers import image_bytes as images

    out = io.BytesIO()
    Image.new("1", (1 << 13, 1 + (MOST_PIXELS >> 13))).save(out, "PNG")
    with pytest.raises(ValueError, match=r"8192 × 4097 pixels"):
        images.opened(out.getvalue())


def test_a_name_that_can_not_be_looked_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    for ask in (opening.find, lambda what: opening.opened(what, "cpu")):
        with pytest.raises(ValueError, match=r"no model 'owner/name'.*Name or service not known"):
            ask("owner/name")


@pytest.mark.parametrize(
    ("typed", "meant"), [("gtp", "gpt"), ("GPT", "gpt"), ("tranlate", "translate")]
)
def test_a_mistyped_built_in_name_is_corrected_and_never_looked_up(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(socket, "create_connection", asked)
    for ask in (opening.find, lambda what: opening.opened(what, "cpu")):
        with pytest.raises(ValueError, match=f"no model '{typed}'; did you mean {meant}?"):
            ask(typed)


def test_a_name_of_the_hub_that_is_like_a_built_in_one_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(loading, "_reach_hub", asked.append)
    opening.find("gpt2")
    assert asked == ["gpt2"]


def test_a_path_that_is_no_name_is_never_looked_up() -> None:
    with pytest.raises(
        ValueError, match=r"not a folder here, and it is not a name on the hub.*gpt and transl"
    ):
        opening.find("runs/no/where")


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=4200, intermediate_size=32, **SMALL)
    folder = saved(tmp_path, transformers.BertModel(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="transformers can't load"):
        opening.opened(folder, "cpu")


def test_a_watched_run_is_found_in_its_folder(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(16, 2)
    with hw.watch(model) as seen:
        model(torch.randn(1, 5, 16))
    seen.save(tmp_path / "run")
    found = opening.watched(str(tmp_path / "run"))
    assert found is not None
    assert found.state()["layers"][0]["heads"] == 2
    assert opening.watched("gpt") is None
    assert opening.watched(str(tmp_path)) is None
