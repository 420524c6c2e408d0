/** From a weight to a colour: palettes even to the eye, and tables that colour cells by their bits. */

import { HALVES } from './half';
import type { Cells } from './types';

export type Scale = 'linear' | 'log';
export type Mode = 'light' | 'dark';

type Triple = readonly [number, number, number];

/**
 * Stations of the palettes in OKLCH: lightness, chroma, hue in degrees. Lightness changes in equal
 * steps, so equal differences of weight look equally large, in grey too. Zero is the page's own
 * background: a light page darkens with weight, a dark one glows.
 */
const STATIONS: Record<Mode, readonly Triple[]> = {
  light: [
    [0.985, 0.005, 95],
    [0.84, 0.09, 200],
    [0.695, 0.115, 225],
    [0.55, 0.14, 255],
    [0.405, 0.16, 278],
    [0.26, 0.11, 300],
  ],
  dark: [
    [0.19, 0.012, 265],
    [0.34, 0.12, 285],
    [0.49, 0.16, 325],
    [0.64, 0.18, 15],
    [0.79, 0.145, 60],
    [0.94, 0.1, 100],
  ],
};

const STEPS = 256;

/** 256 colours of a mode from weight 0 to the largest, each [red, green, blue] of 0 to 255. */
export const PALETTES: Record<Mode, readonly Triple[]> = {
  light: palette(STATIONS.light),
  dark: palette(STATIONS.dark),
};

function palette(stations: readonly Triple[]): Triple[] {
  return Array.from({ length: STEPS }, (_, step) => {
    const place = (step / (STEPS - 1)) * (stations.length - 1);
    const index = Math.min(Math.floor(place), stations.length - 2);
    const [from, to] = [oklab(stations[index]!), oklab(stations[index + 1]!)];
    const mixed = from.map((value, axis) => value + (to[axis]! - value) * (place - index));
    return toRgb(mixed as unknown as Triple);
  });
}

function oklab([lightness, chroma, hue]: Triple): Triple {
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

/** OKLab to sRGB, clipped (Ottosson's matrices). */
function toRgb([lightness, a, b]: Triple): Triple {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const curved = value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, curved)));
  }) as unknown as Triple;
}

/** The colours of logarithmic weights: the same for every head of so many keys, at every zoom. */
export function logSpan(columns: number): Span {
  const even = 1 / Math.max(2, columns); // even attention lies a third up
  return { scale: 'log', low: even ** 1.5, high: 1 };
}

/**
 * The weights that the colours span. Below `low` a logarithmic scale shows nothing. A signed scale
 * is that of effects: from −high through 0, which is blank, to high.
 */
export interface Span {
  scale: Scale | 'signed';
  low: number;
  high: number;
}

/** The ends of the signed scale: numbers below 0, and above; as --series-1 and --series-0. */
const SIGNED: Record<Mode, readonly [Triple, Triple]> = {
  light: [
    [196, 86, 15],
    [47, 91, 208],
  ],
  dark: [
    [245, 165, 97],
    [138, 176, 255],
  ],
};

/** The colour of a share between −1 and 1 on the signed scale. */
export function signedColour(share: number, mode: Mode): Triple {
  const full = SIGNED[mode][share < 0 ? 0 : 1]!;
  const place = Math.sqrt(Math.min(1, Math.abs(share))); // small effects are seen, too
  return PALETTES[mode][0]!.map((from, axis) =>
    Math.round(from + (full[axis]! - from) * place),
  ) as unknown as Triple;
}

/** Where a weight lies on the way from no colour (0) to full colour (1). */
export function placeOf(weight: number, { scale, low, high }: Span): number {
  if (scale === 'signed') return Math.sqrt(Math.min(1, Math.abs(weight) / (high || 1)));
  if (!(weight > 0)) return 0;
  const place =
    scale === 'linear' ? weight / high : Math.log2(weight / low) / Math.log2(high / low);
  return Math.min(1, Math.max(0, place));
}

/** The weight at a place between 0 and 1: what a legend writes beside its colours. */
export function weightAt(place: number, { scale, low, high }: Span): number {
  if (scale === 'signed') return (2 * place - 1) * high;
  return scale === 'linear' ? place * high : low * (high / low) ** place;
}

/** The colour of a weight as CSS understands it. */
export function cssColour(weight: number, mode: Mode, span: Span): string {
  const [red, green, blue] = PALETTES[mode][Math.round(placeOf(weight, span) * (STEPS - 1))]!;
  return `rgb(${red} ${green} ${blue})`;
}

const tables = new Map<string, Uint32Array>();

/** A table from a cell's bits to an opaque pixel of an ImageData, seen as Uint32Array. */
export function colourTable(mode: Mode, span: Span): Uint32Array {
  const key = `${mode} ${span.scale} ${span.low} ${span.high}`;
  const known = tables.get(key);
  if (known) return known;
  const pixels = PALETTES[mode].map(pixel);
  const table = new Uint32Array(HALVES.length);
  for (let bits = 0; bits < table.length; bits++) {
    table[bits] =
      span.scale === 'signed'
        ? pixel(signedColour(HALVES[bits]!, mode)) // a share of the whole map's largest
        : pixels[Math.round(placeOf(2 ** HALVES[bits]!, span) * (STEPS - 1))]!;
  }
  if (tables.size >= 16) tables.delete(tables.keys().next().value!);
  tables.set(key, table);
  return table;
}

/** A colour as ImageData lays it out, on any machine. */
function pixel(rgb: Triple): number {
  return new Uint32Array(Uint8Array.of(...rgb, 255).buffer)[0]!;
}

/** The picture of cells, a pixel a cell. */
export function paint(cells: Cells, table: Uint32Array): ImageData {
  const image = new ImageData(cells.columns, cells.rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let cell = 0; cell < pixels.length; cell++) pixels[cell] = table[cells.bits[cell]!]!;
  return image;
}

/** Black or white, whichever is easier to read on a colour: the contrast is 4.58 at least. */
export function inkOn(colour: Triple): string {
  const light = (part: number) =>
    part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = colour;
  return 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b) > 0.179 ? '#000' : '#fff';
}
