"""`import headwise.transformers` gives transformers an attention implementation, "headwise".

After that `from_pretrained(..., attn_implementation="headwise")` and
`model.set_attn_implementation("headwise")` work: fused attention on any device, with grouped heads,
sliding windows, caps, sinks and position biases, whose statistics `hw.watch` takes from the one
pass that computes the output.

>>> import transformers
>>> import headwise.transformers
>>> config = transformers.LlamaConfig(
...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64,
...     vocab_size=99, attn_implementation="headwise")
>>> transformers.LlamaModel(config).config._attn_implementation
'headwise'
"""

from headwise.watching.adapters.implementation import register

register()
