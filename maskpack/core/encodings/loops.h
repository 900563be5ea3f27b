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
static u64 OF_ISA(above_least)(i64 size, const u8 *from, i64 n, i64 *least, u32 *out) {
    return BY_SIZE(above_least, size, from, n, least, out);
}
static void OF_ISA(ends)(i64 size, const u8 *from, i64 n, i64 items, u8 *low, u8 *high) {
    BY_SIZE(ends, size, from, n, items, low, high);
}
static u64 OF_ISA(range)(i64 size, const u8 *low, const u8 *high, i64 n, i64 *least) {
    return BY_SIZE(range, size, low, high, n, least);
}
static void OF_ISA(less)(i64 size, const u8 *from, i64 step, i64 n, i64 least, u32 *out) {
    BY_SIZE(less, size, from, step, n, least, out);
}
static void OF_ISA(more)(i64 size, const u32 *numbers, i64 least, i64 n, u8 *to, i64 step) {
    BY_SIZE(more, size, numbers, least, n, to, step);
}
static u64 OF_ISA(distances)(i64 size, const u8 *from, const u8 *near, i64 n, u32 *out) {
    return BY_SIZE(distances, size, from, near, n, out);
}
static void OF_ISA(add_least)(i64 size, const u32 *numbers, i64 least, i64 n, u8 *to) {
    BY_SIZE(add_least, size, numbers, least, n, to);
}
static void OF_ISA(add_distances)(i64 size, const u32 *numbers, const u8 *near, i64 n, u8 *to) {
    BY_SIZE(add_distances, size, numbers, near, n, to);
}
static const BlockLoops OF_ISA(loops) = {OF_ISA(pack),      OF_ISA(unpack),    OF_ISA(above_least),
                                       OF_ISA(distances), OF_ISA(ends), OF_ISA(range), OF_ISA(less), OF_ISA(more), OF_ISA(add_least), OF_ISA(add_distances)};

#undef ISA
#undef TARGET
