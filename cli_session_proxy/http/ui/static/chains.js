// The list of agents: the last active at once, all others behind them, and what changes every other second.

import { get } from "./api.js";
import { ago, bytes, count, fill, h, money, stateWords, whole } from "./dom.js";
import { Rows } from "./rows.js";
import { AGENTS, FIRST } from "./where.js";

const EVERY = 2000;
const MOST = 20000; // agents that are listed
const WHOLE = 60000; // ms after which all of them are asked for again
const PREVIEWS = 20; // newest words that are asked for at once

const ORDER = {
  active: (a, b) => b.last_at - a.last_at,
  name: (a, b) => a.agent_id.localeCompare(b.agent_id, undefined, { numeric: true }),
  turns: (a, b) => b.turns - a.turns,
  cost_usd: (a, b) => b.cost_usd - a.cost_usd,
  repairs: (a, b) => b.repairs - a.repairs,
  failures: (a, b) => b.failures - a.failures,
  bytes: (a, b) => b.bytes - a.bytes,
};
const ONLY = {
  all: () => true,
  trouble: (row) => row.failures > 0 || row.repairs > 0 || row.state === "cancelled",
  repaired: (row) => row.repairs > 0,
  failed: (row) => row.failures > 0,
  running: (row) => row.state === "running" || row.state === "queued",
  waiting: (row) => row.state === "requires_action",
};

export class Chains {
  constructor(section, search, { onFault }) {
    this.empty = section.querySelector(".empty");
    this.tools = section.querySelector(".tools");
    this.totals = section.querySelector(".totals");
    this.search = search;
    this.onFault = onFault;
    this.known = new Map(); // agent id -> row
    this.folded = null; // how many one-shots of the last day have no row, and what they cost
    this.shown = [];
    this.words = new Map(); // agent id -> {of, asked, answered}
    this.open = null;
    this.asked = 0;
    this.told = false; // the proxy has said which agents there are
    this.more = null; // whether the rest of a long list is still on its way
    this.wholeAt = -Infinity; // never
    this.rows = new Rows(section, section.querySelector(".list"), {
      keyAt: (place) => this.shown[place].agent_id,
      stateAt: (place) => this.stateOf(this.shown[place]),
      draw: (element, place) => this.drawRow(element, this.shown[place]),
      onDrawn: () => this.preview(),
    });
    this.tools.addEventListener("input", () => this.draw());
    this.tools.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Done when the first of them are drawn. */
  async start() {
    const again = async () => {
      if (!document.hidden) await this.refresh();
      setTimeout(again, EVERY);
    };
    await again();
  }

  async refresh() {
    const asked = ++this.asked;
    try {
      const { data, one_shots: folded } = await get(AGENTS);
      if (asked !== this.asked) return; // a later question is under way
      // Who was active since the last of these, and is not among them, is gone.
      const last = data.length === FIRST ? data[data.length - 1].last_at : 0;
      const there = new Set(data.map((row) => row.agent_id));
      for (const [name, row] of this.known) if (row.last_at > last && !there.has(name)) this.known.delete(name);
      for (const row of data) this.known.set(row.agent_id, row);
      this.folded = folded;
      this.told = true;
      this.more ??= data.length === FIRST;
      this.draw();
      this.onFault(null);
      if (data.length === FIRST && performance.now() - this.wholeAt > WHOLE) this.whole().catch(this.onFault);
    } catch (fault) {
      this.onFault(fault);
    }
  }

  async whole() {
    this.wholeAt = performance.now();
    const { data } = await get(`/v1/chains?limit=${MOST}`);
    const fresh = new Map(data.map((row) => [row.agent_id, row]));
    this.known = fresh;
    this.more = false;
    this.draw();
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const { only, order } = this.tools.elements;
    const home = document.body.dataset.view === "chains";
    const wanted = home ? ONLY[only.value] : ONLY.all;
    this.shown = [...this.known.values()].filter((row) => wanted(row) && `${row.agent_id} ${this.titleOf(row.agent_id)}`.toLowerCase().includes(words));
    this.shown.sort(home ? ORDER[order.value] : ORDER.active);
    this.rows.update(this.shown.length);
    this.empty.hidden = this.shown.length > 0 || !this.told;
    fill(this.empty, this.known.size ? (words ? `No agent matches “${this.search.value.trim()}”.` : "No agent matches.")
      : "No chains yet: send a request, or try cli-session-proxy chat.");
    const sum = (name) => this.shown.reduce((all, row) => all + row[name], 0);
    const some = this.shown.length < this.known.size ? ` of ${whole(this.known.size)}` : "";
    const folded = this.folded && this.folded.count ? ` · ${count(this.folded.count, "one-shot")} today, ${money(this.folded.cost_usd)}` : "";
    const some_ = (number, noun) => number > 0 && count(number, noun);
    const says = [`${this.more ? "first " : ""}${count(this.shown.length, "agent")}${some}`, count(sum("turns"), "turn"), some_(sum("repairs"), "repair"),
      some_(sum("failures"), "failure"), money(sum("cost_usd")), bytes(sum("bytes"))].filter(Boolean).join(", ") + folded;
    if (this.totals.textContent !== says) fill(this.totals, says);
  }

  mark(agentId) {
    this.open = agentId;
    this.draw();
  }

  stateOf(row) {
    const words = this.words.get(row.agent_id);
    return JSON.stringify([row, row.agent_id === this.open, words, ago(row.last_at).textContent]);
  }

  /** What somebody calls it: the first question, where nobody gave it a name. */
  titleOf(agentId) {
    return this.words.get(agentId)?.title || agentId;
  }

  drawRow(element, row) {
    element.href = `#/${encodeURIComponent(row.agent_id)}`;
    element.dataset.agent = row.agent_id;
    element.classList.toggle("open", row.agent_id === this.open);
    const state = stateWords(row.state || "new");
    const words = this.words.get(row.agent_id);
    fill(
      element,
      h("span.name", { title: row.agent_id }, this.titleOf(row.agent_id)),
      h("span.state", { "data-state": row.state }, [state, row.address && row.host].filter(Boolean).join(" · ")),
      h("span.number", null, count(row.turns, "turn")),
      h("span.number.quiet.repaired", null, row.repairs > 0 && count(row.repairs, "repair")),
      h("span.number.lost", null, row.failures > 0 && !(row.failures === 1 && ["failed", "refused"].includes(row.state)) && `${row.failures} failed or refused`),
      h("span.number", null, money(row.cost_usd)),
      h("span.number.quiet", null, bytes(row.bytes)),
      ago(row.last_at),
      h("span.preview", null, words && words.asked !== words.title && h("span", null, words.asked), words && words.answered && h("span.quiet", null, ` → ${words.answered}`)),
    );
  }

  /** The newest words of the agents in sight, where they are not known as they are now. */
  async preview() {
    if (this.previewing) return;
    this.previewing = true;
    try {
      for (;;) {
        const lacking = this.shown.slice(this.rows.from, this.rows.to).filter((row) => {
          const words = this.words.get(row.agent_id);
          return row.turns > 0 && (!words || words.of !== `${row.turns} ${row.state}`);
        }).slice(0, PREVIEWS);
        if (!lacking.length) return;
        const query = new URLSearchParams(lacking.map((row) => ["agent", row.agent_id]));
        const { data } = await get(`/v1/previews?${query}`);
        const found = new Map(data.map((one) => [one.agent_id, one]));
        for (const row of lacking) this.words.set(row.agent_id, { asked: "", answered: "", title: "", ...found.get(row.agent_id), of: `${row.turns} ${row.state}` });
        this.rows.update(this.shown.length);
      }
    } catch (fault) {
      this.onFault(fault);
    } finally {
      this.previewing = false;
    }
  }
}
