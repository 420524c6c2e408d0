/** The picture of a step: a cell a head, coloured by its number, its history drawn inside. */

import { PALETTES, type Mode } from '../../lib/colour';
import type { Alarm, Series, WatchState } from '../../lib/types';
import type { Place } from './heads';

export interface Layout {
  /** Where the first cell stands; before it are the layers' numbers, above it the heads'. */
  left: number;
  top: number;
  width: number;
  height: number;
  columns: number;
}

const GAP = 2;

/** Cells this wide have room for the head's history. */
export const ROOMY = 36;

/** Cells as large as the room allows, and never too small to hit. */
export function layout(layers: WatchState['layers'], room: number): Layout {
  const columns = Math.max(1, ...layers.map((layer) => layer.heads));
  const left = 34;
  const width = Math.max(14, Math.min(240, Math.floor((room - left) / columns)));
  const height = Math.max(14, Math.min(layers.length > 8 ? 40 : 60, Math.round(width * 0.62)));
  return { left, top: 20, width, height, columns };
}

export function placeAt(
  { left, top, width, height }: Layout,
  layers: WatchState['layers'],
  x: number,
  y: number,
): Place | null {
  const row = Math.floor((y - top) / height);
  const head = Math.floor((x - left) / width);
  const layer = layers[row];
  return layer && head >= 0 && head < layer.heads ? { layer: layer.layer, head } : null;
}

export interface Scene {
  layers: WatchState['layers'];
  series: Series;
  index: number;
  extent: [number, number];
  alarms: Alarm[];
  chosen: Place[];
  focus: Place | null;
  mode: Mode;
  ink: { text: string; accent: string; bad: string; empty: string };
  font: string;
}

export function draw(context: CanvasRenderingContext2D, grid: Layout, scene: Scene): void {
  const { left, top, width, height } = grid;
  context.clearRect(0, 0, context.canvas.width, context.canvas.height);
  context.font = scene.font;
  context.textBaseline = 'middle';
  label(context, grid, scene);
  scene.layers.forEach((layer, row) => {
    for (let head = 0; head < layer.heads; head++) {
      const x = left + head * width;
      const y = top + row * height;
      cell(context, grid, scene, row, head, x, y);
    }
  });
  for (const [place, colour, line] of outlines(scene)) {
    const row = scene.layers.findIndex((layer) => layer.layer === place.layer);
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(
      left + place.head * width + GAP / 2,
      top + row * height + GAP / 2,
      width - GAP,
      height - GAP,
    );
  }
}

function outlines({ chosen, focus, ink }: Scene): [Place, string, number][] {
  const frames = chosen.map((place): [Place, string, number] => [place, ink.accent, 2.5]);
  return focus ? [...frames, [focus, ink.text, 1]] : frames;
}

function label(context: CanvasRenderingContext2D, grid: Layout, { layers, ink }: Scene): void {
  context.fillStyle = ink.text;
  context.textAlign = 'right';
  const rows = Math.ceil(14 / grid.height); // every so many, where there is no room for all
  layers.forEach((layer, row) => {
    if (row % rows) return;
    context.fillText(String(layer.layer), grid.left - 8, grid.top + (row + 0.5) * grid.height);
  });
  context.textAlign = 'center';
  const columns = Math.ceil(22 / grid.width);
  for (let head = 0; head < grid.columns; head += columns)
    context.fillText(String(head), grid.left + (head + 0.5) * grid.width, grid.top - 10);
}

function cell(
  context: CanvasRenderingContext2D,
  { width, height }: Layout,
  scene: Scene,
  row: number,
  head: number,
  x: number,
  y: number,
): void {
  const { series, index, extent, mode, ink } = scene;
  const value = series.values[index]?.[row]?.[head] ?? null;
  const colour = value === null ? null : PALETTES[mode][shade(value, extent)]!;
  context.fillStyle = colour ? `rgb(${colour.join(' ')})` : ink.empty;
  context.fillRect(x + GAP / 2, y + GAP / 2, width - GAP, height - GAP);
  if (width >= ROOMY) {
    const dark = colour && colour[0] * 0.3 + colour[1] * 0.6 + colour[2] * 0.1 < 128;
    history(context, scene, row, head, x + 5, y + 5, width - 10, height - 10, dark);
  }
  const { layer } = scene.layers[row]!;
  const rung = scene.alarms.some((alarm) => alarm.layer === layer && alarm.head === head);
  if (rung) {
    context.fillStyle = ink.bad;
    context.beginPath();
    context.moveTo(x + width - GAP / 2, y + GAP / 2);
    context.lineTo(x + width - GAP / 2 - 9, y + GAP / 2);
    context.lineTo(x + width - GAP / 2, y + GAP / 2 + 9);
    context.fill();
  }
}

type Triple = [number, number, number];

/** Colours of a range as wide as this are logarithmic, or all but its end would look alike. */
const WIDE = 1000;

export function isLog([low, high]: [number, number]): boolean {
  return low > 0 && high > WIDE * low;
}

/** 0 to 255: the place of a value among all of the run. */
export function shade(value: number, [low, high]: [number, number]): number {
  if (isLog([low, high])) [value, low, high] = [value, low, high].map(Math.log) as Triple;
  return Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
}

/** A head's numbers over all steps, on its own scale, with a dot at the step that is shown. */
function history(
  context: CanvasRenderingContext2D,
  { series, index }: Scene,
  row: number,
  head: number,
  x: number,
  y: number,
  width: number,
  height: number,
  dark: boolean | null,
): void {
  let [low, high] = [Infinity, -Infinity];
  const numbers = series.values.map((layers) => layers[row]?.[head] ?? null);
  for (const number of numbers)
    if (number !== null) [low, high] = [Math.min(low, number), Math.max(high, number)];
  if (!(high > low)) return;
  const [first, last] = [series.steps[0]!, series.steps.at(-1)!];
  const px = (step: number) => x + (width * (step - first)) / (last - first || 1);
  const py = (number: number) => y + height * (1 - (number - low) / (high - low));
  context.strokeStyle = context.fillStyle = dark ? '#ffffffb0' : '#000000a0';
  context.lineWidth = 1;
  context.beginPath();
  numbers.forEach((number, at) => {
    if (number !== null) context.lineTo(px(series.steps[at]!), py(number));
  });
  context.stroke();
  const now = numbers[index];
  if (now === null || now === undefined) return;
  context.beginPath();
  context.arc(px(series.steps[index]!), py(now), 2.4, 0, 2 * Math.PI);
  context.fill();
}
