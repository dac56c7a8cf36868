// What a model writes, as it means it: headings, lists, tables, code, quotes, emphasis and links. Elements are made one by
// one and every text is a text node: whatever is in it, nothing of it is parsed as HTML, and only http links are links.

import { copier, h } from "./dom.js";

// Each alternative ends within a line and a bound, so that no text makes it slow.
const INLINE = /`([^`\n]{1,500})`|\*\*([^*\n]{1,500})\*\*|\*([^*\s][^*\n]{0,500})\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()]{1,1000})\)/g;
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]{0,30})/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const ITEM = /^\s{0,12}([-*+]|\d{1,9}[.)])\s(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const DASHES = /^:?-+:?$/;

/** The elements of a text in Markdown. */
export function markdown(text) {
  const lines = text.split("\n");
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const end = take(lines, at + 1, (one) => !one.trim().startsWith(fence[1]) || one.trim().slice(fence[1].length).trim());
      const code = lines.slice(at + 1, end).join("\n");
      out.push(h("div.code", null, copier(code, "Copy"), h("pre", { "data-language": fence[2] || null, tabindex: "0" }, h("code", null, code))));
      at = end + 1;
    } else if (heading) {
      out.push(h("p.heading", { role: "heading", "aria-level": Math.min(6, heading[1].length + 3) }, ...inline(heading[2].trim())));
      at += 1;
    } else if (RULE.test(line)) {
      out.push(h("hr"));
      at += 1;
    } else if (line.includes("|") && at + 1 < lines.length && cells(lines[at + 1]).every((one) => DASHES.test(one.trim()))) {
      const end = take(lines, at + 2, (one) => one.includes("|"));
      out.push(table(line, lines.slice(at + 2, end)));
      at = end;
    } else if (ITEM.test(line)) {
      const end = take(lines, at, (one) => ITEM.test(one) || /^\s+\S/.test(one));
      out.push(list(lines.slice(at, end)));
      at = end;
    } else if (line.startsWith(">")) {
      const end = take(lines, at, (one) => one.startsWith(">"));
      out.push(h("blockquote", null, ...broken(lines.slice(at, end).map((one) => one.replace(/^> ?/, "")))));
      at = end;
    } else {
      const end = take(lines, at + 1, (one) => one.trim() && !FENCE.test(one) && !HEADING.test(one) && !ITEM.test(one) && !one.startsWith(">"));
      out.push(h("p", null, ...broken(lines.slice(at, end))));
      at = end;
    }
  }
  return out;
}

function take(lines, from, belongs) {
  let end = from;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return Math.max(end, from);
}

function broken(lines) {
  return lines.flatMap((line, n) => (n ? [h("br"), ...inline(line)] : inline(line)));
}

function list(lines) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) items.push([item[2].trim()]);
    else items[items.length - 1].push(line.trim());
  }
  const first = ITEM.exec(lines[0])[1];
  const start = Number.parseInt(first, 10);
  return h(Number.isNaN(start) ? "ul" : "ol", { start: Number.isNaN(start) ? null : start }, ...items.map((item) => h("li", null, ...broken(item))));
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
}

function table(head, rows) {
  const row = (kind, line) => h("tr", null, ...cells(line).map((cell) => h(kind, null, ...inline(cell.trim()))));
  return h("div.table", { tabindex: "0" }, h("table", null, h("thead", null, row("th", head)), h("tbody", null, ...rows.map((line) => row("td", line)))));
}

function inline(text) {
  const out = [];
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, bold, slanted, words, address] = found;
    out.push(text.slice(done, found.index));
    if (code !== undefined) out.push(h("code", null, code));
    else if (bold !== undefined) out.push(h("strong", null, bold));
    else if (slanted !== undefined) out.push(h("em", null, slanted));
    else out.push(h("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, words));
    done = found.index + whole.length;
  }
  out.push(text.slice(done));
  return out.filter((part) => part !== "");
}
