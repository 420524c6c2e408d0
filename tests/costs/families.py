"""Configurations of transformers, small in depth, one or more per architecture."""

from typing import Any

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {}),
    "RoBERTa": ("roberta", {}),
    "DistilBERT": ("distilbert", {}),
    "ViT": ("vit", {}),
    "T5": ("t5", {}),
    "T5 1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "Whisper": ("whisper", {}),
    "GPT-2": ("gpt2", {}),
    "OPT": ("opt", {}),
    "GPT-NeoX": ("gpt_neox", {"num_hidden_layers": 3}),
    "Llama": ("llama", {"num_hidden_layers": 3}),
    "Llama 3": ("llama", {"num_hidden_layers": 2, "num_key_value_heads": 8, "vocab_size": 128256}),
    "Llama, biases": ("llama", {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "Granite": ("granite", {"num_hidden_layers": 2}),
    "SmolLM3": ("smollm3", {}),
    "Mistral": ("mistral", {"num_hidden_layers": 3}),
    "Mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "Qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "Qwen2 MoE": ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "Qwen3": ("qwen3", {"num_hidden_layers": 3, "hidden_size": 2560, "head_dim": 128}),
    "Qwen3 MoE": ("qwen3_moe", {"num_hidden_layers": 3}),
    "Qwen3-Next": ("qwen3_next", {"num_hidden_layers": 4}),
    "Gemma": ("gemma", {"num_hidden_layers": 2}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3_text", {"num_hidden_layers": 7}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 4}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {"num_hidden_layers": 3, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    ),
    "DeepSeek-V2 Lite": (
        "deepseek_v2", {"num_hidden_layers": 2, "num_experts_per_tok": 6, "q_lora_rank": None},
    ),
    "DeepSeek-V3": ("deepseek_v3", {"num_hidden_layers": 4}),
    "Phi": ("phi", {"num_hidden_layers": 3}),
    "Phi, normed": ("phi", {"num_hidden_layers": 2, "qk_layernorm": True}),
    "Phi-3": ("phi3", {"num_hidden_layers": 3}),
    "Cohere": ("cohere", {"num_hidden_layers": 2}),
    "OLMo 2": ("olmo2", {"num_hidden_layers": 3}),
    "OLMo 3": ("olmo3", {"num_hidden_layers": 4}),
    "OLMoE": ("olmoe", {"num_hidden_layers": 2}),
    "StarCoder2": (
        "starcoder2",
        {"num_hidden_layers": 3, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "Jamba": ("jamba", {"num_hidden_layers": 8}),
    "Bamba": ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [2]}),
}  # fmt: skip
"""The architectures whose parameters are compared, by name: a model type and its fields."""
