// What the first page says before the list: does it work, who needs somebody, what runs just now, and what the days cost.

import { get } from "./api.js";
import { budget, costs, table } from "./charts.js";
import { ago, bytes, coarse, count, fill, h, money } from "./dom.js";

const EVERY = 3000;

export class Overview {
  constructor(place, { onFault, onLive }) {
    Object.assign(this, { place, onFault, onLive });
    this.drawn = {};
    this.fault = null; // what the status line says instead of a status
  }

  /** The fault that somebody reads here. */
  get says() {
    return this.place.offsetParent ? this.fault : null;
  }

  start() {
    const again = async () => {
      if (!document.hidden && document.body.dataset.view === "chains") await this.refresh();
      setTimeout(again, EVERY);
    };
    again();
  }

  async refresh(path = "/v1/overview") {
    const home = () => document.body.dataset.view === "chains";
    try {
      const told = await get(path);
      this.show("status", told.status, () => status(told));
      this.show("needs", [told.attention, told.more, Math.floor(told.at / 60)], () => needs(told));
      this.show("running", [told.running, Math.floor(told.at / 3)], () => running(told));
      this.show("days", [told.days, told.models, told.keys, told.budgets, told.store_bytes, told.processes], () => days(told));
      this.place.hidden = false;
      this.fault = null;
      this.onFault(null);
      if (home()) this.onLive("live");
    } catch (fault) {
      this.fault = fault.message;
      this.onFault(fault);
      if (home()) this.onLive("reconnecting");
      this.show("status", fault.message, () => works(fault.message)); // what it said before may hold no longer
    }
  }

  /** Drawn anew only when something else is to be seen: what is focused or unfolded stays. */
  show(name, state, draw) {
    const key = JSON.stringify(state);
    if (this.drawn[name] === key) return;
    this.drawn[name] = key;
    const place = this.place.querySelector(`.${name}`);
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    const link = document.activeElement && place.contains(document.activeElement) && document.activeElement.getAttribute("href");
    fill(place, draw());
    [...place.querySelectorAll("details")].forEach((one, at) => (one.open = Boolean(open[at])));
    if (link) for (const one of place.querySelectorAll("a")) if (one.getAttribute("href") === link) one.focus();
  }
}

const to = (agentId, turnId) => `#/${encodeURIComponent(agentId)}${turnId ? `/${encodeURIComponent(turnId)}` : ""}`;
const usd = (dollars) => money(dollars) || "$0";

function works(problem) {
  return h("strong", { "data-good": String(problem === null) }, problem === null ? "Working" : `Not working: ${problem}`);
}

function status({ status: now }) {
  const { cli, login, running: turns, waiting, remembered: seen, plan, put_off: off } = now;
  const going = [count(turns, "turn"), " running", waiting > 0 && `, ${waiting} waiting`, off > 0 && `, ${off} until a limit is over`];
  const forgotten = seen && seen.sent < seen.turns;
  return [
    works(now.problem),
    login && h("span", null, login),
    cli && h("span", null, cli),
    h("span", null, ...going),
    h("span", null, `${usd(now.cost_today)} today, ${usd(now.cost_week)} in seven days`),
    ...(plan ? plan.windows : []).map((one) => h("span.window", { "data-good": String(one.status !== "rejected"), title: resets(one) },
      `${WINDOWS[one.name] || one.name.replaceAll("_", " ")}: ${one.used === null ? plan.status : `${Math.round(100 * one.used)} % used`}`)),
    seen && h("span.kept", { "data-good": String(!forgotten), title: `in the newest request of ${count(seen.agents, "agent")}` },
      `${forgotten ? "something is missing" : "nothing forgotten"}: ${seen.sent} of ${count(seen.turns, "turn")} sent`),
  ];
}

const WINDOWS = { five_hour: "five hours", seven_day: "week" };
const resets = (one) => (one.resets_at === null ? "" : `reset at ${new Date(1000 * one.resets_at).toLocaleString()}`);

const REASONS = {
  stuck: (n) => `${n} ${n === 1 ? "keeps" : "keep"} failing`, failed: (n) => `${n} failed last`, refused: (n) => `${n} refused again and again`, failures: (n) => `${n} failed within a day`,
  long: (n) => `${n} ${n === 1 ? "takes" : "take"} long`, results: (n) => `${n} ${n === 1 ? "waits" : "wait"} for results`,
};

function needs({ attention, more }) {
  if (!attention.length) return [];
  const counts = Object.entries(REASONS).map(([code, says]) => [attention.filter((one) => one.code === code).length, says]);
  return [
    h("h2", null, "Need a look: ", counts.filter(([n]) => n).map(([n, says]) => says(n)).join(", ")),
    h("ul", null, ...attention.map((one) => h("li", { "data-code": one.code },
      h("a", { href: to(one.agent_id, one.turn_id) }, one.title), " ", h("span", null, one.says), " ", ago(one.at)))),
    more > 0 && h("p.quiet", null, `and ${count(more, "other")}`),
  ];
}

function running({ running: turns, at }) {
  if (!turns.length) return [];
  return [
    h("h2", null, "Just now"),
    h("ul", null, ...turns.map((one) => h("li", null, h("a", { href: to(one.agent_id, one.turn_id) }, one.title), " ",
      h("span", null, one.says), " ", h("span.quiet", null, coarse(at - one.at)), one.text && h("p.said-so-far", null, one.text)))),
  ];
}

function days({ days: each, models, keys, budgets, owner, turns, is_whole: isWhole, store_bytes: size, processes, timezone }) {
  const whose = keys ? (keys.length > 1 ? " of all keys" : "") : ` of key ${owner}`;
  const newest = [...each].reverse();
  const { busy, warm, spare, memory } = processes;
  return [
    turns > 0 && h("h2", null, `Cost by day${whose} `, h("small.quiet", null, `days in ${timezone}${isWhole ? "" : "; only the newest turns"}`)),
    turns > 0 && costs(newest),
    budgets.length > 0 && h("ul.budgets", null, ...budgets.map((one) => h("li", { "data-good": String(one.used < one.limit) },
      `Budget of key ${one.name}: ${budget(one)}`))),
    turns > 0 && table("By day", "day", newest),
    models.length > 0 && table("By model", "model", models),
    keys && keys.length > 1 && table("By key", "key", keys),
    h("details.sums", null, h("summary", null, count(busy + warm + spare, "process", "processes"), memory > 0 && `, ${bytes(memory)}`, size > 0 && `, store ${bytes(size)}`),
      h("ul", null, ...processes.each.map((one) => h("li", null, `pid ${one.pid}, ${one.state}`,
        one.memory > 0 && `, ${bytes(one.memory)}`, " ", one.agent_id && h("a", { href: to(one.agent_id) }, one.agent_id), " ",
        h("span.quiet", null, "since "), ago(one.since))))),
  ];
}
