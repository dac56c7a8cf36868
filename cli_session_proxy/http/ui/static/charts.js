// The cost of the days, today first: a bar each, and below three days the numbers alone. Tables of the same.

import { brief, count, h, money, whole } from "./dom.js";

const FEW = 3; // days

const failed = (day) => day.failed + day.refused;
const read = (row) => row.input_tokens + row.cache_read_tokens + row.cache_write_tokens;

/** What of these: turns, cost, tokens, the share that was read from the cache, and what failed. `name`: how they are told apart. */
export function table(title, name, rows) {
  const cells = (row) => (row.turns ? [whole(row.turns), money(row.cost_usd), brief(read(row)), brief(row.output_tokens),
    read(row) ? `${Math.floor((100 * row.cache_read_tokens) / read(row))} %` : "", failed(row) || ""] : ["", "", "", "", "", ""]);
  const heads = [name, "turns", "cost", "tokens read", "written", "from the cache", "failed or refused"];
  return h("details.sums", null, h("summary", null, title), h("div.table", { tabindex: "0", role: "group", "aria-label": title }, h("table", null,
    h("thead", null, h("tr", null, ...heads.map((one) => h("th", { scope: "col" }, one)))),
    h("tbody", null, ...rows.map((row) => h("tr", null, h("th", { scope: "row" }, row[name]), ...cells(row).map((cell) => h("td", null, cell))))))));
}

/** How much of a budget is used: `$1.20 of $5.00 a day`. */
export function budget({ unit, per, used, limit }) {
  const amount = (number) => (unit === "usd" ? `$${number.toFixed(2)}` : whole(number));
  return `${amount(used)} of ${amount(limit)}${unit === "usd" ? "" : ` ${unit}`} a ${per}${used < limit ? "" : ", used up"}`;
}

/** `days`: today first. */
export function costs(days) {
  const each = days.map((day, at) => ({ ...day, name: at ? day.day : "today", label: at ? String(Number(day.day.slice(8))) : "today" }));
  const lived = each.filter((day) => day.turns);
  const says = (day) => (day.turns ? `${day.name}: ${money(day.cost_usd) || "$0"}, ${count(day.turns, "turn")}` : `${day.name}: no turn`);
  if (lived.length < FEW) {
    return h("p.numbers", null, ...lived.map((day) => h("span", null, h("strong", null, money(day.cost_usd) || "$0"), ` ${day.name}, ${count(day.turns, "turn")}`)));
  }
  const most = Math.max(...days.map((day) => day.cost_usd)) || 1;
  const columns = each.map((day) => {
    const bar = h("div.height");
    bar.style.height = `${(100 * day.cost_usd) / most}%`; // through the CSSOM, which the CSP allows
    return h("div.day", { title: says(day) }, h("div.room", null, bar), h("span", null, day.label));
  });
  return h("figure.chart", { role: "img", "aria-label": `Cost by day, today first: ${lived.map(says).join("; ")}` },
    h("div.axis", null, h("span", null, money(most)), h("span", null, "$0")), h("div.days-drawn", null, ...columns));
}
