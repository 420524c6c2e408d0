import { dictionary } from '../lib/language.svelte';

const en = {
  page: 'Compare',
  uneven: (first: string, second: string) =>
    `The inputs have ${first} and ${second} tokens: entropy, effective keys, distance and lse grow with the length.`,
  relative: 'relative difference',
  relativeTitle: 'The difference divided by the sum of both sizes: −1 to 1',
  mode: 'What to compare',
  modes: { heads: 'two heads', inputs: 'all heads on two inputs' },
  problem: 'This could not be compared',
  input: 'Input',
  group: 'Attention',
  head: 'Head',
  headName: (name: string) => `Head ${name}`,
  open: 'Open',
  swap: 'Swap',
  figure: 'Figure',
  difference: 'Difference',
  differenceMap: 'First − second',
  more: 'more in the first',
  less: 'more in the second',
  shapes: 'The two maps have different shapes: their difference can’t be drawn.',
  pooled: (width: string) => `a cell is the mean of ${width} weights`,
  single: 'a cell is a single weight',
  statistic: 'Statistic',
  oneInput: 'One input is not enough',
  oneInputHint:
    'Let the model read a second text with “New text” above. Each head then becomes a point: its figure on one input against its figure on the other.',
  firstInput: 'First input',
  secondInput: 'Second input',
  scatter: (figure: string) => `${figure} of every head on both inputs`,
  changed: 'Changed most',
  keys: [
    ['X', 'swap the two'],
    ['M', 'two heads, or all heads on two inputs'],
  ] as [string, string][],
};

const zh: typeof en = {
  page: '对比',
  uneven: (first, second) =>
    `两段输入分别有 ${first} 和 ${second} 个词元：熵、有效键数、距离和 lse 都随长度增大。`,
  relative: '相对差',
  relativeTitle: '差除以两者大小之和：−1 到 1',
  mode: '对比什么',
  modes: { heads: '两个头', inputs: '全部头在两个输入上' },
  problem: '无法对比',
  input: '输入',
  group: '注意力',
  head: '头',
  headName: (name) => `头 ${name}`,
  open: '打开',
  swap: '交换',
  figure: '统计量',
  difference: '差',
  differenceMap: '前者减后者',
  more: '前者更多',
  less: '后者更多',
  shapes: '两幅图形状不同，无法画出差值。',
  pooled: (width) => `每格是 ${width} 个权重的平均`,
  single: '每格是单个权重',
  statistic: '统计量',
  oneInput: '只有一个输入还不够',
  oneInputHint:
    '点上方的“新文本”让模型读第二段文本：之后每个头是一个点，横纵轴是同一统计量在两个输入上的值。',
  firstInput: '第一个输入',
  secondInput: '第二个输入',
  scatter: (figure) => `全部头在两个输入上的${figure}`,
  changed: '变化最大',
  keys: [
    ['X', '交换两者'],
    ['M', '两个头，或全部头在两个输入上'],
  ],
};

export const words = dictionary(en, zh);
