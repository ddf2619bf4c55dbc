"use strict";
// All that comes from files is set as text, never as markup.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let chosen = null; // a rank
let last = null;

function made(name, text, kind) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function drawn(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function sized(bytes) {
  let value = bytes;
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    if (value < 1024) break;
    [value, unit] = [value / 1024, larger];
  }
  return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
}

function line(points, x, y) {
  return points.map(([step, bytes], at) =>
    `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(bytes).toFixed(1)}`).join("");
}

function scale(from, to, begin, end) {
  return (value) => begin + (to > from ? (value - from) / (to - from) : 0.5) * (end - begin);
}

// One scale for all ranks, from nothing up, so that they can be compared.
function small(points, highest) {
  const svg = drawn("svg", {class: "small", viewBox: "0 0 144 26", preserveAspectRatio: "none",
                            "aria-hidden": "true"});
  if (points.length) {
    const x = scale(points[0][0], points.at(-1)[0], 1, 143);
    svg.append(drawn("path", {d: line(points, x, scale(0, highest, 25, 1))}));
  }
  return svg;
}

function large(one) {
  const svg = byId("chosen-curve");
  const {width, height} = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const points = one.curve;
  if (!points.length) return;
  const sizes = points.map(([, bytes]) => bytes);
  const lowest = Math.min(...sizes);
  let highest = Math.max(...sizes);
  const bound = one.bound !== null && one.bound < 2 * highest ? one.bound : null;
  if (bound !== null) highest = Math.max(highest, bound);
  const room = Math.max((highest - lowest) / 10, highest / 200, 1);
  const [low, high] = [Math.max(0, lowest - room), highest + room];
  const left = 84;
  const [top, bottom, right] = [12, height - 28, width - 14];
  const x = scale(points[0][0], points.at(-1)[0], left, right);
  const y = scale(low, high, bottom, top);
  for (let tick = 0; tick <= 4; tick++) {
    const bytes = low + (high - low) * tick / 4;
    const level = y(bytes);
    svg.append(drawn("path", {class: "axis", d: `M${left} ${level}H${right}`}));
    svg.append(drawn("text", {x: left - 8, y: level + 4, "text-anchor": "end"}, sized(Math.round(bytes))));
  }
  svg.append(drawn("text", {x: left, y: height - 8}, `step ${points[0][0]}`));
  svg.append(drawn("text", {x: right, y: height - 8, "text-anchor": "end"}, `${points.at(-1)[0]}`));
  if (bound !== null) {
    svg.append(drawn("path", {class: "bound", d: `M${left} ${y(bound)}H${right}`}));
    svg.append(drawn("text", {x: right, y: y(bound) - 5, "text-anchor": "end"}, "bound"));
  }
  svg.append(drawn("path", {d: line(points, x, y)}));
}

function choose(rank) {
  chosen = chosen === rank ? null : rank;
  show(last);
}

function row(one, data, highest) {
  const tr = made("tr", undefined, [one.level, one.rank === chosen ? "chosen" : ""].join(" ").trim());
  tr.dataset.rank = one.rank;
  one.cells.forEach((text, at) => {
    const td = made("td", undefined, data.columns[at].number ? "number" : "");
    if (at === 0) { // the rank: what a keyboard reaches
      const button = made("button", text);
      button.setAttribute("aria-pressed", String(one.rank === chosen));
      td.append(button);
    } else {
      td.textContent = text;
    }
    tr.append(td);
    if (at === 0) tr.append(made("td"));
  });
  tr.children[1].append(small(one.curve, highest));
  tr.addEventListener("click", () => choose(one.rank));
  return tr;
}

function show(data) {
  const focused = document.activeElement?.closest("tr")?.dataset.rank;
  byId("folder").textContent = data.folder;
  document.title = `${data.headline} – tenure top`;
  if (byId("headline").textContent !== data.headline) byId("headline").textContent = data.headline;
  byId("headline").className = data.level ?? "";
  byId("summary").textContent = data.summary ?? "";
  byId("more").textContent = data.more ?? "";
  trouble(data.left_out);
  const titles = made("tr");
  (data.columns ?? []).forEach((column, at) => {
    titles.append(made("th", column.title, column.number ? "number" : ""));
    if (at === 0) titles.append(made("th", "memory"));
  });
  byId("titles").replaceChildren(titles);
  const highest = Math.max(1, ...data.ranks.flatMap((one) => one.curve.map(([, bytes]) => bytes)));
  byId("ranks").replaceChildren(...data.ranks.map((one) => row(one, data, highest)));
  if (focused !== undefined) {
    byId("ranks").querySelector(`tr[data-rank="${focused}"] button`)?.focus({preventScroll: true});
  }
  const one = data.ranks.find(({rank}) => rank === chosen);
  byId("chosen").hidden = !one;
  if (one) {
    byId("chosen-name").textContent = `Memory of rank ${one.rank}`;
    large(one);
  }
}

function trouble(text) {
  byId("trouble").hidden = !text;
  byId("trouble").textContent = text;
}

async function look() {
  let pause = last?.every ?? 1;
  try {
    const wanted = last ? `?sort=${byId("sort").value}` : ""; // at first as the command was given
    const answer = await fetch(`ranks.json${wanted}`);
    const data = await answer.json();
    if (answer.ok) {
      if (!last) byId("sort").value = data.sort;
      last = data;
      pause = data.every;
      show(data);
    } else {
      trouble(data.error);
    }
  } catch {
    trouble("tenure top does not answer: what is shown is what it last said");
  }
  return pause;
}

let timer = 0;
async function follow() {
  clearTimeout(timer);
  const pause = await look();
  clearTimeout(timer);
  timer = setTimeout(follow, 1000 * pause);
}
byId("sort").addEventListener("change", follow);
addEventListener("resize", () => last && show(last));
follow();
