// What the page's parts share: the data, how bytes are written, how elements and plots are made.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function bytesText(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (size >= unit) return `${(value / unit).toFixed(size >= 100 * unit ? 0 : 1)} ${name}`;
  }
  return `${value} B`;
}

// An element with text, never with markup: names come from the program that was watched.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A name in a plot: Plotly reads tags and entities in its texts, and makes links and images of them.
function plain(text) {
  return text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function row(...cells) {
  return element("tr", {}, ...cells.map(([text, kind]) =>
    element("td", kind ? { class: kind } : {}, String(text))));
}

const plots = [];

// Draws now, and again when the colours of the page change.
function plot(id, make) {
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const { traces, layout } = make(colour);
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true,
      ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)" };
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    Plotly.react(id, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
      margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest",
      transition: { duration: still ? 0 : 150 }, ...layout,
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  };
  plots.push(draw);
  draw();
  return draw;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((f) => f()));
