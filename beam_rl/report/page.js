// Under the pointer: the step's values, read from the plot's own data. The page is complete without this.
for (const plot of document.querySelectorAll(".plot")) {
  const { at, names, lines } = JSON.parse(plot.dataset.readout);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    let nearest = 0;
    at.forEach((place, i) => { if (Math.abs(place - share) < Math.abs(at[nearest] - share)) nearest = i; });
    tip.replaceChildren(names[nearest]);
    for (const line of lines) {
      if (!line.values[nearest]) continue;
      const row = document.createElement("div");
      row.className = line.class;
      row.textContent = `${line.name}: ${line.values[nearest]}`;
      tip.append(row);
    }
    plot.append(cursor, tip);
    cursor.style.left = `${100 * at[nearest]}%`;
    const left = at[nearest] * box.width + 10;
    tip.style.left = `${left + tip.offsetWidth > box.width ? Math.max(-50, left - 20 - tip.offsetWidth) : left}px`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
