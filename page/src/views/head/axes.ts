/** The axes of a map: token numbers, and the tokens themselves once there is room for them. */

import type { Frame } from './draw';
import { multiples, roundStep } from './numbers';
import type { View } from './view';

/** The colours and the letters that a canvas shares with the page around it. */
export interface Ink {
  readonly text: string;
  readonly quiet: string;
  readonly faint: string;
  readonly line: string;
  readonly accent: string;
  readonly onAccent: string;
  readonly panel: string;
  readonly ground: string;
  readonly sans: string;
}

export function inkOf(element: Element): Ink {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim();
  return {
    text: read('--text'),
    quiet: read('--quiet'),
    faint: read('--faint'),
    line: read('--line'),
    accent: read('--accent'),
    onAccent: read('--on-accent'),
    panel: read('--panel'),
    ground: read('--ground'),
    sans: style.fontFamily,
  };
}

/** One axis: how its tokens become pixels of the canvas, and what is written beside it. */
export interface Axis {
  readonly start: number;
  readonly stop: number;
  readonly length: number;
  readonly pixel: (token: number) => number;
  readonly token: (index: number) => string;
}

/** Pixels per token from which tokens are written. */
const READABLE = 13;

/** Pixels beside the plot that make room for a row's number before its token. */
const NUMBERS_FROM = 80;

const SLANT = -Math.PI / 3;

export function rowAxis(frame: Frame, view: View, length: number): Omit<Axis, 'token'> {
  return {
    ...inSight(-view.y / view.scale, frame.height / view.scale, length),
    pixel: (token) => frame.top + view.y + token * view.scale,
  };
}

export function columnAxis(frame: Frame, view: View, length: number): Omit<Axis, 'token'> {
  return {
    ...inSight(-view.x / view.scale, frame.width / view.scale, length),
    pixel: (token) => frame.left + view.x + token * view.scale,
  };
}

function inSight(first: number, many: number, length: number) {
  const start = Math.max(0, Math.floor(first + 1e-6));
  return { start, stop: Math.min(length, Math.ceil(first + many - 1e-6)), length };
}

/** Rows: numbers or tokens on the left of the plot. */
export function drawRows(
  context: CanvasRenderingContext2D,
  frame: Frame,
  scale: number,
  axis: Axis,
  ink: Ink,
): void {
  const room = frame.left - 14;
  context.save();
  context.beginPath();
  context.rect(0, frame.top - 6, frame.left, frame.height + 12);
  context.clip();
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  if (scale >= READABLE) {
    const numbers = room < NUMBERS_FROM ? 0 : 8 + 6.2 * String(axis.stop).length;
    for (let row = axis.start; row < axis.stop; row++) {
      const y = axis.pixel(row + 0.5);
      if (y < frame.top || y > frame.top + frame.height) continue;
      context.font = `11px ${ink.sans}`;
      context.fillStyle = ink.text;
      context.fillText(fitted(context, axis.token(row), room - numbers), frame.left - 8, y);
      if (numbers === 0) continue;
      context.font = `10px ${ink.sans}`;
      context.fillStyle = ink.faint;
      context.textAlign = 'left';
      context.fillText(String(row), 4, y);
      context.textAlign = 'right';
    }
  } else {
    context.font = `11px ${ink.sans}`;
    for (const row of ticks(axis, scale, 44)) {
      const y = axis.pixel(row + 0.5);
      context.fillStyle = ink.quiet;
      context.fillText(row.toLocaleString('en'), frame.left - 10, y);
      context.fillStyle = ink.faint;
      context.fillRect(frame.left - 6, Math.round(y), 5, 1);
    }
  }
  context.restore();
}

/** Keys: numbers or slanted tokens below the plot. */
export function drawColumns(
  context: CanvasRenderingContext2D,
  frame: Frame,
  scale: number,
  axis: Axis,
  room: number,
  ink: Ink,
): void {
  const bottom = frame.top + frame.height;
  context.save();
  context.beginPath();
  context.rect(0, bottom, frame.left + frame.width + 20, room);
  context.clip();
  context.font = `11px ${ink.sans}`;
  if (scale >= READABLE) {
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.fillStyle = ink.text;
    for (let column = axis.start; column < axis.stop; column++) {
      const x = axis.pixel(column + 0.5);
      if (x < frame.left || x > frame.left + frame.width) continue;
      context.save();
      context.translate(x + 2, bottom + 8);
      context.rotate(SLANT);
      context.fillText(fitted(context, axis.token(column), (room - 10) / -Math.sin(SLANT)), 0, 0);
      context.restore();
    }
  } else {
    context.textAlign = 'center';
    context.textBaseline = 'top';
    for (const column of ticks(axis, scale, 70)) {
      const x = axis.pixel(column + 0.5);
      context.fillStyle = ink.quiet;
      context.fillText(column.toLocaleString('en'), x, bottom + 10);
      context.fillStyle = ink.faint;
      context.fillRect(Math.round(x), bottom + 1, 1, 5);
    }
  }
  context.restore();
}

/** The numbers to write so that they stand at least `apart` pixels from each other. */
function ticks(axis: Pick<Axis, 'start' | 'stop'>, scale: number, apart: number): number[] {
  return multiples(roundStep(apart / scale), axis.start, axis.stop - 1);
}

/** A text cut to a width, with an ellipsis where something is missing. */
export function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  const trimmed = text.trim() || text;
  if (trimmed.length < 4 || context.measureText(trimmed).width <= width) return trimmed;
  const letters = [...trimmed.slice(0, 64)];
  while (letters.length > 1 && context.measureText(`${letters.join('')}…`).width > width) {
    letters.pop();
  }
  return `${letters.join('')}…`;
}
