/* RLE        a: stretches of equal words of each row; b: lengths of all but the last of a row; c: their words
   DELTA      as RLE, of the first word and the differences behind it */

enum { AT_ONCE = 64 };

/* Whether each of AT_ONCE words is `step` above the one before it, the first above `word`. */
static int all_rise(const u8 *words, i64 word, i64 step, i64 size) {
    u64 any = 0;
#define RISE(wide, T)                                                              \
    case wide:                                                                     \
        for (i64 i = 0; i < AT_ONCE; i++) {                                        \
            T next;                                                                \
            memcpy(&next, words + wide * i, wide);                                 \
            any |= (T)(next ^ (T)((T)word + (T)(i + 1) * (T)step));                \
        }                                                                          \
        break;
    switch (size) { RISE(1, u8) RISE(2, uint16_t) RISE(4, u32) RISE(8, u64) }
    return !any;
}

/* The words from `at` on that are one stretch: where it ends. `before` is the word before them, `value` what is kept. */
static i64 stretch_end(i64 kind, const u8 *words, i64 at, i64 n, i64 size, i64 *before, i64 *value) {
    i64 word = *value = signed_word(words + at * size, size), end = at + 1;
    if (kind == RLE) return at + equal_bytes(words + at * size, (n - at) * size, repeated(words + at * size, size)) / size;
    *value = as_signed((u64)word - (u64)*before, size);
    for (; end + AT_ONCE <= n && all_rise(words + end * size, word, *value, size); end += AT_ONCE)
        word = signed_word(words + (end + AT_ONCE - 1) * size, size);
    for (i64 next; end < n; end++, word = next) {
        next = signed_word(words + end * size, size);
        if (as_signed((u64)next - (u64)word, size) != *value) break;
    }
    *before = word;
    return end;
}

static int stretches_encode(const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    List stretches = {0}, counts = {0}, values = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row), pieces = 0, before = 0, value;
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        for (i64 at = 0, end; at < n && done == FITS; at = end, pieces++) {
            end = stretch_end(entry->kind, words, at, n, rows->size, &before, &value);
            int kept = push(&values, value) && (end == n || push(&counts, end - at));
            done = !kept ? NO_MEMORY : out->used + values.count + counts.count > out->room ? FULL : FITS;
        }
        if (done == FITS && !push(&stretches, pieces)) done = NO_MEMORY;
    }
    if (done == FITS)
        done = put_numbers(out, &entry->a, &stretches) && put_numbers(out, &entry->b, &counts) && put_signed(out, &entry->c, &values) ? FITS : FULL;
    free(stretches.numbers);
    free(counts.numbers);
    free(values.numbers);
    return done;
}

/* Stretches of the row at the cursor, which has n words. */
static i64 stretches_of(const Cursor *cursor, i64 n) {
    return cut_to(number_at(cursor->table->body, &cursor->entry->a, cursor->row), n);
}

/* n words behind `word`, each `step` above the one before; the last of them. */
static i64 steps(u8 *out, i64 n, i64 word, i64 step, i64 size) {
#define STEPS(bytes)                                                       \
    case bytes:                                                            \
        for (i64 i = 0; i < n; i++) {                                      \
            u64 next = (u64)word + (u64)(i + 1) * (u64)step;               \
            memcpy(out + bytes * i, &next, bytes);                         \
        }                                                                  \
        break;
    switch (size) { STEPS(1) STEPS(2) STEPS(4) STEPS(8) }
    return (i64)((u64)word + (u64)n * (u64)step);
}

static void stretches_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 stretches = stretches_of(cursor, n), word = 0, size = entry->size;
    if (!stretches) memset(out, 0, (size_t)(n * size));
    for (i64 left = stretches; left > 0; left--) {
        i64 count = left > 1 ? cut_to(number_at(body, &entry->b, cursor->b++), n) : n;
        i64 value = signed_at(body, &entry->c, cursor->c++);
        if (entry->kind == RLE) fill(out, count * size, repeated((const u8 *)&value, size), 0);
        else word = steps(out, count, word, value, size);
        out += count * size;
        n -= count;
    }
}

static void stretches_skip(Cursor *cursor, i64 n) {
    i64 stretches = stretches_of(cursor, n);
    cursor->b += stretches > 1 ? stretches - 1 : 0;
    cursor->c += stretches;
}

static void stretches_cut(Entry *own, const Mark *from, const Mark *to) {
    array_cut_each(&own->a, from->row, to->row);
    array_cut_each(&own->b, from->b, to->b);
    array_cut_each(&own->c, from->c, to->c);
}

/* Whether the stretches of a row, n of them, have `left` words, the lengths from `at` on in b. */
static int stretches_fill(const u8 *body, const Entry *entry, i64 n, i64 at, i64 left) {
    if (n < 0 || n > left || (left && !n)) return 0;
    if (n < 2) return 1;
    if (!entry->b.count || (entry->b.count != 1 && at + n - 1 > entry->b.count)) return 0;
    if (entry->b.count == 1) {
        i64 count = number_at(body, &entry->b, 0);
        return count >= 1 && count <= (left - 1) / (n - 1);
    }
    for (i64 i = 0; i < n - 1; i++) {
        i64 count = number_at(body, &entry->b, at + i);
        if (count < 1 || count >= left) return 0;
        left -= count;
    }
    return 1;
}

static int stretches_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Entry *entry = check->table->entries + index;
    const u8 *body = check->table->body;
    i64 counts = 0, values = 0, times = 1;
    if (!of_each(&entry->a, rows) || entry->c.size > entry->size) return 0;
    if (rows > 1 && entry->a.count == 1 && entry->b.count <= 1 && alike(entry, lengths)) { /* all rows say the same */
        times = rows;
        rows = 1;
    }
    for (i64 row = 0; row < rows; row++) {
        i64 n = number_at(body, &entry->a, row);
        if (!stretches_fill(body, entry, n, counts, row_elements(check->table, entry, lengths, row) * entry->items)) return 0;
        counts += n > 1 ? n - 1 : 0;
        values += n;
    }
    return of_each(&entry->b, counts * times) && of_each(&entry->c, values * times);
}

static int rle_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    return array_is_odd(check->table->body, &check->table->entries[index].c);
}

/* What rises by equal steps leaves 0 and 1 within three words, so stretches are looked at where they begin. */
static int delta_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    const u8 *body = check->table->body;
    i64 counts = 0, values = 0;
    u8 any = 0;
    for (i64 row = 0; row < rows_that_differ(entry, lengths, rows); row++) {
        i64 n = row_elements(check->table, entry, lengths, row) * entry->items;
        u8 word = 0;
        for (i64 left = cut_to(number_at(body, &entry->a, row), n); left > 0; left--) {
            i64 count = left > 1 ? cut_to(number_at(body, &entry->b, counts++), n) : n, step = signed_at(body, &entry->c, values++);
            for (i64 i = 1; i <= count && i <= 3; i++) any |= (u8)(word + (u8)(i * step));
            word = (u8)(word + (u8)((u64)count * (u64)step));
            any |= word;
            n -= count;
        }
    }
    return any > 1;
}

/* The sums of the stretches of all rows but the last of each, for DELTA. */
static void delta_sums(Stage *stage, const Entry *entry, const Extent *extent) {
    u64 sum = 0;
    i64 value = 0, piece = 0;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++)
        for (i64 left = number_at(stage->body, &entry->a, row); left > 0; left--, value++) {
            if (left == 1) continue;
            sum += (u64)signed_at(stage->body, &entry->c, value) * (u64)number_at(stage->body, &entry->b, piece++);
            add(stage, (i64)sum);
        }
}

/* A row has its pieces in `begins`, and all but the last of them in `pieces`. */
static int stretches_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    const u8 *body = stage->body;
    i64 inner = 0, at = 0, total = 0;
    for (i64 row = 0; row < extent->rows; row++) inner += number_at(body, &entry->a, row) > 1;
    source->kind = BY_PIECE;
    source->data = entry->c.at;
    source->data_size = entry->c.size;
    source->single = entry->c.count == 1;
    source->sums = entry->kind == DELTA && !inner ? 0 : -1;
    if (inner || entry->c.count > 1) {
        source->begins = stage->used;
        add(stage, 0);
        for (i64 row = 0; row < extent->rows; row++) add(stage, at += number_at(body, &entry->a, row));
    }
    if (!inner) return 1;
    source->pieces = stage->used;
    add(stage, inner = 0);
    for (i64 row = 0; row < extent->rows; row++) {
        i64 pieces = number_at(body, &entry->a, row);
        add(stage, inner += pieces > 1 ? pieces - 1 : 0);
    }
    source->counts = stage->used;
    add(stage, 0);
    for (i64 piece = 0; piece < inner; piece++) add(stage, total += number_at(body, &entry->b, piece));
    if (entry->kind == RLE) return 1;
    source->sums = stage->used;
    delta_sums(stage, entry, extent);
    return 1;
}

static void stretches_place(Placing *placing, Placed *placed, Entry *entry) {
    i64 *sums = placed->sums, *each = placed->each;
    place_counts(placing, placed, &entry->a);
    each[1] = place_between(placing, &entry->b, sums[1], sums[1] ? placed->least : 0, placed->most, 0);
    each[2] = place_between(placing, &entry->c, sums[2], placed->low, placed->high, 1);
    if (!each[1] && !each[2]) placed->way = LEFT_OUT;
}

static const Encoding RLE_ENCODING = {
    .marked = 1, .arrays = "abc", .once = "abc", .is_signed = "c", .encode = stretches_encode,
    .decode = stretches_decode, .skip = stretches_skip, .cut = stretches_cut, .check = stretches_check,
    .is_odd = rle_is_odd, .stage = stretches_stage, .place = stretches_place,
};

static const Encoding DELTA_ENCODING = {
    .integers = 1, .marked = 1, .arrays = "abc", .once = "abc", .is_signed = "c", .encode = stretches_encode,
    .decode = stretches_decode, .skip = stretches_skip, .cut = stretches_cut, .check = stretches_check,
    .is_odd = delta_is_odd, .stage = stretches_stage, .place = stretches_place,
};
