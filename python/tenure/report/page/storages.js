// The storages, in pages: search in all texts of a row, sort by any column.
"use strict";
{
  const { columns, texts, total } = data.storages;
  const many = columns.id.length, page = 50;
  const words = new Set(["kind", "op", "module", "site", "device"]);
  const shown = [["bytes", "bytes"], ["kind", "kind"], ["module", "module or parameter"], ["op", "operator"],
    ["site", "line"], ["born", "born"], ["died", "died"], ["device", "device"], ["rank", "rank"], ["id", "id"]];
  const small = texts.map((text) => text.toLowerCase());
  let order = Array.from({ length: many }, (_, i) => i), found = order, first = 0;
  let by = "bytes", down = true;

  // Texts are compared once each, not once for every storage that has them.
  const places = new Int32Array(texts.length);
  texts.map((_, i) => i).sort((a, b) => (small[a] < small[b] ? -1 : small[a] > small[b] ? 1 : 0))
    .forEach((text, place) => { places[text] = place; });
  const value = (name, i) => {
    const one = columns[name][i];
    if (words.has(name)) return places[one];
    return name === "died" && one < 0 ? Infinity : one;
  };

  function sort() {
    const sign = down ? -1 : 1;
    const values = Array.from({ length: many }, (_, i) => value(by, i));
    order = order.slice().sort((a, b) => (values[a] === values[b] ? a - b : sign * (values[a] < values[b] ? -1 : 1)));
  }

  function search() {
    const wanted = byId("storages-search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const alive = byId("storages-alive").checked;
    const hits = wanted.map((word) => small.map((text) => text.includes(word)));
    const has = (i, hit, word) => [...words].some((name) => hit[columns[name][i]]) || String(columns.id[i]) === word;
    found = order.filter((i) => (!alive || columns.died[i] < 0) && hits.every((hit, n) => has(i, hit, wanted[n])));
    first = 0;
  }

  function cells(i) {
    return shown.map(([name]) => {
      const one = columns[name][i];
      if (name === "bytes") return [bytesText(one), "number"];
      if (name === "died") return [one < 0 ? "alive" : one, "number"];
      if (words.has(name)) return [texts[one] || "–", name === "kind" || name === "device" ? "" : "code"];
      return [one, "number"];
    });
  }

  function show() {
    const end = Math.min(first + page, found.length);
    byId("storages-table").tBodies[0].replaceChildren(...found.slice(first, end).map((i) => row(...cells(i))));
    const bytes = found.reduce((sum, i) => sum + columns.bytes[i], 0);
    const cut = total > many ? ` of ${total.toLocaleString("en")}; the page has those alive and the largest` : "";
    byId("storages-text").textContent = `${found.length.toLocaleString("en")} storages, ${bytesText(bytes)}${cut}`;
    byId("storages-page").textContent = found.length ? `${first + 1} to ${end}` : "none";
    byId("storages-less").disabled = first === 0;
    byId("storages-more").disabled = end >= found.length;
    for (const head of byId("storages-table").tHead.rows[0].cells) {
      const mine = head.dataset.column === by;
      head.setAttribute("aria-sort", mine ? (down ? "descending" : "ascending") : "none");
      head.lastChild.textContent = mine ? (down ? " ↓" : " ↑") : "";
    }
  }

  const heads = shown.map(([name, label]) => {
    const button = element("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      down = by === name ? !down : name === "bytes";
      by = name;
      sort(); search(); show();
    });
    return element("th", { scope: "col", "data-column": name }, button, element("span", { "aria-hidden": "true" }));
  });
  byId("storages-table").tHead.append(element("tr", {}, ...heads));
  let waiting = 0;
  byId("storages-search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { search(); show(); }, 120);
  });
  byId("storages-alive").addEventListener("change", () => { search(); show(); });
  byId("storages-less").addEventListener("click", () => { first = Math.max(0, first - page); show(); });
  byId("storages-more").addEventListener("click", () => { first += page; show(); });
  sort(); search(); show();
}
