/* CONCAT     the rows of the entry `first`, each followed by the row of the entry `second` */

/* As the rows of two fields together, if they are. */
static int concat_encode(const Rows *rows, const Rows *parts, Out *out, Entry *entry) {
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row), first = row_length(parts, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        if (n != first + row_length(parts + 1, row)) return MISFIT;
        const u8 *begin = row_words(parts, row), *end = row_words(parts + 1, row);
        if (memcmp(words, begin, (size_t)(first * rows->size))) return MISFIT;
        if (memcmp(words + first * rows->size, end, (size_t)((n - first) * rows->size))) return MISFIT;
    }
    entry->first = OF_JOB_HEAD;
    entry->second = OF_JOB_TAIL;
    return FITS;
}

static void concat_decode(Cursor *cursor, i64 n, u8 *out) {
    i64 size = cursor->entry->size, head = words_of(cursor->parts, cursor->row);
    if (head + words_of(cursor->parts + 1, cursor->row) > n) memset(out, 0, (size_t)(n * size));
    else {
        row_decode(cursor->parts, out);
        row_decode(cursor->parts + 1, out + head * size);
    }
}

/* Whether each row has as many words as the two that it is put together from. */
static int concat_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *a = table->entries + entry->first, *b = table->entries + entry->second;
    if (entry->a.count || entry->b.count || entry->c.count || a->size != entry->size || b->size != entry->size) return 0;
    if (rows_of(check, a) != rows || rows_of(check, b) != rows) return 0;
    if (alike(entry, NULL) && alike(a, NULL) && alike(b, NULL) && rows > 1) rows = 1;
    for (i64 row = 0; row < rows; row++) {
        i64 sum = row_elements(table, a, NULL, row) * a->items + row_elements(table, b, NULL, row) * b->items;
        if (sum != row_elements(table, entry, NULL, row) * entry->items) return 0;
    }
    return 1;
}

static int concat_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    return entry_is_odd(check, entry->first, NULL, rows) || entry_is_odd(check, entry->second, NULL, rows);
}

static const Encoding CONCAT_ENCODING = {
    .arrays = "", .once = "", .is_signed = "", .encode = concat_encode, .decode = concat_decode, .check = concat_check, .is_odd = concat_is_odd,
};
