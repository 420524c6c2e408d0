import { dictionary } from '../lib/language.svelte';

const en = {
  label: 'The image, its patches coloured by attention',
  hint: {
    none: 'Click a patch, or drag over several: what they look at stays clear, the rest fades.',
    text: 'Choose a token of the text to see where on the picture it looks. Click a patch, or drag over several, to see which tokens look at them.',
    image:
      'Choose a token of the text to see which parts of the picture look at it. Click a patch, or drag over several, to see which tokens they look at.',
  } as Record<'none' | 'text' | 'image', string>,
  onPictures: (share: string, count: number) =>
    `${share} of the weight is on the ${count > 1 ? 'pictures' : 'picture'}.`,
  over: 'Heads',
  overs: { head: 'this one', layer: 'mean of its layer', all: 'mean of all' } as Record<
    'head' | 'layer' | 'all',
    string
  >,
  step: 'Step',
};

const zh: typeof en = {
  label: '图像，图块按注意力着色',
  hint: {
    none: '点击一个图块，或拖过几个：它们看向的部分保持清晰，其余变淡。',
    text: '选择文本中的一个词元，看它看向图像的哪里。点击一个图块，或拖过几个，看哪些词元看向它们。',
    image:
      '选择文本中的一个词元，看图像的哪些部分看向它。点击一个图块，或拖过几个，看它们看向哪些词元。',
  },
  onPictures: (share) => `${share} 的权重在图像上。`,
  over: '头',
  overs: { head: '这一个', layer: '本层平均', all: '全部平均' },
  step: '步',
};

export const words = dictionary(en, zh);
