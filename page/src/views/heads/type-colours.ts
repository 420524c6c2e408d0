/** A colour for each type of head; heads of no type have the colour of their layer. */

const HUES: Record<string, number> = {
  content: 255,
  local: 200,
  induction: 145,
  sink: 70,
  'previous-token': 25,
  self: 330,
};

const OTHER_HUES = [100, 285, 175, 350];

/** A type's colour: the same in every view, as light as the theme wants it. */
export function typeColour(type: string | null): string {
  if (type === null || type === 'dormant') return 'var(--faint)';
  const hue = HUES[type] ?? OTHER_HUES[letters(type) % OTHER_HUES.length];
  return `oklch(var(--dot-lightness) 0.15 ${hue})`;
}

function letters(text: string): number {
  return [...text].reduce((sum, letter) => sum + letter.codePointAt(0)!, 0);
}

/** A layer's colour, from the first to the last. */
export function layerColour(layer: number, layers: number): string {
  const place = layers > 1 ? layer / (layers - 1) : 0;
  return `oklch(var(--dot-lightness) 0.14 ${Math.round(230 + place * 160) % 360})`;
}
