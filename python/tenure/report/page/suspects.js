// Who holds what grows: each suspect unfolds to its retention paths; cycles are drawn as cycles.
"use strict";
{
  const drawn = "http://www.w3.org/2000/svg";
  function shape(name, attributes, text) {
    const made = document.createElementNS(drawn, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const shortened = (text) => (text.length > 44 ? `${text.slice(0, 43)}…` : text);

  // Hops around a ring, each with an arrow to the next and the last with one to the first.
  function ring(hops) {
    const high = Math.max(150, 34 * hops.length), x = 330, y = high / 2 + 16, r = high / 2 - 12;
    const picture = shape("svg", { class: "cycle", viewBox: `0 0 660 ${high + 32}`, role: "img",
      "aria-label": `cycle: ${hops.map((hop) => hop.text).join(" → ")} → and back` });
    const at = (turn) => [x + r * Math.sin(turn), y - r * Math.cos(turn)];
    const part = (2 * Math.PI) / hops.length;
    hops.forEach((hop, i) => {
      const [x0, y0] = at(i * part + 9 / r), [x1, y1] = at((i + 1) * part - 9 / r);
      picture.append(shape("path", { d: `M${x0} ${y0}A${r} ${r} 0 ${part > Math.PI ? 1 : 0} 1 ${x1} ${y1}` }));
      const turn = (i + 1) * part - 9 / r;
      const tip = (a) => `${x1 - 7 * Math.cos(turn + a)} ${y1 - 7 * Math.sin(turn + a)}`;
      picture.append(shape("path", { d: `M${tip(-.5)}L${x1} ${y1}L${tip(.5)}` }));
    });
    hops.forEach((hop, i) => {
      const [cx, cy] = at(i * part);
      picture.append(shape("circle", { cx, cy, r: 5, class: hop.leak ? "leaks" : "" }));
      const right = Math.sin(i * part) >= -0.01;
      picture.append(shape("text", { x: cx + (right ? 12 : -12), y: cy + 4,
        "text-anchor": right ? "start" : "end" }, shortened(hop.text)));
    });
    return picture;
  }

  function path(hops) {
    return element("ol", { class: "path" }, ...hops.map((hop, i) => {
      const item = element("li", hop.leak ? { class: "leaks" } : {}, `${i ? "└ " : ""}${hop.text}`);
      if (hop.leak) item.append(element("span", { class: "grows" }, "  ← grows here"));
      return item;
    }));
  }

  function places(suspect, number) {
    const head = ["rank", "grows a " + data.unit, "bytes", "storages", "operator", "module", "phase", "line"];
    const table = element("table", {}, element("caption", {}, "Where they were made"),
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...suspect.places.map((place) => row([place.rank], [bytesText(place.grows), "number"],
        [bytesText(place.bytes), "number"], [place.count.toLocaleString("en"), "number"],
        [place.op, "code"], [place.module, "code"], [place.phase], [place.site, "code"]))));
    return element("div", { class: "wide", tabindex: "0", role: "region",
      "aria-label": `Where they were made, suspect ${number}` }, table);
  }

  data.suspects.forEach((suspect, i) => {
    const inside = element("div");
    if (suspect.advice) inside.append(element("p", { class: "advice" }, suspect.advice));
    if (suspect.paths.length === 0) inside.append(element("p", { class: "note" }, suspect.lines.slice(1).join(" ").trim()));
    for (const hops of suspect.paths) {
      inside.append(element("p", { class: "note" }, suspect.cycle ? "held in a cycle" : "held by"), path(hops));
      if (suspect.cycle) inside.append(ring(hops));
    }
    inside.append(places(suspect, i + 1));
    const box = element("details", i === 0 ? { open: "" } : {}, element("summary", {}, suspect.lines[0]), inside);
    byId("suspects-list").append(box);
  });
  if (data.suspects.length === 0) {
    byId("suspects-list").append(element("p", { class: "note" }, "Nothing that grows was found held."));
  }
  if (data.cycles.length > 0) {
    const inside = element("div");
    for (const cycle of data.cycles) {
      const free = cycle.collectable ? "Python's collector frees them" : "nothing frees them";
      const text = `rank ${cycle.rank}: ${bytesText(cycle.bytes)} in ${cycle.count.toLocaleString("en")}, ${free}`;
      inside.append(element("p", { class: "note" }, text), ring(cycle.text.split(" → ").map((hop) => ({ text: hop }))));
    }
    byId("cycles-list").append(element("details", {}, element("summary", {}, "Cycles that nothing holds"), inside));
  }
}
