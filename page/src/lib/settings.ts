/** The settings of an experiment or a form: headwise/apps/lab/experiments/settings.py in TypeScript. */

export interface Whole {
  value: number;
  default: number;
  least: number;
  most: number;
  doubling: boolean;
}

export interface Choice {
  value: string;
  default: string;
  options: string[];
}

export type Setting = Whole | Choice;
