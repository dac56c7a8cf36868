// The tree beside the turns, as `git log --graph` draws one: newest first, a lane for each open branch.

const LANE = 12;
const DOT = 17; // px below the row's top
const LANES = 10; // more branches than this share the last lane
const SVG = "http://www.w3.org/2000/svg";

/**
 * Lanes for turns given newest first, as `at` (the place of each) and `parent` (the place of its parent, 0: none). Each turn:
 * its lane, and as bits the lanes that lead to it and those that pass it by.
 */
export function layout(order, parentOf) {
  const waiting = []; // lane -> the place that it leads to, 0 where the lane is free
  const lanes = { column: new Uint8Array(order.length), from: new Uint16Array(order.length), through: new Uint16Array(order.length) };
  const bit = (lane) => 1 << Math.min(lane, LANES - 1);
  order.forEach((place, n) => {
    let column = -1;
    let from = 0;
    let through = 0;
    waiting.forEach((wanted, lane) => {
      if (wanted === place) {
        if (column < 0) column = lane;
        from |= bit(lane);
        waiting[lane] = 0;
      }
    });
    if (column < 0) column = waiting.indexOf(0);
    if (column < 0) column = waiting.length;
    waiting.forEach((wanted, lane) => wanted && (through |= bit(lane)));
    waiting[column] = parentOf(place);
    while (waiting.length && !waiting[waiting.length - 1]) waiting.pop();
    lanes.column[n] = Math.min(column, LANES - 1);
    lanes.from[n] = from;
    lanes.through[n] = through;
  });
  return lanes;
}

/** Lanes for so many turns of which each goes on from the one before it. */
export function straight(count) {
  const from = new Uint16Array(count).fill(1);
  if (count) from[0] = 0;
  return { column: new Uint8Array(count), from, through: new Uint16Array(count) };
}

const x = (lane) => 8 + lane * LANE;

function line(svg, x1, y1, x2, y2) {
  const element = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) element.setAttribute(name, value);
  svg.append(element);
}

/** The part beside one turn. `ends`: it continues nothing. */
export function draw({ column, from, through, ends, head }) {
  const svg = document.createElementNS(SVG, "svg");
  let widest = column;
  svg.setAttribute("aria-hidden", "true");
  for (let lane = 0; lane < LANES; lane += 1) {
    if (through & (1 << lane)) line(svg, x(lane), 0, x(lane), "100%");
    if (from & (1 << lane)) line(svg, x(lane), 0, x(column), DOT);
    if ((through | from) & (1 << lane)) widest = Math.max(widest, lane);
  }
  if (!ends) line(svg, x(column), DOT, x(column), "100%");
  const dot = document.createElementNS(SVG, "circle");
  dot.setAttribute("cx", x(column));
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
