/* The loops over blocks for one processor (ISA, TARGET); lanes.h includes this once for each. */

#define SIZE 1
#define S int8_t
#define T uint8_t
#include "word_loops.h"
#define SIZE 2
#define S int16_t
#define T uint16_t
#include "word_loops.h"
#define SIZE 4
#define S int32_t
#define T uint32_t
#include "word_loops.h"
#define SIZE 8
#define S int64_t
#define T uint64_t
#include "word_loops.h"

TARGET static void OF_ISA(pack)(const u32 *words, u32 *out, i64 bits) {
    switch (bits) { EACH_WIDTH(PACK_CASE) default: break; }
}
TARGET static void OF_ISA(unpack)(const u32 *from, u32 *words, i64 bits) {
    switch (bits) { EACH_WIDTH(UNPACK_CASE) default: memset(words, 0, 4 * BLOCK); }
}
/* How many of BLOCK words have each code; the fifth number is 1 if some word has none. */
TARGET static void OF_ISA(count_codes)(const Codes *codes, const u32 *words, i64 *counts) {
    u32 second = codes->firsts[1], third = codes->firsts[2], fourth = codes->firsts[3], most = 0, from[4] = {BLOCK, 0, 0, 0};
    for (i64 i = 0; i < BLOCK; i++) {
        from[1] += words[i] >= second;
        from[2] += words[i] >= third;
        from[3] += words[i] >= fourth;
        most = words[i] > most ? words[i] : most;
    }
    for (int code = 0; code < 4; code++) counts[code] = from[code] - (code < 3 ? from[code + 1] : 0);
    counts[4] = most >= codes->end;
}

/* Writes the codes of n words, and then the words, two at a time. `words` has 0 behind them, `out` room for 8 bytes more. */
TARGET static void OF_ISA(pack_codes)(const Codes *codes, const u32 *words, i64 n, u8 *out) {
    u32 second = codes->firsts[1], third = codes->firsts[2], fourth = codes->firsts[3], used = 0;
    u8 *to = out + 4 * ((n + CODES - 1) / CODES);
    u64 waiting = 0;
    memset(out, 0, (size_t)(to - out));
    for (i64 i = 0; i < n; i += 2) {
        u32 one = words[i], two = words[i + 1];
        u32 code = (u32)(one >= second) + (one >= third) + (one >= fourth), other = (u32)(two >= second) + (two >= third) + (two >= fourth);
        out[i >> 2] |= (u8)((code | other << 2) << (i & 2) * 2);
        waiting |= ((u64)(one - codes->firsts[code]) | (u64)(two - codes->firsts[other]) << codes->widths[code]) << used;
        used += codes->widths[code] + (i + 1 < n ? codes->widths[other] : 0);
        memcpy(to, &waiting, 8);
        to += used >> 3;
        waiting >>= used & ~7u;
        used &= 7;
    }
    memcpy(to, &waiting, 8); /* 0 behind the words */
}

/* The n words of a coded block of some u32 numbers; two at a time. `words` has room for BLOCK. */
TARGET static void OF_ISA(unpack_codes)(const Codes *codes, const u8 *from, i64 n, i64 numbers, u32 *words) {
    struct {
        u32 width, both, mask, other_mask, first, other_first;
    } pairs[16];
    u8 copy[4 * (BLOCK / CODES + BLOCK) + 8]; /* words are read beyond the last one */
    i64 bit = 32 * ((n + CODES - 1) / CODES);
    memcpy(copy, from, 4 * (size_t)numbers);
    memset(copy + 4 * numbers, 0, 8);
    for (int pair = 0; pair < 16; pair++) {
        u32 one = pair & 3, two = pair >> 2, width = codes->widths[one], other = codes->widths[two];
        u32 masks[2] = {(u32)((1ull << width) - 1), (u32)((1ull << other) - 1)};
        memcpy(pairs + pair, (u32[]){width, width + other, masks[0], masks[1], codes->firsts[one], codes->firsts[two]}, sizeof *pairs);
    }
    for (i64 i = 0; i < n; i += 2) {
        int pair = copy[i >> 2] >> (i & 2) * 2 & 15;
        u64 both = load(copy + (bit >> 3)) >> (bit & 7);
        words[i] = pairs[pair].first + ((u32)both & pairs[pair].mask);
        words[i + 1] = pairs[pair].other_first + ((u32)(both >> pairs[pair].width) & pairs[pair].other_mask);
        bit += pairs[pair].both;
    }
}

static const BlockLoops OF_ISA(loops) = {
    OF_ISA(pack), OF_ISA(unpack), OF_ISA(count_codes), OF_ISA(pack_codes), OF_ISA(unpack_codes),
    {&EXPANDED(words, 1, ISA), &EXPANDED(words, 2, ISA), &EXPANDED(words, 4, ISA), &EXPANDED(words, 8, ISA)},
};

#undef ISA
#undef TARGET
