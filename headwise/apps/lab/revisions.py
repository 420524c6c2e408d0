"""Verdicts that were recorded and no longer stand, each with the reason of the change."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.apps.lab.claim import Revision, both

REVIEWED = "2026-11-18"
"""The day on which a statistical review of the lab was answered."""

REVISIONS: Mapping[str, tuple[Revision, ...]] = {
    id: (Revision(REVIEWED, verdict, both(english, chinese)),)
    for id, verdict, english, chinese in (
        (
            "rivals-long-range",
            "holds",
            "attention had no positions, so that it could not decay; the LSTM failed by its "
            "initial forget gate",
            "注意力没有位置，本就不可能衰减；LSTM 失败是因为遗忘门的初值",
        ),
        (
            "qk-gradient",
            "does not hold",
            "most of it was measured after the task was solved; before that the sign is the "
            "opposite, and the decoupling was not measured",
            "大部分数据取自任务解决之后；解决之前符号相反，且没有测量解耦",
        ),
        (
            "scale-training",
            "holds",
            "one of three assertions was judged, at one rate and one initialisation, from two "
            "unscaled runs",
            "三个断言只判了一个，只用一种学习率与初始化，不缩放的训练只有两次",
        ),
        (
            "heads-quality",
            "holds",
            "“1–2 %” may mean percent or points; noise let 3.3 % pass",
            "“1–2%”可以指百分比或分数点；3.3% 因误差大而被放过",
        ),
        (
            "paper-heads",
            "wrong",
            "“1–2 %” may mean points, and 0.9 points is about 1",
            "“1–2%”可以指分数点，0.9 约为 1",
        ),
        (
            "qk-shared-quality",
            "holds when",
            "“1–2 %” may mean points; a twin of the same size was missing",
            "“1–2%”可以指分数点；缺少参数量相同的对照",
        ),
        (
            "paper-shared-qk",
            "wrong",
            "the notes speak of ablations and never of the paper of 2017",
            "笔记只说“消融实验”，从未提 2017 年的论文",
        ),
        (
            "heads-robust",
            "holds when",
            "the opposite of the half on overfitting was significant and went unsaid; the other "
            "half is nearly true by construction",
            "过拟合那一半的反面是显著的，却没有说；另一半几乎必然成立",
        ),
        (
            "heads-blur",
            "holds",
            "it is an identity; the trained translators show no difference",
            "这是恒等式；训练好的翻译模型看不出差别",
        ),
        (
            "heads-diversity",
            "holds",
            "one text; syntax was left out of the sentence and tested nowhere",
            "只有一篇文本；句子里删去了句法，也没有检验",
        ),
        (
            "dot-quality",
            "holds",
            "two additive runs at one rate, and an interval that pooled the scatter of all rows",
            "加性只有两次训练、一种学习率，且区间混用了所有行的离散程度",
        ),
        (
            "dot-overfit",
            "does not hold",
            "every run on the relation ended at 100 %: a ceiling shows nothing",
            "关系任务的每次训练都到 100%：触顶时什么也看不出",
        ),
        (
            "qkv-content",
            "holds",
            "it lacked its condition: fixed weights translate nearly as well",
            "缺少条件：固定权重的翻译几乎一样好",
        ),
        (
            "qkv-length",
            "holds",
            "it tested an error message of ours: a larger table serves other lengths",
            "检验的只是我们自己的报错；更大的权重表可以处理其他长度",
        ),
        (
            "qkv-compute",
            "does not hold",
            "the note compares with a dense layer over the sequence, which had not been counted",
            "笔记比较的是整个序列上的全连接层，此前没有计算",
        ),
        (
            "scale-exploding",
            "holds when",
            "the condition contradicted the figures: pre-norm at gain 0.5 grows 22-fold only",
            "条件与数据矛盾：pre-norm 在增益 0.5 时只增大 22 倍",
        ),
        (
            "heads-compute",
            "holds when",
            "the condition is that n is far larger than d_model, not that there is one head",
            "条件应是 n 远大于 d_model，而不是只有一个头",
        ),
        (
            "scale-magnitude",
            "does not hold",
            "“can reach” is a bound, and 512 is what parallel vectors of such lengths reach",
            "“可能会达到”是上界；这样长度的同向向量正好达到 512",
        ),
    )
}
"""By claim, the earliest first."""
