// The rows of the map: tensors that are alike in all layers are one row, and modules where there are too many kinds.

const FEW = 150;

// The parts of a key in which numbers do not count: of a layer, an expert, a parameter.
function patternOf(key) {
  return key.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part));
}

// What has to be the same for two tensors to be alike, besides the pattern; also, who has lost something of them.
function likeness(tensor) {
  const lost = new Set();
  if (tensor.lost) {
    for (const shard of shardsOf(tensor)) if (shard.lost) lost.add(shard.holder);
  }
  return [tensor.role, tensor.shape.join(), tensor.dtype, tensor.cutNumber, [...lost].join(), tensor.holes.length > 0].join("\u0000");
}

// A tree of modules over some tensors, of which a leaf is all tensors that are alike; `kinds` counts its leaves.
// Chains of single modules are one node.
function moduleTree(tensors) {
  const root = { path: "", depth: 0, children: new Map(), tensors, leaf: false, kinds: 0 };
  for (const tensor of tensors) {
    let node = root;
    const parts = patternOf(tensor.key);
    parts.forEach((part, depth) => {
      const leaf = depth === parts.length - 1;
      const name = leaf ? part + "\u0000" + likeness(tensor) : part; // a tensor and a module may have one name
      let child = node.children.get(name);
      if (!child) {
        child = { path: parts.slice(0, depth + 1).join("."), depth: depth + 1, children: new Map(), tensors: [], leaf, kinds: 0 };
        node.children.set(name, child);
      }
      child.tensors.push(tensor);
      node = child;
    });
  }
  const counted = (node) => (node.kinds = node.leaf ? 1 : [...node.children.values()].reduce((sum, child) => sum + counted(child), 0));
  counted(root);
  return root;
}

function childrenOf(node) {
  return [...node.children.values()].map((child) => {
    while (!child.leaf && child.children.size === 1) [child] = child.children.values();
    return child;
  });
}

// Modules and tensors below a node, as deep as few rows allow: those of most kinds are opened first, so that no part
// of the model and of the optimizer is shown in more detail than another.
function nodesBelow(node) {
  let rows = childrenOf(node);
  for (;;) {
    const most = rows.reduce((best, row) => (!row.leaf && (!best || row.kinds > best.kinds) ? row : best), null);
    if (!most) return rows;
    const inside = childrenOf(most);
    if (rows.length + inside.length - 1 > FEW) return rows;
    rows = rows.flatMap((row) => (row === most ? inside : [row]));
  }
}

// Ascending numbers with runs as ranges: 0-3,7.
function ranges(numbers) {
  const runs = [];
  for (const n of numbers) {
    const last = runs[runs.length - 1];
    if (last && last[1] === n - 1) last[1] = n; else runs.push([n, n]);
  }
  const shownRuns = runs.slice(0, 4).map(([first, last]) => (first === last ? String(first) : first + "\u2013" + last));
  return shownRuns.join(",") + (runs.length > 4 ? ",\u2026" : "");
}

// The name of some tensors that have a pattern: the numbers that they have, and all else as it is.
function nameOfAlike(tensors, depth) {
  const parts = tensors[0].key.split(".").slice(0, depth);
  if (tensors.length === 1) return parts.join(".");
  const numbered = parts.map((part, i) => (/^\d+$/.test(part) ? i : -1)).filter((i) => i >= 0);
  const found = numbered.map(() => new Set());
  for (const tensor of tensors) {
    const own = tensor.key.split(".");
    numbered.forEach((i, n) => found[n].add(Number(own[i])));
  }
  numbered.forEach((i, n) => { if (found[n].size > 1) parts[i] = ranges([...found[n]].sort((a, b) => a - b)); });
  return parts.join(".");
}

// A row of the map.  `tensor` is set if it stands for one, `alike` if for several, which it shows when it is opened.
function rowOf(node, within) {
  const name = nameOfAlike(node.tensors, node.depth);
  const skipped = within.depth && node.depth > within.depth ? name.split(".").slice(within.depth).join(".") : name;
  const alone = node.leaf && node.tensors.length === 1;
  return { name: skipped, title: name, path: node.path, tensors: node.tensors, tensor: alone ? node.tensors[0] : null, alike: node.leaf && !alone, inside: false };
}

function rowOfTensor(tensor, inside) {
  return { name: tensor.key, title: tensor.key, path: tensor.key, tensors: [tensor], tensor, alike: false, inside };
}

function findBelow(node, path) {
  if (node.path === path && !node.leaf) return node;
  for (const child of node.children.values()) {
    if (!child.leaf && (child.path === path || path.startsWith(child.path + "."))) {
      const found = findBelow(child, path);
      if (found) return found;
    }
  }
  return null;
}
