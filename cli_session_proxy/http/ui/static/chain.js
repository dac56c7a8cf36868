// One chain: its turns newest first, as a tree on a timeline, with every link at its turn. Follows what happens.
//
// Of all turns the shape of the tree is known, of those in sight and around it what they are. A turn's place is its number in
// the order of acceptance, from 1.

import { chainPath, follow, get } from "./api.js";
import { budget } from "./charts.js";
import { badge, coloured, count, drawTold, fill, h, money, session, time } from "./dom.js";
import { draw, layout, straight } from "./graph.js";
import { Live } from "./live.js";
import { Rows } from "./rows.js";
import { PAGE, turnsPath } from "./where.js";

const KEPT = 30; // of such pages
const MANY = 2000; // turns of a chain whose newest ones are drawn before all is known
const AGAIN = 2000; // ms until a lost connection is tried again

export class ChainView {
  constructor(section, { onFault, onLive, onTurn, onProgress }) {
    this.section = section;
    this.summary = section.querySelector(".summary");
    this.live = new Live(section.querySelector(".going"), onFault);
    this.empty = section.querySelector(".empty");
    Object.assign(this, { onFault, onLive, onTurn, onProgress });
    this.agentId = null;
    this.order = []; // the places of all turns, as they are listed
    this.rows = new Rows(section, section.querySelector(".list"), {
      keyAt: (at) => this.order[at],
      stateAt: (at) => this.stateAt(at),
      draw: (element, at) => this.drawRow(element, at),
      onDrawn: (from, to) => this.want(from, to),
    });
  }

  /** `turnId`: the turn that is opened beside it. */
  async open(agentId, turnId) {
    if (this.agentId === agentId) return;
    this.close();
    this.agentId = agentId;
    this.section.hidden = false;
    this.turns = new Map(); // place -> turn
    this.pages = new Map(); // number of a page -> asked for, or there
    this.parents = [0]; // place -> the parent's place
    this.marked = new Set(); // places with repairs
    this.order = [];
    this.about = null;
    this.drawn = false; // as it is
    this.fresh = new Set(); // places of turns that have changed since
    this.asks = new Map(); // number of a page -> until it is here
    this.opened = turnId;
    this.empty.hidden = true;
    this.rows.clear();
    this.rows.count = 0;
    this.progress([]);
    this.timeline = h("details.timeline", { hidden: true }, h("summary", null, "Repairs and branches"), h("ol"));
    this.timeline.addEventListener("toggle", () => this.showTimeline());
    this.summarised = null;
    const jump = (words, title, to) => {
      const button = h("button", { type: "button", title }, words);
      button.addEventListener("click", to);
      return button;
    };
    this.jumps = h("span.jumps", { hidden: true }, jump("Newest", "g", () => this.rows.focus(0)), " ",
      jump("First", "G", () => this.rows.focus(this.order.length - 1)));
    fill(this.summary, h("h1", { title: agentId }, agentId), h("p"), this.timeline);
    if (this.stop) this.section.scrollTop = 0;
    this.stop = new AbortController();
    const { signal } = this.stop;
    this.listed = new Promise((done) => (this.onListed = done)); // there is an order, if not the last word on it
    const there = await this.newest(signal, turnId);
    this.onListed();
    if (!signal.aborted) this.tail(signal, there);
  }

  close() {
    if (this.stop) this.stop.abort();
    this.agentId = null;
    this.section.hidden = true;
    this.onLive("");
  }

  // what there is

  /**
   * The newest turns and the shape of all; of a chain that is not drawn yet the turns around `turnId`, where there is one of
   * this id. False where there is no such agent.
   */
  async newest(signal, turnId) {
    const path = chainPath(this.agentId);
    const after = Math.max(0, this.parents.length - 1 - PAGE); // one that waited may have got another parent
    try {
      const ask = () => get(after ? `${path}/tree?after=${after}` : `${path}/tree`, signal);
      const turns = get(turnsPath(this.agentId, turnId), signal);
      const shape = turnId ? null : ask(); // behind a linked turn: it would take the server's time from that one
      if (shape) shape.catch(() => {}); // it is waited for below
      const page = await turns.catch((fault) => (turnId && fault.status === 404 ? get(turnsPath(this.agentId), signal) : Promise.reject(fault)));
      if (signal.aborted) return true;
      if (!this.about && page.total > MANY) this.first(page, turnId);
      const tree = await (shape || ask());
      if (signal.aborted) return true;
      const before = this.drawn && new Map([...this.turns].map(([place, turn]) => [place, JSON.stringify(turn)]));
      this.about = aboutOf(page);
      this.parents.length = Math.min(this.parents.length, after + 1);
      // Both were read a moment apart: what only one knows comes with the next event.
      const total = Math.min(page.total, after + tree.parents.length);
      tree.parents.slice(0, total - after).forEach((parent, n) => (this.parents[after + 1 + n] = parent));
      for (const place of tree.marked) this.marked.add(place);
      this.order = newestFirst(this.parents);
      this.lanes = layout(this.order, (place) => this.parents[place]);
      if (this.drawn) for (const number of this.pages.keys()) this.pages.set(number, "old");
      this.learn(page);
      this.fresh = before ? new Set(page.data.filter((turn) => before.get(turn.number) !== JSON.stringify(turn)).map((turn) => turn.number)) : new Set();
      this.drawn = true;
      this.empty.hidden = true;
      this.renderSummary();
      this.rows.update(this.order.length);
      this.onFault(null);
      return true;
    } catch (fault) {
      if (signal.aborted) return true;
      if (!this.drawn) Object.assign(this, { about: null, parents: [0] }); // what `first` took for granted
      if (fault.status !== 404) this.onFault(fault);
      else {
        this.empty.hidden = false;
        fill(this.empty, "There is no agent of this name. ", h("a", { href: "#/" }, "All agents"));
        return false;
      }
    }
    return true;
  }

  /** These turns of a long chain, before its shape is known: as if each went on from the one before it. */
  first(page, turnId) {
    this.about = aboutOf(page);
    this.parents = [0];
    this.order = [];
    for (let place = 1; place <= page.total; place += 1) this.parents.push(place - 1);
    for (let place = page.total; place > 0; place -= 1) this.order.push(place);
    this.lanes = straight(page.total);
    this.learn(page);
    this.renderSummary();
    const linked = page.data.find((turn) => turn.id === turnId);
    if (linked) this.rows.begin(this.order.length, this.order.indexOf(linked.number));
    else this.rows.update(this.order.length);
    this.onListed();
  }

  learn(page) {
    for (const turn of page.data) {
      this.turns.set(turn.number, turn);
      if (turn.told.some((one) => one.kind !== "branch" && one.kind !== "note")) this.marked.add(turn.number);
    }
    const places = page.data.map((turn) => turn.number);
    for (const number of new Set(places.map(pageOf))) {
      const first = number * PAGE + 1;
      const whole = places.includes(first) && (places.includes(first + PAGE - 1) || places.includes(this.parents.length - 1));
      if (whole) this.pages.set(number, "there");
    }
  }

  /** Ask for the turns at these places of the list, as far as they are not here as they are now. */
  want(from, to) {
    if (!this.agentId) return;
    const numbers = new Set(this.order.slice(from, to).map(pageOf));
    for (const number of numbers) {
      const state = this.pages.get(number);
      if (state !== "there" && state !== "asked") this.asks.set(number, this.ask(number, this.stop.signal));
    }
    for (const [number, state] of this.pages) { // the oldest ones that nobody looks at
      if (this.pages.size <= KEPT) break;
      if (state === "asked" || numbers.has(number)) continue;
      this.pages.delete(number);
      for (let place = number * PAGE + 1; place <= (number + 1) * PAGE; place += 1) this.turns.delete(place);
    }
  }

  async ask(number, signal) {
    const had = this.pages.get(number);
    this.pages.set(number, "asked");
    const from = Math.min((number + 1) * PAGE, this.parents.length - 1);
    try {
      const page = await get(`${chainPath(this.agentId)}/turns?limit=${from - number * PAGE}&from=${from}`, signal);
      if (signal.aborted) return;
      this.pages.set(number, "there");
      this.learn(page);
      this.rows.update(this.order.length);
    } catch (fault) {
      if (signal.aborted) return;
      if (had) this.pages.set(number, had);
      else this.pages.delete(number);
      this.onFault(fault);
    }
  }

  // what happens

  async tail(signal, known) {
    const take = (name, data) => {
      if (name === "turn") this.changed(signal);
      if (name === "progress") this.progress(data.turns);
    };
    while (!known && !signal.aborted) { // its first turn may be on its way
      await new Promise((done) => setTimeout(done, AGAIN));
      known = await this.newest(signal);
    }
    while (!signal.aborted) {
      try {
        this.onLive("live");
        await follow(this.agentId, take, signal);
      } catch (fault) {
        if (signal.aborted) return;
        if (fault.status && fault.status !== 404) this.onFault(fault);
        this.onLive("reconnecting");
        this.progress([]); // what they do by now nobody knows
      }
      await new Promise((done) => setTimeout(done, AGAIN));
      if (!signal.aborted) await this.newest(signal);
    }
  }

  /** An event says that something is new; the list's own rows are asked for, at most one question at a time. */
  changed(signal) {
    if (this.asking) {
      this.askAgain = true;
      return;
    }
    this.asking = (async () => {
      do {
        this.askAgain = false;
        await this.newest(signal);
        if (!signal.aborted && this.opened) this.onTurn(this.opened);
      } while (this.askAgain && !signal.aborted);
      this.asking = null;
    })();
  }

  /** What the turns that run do, and what they have said so far; an opened one says so itself. */
  progress(turns) {
    this.running = turns;
    this.live.show(this.agentId, turns.filter((one) => one.turn_id !== this.opened));
    this.onProgress(turns);
  }

  // how it looks

  href(turnId) {
    return `#/${encodeURIComponent(this.agentId)}/${encodeURIComponent(turnId)}`;
  }

  mark(turnId) {
    this.opened = turnId;
    if (this.running) this.progress(this.running);
    this.rows.update(this.order.length);
  }

  /** Bring an opened turn into sight. Done when it is drawn. */
  async reveal(place) {
    const { listed } = this;
    await listed;
    if (!this.agentId || listed !== this.listed) return;
    const at = this.order.indexOf(place);
    if (at < 0) return;
    this.rows.reveal(at);
    await this.asks.get(pageOf(place));
  }

  renderSummary() {
    const { title, total, cost, links, budgets } = this.about;
    const state = JSON.stringify(this.about);
    if (state === this.summarised) return;
    this.summarised = state;
    const of = (one, ...reasons) => {
      const number = reasons.reduce((sum, reason) => sum + (links[reason] || 0), 0);
      return number > 0 && h("span", null, count(number, one));
    };
    fill(this.summary.querySelector("h1"), title);
    fill(this.summary.querySelector("p"), h("span", null, count(total, "turn")), cost > 0 && h("span", null, money(cost)),
      ...budgets.map((one) => h("span", null, budget(one))),
      of("repair", "rebuilt", "moved"), of("branch", "branched"), this.jumps);
    this.jumps.hidden = total < 10;
    this.timeline.hidden = Object.keys(links).every((reason) => reason === "started");
    if (this.timeline.open) this.showTimeline();
  }

  /** Every link but the plain starts, newest first: where to look when something was forgotten. */
  async showTimeline() {
    if (!this.timeline.open) return;
    const { signal } = this.stop;
    try {
      const { data, numbers } = await get(`${chainPath(this.agentId)}/repairs`, signal);
      const place = (link) => (numbers[link.turn_id] ? `turn ${numbers[link.turn_id]}` : link.turn_id.slice(0, 13));
      const at = (link) => (link.turn_id ? h("a", { href: this.href(link.turn_id), title: link.turn_id }, place(link)) : h("span.quiet", null, "no turn"));
      fill(this.timeline.querySelector("ol"), ...data.map((link) => h("li", null, time(link.at), " ", at(link), drawTold(link))));
    } catch (fault) {
      if (!signal.aborted) this.onFault(fault);
    }
  }

  shapeAt(at) {
    const place = this.order[at];
    const turn = this.turns.get(place);
    return {
      column: this.lanes.column[at], from: this.lanes.from[at], through: this.lanes.through[at],
      ends: !this.parents[place], head: Boolean(turn) && turn.id === this.about.head,
    };
  }

  /** The session of a turn that goes on in another one than the turn before it. */
  changedSession(place) {
    const turn = this.turns.get(place);
    const before = this.turns.get(this.parents[place]);
    return turn.session_id && before && before.session_id && before.session_id !== turn.session_id ? turn.session_id : null;
  }

  stateAt(at) {
    const place = this.order[at];
    const turn = this.turns.get(place);
    return JSON.stringify([turn, this.shapeAt(at), turn && [this.changedSession(place), turn.id === this.opened]]);
  }

  drawRow(row, at) {
    const place = this.order[at];
    const turn = this.turns.get(place);
    const shape = this.shapeAt(at);
    row.classList.toggle("coming", !turn);
    const number = h("span.number", null, `#${place}`);
    if (!turn) {
      row.removeAttribute("href");
      delete row.dataset.turn;
      fill(row, draw(shape), h("div.words", null, h("p.asked.quiet", null, "…"), h("p.answered")), h("div.marks", null, number));
      return;
    }
    const lost = ["refused", "failed", "cancelled"].includes(turn.status);
    const moved = this.changedSession(place);
    const folded = lost && turn.side;
    row.href = this.href(turn.id);
    row.dataset.turn = turn.id;
    row.classList.toggle("open", turn.id === this.opened);
    row.classList.toggle("off", lost || isLost(turn)); // on no path
    row.classList.toggle("folded", folded);
    if (this.fresh.has(place)) row.classList.add("fresh");
    coloured(row, turn.session_id);
    const failure = turn.why && h(turn.status === "failed" ? "span.failed" : "span", null, turn.why);
    fill(
      row,
      draw(shape),
      h("div.words", null,
        folded ? h("p.quiet", null, "side call: ", failure) : [
          h("p.asked", null, turn.asked || "(nothing asked)"),
          h("p.answered", null, turn.answered || failure),
          h("p.facts", null, [turn.model, time(turn.created_at), money(turn.cost_usd)].flatMap((one) => (one ? [h("span", null, one)] : []))),
        ]),
      h("div.marks", null, moved && h("span", null, "new session ", session(moved)), ...badges(turn, shape.head), number),
      !folded && turn.told.length > 0 && h("div.all-told", null, ...turn.told.map(drawTold)),
    );
  }

  /** The place in the list of the next repair behind this one; -1 where there is none. */
  repairAfter(at) {
    for (let next = at + 1; next < this.order.length; next += 1) if (this.marked.has(this.order[next])) return next;
    return -1;
  }
}

const pageOf = (place) => Math.floor((place - 1) / PAGE);

/** An answer that is known not to have reached its client. */
function isLost(turn) {
  return turn.delivery === "undelivered" && ["completed", "requires_action"].includes(turn.status);
}

function aboutOf(page) {
  return { title: page.title, head: page.head, total: page.total, cost: page.cost_usd, links: page.link_counts, budgets: page.budgets };
}

function badges(turn, head) {
  return [head && h("span.badge.head", null, "head"), badge(turn.status), isLost(turn) && h("span.badge", null, "undelivered"),
    (turn.origin === "imported" || turn.origin === "adopted") && h("span.badge", null, turn.origin)];
}

/** Newest first, but a turn always above the one that it continues: one that waited may continue a later one. */
export function newestFirst(parents) {
  const out = [];
  if (parents.every((parent, place) => parent <= place)) { // nearly always
    for (let place = parents.length - 1; place > 0; place -= 1) out.push(place);
    return out;
  }
  const placed = new Uint8Array(parents.length);
  const waiting = new Map(); // parent -> its turns that came before it
  for (let next = 1; next < parents.length; next += 1) {
    const ready = [];
    if (parents[next] && !placed[parents[next]]) waiting.set(parents[next], [...(waiting.get(parents[next]) || []), next]);
    else ready.push(next);
    while (ready.length) {
      const place = ready.shift();
      placed[place] = 1;
      out.push(place);
      ready.unshift(...(waiting.get(place) || []));
      waiting.delete(place);
    }
  }
  return out.reverse();
}
