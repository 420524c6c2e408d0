import { dictionary } from '../lib/language.svelte';

/** How to read a map, for the tour and the help. */
const en = {
  title: 'How to read a map',
  axes: (dark: boolean) =>
    `Each row is a token that looks (the query), each column a token that is looked at (the key). The ${dark ? 'brighter' : 'darker'} a cell, the more of its row’s weight it holds; a row sums to 1.`,
  sees: {
    past: ' A language model looks back only, so the upper right stays empty.',
    text: ' This model looks both ways, so the upper right is filled, too. Drawn here are heads that look back.',
    source:
      ' The rows are the tokens that were written, the columns those of the source. Drawn here are heads that look back at their own text.',
    image:
      ' The tokens are patches of the image, in reading order, after the class token. Drawn here are heads of language models.',
  },
  patterns: {
    previous: { title: 'Previous token', meaning: 'a line just below the diagonal' },
    local: { title: 'Local', meaning: 'a band along the diagonal' },
    induction: { title: 'Induction', meaning: 'stripes, where the text repeats itself' },
    sink: { title: 'Sink', meaning: 'the first column' },
    uniform: { title: 'Uniform', meaning: 'no pattern, fading downwards' },
  },
  examples: 'Heads to start with',
  again: 'Take the tour',
};

const zh: typeof en = {
  title: '怎样读一幅注意力图',
  axes: (dark) =>
    `每一行是一个在看的词元（查询），每一列是一个被看的词元（键）。格子越${dark ? '亮' : '深'}，这一行放在那里的权重越多；每行之和为 1。`,
  sees: {
    past: '语言模型只往回看，所以右上方是空的。',
    text: '这个模型前后都看，所以右上方也有权重。下面画的是往回看的头。',
    source: '行是写出的词元，列是原文的词元。下面画的是回看自身文本的头。',
    image: '词元是图像的图块，按阅读顺序排在类别词元之后。下面画的是语言模型的头。',
  },
  patterns: {
    previous: { title: '前一词元', meaning: '紧贴对角线下方的一条线' },
    local: { title: '局部', meaning: '沿对角线的一条带' },
    induction: { title: '归纳', meaning: '文本重复之处的斜纹' },
    sink: { title: '注意力汇（sink）', meaning: '第一列' },
    uniform: { title: '均匀', meaning: '没有花纹，往下渐淡' },
  },
  examples: '先看这些头',
  again: '看一遍导览',
};

export const words = dictionary(en, zh);
