// What was said, found by its words: under the agents whose names fit, with filters, each hit a link that can be shared.

import { get } from "./api.js";
import { badge, count, fill, h, money, time } from "./dom.js";

const SOON = 200; // ms after the last key until it is looked for
const FIELDS = ["status", "since", "model", "min_cost"];
const PART = { input: "asked", output: "answered", tools: "tools", metadata: "metadata" };

export class SearchView {
  /** `onAsk(query)` is told what is wanted whenever somebody changes it. */
  constructor(section, box, { onFault, onAsk }) {
    this.section = section;
    this.box = box;
    this.form = section.querySelector("form");
    this.says = section.querySelector(".says");
    this.list = section.querySelector(".list");
    this.onFault = onFault;
    this.asked = 0;
    const ask = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => onAsk(this.query()), SOON);
    };
    box.addEventListener("input", ask);
    this.form.addEventListener("input", ask);
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** What is wanted, as the address carries it. */
  query() {
    const query = new URLSearchParams();
    if (this.box.value.trim()) query.set("q", this.box.value);
    for (const name of FIELDS) if (this.form.elements[name].value.trim()) query.set(name, this.form.elements[name].value.trim());
    if (this.form.elements.repaired.checked) query.set("repaired", "1");
    return query;
  }

  async open(query) {
    this.section.hidden = false;
    if (document.activeElement !== this.box) this.box.value = query.get("q") || "";
    for (const name of FIELDS) {
      const field = this.form.elements[name];
      if (document.activeElement !== field) field.value = query.get(name) || "";
    }
    this.form.elements.repaired.checked = query.get("repaired") === "1";
    const asked = ++this.asked;
    this.section.setAttribute("aria-busy", "true");
    try {
      let found;
      do {
        found = await get(`/v1/search?${query}`);
        if (asked !== this.asked) return;
        this.draw(found);
      } while (found.indexed.done < found.indexed.total);
      this.onFault(null);
    } catch (fault) {
      if (asked === this.asked) this.onFault(fault);
    } finally {
      if (asked === this.asked) this.section.setAttribute("aria-busy", "false");
    }
  }

  close() {
    clearTimeout(this.timer);
    this.asked += 1;
    this.section.hidden = true;
    this.box.value = "";
    this.onFault(null);
  }

  draw({ data, agents, turns, one_shots: shots, indexed }) {
    const hits = data.filter((hit) => hit.kind !== "agent"); // those stand above, with all that is known of them
    const folded = shots ? `, ${count(shots, "one-shot")} among them` : "";
    const among = `${count(agents, "agent")} (${count(turns, "turn")}${folded})`;
    const reading = indexed.done < indexed.total && ` Still indexing: ${Math.floor((100 * indexed.done) / indexed.total)} %.`;
    fill(this.says, hits.length ? `${count(hits.length, "hit")} in ${among}.` : `None of ${among} has it.`, reading);
    fill(this.list, ...hits.map(drawHit));
    if (hits.length) this.list.firstChild.firstChild.tabIndex = 0;
  }

  // as a list for the keyboard (see `Rows`)

  get count() {
    return this.list.children.length;
  }

  get hasFocus() {
    return this.list.contains(document.activeElement);
  }

  activePlace() {
    return [...this.list.children].findIndex((item) => item.contains(document.activeElement));
  }

  focus(place) {
    for (const item of this.list.children) item.firstChild.tabIndex = -1;
    const row = this.list.children[place].firstChild;
    row.tabIndex = 0;
    row.focus();
  }
}

function drawHit(hit) {
  const row = h("a.row", { href: hit.page.replace("/ui", ""), tabindex: "-1", "data-turn": hit.turn_id, "data-kind": hit.kind },
    h("p", null, h("strong", null, hit.agent_id), ` #${hit.number} `,
      hit.kind === "session" && h("span", null, "session ", h("code", null, hit.session_id), " "),
      hit.kind === "turn" && h("code", null, hit.turn_id, " "),
      badge(hit.status), " ",
      h("span.quiet", null, hit.model, " ", money(hit.cost_usd), " "), time(hit.at)),
    hit.snippet.length > 0 && h("p", null, h("span.quiet", null, `${PART[hit.part]}: `),
      ...hit.snippet.map((piece) => (piece.found ? h("mark", null, piece.text) : piece.text))));
  return h("li", null, row);
}
