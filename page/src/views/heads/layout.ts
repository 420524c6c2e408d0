/** Where each head stands: layer by layer, or one after the other. */

import type { HeadFigures } from '../../lib/types';
import type { Order } from './arrange';

const LABEL = 58; // left of the heads, for the names of layers
const CAPTION = 18; // below a head, for its name and figure
const NAME = 13; // below a small head, for its name
const SMALLEST = 66; // pixels of a head that still has a figure below it

/** A head's row and column from 0, and its corner in pixels. */
export interface Place {
  row: number;
  column: number;
  x: number;
  y: number;
}

export interface Layout {
  /** The side of a head's square. */
  tile: number;
  /** There is room for a head's figure beside its name. */
  captioned: boolean;
  /** The height below a head for its name. */
  caption: number;
  width: number;
  height: number;
  /** The layers with the pixel each begins at; none where heads do not stand by layer. */
  layers: { layer: number; y: number }[];
  places: ReadonlyMap<HeadFigures, Place>;
}

/** The side of a head's square at which all layers are seen at once, within reason. */
function tallest(layers: number, gap: number, height: number): number {
  return Math.min(360, Math.max(height / layers - CAPTION - gap, SMALLEST));
}

const gapOf = (abreast: number) => (abreast > 16 ? 2 : 6);

/** The width that all heads take where the height of the room limits their size. */
export function widthFor(all: readonly HeadFigures[], height: number): number {
  const layers = new Set(all.map((head) => head.layer)).size;
  const abreast = Math.max(...all.map((head) => head.head)) + 1;
  const gap = gapOf(abreast);
  return LABEL + abreast * (Math.floor(tallest(layers, gap, height)) + gap);
}

/** The layout of some heads, in the order they are given, in a room of this size. */
export function layOut(
  heads: readonly HeadFigures[],
  all: readonly HeadFigures[],
  order: Order,
  room: { width: number; height: number },
): Layout {
  const everyLayer = new Set(all.map((head) => head.layer)).size;
  const layers = [...new Set(heads.map((head) => head.layer))]; // a filter leaves no empty rows
  const abreast = Math.max(...all.map((head) => head.head)) + 1;
  const gap = gapOf(abreast);
  const wide = (room.width - LABEL) / abreast - gap;
  const high = tallest(everyLayer, gap, room.height);
  const tile = Math.floor(Math.max(22, Math.min(wide, high)));
  const captioned = tile >= SMALLEST;
  const caption = captioned ? CAPTION : NAME;
  const [right, down] = [tile + gap, tile + gap + caption];

  const byLayer = order === 'layers';
  const left = byLayer ? LABEL : 0;
  const columns = byLayer ? abreast : Math.max(1, Math.floor((room.width + gap) / right));
  const rows = byLayer ? layers.length : Math.ceil(heads.length / columns);
  const places = heads.map((head, index): [HeadFigures, Place] => {
    const row = byLayer ? layers.indexOf(head.layer) : Math.floor(index / columns);
    const column = byLayer ? head.head : index % columns;
    return [head, { row, column, x: left + column * right, y: row * down }];
  });
  return {
    tile,
    captioned,
    caption,
    width: left + columns * right,
    height: rows * down,
    layers: byLayer ? layers.map((layer, row) => ({ layer, y: row * down })) : [],
    places: new Map(places),
  };
}

/** The steps of the arrow keys: down and to the right. */
export const STEPS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};

/** The nearest head in a direction: those filtered out leave holes to step over. */
export function neighbour(
  { places }: Layout,
  from: HeadFigures,
  [down, right]: readonly [number, number],
): HeadFigures | undefined {
  const here = places.get(from)!;
  let best: HeadFigures | undefined;
  let least = Infinity;
  for (const [head, { row, column }] of places) {
    const ahead = (row - here.row) * down + (column - here.column) * right;
    const aside = Math.abs((row - here.row) * right) + Math.abs((column - here.column) * down);
    const distance = ahead + aside * 100;
    if (ahead > 0 && distance < least) [best, least] = [head, distance];
  }
  return best;
}
