/** Axes of a chart: from numbers to places, and the numbers worth writing beside them. */

import { written } from '../lib/language.svelte';

export interface Axis {
  label: string;
  low: number;
  high: number;
  /** Logarithmic to this base; linear without. */
  log?: 2 | 10;
  format?: (value: number) => string;
}

/** Where a value lies: 0 at the low end, 1 at the high one; outside, below and beyond. */
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
export function ticks(axis: Axis, count: number): number[] {
  return axis.log ? logTicks(axis, axis.log, count) : linearTicks(axis, count);
}

function linearTicks({ low, high }: Axis, count: number): number[] {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const size = 10 ** Math.floor(Math.log10(raw));
  const steps = [0.5, 1, 2, 5, 10].map((each) => each * size);
  const firstOf = (step: number) => Math.ceil(low / step - 1e-9);
  const lastOf = (step: number) => Math.floor(high / step + 1e-9);
  const wanted = steps.findIndex((each) => each >= raw);
  // One number alone says nothing of the scale.
  const step = steps[firstOf(steps[wanted]!) < lastOf(steps[wanted]!) ? wanted : wanted - 1]!;
  const [first, last] = [firstOf(step), lastOf(step)];
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

function logTicks({ low, high }: Axis, base: number, count: number): number[] {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / count));
  const powers: number[] = [];
  for (let power = first; power <= last; power += every) powers.push(base ** power);
  return powers;
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

/** The smallest axis of round numbers around some values; with room where all are the same. */
export function around(values: number[], label: string, zero = false): Axis {
  const finite = values.filter(Number.isFinite);
  let low = Math.min(...finite, zero ? 0 : Infinity);
  let high = Math.max(...finite, zero ? 0 : -Infinity);
  if (!finite.length) [low, high] = [0, 1];
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const room = Math.abs(high) / 10 || 1;
    [low, high] = [zero && low >= 0 ? low : low - room, high + room];
  }
  const axis = { label, low, high };
  const [first, second] = linearTicks(axis, 5);
  const step = second === undefined ? high - low : second - first!;
  return {
    label,
    low: Math.floor(low / step + 1e-9) * step,
    high: Math.ceil(high / step - 1e-9) * step,
  };
}
