"""The 中文 of the words in an explanation: letters of formulas and names of parts."""

from __future__ import annotations

import re

LETTERS = {
    "b": ("batch", "批量"),
    "l": ("layers", "层数"),
    "s": ("queries", "查询数"),
    "t": ("keys", "键数"),
    "P": ("visible pairs", "可见对数"),
    "h": ("width", "宽度"),
    "a": ("heads", "头数"),
    "g": ("key heads", "键值头数"),
    "d": ("width of a head", "每头宽度"),
    "v": ("width of a value", "值的宽度"),
    "f": ("hidden width", "隐藏宽度"),
    "V": ("vocabulary", "词表"),
    "E": ("experts", "专家数"),
}
"""What each letter stands for, in English and 中文."""

PARTS = {
    "around": "残差与归一化",
    "around_attention": "注意力外的残差与归一化",
    "around_cross": "交叉注意力外的残差与归一化",
    "around_feed_forward": "前馈层外的残差与归一化",
    "attention": "注意力",
    "blocks": "层",
    "convolution": "卷积",
    "cross_attention": "交叉注意力",
    "decoder": "解码器",
    "decoder_norm": "解码器的归一化",
    "down": "下投影",
    "dropout": "丢弃",
    "embedding": "词嵌入",
    "encoder": "编码器",
    "encoder_norm": "编码器的归一化",
    "feed_forward": "前馈层",
    "first_cell": "初始细胞状态",
    "first_hidden": "初始隐藏状态",
    "gate": "门控",
    "head": "输出层",
    "key": "键投影",
    "key_norm": "键的归一化",
    "layers": "层",
    "norm": "归一化",
    "out": "输出投影",
    "patches": "图像块",
    "position": "位置",
    "positions": "位置",
    "query": "查询投影",
    "query_norm": "查询的归一化",
    "reader": "读入端",
    "readout": "读出层",
    "readout_norm": "读出层的归一化",
    "score": "打分层",
    "scores and values": "分数与加权值",
    "segments": "片段嵌入",
    "target_embedding": "目标词嵌入",
    "up": "上投影",
    "value": "值投影",
    "writer": "写出端",
}
"""The modules of headwise's layers; others are called as they are."""


def translated_part(name: str) -> str:
    """A part's name in 中文; a number behind it stays.

    >>> translated_part("attention"), translated_part("layers.3")
    ('注意力', '层.3')
    """
    plain, number = re.fullmatch(r"(.*?)([. ]\d+)?", name).groups()  # type: ignore[union-attr]
    return PARTS.get(plain, plain) + (number or "")
