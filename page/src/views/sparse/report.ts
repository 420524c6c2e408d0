/** The report of headwise sparse, and its charts. */

import { around, type Axis } from '../../charts/axis';
import type { Colour, Line, Mark } from '../../charts/marks';

export interface Point {
  budget: number;
  loss: number;
  increase: number;
}

export interface HeadNeeds {
  layer: number;
  name: string;
  head: number;
  needed_mean: number;
  needed_max: number;
  kept: Record<string, number>;
}

export interface LayerNeeds {
  layer: number;
  name: string;
  points: Point[];
  /** Keys; null for all of them. */
  suggested: number | null;
}

export interface SparseReport {
  model: string;
  tokens: number;
  scored: number;
  block: number;
  share: number;
  loss: number;
  methods: Record<string, Point[]>;
  heads: HeadNeeds[];
  layers: LayerNeeds[];
  allowed: number;
  suggestion: Point;
  /** The suggestion as the argument of hw.sparsify; empty if every layer keeps all keys. */
  policies: string;
}

export function budgetsOf(points: readonly Point[][]): number[] {
  return [...new Set(points.flat().map((point) => point.budget))].sort((a, b) => a - b);
}

/** A line of the increase over the budget. */
export function line(name: string, colour: Colour, points: readonly Point[]): Line {
  const drawn = points.map((point): [number, number] => [point.budget, point.increase]);
  return { kind: 'line', name, colour, points: drawn, dots: true };
}

/** Axes around some lines; the budgets are doublings. */
export function axes(marks: readonly Mark[], x: string, y: string): { x: Axis; y: Axis } {
  const points = marks.flatMap((mark) => (mark.kind === 'line' ? mark.points : []));
  const across = points.map(([budget]) => budget);
  const [low, high] = [Math.min(...across), Math.max(...across)];
  return {
    x: { label: x, low, high: high > low ? high : 2 * low, log: 2, format: String },
    y: around(
      points.map(([, increase]) => increase),
      y,
      true,
    ),
  };
}

/** +0.138, −0.002. */
export function signed(value: number, digits = 3): string {
  const text = Math.abs(value).toFixed(digits);
  return `${value < 0 && Number(text) ? '−' : '+'}${text}`;
}
