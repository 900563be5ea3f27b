/* Words of 1, 2, 4, 8 or 16 bytes, and memory that they lie in. */

enum { AHEAD = 8192 }; /* bytes to prefetch ahead of a read */

/* A word, repeated over 16 bytes. */
typedef struct {
    u64 low, high;
} Pattern;

static const Pattern ZEROS = {0, 0};

static u64 load(const u8 *p) {
    u64 word;
    memcpy(&word, p, 8);
    return word;
}

/* A word of up to 8 bytes, or the first half of one of 16. */
static u64 word_at(const u8 *p, i64 size) {
    uint16_t two;
    u32 four;
    switch (size) {
    case 1: return *p;
    case 2: memcpy(&two, p, 2); return two;
    case 4: memcpy(&four, p, 4); return four;
    default: return load(p);
    }
}

/* The number that the lowest `size` bytes of a word are. */
static i64 as_signed(u64 word, i64 size) {
    i64 unused = size < 8 ? 64 - 8 * size : 0;
    return (i64)(word << unused) >> unused;
}

static i64 signed_word(const u8 *p, i64 size) { return as_signed(word_at(p, size), size); }

static Pattern repeated(const u8 *word, i64 size) {
    Pattern pattern;
    for (i64 i = 0; i < 16; i += size) memcpy((u8 *)&pattern + i, word, (size_t)size);
    return pattern;
}

/* The number of bytes at the begin of p[0:n] that repeat a pattern. */
static i64 equal_bytes(const u8 *p, i64 n, Pattern pattern) {
    i64 at = 0;
    for (; at + 512 <= n; at += 512) {
        u64 differing = 0;
        for (i64 line = 0; line < 512; line += 64) __builtin_prefetch(p + at + AHEAD + line);
        for (i64 i = 0; i < 512; i += 16)
            differing |= (load(p + at + i) ^ pattern.low) | (load(p + at + i + 8) ^ pattern.high);
        if (differing) break;
    }
    for (; at + 16 <= n; at += 16)
        if ((load(p + at) ^ pattern.low) | (load(p + at + 8) ^ pattern.high)) break;
    while (at < n && p[at] == ((const u8 *)&pattern)[at & 15]) at++;
    return at;
}

/* Repeats a pattern over p[0:n]. Past the cache, if `stream`: memory that is not read soon need not be loaded first. */
static void fill(u8 *p, i64 n, Pattern pattern, i64 stream) {
    i64 at = 0;
#if defined(__SSE2__)
    if (stream && n >= 4096) {
        at = -(intptr_t)p & 15;
        Pattern turned;
        for (i64 i = 0; i < 16; i++) ((u8 *)&turned)[i] = ((const u8 *)&pattern)[(at + i) & 15];
        memcpy(p, &pattern, 16);
        __m128i words = _mm_loadu_si128((const __m128i *)&turned);
        for (; at + 64 <= n; at += 64)
            for (i64 i = 0; i < 64; i += 16) _mm_stream_si128((__m128i *)(p + at + i), words);
        for (; at < n; at++) p[at] = ((const u8 *)&pattern)[at & 15];
        return;
    }
#endif
    (void)stream;
    for (; at + 16 <= n; at += 16) memcpy(p + at, &pattern, 16);
    if (at < n) memcpy(p + at, &pattern, (size_t)(n - at)); /* no bytes may lie at NULL */
}

/* Copies n elements of `size` bytes that lie `from_step` and `to_step` bytes apart. */
static void copy_apart(u8 *to, i64 to_step, const u8 *from, i64 from_step, i64 n, i64 size) {
    if (to_step == size && from_step == size) memcpy(to, from, (size_t)(n * size));
    else if (size == 16) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 16);
    else if (size == 32) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 32);
    else if (size == 8) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 8);
    else if (size == 4) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 4);
    else for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, (size_t)size);
}

static inline void add_words_of(u8 *to, const u8 *words, const u8 *others, u64 times, i64 n, i64 size) {
    for (i64 at = 0; at < n * size; at += size) {
        u64 sum = word_at(words + at, size) + times * word_at(others + at, size);
        memcpy(to + at, &sum, (size_t)size);
    }
}

/* Adds n words to others, times 1 or -1; loops of known size are faster. */
static void add_words(u8 *to, const u8 *words, const u8 *others, u64 times, i64 n, i64 size) {
    if (size == 4) add_words_of(to, words, others, times, n, 4);
    else add_words_of(to, words, others, times, n, size);
}

/* Whether bytes of bools are other than 0 and 1. */
static int are_odd(const u8 *bools, i64 n) {
    u8 all = 0;
    for (i64 i = 0; i < n; i++) all |= bools[i];
    return all > 1;
}

static u64 hash_words(const u8 *p, i64 nbytes) {
    u64 hash = (u64)nbytes * 0x9E3779B97F4A7C15ull;
    for (; nbytes >= 8; p += 8, nbytes -= 8) hash = (hash ^ load(p)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    for (; nbytes > 0; p++, nbytes--) hash = (hash ^ *p) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
}

static i64 bits_for(u64 most) { return most ? 64 - __builtin_clzll(most) : 0; }
