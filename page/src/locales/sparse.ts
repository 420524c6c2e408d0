import { dictionary } from '../lib/language.svelte';

type Words = Record<string, string>;

const en = {
  page: 'Sparse',
  keys: [] as [string, string][],
  loading: 'Reading the report',
  broken: 'The report could not be shown',
  read: (tokens: string, loss: string, scored: string) =>
    `${tokens} tokens; the loss of the last ${scored} is ${loss} nats per token with all keys`,
  losses: 'Loss above the whole model’s, by method',
  layerLosses: 'Loss when one layer alone keeps its top k',
  keysPerRow: 'keys kept per row',
  increase: 'nats per token more',
  allowed: 'allowed',
  numbers: 'The numbers',
  method: 'method',
  keeps: 'what a row keeps',
  methods: {
    'top-k': 'top-k',
    'blocks, exact': 'blocks, exact',
    'blocks, max': 'blocks, max',
    'blocks, mean': 'blocks, mean',
    'window + sinks': 'window + sinks',
    eviction: 'eviction',
  } as Words,
  about: {
    'top-k': 'the k largest logits: an oracle that scores every key',
    'blocks, exact': 'the blocks with the largest weight: an oracle too',
    'blocks, max': 'blocks by the upper bound of their logits, as in Quest',
    'blocks, mean': 'blocks by their mean key, as in MoBA and NSA',
    'window + sinks': 'the last keys and the first 4, as in StreamingLLM',
    eviction: 'prompt keys by the attention of its last rows, as in SnapKV; newer keys stay',
  } as Words,
  heads: (share: string) => `Keys that a row needs for ${share} of its weight`,
  headsHint: 'The mean over the rows of the second half; the stronger the colour, the more keys.',
  head: (name: string, mean: string, most: string) => `${name}: mean ${mean}, most ${most}`,
  kept: (keys: string, weight: string) => `${keys} keys hold ${weight}`,
  layers: 'Suggested budget per layer',
  layer: 'layer',
  layerNamed: (number: number) => `layer ${number}`,
  suggested: 'keys',
  costs: 'alone',
  all: 'all',
  together: (allowed: string, mean: string, tokens: string, increase: string) =>
    `For at most ${allowed} nats per token: a mean of ${mean} of ${tokens} keys. All layers together were measured: ${increase}.`,
  nothing: 'No layer can lose keys for that little: every layer keeps all of them.',
  inPython: 'In Python',
  honest:
    'This simulates sparse attention: it says what would be lost, and is not faster. Small models and short texts are kinder to few keys than large models and long ones.',
};

const zh: typeof en = {
  page: '稀疏',
  keys: [],
  loading: '正在读取报告',
  broken: '无法显示报告',
  read: (tokens, loss, scored) =>
    `${tokens} 个词元；保留全部键时，最后 ${scored} 个词元的损失为每词元 ${loss} nat`,
  losses: '比完整模型多出的损失，按方法',
  layerLosses: '只有一层只留 top-k时多出的损失',
  keysPerRow: '每行保留的键数',
  increase: '每词元多出的 nat',
  allowed: '允许的损失',
  numbers: '数值',
  method: '方法',
  keeps: '一行保留哪些键',
  methods: {
    'top-k': '前 k 个',
    'blocks, exact': '块，精确',
    'blocks, max': '块，上界',
    'blocks, mean': '块，均值',
    'window + sinks': '窗口 + 注意力汇',
    eviction: '淘汰',
  },
  about: {
    'top-k': 'logit 最大的 k 个：先知，要给每个键打分',
    'blocks, exact': '权重最大的块：也是先知',
    'blocks, max': '按 logit 上界选块，如 Quest',
    'blocks, mean': '按块内键的均值选块，如 MoBA 和 NSA',
    'window + sinks': '最近的键和开头 4 个，如 StreamingLLM',
    eviction: '按提示末尾几行的注意力留下提示中的键，如 SnapKV；之后的键都保留',
  },
  heads: (share) => `一行要有 ${share} 的权重需要多少个键`,
  headsHint: '后一半各行的均值；颜色越浓，需要的键越多。',
  head: (name, mean, most) => `${name}：平均 ${mean}，最多 ${most}`,
  kept: (keys, weight) => `${keys} 个键占 ${weight}`,
  layers: '建议的每层预算',
  layer: '层',
  layerNamed: (number) => `第 ${number} 层`,
  suggested: '键数',
  costs: '单独',
  all: '全部',
  together: (allowed, mean, tokens, increase) =>
    `每词元损失至多增加 ${allowed} nat时：平均保留 ${tokens} 个键中的 ${mean} 个。所有层一起实测：${increase}。`,
  nothing: '损失限制这么小时，没有哪一层能少看键：每层都保留全部。',
  inPython: '在 Python 中',
  honest:
    '这里模拟稀疏注意力：它只说明会损失多少，并不更快。小模型和短文本比大模型和长文本更经得起只留少数键。',
};

export const words = dictionary(en, zh);
