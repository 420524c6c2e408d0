import { dictionary } from '../lib/language.svelte';

/** How to read a map, for the tour and the help. */
const en = {
  title: 'How to read a map',
  axes: 'Each row is a token that looks (the query), each column a token that is looked at (the key). The darker a cell, the more of its row’s weight it holds; a row sums to 1. A language model looks back only, so the upper right stays empty.',
  patterns: {
    previous: { title: 'Previous token', meaning: 'a line just below the diagonal' },
    local: { title: 'Local', meaning: 'a band along the diagonal' },
    induction: { title: 'Induction', meaning: 'stripes, where the text repeats itself' },
    sink: { title: 'Sink', meaning: 'the first column' },
    uniform: { title: 'Uniform', meaning: 'no pattern, fading downwards' },
  },
  examples: 'Three heads to start with',
  again: 'Take the tour',
};

const zh: typeof en = {
  title: '怎样读一幅注意力图',
  axes: '每一行是一个在看的词元（查询），每一列是一个被看的词元（键）。格子越深，这一行放在那里的权重越多；每行之和为 1。语言模型只往回看，所以右上方是空的。',
  patterns: {
    previous: { title: '前一词元', meaning: '紧贴对角线下方的一条线' },
    local: { title: '局部', meaning: '沿对角线的一条带' },
    induction: { title: '归纳', meaning: '文本重复之处的斜纹' },
    sink: { title: '注意力汇（sink）', meaning: '第一列' },
    uniform: { title: '均匀', meaning: '没有花纹，往下渐淡' },
  },
  examples: '先看这三个头',
  again: '看一遍导览',
};

export const words = dictionary(en, zh);
