/** float16 as its 16 bits: cells travel as such, and tables of 65,536 entries turn them into anything. */

import type { Cells } from './types';

/** The number that 16 bits stand for. */
export function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Every float16 there is, by its bits: log2 of a weight. */
export const HALVES = Float32Array.from({ length: 65_536 }, (_, bits) => fromHalf(bits));

/** The weight of a cell: 2 to the number its bits stand for, and 0 for -inf. */
export function weightOf(bits: number): number {
  return 2 ** (HALVES[bits] ?? -Infinity);
}

/** The number that a cell stands for: its weight, or of a map of effects its effect. */
export function numberOf({ largest }: Cells, bits: number): number {
  return largest === undefined ? weightOf(bits) : largest * (HALVES[bits] ?? 0);
}

/** The bits of little-endian float16, whichever way round this machine reads. */
export function halfBits(buffer: ArrayBuffer): Uint16Array {
  const bits = new Uint16Array(buffer);
  const littleEndian = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1;
  return littleEndian ? bits : bits.map((value) => ((value & 0xff) << 8) | (value >> 8));
}
