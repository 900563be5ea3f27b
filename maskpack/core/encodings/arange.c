/* ARANGE     a: the first word of each row; each word is `number` above the one before */

static void arange_write(u8 *out, i64 n, i64 first, i64 step, i64 size) {
#define RANGE(bytes)                                      \
    case bytes:                                           \
        for (i64 i = 0; i < n; i++) {                     \
            u64 word = (u64)first + (u64)i * (u64)step;   \
            memcpy(out + bytes * i, &word, bytes);        \
        }                                                 \
        break;
    switch (size) { RANGE(1) RANGE(2) RANGE(4) RANGE(8) }
}

static int arange_fits(const u8 *words, i64 n, i64 first, i64 step, i64 size) {
    u64 any = 0;
#define RISES(wide, T)                                                    \
    case wide:                                                            \
        for (i64 i = 0; i < n; i++) {                                     \
            T word;                                                       \
            memcpy(&word, words + wide * i, wide);                        \
            any |= (T)(word ^ (T)((T)first + (T)i * (T)step));            \
        }                                                                 \
        break;
    switch (size) { RISES(1, u8) RISES(2, uint16_t) RISES(4, u32) RISES(8, u64) }
    return !any;
}

static int arange_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    i64 size = rows->size, known = 0, real = -1;
    List firsts = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        else if (n) {
            i64 first = signed_word(words, size);
            if (n > 1 && !known) {
                known = 1;
                entry->number = as_signed((u64)signed_word(words + size, size) - (u64)first, size);
            }
            if (n > 1 && !arange_fits(words, n, first, entry->number, size)) done = MISFIT;
            else if (!push(&firsts, first)) done = NO_MEMORY;
            if (real < 0) real = row;
        } else if (!push(&firsts, firsts.count ? firsts.numbers[firsts.count - 1] : 0)) done = NO_MEMORY;
    }
    if (done == FITS) {
        for (i64 row = 0; row < real; row++) firsts.numbers[row] = firsts.numbers[real]; /* of empty rows, any will do */
        done = !known ? MISFIT : put_signed(out, &entry->a, &firsts) ? FITS : FULL;
    }
    free(firsts.numbers);
    return done;
}

static void arange_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    arange_write(out, n, signed_at(cursor->table->body, &entry->a, cursor->row), entry->number, entry->size);
}

static void arange_cut(Entry *own, const Mark *from, const Mark *to) { array_cut_each(&own->a, from->row, to->row); }

static int arange_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    return entry->a.size <= entry->size && of_each(&entry->a, rows) && !entry->b.count && !entry->c.count;
}

static int arange_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    u8 any = 0;
    for (i64 row = 0; row < rows_that_differ(entry, lengths, rows); row++) {
        u8 words[3]; /* what rises by equal steps leaves 0 and 1 within three words */
        i64 n = row_elements(check->table, entry, lengths, row) * entry->items;
        arange_write(words, n < 3 ? n : 3, signed_at(check->table->body, &entry->a, row), entry->number, 1);
        for (i64 i = 0; i < n && i < 3; i++) any |= words[i];
    }
    return any > 1;
}

static int arange_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    source->kind = BY_PIECE;
    source->single = entry->a.count == 1;
    return 1;
}

static void arange_place(Placing *placing, Placed *placed, Entry *entry) {
    i64 before = placed->real < 0 ? 0 : placed->stats[placed->real].low; /* of empty rows, any will do */
    for (i64 i = 0; i < placed->n; i++) {
        i64 row = placed->index ? placed->index[i] : i;
        if (unit_words(placing, placed->number, row)) before = placed->stats[row].low;
        placing->numbers[i] = before;
    }
    place_numbers(placing, &entry->a, placed->n, 1);
    placed->way = LEFT_OUT;
}

static const Encoding ARANGE_ENCODING = {
    .integers = 1, .encode = arange_encode, .decode = arange_decode, .cut = arange_cut, .check = arange_check,
    .is_odd = arange_is_odd, .stage = arange_stage, .place = arange_place,
};
