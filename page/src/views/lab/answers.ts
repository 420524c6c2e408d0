/** The answers of the lab: headwise/apps/lab/page.py in TypeScript. */

export const VERDICTS = [
  'holds',
  'holds when',
  'does not hold',
  'right',
  'wrong',
  'undecided',
] as const;

/** `none` is a claim that has not been run yet. */
export type Verdict = (typeof VERDICTS)[number] | 'none';

export interface ClaimSummary {
  id: string;
  topic: string;
  sentence: string;
  verdict: Verdict | null;
  /** The result comes from another version or another experiment. */
  stale: boolean;
}

export interface Claims {
  topics: { id: string; title: string }[];
  claims: ClaimSummary[];
}

export interface Chart {
  kind: 'chart';
  title: string;
  x: string;
  y: string;
  series: Curve[];
  log_x: boolean;
  log_y: boolean;
}

export interface Curve {
  label: string;
  x: number[];
  y: number[];
  low: number[] | null;
  high: number[] | null;
}

export type Cell = string | number | boolean | null;

export interface Table {
  kind: 'table';
  title: string;
  headings: string[];
  rows: Cell[][];
}

export interface WeightMap {
  kind: 'map';
  title: string;
  rows: string[];
  columns: string[];
  weights: number[][];
}

export type Shown = Chart | Table | WeightMap;

export interface Result {
  verdict: Verdict;
  condition: string | null;
  because: string;
  figures: unknown;
  form: 'quick' | 'full';
  command: string;
  machine: string;
  date: string;
  seconds: number;
  version: string;
  /** Of the design, registered before the run; null for results of before designs were. */
  design_hash: string | null;
  commit: string | null;
  /** The probability that so many runs show a difference that matters. */
  power: number | null;
  stale: boolean;
  /** Measured by this user; others come with headwise. */
  own: boolean;
  folder: string;
  /** Empty for a stale result: today's drawing may not fit its figures. */
  shown: Shown[];
}

/** A definition of a file. */
export interface Piece {
  file: string;
  line: number;
  source: string;
}

export interface Claim {
  id: string;
  topic: string;
  sentence: string;
  notes: { letter: string; about: string }[];
  derivation: string | null;
  kind: 'derived' | 'read' | 'measured';
  kind_text: string;
  /** Verdicts that no longer stand. */
  history: { date: string; verdict: Verdict; reason: string }[];
  command: string;
  /** A reader can move what the recorded figures are judged by. */
  movable: boolean;
  /** The best first. */
  results: Result[];
  /** A result that can't be read. */
  problem: string | null;
  experiment: Piece[];
  rule: Piece[];
}

export type Stop = number | string;

/** A column of the figures by which rows are left out. */
export interface Move {
  label: string;
  how: 'up to' | 'from' | 'only';
  stops: Stop[];
  /** The stop that leaves nothing out. */
  default: Stop;
}

/** The verdict at every position of the moves; none where the rule can't judge so little. */
export interface Moves {
  settings: Record<string, Move>;
  cells: { at: Stop[]; verdict?: Verdict; condition?: string | null; because?: string }[];
}

/** The last experiment that the page ran. */
export interface JobProgress {
  /** Null before the first. */
  id: string | null;
  state: 'running' | 'stopping' | 'stopped' | 'failed' | 'done';
  what: string;
  done: number;
  steps: number;
  seconds: number;
  error: string | null;
}

/** The name of a result in an address. */
export function keyOf({ own, form }: Result): string {
  return `${own ? 'own' : 'recorded'}-${form}`;
}
