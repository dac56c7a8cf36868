// One chain: its turns newest first, as a tree on a timeline, with every link at its turn. Follows what happens.

import { chainPath, follow, get } from "./api.js";
import { coloured, count, fill, h, MEANING, money, REPAIRS, session, time } from "./dom.js";
import { draw, layout } from "./graph.js";

const PAGE = 100;
const BULK = 1000; // when everything is wanted
const AGAIN = 2000; // ms until a lost connection is tried again

export class ChainView {
  constructor(section, { onFault, onLive, onTurn }) {
    this.section = section;
    this.summary = section.querySelector(".summary");
    this.list = section.querySelector(".list");
    this.more = section.querySelector(".more");
    this.empty = section.querySelector(".empty");
    Object.assign(this, { onFault, onLive, onTurn });
    this.agentId = null;
    this.more.addEventListener("click", () => this.older());
    new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && this.older(), {
      root: section, rootMargin: "600px",
    }).observe(this.more);
  }

  async open(agentId) {
    if (this.agentId === agentId) return;
    this.close();
    this.agentId = agentId;
    this.section.hidden = false;
    this.turns = []; // newest first
    this.known = new Map(); // id -> {turn, element, drawn}
    this.next = null;
    this.loading = null;
    this.about = null;
    this.opened = null;
    this.empty.hidden = true;
    fill(this.list);
    this.timeline = h("details.timeline", { hidden: true }, h("summary", null, "Links and repairs"), h("ol"));
    this.timeline.addEventListener("toggle", () => this.showTimeline());
    this.summarised = null;
    fill(this.summary, h("h1", { title: agentId }, agentId), h("p"), this.timeline);
    this.stop = new AbortController();
    const { signal } = this.stop;
    if ((await this.load(PAGE, signal)) && !signal.aborted) this.tail(signal);
  }

  close() {
    if (this.stop) this.stop.abort();
    this.agentId = null;
    this.section.hidden = true;
    this.more.hidden = true;
    this.onLive("");
  }

  // what there is

  /** False where there is no such agent. */
  async load(limit, signal) {
    const before = this.next ? `&before=${this.next}` : "";
    try {
      const page = await get(`${chainPath(this.agentId)}/turns?limit=${limit}${before}`, signal);
      if (signal.aborted) return;
      this.take(page);
      for (const turn of page.data) this.learn(turn);
      this.next = page.next;
      this.render();
      this.onFault(null);
    } catch (fault) {
      if (signal.aborted) return true;
      if (fault.status !== 404) this.onFault(fault);
      else {
        this.empty.hidden = false;
        fill(this.empty, "There is no agent of this name. ", h("a", { href: "#/" }, "All agents"));
        return false;
      }
    }
    return true;
  }

  take(page) {
    this.about = { head: page.head, total: page.total, links: page.link_counts, since: page.created_at };
  }

  async older(limit = PAGE) {
    if (!this.next || this.loading) return this.loading;
    this.loading = this.load(limit, this.stop.signal).finally(() => (this.loading = null));
    return this.loading;
  }

  /** Everything down to the first turn. */
  async all() {
    while (this.next && this.agentId) await this.older(BULK);
  }

  learn(turn) {
    const known = this.known.get(turn.id);
    if (known) {
      Object.assign(known.turn, turn);
      return false;
    }
    this.known.set(turn.id, { turn, element: null, item: null, drawn: null });
    this.turns.push(turn);
    return true;
  }

  // what happens

  async tail(signal) {
    while (!signal.aborted) {
      try {
        this.onLive("live");
        await follow(this.agentId, () => this.changed(signal), signal);
      } catch (fault) {
        if (signal.aborted) return;
        if (fault.status && fault.status !== 404) this.onFault(fault);
        this.onLive("reconnecting");
      }
      await new Promise((done) => setTimeout(done, AGAIN));
      await this.newest(signal);
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
      } while (this.askAgain && !signal.aborted);
      this.asking = null;
    })();
  }

  async newest(signal) {
    try {
      const page = await get(`${chainPath(this.agentId)}/turns?limit=${PAGE}`, signal);
      if (signal.aborted) return;
      const before = new Set(this.known.keys());
      this.take(page);
      for (const turn of page.data) this.learn(turn);
      if (this.turns.length === page.data.length) this.next = page.next;
      this.render(before);
      if (this.opened && page.data.some((turn) => turn.id === this.opened)) this.onTurn(this.opened);
    } catch (fault) {
      if (!signal.aborted) this.onFault(fault);
    }
  }

  // how it looks

  mark(turnId) {
    this.opened = turnId;
    for (const row of this.list.querySelectorAll(".row.open")) row.classList.remove("open");
    const known = this.known && this.known.get(turnId);
    if (known && known.element) known.element.classList.add("open");
  }

  render(before = null) {
    this.renderSummary();
    this.turns = newestFirst(this.turns);
    const numbers = this.turns.map((turn) => turn.number).sort((a, b) => b - a);
    this.turns.forEach((turn, at) => (turn.number = numbers[at]));
    const graph = layout(this.turns);
    let at = this.list.firstChild;
    this.turns.forEach((turn, n) => {
      const known = this.known.get(turn.id);
      const drawn = JSON.stringify([turn, graph[n], this.about.head === turn.id]);
      if (known.drawn !== drawn) {
        if (!known.element) {
          known.element = h("a.row", { tabindex: "-1" });
          known.item = h("li", null, known.element);
        }
        this.drawRow(known.element, turn, graph[n]);
        if (before && known.drawn !== null) known.element.classList.add("fresh");
        known.drawn = drawn;
      }
      if (before && !before.has(turn.id)) known.element.classList.add("fresh");
      if (known.item !== at) this.list.insertBefore(known.item, at);
      else at = at.nextSibling;
    });
    if (this.turns.length && !this.list.querySelector('[tabindex="0"]')) this.list.firstChild.firstChild.tabIndex = 0;
    this.more.hidden = !this.next;
  }

  renderSummary() {
    const { total, links } = this.about;
    const state = JSON.stringify(this.about);
    if (state === this.summarised) return;
    this.summarised = state;
    const chips = Object.entries(links).map(([reason, number]) =>
      h("span.reason", { "data-reason": reason, title: MEANING[reason] }, `${reason} ${number.toLocaleString("en")}`));
    fill(this.summary.querySelector("h1"), this.agentId);
    fill(this.summary.querySelector("p"), count(total, "turn"), " ", ...chips);
    this.timeline.hidden = Object.keys(links).every((reason) => reason === "started");
    if (this.timeline.open) this.showTimeline();
  }

  /** Every link but the plain starts, newest first: where to look when something was forgotten. */
  async showTimeline() {
    if (!this.timeline.open) return;
    const { signal } = this.stop;
    try {
      const { data } = await get(`${chainPath(this.agentId)}/repairs`, signal);
      fill(this.timeline.querySelector("ol"), ...data.map((link) => h("li", null, time(link.at), " ", this.turnOf(link), drawLink(link))));
    } catch (fault) {
      if (!signal.aborted) this.onFault(fault);
    }
  }

  turnOf(link) {
    if (!link.turn_id) return h("span.quiet", null, "no turn");
    const known = this.known.get(link.turn_id);
    const href = `#/${encodeURIComponent(this.agentId)}/${encodeURIComponent(link.turn_id)}`;
    return h("a", { href, title: link.turn_id }, known ? `turn ${known.turn.number}` : link.turn_id.slice(0, 13));
  }

  /** The number of a turn that is in the list. */
  numberOf(turnId) {
    const known = this.known && this.known.get(turnId);
    return known ? known.turn.number : null;
  }

  drawRow(row, turn, at) {
    row.href = `#/${encodeURIComponent(this.agentId)}/${encodeURIComponent(turn.id)}`;
    row.dataset.turn = turn.id;
    row.classList.toggle("open", turn.id === this.opened);
    row.classList.toggle("repaired", turn.says.length > 0 || turn.links.some((link) => REPAIRS.has(link.reason)));
    row.classList.toggle("off", ["refused", "failed", "cancelled"].includes(turn.status) || isLost(turn)); // on no path
    coloured(row, turn.session_id);
    const head = this.about.head === turn.id;
    fill(
      row,
      draw(at, { head }),
      h("div.words", null,
        h("p.asked", null, turn.asked || "(nothing asked)"),
        h("p.answered", null, turn.answered || (turn.error ? turn.error : "")),
        ...turn.links.map(drawLink),
        ...turn.says.map(drawSaid),
      ),
      h("div.facts", null,
        h("span", null, `#${turn.number} `, time(turn.created_at)),
        h("span", null, ...badges(turn, head)),
        h("span.quiet", null, session(turn.session_id), " ", money(turn.cost_usd)),
      ),
    );
  }
}

/** An answer that is known not to have reached its client. */
function isLost(turn) {
  return turn.delivery === "undelivered" && ["completed", "requires_action"].includes(turn.status);
}

function badges(turn, head) {
  const out = [];
  if (head) out.push(h("span.badge.head", null, "head"));
  if (turn.status !== "completed") out.push(h("span.badge", { "data-state": turn.status }, turn.status.replace("_", " ")));
  if (turn.continuity) out.push(h("span.badge", { "data-continuity": turn.continuity }, turn.continuity));
  else if (turn.origin === "imported" || turn.origin === "adopted") out.push(h("span.badge", null, turn.origin));
  if (isLost(turn)) out.push(h("span.badge", { "data-state": "failed" }, "undelivered"));
  if (turn.attempts > 1) out.push(h("span.badge", { "data-state": "failed" }, `${turn.attempts} attempts`));
  return out;
}

/** A link with what it says: what broke, and how it was mended. */
export function drawLink(link) {
  const from = link.from_session && link.from_session !== link.to_session;
  return h("p.link", { "data-reason": link.reason },
    h("strong", null, link.reason), " ", link.says, " ", from && [session(link.from_session), " → "], session(link.to_session));
}

/** What happened to a turn beside its links: the same look as a repair. */
export function drawSaid(text) {
  return h("p.link", { "data-reason": "mended" }, h("strong", null, "mended"), " ", text);
}

/** Newest first, but a turn always above the one that it continues: one that waited may continue a later one. */
export function newestFirst(turns) {
  const waiting = new Map(); // parent -> its turns that came before it
  const known = new Set(turns.map((turn) => turn.id));
  const placed = new Set();
  const out = [];
  const take = (turn) => {
    if (known.has(turn.parent_id) && !placed.has(turn.parent_id)) {
      waiting.set(turn.parent_id, [...(waiting.get(turn.parent_id) || []), turn]);
      return;
    }
    placed.add(turn.id);
    out.push(turn);
    const held = waiting.get(turn.id) || [];
    waiting.delete(turn.id);
    held.forEach(take);
  };
  [...turns].sort((a, b) => a.seq - b.seq).forEach(take);
  return out.reverse();
}
