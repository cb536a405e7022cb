// Decisions of block pairs, from bits or from coded scores, pooled to the screen. No drawing here.
// The files of this folder are one ES module, put together in order by widget.py.

const APPROXIMATE = 0;
const ROUTED = 1; // exact by its score, or by its bit where there are no scores
const DIAGONAL = 2; // exact for its place in the band alone
const SINK = 3; // exact for its place in the sink alone
const UNDECIDED = 4; // tau and the score lie between the same two stops
const CLASSES = 5;
const SHARE = Float32Array.of(0, 1, 1, 1, 0.5); // what a pair adds to a pooled pixel

function bytesOf(value) {
  if (!value) return new Uint8Array(0);
  return new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
}

/** A synced array of bytes as another kind of numbers; copied, because its start may be unaligned. */
function numbersOf(value, Kind) {
  return new Kind(bytesOf(value).slice().buffer);
}

/** The parts of one picture put together, or null while one of them is still under way. */
function gather(model, name, serial) {
  const count = model.get("facts").parts[name];
  const parts = [];
  for (let n = 0; n < count; n++) {
    const part = bytesOf(model.get(`${name}_${n}`));
    if (part.length < 4) return null;
    const stamp = new DataView(part.buffer, part.byteOffset).getUint32(0, true);
    if (serial !== null && stamp !== serial) return null;
    parts.push(part.subarray(4));
  }
  if (count === 1) return parts[0];
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let start = 0;
  for (const part of parts) {
    whole.set(part, start);
    start += part.length;
  }
  return whole;
}

/**
 * What decides at tau: pairs whose code is above `level` pass; at `level` itself they are undecided
 * when tau is no stop (`open`).
 */
function levelOf(stops, tau) {
  let level = 0;
  while (level < stops.length && stops[level] < tau) level++;
  return { level, open: stops[level] !== tau };
}

/**
 * One head at one tau.
 * pairs: { rows, columns, bits, codes or null, stops, first, band, sink: [low, high] }
 */
function choose(pairs, head, tau) {
  const index = head - pairs.first;
  const { level, open } = levelOf(pairs.stops, tau);
  const stride = 4 * Math.ceil(pairs.columns / 32);
  const scores = index * pairs.rows * pairs.columns;
  return { ...pairs, index, level, open, stride, bitStart: index * pairs.rows * stride, scores };
}

/** Decisions of row i from column `left` up to `right`, written into `out`. */
function decideRow(choice, i, left, right, out) {
  const { codes, bits, band, sink, level } = choice;
  if (codes) {
    const start = choice.scores + i * choice.columns;
    const tie = choice.open ? UNDECIDED : APPROXIMATE;
    for (let j = left; j < right; j++) {
      const code = codes[start + j];
      out[j - left] = code > level ? ROUTED : code === level ? tie : APPROXIMATE;
    }
  } else {
    const start = choice.bitStart + i * choice.stride;
    for (let j = left; j < right; j++) out[j - left] = (bits[start + (j >> 3)] >> (j & 7)) & 1;
  }
  for (let j = Math.max(left, sink[0]); j < Math.min(right, sink[1]); j++) {
    if (out[j - left] !== ROUTED) out[j - left] = SINK;
  }
  if (band < 0) return;
  for (let j = Math.max(left, i - band); j < Math.min(right, i + band + 1); j++) {
    if (out[j - left] !== ROUTED) out[j - left] = DIAGONAL;
  }
}

function decide(choice, i, j) {
  const out = new Uint8Array(1);
  decideRow(choice, i, j, j + 1, out);
  return out[0];
}

/**
 * A window as a picture of at most size x size. A pixel is the mean over factor[0] x factor[1]
 * pairs, at the edge over those that exist; `classes` is there where a pixel is one pair.
 */
function pool(choice, [top, bottom, left, right], size) {
  const down = Math.ceil((bottom - top) / size);
  const across = Math.ceil((right - left) / size);
  const rows = Math.ceil((bottom - top) / down);
  const columns = Math.ceil((right - left) / across);
  const density = new Float32Array(rows * columns);
  const single = down === 1 && across === 1;
  const classes = single ? new Uint8Array(rows * columns) : null;
  const line = new Uint8Array(right - left);
  for (let i = top; i < bottom; i++) {
    const row = Math.floor((i - top) / down) * columns;
    decideRow(choice, i, left, right, line);
    if (single) classes.set(line, row);
    for (let pixel = 0, j = 0; pixel < columns; pixel++) {
      const end = Math.min(j + across, right - left);
      let sum = 0;
      for (; j < end; j++) sum += SHARE[line[j]];
      density[row + pixel] += sum;
    }
  }
  if (!single) divide(density, rows, columns, [down, across], [bottom - top, right - left]);
  return { rows, columns, factor: [down, across], density, classes };
}

function divide(density, rows, columns, [down, across], [height, width]) {
  for (let row = 0; row < rows; row++) {
    const tall = Math.min(down, height - row * down);
    for (let column = 0; column < columns; column++) {
      density[row * columns + column] /= tall * Math.min(across, width - column * across);
    }
  }
}

/** Pairs of each decision in a whole head, and the fewest and most exact ones in a row. */
function tally(choice) {
  const counts = new Float64Array(CLASSES);
  const line = new Uint8Array(choice.columns);
  const row = new Uint32Array(CLASSES);
  let fewest = choice.columns;
  let most = 0;
  for (let i = 0; i < choice.rows; i++) {
    row.fill(0);
    decideRow(choice, i, 0, choice.columns, line);
    for (let j = 0; j < line.length; j++) row[line[j]]++;
    const exact = row[ROUTED] + row[DIAGONAL] + row[SINK];
    fewest = Math.min(fewest, exact);
    most = Math.max(most, exact);
    for (let code = 0; code < CLASSES; code++) counts[code] += row[code];
  }
  const exact = counts[ROUTED] + counts[DIAGONAL] + counts[SINK];
  const total = choice.rows * choice.columns;
  return { counts: Array.from(counts), fewest, most, exact, total, density: exact / total };
}

/** Density of a head at every stop: the pairs that are always exact, and those that pass. */
function curveOf(pairs, head) {
  const choice = choose(pairs, head, Infinity); // nothing passes: what is exact is so by its place
  const passing = new Float64Array(256);
  const line = new Uint8Array(pairs.columns);
  let always = 0;
  for (let i = 0; i < pairs.rows; i++) {
    decideRow(choice, i, 0, pairs.columns, line);
    const start = choice.scores + i * pairs.columns;
    for (let j = 0; j < line.length; j++) {
      if (line[j] === DIAGONAL || line[j] === SINK) always++;
      else passing[pairs.codes[start + j]]++;
    }
  }
  const density = new Float64Array(pairs.stops.length);
  let above = 0;
  for (let n = pairs.stops.length - 1; n >= 0; n--) {
    above += passing[n + 1];
    density[n] = (always + above) / (pairs.rows * pairs.columns);
  }
  return density;
}

/** Pairs on which the bits and the scores disagree at the tau of the bits; 0 is expected. */
function disagreement(pairs, head, tau) {
  const fromScores = choose(pairs, head, tau);
  const fromBits = choose({ ...pairs, codes: null }, head, tau);
  const [one, other] = [new Uint8Array(pairs.columns), new Uint8Array(pairs.columns)];
  let differing = 0;
  for (let i = 0; i < pairs.rows; i++) {
    decideRow(fromScores, i, 0, pairs.columns, one);
    decideRow(fromBits, i, 0, pairs.columns, other);
    for (let j = 0; j < one.length; j++) differing += one[j] !== other[j];
  }
  return differing;
}
