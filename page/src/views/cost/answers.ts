/** What the server answers to the form: headwise/apps/look/serving/cost_answers.py in TypeScript. */

import type { Setting } from '../../lib/settings';

export const KINDS = ['pairs', 'projections', 'feed_forward', 'other'] as const;

/** Figures of one use of a model; null where one does not apply. */
export interface Figures {
  params: number;
  weights: number;
  kv_cache: number | null;
  kv_cache_per_token: number | null;
  activations: number | null;
  memory: number;
  flops: number;
  flops_dense: number;
  flops_executed: number;
  special: number;
  bytes_moved: number;
  intensity: number;
  seconds: number;
  tokens_per_second: number;
  utilisation: number;
}

export interface Point extends Figures {
  length: number;
  /** The share of the FLOPs of each kind of part. */
  shares: Record<(typeof KINDS)[number], number>;
}

export interface Part {
  path: string;
  params: number;
  flops: number;
  kept: number;
}

export interface CostAnswer {
  settings: Record<string, Setting>;
  /** A model is open, and its cost can be asked for. */
  opened: boolean;
  found: {
    figures: Figures;
    parts: Part[];
    /** Empty of a model that always has as many tokens of its own. */
    curve: Point[];
    device: { name: string; memory: number };
    /** The most tokens that fit into the device; null if the model alone does not. */
    longest: number | null;
    /** The most tokens that the model has positions for, or states; null if any number. */
    positions: number | null;
    explanation: { en: string; zh: string };
  };
}
