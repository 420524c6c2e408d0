import { dictionary } from '../lib/language.svelte';

const en = {
  label: 'A short tour',
  step: (step: number, of: number) => `${step} of ${of}`,
  next: 'Next',
  back: 'Back',
  skip: 'Skip the tour',
  done: 'Done',
  headsTitle: (heads: number) => `${heads} attention heads, each with its own map`,
  heads: (model: string, what: string) =>
    `These are the heads of ${model} while it read the ${what} named above. A head decides, for every token, how much weight it gives to each token that it sees; its map shows these weights. A dot is the head’s type.`,
  text: 'text',
  image: 'image',
  factsTitle: 'Why a head is interesting',
  facts:
    'Point at a head, and this panel says in a sentence what it does, with its figures. Point at a figure for its definition. The chart above shows all heads by two figures: those far from the others are worth a click.',
  clickTitle: 'Where to click',
  click:
    'Click a map to open it; scroll or press + to zoom, down to single weights. Click a token beside the map to see what it looks at. “New text” lets the model read your own words. Press ? for this help. Start with one of these:',
  clickImage:
    'Click a map to open it; scroll or press + to zoom, down to single weights. Click a patch of the image to see what it looks at. “New image” lets the model read another one. Press ? for this help. Start with one of these:',
};

const zh: typeof en = {
  label: '简短导览',
  step: (step, of) => `${step} / ${of}`,
  next: '下一步',
  back: '上一步',
  skip: '跳过导览',
  done: '完成',
  headsTitle: (heads) => `${heads} 个注意力头，各有一幅图`,
  heads: (model, what) =>
    `这是 ${model} 读上方${what}时的各个头。一个头为每个词元决定：给它看到的每个词元多少权重；图上画的就是这些权重。圆点表示头的类型。`,
  text: '那段文本',
  image: '那幅图像',
  factsTitle: '一个头为什么值得看',
  facts:
    '指向一个头，这里用一句话说明它在做什么，并列出统计量。指向一个统计量可看它的定义。上方的图把所有头按两个统计量排开：离群的头值得点开。',
  clickTitle: '该点哪里',
  click:
    '点一幅图即可打开；滚动或按 + 放大，直到单个权重。点文本中的一个词元，看它看向谁。“新文本”让模型读你自己的文字。按 ? 可再看本帮助。先从这些头开始：',
  clickImage:
    '点一幅图即可打开；滚动或按 + 放大，直到单个权重。点图像的一个图块，看它看向谁。“新图片”让模型读另一幅图。按 ? 可再看本帮助。先从这些头开始：',
};

export const words = dictionary(en, zh);
