"""Splits are disjoint and stable, batches complete, tokenisers lossless."""

import io
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.apps.train.data import labelled_images as images
from headwise.apps.train.data import pairs, texts
from headwise.apps.train.data.batches import ByLength, Shuffled
from headwise.models.trained import Tokeniser, chunks

SENTENCES = [f"Sentence number {n} says {word}." for n in range(300) for word in ("yes", "no")]


def test_parts_share_no_english_sentence_however_it_is_spelt() -> None:
    spelt = [change(text) for text in SENTENCES for change in (str, str.upper, lambda s: s + "!")]
    parts = pairs.split([(text, "…") for text in spelt])
    keys = [
        {"".join(filter(str.isalnum, text.casefold())) for text, _ in part}
        for part in (parts.train, parts.valid, parts.test)
    ]
    assert not keys[0] & keys[1] | keys[0] & keys[2] | keys[1] & keys[2]
    assert sum(map(len, (parts.train, parts.valid, parts.test))) == len(spelt)


def test_a_sentence_stays_in_its_part_whatever_comes_beside_it() -> None:
    whole = pairs.split([(text, "…") for text in SENTENCES])
    half = pairs.split([(text, "…") for text in SENTENCES[::2]])
    assert set(half.test) <= set(whole.test)
    # Recorded: a change of these would let earlier models see later tests.
    recorded = {"Go.": "train", "I see.": "train", "Hello!": "train"}
    assert {text: pairs.part_of(text) for text in recorded} == recorded
    held_out = [text for text in SENTENCES if pairs.part_of(text) == "test"]
    assert held_out[:2] == ["Sentence number 59 says no.", "Sentence number 73 says no."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no pairs"),
        (b"\n \n", "has no pairs"),
        (b"no tab here\n", "line 1: expected `english TAB translation`"),
        (b"Go.\tVa !\n" + b"a" * 1_000_000 + b"\tb\n", "line 2: 1,000,000 characters"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"Go.\tVa !\n", "far too small"),
    ],
)
def test_a_file_of_no_use_is_refused_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pairs.split(pairs.read(path))


def test_unknown_corpora_are_refused_and_the_known_ones_named(tmp_path: Path) -> None:
    for reader in (pairs.read, texts.read_text, images.read_images):
        with pytest.raises(ValueError, match="the corpora of"):
            reader("no-such-corpus")


def test_a_text_is_cut_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(map(str, range(1000))), encoding="utf-8")
    parts = texts.read_text(path)
    assert parts.train + parts.valid + parts.test == path.read_text()
    path.write_text("")
    with pytest.raises(ValueError, match="empty or too short"):
        texts.read_text(path)


def test_idx_files_are_read_as_mnist_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 2, 2, 3) + bytes(range(12)))
    assert images.idx(path).tolist() == torch.arange(12).reshape(2, 2, 3).tolist()


def test_sheets_hold_one_image_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    expected = torch.randint(256, (4, 32, 32, 3), dtype=torch.uint8)
    sheet = Image.frombytes("RGB", (1024, 4), expected.reshape(-1).numpy().tobytes())
    sheet.save(tmp_path / "sheet.png")
    (tmp_path / "labels.json").write_text("[3, 1, 4, 1]")
    monkeypatch.setattr(images, "path_of", lambda corpus, name: tmp_path / name)
    found, labels = images.sheets(images.corpora.CIFAR_10, ["sheet.png"], "labels.json")
    assert torch.equal(found, expected.permute(0, 3, 1, 2))
    assert labels.tolist() == [3, 1, 4, 1]


@pytest.fixture(scope="module")
def tokeniser() -> Tokeniser:
    return Tokeniser.learn(SENTENCES, size=400)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_the_same(tokeniser: Tokeniser, text: str) -> None:
    ids = tokeniser.encode(text)
    assert tokeniser.decode(ids) == text
    assert all(0 <= number < tokeniser.pad for number in ids)


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧‍👦🇫🇷",
        "中文分词与标点，。",
        "\x00\x01\x1b[0m\r\n\t\x7f",
        "<pad><s></s>",
        "  a  \n\n",
        "ﷺ\u202e\ufeff",
        "",
    ],
)
def test_emoji_chinese_and_control_characters_come_back(tokeniser: Tokeniser, text: str) -> None:
    assert tokeniser.decode(tokeniser.encode(text)) == text
    assert tokeniser.encode_all([text])[0] == tokeniser.encode(text)


def test_half_a_character_is_refused(tokeniser: Tokeniser) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokeniser.encode("ab\ud800")


def test_a_million_characters_without_a_space_are_encoded(tokeniser: Tokeniser) -> None:
    text = "ab" * 500_000
    assert tokeniser.decode(tokeniser.encode(text)) == text


def test_a_saved_tokeniser_is_the_same(tokeniser: Tokeniser, tmp_path: Path) -> None:
    tokeniser.save(tmp_path / "tokenizer.json")
    again = Tokeniser.load(tmp_path / "tokenizer.json")
    assert again.size == tokeniser.size == 400
    assert again.encode(SENTENCES[0]) == tokeniser.encode(SENTENCES[0])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not a tokeniser"):
        Tokeniser.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="256 bytes"):
        Tokeniser.learn(SENTENCES, size=100)


def test_special_tokens_are_outside_the_text(tokeniser: Tokeniser) -> None:
    ids = [tokeniser.start, *tokeniser.encode("Yes."), tokeniser.end, tokeniser.pad]
    assert tokeniser.decode(ids) == "Yes."
    assert tokeniser.pieces(ids)[0] == "⟨start⟩"
    assert tokeniser.pieces(ids)[-2:] == ["⟨end⟩", "·"]


@given(text=st.text(st.sampled_from("ab\n"), max_size=60), size=st.integers(1, 9))
def test_chunks_lose_nothing(text: str, size: int) -> None:
    parts = list(chunks(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80),
    tokens=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_batches_by_length_see_everything_once_an_epoch_within_their_size(
    lengths: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    order = ByLength(lengths, tokens, seed)
    for epoch in range(2):
        batches = [order.batch(epoch * order.epoch_length + n) for n in range(order.epoch_length)]
        assert sorted(example for batch in batches for example in batch) == list(
            range(len(lengths))
        )
        for batch in batches:
            widest = max(max(lengths[example]) for example in batch)
            assert widest * len(batch) <= tokens or len(batch) == 1


def test_a_batch_is_a_function_of_its_number() -> None:
    lengths = [(n % 7 + 1, n % 5 + 1) for n in range(100)]
    forward, backward = ByLength(lengths, 40, seed=3), ByLength(lengths, 40, seed=3)
    count = 3 * forward.epoch_length
    assert [forward.batch(n) for n in range(count)] == [
        backward.batch(n) for n in reversed(range(count))
    ][::-1]
    assert forward.batch(0) != ByLength(lengths, 40, seed=4).batch(0)
    shuffled = Shuffled(10, 3, seed=0)
    epoch = torch.cat([shuffled.batch(n) for n in range(shuffled.epoch_length)])
    assert len(set(epoch.tolist())) == 9
    assert torch.equal(shuffled.batch(4), Shuffled(10, 3, seed=0).batch(4))


def test_nothing_makes_no_batches() -> None:
    with pytest.raises(ValueError, match="the corpus is empty"):
        ByLength([], 10, seed=0)
    with pytest.raises(ValueError, match="the corpus is empty"):
        Shuffled(0, 10, seed=0)


def test_pairs_of_text_files_with_other_line_ends_are_kept_whole() -> None:
    lines = io.StringIO("A\u2028b.\tC.\nD.\tE.\n", newline="\n")
    assert pairs.parse(lines, "lines") == [("A\u2028b.", "C."), ("D.", "E.")]
