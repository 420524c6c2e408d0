/** The visible part of the map: moved by wheel, fingers and keys, and set by the address. */

import { select } from 'd3-selection';
import { zoom, zoomIdentity, type D3ZoomEvent } from 'd3-zoom';
import {
  fitting,
  largest,
  placeOf,
  sameView,
  viewOf,
  whole,
  type Extent,
  type Place,
  type Size,
  type View,
} from './view';

const REST = 200; // milliseconds without a move after which the address is written
const GLIDE = 220; // milliseconds a double click takes

export class Camera {
  view = $state.raw<View>({ scale: 1, x: 0, y: 0 });
  readonly #settled: (place: Place | null) => void;
  readonly #behaviour = zoom<HTMLElement, unknown>();
  #target: HTMLElement | null = null;
  #extent: Extent = { rows: 1, columns: 1 };
  #size: Size = { width: 1, height: 1 };
  #here: Place | null = null;
  /** The place that the address was last known to hold. */
  #addressed: string | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** `settled` hears where we are, null for the whole, whenever a movement has come to rest. */
  constructor(settled: (place: Place | null) => void) {
    this.#settled = settled;
    this.#behaviour
      .duration(matchMedia('(prefers-reduced-motion: reduce)').matches ? 0 : GLIDE)
      .on('zoom', ({ transform: { k, x, y } }: D3ZoomEvent<HTMLElement, unknown>) =>
        this.#moved({ scale: k, x, y }),
      );
  }

  /** Listen to the element that the map lies under; the returned function stops that. */
  attach(element: HTMLElement): () => void {
    this.#target = element;
    const target = select(element).call(this.#behaviour);
    return () => {
      clearTimeout(this.#timer);
      target.on('.zoom', null);
      this.#target = null;
    };
  }

  /** Show what the address wants; a window of another size shows the same place. */
  show(wanted: Place | null, extent: Extent, size: Size): void {
    if (!this.#target) return;
    this.#extent = extent;
    this.#size = size;
    if (this.#addressed !== JSON.stringify(wanted)) {
      this.#addressed = JSON.stringify(wanted);
      this.#here = wanted;
    }
    this.#behaviour
      .extent([
        [0, 0],
        [size.width, size.height],
      ])
      .scaleExtent([fitting(extent, size), largest(extent, size)])
      .translateExtent([
        [0, 0],
        [extent.columns, extent.rows],
      ]);
    this.view = viewOf(this.place, extent, size);
    const { scale, x, y } = this.view;
    select(this.#target).call(this.#behaviour.transform, zoomIdentity.translate(x, y).scale(scale));
  }

  get place(): Place {
    return this.#here ?? whole(this.#extent);
  }

  /** Zoom about a pixel of the window, by default its middle. */
  zoomBy(factor: number, about?: [number, number]): void {
    if (this.#target) select(this.#target).call(this.#behaviour.scaleBy, factor, about);
  }

  showWhole(): void {
    this.zoomBy(fitting(this.#extent, this.#size) / this.view.scale);
  }

  /** Bring a token into the middle. */
  moveTo(column: number, row: number): void {
    if (this.#target) select(this.#target).call(this.#behaviour.translateTo, column, row);
  }

  /** Move by a part of the window: 1 is all of it. */
  moveBy(across: number, down: number): void {
    const { x, y } = this.place;
    const { width, height } = this.#size;
    this.moveTo(x + (across * width) / this.view.scale, y + (down * height) / this.view.scale);
  }

  #moved(view: View): void {
    if (sameView(view, this.view)) return; // put there by `show`
    this.view = view;
    const here = placeOf(view, this.#extent, this.#size);
    this.#here = here.zoom > 1.001 ? here : null;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#settled(this.#here), REST);
  }
}
