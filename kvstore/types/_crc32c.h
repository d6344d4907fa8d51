/*
 * CRC32C (Castagnoli, RFC 3720 appendix B.4) for the compiled parts: one implementation, in each way that a processor may have.
 *
 *   table    a word of eight bytes at a time, by eight tables: any processor
 *   lanes    the crc32 instruction of SSE 4.2 over four stretches side by side: it takes three cycles, and one can begin in each
 *   fold16   carry-less products, 16 bytes in each (PCLMULQDQ): as fast, and without the lanes' joins where blocks are short
 *   fold64   the same, 64 bytes in each (VPCLMULQDQ, AVX-512): four times as fast where a cache has the bytes
 *
 * The best one is chosen when a part is loaded (kv_crc_prepare); tests choose each in turn. docs/decisions/checksums.md has
 * the figures. Where there is only the table, Python's library is faster, and parts that sum payload are not used
 * (kvstore/types/compiled.py).
 *
 * Words of 32 bits are "registers": begun with ~0 and inverted at the end; bit 31 stands for the lowest power.
 */
#ifndef KV_CRC32C_H
#define KV_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(KV_CRC_PORTABLE) /* which tests of the build define */
#define KV_CRC_X86 1
#include <immintrin.h>
#else
#define KV_CRC_X86 0
#endif

#define KV_CRC_STREAMS 4 /* stretches of one length that are summed side by side */
#define KV_CRC_LANES_MIN 1024 /* bytes for which it pays to sum one stretch in lanes */
#define KV_CRC_FOLD_16_MIN 128 /* bytes for which it pays to fold */
#define KV_CRC_FOLD_64_MIN 512
#define KV_CRC_FAR_LANES_MIN 8192 /* bytes of a stretch for which lanes keep memory busier than folds */
#define KV_CRC_AHEAD 2048 /* bytes that are asked for ahead where no cache has them */
#define KV_CRC_POLY 0x82F63B78u
#define KV_CRC_UNUSED __attribute__((unused)) /* not every part needs everything */

enum kv_crc_way { KV_CRC_TABLE, KV_CRC_LANES, KV_CRC_FOLD_16, KV_CRC_FOLD_64, KV_CRC_WAYS };
static const char *const kv_crc_names[KV_CRC_WAYS] KV_CRC_UNUSED = {"table", "lanes", "fold16", "fold64"};
static enum kv_crc_way kv_crc_chosen = KV_CRC_TABLE;
static uint32_t kv_crc_words[8][256];
static uint32_t kv_crc_powers[64]; /* x to the 2 to the n */

static inline uint64_t kv_crc_long_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* The product of two polynomials modulo ours, both with the highest power in the lowest bit. */
static uint32_t kv_crc_product(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            sum ^= b;
        b = b & 1 ? (b >> 1) ^ KV_CRC_POLY : b >> 1;
    }
    return sum;
}

/* x to the power of `bits` modulo ours. */
KV_CRC_UNUSED static uint32_t kv_crc_power(uint64_t bits)
{
    uint32_t power = 1u << 31;
    for (int n = 0; bits; bits >>= 1, n++)
        if (bits & 1)
            power = kv_crc_product(kv_crc_powers[n], power);
    return power;
}

/* The register after `length` more bytes, by tables. */
static uint32_t kv_crc_by_table(uint32_t crc, const uint8_t *data, size_t length)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; length >= 8; data += 8, length -= 8) {
        uint64_t word = kv_crc_long_at(data) ^ crc;
        crc = kv_crc_words[7][word & 255] ^ kv_crc_words[6][word >> 8 & 255] ^ kv_crc_words[5][word >> 16 & 255]
              ^ kv_crc_words[4][word >> 24 & 255] ^ kv_crc_words[3][word >> 32 & 255]
              ^ kv_crc_words[2][word >> 40 & 255] ^ kv_crc_words[1][word >> 48 & 255] ^ kv_crc_words[0][word >> 56];
    }
#endif
    while (length--)
        crc = kv_crc_words[0][(crc ^ *data++) & 255] ^ (crc >> 8);
    return crc;
}

#if KV_CRC_X86

__attribute__((target("sse4.2"))) static uint32_t kv_crc_by_one(uint32_t crc, const uint8_t *data, size_t length)
{
    uint64_t wide = crc;
    for (; length >= 8; data += 8, length -= 8)
        wide = _mm_crc32_u64(wide, kv_crc_long_at(data));
    crc = (uint32_t)wide;
    while (length--)
        crc = _mm_crc32_u8(crc, *data++);
    return crc;
}

/* One stretch in four parts side by side, whose registers are joined at the end. */
__attribute__((target("sse4.2"))) static uint32_t kv_crc_by_lanes(uint32_t crc, const uint8_t *data, size_t length)
{
    static _Thread_local size_t known_lane;
    static _Thread_local uint32_t known_shift;
    if (length < KV_CRC_LANES_MIN)
        return kv_crc_by_one(crc, data, length);
    size_t lane = length / KV_CRC_STREAMS & ~(size_t)7;
    if (lane != known_lane) {
        known_shift = kv_crc_power(8 * (uint64_t)lane);
        known_lane = lane;
    }
    const uint8_t *b = data + lane, *c = b + lane, *d = c + lane;
    uint64_t crc_a = crc, crc_b = 0, crc_c = 0, crc_d = 0;
    for (size_t at = 0; at < lane; at += 8) {
        crc_a = _mm_crc32_u64(crc_a, kv_crc_long_at(data + at));
        crc_b = _mm_crc32_u64(crc_b, kv_crc_long_at(b + at));
        crc_c = _mm_crc32_u64(crc_c, kv_crc_long_at(c + at));
        crc_d = _mm_crc32_u64(crc_d, kv_crc_long_at(d + at));
    }
    crc = kv_crc_product(known_shift, (uint32_t)crc_a) ^ (uint32_t)crc_b;
    crc = kv_crc_product(known_shift, crc) ^ (uint32_t)crc_c;
    crc = kv_crc_product(known_shift, crc) ^ (uint32_t)crc_d;
    return kv_crc_by_one(crc, data + KV_CRC_STREAMS * lane, length - KV_CRC_STREAMS * lane);
}

/* Four stretches that memory has to bring: it is kept busy by asking in four places, and ahead over the ends of pages. */
__attribute__((target("sse4.2"))) static void kv_crc_far_lanes(const uint8_t *const *starts, size_t length, uint32_t *crcs)
{
    const uint8_t *a = starts[0], *b = starts[1], *c = starts[2], *d = starts[3];
    uint64_t crc_a = ~0u, crc_b = crc_a, crc_c = crc_a, crc_d = crc_a;
    size_t at = 0;
    for (; at + 64 <= length; at += 64) {
        __builtin_prefetch(a + at + KV_CRC_AHEAD); /* a hint: it may lie behind the end */
        __builtin_prefetch(b + at + KV_CRC_AHEAD);
        __builtin_prefetch(c + at + KV_CRC_AHEAD);
        __builtin_prefetch(d + at + KV_CRC_AHEAD);
        for (size_t in = at; in < at + 64; in += 8) {
            crc_a = _mm_crc32_u64(crc_a, kv_crc_long_at(a + in));
            crc_b = _mm_crc32_u64(crc_b, kv_crc_long_at(b + in));
            crc_c = _mm_crc32_u64(crc_c, kv_crc_long_at(c + in));
            crc_d = _mm_crc32_u64(crc_d, kv_crc_long_at(d + in));
        }
    }
    crcs[0] = ~kv_crc_by_one((uint32_t)crc_a, a + at, length - at);
    crcs[1] = ~kv_crc_by_one((uint32_t)crc_b, b + at, length - at);
    crcs[2] = ~kv_crc_by_one((uint32_t)crc_c, c + at, length - at);
    crcs[3] = ~kv_crc_by_one((uint32_t)crc_d, d + at, length - at);
}

/*
 * Folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009, in the reflected form):
 * 16 bytes X that lie D bits before others may be replaced by X.low * x^(D+63) + X.high * x^(D-1), added to those. The
 * powers are one less than on paper, since the product of two reflected words comes out multiplied by x.
 */
#define KV_CRC_FOLDS_16 __attribute__((target("pclmul,sse4.2")))
#define KV_CRC_FOLDS_64 __attribute__((target("avx512f,avx512dq,pclmul,vpclmulqdq,sse4.2")))
static uint64_t kv_crc_fold_256[2], kv_crc_fold_64[2], kv_crc_fold_16[2]; /* for low and high, so many bytes ahead */

static void kv_crc_prepare_fold(uint64_t *pair, uint64_t bytes)
{
    pair[0] = (uint64_t)kv_crc_power(8 * bytes + 63) << 32;
    pair[1] = (uint64_t)kv_crc_power(8 * bytes - 1) << 32;
}

KV_CRC_FOLDS_16 static inline __m128i kv_crc_16_at(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

KV_CRC_FOLDS_16 static inline __m128i kv_crc_folded_16(__m128i sum, __m128i pair, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(sum, pair, 0x00), high = _mm_clmulepi64_si128(sum, pair, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* The register of 16 bytes. */
KV_CRC_FOLDS_16 static inline uint32_t kv_crc_reduced(__m128i sum)
{
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(sum, 1));
}

KV_CRC_FOLDS_64 static inline __m512i kv_crc_pair(const uint64_t *pair)
{
    return _mm512_broadcast_i64x2(kv_crc_16_at(pair));
}

KV_CRC_FOLDS_64 static inline __m512i kv_crc_folded(__m512i sum, __m512i pair, __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(sum, pair, 0x00), high = _mm512_clmulepi64_epi128(sum, pair, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* the exclusive or of three */
}

/* The register of four sums of 64 bytes that lie one behind the other. */
KV_CRC_FOLDS_64 static inline uint32_t kv_crc_joined(__m512i a, __m512i b, __m512i c, __m512i d)
{
    const __m512i by_64 = kv_crc_pair(kv_crc_fold_64);
    const __m128i by_16 = kv_crc_16_at(kv_crc_fold_16);
    d = kv_crc_folded(kv_crc_folded(kv_crc_folded(a, by_64, b), by_64, c), by_64, d);
    __m128i sum = kv_crc_folded_16(_mm512_castsi512_si128(d), by_16, _mm512_extracti64x2_epi64(d, 1));
    sum = kv_crc_folded_16(sum, by_16, _mm512_extracti64x2_epi64(d, 2));
    sum = kv_crc_folded_16(sum, by_16, _mm512_extracti64x2_epi64(d, 3));
    return kv_crc_reduced(sum);
}

KV_CRC_FOLDS_16 static uint32_t kv_crc_by_fold_16(uint32_t crc, const uint8_t *data, size_t length)
{
    if (length < KV_CRC_FOLD_16_MIN)
        return kv_crc_by_one(crc, data, length);
    const __m128i by_64 = kv_crc_16_at(kv_crc_fold_64), by_16 = kv_crc_16_at(kv_crc_fold_16);
    __m128i a = _mm_xor_si128(kv_crc_16_at(data), _mm_cvtsi32_si128((int)crc));
    __m128i b = kv_crc_16_at(data + 16), c = kv_crc_16_at(data + 32), d = kv_crc_16_at(data + 48);
    size_t at = 64;
    for (; at + 64 <= length; at += 64) {
        a = kv_crc_folded_16(a, by_64, kv_crc_16_at(data + at));
        b = kv_crc_folded_16(b, by_64, kv_crc_16_at(data + at + 16));
        c = kv_crc_folded_16(c, by_64, kv_crc_16_at(data + at + 32));
        d = kv_crc_folded_16(d, by_64, kv_crc_16_at(data + at + 48));
    }
    d = kv_crc_folded_16(kv_crc_folded_16(kv_crc_folded_16(a, by_16, b), by_16, c), by_16, d);
    return kv_crc_by_one(kv_crc_reduced(d), data + at, length - at);
}

KV_CRC_FOLDS_64 static uint32_t kv_crc_by_fold_64(uint32_t crc, const uint8_t *data, size_t length)
{
    if (length < KV_CRC_FOLD_64_MIN)
        return kv_crc_by_one(crc, data, length);
    const __m512i by_256 = kv_crc_pair(kv_crc_fold_256);
    __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    size_t at = 256;
    for (; at + 256 <= length; at += 256) {
        a = kv_crc_folded(a, by_256, _mm512_loadu_si512(data + at));
        b = kv_crc_folded(b, by_256, _mm512_loadu_si512(data + at + 64));
        c = kv_crc_folded(c, by_256, _mm512_loadu_si512(data + at + 128));
        d = kv_crc_folded(d, by_256, _mm512_loadu_si512(data + at + 192));
    }
    return kv_crc_by_one(kv_crc_joined(a, b, c, d), data + at, length - at);
}

static enum kv_crc_way kv_crc_best(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2"))
        return KV_CRC_TABLE;
    if (!__builtin_cpu_supports("pclmul"))
        return KV_CRC_LANES;
    int wide = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return wide ? KV_CRC_FOLD_64 : KV_CRC_FOLD_16;
}

#else

static enum kv_crc_way kv_crc_best(void)
{
    return KV_CRC_TABLE;
}

#endif

/* Before anything else here. */
static void kv_crc_prepare(void)
{
    kv_crc_powers[0] = 1u << 30;
    for (int n = 1; n < 64; n++)
        kv_crc_powers[n] = kv_crc_product(kv_crc_powers[n - 1], kv_crc_powers[n - 1]);
    for (uint32_t at = 0; at < 256; at++) {
        uint32_t crc = at;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ KV_CRC_POLY : crc >> 1;
        kv_crc_words[0][at] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int at = 0; at < 256; at++) {
            uint32_t before = kv_crc_words[zeros - 1][at];
            kv_crc_words[zeros][at] = kv_crc_words[0][before & 255] ^ (before >> 8);
        }
#if KV_CRC_X86
    kv_crc_prepare_fold(kv_crc_fold_256, 256);
    kv_crc_prepare_fold(kv_crc_fold_64, 64);
    kv_crc_prepare_fold(kv_crc_fold_16, 16);
#endif
    kv_crc_chosen = kv_crc_best();
}

/* The register after `length` more bytes, which a cache has or may have. */
KV_CRC_UNUSED static uint32_t kv_crc_more(uint32_t crc, const uint8_t *data, size_t length)
{
#if KV_CRC_X86
    switch (kv_crc_chosen) {
    case KV_CRC_FOLD_64:
        return kv_crc_by_fold_64(crc, data, length);
    case KV_CRC_FOLD_16:
        return kv_crc_by_fold_16(crc, data, length);
    case KV_CRC_LANES:
        return kv_crc_by_lanes(crc, data, length);
    default:
        break;
    }
#endif
    return kv_crc_by_table(crc, data, length);
}

/* CRC32C of KV_CRC_STREAMS stretches of `length` bytes each, which no cache of this core has. */
KV_CRC_UNUSED static void kv_crc_far(const uint8_t *const *starts, size_t length, uint32_t *crcs)
{
#if KV_CRC_X86
    if (kv_crc_chosen >= KV_CRC_LANES && (kv_crc_chosen != KV_CRC_FOLD_64 || length >= KV_CRC_FAR_LANES_MIN)) {
        kv_crc_far_lanes(starts, length, crcs);
        return;
    }
#endif
    for (int stream = 0; stream < KV_CRC_STREAMS; stream++)
        crcs[stream] = ~kv_crc_more(~0u, starts[stream], length);
}

#ifdef Py_PYTHON_H /* what each part shows of it, for those who choose, and for tests */

static PyObject *kv_crc_ways(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    Py_ssize_t count = (Py_ssize_t)kv_crc_best() + 1;
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t way = 0; names && way < count; way++) {
        PyObject *name = PyUnicode_FromString(kv_crc_names[way]);
        if (name)
            PyTuple_SET_ITEM(names, way, name);
        else
            Py_CLEAR(names);
    }
    return names;
}

static PyObject *kv_crc_choose(PyObject *Py_UNUSED(module), PyObject *name)
{
    for (int way = 0; way <= (int)kv_crc_best(); way++) {
        int same = PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, kv_crc_names[way]);
        if (same) {
            kv_crc_chosen = (enum kv_crc_way)way;
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "this processor has no way %R to a checksum", name);
    return NULL;
}

static PyObject *kv_crc_of(PyObject *Py_UNUSED(module), PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t crc = ~kv_crc_more(~0u, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

#define KV_CRC_METHODS                                                                                             \
    {"crc32c", kv_crc_of, METH_O, PyDoc_STR("crc32c(data) -> int, in the way that is chosen.")},                    \
    {"crc_ways", kv_crc_ways, METH_NOARGS, PyDoc_STR("crc_ways() -> what this processor can, the best one last.")}, \
    {"choose_crc", kv_crc_choose, METH_O, PyDoc_STR("choose_crc(way): another than the best, for tests.")}

#endif
#endif
