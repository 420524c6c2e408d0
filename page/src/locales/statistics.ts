/** Names and meanings of statistics and head types, in both languages. */

import { speech } from '../lib/language.svelte';

interface Named {
  name: string;
  meaning: string;
}

const en: Record<string, Named> = {
  lse: { name: 'lse', meaning: 'log Σ exp of the logits' },
  max_logit: { name: 'largest logit', meaning: 'the largest value that enters the softmax' },
  top_prob: { name: 'largest weight', meaning: 'the largest weight of a row' },
  entropy: { name: 'entropy', meaning: '−Σ p log p, in nats: 0 looks at one key only' },
  entropy_share: {
    name: 'entropy, share of its maximum',
    meaning: 'entropy divided by that of even weights: 1 spreads evenly, whatever the length',
  },
  effective_keys: {
    name: 'effective keys',
    meaning: 'how many keys a row spreads over, e^entropy',
  },
  participation: {
    name: 'participation',
    meaning:
      'how many keys share the weight, (Σp)² / Σp²: large weights count more than in e^entropy',
  },
  logit_mean: { name: 'mean logit', meaning: 'over the visible keys' },
  logit_var: { name: 'logit variance', meaning: 'over the visible keys' },
  sink_mass: { name: 'first-token weight', meaning: 'the weight on the first token: a sink' },
  self_mass: { name: 'self weight', meaning: 'the weight on the token itself' },
  previous_mass: { name: 'previous-token weight', meaning: 'the weight on the token before' },
  distance: { name: 'distance', meaning: 'how many tokens back a row looks, on average' },
  patch_distance: {
    name: 'distance in patches',
    meaning:
      'how many patches away a row looks, on average; tokens that are no patches not counted',
  },
  output_norm: { name: 'output norm', meaning: 'the length of the head’s output vector' },
  induction: {
    name: 'induction',
    meaning: 'the weight on the token that followed the same token earlier',
  },
  local: { name: 'local weight', meaning: 'the weight on the tokens close by' },
};

const zh: Record<string, Named> = {
  lse: { name: 'lse', meaning: 'logit 的 log Σ exp' },
  max_logit: { name: '最大 logit', meaning: '进入 softmax 的最大值' },
  top_prob: { name: '最大权重', meaning: '一行中最大的权重' },
  entropy: { name: '熵', meaning: '−Σ p log p，单位为奈特；0 表示只看一个键' },
  entropy_share: {
    name: '熵（占最大值的份额）',
    meaning: '熵除以均匀权重的熵：1 表示完全均匀，与长度无关',
  },
  effective_keys: { name: '有效键数', meaning: '一行分散到多少个键上，e^熵' },
  participation: {
    name: '参与键数',
    meaning: '有多少个键分担权重，(Σp)² / Σp²；比 e^熵 更看重大的权重',
  },
  logit_mean: { name: 'logit 均值', meaning: '在可见键上取平均' },
  logit_var: { name: 'logit 方差', meaning: '在可见键上的方差' },
  sink_mass: { name: '首词元权重', meaning: '落在第一个词元上的权重，即注意力汇（sink）' },
  self_mass: { name: '自身权重', meaning: '落在词元自身上的权重' },
  previous_mass: { name: '前一词元权重', meaning: '落在前一个词元上的权重' },
  distance: { name: '距离', meaning: '平均往回看多少个词元' },
  patch_distance: {
    name: '距离（图块）',
    meaning: '平均看向多少个图块之外；不是图块的词元不计入',
  },
  output_norm: { name: '输出范数', meaning: '该头输出向量的长度' },
  induction: { name: '归纳', meaning: '落在同一词元上次出现之后那个词元上的权重' },
  local: { name: '局部权重', meaning: '落在附近词元上的权重' },
};

const reductions = {
  en: { mean: 'mean', max: 'max', min: 'min', lower: 'at least', upper: 'at most' },
  zh: { mean: '平均', max: '最大', min: '最小', lower: '下界', upper: '上界' },
};

/** A statistic by its name; one that this page does not know keeps the library's name. */
export function statistic(name: string): Named {
  const known = (speech.current === 'zh' ? zh : en)[name];
  return known ?? { name: name.replaceAll('_', ' '), meaning: '' };
}

/** A head's figure, such as entropy_mean: the statistic, and how the rows became one number. */
export function figure(name: string): Named {
  const parts = /^(.*)_(mean|max|min)(?:_(lower|upper)_bound)?$/.exec(name);
  if (!parts) return statistic(name);
  const [, base, reduction, bound] = parts;
  const words = reductions[speech.current];
  const said = statistic(base!);
  const usual = base === 'max_logit' ? 'max' : 'mean'; // the usual one is not named
  const how = [
    reduction === usual ? '' : words[reduction as 'mean' | 'max' | 'min'],
    bound ? words[bound as 'lower' | 'upper'] : '',
  ].filter(Boolean);
  if (!how.length) return said;
  const [before, between, after] = speech.current === 'zh' ? ['（', '，', '）'] : [', ', ', ', ''];
  return { ...said, name: `${said.name}${before}${how.join(between)}${after}` };
}

const typesInEnglish: Record<string, Named> = {
  dormant: { name: 'dormant', meaning: 'outputs almost nothing' },
  induction: {
    name: 'induction',
    meaning: 'looks at the token that followed the same token earlier',
  },
  'previous-token': { name: 'previous token', meaning: 'looks mostly at the token before' },
  self: { name: 'self', meaning: 'looks mostly at the token itself' },
  sink: { name: 'sink', meaning: 'puts most of its weight on the first token' },
  local: { name: 'local', meaning: 'looks mostly at tokens close by' },
  uniform: { name: 'uniform', meaning: 'spreads its weight over half of the keys or more' },
  content: { name: 'content', meaning: 'looks for something in the text' },
};

const typesInChinese: Record<string, Named> = {
  dormant: { name: '休眠', meaning: '几乎没有输出' },
  induction: { name: '归纳', meaning: '看同一词元上次出现之后的内容' },
  'previous-token': { name: '前一词元', meaning: '主要看前一个词元' },
  self: { name: '自身', meaning: '主要看词元自身' },
  sink: { name: '注意力汇（sink）', meaning: '把大部分权重放在第一个词元上' },
  local: { name: '局部', meaning: '主要看附近的词元' },
  uniform: { name: '均匀', meaning: '把权重分散到一半以上的键上' },
  content: { name: '内容', meaning: '在文本中寻找某些内容' },
};

/** The name of a type of heads. */
export function headType(type: string | null): string {
  if (type === null) return speech.current === 'zh' ? '未分类' : 'no type';
  return typeNamed(type)?.name ?? type;
}

/** The meaning of a type of heads. */
export function typeMeaning(type: string): string {
  return typeNamed(type)?.meaning ?? '';
}

function typeNamed(type: string): Named | undefined {
  return (speech.current === 'zh' ? typesInChinese : typesInEnglish)[type];
}
