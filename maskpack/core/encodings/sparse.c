/* SPARSE     a: words of each row that are not 0; b: their places in the row; c: the words */

static int sparse_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    i64 size = rows->size;
    List each = {0}, places = {0}, values = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row), before = places.count;
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        for (i64 at = 0; at < n && done == FITS; at++) {
            at += equal_bytes(words + at * size, (n - at) * size, ZEROS) / size;
            if (at == n) break;
            if (!push(&places, at) || !push(&values, (i64)word_at(words + at * size, size))) done = NO_MEMORY;
            else if (out->used + places.count * (1 + size) > out->room) done = FULL;
        }
        if (done == FITS && !push(&each, places.count - before)) done = NO_MEMORY;
    }
    if (done == FITS) {
        int fits = put_numbers(out, &entry->a, &each) && (!places.count || put_list(out, &entry->b, &places, 0, 0));
        u8 *to = fits ? reserve(out, &entry->c, size, values.count) : NULL;
        for (i64 i = 0; to && i < values.count; i++) put_word(to + i * size, values.numbers[i], size);
        done = to ? FITS : FULL;
    }
    free(each.numbers);
    free(places.numbers);
    free(values.numbers);
    return done;
}

/* Words of the row at the cursor that are stored. */
static i64 sparse_stored(const Cursor *cursor) {
    const Entry *entry = cursor->entry;
    return cut_to(number_at(cursor->table->body, &entry->a, cursor->row), entry->c.count - cursor->b);
}

static void sparse_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 size = entry->size;
    memset(out, 0, (size_t)(n * size));
    for (i64 count = sparse_stored(cursor); count > 0; count--, cursor->b++) {
        i64 place = number_at(body, &entry->b, cursor->b);
        if (place >= 0 && place < n) memcpy(out + place * size, body + entry->c.at + cursor->b * size, (size_t)size);
    }
}

static void sparse_skip(Cursor *cursor, i64 n) {
    cursor->b += sparse_stored(cursor);
}

static void sparse_cut(Entry *own, const Mark *from, const Mark *to) {
    array_cut(&own->b, from->b, to->b);
    array_cut(&own->c, from->b, to->b);
    array_cut_each(&own->a, from->row, to->row);
}

static int sparse_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    const u8 *body = check->table->body;
    i64 at = 0;
    if (!of_each(&entry->a, rows) || entry->c.size != entry->size || entry->b.count != entry->c.count) return 0;
    if (rows && entry->a.count == 1 && !number_at(body, &entry->a, 0)) return !entry->b.count;
    for (i64 row = 0; row < rows; row++) {
        i64 n = row_elements(check->table, entry, lengths, row) * entry->items, count = number_at(body, &entry->a, row), before = -1;
        if (count < 0 || count > entry->b.count - at) return 0;
        for (; count > 0; count--, at++) {
            i64 place = number_at(body, &entry->b, at);
            if (place <= before || place >= n) return 0;
            before = place;
        }
    }
    return at == entry->b.count;
}

static int sparse_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    return array_is_odd(check->table->body, &check->table->entries[index].c);
}

static int sparse_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    i64 total = 0;
    source->kind = BY_SEARCH;
    source->data = entry->b.at;
    source->data_size = entry->b.size;
    source->more = entry->c.at;
    source->begins = stage->used;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++) add(stage, total += number_at(stage->body, &entry->a, row));
    return 1;
}

static void sparse_place(Placing *placing, Placed *placed, Entry *entry) {
    i64 words = placed->sums[2];
    place_counts(placing, placed, &entry->a);
    placed->each[1] = bytes_between(0, placed->most, 0);
    placed->each[2] = entry->size;
    if (words) place_array(placing, &entry->b, placed->each[1], words);
    place_array(placing, &entry->c, entry->size, words);
    if (!words) placed->way = LEFT_OUT;
}

static const Encoding SPARSE_ENCODING = {
    .marked = 1, .encode = sparse_encode, .decode = sparse_decode, .skip = sparse_skip, .cut = sparse_cut, .check = sparse_check,
    .is_odd = sparse_is_odd, .stage = sparse_stage, .place = sparse_place,
};
