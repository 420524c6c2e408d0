import { dictionary } from '../lib/language.svelte';

const en = {
  side: 'Spans',
  hint: 'How much weight falls on a range of keys, such as a name or a sentence. Click a row of the map to ask about that row.',
  hintImage:
    'How much weight falls on a part of the image: drag over it. Click a row of the map to ask about that row.',
  from: 'Keys from',
  to: 'to',
  chosenKey: 'the chosen key',
  seek: 'words of the text',
  find: 'Find',
  missing: 'not in the text',
  own: ['On average, a row of this head puts', ' of its weight there; ', '.'],
  ofRow: (number: string, token: string) => `row ${number} “${token}” puts`,
  most: 'Heads that put the most on it',
  hideTitle: 'Does it matter?',
  hide: (head: string) => `Hide these keys from head ${head}`,
  hiding: 'running the model…',
  predicted: {
    next: (row: string, token: string) => `The token after row ${row} “${token}”:`,
    same: (row: string, token: string) => `The token in place of row ${row} “${token}”:`,
    class: () => 'The class of the image:',
  } as Record<'next' | 'same' | 'class', (row: string, token: string) => string>,
  moved: (share: string) => `${share} of the probability has moved.`,
  outcome: 'prediction',
  seen: 'with them',
  unseen: 'without',
  class: (name: string) => `class ${name}`,
  patches: (count: number) => `${count} patches are in the span`,
};

const zh: typeof en = {
  side: '区段',
  hint: '一段键得到多少权重，例如一个名字或一句话。点图中的一行，看这一行的情况。',
  hintImage: '图像的一部分得到多少权重：在图像上拖动来选。点注意力图中的一行，看这一行的情况。',
  from: '键从',
  to: '到',
  chosenKey: '所选的键',
  seek: '文本中的词语',
  find: '查找',
  missing: '文本中没有',
  own: ['这个头平均每行把', ' 的权重放在上面；', '。'],
  ofRow: (number, token) => `第 ${number} 行“${token}”放`,
  most: '放得最多的头',
  hideTitle: '它重要吗？',
  hide: (head) => `让头 ${head} 看不到这些键`,
  hiding: '正在运行模型…',
  predicted: {
    next: (row, token) => `第 ${row} 行“${token}”之后的词元：`,
    same: (row, token) => `第 ${row} 行“${token}”处的词元：`,
    class: () => '图像的类别：',
  },
  moved: (share) => `${share} 的概率发生了转移。`,
  outcome: '预测',
  seen: '看得到',
  unseen: '看不到',
  class: (name) => `类别 ${name}`,
  patches: (count) => `区段中有 ${count} 个图块`,
};

export const words = dictionary(en, zh);
