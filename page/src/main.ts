/** The one bundle: it starts the page or the file it finds itself in, and is a notebook's widget. */

import { mount, unmount } from 'svelte';
import App from './App.svelte';
import { FileTransport, RECORDED_ID } from './lib/file';
import { Look } from './lib/look.svelte';
import type { Address } from './lib/router.svelte';
import { ServerTransport } from './lib/server';
import type { Transport } from './lib/transport';
import { WidgetTransport, type WidgetModel } from './lib/widget';
import './lib/theme.css';

/** Show the page in an element; the returned function takes it away again. */
function show(element: HTMLElement, transport: Transport, address?: Address): () => void {
  const look = new Look(transport, address);
  const app = mount(App, { target: element, props: { look } });
  return () => {
    look.close();
    void unmount(app);
  };
}

const page = document.querySelector<HTMLElement>('[data-headwise-page]');
if (page) {
  const recorded = document.getElementById(RECORDED_ID)?.textContent;
  show(page, recorded ? new FileTransport(JSON.parse(recorded)) : new ServerTransport());
}

/** Called by anywidget. */
function render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
  const transport = new WidgetTransport(model);
  el.style.height = `${Number(model.get('height')) || 680}px`;
  const close = show(el, transport, transport.address());
  return () => {
    close();
    transport.close();
  };
}

export default { render };
