/** The axes of a chart: from numbers to places, and the ticks with their labels. */

import { extent, nice, range, ticks as linear } from 'd3-array';
import { written } from '../lib/language.svelte';

export interface Axis {
  label: string;
  low: number;
  high: number;
  /** Logarithmic to this base; linear without. */
  log?: 2 | 10;
  format?: (value: number) => string;
}

/** The place of a value: 0 at the low end, 1 at the high one, and beyond them outside. */
export function place(axis: Axis, value: number): number {
  return axis.log
    ? Math.log(Math.max(value, Number.MIN_VALUE) / axis.low) / Math.log(axis.high / axis.low)
    : (value - axis.low) / (axis.high - axis.low || 1);
}

/** The value at a place from 0 to 1. */
export function valueAt(axis: Axis, share: number): number {
  return axis.log
    ? axis.low * (axis.high / axis.low) ** share
    : axis.low + share * (axis.high - axis.low);
}

/** About `count` round numbers between the ends. */
export function ticks({ low, high, log }: Axis, count: number): number[] {
  if (!log) {
    const found = linear(low, high, count);
    // A single number shows no scale.
    return found.length > 1 ? found : linear(low, high, 2 * count);
  }
  const powers = [Math.log(low), Math.log(high)].map((end) => end / Math.log(log));
  const [first, last] = [Math.ceil(powers[0]! - 1e-9), Math.floor(powers[1]! + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first) / count));
  return range(first, last + 1, every).map((power) => log ** power);
}

/** Ticks as texts that differ: as many digits as the step between them needs. */
export function tickLabels(axis: Axis, values: readonly number[]): string[] {
  const texts = values.map((value) => label(axis, value));
  if (axis.format || axis.log || new Set(texts).size === texts.length) return texts;
  const digits = values.length > 1 ? Math.ceil(-Math.log10(values[1]! - values[0]!)) : 3;
  return values.map((value) => value.toFixed(Math.min(12, Math.max(0, digits))).replace('-', '−'));
}

/** A tick as text: 10⁻⁶ rather than 0.000001, 4k rather than 4,096 where there is little room. */
export function label(axis: Axis, value: number): string {
  if (axis.format) return axis.format(value);
  if (axis.log === 10 && (value < 0.01 || value >= 10_000)) return power(value);
  return written(Number(value.toPrecision(6)), 3).replace('-', '−');
}

function power(value: number): string {
  const digits = '⁰¹²³⁴⁵⁶⁷⁸⁹';
  const exponent = Math.round(Math.log10(value));
  const raised = [...String(Math.abs(exponent))].map((digit) => digits[Number(digit)]).join('');
  return `10${exponent < 0 ? '⁻' : ''}${raised}`;
}

/** The smallest axis with round ends around some values, and with room if all are the same. */
export function around(values: readonly number[], label: string, zero = false): Axis {
  let [low = 0, high = 1] = extent([...values.filter(Number.isFinite), ...(zero ? [0] : [])]);
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const room = Math.abs(high) / 10 || 1;
    [low, high] = [zero && low >= 0 ? low : low - room, high + room];
  }
  [low, high] = nice(low, high, 5);
  return { label, low, high };
}
