/* BITMAP     a: one of two words, a bit each, every row from a new byte on; b: the two words */

static int bitmap_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    i64 size = rows->size, nbytes = 0, known = 0;
    u64 pair[2] = {0, 0};
    for (i64 row = 0; row < rows->rows; row++) nbytes += (row_length(rows, row) + 7) / 8;
    u8 *bits = reserve(out, &entry->a, 1, nbytes), *words_to = bits ? reserve(out, &entry->b, size, 2) : NULL;
    if (!words_to) return FULL;
    memset(bits, 0, (size_t)nbytes);
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        for (i64 i = 0; i < n; i++) {
            u64 word = word_at(words + i * size, size);
            if (!known) pair[0] = pair[1] = word, known = 1;
            if (word != pair[0] && known == 1) pair[1] = word, known = 2;
            if (word != pair[0] && word != pair[1]) return MISFIT;
            bits[i >> 3] |= (u8)((word != pair[0]) << (i & 7));
        }
        bits += (n + 7) / 8;
    }
    put_word(words_to, (i64)pair[0], size);
    put_word(words_to + size, (i64)pair[1], size);
    return FITS;
}

static void bitmap_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body, *bits = body + entry->a.at + cursor->a;
    i64 size = entry->size;
    if ((n + 7) / 8 > entry->a.count - cursor->a) memset(out, 0, (size_t)(n * size));
    else for (i64 i = 0; i < n; i++)
        memcpy(out + i * size, body + entry->b.at + (bits[i >> 3] >> (i & 7) & 1) * size, (size_t)size);
    cursor->a += (n + 7) / 8;
}

static void bitmap_skip(Cursor *cursor, i64 n) { cursor->a += (n + 7) / 8; }

static int bitmap_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    if (entry->a.size != 1 || entry->a.count != count_pieces(check->table, entry, lengths, rows, 8)) return 0;
    return entry->b.size == entry->size && entry->b.count == 2 && !entry->c.count;
}

static int bitmap_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    return array_is_odd(check->table->body, &check->table->entries[index].b);
}

static int bitmap_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    i64 total = 0;
    source->kind = BY_BIT;
    source->more = entry->b.at;
    source->begins = stage->used;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++) add(stage, total += (words_in(extent, entry, row) + 7) / 8);
    return 1;
}

static void bitmap_place(Placing *placing, Placed *placed, Entry *entry) {
    Unit *unit = placed->unit;
    if (placed->real >= 0 && placed->stats[placed->real].low == unit->second) { /* the first word of all is stored first */
        unit->second = unit->number;
        unit->number = placed->stats[placed->real].low;
    }
    entry->number = 0;
    placed->each[0] = 1;
    place_array(placing, &entry->a, 1, placed->sums[0]);
    u8 *pair = place_small(placing, &entry->b, entry->size, 2);
    put_word(pair, unit->number, entry->size);
    put_word(pair + entry->size, unit->second, entry->size);
}

static const Encoding BITMAP_ENCODING = {
    .marked = 1, .encode = bitmap_encode, .decode = bitmap_decode, .skip = bitmap_skip, .cut = plain_cut, .check = bitmap_check,
    .is_odd = bitmap_is_odd, .stage = bitmap_stage, .place = bitmap_place,
};
