// What the first page says before the list: who needs a look, what runs just now, and what the last days cost.

import { get } from "./api.js";
import { bars } from "./charts.js";
import { ago, brief, bytes, count, fill, h, money, whole } from "./dom.js";

const EVERY = 3000;

export class Overview {
  constructor(place, { onFault }) {
    this.place = place;
    this.onFault = onFault;
    this.parts = {
      needs: place.querySelector(".needs"), running: place.querySelector(".running"), days: place.querySelector(".days"),
    };
    this.drawn = {};
  }

  start() {
    const again = async () => {
      if (!document.hidden && document.body.dataset.view === "chains") await this.refresh();
      setTimeout(again, EVERY);
    };
    again();
  }

  async refresh() {
    try {
      const told = await get("/v1/overview");
      this.show("needs", [told.attention, told.more, Math.floor(told.at / 60)], () => needs(told));
      this.show("running", [told.running, told.processes, told.cli, Math.floor(told.at / 10)], () => running(told));
      this.show("days", [told.days, told.models, told.keys, told.store_bytes], () => days(told));
      this.place.hidden = false;
      this.onFault(null);
    } catch (fault) {
      this.onFault(fault);
    }
  }

  /** Drawn anew only when something else is to be seen: what is focused or unfolded stays. */
  show(name, state, draw) {
    const key = JSON.stringify(state);
    if (this.drawn[name] === key) return;
    this.drawn[name] = key;
    const place = this.parts[name];
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    const link = document.activeElement && place.contains(document.activeElement) && document.activeElement.getAttribute("href");
    fill(place, draw());
    [...place.querySelectorAll("details")].forEach((one, at) => (one.open = Boolean(open[at])));
    if (link) for (const one of place.querySelectorAll("a")) if (one.getAttribute("href") === link) one.focus();
  }
}

const to = (agentId, turnId) => `#/${encodeURIComponent(agentId)}${turnId ? `/${encodeURIComponent(turnId)}` : ""}`;

function needs({ attention, more }) {
  if (!attention.length) return [h("h2", null, "Need a look"), h("p.quiet", null, "No agent does.")];
  return [
    h("h2", null, "Need a look"),
    h("ul", null, ...attention.map((one) => h("li", { "data-code": one.code },
      h("a", { href: to(one.agent_id, one.turn_id) }, one.agent_id), " ", h("span", null, one.says), " ", ago(one.at)))),
    more > 0 && h("p.quiet", null, `and ${count(more, "other")}`),
  ];
}

function running({ running: turns, processes, cli, at }) {
  const { busy, warm, spare, memory } = processes;
  const weigh = memory ? `, ${bytes(memory)}` : "";
  return [
    h("h2", null, "Just now"),
    turns.length ? h("ul", null, ...turns.map((one) => h("li", null, h("a", { href: to(one.agent_id, one.turn_id) }, one.agent_id), " ",
      h("span", null, one.says), " ", h("span.quiet", null, `for ${Math.max(0, Math.round(at - one.since))} s`),
      one.text && h("p.said-so-far", null, one.text.slice(-200))))) : h("p.quiet", null, "No turn runs."),
    h("details", null, h("summary", null, `${count(busy + warm + spare, "process", "processes")}: ${busy} busy, ${warm} warm, ${spare} spare${weigh}`),
      h("ul", null, ...processes.each.map((one) => h("li", null, `pid ${one.pid}, ${one.state}`,
        one.memory > 0 && `, ${bytes(one.memory)}`, " ", one.agent_id && h("a", { href: to(one.agent_id) }, one.agent_id), " ",
        h("span.quiet", null, "since "), ago(one.since))))),
    cli && h("p.quiet", null, cli),
  ];
}

const total = (days, name) => days.reduce((sum, day) => sum + day[name], 0);
const read = (row) => row.input_tokens + row.cache_read_tokens + row.cache_write_tokens;
const share = (row) => (read(row) ? (100 * row.cache_read_tokens) / read(row) : 0);

/** A line for each of these, the dearest first. `name` is what they are told apart by. */
function table(title, name, rows) {
  const tokens = (row) => `${brief(read(row))} read, ${brief(row.output_tokens)} written`;
  return h("details.models", null, h("summary", null, title), h("div.table", { tabindex: "0", role: "group", "aria-label": title }, h("table", null,
    h("thead", null, h("tr", null, ...[name, "turns", "cost", "tokens", "cache", "failed"].map((one) => h("th", { scope: "col" }, one)))),
    h("tbody", null, ...rows.map((row) => h("tr", null, h("th", { scope: "row" }, row[name]), h("td", null, whole(row.turns)),
      h("td", null, money(row.cost_usd)), h("td", null, tokens(row)), h("td", null, `${share(row).toFixed(0)} %`), h("td", null, row.failed + row.refused)))))));
}

const KEYS = 4; // with a colour of their own

/** The days as the keys have them, the dearest ones one by one. `name`: what of them; `words`: a number of it. */
function byKey(title, name, words, days, keys) {
  const rest = keys.slice(KEYS);
  const others = { key: `${count(rest.length, "other")}`, daily: { [name]: days.map((_, at) => rest.reduce((sum, one) => sum + one.daily[name][at], 0)) } };
  const shown = rest.length ? [...keys.slice(0, KEYS), others] : keys;
  const each = days.map(({ day }, at) => ({ day, at }));
  const of = (one, at) => one.daily[name][at];
  const says = ({ at }) => shown.filter((one) => of(one, at)).map((one) => `${one.key} ${words(of(one, at))}`).join(", ") || "nothing";
  const whole = shown.reduce((sum, one) => sum + one.daily[name].reduce((all, value) => all + value, 0), 0);
  return bars(title, each, shown.map((one) => ({ name: one.key, of: ({ at }) => of(one, at) })), says, { total: words(whole) });
}

function days({ days: each, models, keys, owner, turns, is_whole: isWhole, store_bytes: size }) {
  const all = { input_tokens: total(each, "input_tokens"), cache_read_tokens: total(each, "cache_read_tokens"), cache_write_tokens: total(each, "cache_write_tokens") };
  const tokens = (row) => `${brief(read(row))} read, ${brief(row.output_tokens)} written`;
  const whose = keys ? (keys.length > 1 ? " of all keys" : "") : ` of key ${owner}`;
  const facts = [count(turns, "turn"), size ? `store ${bytes(size)}` : ""].filter(Boolean).join(", ");
  return [
    h("h2", null, `The last ${count(each.length, "day")}${whose} `, h("small.quiet", null, `${facts}; days in UTC${isWhole ? "" : "; only the newest turns"}`)),
    h("div.charts", null,
      bars("Cost", each, [{ name: "cost", of: (day) => day.cost_usd }], (day) => money(day.cost_usd), { total: money(total(each, "cost_usd")) }),
      bars("Tokens", each, [{ name: "read", of: read }, { name: "written", of: (day) => day.output_tokens }], tokens,
        { total: brief(read(all) + total(each, "output_tokens")) }),
      bars("Read from the cache", each, [{ name: "share", of: share }], (day) => `${share(day).toFixed(0)} %`, { most: 100, total: `${share(all).toFixed(0)} %` }),
      bars("Repairs and failures", each, [{ name: "repairs", of: (day) => day.repairs }, { name: "failed or refused", of: (day) => day.failed + day.refused }],
        (day) => `${count(day.repairs, "repair")}, ${day.failed} failed, ${day.refused} refused`,
        { total: `${count(total(each, "repairs"), "repair")}, ${total(each, "failed") + total(each, "refused")} failed` })),
    models.length > 0 && table("By model", "model", models),
    keys && keys.length > 1 && table("By key", "key", keys),
    keys && keys.length > 1 && h("div.charts", null, byKey("Cost by key", "cost_usd", money, each, keys), byKey("Tokens by key", "tokens", brief, each, keys)),
  ];
}
