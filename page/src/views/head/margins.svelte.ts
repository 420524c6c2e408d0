/** The margins of what is in sight, fetched once it has come to rest. */

import { untrack } from 'svelte';
import type { OneHead } from './onehead.svelte';
import { clip, type Box } from './pyramid';
import { marginsOf, type Margins } from './strips';

const REST = 150; // milliseconds without a move

export class MarginsInSight {
  value = $state.raw<Margins | null>(null);
  /** True while the visible part is still loading. */
  pending = $state(true);
  readonly #one: () => OneHead;
  readonly #box: () => Box;

  /** Follows the head and the part of it in sight; to be made while a component is. */
  constructor(one: () => OneHead, box: () => Box) {
    this.#one = one;
    this.#box = box;
    $effect(() => {
      void this.#one(); // another head's margins are none of this one's
      this.value = null;
    });
    $effect(() => this.#follow());
  }

  #follow(): () => void {
    const { look, head, shape } = this.#one();
    const everything = { left: 0, top: 0, right: shape.columns, bottom: shape.rows };
    // A file holds the margins of the whole.
    const around = look.transport.kind === 'file' ? everything : wider(this.#box());
    const controller = new AbortController();
    this.pending = true;
    const ask = async () => {
      // Without margins the map is still a map.
      this.value = await marginsOf(
        look.source,
        head,
        clip(around, shape),
        shape,
        controller.signal,
      ).catch(() => this.value);
      if (!controller.signal.aborted) this.pending = false;
    };
    const timer = setTimeout(() => void ask(), untrack(() => this.value) ? REST : 0);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }
}

/** Half as much again on every side, so that a small move finds its margins there. */
function wider({ left, top, right, bottom }: Box): Box {
  const [across, down] = [(right - left) / 2, (bottom - top) / 2];
  return {
    left: Math.floor(left - across),
    top: Math.floor(top - down),
    right: Math.ceil(right + across),
    bottom: Math.ceil(bottom + down),
  };
}
