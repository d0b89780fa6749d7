// Joins the listings with each other and with the timelines: what belongs to a line is marked in all of them.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const panel = document.getElementById("code");
  if (!panel) return;
  const rows = (selector) => [...panel.querySelectorAll(selector)];
  const sources = rows("[data-source]");
  const instructions = rows("[data-chain]");
  const listings = rows(".listing");
  const ofLine = new Map(rows("[data-ptx]").map((row) => [Number(row.dataset.ptx), row]));
  let marked = [];
  let pinned = null;

  const chainOf = (row) => data.chains[row.dataset.chain];

  function related(row) {
    if (row.dataset.source !== undefined) {
      const line = Number(row.dataset.source);
      return [row, ...instructions.filter((each) => chainOf(each).includes(line))];
    }
    const alike = instructions.filter((each) => each.dataset.chain === row.dataset.chain
      && (each === row || each.dataset.ptx === undefined || row.dataset.ptx === undefined));
    return [row, ...alike, ...chainOf(row).map((line) => sources[line])];
  }

  function mark(row) {
    marked.forEach((each) => each.classList.remove("hit", "at"));
    marked = row ? related(row) : [];
    marked.forEach((each) => each.classList.add("hit"));
    if (row) row.classList.add("at");
  }

  // Every listing but the row's own is moved to the first of its lines that is marked; of the source, the innermost.
  function show(row, all) {
    mark(row);
    for (const listing of listings) {
      const inside = marked.filter((each) => listing.contains(each));
      if (!inside.length || (!all && listing.contains(row))) continue;
      const target = inside.includes(row) ? row : inside[0];
      const box = target.getBoundingClientRect(), frame = listing.getBoundingClientRect();
      listing.scrollTop += box.top - frame.top - listing.clientHeight / 3;
    }
  }

  panel.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tbody tr");
    if (row && (row.dataset.source !== undefined || row.dataset.chain !== undefined)) mark(row);
  });
  panel.addEventListener("pointerleave", () => mark(pinned));
  panel.addEventListener("click", (event) => {
    const row = event.target.closest("[data-source], [data-chain]");
    if (!row) return;
    pinned = row;
    show(row, false);
  });

  // --- Timelines ---

  for (const [name, lines] of Object.entries(data.timelines)) {
    const picture = document.querySelector(`svg.${name}`);
    if (!picture || !lines.length) continue;
    const view = picture.viewBox.baseVal;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", 8);
    cursor.setAttribute("y2", view.height - 40);
    picture.append(cursor);
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: lines.length - 1, value: 0, className: "cursor-slider" });
    slider.setAttribute("aria-label", `executed instruction of ${picture.querySelector("title").textContent}`);
    const readout = document.createElement("p");
    readout.className = "readout";
    readout.textContent = "Point at the timeline, or move the slider: which instruction is executed there.";
    const area = picture.closest(".scroll");
    area.after(slider, readout);
    slider.style.width = `${100 * (data.end - data.begin)}%`;
    slider.style.marginLeft = `${100 * data.begin}%`;

    const place = (index) => view.width * (data.begin + (data.end - data.begin) * (index + 0.5) / lines.length);

    function at(index) {
      slider.value = index;
      cursor.setAttribute("x1", place(index));
      cursor.setAttribute("x2", place(index));
      cursor.classList.add("on");
      const row = ofLine.get(lines[index]);
      readout.replaceChildren(`Instruction ${index} of ${lines.length}: `);
      if (!row) return null;
      const text = document.createElement("code");
      text.textContent = row.querySelector("code").textContent;
      const from = chainOf(row).map((line) => data.lines[line]);
      readout.append(text, ` (PTX line ${lines[index]}${from.length ? `; ${from.join(", from ")}` : ""})`);
      show(row, true);
      return row;
    }

    const indexAt = (event) => {
      const box = picture.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width - data.begin) / (data.end - data.begin);
      return share < 0 || share >= 1 ? null : Math.floor(share * lines.length);
    };
    picture.addEventListener("pointermove", (event) => {
      const index = indexAt(event);
      if (index !== null) at(index);
    });
    picture.addEventListener("click", (event) => {
      const index = indexAt(event);
      if (index === null) return;
      pinned = at(index);
      panel.scrollIntoView();
    });
    slider.addEventListener("input", () => {
      pinned = at(Number(slider.value));
      area.scrollLeft = place(Number(slider.value)) / view.width * picture.clientWidth - area.clientWidth / 2;
    });
  }
})();
