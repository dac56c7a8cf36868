// The tree beside the turns, as `git log --graph` draws one: newest first, a lane for each open branch.

const LANE = 12;
const DOT = 17; // px below the row's top
const LANES = 10; // more branches than this share the last lane
const SVG = "http://www.w3.org/2000/svg";

/** Lanes for turns given newest first. Each: {column, from: [...], through: [...], ends} in lane numbers. */
export function layout(turns) {
  const waiting = []; // lane -> the id that it leads to, null where the lane is free
  return turns.map((turn) => {
    const from = [];
    waiting.forEach((id, lane) => id === turn.id && from.push(lane));
    let column = from.length ? from[0] : waiting.indexOf(null);
    if (column < 0) column = waiting.length;
    from.forEach((lane) => (waiting[lane] = null));
    const through = [];
    waiting.forEach((id, lane) => id !== null && lane !== column && through.push(lane));
    waiting[column] = turn.parent_id;
    while (waiting.length && waiting[waiting.length - 1] === null) waiting.pop();
    return { column, from, through, ends: turn.parent_id === null };
  });
}

const x = (lane) => 8 + Math.min(lane, LANES - 1) * LANE;

function line(svg, x1, y1, x2, y2) {
  const element = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) element.setAttribute(name, value);
  svg.append(element);
}

export function draw(at, { head }) {
  const svg = document.createElementNS(SVG, "svg");
  const widest = Math.max(at.column, ...at.from, ...at.through, 0);
  svg.setAttribute("aria-hidden", "true");
  for (const lane of at.through) line(svg, x(lane), 0, x(lane), "100%");
  for (const lane of at.from) line(svg, x(lane), 0, x(at.column), DOT);
  if (!at.ends) line(svg, x(at.column), DOT, x(at.column), "100%");
  const dot = document.createElementNS(SVG, "circle");
  dot.setAttribute("cx", x(at.column));
  dot.setAttribute("cy", DOT);
  dot.setAttribute("r", head ? 6 : 4.5);
  if (head) dot.setAttribute("class", "head");
  svg.append(dot);
  const place = document.createElement("div");
  place.className = "graph";
  place.style.width = `${x(widest) + 10}px`;
  place.append(svg);
  return place;
}
