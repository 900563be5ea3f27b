/* Tables from elsewhere, before they are used. */

/* Counts the steps to an entry that another one refers to, which comes after it; false if it must not. */
static int refers(Check *check, i64 index, i64 other, i64 steps) {
    if (check->marks[other] & INSIDE || REFERENCES[check->table->entries[other].kind][0] == OF_FIELD) return 0;
    if (check->steps[other] + steps > MOST_STEPS) return 0;
    if (check->steps[other] + steps > check->steps[index]) check->steps[index] = (u8)(check->steps[other] + steps);
    return 1;
}

/* Whether words of an entry have a size, and its arrays lie in the body. */
static int lies_check(const Check *check, const Entry *entry) {
    i64 size = entry->size;
    if (entry->items < 0 || entry->items > (i64)1 << 40 || (size != 1 && size != 2 && size != 4 && size != 8)) return 0;
    for (const Array *array = &entry->a; array <= &entry->c; array++)
        if (!holds(array, check->nbytes, check->align)) return 0;
    return 1;
}

/* Whether an entry can be decoded: what it refers to may be, and its encoding finds every number in its range. `lengths` are
   those of rows that another entry stores. */
static int entry_check(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    i64 total, first = REFERENCES[entry->kind][0];
    References to = references_of(entry);
    for (i64 i = 0; i < to.count && first != OF_ROWS; i++)
        if (!refers(check, index, to.first + i, first == OF_FIELD)) return 0;
    if (to.second >= 0 && !refers(check, index, to.second, 1)) return 0;
    if ((total = count_pieces(check->table, entry, lengths, rows, 1)) < 0) return 0;
    return ENCODINGS[entry->kind]->check(check, index, lengths, rows, total);
}

/* Whether a number of an entry is such a reference, to entries before it. */
static int reference_check(i64 number, i64 kind, i64 count, i64 index) {
    if (kind == NONE || (kind == OF_NEAR && number < 0)) return number == -1;
    return number >= 0 && count >= 1 && number < index && count <= index - number;
}

/* Whether an entry refers to entries before it as its kind does, and to no other. */
static int references_check(const Entry *entry, i64 index) {
    if (!has_kind(entry->kind)) return 0;
    const i64 *kinds = REFERENCES[entry->kind];
    return reference_check(entry->first, kinds[0], references_of(entry).count, index) && reference_check(entry->second, kinds[1], 1, index);
}

/* Whether each entry is a field, or one that another refers to; `needed` are marks, 0 so far. */
static int all_needed(const Entry *entries, i64 n, const i64 *fields, i64 num_fields, u8 *needed) {
    for (i64 field = 0; field < num_fields; field++) needed[fields[field]] = 1;
    for (i64 at = n - 1; at >= 0; at--) {
        References to = references_of(entries + at);
        if (!needed[at]) return 0;
        if (to.count) memset(needed + to.first, 1, (size_t)to.count);
        if (to.second >= 0) needed[to.second] = 1;
    }
    return 1;
}

/* Whether the references of all entries are as they should be; else the first that is not is `bad`. */
static int all_references_check(Check *check, i64 n, i64 *bad) {
    const Entry *entries = check->table->entries;
    for (*bad = 0; *bad < n; ++*bad) {
        const Entry *entry = entries + *bad;
        if (entry->layout < -1 || entry->layout >= check->num_layouts || !lies_check(check, entry) || !references_check(entry, *bad)) return 0;
        i64 first = REFERENCES[entry->kind][0], mark = first == OF_ROWS ? INSIDE : COLUMN;
        if (first != OF_ROWS && first != OF_COLUMNS) continue;
        for (i64 i = 0; i < references_of(entry).count; i++) { /* of one alone, or all may have all of them */
            if (check->marks[entry->first + i] & mark) return 0;
            check->marks[entry->first + i] |= (u8)mark;
        }
        if (first == OF_ROWS && !is_leaf(entries + entry->first)) return 0;
    }
    return 1;
}

/* Whether all entries can be decoded; else the first that cannot is `bad`. */
static int entries_check(Check *check, i64 n, i64 *bad) {
    const Entry *entries = check->table->entries;
    for (*bad = 0; *bad < n; ++*bad)
        if (!(check->marks[*bad] & INSIDE) && !entry_check(check, *bad, NULL, rows_of(check, entries + *bad))) return 0;
    return 1;
}

/* Checks the fields of a table whose layouts were checked and read: `fields` are entries that are there, `bools` [num_fields]
   says which may hold only 0 and 1; NULL for rows that may be taken in place, of a table that was checked before. Stored rows
   may take `most` bytes more than the rows that they stand for. Returns 0, or 1 + the first field that cannot be decoded
   (1 + num_fields for an entry that no field needs), or -1 - the first one of other bytes. */
API i64 maskpack_check_fields(const Entry *entries, i64 n, const Layout *layouts, i64 m, const u8 *body, i64 nbytes, i64 rows,
                              i64 dense_rows, i64 most, const i64 *fields, i64 num_fields, const i64 *bools) {
    Table table = {entries, layouts, body, rows, dense_rows, NULL};
    u8 *marks = calloc((size_t)n + 1, 3);
    Check check = {&table, nbytes, m, dense_rows, most, marks, marks + n + 1, bools ? 8 : 1};
    i64 bad = 0, found = marks ? 0 : 1;
    int fine = !found && all_references_check(&check, n, &bad);
    /* before the rows of the entries are looked at: those of the fields are as many as the fields claim */
    if (fine && bools && !all_needed(entries, n, fields, num_fields, marks + 2 * (n + 1))) found = num_fields + 1;
    if (!found && !(fine && entries_check(&check, n, &bad))) {
        found = num_fields + 1; /* the field whose entry is the first one from there on, as parts come first */
        for (i64 field = 0, least = n; field < num_fields; field++)
            if (fields[field] >= bad && fields[field] < least) {
                least = fields[field];
                found = field + 1;
            }
    }
    for (i64 field = 0; field < num_fields && !found; field++) {
        i64 index = fields[field], own = entries[index].layout < 0 ? dense_rows : rows;
        if (marks[index] & INSIDE) found = field + 1;
        else if (bools && bools[field] && (entries[index].size != 1 || entry_is_odd(&check, index, NULL, own))) found = -1 - field;
    }
    free(marks);
    return found;
}
