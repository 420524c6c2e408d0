import { dictionary } from '../lib/language.svelte';

const en = {
  side: 'Spans',
  hint: 'The weight on a range of keys, such as a name, a sentence or a part of the image.',
  from: 'Keys from',
  to: 'to',
  chosenKey: 'the chosen key',
  own: 'This head puts on it',
  ofRow: (number: string, token: string) => `on average; row ${number} ${token}`,
  most: 'Heads that put the most on it',
  hideTitle: 'Does it matter?',
  hide: (head: string) => `Hide these keys from head ${head}`,
  hiding: 'running the model…',
  after: (number: string, token: string) => `The token after ${number} ${token}:`,
  moved: (share: string) => `${share} of the probability has moved.`,
  outcome: 'prediction',
  seen: 'with them',
  unseen: 'without',
  class: (name: string) => `class ${name}`,
  image: 'The image that was read',
  patches: (count: number) => `${count} patches are in the span`,
};

const zh: typeof en = {
  side: '区段',
  hint: '落在一段键上的权重，例如一个名字、一句话或图像的一部分。',
  from: '键从',
  to: '到',
  chosenKey: '所选的键',
  own: '这个头放在其上的权重',
  ofRow: (number, token) => `（平均）；第 ${number} 行 ${token}`,
  most: '放得最多的头',
  hideTitle: '它重要吗？',
  hide: (head) => `让头 ${head} 看不到这些键`,
  hiding: '正在运行模型…',
  after: (number, token) => `第 ${number} 个词元 ${token} 之后：`,
  moved: (share) => `${share} 的概率发生了转移。`,
  outcome: '预测',
  seen: '看得到',
  unseen: '看不到',
  class: (name) => `类别 ${name}`,
  image: '读入的图像',
  patches: (count) => `区段中有 ${count} 个图块`,
};

export const words = dictionary(en, zh);
