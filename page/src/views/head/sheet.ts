/** A canvas to draw on. */

import type { Size } from './view';

/** A canvas of as many pixels as the screen has there, empty, drawn on in CSS pixels. */
export function prepared(
  canvas: HTMLCanvasElement,
  { width, height }: Size,
  ratio: number,
): CanvasRenderingContext2D {
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  const context = canvas.getContext('2d')!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
