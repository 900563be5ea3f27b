/* DICTIONARY a: the row of the entry `first` that each row equals, plus `number`; b: the elements of each of those rows */

static int choose(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entry, Form *form);
static int encode_as(i64 kind, i64 number, const Rows *rows, const Rows *near, Out *out, Entry *entry);
static int is_better(const Rows *rows, const Rows *near, int integers, const Form *form, i64 bytes, i64 words);

/* Which of the stored rows of a dictionary a row is; negative if it is none. */
static i64 stored_row(const u8 *body, const Entry *entry, i64 row) {
    return (i64)((u64)number_at(body, &entry->a, row) - (u64)entry->number);
}

/* The most rows that a dictionary of `rows` rows stores. They differ: those that no row uses have a number each, at least. */
static i64 most_stored(const Entry *entries, const Entry *entry, i64 rows) {
    const Entry *inner = entries + entry->first;
    return rows + entry->b.count + inner->a.count + inner->b.count + inner->c.count;
}

/* How many rows an entry has. */
static i64 entry_rows(const Table *table, const Entry *entry) { return entry->layout < 0 ? table->dense_rows : table->rows; }

static i64 dictionary_count(const Table *table, const Entry *entry) {
    i64 rows = entry_rows(table, entry), most = most_stored(table->entries, entry, rows) - 1, stored = 0;
    for (i64 row = 0; row < rows && row < entry->a.count; row++) {
        i64 index = cut_to(stored_row(table->body, entry, row), most);
        stored = index + 1 > stored ? index + 1 : stored;
    }
    return stored;
}

/* The bounds of the rows that an entry stores, in elements of these; how many there are, or -1 without memory. */
static i64 stored_rows(const Table *table, const Entry *entry, i64 **bounds) {
    i64 items = table->entries[entry->first].items, words = MANY / (items ? items : 1);
    i64 stored = ENCODINGS[entry->kind]->count_stored(table, entry);
    if (!(*bounds = calloc((size_t)stored + 1, sizeof(i64)))) return -1;
    for (i64 i = 0; i < stored; i++) {
        i64 most = entry->kind == SPARSE ? row_elements(table, entry, NULL, i) * entry->items : words - (*bounds)[i];
        (*bounds)[i + 1] = (*bounds)[i] + cut_to(number_at(table->body, &entry->b, i), most);
    }
    return stored;
}

/* What marks say of the rows that an entry stores: how many there are, and their bounds. */
static const i64 *stored_marks(const Table *table, i64 index) {
    const Entry *entry = table->entries + index;
    return table->marks + table->marks[index] + (ENCODINGS[entry->kind]->marked ? 3 * (entry_rows(table, entry) / MARKED + 1) : 0);
}

/* Decodes the stored rows that rows need; others take no memory. */
static int stored_open(Cursor *cursor) {
    const Table *table = cursor->table;
    const Entry *entry = cursor->entry;
    const i64 *marks = cursor->marks ? stored_marks(table, entry - table->entries) : NULL;
    i64 *counted = NULL, stored = cursor->stored = marks ? *marks : stored_rows(table, entry, &counted);
    const i64 *bounds = marks ? marks + 1 : counted;
    i64 *own = cursor->own = stored < 0 ? NULL : calloc((size_t)stored + 1, sizeof(i64));
    i64 element = table->entries[entry->first].items * entry->size;
    for (i64 i = 0; i < cursor->part->count && own; i++) ENCODINGS[entry->kind]->need(cursor, taken_row(cursor->part, i));
    cursor->row = cursor->c = 0;
    for (i64 i = 0; i < stored && own; i++) own[i + 1] = own[i] + (own[i + 1] ? bounds[i + 1] - bounds[i] : 0);
    int fine = own && (cursor->rows = malloc((size_t)(own[stored] * element + 8))) && (!cursor->num_parts || cursor_reserve(cursor));
    Cursor inner = cursor_of(table, entry->first, bounds); /* its rows are in arrays of its own */
    for (i64 i = 0; i < stored && fine; i++) {
        if (own[i + 1] == own[i] && table->marks) continue;
        if (table->marks) row_seek(&inner, i);
        if (own[i + 1] > own[i]) row_decode(&inner, cursor->rows + own[i] * element);
        else row_skip(&inner);
    }
    free(counted);
    return fine;
}

/* The number of the first row that each row equals, among the rows that differ; `firsts` are these rows. The count of
   them, or -1 without memory. */
static i64 find_repeated(const Rows *rows, List *index, i64 *firsts) {
    i64 room = 16, found = 0;
    while (room < 2 * rows->rows) room *= 2;
    i64 *slots = calloc((size_t)room, sizeof(i64));
    if (!slots) return -1;
    for (i64 row = 0; row < rows->rows && found >= 0; row++) {
        i64 nbytes = row_length(rows, row) * rows->size;
        const u8 *words = row_words(rows, row);
        u64 slot = hash_words(words, nbytes) >> 7;
        for (;; slot++) {
            i64 *here = slots + (slot & (u64)(room - 1));
            if (!*here) {
                *here = found + 1;
                firsts[found++] = row;
            }
            i64 other = firsts[*here - 1];
            if (row_length(rows, other) * rows->size == nbytes && !memcmp(row_words(rows, other), words, (size_t)nbytes)) {
                if (!push(index, *here - 1)) found = -1;
                break;
            }
        }
    }
    free(slots);
    return found;
}

/* Rows that another entry stores, in one entry: `again` in the form of the last time, or in the one that is best. `form` is that
   of the other entry then. */
static int stored_encode(const Rows *stored, i64 hints, int integers, Out *out, Entry *entry, Form *form, int again) {
    Form inner = {form->inner_kind, form->inner_number, -1, 0, 0, 0};
    i64 start = out->used;
    int done = again ? encode_as(inner.kind, inner.number, stored, NULL, out, entry) : MISFIT;
    if (done == FITS && is_better(stored, NULL, integers, &inner, bytes_of(entry), total_words(stored))) done = MISFIT;
    if (done == MISFIT || done == FULL) {
        out->used = start;
        done = choose(stored, NULL, hints, integers, out, entry, &inner);
    }
    *form = (Form){DICTIONARY, 0, inner.kind, inner.number, form->cost, form->age};
    return done;
}

/* Rows of packed values as a dictionary: two entries. MISFIT if every row differs. */
static int dictionary_encode(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again) {
    List index = {0};
    i64 *firsts = malloc(sizeof(i64) * (size_t)(rows->rows + 1));
    i64 found = firsts ? find_repeated(rows, &index, firsts) : -1;
    int done = found < 0 ? NO_MEMORY : found == rows->rows ? MISFIT : FITS;
    Rows stored = *rows;
    stored.index = firsts;
    stored.rows = found;
    if (done == FITS) done = stored_encode(&stored, hints, integers, out, entries, form, again);
    if (done == FITS) {
        entries[1] = entry_of(DICTIONARY, entries->layout, entries->items, rows->size);
        entries[1].first = 0;
        done = put_numbers(out, &entries[1].a, &index) ? FITS : FULL;
        index.count = 0;
        for (i64 i = 0; i < found; i++) push(&index, row_length(rows, firsts[i]) / rows->items); /* there is room */
        if (done == FITS && !put_numbers(out, &entries[1].b, &index)) done = FULL;
    }
    free(index.numbers);
    free(firsts);
    return done;
}

static void dictionary_need(Cursor *cursor, i64 row) {
    cursor->own[1 + cut_to(stored_row(cursor->table->body, cursor->entry, row), cursor->stored - 1)] = 1;
}

static void dictionary_decode(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const i64 *own = cursor->own + cut_to(stored_row(cursor->table->body, entry, cursor->row), cursor->stored - 1);
    i64 size = entry->size, element = entry->items * size, nbytes = cut_to((own[1] - own[0]) * element, n * size);
    memcpy(out, cursor->rows + own[0] * element, (size_t)nbytes);
    memset(out + nbytes, 0, (size_t)(n * size - nbytes));
}

/* Cuts a dictionary, and the rows that it stores to those from the first to the last that each part uses. */
static void dictionary_split(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    const Entry *entry = table->entries + index;
    const i64 *marks = stored_marks(table, index);
    i64 stored = *marks;
    Cursor cursor = cursor_of(table, entry->first, marks + 1);
    for (i64 part = 0; part < parts; part++, out += n) {
        i64 first = stored, end = 0;
        for (i64 row = cuts[part]; row < cuts[part + 1]; row++) {
            i64 used = cut_to(stored_row(table->body, entry, row), stored - 1);
            first = used < first ? used : first;
            end = used >= end ? used + 1 : end;
        }
        first = first < end ? first : end;
        Mark from = mark_of(&cursor, first), to = mark_of(&cursor, end);
        ENCODINGS[cursor.entry->kind]->cut(out + entry->first, &from, &to);
        array_cut_each(&out[index].a, cuts[part], cuts[part + 1]);
        array_cut_each(&out[index].b, first, end);
        out[index].number = (i64)((u64)entry->number + (u64)first);
    }
}

static int dictionary_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *inner = table->entries + entry->first;
    const u8 *body = table->body;
    i64 element = entry->items ? entry->items * entry->size : 1, spare = 0, most = most_stored(table->entries, entry, rows);
    if (entry->c.count || rows != table->rows || !of_each(&entry->a, rows) || entry->number < 0) return 0;
    for (i64 row = 0; row < rows && row < entry->a.count; row++) {
        i64 number = stored_row(body, entry, row);
        if (number_at(body, &entry->a, row) < entry->number || number >= (entry->a.count == 1 ? 1 : most)) return 0; /* or 2^63 and more */
    }
    most = dictionary_count(table, entry);
    if (most > rows) { /* of some rows of a larger batch; each row takes a bound */
        if (most - rows > check->left / 8) return 0;
        check->left -= 8 * (most - rows);
    }
    if (!of_each(&entry->b, most) || inner->layout != entry->layout || inner->items != entry->items || inner->size != entry->size) return 0;
    i64 some = rows && entry->a.count == 1 && alike(entry, NULL) ? 1 : rows;
    for (i64 row = 0; row < some; row++) {
        i64 elements = row_elements(table, entry, NULL, row);
        if (number_at(body, &entry->b, stored_row(body, entry, row)) != elements) return 0;
        spare -= elements;
    }
    for (i64 i = 0; i < most; i++) { /* rows that nothing uses, too */
        i64 elements = number_at(body, &entry->b, i);
        if (elements < 0 || elements >= (i64)1 << 31) return 0;
        spare += elements;
        if (spare > check->left / element) return 0;
    }
    if (spare > 0) check->left -= spare * element;
    return entry_check(check, entry->first, &entry->b, most);
}

static int dictionary_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    return entry_is_odd(check, entry->first, &entry->b, dictionary_count(check->table, entry));
}

/* Stages the rows that an entry stores. */
static int stage_stored(Stage *stage, const Entry *entry, i64 stored, Source *source) {
    const Entry *inner = stage->entries + entry->first;
    i64 *bounds = calloc((size_t)stored + 1, sizeof(i64));
    if (!bounds) return 0;
    for (i64 i = 0; i < stored; i++) bounds[i + 1] = bounds[i] + number_at(stage->body, &entry->b, i);
    Extent rows = {stored, bounds, -1, inner->items};
    if (!ENCODINGS[inner->kind]->marked) { /* its words are found by place */
        rows.table = stage->used;
        for (i64 i = 0; i <= stored; i++) add(stage, bounds[i]);
    }
    int fine = add_source(stage, entry->first, &rows, source);
    free(bounds);
    return fine;
}

static int dictionary_stage(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    i64 index = stage->used, stored = 0;
    for (i64 row = 0; row < extent->rows; row++) {
        i64 own = stored_row(stage->body, entry, row);
        stored = own + 1 > stored ? own + 1 : stored;
        add(stage, own);
    }
    int fine = stage_stored(stage, entry, stored, source);
    source->rows = index;
    return fine;
}

static const Encoding DICTIONARY_ENCODING = {
    .encode_stored = dictionary_encode, .count_stored = dictionary_count, .split = dictionary_split, .open = stored_open,
    .need = dictionary_need, .decode = dictionary_decode, .check = dictionary_check, .is_odd = dictionary_is_odd,
    .stage = dictionary_stage,
};
