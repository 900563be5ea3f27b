/* PLAIN      a: the words */

static int plain_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    u8 *to = reserve(out, &entry->a, rows->size, total_words(rows));
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 nbytes = row_length(rows, row) * rows->size;
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        memcpy(to, words, (size_t)nbytes);
        to += nbytes;
    }
    return FITS;
}

static void plain_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *from = cursor->table->body + entry->a.at + cursor->a * entry->a.size;
    if (n > entry->a.count - cursor->a) memset(out, 0, (size_t)(n * entry->size));
    else memcpy(out, from, (size_t)(n * entry->size));
    cursor->a += n;
}

static void plain_skip(Cursor *cursor, i64 n) { cursor->a += n; }

static void plain_cut(Entry *own, const Mark *from, const Mark *to) { array_cut(&own->a, from->a, to->a); }

static int plain_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    return entry->a.size == entry->size && entry->a.count == total && !entry->b.count && !entry->c.count;
}

static int plain_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    return array_is_odd(check->table->body, &check->table->entries[index].a);
}

static int plain_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    source->begins = extent->table;
    source->begin_unit = extent->unit;
    return 1;
}

static void plain_place(Placing *placing, Placed *placed, Entry *entry) {
    placed->each[0] = entry->size;
    place_array(placing, &entry->a, entry->size, placed->sums[0]);
}

static const Encoding PLAIN_ENCODING = {
    .arrays = "a", .once = "", .is_signed = "", .encode = plain_encode,
    .decode = plain_decode, .skip = plain_skip, .cut = plain_cut, .check = plain_check,
    .is_odd = plain_is_odd, .stage = plain_stage, .place = plain_place,
};
