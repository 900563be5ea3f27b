/* The rows of a table: where they begin, and parts of them, without decoding. */

/* The numbers that the marks of an entry take, without those of rows that it stores: a, b and c of every row that is MARKED;
   none where these follow from the bounds of the rows. */
static i64 count_marks(const Entry *entry, i64 rows) { return ENCODINGS[entry->kind]->marked ? 3 * (rows / MARKED + 1) : 0; }

typedef struct {
    i64 *numbers, used, room;
} Marks;

/* Marks the rows of an entry; `stored` are the bounds of rows that another entry stores. */
static void mark_rows(Marks *marks, const Table *table, i64 index, const i64 *stored, i64 rows) {
    i64 own = marks->used, count = count_marks(table->entries + index, rows);
    marks->used += count;
    if (!count || marks->used > marks->room) return;
    marks->numbers[index] = own;
    Cursor cursor = cursor_of(table, index, stored);
    for (i64 *to = marks->numbers + own; cursor.row <= rows; row_skip(&cursor)) {
        if (cursor.row % MARKED == 0) {
            i64 mark[3] = {cursor.a, cursor.b, cursor.c};
            memcpy(to, mark, sizeof mark);
            to += 3;
        }
        if (cursor.row == rows) break;
    }
}

/* Marks an entry that stores rows, and behind it how many these are and their bounds; then these rows. False without memory. */
static int mark_stored(Marks *marks, const Table *table, i64 index) {
    const Entry *entry = table->entries + index;
    i64 *bounds = NULL, own = marks->used, stored = stored_rows(table, entry, &bounds);
    if (stored < 0) return 0;
    mark_rows(marks, table, index, NULL, entry_rows(table, entry));
    i64 at = marks->used;
    marks->used += stored + 2;
    if (marks->used <= marks->room) {
        marks->numbers[index] = own;
        marks->numbers[at] = stored;
        memcpy(marks->numbers + at + 1, bounds, sizeof(i64) * (size_t)(stored + 1));
    }
    mark_rows(marks, table, entry->first, bounds, stored);
    free(bounds);
    return 1;
}

/* Writes where the rows of entries begin, as `Table.marks` has it: for each entry the place of its marks, -1 for none, then
   the marks. Returns the numbers in use, of which only `room` are there; -1 without memory. */
API i64 maskpack_mark(const Entry *entries, i64 n, const Layout *layouts, const u8 *body, i64 rows, i64 dense_rows, i64 *numbers, i64 room) {
    Table table = {entries, layouts, body, rows, dense_rows, NULL};
    Marks marks = {numbers, n, room};
    u8 *inside = calloc((size_t)n + 1, 1);
    int fine = inside != NULL;
    for (i64 at = 0; at < n && at < room; at++) numbers[at] = -1;
    for (i64 at = 0; at < n && fine; at++) inside[REFERENCES[entries[at].kind][0] == OF_ROWS ? entries[at].first : n] = 1;
    for (i64 at = 0; at < n && fine; at++) {
        if (REFERENCES[entries[at].kind][0] == OF_ROWS) fine = mark_stored(&marks, &table, at);
        else if (!inside[at]) mark_rows(&marks, &table, at, NULL, entries[at].layout < 0 ? dense_rows : rows);
    }
    free(inside);
    return fine ? marks.used : -1;
}

/* The parts of an entry between the rows `cuts` [parts + 1], in the same arrays: part p goes to out[p * n]. */
static void split_entry(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    const Entry *entry = table->entries + index;
    if (ENCODINGS[entry->kind]->split) ENCODINGS[entry->kind]->split(table, index, cuts, parts, out, n);
    if (!ENCODINGS[entry->kind]->cut) return;
    Cursor cursor = cursor_of(table, index, NULL);
    for (i64 part = 0; part < parts; part++, out += n) {
        Mark from = mark_of(&cursor, cuts[part]), to = mark_of(&cursor, cuts[part + 1]);
        ENCODINGS[entry->kind]->cut(out + index, &from, &to);
    }
}

/* The parts of the rows of a table, with its `marks`, between `cuts` [parts + 1], in the same body: their entries, n each,
   and layouts, m each. Returns 0, or -1 without memory. */
API i64 maskpack_split(const Entry *entries, i64 n, const Stored *stored, i64 m, const Layout *layouts, const u8 *body, i64 rows,
                       const i64 *marks, const i64 *cuts, i64 parts, Entry *out, Stored *out_stored) {
    Table table = {entries, layouts, body, rows, rows, marks};
    u8 *inside = calloc((size_t)n + 1, 1); /* rows that an entry stores, which are taken with it */
    if (!inside) return -1;
    for (i64 part = 0; part < parts; part++) {
        memcpy(out + part * n, entries, sizeof(Entry) * (size_t)n);
        memcpy(out_stored + part * m, stored, sizeof(Stored) * (size_t)m);
        for (i64 at = 0; at < m; at++) {
            Stored *own = out_stored + part * m + at;
            i64 begin = cuts[part], end = cuts[part + 1];
            if (own->kind == AS_MASK) array_cut(&own->a, mask_bytes(own, begin), mask_bytes(own, end));
            if (own->kind != AS_SPANS) continue;
            array_cut_each(&own->a, layouts[at].splits[begin], layouts[at].splits[end]);
            array_cut_each(&own->b, layouts[at].splits[begin], layouts[at].splits[end]);
            array_cut_each(&own->c, begin, end);
        }
    }
    for (i64 i = 0; i < n; i++) inside[REFERENCES[entries[i].kind][0] == OF_ROWS ? entries[i].first : n] = 1;
    for (i64 i = 0; i < n; i++)
        if (!inside[i]) split_entry(&table, i, cuts, parts, out, n);
    free(inside);
    return 0;
}

/* Copies the arrays of structs to another body, each from a multiple of 8 bytes on, but those of structs of one array side by
   side, and says in the structs where they are now.
   `lines` [n, 4]: the first struct, how many there are, the numbers of one, and how many arrays its last parts are. Returns
   the bytes in use; with no `to` it only counts them. */
API i64 maskpack_compact(const i64 *lines, i64 n, const u8 *body, u8 *to) {
    i64 used = 0;
    for (const i64 *line = lines; line < lines + 4 * n; line += 4) {
        i64 begun = 0; /* records lie side by side */
        for (i64 i = 0; i < line[3] * line[1]; i++) {
            i64 place = i / line[1], end = (i % line[1] + 1) * line[2];
            Array *array = (Array *)((i64 *)line[0] + end) - (line[3] - place);
            i64 nbytes = array->size * array->count;
            i64 begin = begun ? used : (used + 7) & ~(i64)7;
            if (nbytes) {
                if (to) memset(to + used, 0, (size_t)(begin - used));
                if (to) memcpy(to + begin, body + array->at, (size_t)nbytes);
                used = begin + nbytes;
                begun = line[3] == 1;
            }
            if (to) array->at = nbytes ? begin : 0;
        }
    }
    return used;
}
