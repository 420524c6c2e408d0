/** What lies over the map and changes with the cursor: the pointed cell, the chosen row and key. */

import type { Ink } from './axes';
import { fitted } from './axes';
import type { Frame } from './draw';
import type { View } from './view';

/** A stretch of tokens along one axis, with what is written beside it. */
export interface Band {
  readonly start: number;
  readonly stop: number;
  readonly label: string;
}

export interface Marks {
  readonly chosenRow: Band | null;
  readonly chosenColumn: Band | null;
  readonly pointedRow: Band | null;
  readonly pointedColumn: Band | null;
}

export function drawMarks(
  context: CanvasRenderingContext2D,
  frame: Frame,
  view: View,
  marks: Marks,
  room: number,
  ink: Ink,
): void {
  const row = (token: number) => frame.top + view.y + token * view.scale;
  const column = (token: number) => frame.left + view.x + token * view.scale;
  context.save();
  context.beginPath();
  context.rect(frame.left, frame.top, frame.width, frame.height);
  context.clip();
  context.strokeStyle = ink.accent;
  for (const [bands, alpha] of [
    [[marks.pointedRow, marks.pointedColumn], 0.5],
    [[marks.chosenRow, marks.chosenColumn], 1],
  ] as const) {
    context.globalAlpha = alpha;
    const [down, across] = bands;
    if (down)
      edges(
        context,
        frame.left,
        row(down.start),
        frame.width,
        row(down.stop) - row(down.start),
        false,
      );
    if (across) {
      edges(
        context,
        column(across.start),
        frame.top,
        column(across.stop) - column(across.start),
        frame.height,
        true,
      );
    }
  }
  context.restore();
  for (const [band, strong] of [
    [marks.chosenRow, true],
    [marks.pointedRow, false],
  ] as const) {
    if (band) rowLabel(context, frame, (row(band.start) + row(band.stop)) / 2, band, strong, ink);
  }
  for (const [band, strong] of [
    [marks.chosenColumn, true],
    [marks.pointedColumn, false],
  ] as const) {
    if (band)
      columnLabel(
        context,
        frame,
        (column(band.start) + column(band.stop)) / 2,
        band,
        strong,
        room,
        ink,
      );
  }
}

/** Two hairlines around a band, or one where it is no wider than they are. */
function edges(
  context: CanvasRenderingContext2D,
  left: number,
  top: number,
  width: number,
  height: number,
  upright: boolean,
): void {
  const thick = upright ? width : height;
  const places = thick < 3 ? [thick / 2] : [0, thick];
  context.lineWidth = 1;
  context.beginPath();
  for (const place of places) {
    const at = Math.floor((upright ? left : top) + place) + 0.5;
    if (upright) {
      context.moveTo(at, top);
      context.lineTo(at, top + height);
    } else {
      context.moveTo(left, at);
      context.lineTo(left + width, at);
    }
  }
  context.stroke();
}

function rowLabel(
  context: CanvasRenderingContext2D,
  frame: Frame,
  middle: number,
  { label }: Band,
  strong: boolean,
  ink: Ink,
): void {
  if (middle < frame.top || middle > frame.top + frame.height) return;
  context.font = `11px ${ink.sans}`;
  const text = fitted(context, label, frame.left - 14);
  const width = context.measureText(text).width + 8;
  tag(context, frame.left - 4 - width, middle - 8, width, text, strong, ink);
}

function columnLabel(
  context: CanvasRenderingContext2D,
  frame: Frame,
  middle: number,
  { label }: Band,
  strong: boolean,
  room: number,
  ink: Ink,
): void {
  if (middle < frame.left || middle > frame.left + frame.width) return;
  context.font = `11px ${ink.sans}`;
  const text = fitted(context, label, 180);
  const width = context.measureText(text).width + 8;
  const left = Math.min(Math.max(2, middle - width / 2), frame.left + frame.width - width);
  tag(context, left, frame.top + frame.height + Math.min(5, room - 18), width, text, strong, ink);
}

function tag(
  context: CanvasRenderingContext2D,
  left: number,
  top: number,
  width: number,
  text: string,
  strong: boolean,
  ink: Ink,
): void {
  context.fillStyle = strong ? ink.accent : ink.text;
  context.beginPath();
  context.roundRect(left, top, width, 16, 3);
  context.fill();
  context.fillStyle = strong ? ink.onAccent : ink.panel;
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillText(text, left + 4, top + 8.5);
}
