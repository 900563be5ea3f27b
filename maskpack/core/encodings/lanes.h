/* Words of a few bits, packed by the block.

   A block has n words of `bits` bits. From FEW_WORDS words on, word i is in lane i % 8, at place i / 8 of it; each lane is
   a stream of bits in u32, and the lanes take turns. Fewer words are one stream. */

enum { LANES = 8, EIGHT = 8, FEW_WORDS = 64 };

static i64 block_numbers(i64 n, i64 bits) { /* u32 numbers of a block */
    if (n < FEW_WORDS) return (n * bits + 31) / 32;
    return (((n + LANES - 1) / LANES) * bits + 31) / 32 * LANES;
}

/* Tokens whose words, `items` of each, fill whole blocks. */
static i64 tile_tokens(i64 items) {
    i64 tokens = BLOCK;
    for (; tokens > 1 && tokens / 2 * items % BLOCK == 0;) tokens /= 2;
    return tokens;
}

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS void pack_lanes(const u32 *words, u32 *out, const int bits) {
    u32 line[LANES] = {0};
    int used = 0;
#pragma GCC unroll 32
    for (int place = 0; place < BLOCK / LANES; place++) {
        for (int lane = 0; lane < LANES; lane++) line[lane] |= words[place * LANES + lane] << used;
        used += bits;
        if (used >= 32) {
            memcpy(out, line, sizeof line);
            out += LANES;
            used -= 32;
            for (int lane = 0; lane < LANES; lane++) line[lane] = used ? words[place * LANES + lane] >> (bits - used) : 0;
        }
    }
}

ALWAYS void unpack_lanes(const u32 *from, u32 *words, const int bits) {
    const u32 mask = bits == 32 ? 0xffffffffu : (1u << bits) - 1;
    int used = 0;
#pragma GCC unroll 32
    for (int place = 0; place < BLOCK / LANES; place++) {
        for (int lane = 0; lane < LANES; lane++) {
            u32 word = from[lane] >> used;
            if (used + bits > 32) word |= from[LANES + lane] << (32 - used);
            words[place * LANES + lane] = word & mask;
        }
        used += bits;
        if (used >= 32) {
            used -= 32;
            from += LANES;
        }
    }
}

#define EACH_WIDTH(X) \
    X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) \
    X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31) X(32)
#define PACK_CASE(bits) case bits: pack_lanes(words, out, bits); break;
#define UNPACK_CASE(bits) case bits: unpack_lanes(from, words, bits); break;

#define PASTE(name, size, isa) name##_##size##_##isa
#define EXPANDED(name, size, isa) PASTE(name, size, isa)
#define LOOP(name) EXPANDED(name, SIZE, ISA)
#define OF_ISA(name) EXPANDED(name, any, ISA)
/* The widths of the four codes of words; each code stands for the words from its first on. */
typedef struct {
    u32 widths[4], firsts[4];
    u64 end; /* what is behind the last word of the last code */
} Codes;

enum { MOST_CODED = 28 }; /* bits of a coded word: two of them are read at once */

/* The loops over words of a size (word_loops.h). */
typedef struct {
    u64 (*above_least)(const u8 *, i64, i64 *, u32 *), (*distances)(const u8 *, const u8 *, i64, u32 *);
    void (*ends)(const u8 *, i64, i64, u8 *, u8 *);
    u64 (*range)(const u8 *, const u8 *, i64, i64 *);
    void (*less)(const u8 *, i64, i64, i64, u32 *), (*more)(const u32 *, i64, i64, u8 *, i64);
    void (*add_least)(const u32 *, i64, i64, u8 *), (*add_distances)(const u32 *, const u8 *, i64, u8 *);
} WordLoops;

typedef struct {
    void (*pack)(const u32 *, u32 *, i64), (*unpack)(const u32 *, u32 *, i64);
    void (*count_codes)(const Codes *, const u32 *, i64 *), (*pack_codes)(const Codes *, const u32 *, i64, u8 *);
    void (*unpack_codes)(const Codes *, const u8 *, i64, i64, u32 *);
    const WordLoops *words[4]; /* of 1, 2, 4 and 8 bytes */
} BlockLoops;

#define ISA plain
#define TARGET
#include "loops.h"
#if defined(__x86_64__)
#define ISA avx2
#define TARGET __attribute__((target("avx2,bmi2")))
#include "loops.h"
#endif

#if defined(__x86_64__)
/* Whether the processor and the system have AVX2 and BMI2; asked once. `__builtin_cpu_supports` would link the runtime
   of the compiler, and zig's comes with a memcpy of its own, which is slower than that of the system. */
static int has_avx2(void) {
    static int known; /* 0 before it was asked, 1 for no, 2 for yes */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found) return found == 2;
    unsigned a, b, c, d, state = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) && c & bit_OSXSAVE) __asm__("xgetbv" : "=a"(state), "=d"(d) : "c"(0));
    int fine = (state & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_AVX2 && b & bit_BMI2;
    __atomic_store_n(&known, 1 + fine, __ATOMIC_RELAXED);
    return fine;
}
#endif

/* The loops for this processor: AVX2 packs three to four times as fast as SSE2. */
static const BlockLoops *block_loops(void) {
#if defined(__x86_64__)
    if (has_avx2()) return &loops_any_avx2;
#endif
    return &loops_any_plain;
}

static const WordLoops *word_loops(const BlockLoops *loops, i64 size) { return loops->words[__builtin_ctzll((u64)size)]; }

/* Writes a block to `out`, which has room for 4 * (BLOCK + LANES) bytes; `words` has BLOCK of them, 0 from n on. */
static void pack_block(const BlockLoops *loops, const u32 *words, i64 n, i64 bits, u8 *out) {
    u32 numbers[BLOCK + LANES];
    if (n == BLOCK && (uintptr_t)out % 4 == 0) {
        loops->pack(words, (u32 *)out, bits);
        return;
    }
    if (n >= FEW_WORDS) loops->pack(words, numbers, bits);
    else {
        memset(numbers, 0, sizeof numbers);
        for (i64 i = 0, at = 0; i < n; i++, at += bits) {
            u64 word = (u64)words[i] << (at & 31);
            numbers[at >> 5] |= (u32)word;
            numbers[(at >> 5) + 1] |= (u32)(word >> 32);
        }
    }
    memcpy(out, numbers, 4 * (size_t)block_numbers(n, bits));
}

static void unpack_block(const BlockLoops *loops, const u8 *from, i64 n, i64 bits, u32 *words) {
    u32 numbers[BLOCK + LANES];
    if (n == BLOCK && (uintptr_t)from % 4 == 0) {
        loops->unpack((const u32 *)from, words, bits);
        return;
    }
    i64 count = block_numbers(n, bits);
    memcpy(numbers, from, 4 * (size_t)count);
    memset(numbers + count, 0, sizeof numbers - 4 * (size_t)count);
    if (n >= FEW_WORDS) loops->unpack(numbers, words, bits);
    else
        for (i64 i = 0, at = 0; i < n; i++, at += bits) {
            u64 pair = numbers[at >> 5] | (u64)numbers[(at >> 5) + 1] << 32;
            words[i] = (u32)(pair >> (at & 31) & ((1ull << bits) - 1));
        }
}
