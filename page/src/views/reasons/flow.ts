/** Places of the edges behind a prediction: layers down, the tokens that take part across. */

import type { Group, ReasonEdge } from '../../lib/types';

/** The sequence that an axis of a group belongs to. */
export type Side = 'source' | 'target';

export const sideOf = (group: string, axis: 'rows' | 'columns'): Side =>
  group === 'encoder' || (group === 'cross' && axis === 'columns') ? 'source' : 'target';

export interface Column {
  side: Side;
  position: number;
  x: number;
}

export interface Drawn {
  edge: ReasonEdge;
  path: string;
  width: number;
}

export interface Flow {
  columns: Column[];
  layers: { layer: number; y: number }[];
  edges: Drawn[];
  width: number;
  height: number;
}

const LEFT = 56;
const TOP = 74;
const STEP = 52;
const WIDEST = 9;
const GAP = 0.6; // of a column, where tokens are left out

/** Where everything stands in a room so wide; `row` is the prediction's place, if it has one. */
export function flow(
  edges: readonly ReasonEdge[],
  groups: Group[],
  row: number | null,
  room: number,
) {
  const last = groups.at(-1)!;
  const seen = new Map<string, { side: Side; position: number }>();
  const add = (side: Side, position: number) => seen.set(`${side} ${position}`, { side, position });
  if (row !== null) add(sideOf(last.id, 'rows'), row);
  for (const edge of edges) {
    add(sideOf(edge.group, 'columns'), edge.key);
    add(sideOf(edge.group, 'rows'), edge.query);
  }
  const order = [...seen.values()].sort((one, other) =>
    one.side === other.side ? one.position - other.position : one.side === 'source' ? -1 : 1,
  );
  let at = 0;
  const places = order.map((each, index) => {
    const before = order[index - 1];
    const apart = before && (before.side !== each.side || before.position + 1 < each.position);
    at += index ? 1 + (apart ? GAP : 0) : 0;
    return at;
  });
  const pitch = Math.min(74, Math.max(22, (room - LEFT - 40) / Math.max(1, at)));
  const columns = order.map((each, index): Column => ({
    ...each,
    x: LEFT + 14 + places[index]! * pitch,
  }));
  const numbers = groups
    .flatMap((group) => group.layers.map(({ layer }) => layer))
    .sort((a, b) => a - b);
  const layers = numbers.map((layer, index) => ({ layer, y: TOP + index * STEP }));
  const xs = new Map(columns.map((column) => [`${column.side} ${column.position}`, column.x]));
  const ys = new Map(layers.map(({ layer, y }) => [layer, y]));
  const most = Math.max(1e-12, ...edges.map((edge) => Math.abs(edge.support)));
  const drawn = edges.map((edge): Drawn => {
    const from = xs.get(`${sideOf(edge.group, 'columns')} ${edge.key}`)!;
    const to = xs.get(`${sideOf(edge.group, 'rows')} ${edge.query}`)!;
    const [top, bottom] = [ys.get(edge.layer)! + 5, ys.get(edge.layer)! + STEP - 5];
    const bend = from === to ? 9 : 0; // a token that looks at itself
    const path = `M${from} ${top}C${from - bend} ${top + 20} ${to - bend} ${bottom - 20} ${to} ${bottom}`;
    return { edge, path, width: 1 + (WIDEST - 1) * (Math.abs(edge.support) / most) };
  });
  const height = TOP + numbers.length * STEP + 30;
  const result: Flow = {
    columns,
    layers,
    edges: drawn,
    width: Math.max(room, LEFT + 60 + at * pitch),
    height,
  };
  return result;
}
