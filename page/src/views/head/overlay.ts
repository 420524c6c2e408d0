/** Drawn over the map and following the cursor: marked rows and keys, and their names. */

import { fitted, type Ink } from './axes';
import type { Frame } from './draw';
import type { View } from './view';

/** A stretch of tokens along one axis: chosen, or only pointed at. */
export interface Mark {
  readonly start: number;
  readonly stop: number;
  readonly label: string;
  readonly chosen: boolean;
}

const TAG = 16; // pixels a label is high
const WIDEST = 180; // pixels the label of a key is wide, at most

/** Mark rows and keys in order: what comes last lies on top. */
export function drawMarks(
  context: CanvasRenderingContext2D,
  frame: Frame,
  view: View,
  rows: readonly Mark[],
  columns: readonly Mark[],
  ink: Ink,
): void {
  context.font = `11px ${ink.sans}`;
  for (const mark of rows) {
    const from = frame.top + view.y + mark.start * view.scale;
    const to = frame.top + view.y + mark.stop * view.scale;
    const right = frame.left + frame.width;
    for (const y of edges(from, to, frame.top, frame.top + frame.height)) {
      hairline(context, frame.left, y, right, y, mark, ink);
    }
    const middle = (from + to) / 2;
    if (middle < frame.top || middle > frame.top + frame.height) continue;
    const text = fitted(context, mark.label, frame.left - 14);
    const width = context.measureText(text).width + 8;
    tag(context, frame.left - 4 - width, middle - TAG / 2, width, text, mark, ink);
  }
  for (const mark of columns) {
    const from = frame.left + view.x + mark.start * view.scale;
    const to = frame.left + view.x + mark.stop * view.scale;
    const bottom = frame.top + frame.height;
    for (const x of edges(from, to, frame.left, frame.left + frame.width)) {
      hairline(context, x, frame.top, x, bottom, mark, ink);
    }
    const middle = (from + to) / 2;
    if (middle < frame.left || middle > frame.left + frame.width) continue;
    const text = fitted(context, mark.label, WIDEST);
    const width = context.measureText(text).width + 8;
    const left = Math.min(Math.max(2, middle - width / 2), frame.left + frame.width - width);
    tag(context, left, bottom + 5, width, text, mark, ink);
  }
}

/** Where a stretch of pixels ends, as far as that is in sight; a narrow one has one line only. */
function edges(from: number, to: number, least: number, most: number): number[] {
  const places = to - from < 3 ? [(from + to) / 2] : [from, to];
  const crisp = places.map((place) => Math.floor(place) + 0.5);
  return crisp.filter((place) => place >= least - 1 && place <= most + 1);
}

function hairline(
  context: CanvasRenderingContext2D,
  fromX: number,
  fromY: number,
  toX: number,
  toY: number,
  { chosen }: Mark,
  ink: Ink,
): void {
  context.globalAlpha = chosen ? 1 : 0.5;
  context.strokeStyle = ink.accent;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
  context.globalAlpha = 1;
}

function tag(
  context: CanvasRenderingContext2D,
  left: number,
  top: number,
  width: number,
  text: string,
  { chosen }: Mark,
  ink: Ink,
): void {
  context.fillStyle = chosen ? ink.accent : ink.text;
  context.beginPath();
  context.roundRect(left, top, width, TAG, 3);
  context.fill();
  context.fillStyle = chosen ? ink.onAccent : ink.panel;
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillText(text, left + 4, top + TAG / 2 + 0.5);
}
