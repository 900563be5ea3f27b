/* NARROW     a: words less `number`, in 1, 2 or 4 bytes */

/* The least number of bytes, of 1, 2, 4 or 8, for the words less a base; 0 words need one. */
static void narrow_fit(const Rows *rows, i64 *base, i64 *bytes) {
    i64 size = rows->size, low = 0, high = 0, known = 0;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        for (i64 i = 0; words && i < n; i++) {
            i64 word = signed_word(words + i * size, size);
            low = !known || word < low ? word : low;
            high = !known || word > high ? word : high;
            known = 1;
        }
    }
    u64 range = (u64)high - (u64)low;
    *bytes = range < 1 << 8 ? 1 : range < 1 << 16 ? 2 : range < (u64)1 << 32 ? 4 : 8;
    *base = low >= 0 && (u64)high < (*bytes == 8 ? ~0ull : 1ull << 8 * *bytes) ? 0 : low;
}

static int narrow_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    i64 narrow = entry->a.size, size = rows->size;
    if (narrow >= size || narrow == 8) return MISFIT;
    u8 *to = reserve(out, &entry->a, narrow, total_words(rows));
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        u64 any = 0;
#define NARROWED(low, F, wide, T)                         \
    if (narrow == low && size == wide)                    \
        for (i64 i = 0; i < n; i++) {                     \
            T word;                                       \
            memcpy(&word, words + wide * i, wide);        \
            word = (T)(word - (T)entry->number);          \
            any |= word;                                  \
            F number = (F)word;                           \
            memcpy(to + low * i, &number, low);           \
        }
        NARROWED(1, u8, 2, uint16_t)
        NARROWED(1, u8, 4, u32)
        NARROWED(1, u8, 8, u64)
        NARROWED(2, uint16_t, 4, u32)
        NARROWED(2, uint16_t, 8, u64)
        NARROWED(4, u32, 8, u64)
        if (any >> 8 * narrow) return MISFIT;
        to += n * narrow;
    }
    return FITS;
}

static void narrow_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *from = cursor->table->body + entry->a.at + cursor->a * entry->a.size;
    cursor->a += n;
    if (cursor->a > entry->a.count) {
        memset(out, 0, (size_t)(n * entry->size));
        return;
    }
#define WIDEN(low, F, wide, T)                              \
    if (entry->a.size == low && entry->size == wide)        \
        for (i64 i = 0; i < n; i++) {                       \
            F number;                                       \
            memcpy(&number, from + low * i, low);           \
            T word = (T)((T)number + (T)entry->number);     \
            memcpy(out + wide * i, &word, wide);            \
        }
    WIDEN(1, u8, 2, uint16_t)
    WIDEN(1, u8, 4, u32)
    WIDEN(1, u8, 8, u64)
    WIDEN(2, uint16_t, 4, u32)
    WIDEN(2, uint16_t, 8, u64)
    WIDEN(4, u32, 8, u64)
}

static int narrow_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    return entry->a.size < entry->size && entry->a.count == total && !entry->b.count && !entry->c.count;
}

static int narrow_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    return 1; /* no word is narrower than a byte */
}

static void narrow_place(Placing *placing, Placed *placed, Entry *entry) {
    placed->each[0] = placed->unit->bytes;
    place_array(placing, &entry->a, placed->each[0], placed->sums[0]);
}

static const Encoding NARROW_ENCODING = {
    .integers = 1, .fit = narrow_fit, .encode = narrow_encode, .decode = narrow_decode, .skip = plain_skip, .cut = plain_cut,
    .check = narrow_check, .is_odd = narrow_is_odd, .stage = plain_stage, .place = narrow_place,
};
