/** The answers of the API: the types of headwise/apps/look in TypeScript. */

export interface State {
  state: 'loading' | 'ready' | 'error';
  /** The current stage; null if nothing is being done. */
  stage: string | null;
  /** 0 to 1; null if unknown. */
  done: number | null;
  /** Why the last input could not be read; older ones still can be seen, but for an `error`. */
  problem: { id: string; error: string; hint: string } | null;
  version: string;
  /** The input is an example, not the user's. */
  sample: boolean;
  device: string;
  /** Of a file: the heads whose maps are inside. */
  static?: {
    heads: RecordedHead[];
    reasons?: number[];
    effects?: (HeadPlace & { row: number })[]; // maps by effect on the prediction of a row
    hideable?: number; // edges, and heads, of a prediction
  };
  /** Which pages something answers for. */
  pages: Record<string, boolean>;
  model: Model | null;
  inputs: Input[] | null;
  statistics: Statistic[];
}

export interface Model {
  name: string;
  parameters: number;
  layers: number;
  heads: number;
  /** The most tokens it was trained on at a time. */
  context: number | null;
  /** What more can be read; null of a recording. */
  reads: 'text' | 'image' | null;
}

export interface Statistic {
  name: string;
  meaning: string;
}

export interface Input {
  id: string;
  name: string;
  kind: 'text' | 'translation' | 'image';
  rows: number;
  columns: number;
  notes: string[];
  groups: Group[];
}

/** A picture that is read or made: a grid of cells, each a token. */
export interface Picture {
  name: string;
  /** The number of its image; null if only the grid is known. */
  image: number | null;
  grid: [number, number];
  /** Stretches of tokens: the first cell, its token, how many follow each other. */
  runs: [number, number, number][];
  axis: Axis | 'both';
}

/** self, encoder, decoder or cross; of a denoiser also others, such as cross_16x16. */
export type GroupId = string;

/** Heads that share their two axes: rows look at columns. */
export interface Group {
  id: GroupId;
  name: string;
  causal: boolean;
  /** Rows and columns are the same tokens. */
  square: boolean;
  /** What a row predicts: the token after it, that in its place, a class, or what
   * was differentiated before it was shown; null for nothing. */
  predicts: 'next' | 'same' | 'class' | 'given' | null;
  rows: number;
  columns: number;
  layers: { layer: number; name: string; heads: number }[];
  pictures: Picture[];
  /** What looks at what: a text at pictures, pictures at the text that they are made by. */
  looks: 'text' | 'image' | null;
}

/** The place of a head in a model. */
export interface HeadPlace {
  group: GroupId;
  layer: number;
  head: number;
}

/** A head whose map is in a file, and how many of its levels are. */
export interface RecordedHead extends HeadPlace {
  levels: number;
  of: number;
}

/** The address of a head. */
export interface HeadAddress extends HeadPlace {
  input: string;
}

export interface HeadFigures {
  group: GroupId;
  layer: number;
  head: number;
  type: string | null;
  /** The score that its type's rule reads; null for heads that fit no rule. */
  score: number | null;
  /** The head in a sentence, and the reason for its type; `said` gives them in 中文. */
  says: string;
  why: string;
  figures: Record<string, number | null>;
}

export interface Heads {
  columns: string[];
  heads: HeadFigures[];
}

export interface Tokens {
  tokens: string[];
  total: number;
}

export type Axis = 'rows' | 'columns';
export type How = 'mean' | 'max';
/** The heads whose mean is shown: one, those of its layer, or all of its group. */
export type Over = 'head' | 'layer' | 'all';

/** The pooling of a map, and the number of first keys left out. */
export interface Pooling {
  how: How;
  drop: number;
  /** Not weights, but what each edge gave to the prediction of this row. */
  of?: number;
}

export interface MapShape {
  rows: number;
  columns: number;
  levels: number;
  tile: number;
  causal: boolean;
}

/** A rectangle of cells, row by row: each the float16 bits of log2(weight), -inf for 0. */
export interface Cells {
  bits: Uint16Array;
  rows: number;
  columns: number;
  /** Of effects, not weights: the bits are of a signed share of this number. */
  largest?: number;
}

/** The pooled maps of some heads, one after the other, all of one shape. */
export interface Thumbnails extends Cells {
  heads: number;
}

export interface Strips {
  entropy: number[];
  top_prob: number[];
  received: number[];
  rows: number;
  columns: number;
}

export interface StripRange {
  row_start?: number;
  row_stop?: number;
  column_start?: number;
  column_stop?: number;
}

/** One weight; a file without a server knows no logit and no lse. */
export interface Weight {
  weight: number;
  logit: number | null;
  lse: number | null;
}

/** A span of keys, the last one not included, and the row that is asked about. */
export interface KeySpan {
  first: number;
  last: number;
  row: number;
}

/** The weight of each head on a span of keys: its mean over rows, and that of one row. */
export interface Shares extends KeySpan {
  heads: { layer: number; head: number; mean: number; row: number }[];
}

/** Predictions with all keys, and with some hidden from a head. */
/** A token or a class, and its probability before and after keys were hidden. */
export interface Outcome {
  name: string;
  before: number;
  after: number;
}

export interface Prediction {
  /** The share of probability that has moved. */
  moved: number;
  outcomes: Outcome[];
}

/** An edge of a head, and what the prediction's lead would lose without it, to first order. */
export interface ReasonEdge {
  group: GroupId;
  layer: number;
  head: number;
  query: number;
  key: number;
  weight: number;
  support: number;
}

/** A head, and what the lead would lose if it were switched off, to first order. */
export interface ReasonHead {
  group: GroupId;
  layer: number;
  head: number;
  support: number;
}

export type Reason = ReasonEdge | ReasonHead;

/** A row's prediction, how far it is ahead of the second answer, and the edges behind it. */
export interface Reasons {
  row: number;
  answer: string; // empty where there is no prediction, but what was differentiated
  probability: number;
  second: string;
  lead: number;
  edges: ReasonEdge[];
  heads: ReasonHead[];
}

/** A head's map by weight and by support, pooled, row by row. */
export interface Support {
  rows: number;
  columns: number;
  weights: (number | null)[];
  support: (number | null)[];
}

export interface TopKeys {
  /** For each row, its largest keys: [key, weight]. */
  rows: [number, number][][];
}

export interface Alarm {
  step: number;
  /** Both null for an alarm about the whole model. */
  layer: number | null;
  head: number | null;
  rule: string;
  says: string;
}

export interface WatchState {
  /** The name of the run's folder. */
  run: string;
  model: string;
  /** The last step that was recorded; null before the first. */
  step: number | null;
  layers: { layer: number; name: string; kind: string; heads: number }[];
  statistics: string[];
  alarms: Alarm[];
  /** Of a run of headwise train: its loss, its speed, and the share of the device's peak FLOPs. */
  training: { loss?: number; per_second?: number; mfu?: number } | null;
  /** The alarms' rules and their sources. */
  rules: { rule: string; says: string; source: string }[];
  /** Seconds since something was written. */
  age: number;
  /** The name of the run that this one is compared with. */
  beside: string | null;
}

/** The alarms of one rule in one layer, or in the whole model, from the first on. */
export interface Chapter {
  rule: string;
  layer: number | null;
  module: string;
  step: number;
  heads: { head: number | null; step: number; says: string }[];
  /** What the rule reads, and the limit that it passed; null where there is no such figure. */
  figure: string | null;
  limit: number | null;
  log: boolean;
  says: string;
  meaning: string | null;
  remedy: string | null;
  /** Means over these heads in the first step, when the alarm came, and in the last step. */
  compared: Record<string, (number | null)[]>;
}

/** A run as a story. */
export interface Story {
  headline: string;
  loss: {
    name: string;
    points: [number, number | null][];
    lowest: number | null;
    turned: number | null;
  } | null;
  chapters: Chapter[];
}

export interface Series {
  /** Of a long run every so many recorded steps are given. */
  every: number;
  steps: number[];
  /** Per step, per layer, per head. */
  values: (number | null)[][][];
}
