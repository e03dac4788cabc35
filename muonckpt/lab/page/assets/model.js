// A checkpoint's tensors, who holds their shards, and which of these are lost.

// Tensors, one object each, with the range of their shards in the columns.
const TENSORS = [];
{
  const columns = DATA.tensors;
  let start = 0;
  for (let i = 0; i < columns.key.length; i++) {
    const cut = DATA.cuts[columns.cut[i]];
    const stop = start + cut.lo.length;
    TENSORS.push({ index: i, key: columns.key[i], role: columns.role[i], slot: columns.slot[i], shape: columns.shape[i],
      dtype: columns.dtype[i], bytes: columns.bytes[i], fingerprint: columns.fingerprint[i], cut, cutNumber: columns.cut[i],
      start, stop, lost: 0, holes: [] });
    start = stop;
  }
}

// The elements of each shard of a tensor that is cut so, in the order of its shards.
for (const cut of DATA.cuts) {
  cut.elements = Float64Array.from(cut.lo, (lo, i) => lo.reduce((product, low, dim) => product * (cut.hi[i][dim] - low), 1));
}

function itemBytes(tensor) {
  const elements = tensor.shape.reduce((product, size) => product * size, 1);
  return elements ? tensor.bytes / elements : 0;
}

// Lost shards by row of the columns; `lost` of a tensor is in bytes, `holes` are the boxes that no file has.
const LOST = new Uint8Array(DATA.shards.file.length);
{
  const { start, stop } = DATA.lost.shards;
  start.forEach((first, run) => LOST.fill(1, first, stop[run]));
  const { tensor, lo, hi } = DATA.lost.holes;
  tensor.forEach((index, i) => {
    const elements = lo[i].reduce((product, low, dim) => product * (hi[i][dim] - low), 1);
    TENSORS[index].holes.push({ lo: lo[i], hi: hi[i], elements });
  });
  const some = start.length > 0 || tensor.length > 0;
  for (const one of some ? TENSORS : []) {
    let elements = one.holes.reduce((sum, hole) => sum + hole.elements, 0);
    for (let row = one.start; row < one.stop; row++) if (LOST[row]) elements += one.cut.elements[row - one.start];
    one.lost = elements * itemBytes(one);
  }
}
const ANY_LOST = TENSORS.some((tensor) => tensor.lost);

// Why the shards of a file are lost: it is missing, shorter than recorded, or has other bytes than were written.
const FATES = new Map(DATA.lost.files.name.map((name, i) => [name, DATA.lost.files.reason[i]]));

function fate(file) {
  return file + " " + (FATES.get(file) || "has damaged bytes");
}

// Who holds shards: ranks where the names of files tell them, else files.  `gone` are those with a lost file.
const HOLDERS = (() => {
  const files = DATA.files;
  const ranked = files.name.length > 0 && files.rank.every((rank) => rank !== null);
  const places = ranked ? [...new Set(files.rank)].sort((a, b) => a - b) : files.name;
  const position = new Map(places.map((place, i) => [place, i]));
  const held = new Array(places.length).fill(0);
  const gone = new Array(places.length).fill(false);
  const ofFile = files.name.map((name, i) => position.get(ranked ? files.rank[i] : name));
  files.bytes.forEach((amount, i) => { held[ofFile[i]] += amount; });
  files.name.forEach((name, i) => { if (FATES.has(name)) gone[ofFile[i]] = true; });
  return { ranked, noun: ranked ? "rank" : "file", places, ofFile, held, gone };
})();

function holderName(position) {
  return HOLDERS.ranked ? "rank " + HOLDERS.places[position] : HOLDERS.places[position];
}

// The shards of a tensor that have elements: holder, file, offset, box, number of elements, whether they are lost.
function shardsOf(tensor) {
  const found = [];
  const { lo, hi, elements } = tensor.cut;
  for (let i = 0; i < lo.length; i++) {
    if (!elements[i]) continue;
    const file = DATA.shards.file[tensor.start + i];
    found.push({ holder: HOLDERS.ofFile[file], file: DATA.files.name[file], offset: DATA.shards.offset[tensor.start + i],
      lo: lo[i], hi: hi[i], elements: elements[i], lost: LOST[tensor.start + i] === 1 });
  }
  return found;
}

// A shard in words: its box, its place, and what became of it.
function shardInWords(shard) {
  return boxInWords(shard) + " \u2014 " + shard.file + " at " + count(shard.offset) + (shard.lost ? " \u2014 lost: " + fate(shard.file) : "");
}

function dimName(dim, dims) {
  return dims >= 2 && dim >= dims - 2 ? ["rows", "columns"][dim - dims + 2] : dims === 1 ? "elements" : "dim " + dim;
}

function boxInWords(shard) {
  if (!shard.lo.length) return "the number";
  return shard.lo.map((low, dim) => dimName(dim, shard.lo.length) + " " + low + ":" + shard.hi[dim]).join(", ");
}

// How lost elements are painted on canvases: stripes, not told by their colour alone.
function stripes(context) {
  const ratio = window.devicePixelRatio || 1;
  const side = 6 * Math.max(1, Math.round(ratio));
  const tile = el("canvas", { width: side, height: side });
  const own = tile.getContext("2d");
  own.fillStyle = colour("panel");
  own.fillRect(0, 0, side, side);
  own.strokeStyle = colour("bad");
  own.lineWidth = side / 2.6;
  own.beginPath();
  for (const shift of [-side, 0, side]) { own.moveTo(shift - 1, side + 1); own.lineTo(shift + side + 1, -1); }
  own.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function striped(context, pattern, x, y, width, height) {
  context.fillStyle = pattern;
  context.fillRect(x, y, width, height);
  context.strokeStyle = colour("bad");
  context.lineWidth = 1;
  if (width > 4 && height > 4) context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
}
