"use strict";
// The values under the pointer, read back from the picture's own points.
for (const svg of document.querySelectorAll("svg")) {
  const lines = [...svg.querySelectorAll("polyline")];
  const output = svg.closest("figure").querySelector("output");
  const [x0, x1] = svg.dataset.x.split(" ").map(Number), [y0, y1] = svg.dataset.y.split(" ").map(Number);
  const left = 52, right = 352, top = 8, bottom = 168;
  svg.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / svg.clientWidth) * 360;
    const found = lines.map((line) => {
      let nearest = line.points[0];
      for (const point of line.points) if (Math.abs(point.x - at) < Math.abs(nearest.x - at)) nearest = point;
      return nearest;
    });
    if (!found.length) return;
    const step = Math.round(x0 + ((found[0].x - left) / (right - left)) * (x1 - x0));
    const values = found.map((p) => (y0 + ((bottom - p.y) / (bottom - top)) * (y1 - y0)).toPrecision(3));
    output.textContent = `${step}: ${values.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => { output.textContent = ""; });
}
const buttons = [...document.querySelectorAll("button[data-split]")];
for (const button of buttons) {
  button.addEventListener("click", () => {
    for (const other of buttons) other.classList.toggle("on", other === button);
    for (const row of document.querySelectorAll("tr[data-split]"))
      row.hidden = Boolean(button.dataset.split) && row.dataset.split !== button.dataset.split;
  });
}
buttons[0]?.classList.add("on");
