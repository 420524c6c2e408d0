/** The results of the experiments: the dataclasses of headwise/apps/lab/experiments. */

import type { Setting } from '../../lib/settings';

export const EXPERIMENTS = ['scale', 'heads', 'scores', 'sharing'] as const;
export type ExperimentId = (typeof EXPERIMENTS)[number];

export interface Answer<Found> {
  settings: Record<string, Setting>;
  found: Found;
}

/** A figure over rows: its median, and what nine rows in ten lie above and below. */
export interface Spread {
  low: number;
  median: number;
  high: number;
}

export const SCALINGS = ['root', 'none', 'width'] as const;
export type Scaling = (typeof SCALINGS)[number];

export interface ScaleFound {
  rows: number;
  logit_mean: number;
  logit_variance: number;
  theory_variance: number;
  edges: number[];
  density: number[];
  ranks: number[];
  weights: number[];
  top_weight: number;
  entropy: number;
  entropy_limit: number;
  jacobian: Spread;
  query_gradient: Spread;
  curves: Record<Scaling, { d: number; entropy: number; jacobian: Spread }[]>;
}

export interface HeadsFound {
  layers: {
    heads: number;
    head_width: number;
    parameters: number;
    flops: number;
    full_width_parameters: number;
    maps: number;
  }[];
  singular_values: number[];
  rank: number;
  unread: number[];
}

export interface Cost {
  nanoseconds: number;
  flops: number;
  textbook_bytes: number;
  fused_bytes: number;
}

export const SCORES = ['scaled', 'unscaled', 'additive', 'additive_unscaled'] as const;

export interface ScoresFound {
  dot: Cost;
  additive: Cost;
  ratio: number;
  sweep_keys: number;
  curves: Record<(typeof SCORES)[number], { d: number; deviation: number; top_weight: number }[]>;
}

export const KINDS = ['separate', 'shared'] as const;
export type Kind = (typeof KINDS)[number];

export interface SharingHead {
  logits: number[][];
  weights: number[][];
  asymmetry: number;
  map_asymmetry: number;
  self_mass: number;
  diagonal_wins: number;
  received: number[];
}

export interface SharingFound {
  parameters: Record<Kind, number>;
  heads: Record<Kind, SharingHead>;
  lengths: number[];
  curves: Record<Kind, number[]>;
  spreads: number[];
}
