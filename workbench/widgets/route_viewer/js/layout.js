// Small helpers: elements, canvases for any screen, colours, ticks.

const INK = "#1c2430";
const MUTED = "#5d6876";
const FAINT = "#aab4c0";
const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
const SMALL = FONT.replace("12px", "11px");

function element(tag, properties = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

function labelled(text, control) {
  return element("label", { className: "rv-field" }, [text, control]);
}

function button(text, title, act) {
  const made = element("button", { type: "button", textContent: text, title });
  made.setAttribute("aria-label", title);
  made.addEventListener("click", act);
  return made;
}

/** A canvas of the given CSS size, sharp on any screen; `label` is read out. */
function makeCanvas(width, height, label, className) {
  const canvas = element("canvas", { className, tabIndex: 0, role: "img" });
  canvas.setAttribute("aria-label", label);
  resize(canvas, width, height);
  return canvas;
}

function resize(canvas, width, height) {
  const scale = Math.max(1, window.devicePixelRatio || 1);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.dataset.scale = scale;
}

/** A cleared 2D context whose unit is the CSS pixel. */
function clear(canvas) {
  const context = canvas.getContext("2d");
  const scale = Number(canvas.dataset.scale);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.font = SMALL;
  context.textBaseline = "middle";
  return context;
}

/** Width and height of a canvas in CSS pixels. */
function extentOf(canvas) {
  return [canvas.width / canvas.dataset.scale, canvas.height / canvas.dataset.scale];
}

function write(context, text, x, y, { align = "left", color = INK, font = SMALL, turn = 0 } = {}) {
  context.save();
  context.translate(x, y);
  context.rotate(turn);
  context.font = font;
  context.textAlign = align;
  context.fillStyle = color;
  context.fillText(text, 0, 0);
  context.restore();
}

function line(context, x0, y0, x1, y1, color, width = 1) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function rgbOf(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

/** Colour of an approximate pair at 0, of an exact one at 255. */
function rampOf(low, high) {
  const [from, to] = [rgbOf(low), rgbOf(high)];
  const ramp = new Uint8Array(256 * 3);
  for (let n = 0; n < 256; n++) {
    for (let c = 0; c < 3; c++) ramp[3 * n + c] = Math.round(from[c] + ((to[c] - from[c]) * n) / 255);
  }
  return ramp;
}

/** An image of rows x columns pixels, painted by `color(index) -> [r, g, b]` offset into a table. */
function imageOf(rows, columns, table, indexAt) {
  const image = new ImageData(columns, rows);
  for (let n = 0; n < rows * columns; n++) {
    const from = 3 * indexAt(n);
    image.data[4 * n] = table[from];
    image.data[4 * n + 1] = table[from + 1];
    image.data[4 * n + 2] = table[from + 2];
    image.data[4 * n + 3] = 255;
  }
  const made = new OffscreenCanvas(columns, rows);
  made.getContext("2d").putImageData(image, 0, 0);
  return made;
}

/** The hatch of a class, so that it is known without its colour. */
function hatchOf(context, look) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = look.edge;
  pen.lineWidth = 1.2;
  pen.beginPath();
  if (look.hatch.startsWith("/") || look.hatch.startsWith("x")) {
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 8);
      pen.lineTo(shift + 8, 0);
    }
  }
  if (look.hatch.startsWith("x")) {
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 0);
      pen.lineTo(shift + 8, 8);
    }
  }
  pen.stroke();
  if (look.hatch.startsWith(".")) {
    pen.fillRect(1, 1, 2, 2);
    pen.fillRect(5, 5, 2, 2);
  }
  return context.createPattern(tile, "repeat");
}

/** Round numbers between two bounds, at most `most` of them. */
function ticks(low, high, most, whole = false) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  if (whole) step = Math.max(1, step);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9; n++) found.push(n * step);
  return found;
}
