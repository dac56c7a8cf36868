// Small charts, drawn here: bars for the days, each with its number as a title, and the whole as words for who cannot see it.

import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 280;
const HEIGHT = 64;
const GAP = 3;

function part(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/**
 * A bar a day. `series` are [{name, of(day)}], one upon the other; `says(day)` is a bar's title. `most` is the top of the
 * scale where it is known.
 */
export function bars(title, days, series, says, { most = 0, total = "" } = {}) {
  const sum = (day) => series.reduce((all, one) => all + one.of(day), 0);
  const top = Math.max(most, ...days.map(sum)) || 1;
  const wide = WIDTH / days.length;
  const svg = part("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  days.forEach((day, at) => {
    let bottom = HEIGHT;
    const bar = part("g", {}, part("title", {}, document.createTextNode(`${day.day}: ${says(day)}`)));
    bar.append(part("rect", { x: at * wide, y: 0, width: wide, height: HEIGHT, class: "back" }));
    series.forEach((one, n) => {
      const high = (one.of(day) / top) * (HEIGHT - 2);
      bottom -= high;
      bar.append(part("rect", { x: at * wide + GAP / 2, y: bottom, width: wide - GAP, height: high, class: `series-${n}` }));
    });
    svg.append(bar);
  });
  const table = h("table", null, h("tbody", null, ...days.map((day) => h("tr", null, h("th", { scope: "row" }, day.day), h("td", null, says(day))))));
  const keys = series.length > 1 && h("p.legend", null, ...series.map((one, n) => h(`span.key.series-${n}`, null, one.name)));
  return h("figure.chart", null, h("figcaption", null, h("span", null, title), " ", h("strong", null, total)), svg, keys,
    h("details", null, h("summary", null, "day by day"), h("div.table", { tabindex: "0", role: "group", "aria-label": `${title}, day by day` }, table)));
}
