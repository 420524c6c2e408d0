import { dictionary } from '../lib/language.svelte';

const en = {
  notices: 'Notices',
  pages: 'Pages',
  input: 'Input',
  inputOf: (name: string, tokens: string) => `${name} · ${tokens} tokens`,
  add: { text: 'New text', image: 'New image' },
  language: '中文',
  languageTitle: '换成中文',
  themes: { system: 'Theme: system', light: 'Theme: light', dark: 'Theme: dark' },
  help: 'Help and keyboard',
  close: 'Close',
  cancel: 'Cancel',
  read: 'Read it',
  addTitle: {
    text: 'Let the model read another text',
    image: 'Let the model read another image',
  },
  addPlaceholder: 'Type or paste a text, long or short: the map is computed tile by tile.',
  tryThese: 'Or try',
  exampleNames: {
    repeats: 'names that return',
    random: 'random words, three times',
    pronouns: 'what “it” means',
    list: 'a list',
  },
  examples: {
    repeats: 'Induction heads find what followed a name last time',
    random: 'The usual test for induction: words whose order can only be known from the text',
    pronouns: 'Does a head look back from “it” to what it stands for?',
    list: 'Heads that look at the same place in the list before',
  },
  addImage: 'A PNG or JPEG file',
  tokens: (count: string, most: string) => `${count} tokens, at most ${most}`,
  loading: 'Starting',
  stages: {
    'loading the model': 'Loading the model',
    'running the model': 'Running the model',
    'drawing the heads': 'Drawing the heads',
  } as Record<string, string>,
  broken: 'This could not be shown',
  stopped: 'The server has stopped.',
  stoppedHint: 'Start headwise look again, or reload this page: what is on screen still works.',
  kernelStopped: 'The notebook kernel does not answer.',
  kernelStoppedHint: 'Run the cell again once the kernel is back.',
  nothing: 'Nothing has been read yet',
  nothingHint: 'Let the model read a text with “New text” above.',
  unknownPage: 'There is no such page',
  unknownPageHint: 'The address names a page that does not exist.',
  goTo: (page: string) => `Go to ${page}`,
  absent: {
    input: (id: string) => `There is no input ${id}`,
    group: (id: string) => `There is no group ${id}`,
    head: (name: string) => `There is no head ${name}`,
  },
  absentHints: {
    input: 'It was never read, or it was dropped: only the newest inputs are kept. Available:',
    group: 'Available:',
    head: 'Available, by layer and number:',
  },
  recorded: (opens: number, whole: number, all: number) => {
    const some = opens < all ? `${opens} of ${all} heads open` : 'every head opens';
    const depth = `, ${whole < all ? `${whole} of them ` : ''}down to single weights`;
    const rest = opens < all ? ' The dimmed ones are thumbnails only.' : '';
    return `A recording: ${some}${whole ? depth : ''}.${rest}`;
  },
  parameters: (count: string) => `${count} parameters`,
  keysEverywhere: 'Keys that work everywhere',
  keysHere: 'Keys of this view',
  keys: [
    ['?', 'this help'],
    ['Shift L', '中文 and English'],
    ['Shift T', 'light, dark or system theme'],
    ['Esc', 'close the open window'],
  ] as [string, string][],
  about:
    'Every map is computed on demand from the queries, keys and row sums of the run. No matrix is stored, so a text of any length can be zoomed into, down to single weights.',
};

const zh: typeof en = {
  notices: '提示',
  pages: '页面',
  input: '输入',
  inputOf: (name, tokens) => `${name} · ${tokens} 个词元`,
  add: { text: '新文本', image: '新图片' },
  language: 'English',
  languageTitle: 'Switch to English',
  themes: { system: '主题：跟随系统', light: '主题：浅色', dark: '主题：深色' },
  help: '帮助与键盘',
  close: '关闭',
  cancel: '取消',
  read: '读入',
  addTitle: { text: '让模型读另一段文本', image: '让模型读另一张图片' },
  addPlaceholder: '输入或粘贴一段文本，长短皆可：注意力图按块即时计算。',
  tryThese: '或者试试',
  exampleNames: {
    repeats: '重复出现的人名',
    random: '随机单词，重复三遍',
    pronouns: '“it”指什么',
    list: '一份列表',
  },
  examples: {
    repeats: '归纳头会找到人名上次出现之后的内容',
    random: '归纳头的常用检验：单词的顺序只能从前文得知',
    pronouns: '有没有头从“it”看回它所指的东西？',
    list: '看向列表中对应位置的头',
  },
  addImage: 'PNG 或 JPEG 文件',
  tokens: (count, most) => `${count} 个词元，最多 ${most} 个`,
  loading: '正在启动',
  stages: {
    'loading the model': '正在加载模型',
    'running the model': '模型正在运行',
    'drawing the heads': '正在绘制各个头',
  },
  broken: '无法显示',
  stopped: '服务器已停止。',
  stoppedHint: '请重新运行 headwise look，或刷新此页；屏幕上已有的内容仍可查看。',
  kernelStopped: '笔记本内核没有响应。',
  kernelStoppedHint: '内核恢复后请重新运行该单元格。',
  nothing: '还没有读入任何内容',
  nothingHint: '点上方的“新文本”，让模型读一段文本。',
  unknownPage: '没有这个页面',
  unknownPageHint: '地址中的页面不存在。',
  goTo: (page) => `前往“${page}”`,
  absent: {
    input: (id) => `没有输入 ${id}`,
    group: (id) => `没有 ${id} 这一组`,
    head: (name) => `没有头 ${name}`,
  },
  absentHints: {
    input: '它从未读入，或已被移除：只保留最近的几个。现有：',
    group: '现有：',
    head: '现有的头（层.头）：',
  },
  recorded: (opens, whole, all) => {
    const some = opens < all ? `${all} 个头中有 ${opens} 个能打开` : '每个头都能打开';
    const depth = `，${whole < all ? `其中 ${whole} 个` : ''}可放大到单个权重`;
    const rest = opens < all ? '变淡的头只有缩略图。' : '';
    return `这是一份记录：${some}${whole ? depth : ''}。${rest}`;
  },
  parameters: (count) => `${count} 个参数`,
  keysEverywhere: '全局按键',
  keysHere: '当前页面的按键',
  keys: [
    ['?', '显示本帮助'],
    ['Shift L', '切换中文与英文'],
    ['Shift T', '浅色、深色、跟随系统'],
    ['Esc', '关闭打开的窗口'],
  ],
  about:
    '每一幅图都由本次运行的查询、键与各行的对数和即时算出，不存储任何矩阵，因此任意长度的文本都可以一直放大到单个权重。',
};

export const words = dictionary(en, zh);
