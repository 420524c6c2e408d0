import { dictionary } from '../lib/language.svelte';

const en = {
  name: 'By hand',
  about:
    'Three tokens of two numbers each. Every token asks a question (its query), offers a label under which it can be found (its key) and carries something to hand over (its value). Change any number of X or of a matrix: the scores, the weights and the output follow.',
  scaled: 'divide by √d (d = 2)',
  causal: 'no token sees later ones',
  start: 'Back to the start',
  tokens: 'the tokens',
  learnt: 'learnt',
  queries: 'queries',
  keys: 'keys',
  values: 'values',
  logits: 'scores',
  weights: 'weights: each row sums to 1',
  output: 'output',
  outputs: 'means of the rows of V',
  rowTitle: (row: number) => `Token ${row}, step by step`,
  choose: 'Click a row to follow another token.',
  query: (row: number) => `Row ${row} of X, multiplied by W_q, is its query:`,
  meets: 'The query meets every key:',
  hiddenKeys: '; later keys are hidden',
  divided: 'Divided by √2:',
  softmaxed: 'Softmax makes of them positive weights that sum to 1:',
  averaged: 'The output is the mean of the values under these weights:',
  code: '# the same in PyTorch',
  entry: (matrix: string, row: number, column: number) => `${matrix}, row ${row}, column ${column}`,
};

const zh: typeof en = {
  name: '动手算',
  about:
    '三个词元，每个两个数。每个词元提出一个问题（它的查询），给出一个供别人查找的标签（它的键），并带着要交出的内容（它的值）。改动 X 或任一矩阵中的数，分数、权重和输出随之改变。',
  scaled: '除以 √d（d = 2）',
  causal: '词元看不到后面的词元',
  start: '回到开始',
  tokens: '词元',
  learnt: '学得的',
  queries: '查询',
  keys: '键',
  values: '值',
  logits: '分数',
  weights: '权重：每行之和为 1',
  output: '输出',
  outputs: 'V 各行的加权平均',
  rowTitle: (row) => `词元 ${row}，一步一步`,
  choose: '点击一行可查看另一个词元。',
  query: (row) => `X 的第 ${row} 行乘以 W_q，就是它的查询：`,
  meets: '查询与每个键相乘：',
  hiddenKeys: '；后面的键被隐藏',
  divided: '除以 √2：',
  softmaxed: 'softmax 把它们变成和为 1 的正权重：',
  averaged: '输出是各个值按这些权重的平均：',
  code: '# 用 PyTorch 写同样的计算',
  entry: (matrix, row, column) => `${matrix}，第 ${row} 行第 ${column} 列`,
};

export const words = dictionary(en, zh);
