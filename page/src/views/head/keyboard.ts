/** The keys of the map. */

export type Move =
  | { readonly kind: 'zoom'; readonly by: number }
  | { readonly kind: 'whole' }
  | { readonly kind: 'pan' | 'choose'; readonly x: number; readonly y: number };

const ARROWS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

/** The move a key asks for, or null when it is none of the map's keys. */
export function moveOf(event: KeyboardEvent): Move | null {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const arrow = ARROWS[event.key];
  if (arrow) return { kind: event.shiftKey ? 'choose' : 'pan', x: arrow[0], y: arrow[1] };
  if (event.key === '+' || event.key === '=') return { kind: 'zoom', by: 2 };
  if (event.key === '-' || event.key === '_') return { kind: 'zoom', by: 1 / 2 };
  return event.key === '0' ? { kind: 'whole' } : null;
}
