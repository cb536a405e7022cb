// Every sentence that the viewer says about numbers.

/** At least two digits, and as many as tau has. */
const tauText = (tau) => (Math.abs(100 * tau - Math.round(100 * tau)) < 1e-9 ? tau.toFixed(2) : `${tau}`);
const whole = (number) => number.toLocaleString("en-US");

function percent(share) {
  return share >= 0.001 ? `${(100 * share).toFixed(1)} %` : "<0.1 %";
}

function decisionNames(facts) {
  const exact = facts.scored ? "exact by score" : "exact";
  return [facts.rest, exact, "exact always (diagonal)", "exact always (sink)", "undecided"];
}

/** The line under the map: density, what made pairs exact, and the extreme rows. */
function summaryText(total, facts) {
  const { counts } = total;
  const parts = [[ROUTED, "routed"], [DIAGONAL, "diagonal"], [SINK, "sink"]]
    .filter(([code]) => counts[code])
    .map(([code, name]) => `${whole(counts[code])} ${name}`);
  const unsure = counts[UNDECIDED]
    ? ` ${whole(counts[UNDECIDED])} more are undecided, because tau lies between two stops of the ` +
      "coded scores; the slider moves from stop to stop."
    : "";
  return (
    `Density ${total.density.toFixed(4)}: ${whole(total.exact)} of ${whole(total.total)} block ` +
    `pairs are exact${facts.scored ? ` (${parts.join(", ")})` : ""}, ${whole(counts[APPROXIMATE])} ${facts.rest}. A query ` +
    `block attends ${total.fewest} to ${total.most} of ${facts.blocks[1]} key blocks exactly.${unsure}`
  );
}

/** "t 0, h 3-4, w 0-15" of one row of a box table. */
function boxText(boxes, index) {
  const box = boxes.subarray(6 * index, 6 * index + 6);
  if (box[0] < 0) return "text";
  return ["t", "h", "w"]
    .map((name, axis) => {
      const [low, high] = [box[2 * axis], box[2 * axis + 1] - 1];
      return low === high ? `${name} ${low}` : `${name} ${low}-${high}`;
    })
    .join(", ");
}

/** Bounds of a coded score: above stop code - 1, and not above stop code. */
function boundsOf(stops, code) {
  return [code ? stops[code - 1] : -Infinity, code < stops.length ? stops[code] : Infinity];
}

/** With two digits, or as many more as it takes to tell the bounds apart. */
function rangeText([low, high]) {
  if (low === -Infinity) return `at most ${high.toFixed(2)}`;
  if (high === Infinity) return `above ${low.toFixed(2)}`;
  const digits = [2, 3, 4].find((n) => low.toFixed(n) !== high.toFixed(n)) ?? 5;
  return `${low.toFixed(digits)} to ${high.toFixed(digits)}`;
}

/** Why a pair is what it is. */
function reasonText(code, facts, tau, z, band) {
  const names = decisionNames(facts);
  if (z === null) {
    if (code === DIAGONAL) return `${names[code]}: it lies within ${band} block of the diagonal`;
    if (code === SINK) return `${names[code]}: the key block is in the sink`;
    return `${names[code]}: ${code === ROUTED ? "its bit is set" : "its bit is not set"}`;
  }
  const [above, below] = [`z is above tau = ${tauText(tau)}`, `z is not above tau = ${tauText(tau)}`];
  const reasons = [
    below,
    above,
    `it lies within ${band} block of the diagonal, although ${below}`,
    `the key block is in the sink, although ${below}`,
    `z and tau = ${tauText(tau)} lie between the same two stops`,
  ];
  return `${names[code]}: ${reasons[code]}`;
}

/** Everything about one pair, a line each. `rows` is mean and deviation of every query block. */
function pairLines(viewer, choice, i, j) {
  const { facts, tau, rowStatistics } = viewer;
  const code = decide(choice, i, j);
  const lines = [
    `Query block ${i}: ${boxText(viewer.queryBoxes, i)}`,
    `Key block ${j}: ${boxText(viewer.keyBoxes, j)}`,
  ];
  if (!choice.codes) {
    const missing = facts.scored ? "Scores are not loaded" : "No scores belong to this mask";
    return [...lines, missing, reasonText(code, facts, tau, null, choice.band)];
  }
  const start = choice.index * 2 * choice.rows;
  const [mean, deviation] = [rowStatistics[start + i], rowStatistics[start + choice.rows + i]];
  const z = boundsOf(choice.stops, choice.codes[choice.scores + i * choice.columns + j]);
  const score = z.map((bound) => mean + bound * deviation);
  lines.push(
    `Score ${rangeText(score)}, threshold ${(mean + tau * deviation).toFixed(2)} (base-2 logits)`,
    `z ${rangeText(z)}, tau ${tauText(tau)} (standard deviations)`,
    reasonText(code, facts, tau, z, choice.band),
  );
  return lines;
}

/** What a pooled pixel holds, when it is more than one pair. */
function pixelLine(picture, window, i, j) {
  const [down, across] = picture.factor;
  if (picture.classes) return [];
  const [row, column] = [Math.floor((i - window[0]) / down), Math.floor((j - window[2]) / across)];
  const density = picture.density[row * picture.columns + column];
  const [top, left] = [window[0] + row * down, window[2] + column * across];
  const [bottom, right] = [Math.min(top + down, window[1]), Math.min(left + across, window[3])];
  return [
    `Pixel: queries ${top}-${bottom - 1}, keys ${left}-${right - 1}, density ${density.toFixed(3)}`,
  ];
}

/** The line under the frames: how much of the video is attended exactly, and where. */
function framesText(keys, own, facts) {
  const area = facts.grid[1] * facts.grid[2];
  const frames = (mask) => {
    const touched = new Set();
    mask.forEach((on, n) => on && touched.add(Math.floor(n / area)));
    return [...touched];
  };
  const exact = keys.reduce((sum, on) => sum + on, 0);
  const [touched, home] = [frames(keys).length, frames(own)];
  const place = home.length ? `frame ${home.join(", ")}` : "the text";
  const drawn = facts.grid[0] > SHOWN ? ` Drawn are ${SHOWN} of the frames.` : "";
  return (
    `${whole(exact)} of ${whole(keys.length)} video tokens are attended exactly (tinted), in ` +
    `${touched} of ${facts.grid[0]} frames; the query block (red outline) lies in ${place}.${drawn}`
  );
}

/** What the figures of the index belong to: the slider's tau, or the masks as they were made. */
function ofWhich(index) {
  const { tau, facts } = index.viewer;
  if (index.quantity.value === "error" || !facts.scored || index.follows === "none") {
    return " of the masks as made";
  }
  const at = `at tau ${tauText(tau)}`;
  if (index.follows === "all") return ` ${at}`;
  const { count, first } = index.viewer.pairs; // heads whose scores are here
  const which = count === facts.heads ? "the shown call" : `head ${first} of the shown call`;
  return ` of ${which} ${at}, of the others as made`;
}

/** The line under the index: range of the figures and the extreme call. */
function indexText(index, known) {
  const name = index.quantity.value === "error" ? "relative L2 error" : "density";
  const { layers, steps, values } = index;
  const { heads } = index.viewer.facts;
  if (!known) return `No ${name} is known; make the masks with errors=True to measure it.`;
  let [low, high] = [-1, -1];
  values.forEach((value, n) => {
    if (!Number.isFinite(value)) return;
    if (low < 0 || value < values[low]) low = n;
    if (high < 0 || value > values[high]) high = n;
  });
  const place = (n) =>
    `layer ${layers[Math.floor(n / heads / steps.length)]}, step ` +
    `${steps[Math.floor(n / heads) % steps.length]}, head ${n % heads}`;
  return (
    `${name}${ofWhich(index)}, ${known} of ${values.length} known: ${values[low].toFixed(3)} ` +
    `(${place(low)}) to ${values[high].toFixed(3)} (${place(high)}).`
  );
}
