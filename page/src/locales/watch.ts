import { dictionary } from '../lib/language.svelte';

type Training = { loss?: number; mfu?: number };

function training(word: string, { loss, mfu }: Training): string {
  const known = [
    loss && `${word} ${loss.toFixed(3)}`,
    mfu && `MFU ${(100 * mfu).toPrecision(3)} %`,
  ];
  return known.filter(Boolean).join(' · ');
}

const en = {
  keys: [
    ['P', 'play the run'],
    ['[ ]', 'one step back, one step forward'],
    ['← ↑ ↓ →', 'move between heads in the grid'],
    ['Enter', 'draw the head’s curve'],
  ] as [string, string][],
  waiting: 'No step has been recorded yet',
  waitingHint: 'The run appears here as soon as its first step is recorded.',
  broken: 'The run can’t be read',
  loading: 'Reading the run',
  training: (known: Training) => training('loss', known),
  written: (ago: string) => `last written ${ago} ago`,
  units: [
    (count: number) => `${count} d`,
    (count: number) => `${count} h`,
    (count: number) => `${count} min`,
    (count: number) => `${count} s`,
  ],
  ruleOf: (rule: string) => `${rule}: the rule and its source`,
  statistic: 'Figure',
  colours: 'Colours',
  ofRun: 'of the run',
  ofRunTitle: 'Colours span the whole run: compare steps',
  ofStep: 'of the step',
  ofStepTitle: 'Colours span this step: compare heads',
  grid: 'Heads: one row per layer, one column per head',
  gridHint: 'One row per layer, one column per head; the line in a cell is the head’s history.',
  step: 'Step',
  stepOf: (step: string) => `step ${step}`,
  every: (count: string) => `every ${count}th recorded step`,
  play: '▶ Play',
  pause: '❚❚ Pause',
  latest: 'Latest',
  curves: 'Over the steps',
  curvesHint: 'Choose heads in the grid to draw their curves.',
  all: 'mean of all heads',
  steps: 'step',
  alarms: 'Alarms',
  noAlarms: 'None so far.',
  older: (count: string) => `and ${count} older ones`,
  model: 'the model',
  head: (name: string) => `head ${name}`,
  rules: {
    'logit growth': 'Logit growth',
    'entropy collapse': 'Entropy collapse',
    'dead head': 'Dead head',
    'sink take-over': 'Sink take-over',
    'duplicated heads': 'Duplicated heads',
  } as Record<string, string>,
};

const zh: typeof en = {
  keys: [
    ['P', '播放训练过程'],
    ['[ ]', '后退一步，前进一步'],
    ['← ↑ ↓ →', '在网格中移动'],
    ['Enter', '画出该头的曲线'],
  ],
  waiting: '还没有记录任何一步',
  waitingHint: '记录第一步之后，这里会自动显示。',
  broken: '无法读取这次运行',
  loading: '正在读取',
  training: (known) => training('损失', known),
  written: (ago) => `${ago}前写入`,
  units: [
    (count) => `${count} 天`,
    (count) => `${count} 小时`,
    (count) => `${count} 分钟`,
    (count) => `${count} 秒`,
  ],
  ruleOf: (rule) => `${rule}：规则与出处`,
  statistic: '指标',
  colours: '颜色范围',
  ofRun: '全程',
  ofRunTitle: '颜色覆盖整个训练过程：便于比较各步',
  ofStep: '本步',
  ofStepTitle: '颜色只覆盖这一步：便于比较各头',
  grid: '注意力头：每行一层，每列一个头',
  gridHint: '每行一层，每列一个头；格内的线是该头的历史。',
  step: '步',
  stepOf: (step) => `第 ${step} 步`,
  every: (count) => `每 ${count} 个记录显示一个`,
  play: '▶ 播放',
  pause: '❚❚ 暂停',
  latest: '最新',
  curves: '随步数的变化',
  curvesHint: '在网格中选择头即可画出曲线。',
  all: '所有头的平均',
  steps: '步',
  alarms: '警报',
  noAlarms: '目前没有。',
  older: (count) => `以及更早的 ${count} 条`,
  model: '整个模型',
  head: (name) => `头 ${name}`,
  rules: {
    'logit growth': 'logit 过大',
    'entropy collapse': '熵坍缩',
    'dead head': '失效的头',
    'sink take-over': '注意力汇聚到首词元',
    'duplicated heads': '重复的头',
  },
};

export const words = dictionary(en, zh);
