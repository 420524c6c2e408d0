/** The table beside each experiment's pictures: its numbers, named in the language of the page. */

import { written } from '../../lib/language.svelte';
import { words } from '../../locales/why';
import type { Whole } from '../../lib/settings';
import type {
  Answer,
  ExperimentId,
  HeadsFound,
  ScaleFound,
  ScoresFound,
  SharingFound,
} from './answers';

export interface Figure {
  id: string;
  name: string;
  value: string;
  beside?: string;
}

export interface FigureTable {
  columns: [string, string];
  rows: Figure[];
}

/** An answer and which experiment it is of. */
export interface Given {
  experiment: ExperimentId;
  answer: Answer<unknown>;
}

export function figures({ experiment, answer }: Given): FigureTable {
  const settings = answer.settings as Record<string, Whole>;
  if (experiment === 'scale') return scale(answer.found as ScaleFound);
  if (experiment === 'heads') return heads(answer.found as HeadsFound, settings);
  if (experiment === 'scores') return scores(answer.found as ScoresFound);
  return sharing(answer.found as SharingFound);
}

function scale(found: ScaleFound): FigureTable {
  const w = words();
  const { low, high } = found.jacobian;
  return {
    columns: [w.measured, w.theory],
    rows: [
      {
        id: 'variance',
        name: w.scale.variance,
        value: written(found.logit_variance),
        beside: written(found.theory_variance),
      },
      { id: 'mean', name: w.scale.mean, value: written(found.logit_mean, 2), beside: '0' },
      { id: 'top', name: w.scale.top, value: written(found.top_weight) },
      {
        id: 'entropy',
        name: w.scale.share,
        value: written(found.entropy),
        beside: `≤ ${written(found.entropy_limit)}`,
      },
      { id: 'jacobian', name: w.scale.jacobian, value: written(found.jacobian.median) },
      { id: 'band', name: w.scale.spread, value: `${written(low, 2)} – ${written(high, 2)}` },
      { id: 'query', name: w.scale.query, value: written(found.query_gradient.median) },
    ],
  };
}

function heads(found: HeadsFound, settings: Record<string, Whole>): FigureTable {
  const w = words();
  const index = found.layers.findIndex((layer) => layer.heads === settings.heads!.value);
  const layer = found.layers[index]!;
  const places = settings.places!.value;
  const lost = `${Math.round(100 * found.unread[index]!)} %`;
  return {
    columns: [w.measured, w.theory],
    rows: [
      {
        id: 'parameters',
        name: w.heads.perHead,
        value: written(layer.parameters),
        beside: '4d² + 4d',
      },
      { id: 'full', name: w.heads.fullWidth, value: written(layer.full_width_parameters) },
      { id: 'flops', name: w.heads.operations, value: written(layer.flops) },
      { id: 'maps', name: w.heads.mapsFigure, value: written(layer.maps), beside: 'h·n²' },
      { id: 'width', name: w.heads.headWidth, value: written(layer.head_width), beside: 'd/h' },
      { id: 'rank', name: w.heads.rankFigure, value: written(found.rank), beside: '≤ d/h' },
      {
        id: 'lost',
        name: w.heads.lostFigure(written(places)),
        value: lost,
        beside: 'max(0, 1 − h/m)',
      },
    ],
  };
}

function scores(found: ScoresFound): FigureTable {
  const w = words();
  return {
    columns: [w.measured, ''],
    rows: [
      { id: 'ratio', name: w.scores.ratio, value: w.scores.times(written(found.ratio, 2)) },
      {
        id: 'dot-flops',
        name: w.scores.flops(w.scores.dot),
        value: written(found.dot.flops),
      },
      {
        id: 'additive-flops',
        name: w.scores.flops(w.scores.additive),
        value: written(found.additive.flops),
      },
    ],
  };
}

function sharing(found: SharingFound): FigureTable {
  const w = words();
  const both = (id: string, name: string, read: (kind: 'separate' | 'shared') => string) => ({
    id,
    name,
    value: read('separate'),
    beside: read('shared'),
  });
  const percent = (share: number) => `${Math.round(100 * share)} %`;
  return {
    columns: w.sharing.columns,
    rows: [
      both('asymmetry', w.sharing.asymmetry, (kind) => written(found.heads[kind].asymmetry, 2)),
      both('maps', w.sharing.mapAsymmetry, (kind) => written(found.heads[kind].map_asymmetry, 2)),
      both('self', w.sharing.self, (kind) => written(found.heads[kind].self_mass)),
      both('largest', w.sharing.largest, (kind) => percent(found.heads[kind].diagonal_wins)),
      both('parameters', w.sharing.parameters, (kind) => written(found.parameters[kind])),
    ],
  };
}
