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
    "k": ("experts per token", "每词元专家数"),
    "r": ("latent width", "潜向量宽度"),
    "r′": ("latent width of queries", "查询的潜向量宽度"),
    "dₙ": ("entries of a head without positions", "每头无位置的维数"),
    "dᵣ": ("entries of a head with positions", "每头带位置的维数"),
    "y": ("rotated entries of a head", "每头旋转的维数"),
    "w": ("window", "窗口"),
    "n": ("tokens kept or made", "保留或产生的词元数"),
    "c": ("places of a convolution", "卷积核位置数"),
    "m": ("rows of a table", "表的行数"),
    "i": ("inputs", "输入宽度"),
    "o": ("outputs", "输出宽度"),
    "x": ("numbers of an input", "输入的数值个数"),
    "u": ("width of the values' source", "值来源的宽度"),
}
"""What each letter stands for, in English and 中文."""

PARTS = {
    "LSTM": "LSTM",
    "attention": "注意力",
    "attention and Mamba 2 layers": "注意力与 Mamba 2 层",
    "cell": "单元",
    "class token": "类别词元",
    "classifier": "分类层",
    "context": "上下文",
    "convolution": "卷积",
    "cross-attention": "交叉注意力",
    "decoder": "解码器",
    "dropout": "dropout",
    "embedding": "词嵌入",
    "encoder": "编码器",
    "feed-forward": "前馈层",
    "feed-forward layers": "前馈各层",
    "first cell": "初始细胞状态",
    "first convolution": "第一层卷积",
    "first hidden": "初始隐藏状态",
    "first layer": "第一层",
    "head": "输出层",
    "input of the layer": "本层输入",
    "inputs of layers": "各层输入",
    "joined streams": "汇合各路",
    "layer": "层",
    "layers": "层",
    "linear": "线性层",
    "linear attention layers": "线性注意力层",
    "recurrence": "循环层",
    "Mamba layers": "Mamba 层",
    "Mamba 2 layers": "Mamba 2 层",
    "low-rank path": "低秩旁路",
    "mixed streams": "混合各路",
    "narrowed output": "收窄的输出",
    "norm": "归一化",
    "norm of inputs": "输入归一化",
    "output": "输出投影",
    "patches": "图像块",
    "pooler": "汇聚层",
    "positions": "位置",
    "pre-classifier": "预分类层",
    "projected inputs of layers": "各层输入的投影",
    "projections": "投影",
    "reader": "读入端",
    "readout": "读出层",
    "score": "打分层",
    "scores and values": "分数与加权值",
    "second convolution": "第二层卷积",
    "segments": "片段嵌入",
    "streams": "多路",
    "transform": "变换层",
    "unused bias": "未使用的偏置",
    "widened embedding": "加宽的词嵌入",
    "writer": "写出端",
}
PATTERNS = (
    (r"layers with a window of (\d+)", r"窗口为 \1 的层"),
    (r"layers with chunks of (\d+)", r"分块为 \1 的层"),
    (r", shared keys", "，共用键值"),
    (r", (\d+) experts", r"，\1 个专家"),
    (r"layers", "层"),
)


def translated(name: str) -> str:
    """A part's name in 中文; a number behind it stays.

    >>> translated("layers with a window of 4096")
    '窗口为 4096 的层'
    """
    plain, number = re.fullmatch(r"(.*?)( \d+)?", name).groups()  # type: ignore[union-attr]
    if name in PARTS:
        return PARTS[name]
    if plain in PARTS:
        return PARTS[plain] + (number or "")
    for english, chinese in PATTERNS:
        name = re.sub(english, chinese, name)
    return name
