// The peak of one rank by kind and module, as a treemap and as tables.
"use strict";
{
  const colours = { parameter: "#4477aa", gradient: "#66ccee", optimizer: "#228833",
    activation: "#ccbb44", communication: "#aa3377", temporary: "#ee6677", other: "#888888" };

  // A module's path is a branch of the tree.
  function treeOf(rows) {
    const root = { bytes: 0, inside: new Map() };
    for (const [kind, module, bytes] of rows) {
      let node = root;
      root.bytes += bytes;
      for (const word of [kind, ...(module ? module.split(".") : [])]) {
        if (!node.inside.has(word)) node.inside.set(word, { bytes: 0, inside: new Map() });
        node = node.inside.get(word);
        node.bytes += bytes;
      }
    }
    return root;
  }

  // Plotly wants every node with its parent. One that is all of its parent says nothing by itself:
  // the two are drawn as one, kinds aside.
  function nodes(rows) {
    const out = { ids: [], labels: [], parents: [], values: [], tints: [] };
    const add = (node, id, label, parent, kind) => {
      out.ids.push(id); out.labels.push(label); out.parents.push(parent); out.values.push(node.bytes);
      out.tints.push(kind ? colours[kind] : "rgba(0,0,0,0)");
      for (let [word, inner] of node.inside) {
        while (kind && inner.inside.size === 1 && [...inner.inside.values()][0].bytes === inner.bytes) {
          const [next, only] = [...inner.inside][0];
          word = `${word}.${next}`;
          inner = only;
        }
        add(inner, `${id}/${plain(word)}`, plain(word), id, kind || word);
      }
    };
    add(treeOf(rows), "peak", "peak", "", null);
    return out;
  }

  // The cells of a number of bytes, of what share of the peak that is, and of a number of storages.
  function amounts(bytes, count, peak) {
    const share = (100 * bytes / Math.max(1, peak.bytes)).toFixed(1);
    return [bytesText(bytes), `${share} %`, count.toLocaleString("en")].map((text) => [text, "number"]);
  }

  function show(peak) {
    byId("peak-text").textContent = `${bytesText(peak.bytes)} were alive in ${data.unit} ${peak.step} on rank ${peak.rank}.`;
    const { ids, labels, parents, values, tints } = nodes(peak.tree);
    current = (colour) => ({
      traces: [{ type: "treemap", ids, labels, parents, values, branchvalues: "total", maxdepth: 5,
        marker: { colors: tints, line: { width: 1, color: colour("ground") } }, text: values.map(bytesText),
        textinfo: "label+text+percent root", hovertemplate: "%{id}<br>%{text}<extra></extra>",
        pathbar: { visible: true } }],
      layout: { margin: { l: 0, r: 0, t: 24, b: 0 }, uniformtext: { minsize: 9, mode: "hide" } },
    });
    const kinds = new Map();
    for (const [kind, module, bytes, count] of peak.tree) {
      const sum = kinds.get(kind) || { bytes: 0, count: 0, module };
      kinds.set(kind, { ...sum, bytes: sum.bytes + bytes, count: sum.count + count });
    }
    byId("peak-table").tBodies[0].replaceChildren(...[...kinds].sort((a, b) => b[1].bytes - a[1].bytes)
      .map(([kind, sum]) => row([kind], ...amounts(sum.bytes, sum.count, peak), [sum.module || "–", "code"])));
    byId("peak-modules").tBodies[0].replaceChildren(...peak.tree.map(([kind, module, bytes, count]) =>
      row([kind], [module || "–", "code"], ...amounts(bytes, count, peak))));
  }

  let current = null;
  const choice = byId("peak-rank");
  if (data.peaks.length === 0) {
    choice.closest("p").hidden = true;
    byId("peak-plot").hidden = true;
    byId("peak-table").closest(".wide").hidden = true;
    byId("peak-modules").closest("details").hidden = true;
    byId("peak-text").textContent = "Storages were only counted: record with --level trace to see them.";
  } else {
    data.peaks.forEach((peak, at) => choice.append(element("option", { value: at }, `${peak.rank}`)));
    const highest = data.peaks.reduce((best, peak, at) => (peak.bytes > data.peaks[best].bytes ? at : best), 0);
    choice.value = highest;
    choice.closest("p").hidden = data.peaks.length === 1;
    show(data.peaks[highest]);
    const draw = plot("peak-plot", (colour) => current(colour));
    choice.addEventListener("change", () => { show(data.peaks[choice.value]); draw(); });
  }
}
