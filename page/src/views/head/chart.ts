/** The whole chart of a head: the map, its axes and its margins, on one canvas. */

import { PALETTES, placeOf, type Mode, type Span } from '../../lib/colour';
import { numberOf } from '../../lib/half';
import type { How } from '../../lib/types';
import { columnAxis, drawColumns, drawRows, rowAxis, type Ink } from './axes';
import { drawTiles, type Frame } from './draw';
import { cellSize, isHidden, type Address, type Pyramid } from './pyramid';
import { lettersOn } from './range';
import { drawStrip, mostOf, type Margins } from './strips';
import type { Tile } from './tiles';
import type { Extent, Size, View } from './view';

/** Room around the plot, in CSS pixels: tokens on the left and below, margins above and right. */
const ROOM = { left: 108, top: 44, right: 62, bottom: 76 };
/** Less at the sides where there is little width: the buttons stand lower, clear of the margin. */
const LITTLE = { left: 64, top: 44, right: 46, bottom: 92 };
const NARROW = 480; // pixels of width below which there is little

const WIDEST = 2.5; // times as wide as high, or as high as wide
const GAP = 4; // between the plot and its margins
const WEIGHTS_FROM = 28; // pixels per token that make room for a number

export interface Chart {
  readonly view: View;
  readonly pyramid: Pyramid;
  readonly level: number;
  readonly at: (address: Address) => Tile | undefined;
  readonly table: Uint32Array;
  readonly span: Span;
  readonly mode: Mode;
  readonly margins: Margins | null;
  /** The number of first keys that are left out. */
  readonly drop: number;
  readonly names: {
    readonly row: string;
    readonly column: string;
    readonly entropy: string;
    readonly received: string;
    readonly most: string;
  };
  readonly rowToken: (index: number) => string;
  readonly columnToken: (index: number) => string;
}

/** Where the plot lies, and the room on its right and below it. */
export interface Plot extends Frame {
  readonly right: number;
  readonly bottom: number;
}

/** The plot in a canvas of this size: shaped as the map is, unless that is a ribbon. */
export function frameOf({ width, height }: Size, { rows, columns }: Extent): Plot {
  const room = width < NARROW ? LITTLE : ROOM;
  const wide = Math.max(40, width - room.left - room.right);
  const tall = Math.max(40, height - room.top - room.bottom);
  const shape = Math.min(WIDEST, Math.max(1 / WIDEST, columns / Math.max(1, rows)));
  return {
    ...room,
    width: Math.min(wide, tall * shape),
    height: Math.min(tall, wide / shape),
  };
}

export function drawChart(
  context: CanvasRenderingContext2D,
  frame: Plot,
  ratio: number,
  chart: Chart,
  ink: Ink,
): void {
  const { view, pyramid } = chart;
  const rows = {
    ...rowAxis(frame, view, pyramid.rows),
    token: chart.rowToken,
  };
  const columns = {
    ...columnAxis(frame, view, pyramid.columns),
    token: chart.columnToken,
  };
  drawPaper(context, frame, rows, columns, chart.mode);
  drawTiles(context, frame, view, ratio, pyramid, chart.level, chart.at, chart.table);
  if (view.scale >= WEIGHTS_FROM && chart.level === pyramid.levels - 1) {
    drawWeights(context, frame, rows, columns, chart, ink);
  }
  context.strokeStyle = ink.line;
  context.lineWidth = 1;
  context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
  drawRows(context, frame, view.scale, rows, ink);
  drawColumns(context, frame, view.scale, columns, frame.bottom, ink);
  drawNames(context, frame, chart, ink);
  if (chart.margins) drawMargins(context, frame, chart, chart.margins, rows, columns, ink);
}

type Sight = ReturnType<typeof rowAxis>;

/** Weight 0 has a colour too: where no tile is drawn, nothing is seen. */
function drawPaper(
  context: CanvasRenderingContext2D,
  frame: Frame,
  rows: Sight,
  columns: Sight,
  mode: Mode,
): void {
  const [red, green, blue] = PALETTES[mode][0]!;
  const left = Math.max(frame.left, columns.pixel(0));
  const top = Math.max(frame.top, rows.pixel(0));
  const right = Math.min(frame.left + frame.width, columns.pixel(columns.length));
  const bottom = Math.min(frame.top + frame.height, rows.pixel(rows.length));
  context.fillStyle = `rgb(${red} ${green} ${blue})`;
  context.fillRect(left, top, right - left, bottom - top);
}

function drawMargins(
  context: CanvasRenderingContext2D,
  frame: Plot,
  { drop, names }: Chart,
  { entropy, received }: Margins,
  rows: Sight,
  columns: Sight,
  ink: Ink,
): void {
  const right = { ...frame, left: frame.left + frame.width + GAP, width: frame.right - GAP - 4 };
  const above = { ...frame, top: 16, height: frame.top - GAP - 16 };
  const mostEntropy = mostOf(entropy, rows.start, rows.stop);
  const mostReceived = mostOf(received, Math.max(drop, columns.start), columns.stop);
  drawStrip(context, entropy, right, false, rows.pixel, mostEntropy, ink);
  drawStrip(context, received, above, true, columns.pixel, mostReceived, ink);
  context.font = `10px ${ink.sans}`;
  context.fillStyle = ink.quiet;
  context.textBaseline = 'alphabetic';
  context.textAlign = 'left';
  context.fillText(`${names.most} ${short(mostEntropy)}`, right.left, frame.top - 5);
  context.textAlign = 'right';
  context.fillText(`${names.most} ${short(mostReceived)}`, frame.left - 6, above.top + 3);
}

/** The names of the axes and margins. */
function drawNames(
  context: CanvasRenderingContext2D,
  frame: Frame,
  { names }: Chart,
  ink: Ink,
): void {
  const bottom = frame.top + frame.height;
  context.font = `10px ${ink.sans}`;
  context.fillStyle = ink.quiet;
  context.textBaseline = 'alphabetic';
  context.textAlign = 'left';
  context.fillText(names.received, frame.left, 11);
  context.fillText(names.entropy, frame.left + frame.width + GAP, frame.top - 16);
  // Higher than the other names: the first row's number may stand at the very edge of the plot.
  context.fillText(`${names.row} ↓`, 4, frame.top - 11);
  context.fillText(`${names.column} →`, 4, bottom + 18);
}

/** The weights themselves, in cells large enough for them. */
function drawWeights(
  context: CanvasRenderingContext2D,
  frame: Frame,
  rows: Sight,
  columns: Sight,
  { pyramid, level, at, span, mode }: Chart,
  ink: Ink,
): void {
  context.save();
  context.beginPath();
  context.rect(frame.left, frame.top, frame.width, frame.height);
  context.clip();
  context.font = `10px ${ink.sans}`;
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  for (let row = rows.start; row < rows.stop; row++) {
    for (let column = columns.start; column < columns.stop; column++) {
      const weight = cellAt(pyramid, level, at, row, column);
      const signed = span.scale === 'signed';
      const least = signed ? span.high / 50 : 0.005; // 0.00 says nothing
      if (weight === null || Math.abs(weight) < least) continue;
      context.fillStyle = lettersOn(placeOf(weight, span), mode);
      const text = signed ? brief(weight) : weight.toFixed(2);
      context.fillText(text, columns.pixel(column + 0.5), rows.pixel(row + 0.5) + 0.5);
    }
  }
  context.restore();
}

/** The value of the cell over this pair of tokens; null if it is hidden or not loaded. */
export function cellAt(
  pyramid: Pyramid,
  level: number,
  at: Chart['at'],
  row: number,
  column: number,
): number | null {
  const { left, top, size } = cellOver(pyramid, level, row, column);
  if (
    isHidden(pyramid, { left, top, right: left + size, bottom: Math.min(pyramid.rows, top + size) })
  ) {
    return null;
  }
  const [x, y] = [left / size, top / size];
  const tile = at({ level, x: Math.floor(x / pyramid.tile), y: Math.floor(y / pyramid.tile) });
  const bits = tile?.cells.bits[(y % pyramid.tile) * tile.cells.columns + (x % pyramid.tile)];
  return tile === undefined || bits === undefined ? null : numberOf(tile.cells, bits);
}

/** The first row and key of the cell over a pair of tokens, and how many of each it holds. */
export function cellOver(pyramid: Pyramid, level: number, row: number, column: number) {
  const size = cellSize(pyramid, level);
  return { left: Math.floor(column / size) * size, top: Math.floor(row / size) * size, size };
}

/** The cell under the cursor: its tokens, and its value if it has one. */
export interface Pointed {
  readonly row: number;
  readonly column: number;
  readonly rows: readonly [number, number];
  readonly columns: readonly [number, number];
  readonly how: How;
  readonly value: number | null;
  readonly hidden: boolean;
}

/** An effect in two digits. */
function brief(value: number): string {
  return String(Number(value.toPrecision(2))).replace('-', '−');
}

function short(value: number): string {
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(2);
}
