/* The loops over words of SIZE bytes (S signed, T unsigned) for one processor (ISA, TARGET); lanes.h includes this once for
   each. Words less the least of them; zigzag distances to others, which are small on either side; and back. The first two
   return the largest number, or one with its highest bit. `ends` are the least and the largest of n words `items` apart,
   for each of these; `range` is that of some of them. `less` and `more` are the first and its inverse for n tokens of EIGHT
   words each, `step` bytes apart: loops of known length are faster. */

TARGET static u64 LOOP(above_least)(const u8 *from, i64 n, i64 *least, u32 *out) {
    S words[BLOCK], low, high;
    memcpy(words, from, (size_t)n * SIZE);
    for (i64 i = n; i < BLOCK; i++) words[i] = words[0]; /* loops of known length are much faster */
    low = high = words[0];
    for (i64 i = 0; i < BLOCK; i++) {
        low = words[i] < low ? words[i] : low;
        high = words[i] > high ? words[i] : high;
    }
    for (i64 i = 0; i < BLOCK; i++) out[i] = (u32)(T)((T)words[i] - (T)low);
    for (i64 i = n; i < BLOCK; i++) out[i] = 0;
    *least = low;
    return (T)((T)high - (T)low);
}
TARGET static void LOOP(ends)(const u8 *from, i64 n, i64 items, u8 *low, u8 *high) {
    S *restrict least = (S *)low, *restrict most = (S *)high;
    memcpy(low, from, (size_t)items * SIZE);
    memcpy(high, from, (size_t)items * SIZE);
    for (i64 at = 1; at < n; at++)
        for (i64 i = 0; i < items; i++) {
            S word;
            memcpy(&word, from + (at * items + i) * SIZE, SIZE);
            least[i] = word < least[i] ? word : least[i];
            most[i] = word > most[i] ? word : most[i];
        }
}
static u64 LOOP(range)(const u8 *low, const u8 *high, i64 n, i64 *least) {
    const S *lows = (const S *)low, *highs = (const S *)high;
    S first = *lows, last = *highs;
    for (i64 i = 1; i < n; i++) {
        first = lows[i] < first ? lows[i] : first;
        last = highs[i] > last ? highs[i] : last;
    }
    *least = first;
    return (T)((T)last - (T)first);
}
TARGET static void LOOP(less)(const u8 *from, i64 step, i64 n, i64 least, u32 *out) {
    for (i64 at = 0; at < n; at++) {
        T words[EIGHT];
        memcpy(words, from + at * step, sizeof words);
        for (i64 i = 0; i < EIGHT; i++) out[at * EIGHT + i] = (u32)(T)(words[i] - (T)least);
    }
    for (i64 i = n * EIGHT; i < BLOCK; i++) out[i] = 0;
}
TARGET static void LOOP(more)(const u32 *numbers, i64 least, i64 n, u8 *to, i64 step) {
    for (i64 at = 0; at < n; at++) {
        T words[EIGHT];
        for (i64 i = 0; i < EIGHT; i++) words[i] = (T)((T)numbers[at * EIGHT + i] + (T)least);
        memcpy(to + at * step, words, sizeof words);
    }
}
TARGET static u64 LOOP(distances)(const u8 *from, const u8 *near, i64 n, u32 *out) {
    T words[BLOCK], others[BLOCK], any = 0;
    memcpy(words, from, (size_t)n * SIZE);
    memcpy(others, near, (size_t)n * SIZE);
    for (i64 i = n; i < BLOCK; i++) words[i] = others[i] = 0;
    for (i64 i = 0; i < BLOCK; i++) {
        T distance = (T)(words[i] - others[i]), sign = (T)((S)distance >> (8 * SIZE - 1));
        T number = (T)((T)(distance << 1) ^ sign);
        any |= number;
        out[i] = (u32)number;
    }
    return any;
}
TARGET static void LOOP(add_least)(const u32 *numbers, i64 least, i64 n, u8 *to) {
    T words[BLOCK];
    for (i64 i = 0; i < n; i++) words[i] = (T)((T)numbers[i] + (T)least);
    memcpy(to, words, (size_t)n * SIZE);
}
TARGET static void LOOP(add_distances)(const u32 *numbers, const u8 *near, i64 n, u8 *to) {
    T words[BLOCK];
    memcpy(words, near, (size_t)n * SIZE);
    for (i64 i = 0; i < n; i++) {
        T number = (T)numbers[i];
        words[i] = (T)(words[i] + (T)((T)(number >> 1) ^ (T)(0 - (T)(number & 1))));
    }
    memcpy(to, words, (size_t)n * SIZE);
}

static const WordLoops LOOP(words) = {
    LOOP(above_least), LOOP(distances), LOOP(ends), LOOP(range), LOOP(less), LOOP(more), LOOP(add_least), LOOP(add_distances),
};

#undef SIZE
#undef S
#undef T
