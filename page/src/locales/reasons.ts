import { dictionary } from '../lib/language.svelte';

const en = {
  page: 'Reasons',
  keys: [
    ['← →', 'the prediction at the token before, or after'],
    ['Esc', 'show all hidden edges and heads again'],
  ] as [string, string][],
  choose: 'Choose a token: the prediction made there is explained.',
  tokens: 'Tokens',
  after: (token: string) => `After ${token} the model predicts`,
  inPlace: (token: string) => `In the place of ${token} the model predicts`,
  ofImage: 'The model sees',
  ahead: (answer: string, share: string, second: string, lead: string) =>
    `${answer} (${share}), a logit ${lead} above the second answer, ${second}`,
  how: 'An edge is drawn from the token that is looked at, above, to the one that looks, below; its width says how much of that lead would go without it, to first order from one backward pass.',
  supports: 'supports the prediction',
  opposes: 'speaks against it',
  flow: 'Edges behind the prediction: layers down, tokens across',
  layer: 'layer',
  edges: 'Edges that matter most',
  edge: (head: string, query: string, key: string) => `${head}: ${query} looks at ${key}`,
  weight: 'weight',
  support: 'support',
  byWeight: 'The head by weight',
  bySupport: 'The head by support',
  pooled: 'zero is blank; a cell shows its largest',
  hide: 'Hide this edge',
  show: 'Show it again',
  showAll: 'Show all again',
  open: 'Open the head',
  hiding: 'The model runs without it…',
  hidden: (edges: number, heads: number) => {
    const counted = (count: number, what: string) => `${count} ${what}${count === 1 ? '' : 's'}`;
    const parts = [edges ? counted(edges, 'edge') : '', heads ? counted(heads, 'head') : ''];
    return `Without ${parts.filter(Boolean).join(' and ')}`;
  },
  heads: 'Heads that matter most',
  headsHow: 'What the lead owes to all of a head’s output. Choose a head to switch it off.',
  off: 'switched off',
  before: 'before',
  afterwards: 'after',
  given: 'What was differentiated: the edges behind it',
  recorded: 'a recording has no model to run again; hw.knock_out hides edges',
  inFile: 'run headwise look to hide this one: a file holds only some answers',
  notInFile: 'This prediction is not in the file',
  notInFileHint: 'Choose one of those that are, or run headwise look.',
  loading: 'The model runs forward and backward',
  problem: 'This could not be explained',
  source: 'source',
  target: 'target',
};

const zh: typeof en = {
  page: '依据',
  keys: [
    ['← →', '前一个或后一个词元处的预测'],
    ['Esc', '恢复所有隐藏的边和头'],
  ],
  choose: '选择一个词元：解释模型在那里作出的预测。',
  tokens: '词元',
  after: (token) => `在 ${token} 之后，模型预测`,
  inPlace: (token) => `在 ${token} 的位置，模型预测`,
  ofImage: '模型看到的是',
  ahead: (answer, share, second, lead) =>
    `${answer}（${share}），logit 比第二个答案 ${second} 高 ${lead}`,
  how: '每条边从上方被看的词元画到下方看它的词元；线宽表示没有它时领先量会失去多少（由一次反向传播得到的一阶近似）。',
  supports: '支持这个预测',
  opposes: '反对这个预测',
  flow: '预测背后的边：自上而下是层，从左到右是词元',
  layer: '层',
  edges: '最重要的边',
  edge: (head, query, key) => `${head}：${query} 看 ${key}`,
  weight: '权重',
  support: '支持',
  byWeight: '按权重看这个头',
  bySupport: '按支持看这个头',
  pooled: '零为空白；每格取最大者',
  hide: '隐藏这条边',
  show: '恢复这条边',
  showAll: '全部恢复',
  open: '打开这个头',
  hiding: '模型正在不用它运行…',
  hidden: (edges, heads) => {
    const parts = [edges ? `${edges} 条边` : '', heads ? `${heads} 个头` : ''];
    return `没有这 ${parts.filter(Boolean).join('和 ')} 时`;
  },
  heads: '最重要的头',
  headsHow: '领先量有多少来自一个头的全部输出。点击一个头可以关掉它。',
  off: '已关闭',
  before: '之前',
  afterwards: '之后',
  given: '所求导的量背后的边',
  recorded: '记录里没有可以重新运行的模型；hw.knock_out 可以隐藏边',
  inFile: '文件里只记录了一部分结果；要隐藏这一项请运行 headwise look',
  notInFile: '文件里没有这个预测',
  notInFileHint: '请选择文件里有的，或运行 headwise look。',
  loading: '模型正在前向和反向运行',
  problem: '无法解释',
  source: '源',
  target: '目标',
};

export const words = dictionary(en, zh);
