// The list of chains: asked for again every other second while the page is looked at.

import { get } from "./api.js";
import { bytes, count, fill, h, money, time } from "./dom.js";

const EVERY = 2000;
const LIMIT = 500;

export class Chains {
  constructor(section, search, { onFault }) {
    this.list = section.querySelector(".list");
    this.empty = section.querySelector(".empty");
    this.search = search;
    this.onFault = onFault;
    this.rows = [];
    this.drawn = new Map();
    this.open = null;
    this.asked = 0;
  }

  start() {
    const again = async () => {
      if (!document.hidden) await this.refresh();
      setTimeout(again, EVERY);
    };
    again();
  }

  async refresh() {
    const asked = ++this.asked;
    const words = this.search.value.trim();
    const query = new URLSearchParams({ limit: LIMIT, ...(words ? { search: words } : {}) });
    try {
      const { data } = await get(`/v1/chains?${query}`);
      if (asked !== this.asked) return; // a later question is under way
      this.rows = data.filter((row) => row.agent_id.toLowerCase().includes(words.toLowerCase()));
      this.draw(words);
      this.onFault(null);
    } catch (fault) {
      this.onFault(fault);
    }
  }

  draw(words) {
    const shown = this.rows.slice(0, LIMIT);
    const wanted = [];
    const kept = new Map();
    for (const row of shown) {
      const state = JSON.stringify(row) + (row.agent_id === this.open);
      let entry = this.drawn.get(row.agent_id);
      if (!entry) {
        const element = h("a.row", { tabindex: "-1" });
        entry = { state: null, element, item: h("li", null, element) };
      }
      if (entry.state !== state) {
        drawRow(entry.element, row, row.agent_id === this.open);
        entry.state = state;
      }
      kept.set(row.agent_id, entry);
      wanted.push(entry.item);
    }
    this.drawn = kept;
    place(this.list, wanted);
    if (!this.list.querySelector('[tabindex="0"]') && wanted.length) wanted[0].firstChild.tabIndex = 0;
    this.empty.hidden = wanted.length > 0;
    fill(this.empty, words ? `No agent matches “${words}”.` : "No chains yet: send a request, or try cli-session-proxy chat.");
  }

  mark(agentId) {
    this.open = agentId;
    this.draw(this.search.value.trim());
  }
}

/** Put the elements in this order without touching those that stand right: focus and scrolling stay. */
function place(list, wanted) {
  const keep = new Set(wanted);
  for (const child of [...list.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((element, at) => {
    if (list.children[at] !== element) {
      const focused = element.contains(document.activeElement) && document.activeElement;
      list.insertBefore(element, list.children[at] || null);
      if (focused) focused.focus();
    }
  });
}

function drawRow(element, row, open) {
  element.href = `#/${encodeURIComponent(row.agent_id)}`;
  element.dataset.agent = row.agent_id;
  element.classList.toggle("open", open);
  const state = row.state || "new";
  fill(
    element,
    h("span.name", { title: row.agent_id }, row.agent_id),
    h("span.state", { "data-state": state }, state.replace("_", " ")),
    h("span.number", null, count(row.turns, "turn")),
    h("span.number", null, count(row.sessions, "session")),
    row.repairs ? h("span.number.repaired", null, count(row.repairs, "repair")) : h("span.number.quiet", null, "no repairs"),
    h("span.number", null, money(row.cost_usd)),
    h("span.number.quiet", null, bytes(row.bytes)),
    time(row.last_at),
  );
}
