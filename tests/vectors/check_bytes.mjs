// Checks wire.json and disk.json by docs/protocol.md and kvstore/engine/FORMAT.md alone: `node check_bytes.mjs`.
import { readFileSync } from "node:fs";

const load = (name) => JSON.parse(readFileSync(new URL(`./${name}.json`, import.meta.url), "utf8"));
const hex = (text) => Buffer.from(text, "hex");

let checked = 0;
function same(what, found, wanted) {
  checked++;
  const [left, right] = [found, wanted].map((one) => (Buffer.isBuffer(one) ? one.toString("hex") : String(one)));
  if (left !== right) {
    console.error(`${what}: found ${left}, the vector says ${right}`);
    process.exit(1);
  }
}

const TABLE = Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0x82f63b78 : byte >>> 1;
  return byte >>> 0;
});
const crc32c = (data) => (data.reduce((crc, byte) => TABLE[(crc ^ byte) & 255] ^ (crc >>> 8), 0xffffffff) ^ 0xffffffff) >>> 0;
same("CRC32C of 32 zeros (RFC 3720, B.4)", crc32c(Buffer.alloc(32)), 0x8a9136aa);

// ---- frames
const FRAMES = [
  "", "HELLO", "WELCOME", "PING", "PONG", "MANIFEST", "VIEW", "VIEW_REPLY", "MATCH", "MATCH_REPLY", "UNPIN", "GET", "DATA", "END",
  "OFFER", "GRANT", "RESULT", "WRITER_OPEN", "WRITER_OPENED", "WRITER_WRITE", "WRITER_COMMIT", "WRITER_ABORT", "WAIT", "DELETE",
  "DROP", "PREFETCH", "CANCEL", "ADMIN", "ADMIN_REPLY", "ERROR", "REGION", "REGION_DROP", "GET_INTO", "PLACED", "OFFER_FROM",
  "LOCAL", "LOCAL_REPLY", "PULL", "HEADS", "HEADS_REPLY", "FORGET", "PAIR", "PAIRED", "PROBE", "REGIONS", "LOST",
];

// One flat msgpack array of integers, true and false, bin and str.
function fieldsOf(body) {
  let at = 0;
  const uint = (bytes) => {
    at += bytes;
    return bytes === 8 ? body.readBigUInt64BE(at - 8) : BigInt(body.readUIntBE(at - bytes, bytes));
  };
  const take = (bytes) => body.subarray(at, (at += Number(bytes)));
  const item = () => {
    const tag = body[at++];
    if (tag < 0x80) return BigInt(tag);
    if (tag >= 0xa0 && tag < 0xc0) return take(tag - 0xa0).toString("utf8");
    if (tag === 0xc2 || tag === 0xc3) return tag === 0xc3;
    if (tag >= 0xc4 && tag <= 0xc6) return take(uint(1 << (tag - 0xc4)));
    if (tag >= 0xcc && tag <= 0xcf) return uint(1 << (tag - 0xcc));
    if (tag >= 0xd9 && tag <= 0xdb) return take(uint(1 << (tag - 0xd9))).toString("utf8");
    throw new Error(`tag ${tag} at ${at - 1} is none that a body may have`);
  };
  const tag = body[at++];
  const count = tag >= 0x90 && tag < 0xa0 ? tag - 0x90 : tag === 0xdc ? Number(uint(2)) : -1;
  const found = Array.from({ length: count }, item);
  same("end of the body", at, body.length);
  return found;
}

function checkSlices(name, body, flags, { slices, final }) {
  same(`${name}: flags`, flags >>> 0, (slices.length | (final ? 0x80000000 : 0)) >>> 0);
  let words = 48 * slices.length;
  slices.forEach((one, i) => {
    const at = body.subarray(48 * i, 48 * (i + 1));
    const count = at.readUInt16LE(18);
    const found = {
      item: at.readUInt32LE(0),
      offset: at.readBigUInt64LE(4),
      length_bytes: at.readUInt32LE(12),
      status: at[16],
      last: (at[17] & 1) === 1,
      content_id: at.subarray(20, 36),
      record_bytes: at.readBigUInt64LE(36),
      block_bytes: at.readUInt32LE(44),
      crcs: body.subarray(words, (words += 4 * count)),
    };
    for (const [field, value] of Object.entries(one)) same(`${name}: slice ${i} ${field}`, found[field], value.hex === undefined ? value : hex(value.hex));
  });
  same(`${name}: words`, words, body.length);
}

for (const vector of load("wire").frames) {
  const { name, type, request_id, epoch, fields, payload, wire } = vector;
  const bytes = hex(wire);
  const [bodyBytes, payloadBytes, flags] = [8, 12, 24].map((at) => bytes.readUInt32LE(at));
  const body = bytes.subarray(32, 32 + bodyBytes);
  same(`${name}: magic and version`, bytes.subarray(0, 3), "4b5601");
  same(`${name}: type`, FRAMES[bytes[3]], type);
  same(`${name}: request id`, bytes.readUInt32LE(4), request_id);
  same(`${name}: epoch`, bytes.readBigUInt64LE(16), epoch);
  same(`${name}: checksum`, bytes.readUInt32LE(28), crc32c(Buffer.concat([bytes.subarray(0, 28), body])));
  same(`${name}: payload`, bytes.subarray(32 + bodyBytes), payload ?? "");
  same(`${name}: payload bytes`, payloadBytes, bytes.length - 32 - bodyBytes);
  if (vector.slices) {
    checkSlices(name, body, flags, vector);
    continue;
  }
  same(`${name}: flags`, flags, 0);
  const found = fieldsOf(body);
  same(`${name}: count of fields`, found.length, Object.keys(fields).length);
  Object.entries(fields).forEach(([field, value], i) => same(`${name}: ${field}`, found[i], value.hex === undefined ? value : hex(value.hex)));
}

// ---- the drive
const disk = load("disk");
const page = (name, magic) => {
  const { hex: text, length_bytes } = disk[name];
  const bytes = Buffer.concat([hex(text), Buffer.alloc(length_bytes - text.length / 2)]);
  same(`${name}: magic`, bytes.subarray(0, 4).toString("latin1"), magic);
  same(`${name}: checksum`, bytes.readUInt32LE(4), crc32c(bytes.subarray(8)));
  return {
    u16: (at, wanted) => same(`${name}: u16 at ${at}`, bytes.readUInt16LE(at), wanted),
    u32: (at, wanted) => same(`${name}: u32 at ${at}`, bytes.readUInt32LE(at), wanted),
    u64: (at, wanted) => same(`${name}: u64 at ${at}`, bytes.readBigUInt64LE(at), wanted),
    raw: (at, wanted) => same(`${name}: bytes at ${at}`, bytes.subarray(at, at + wanted.length), wanted),
    zeros: (at) => same(`${name}: zeros from ${at}`, bytes.subarray(at).every((byte) => byte === 0), true),
  };
};
const DISK_ID = Buffer.from(Array.from({ length: 16 }, (_, i) => i));
const word = (value) => Buffer.from([value & 255, (value >> 8) & 255, (value >> 16) & 255, value >>> 24]);

let at = page("superblock", "KVST");
[[8, 1], [12, 4096]].forEach(([offset, value]) => at.u32(offset, value));
[[16, 0], [24, 0], [32, 0], [72, 1 << 20], [80, 256 << 10], [88, 131072], [96, 655360], [104, 64 << 20], [112, 1790000000000000000n], [120, 3]].forEach(
  ([offset, value]) => at.u64(offset, value),
);
at.raw(40, Buffer.alloc(16, "c"));
at.raw(56, DISK_ID);
at.zeros(128);

for (const [name, magic] of [["segment_header", "KVSG"], ["segment_footer", "KVSF"]]) {
  at = page(name, magic);
  at.u32(8, 3);
  at.u64(16, 77);
  at.raw(24, DISK_ID);
  if (name === "segment_header") at.u64(40, 123);
  else [254, 1, 2, 21].forEach((value, i) => at.u32(40 + 4 * i, value));
}

const ENTRY = [["namespace", 16, 4], ["namespace_generation", 20, 4], ["page", 24, 4], ["pages", 28, 2], ["header_pages", 30, 1], ["part", 31, 1], ["payload_bytes", 32, 4], ["position", 36, 4], ["access", 40, 4]];
const entryBytes = (fields) => {
  const out = Buffer.alloc(48);
  hex(fields.key).copy(out);
  for (const [field, offset, bytes] of ENTRY) out.writeUIntLE(fields[field], offset, bytes);
  return out;
};
const entries = disk.index_block.fields.map(entryBytes);
at = page("index_block", "KVIX");
at.u32(8, 3);
at.u32(12, 0);
at.u64(16, 77);
at.u16(24, entries.length);
entries.forEach((entry, i) => at.raw(32 + 48 * i, entry));
at.zeros(32 + 48 * entries.length);

for (const [name, pages, words] of [["record_header", 1, 3], ["record_header_long", 2, 1500]]) {
  const payload = 4096 * words - 5;
  const table = Buffer.concat(Array.from({ length: words }, (_, i) => word(7 * i + 1)));
  at = page(name, "KVRC");
  [[8, pages], [10, 1]].forEach(([offset, value]) => at.u16(offset, value));
  [[12, 4096], [32, 3], [36, 18], [40, 7], [44, words], [48, payload], [52, crc32c(table)]].forEach(([offset, value]) => at.u32(offset, value));
  [[16, payload], [24, 77], [192, 2], [200, 1790000000000000001n]].forEach(([offset, value]) => at.u64(offset, value));
  at.raw(56, Buffer.from("12345678"));
  at.raw(64, Buffer.from(Array.from({ length: 32 }, (_, i) => 32 + i)));
  [[96, "p"], [128, "r"], [160, "n"]].forEach(([offset, letter]) => at.raw(offset, Buffer.alloc(32, letter)));
  at.raw(256, table);
}

at = page("log_block", "KVLB");
[[8, 12], [32, 78]].forEach(([offset, value]) => at.u64(offset, value));
[[16, 5], [20, 2]].forEach(([offset, value]) => at.u32(offset, value));
at.raw(40, DISK_ID);
// kind, flags, length, then what the table of FORMAT.md says; records follow each other from byte 64
const manifest = Buffer.from("a manifest, cut short");
const body = (kind, flags, ...pieces) => {
  const bytes = Buffer.concat(pieces.map((one) => (Buffer.isBuffer(one) ? one : word(one))));
  return Buffer.concat([Buffer.from([kind, flags, bytes.length + 4, 0]), bytes]);
};
const long = (value) => Buffer.concat([word(value), word(0)]);
const KEYS = entries.map((entry) => entry.subarray(0, 16));
const padding = (8 - ((24 + manifest.length) % 8)) % 8;
const records = [
  body(3, padding, 1, 1, manifest.length, 0, crc32c(manifest), manifest, Buffer.alloc(padding)),
  body(1, 0, 3, long(77), entries[0]),
  body(2, 1, 3, long(77), 40, 0, KEYS[0]),
  body(2, 2, 4, long(78), 9, 0, KEYS[1]),
  body(4, 0, 1, long(2)),
];
at.u16(24, records.reduce((sum, record) => sum + record.length, 0));
at.raw(64, Buffer.concat(records));
at.zeros(64 + records.reduce((sum, record) => sum + record.length, 0));

console.log(`${checked} values agree`);
