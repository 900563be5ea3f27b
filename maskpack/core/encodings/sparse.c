/* SPARSE     each row is zeros and stored words, by turns; it ends with zeros, or with none
              a: zeros before each stretch of stored words; b: words of each stored row; c: words of each stretch
   The stored words of a row are the row of the entry `first`; with `second`, less those of that field in the same places. */

/* Divides a row of n words into zeros and stretches of up to `most` words, which are stored, less those of `near` if it is
   there; false without memory. */
static int divide_row(Search *search, i64 row, const u8 *words, const u8 *near, i64 n, i64 most) {
    i64 size = search->rows->size, end = 0;
    for (;;) {
        i64 before = end, at = end + equal_bytes(words + end * size, (n - end) * size, ZEROS) / size;
        if (at == n) break;
        for (end = at + 1; end < n && end - at < most && word_at(words + end * size, size); end++) {}
        u8 *to = search->stored + search->used * size;
        if (near) add_words(to, words + at * size, near + at * size, ~0ull, end - at, size);
        else memcpy(to, words + at * size, (size_t)((end - at) * size));
        search->used += end - at;
        if (!push(&search->each, at - before) || !push(&search->copies, end - at)) return 0;
    }
    search->bounds[row + 1] = search->used;
    return push(&search->lengths, search->used - search->bounds[row]);
}

/* Divides all rows. If most stretches are one word long, all are: a number less for each of them. */
static int divide(Search *search, const Rows *rows, const Rows *near) {
    *search = (Search){.rows = rows};
    search->stored = malloc((size_t)(total_words(rows) * rows->size + 8));
    search->bounds = calloc((size_t)rows->rows + 1, sizeof(i64));
    for (i64 most = MANY; most; most = most > 1 && search->used < 2 * search->copies.count && search->used > search->copies.count) {
        search->used = search->each.count = search->lengths.count = search->copies.count = 0;
        for (i64 row = 0; row < rows->rows; row++) {
            const u8 *words = row_words(rows, row), *beside = near ? row_words(near, row) : NULL;
            if (!words) return STRAY;
            if (!search->stored || !search->bounds || !divide_row(search, row, words, beside, row_length(rows, row), most)) return NO_MEMORY;
        }
    }
    return FITS;
}

/* Rows of packed values as two entries; as the last time, with the differences to `near` if these were stored then. MISFIT if
   few words are 0. */
static int sparse_encode(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again) {
    Search search;
    const Rows *beside = again && !form->number ? NULL : near;
    int done = divide(&search, rows, beside);
    if (done == FITS && !again && 16 * search.used > 15 * total_words(rows)) done = MISFIT;
    if (done == FITS) done = divided_encode(&search, SPARSE, hints, integers || beside, out, entries, form, again);
    if (beside) entries[1].second = OF_JOB_NEAR;
    form->number = beside != NULL;
    search_close(&search);
    return done;
}

/* The words of the next stretch of the row at the cursor, of which `left` are stored, and the zeros before it. */
static i64 stretch_next(Cursor *cursor, i64 left, i64 *zeros) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    *zeros = number_at(body, &entry->a, cursor->c);
    return 1 + cut_to((i64)((u64)number_at(body, &entry->c, cursor->c++) - 1), left - 1);
}

static void sparse_need(Cursor *cursor, i64 row) { cursor->own[1 + row] = 1; }

static void sparse_decode(Cursor *cursor, i64 n, u8 *out) {
    const i64 *own = cursor->own + cursor->row;
    i64 size = cursor->entry->size, zeros;
    const u8 *from = cursor->rows + own[0] * size, *near = near_row(cursor);
    for (i64 left = cut_to(own[1] - own[0], n); left > 0;) {
        i64 count = stretch_next(cursor, left, &zeros);
        zeros = cut_to(zeros, n - left);
        memset(out, 0, (size_t)(zeros * size));
        out += zeros * size;
        if (near) add_words(out, from, near += zeros * size, 1, count, size);
        else memcpy(out, from, (size_t)(count * size));
        if (near) near += count * size;
        out += count * size;
        from += count * size;
        left -= count;
        n -= zeros + count;
    }
    memset(out, 0, (size_t)(n * size));
}

static void sparse_skip(Cursor *cursor, i64 n) {
    i64 zeros;
    for (i64 left = cut_to(number_at(cursor->table->body, &cursor->entry->b, cursor->row), n); left > 0;)
        left -= stretch_next(cursor, left, &zeros);
}

static void sparse_cut(Entry *own, const Mark *from, const Mark *to) {
    array_cut_each(&own->a, from->c, to->c);
    array_cut_each(&own->b, from->row, to->row);
    array_cut_each(&own->c, from->c, to->c);
}

/* Cuts the stored rows. */
static void sparse_split(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    Cursor stored = cursor_of(table, table->entries[index].first, stored_marks(table, index) + 1);
    for (i64 part = 0; part < parts; part++, out += n) {
        Mark from = mark_of(&stored, cuts[part]), to = mark_of(&stored, cuts[part + 1]);
        ENCODINGS[stored.entry->kind]->cut(out + (stored.entry - table->entries), &from, &to);
    }
}

static int sparse_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *inner = table->entries + entry->first;
    const Entry *near = entry->second < 0 ? entry : table->entries + entry->second;
    const Array *a = &entry->a, *c = &entry->c;
    i64 some = rows_that_differ(entry, NULL, rows), most = a->count > c->count ? a->count : c->count, at = 0;
    if (inner->layout != entry->layout || inner->items != 1 || inner->size != entry->size || !of_each(&entry->b, rows)) return 0;
    if (near->layout != entry->layout || near->items != entry->items || near->size != entry->size) return 0;
    for (i64 row = 0; row < some; row++) {
        i64 n = row_elements(table, entry, NULL, row) * entry->items, left = number_at(table->body, &entry->b, row), stretches = 1;
        if (left < 0 || left > n) return 0;
        for (; left > 0; at += stretches) {
            i64 zeros = number_at(table->body, a, at), count = number_at(table->body, c, at);
            if (most > 1 ? at >= most : count < 1 || left % count) return 0;
            if (most == 1) stretches = left / count; /* a few bytes may say any number of these */
            if (zeros < 0 || zeros > (n - left) / stretches || count < 1 || count > left) return 0;
            n -= (zeros + count) * stretches;
            left -= count * stretches;
        }
    }
    i64 stretches = some ? at * (rows / some) : 0;
    return of_each(a, stretches) && of_each(c, stretches) && entry_check(check, entry->first, &entry->b, rows);
}

static int sparse_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    return entry->second >= 0 || entry_is_odd(check, entry->first, &entry->b, rows); /* differences of bools are not written */
}

/* Three tables: the first stretch of each row; where each begins in its row; and the stored words before each. */
static int sparse_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    i64 *tables[] = {&source->stretches, &source->stretch_starts, &source->stretch_ends}, zeros, total = 0;
    if (!stage_stored(stage, entry, extent->rows, source)) return 0;
    for (int table = 0; table < 3; table++) {
        Cursor cursor = {.table = &(Table){.body = stage->body}, .entry = entry};
        *tables[table] = stage->used;
        if (table != 1) add(stage, 0);
        for (i64 row = 0; row < extent->rows; row++) {
            i64 place = 0, left = number_at(stage->body, &entry->b, row);
            for (i64 count; left > 0; left -= count, place += count) {
                count = stretch_next(&cursor, left, &zeros);
                place += zeros;
                if (table) add(stage, table == 1 ? place : (total += count));
            }
            if (!table) add(stage, cursor.c);
        }
    }
    return stage_near(stage, entry, extent, source);
}

static const Encoding SPARSE_ENCODING = {
    .marked = 1, .encode_stored = sparse_encode, .count_stored = entry_rows, .split = sparse_split, .open = stored_open,
    .need = sparse_need, .decode = sparse_decode, .skip = sparse_skip, .cut = sparse_cut, .check = sparse_check,
    .is_odd = sparse_is_odd, .stage = sparse_stage,
};
