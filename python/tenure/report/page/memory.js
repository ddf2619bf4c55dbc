// Memory over steps: a curve a rank, or a band and the curves of those that stand out.
"use strict";
{
  const names = { held: "held by storages", peak: "most held in the step", os: "the system's view" };
  const { curves, bands } = data.memory;
  const wanted = new Set(["held"]);
  const single = curves.length === 1 && !bands;
  if (single) wanted.add("peak").add("os");
  const palette = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888",
    "#ee8866", "#44bb99", "#bbcc33", "#99ddff", "#ffaabb"];
  const dashes = { held: "solid", peak: "dot", os: "dash" };

  function band(name, colour) {
    const { steps } = bands, { low, middle, high } = bands[name];
    const line = { x: steps, mode: "lines", hoverinfo: "skip", showlegend: false };
    return [
      { ...line, y: high, line: { width: 0 } },
      { ...line, y: low, line: { width: 0 }, fill: "tonexty", fillcolor: "rgba(120,130,150,.25)",
        showlegend: true, name: `5 to 95 % of ranks: ${names[name]}` },
      { ...line, y: middle, hoverinfo: "all", showlegend: true, name: `median: ${names[name]}`,
        line: { color: colour("faint"), dash: dashes[name] } },
    ];
  }

  const top = data.ranks.reduce((best, rank) => (rank.peak > best.peak ? rank : best), data.ranks[0]);
  // The system's view counts more than storages, so their peak has no place beside it alone.
  const isMarked = () => top && top.peak > 0 && (wanted.has("held") || wanted.has("peak"));
  const draw = plot("memory-plot", (colour) => {
    const traces = [];
    for (const name of wanted) {
      if (bands) traces.push(...band(name, colour));
      curves.forEach((curve, at) => traces.push({
        x: curve.steps, y: curve[name], mode: curve.steps.length > 1 ? "lines" : "markers",
        name: single ? names[name] : `rank ${curve.rank}: ${names[name]}`,
        line: { color: palette[(single ? Object.keys(names).indexOf(name) : at) % palette.length],
          dash: dashes[name] },
      }));
    }
    const showlegend = traces.length > 1, marked = isMarked();
    if (marked) traces.push({ x: [top.peak_step], y: [top.peak], mode: "markers", hoverinfo: "skip",
      showlegend: false, marker: { color: colour("text"), size: 6 } });
    const layout = {
      xaxis: { title: { text: plain(data.unit), standoff: 4 } },
      yaxis: { tickformat: ".3~s", ticksuffix: "B", rangemode: "tozero" },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, showlegend,
      annotations: marked ? [{ x: top.peak_step, y: top.peak, showarrow: true,
        arrowcolor: colour("faint"), ax: 0, ay: -28,
        text: `peak ${bytesText(top.peak)}${single ? "" : `, rank ${top.rank}`}` }] : [],
    };
    return { traces, layout };
  });
  for (const name of Object.keys(names)) {
    const box = element("input", { type: "checkbox" });
    box.checked = wanted.has(name);
    box.addEventListener("change", () => {
      if (box.checked) wanted.add(name); else wanted.delete(name);
      draw();
    });
    byId("memory-choice").append(element("label", {}, box, ` ${names[name]}`));
  }
  if (top) {
    const many = bands ? ` ${data.ranks.length} ranks: the band holds nine tenths of them, and curves are those that stand out.` : "";
    byId("memory-text").textContent =
      `The most was held on rank ${top.rank} in ${data.unit} ${top.peak_step}: ${bytesText(top.peak)}.${many}`;
  }
}
