// Checks keys.json, layout.json, namespace.json and placement.json with code that shares nothing with the Python: `node check_vectors.mjs`.
import { readFileSync } from "node:fs";

const IV = [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];
const PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const QUADS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8;

const rotate = (word, bits) => ((word >>> bits) | (word << (32 - bits))) >>> 0;

function compress(chain, block, counter, length, flags) {
  const padded = Buffer.alloc(64);
  block.copy(padded);
  let message = Array.from({ length: 16 }, (_, i) => padded.readUInt32LE(4 * i));
  const s = [...chain, ...IV.slice(0, 4), counter, 0, length, flags];
  for (let round = 0; round < 7; round++) {
    QUADS.forEach(([a, b, c, d], q) => {
      for (const [word, first, second] of [[message[2 * q], 16, 12], [message[2 * q + 1], 8, 7]]) {
        s[a] = (s[a] + s[b] + word) >>> 0;
        s[d] = rotate(s[d] ^ s[a], first);
        s[c] = (s[c] + s[d]) >>> 0;
        s[b] = rotate(s[b] ^ s[c], second);
      }
    });
    message = PERMUTATION.map((i) => message[i]);
  }
  return IV.map((_, i) => (s[i] ^ s[i + 8]) >>> 0);
}

const words = (list) => {
  const out = Buffer.alloc(4 * list.length);
  list.forEach((word, i) => out.writeUInt32LE(word, 4 * i));
  return out;
};

function subtree(data, counter, root) {
  if (data.length <= 1024) {
    let chain = IV;
    const count = Math.max(1, Math.ceil(data.length / 64));
    for (let i = 0; i < count; i++) {
      const block = data.subarray(64 * i, 64 * (i + 1));
      const flags = (i === 0 ? CHUNK_START : 0) | (i === count - 1 ? CHUNK_END | root : 0);
      chain = compress(chain, block, counter, block.length, flags);
    }
    return chain;
  }
  let chunks = 1;
  while (chunks * 2 * 1024 < data.length) chunks *= 2;
  const left = subtree(data.subarray(0, chunks * 1024), counter, 0);
  const right = subtree(data.subarray(chunks * 1024), counter + chunks, 0);
  return compress(IV, words([...left, ...right]), 0, 64, PARENT | root);
}

const blake3 = (...pieces) => words(subtree(Buffer.concat(pieces), 0, ROOT));

const hex = (text) => Buffer.from(text, "hex");
const utf8 = (text) => Buffer.from(text, "utf8");
const u32 = (value) => words([value]);
const u64 = (value) => {
  const out = Buffer.alloc(8);
  out.writeBigUInt64LE(BigInt(value));
  return out;
};
const sized = (bytes) => Buffer.concat([u32(bytes.length), bytes]);
const uint = (value) => Buffer.concat([utf8("u"), u64(value)]);
const text = (value) => Buffer.concat([utf8("s"), sized(utf8(value))]);
const raw = (value) => Buffer.concat([utf8("b"), sized(value)]);
const list = (items) => Buffer.concat([utf8("l"), u32(items.length), ...items]);
const record = (fields) =>
  Buffer.concat([utf8("r"), u32(fields.length), ...fields.flatMap(([name, value]) => [sized(utf8(name)), value])]);

let checked = 0;
function same(what, found, wanted) {
  checked++;
  const value = Buffer.isBuffer(found) ? found.toString("hex") : found;
  if (value !== wanted) {
    console.error(`${what}: found ${value}, the vector says ${wanted}`);
    process.exit(1);
  }
}
const load = (name) => JSON.parse(readFileSync(new URL(`./${name}.json`, import.meta.url), "utf8"));

const keys = load("keys");
for (const { name, namespace_digest, chunk_tokens, tokens, extra, digests } of keys.chunks) {
  let parent = Buffer.alloc(32);
  same(`${name}: count`, Math.floor(tokens.length / chunk_tokens), digests.length);
  digests.forEach((wanted, i) => {
    const ids = words(tokens.slice(i * chunk_tokens, (i + 1) * chunk_tokens));
    const more = extra ? hex(extra[i]) : Buffer.alloc(0);
    parent = blake3(utf8("kvstore.chunk.v1"), hex(namespace_digest), parent, u32(chunk_tokens), ids, sized(more));
    same(`${name}: chunk ${i}`, parent, wanted);
  });
}
for (const { namespace_digest, algorithm, hashes, digests } of keys.engine)
  hashes.forEach((value, i) => {
    const found = blake3(utf8("kvstore.engine.v1"), hex(namespace_digest), sized(utf8(algorithm)), sized(hex(value)));
    same(`engine ${algorithm} ${i}`, found, digests[i]);
  });
for (const { digest, shard, shards, key } of keys.shards)
  same(`shard ${shard}/${shards}`, shards === 1 ? hex(digest) : blake3(utf8("kvstore.shard.v1"), hex(digest), u32(shard)), key);
for (const { digest, shard, part, key } of keys.parts)
  same(`part ${part}`, blake3(utf8("kvstore.part.v1"), hex(digest), u32(shard), sized(utf8(part))), key);
for (const { digests, first, chunks_per_run, run_heads } of keys.runs)
  run_heads.forEach((wanted, i) => {
    const position = first + i;
    same(`run head at ${position}`, digests[position - (position % chunks_per_run)], wanted);
  });

const value = (name, item) => {
  if (name === "parts") return list(item.map(fieldsOf));
  if (name === "layers" && Array.isArray(item))
    return raw(Buffer.concat(item.map((layer) => Buffer.from([layer & 255, layer >> 8]))));
  return typeof item === "number" ? uint(item) : text(item);
};
const fieldsOf = (fields) => record(Object.entries(fields).map(([name, item]) => [name, value(name, item)]));
for (const { name, fields, encoding, digest } of load("layout")) {
  const found = Buffer.concat([utf8("kvstore.layout.v1"), fieldsOf(fields)]);
  same(`layout ${name}: encoding`, found, encoding);
  same(`layout ${name}: digest`, blake3(found), digest);
}

for (const { name, fields, layout, salt, manifest, digest } of load("namespace")) {
  const found = Buffer.concat([
    utf8("kvstore.namespace.v1"),
    record([
      ...Object.entries(fields).map(([field, item]) => [field, text(item)]),
      ["layout", raw(hex(layout))],
      ["salt_hash", raw(blake3(utf8("kvstore.salt.v1"), hex(salt)))],
    ]),
  ]);
  same(`namespace ${name}: manifest`, found, manifest);
  same(`namespace ${name}: digest`, blake3(found), digest);
}

const MASK = (1n << 64n) - 1n;
const mix64 = (word) => {
  word ^= word >> 30n;
  word = (word * 0xbf58476d1ce4e5b9n) & MASK;
  word ^= word >> 27n;
  word = (word * 0x94d049bb133111ebn) & MASK;
  return word ^ (word >> 31n);
};
const seedOf = (id) => blake3(utf8("kvstore.target.v1"), utf8(id)).readBigUInt64LE(0);
const domainOf = (target) => target.label || target.node_id || target.id;

function rank(targets, weightOf, head, count) {
  const word = hex(head).readBigUInt64LE(0);
  const costs = targets
    .filter((target) => weightOf(target) > 0)
    .map((target) => {
      const drawn = (Number(mix64(word ^ seedOf(target.id)) >> 11n) + 0.5) / 2 ** 53;
      return { id: target.id, domain: domainOf(target), cost: -Math.log(drawn) / weightOf(target) };
    })
    .sort((a, b) => a.cost - b.cost);
  const chosen = [];
  for (let left = costs.length; left > 0 && chosen.length < count; left--) {
    const free = costs.filter((one) => !chosen.includes(one));
    const apart = free.filter((one) => !chosen.some((other) => other.domain === one.domain));
    chosen.push((apart.length ? apart : free)[0]);
  }
  return chosen.map((one) => one.id);
}

const placement = load("placement");
for (const [id, seed] of Object.entries(placement.seeds)) {
  same(`seed of ${id}`, seedOf(id).toString(16).padStart(16, "0"), seed);
}
for (const { name, view, count, runs } of placement.cases) {
  const reads = (target) => ["joining", "serving", "draining"].includes(target.state);
  const placed = (target) => (["joining", "serving"].includes(target.state) ? target.weight : 0);
  for (const { head, places, lookup } of runs) {
    const now = rank(view.targets, placed, head, count);
    same(`placement, ${name}: ${head}`, now.join(), places.join());
    const before = view.previous.flatMap(({ weights }) =>
      rank(view.targets.filter(reads), (target) => weights[target.id] ?? target.weight, head, count),
    );
    same(`lookup, ${name}: ${head}`, [...new Set([...now, ...before])].join(), lookup.join());
  }
}
console.log(`${checked} values agree`);
