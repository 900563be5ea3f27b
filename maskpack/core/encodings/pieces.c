/* PIECES     each row is new words and copies of stored words, in turn; it ends with new words, or with none
              a: copies in each row; b: words of each stored row; c: four numbers a copy (Copy)
   Its new words are the row of the entry `first` that is `number` places behind its own: the rows before are those that rows
   of a larger batch had, which copies are taken from. Only what is stored is copied, never a copy. */

enum { COPY = 4 }; /* numbers of a copy */
enum { WINDOW = 8, SHORTEST = 16 }; /* words that are looked for, and of a copy */

/* fresh: new words before it; count: its words; back: how far before the stored row of its own row the row is that it is taken
   from; place: its first word there. */
typedef struct {
    i64 fresh, count, back, place;
} Copy;

static Copy copy_at(const u8 *body, const Entry *entry, i64 at) {
    const Array *c = &entry->c;
    return (Copy){number_at(body, c, at), number_at(body, c, at + 1), number_at(body, c, at + 2), number_at(body, c, at + 3)};
}

/* Copies in the row at the cursor. */
static i64 copies_of(const Cursor *cursor) {
    const Entry *entry = cursor->entry;
    return cut_to(number_at(cursor->table->body, &entry->a, cursor->row), (entry->c.count - cursor->c) / COPY);
}

/* ------------------------------------------------------------------ search for copies */

/* Rows that are divided into new words, which are stored, and copies. */
typedef struct {
    const Rows *rows;
    u8 *stored;
    i64 used, *bounds; /* words in `stored`; where the stored rows begin */
    u32 *slots;        /* 1 + the place of a window in `stored`, by its hash */
    int shift;
    List each, lengths, copies; /* arrays a, b and c */
    i64 copied;                 /* words */
} Search;

/* Words that windows begin with are 1 in 16 of all. */
static int is_anchor(u64 word) { return !((word + 1) * 0x9E3779B97F4A7C15ull >> 60); }

/* The first anchor of words from `at` on, or `end`. */
static i64 next_anchor(const u8 *words, i64 at, i64 end, i64 size) {
    if (size == 8) while (at < end && !is_anchor(word_at(words + 8 * at, 8))) at++;
    else while (at < end && !is_anchor(word_at(words + 4 * at, 4))) at++;
    return at < end ? at : end;
}

static u32 *slot_of(const Search *search, const u8 *window, i64 size) {
    u64 hash = 0;
    for (i64 i = 0; i < WINDOW; i++) hash += (word_at(window + i * size, size) + 1) * (0x9E3779B97F4A7C15ull * (u64)(2 * i + 1));
    return search->slots + ((hash ^ hash >> 32) * 0xD6E8FEB86659FD93ull >> search->shift);
}

/* How many of n words at two places are equal. */
static i64 equal_words(const u8 *one, const u8 *other, i64 n, i64 size) {
    i64 at = 0, nbytes = n * size;
    while (at + 8 <= nbytes && load(one + at) == load(other + at)) at += 8;
    while (at + size <= nbytes && !memcmp(one + at, other + at, (size_t)size)) at += size;
    return at / size;
}

/* The stored row that a place is in. */
static i64 row_at(const Search *search, i64 row, i64 place) {
    i64 low = 0;
    if (place >= search->bounds[row]) return row;
    while (row - low > 1) {
        i64 middle = (low + row) / 2;
        if (search->bounds[middle] <= place) low = middle;
        else row = middle;
    }
    return low;
}

/* The longest copy of stored words around word `at` of a row of n, behind `fresh` new words that are stored already; its
   `fresh` are those before it. Of fewer than WINDOW words if it is none. */
static Copy copy_around(const Search *search, i64 row, const u8 *words, i64 n, i64 at, i64 fresh, i64 from) {
    const u8 *stored = search->stored;
    i64 size = search->rows->size, own = row_at(search, row, from), low = search->bounds[own], before = 0;
    i64 left = (own == row ? search->used : search->bounds[own + 1]) - from;
    i64 count = equal_words(words + at * size, stored + from * size, left < n - at ? left : n - at, size);
    if (count < WINDOW) return (Copy){0};
    while (before < fresh && from - before > low && (own != row || from + count < search->used - before) &&
           !memcmp(words + (at - before - 1) * size, stored + (from - before - 1) * size, (size_t)size))
        before++;
    return (Copy){fresh - before, before + count, row - own, from - before - low};
}

static int push_copy(Search *search, const Copy *copy) {
    search->copied += copy->count;
    return push(&search->copies, copy->fresh) && push(&search->copies, copy->count) && push(&search->copies, copy->back) &&
           push(&search->copies, copy->place);
}

/* Divides a row of n words; false without memory. Words up to `done` are stored or copied, the last `fresh` of them stored. */
static int search_row(Search *search, i64 row, const u8 *words, i64 n) {
    i64 size = search->rows->size, done = 0, fresh = 0, copies = 0, end = n - WINDOW + 1;
    for (i64 at = next_anchor(words, 0, end, size); at < end; at = next_anchor(words, at, end, size)) {
        memcpy(search->stored + search->used * size, words + done * size, (size_t)((at - done) * size));
        search->used += at - done;
        fresh += at - done;
        done = at;
        u32 *slot = slot_of(search, words + at * size, size);
        Copy copy = {0};
        if (*slot && *slot <= search->used) copy = copy_around(search, row, words, n, at, fresh, *slot - 1);
        if (copy.count >= SHORTEST) {
            search->used -= fresh - copy.fresh;
            at += copy.count - (fresh - copy.fresh);
            done = at;
            fresh = 0;
            copies++;
            if (!push_copy(search, &copy)) return 0;
            continue;
        }
        if (!copy.count) *slot = (u32)search->used + 1;
        at++;
    }
    if (n > done) memcpy(search->stored + search->used * size, words + done * size, (size_t)((n - done) * size));
    search->used += n > done ? n - done : 0;
    search->bounds[row + 1] = search->used;
    return push(&search->each, copies) && push(&search->lengths, search->used - search->bounds[row]);
}

/* Divides rows of packed values: FITS, or MISFIT for words that are too many or of another size. */
static int search_open(Search *search, const Rows *rows) {
    i64 total = total_words(rows), bits = 8;
    *search = (Search){.rows = rows};
    if ((rows->size != 4 && rows->size != 8) || total >= (i64)1 << 31) return MISFIT;
    while (((i64)8 << bits) < total) bits++; /* two slots for each anchor that is likely */
    search->shift = (int)(64 - bits);
    search->stored = malloc((size_t)(total * rows->size + 8));
    search->bounds = calloc((size_t)rows->rows + 1, sizeof(i64));
    search->slots = calloc((size_t)1 << bits, sizeof(u32));
    int fine = search->stored && search->bounds && search->slots;
    for (i64 row = 0; row < rows->rows && fine; row++) fine = search_row(search, row, row_words(rows, row), row_length(rows, row));
    return fine ? FITS : NO_MEMORY;
}

static void search_close(Search *search) {
    free(search->stored);
    free(search->bounds);
    free(search->slots);
    free(search->each.numbers);
    free(search->lengths.numbers);
    free(search->copies.numbers);
}

/* Whether a sample of up to `most` words, of pairs of neighbours, has copies. */
static int has_copies(const Rows *rows, i64 most) {
    i64 usual = rows->rows ? total_words(rows) / rows->rows + 1 : 1, count = most / usual, copied = 0, total = 0;
    count = count < 2 ? 2 : count;
    count = count < rows->rows ? count : rows->rows;
    if (!count) return 0;
    u8 *words = malloc((size_t)(most * rows->size + 8));
    i64 *bounds = calloc((size_t)count + 1, sizeof(i64));
    for (i64 i = 0; i < count && words && bounds; i++) {
        i64 row = (i & ~(i64)1) * rows->rows / count + (i & 1), n = row_length(rows, row);
        const u8 *from = row_words(rows, row);
        n = !from ? 0 : n < most / count ? n : most / count;
        if (n) memcpy(words + total * rows->size, from, (size_t)(n * rows->size));
        bounds[i + 1] = total += n;
    }
    if (words && bounds) {
        Rows sample = {count, rows->size, 1, bounds, NULL, words, NULL, NULL, NULL, NULL, 0};
        Search search;
        if (search_open(&search, &sample) == FITS) copied = search.copied;
        search_close(&search);
    }
    free(words);
    free(bounds);
    return 16 * copied > total;
}

/* Divided rows as two entries: what is stored of them, and `kind`. */
static int divided_encode(const Search *search, i64 kind, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again) {
    const Rows *rows = search->rows;
    Rows stored = {rows->rows, rows->size, 1, search->bounds, NULL, search->stored, NULL, NULL, NULL, NULL, 0};
    entries[1] = entry_of(kind, entries->layout, rows->items, rows->size);
    entries[1].first = 0;
    entries[0].items = 1;
    int done = stored_encode(&stored, hints, integers, out, entries, form, again);
    form->kind = kind;
    if (done != FITS) return done;
    int fits = put_numbers(out, &entries[1].a, &search->each) && put_numbers(out, &entries[1].b, &search->lengths);
    return fits && put_list(out, &entries[1].c, &search->copies, 0, kind == SPARSE) ? FITS : FULL;
}

/* Rows of packed values as pieces: two entries. MISFIT if they have few copies. */
static int pieces_encode(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again) {
    Search search;
    int done = search_open(&search, rows);
    if (done == FITS && 32 * search.copied < total_words(rows)) done = MISFIT;
    if (done == FITS) done = divided_encode(&search, PIECES, hints, integers, out, entries, form, again);
    search_close(&search);
    return done;
}

/* ------------------------------------------------------------------ the other way */

static i64 pieces_count(const Table *table, const Entry *entry) { return entry_rows(table, entry) + entry->number; }

/* The first of the stored rows that the row at the cursor needs; `used`, if there, gets 1 for each that it needs. */
static i64 first_needed(const Cursor *cursor, i64 *used) {
    i64 own = cursor->row + cursor->entry->number, first = own;
    if (used) used[own] = 1;
    for (i64 left = copies_of(cursor), at = cursor->c; left > 0; left--, at += COPY) {
        i64 row = own - cut_to(copy_at(cursor->table->body, cursor->entry, at).back, own);
        if (used) used[row] = 1;
        first = row < first ? row : first;
    }
    return first;
}

static void pieces_skip(Cursor *cursor, i64 n) {
    cursor->c += COPY * copies_of(cursor);
}

static void pieces_need(Cursor *cursor, i64 row) {
    if (cursor->part->taken) row_seek(cursor, row);
    first_needed(cursor, cursor->own + 1);
    if (!cursor->part->taken) row_skip(cursor);
}

/* Copies n words of a stored row from one of them on; zeros where it has none. */
static void put_stored(const Cursor *cursor, i64 row, i64 place, i64 n, u8 *out) {
    const i64 *own = cursor->own + row;
    i64 size = cursor->entry->size, from = cut_to(place, own[1] - own[0]), there = own[1] - own[0] - from;
    there = there < n ? there : n;
    memcpy(out, cursor->rows + (own[0] + from) * size, (size_t)(there * size));
    if (there < n) memset(out + there * size, 0, (size_t)((n - there) * size));
}

static void pieces_decode(Cursor *cursor, i64 n, u8 *out) {
    i64 size = cursor->entry->size, own = cursor->row + cursor->entry->number, used = 0;
    for (i64 left = copies_of(cursor); left > 0; left--, cursor->c += COPY) {
        Copy copy = copy_at(cursor->table->body, cursor->entry, cursor->c);
        i64 fresh = cut_to(copy.fresh, n), count = cut_to(copy.count, n - fresh);
        put_stored(cursor, own, used, fresh, out);
        put_stored(cursor, own - cut_to(copy.back, own), copy.place, count, out + fresh * size);
        used += fresh;
        out += (fresh + count) * size;
        n -= fresh + count;
    }
    put_stored(cursor, own, used, n, out);
}

/* Cuts pieces, and the rows that they store to those from the first to the last that each part uses. */
static void pieces_split(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    const Entry *entry = table->entries + index;
    Cursor cursor = cursor_of(table, index, NULL), stored = cursor_of(table, entry->first, stored_marks(table, index) + 1);
    for (i64 part = 0; part < parts; part++, out += n) {
        i64 begin = cuts[part] + entry->number, end = cuts[part + 1] + entry->number, first = begin;
        Mark from = mark_of(&cursor, cuts[part]);
        for (i64 row = cuts[part]; row < cuts[part + 1]; row++) {
            i64 needed = first_needed(&cursor, NULL);
            first = needed < first ? needed : first;
            row_skip(&cursor);
        }
        array_cut_each(&out[index].a, cuts[part], cuts[part + 1]);
        array_cut_each(&out[index].b, first, end);
        array_cut(&out[index].c, from.c, cursor.c);
        out[index].number = begin - first;
        Mark low = mark_of(&stored, first), high = mark_of(&stored, end);
        ENCODINGS[stored.entry->kind]->cut(out + entry->first, &low, &high);
    }
}

/* Whether a row of n words, whose copies begin at number `at` of c, is put together of words that are stored. */
static int row_check(const u8 *body, const Entry *entry, i64 row, i64 n, i64 copies, i64 at) {
    i64 own = row + entry->number, left = n, fresh = 0;
    for (; copies > 0; copies--, at += COPY) {
        Copy copy = copy_at(body, entry, at);
        if (copy.fresh < 0 || copy.fresh > left || copy.count < 1 || copy.count > left - copy.fresh) return 0;
        if (copy.back < 0 || copy.back > own || copy.place < 0) return 0;
        if (copy.place > number_at(body, &entry->b, own - copy.back) - copy.count) return 0;
        left -= copy.fresh + copy.count;
        fresh += copy.fresh;
    }
    return number_at(body, &entry->b, own) == fresh + left;
}

/* Whether the rows that are stored are so few and so short as `left` bytes allow, besides `total` words. To decode them takes
   two numbers a row, which a message need not have. */
static int stored_check(Check *check, const Entry *entry, i64 rows, i64 total) {
    if (entry->number < 0 || entry->number > check->left / (2 * (i64)sizeof(i64)) - rows) return 0;
    check->left -= 8 * entry->number;
    i64 stored = rows + entry->number, words = 0, most = total + check->left / entry->size;
    if (!of_each(&entry->b, stored)) return 0;
    if (entry->b.count == 1) {
        i64 each = number_at(check->table->body, &entry->b, 0);
        if (each < 0 || each >= (i64)1 << 31 || each > most / stored) return 0;
        words = each * stored;
    } else
        for (i64 row = 0; row < stored; row++) {
            i64 own = number_at(check->table->body, &entry->b, row);
            if (own < 0 || own >= (i64)1 << 31 || (words += own) > most) return 0;
        }
    if (words > total) check->left -= (words - total) * entry->size;
    return 1;
}

static int pieces_check(Check *check, i64 index, const Array *lengths, i64 rows, i64 total) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *inner = table->entries + entry->first;
    const u8 *body = table->body;
    if (inner->layout != entry->layout || inner->items != 1 || inner->size != entry->size) return 0;
    if (!of_each(&entry->a, rows) || entry->c.count % COPY || !stored_check(check, entry, rows, total)) return 0;
    i64 at = 0, some = alike(entry, NULL) && entry->b.count == 1 && !entry->c.count && rows ? 1 : rows;
    for (i64 row = 0; row < some; row++) {
        i64 copies = number_at(body, &entry->a, row), n = row_elements(table, entry, NULL, row) * entry->items;
        if (copies < 0 || copies > (entry->c.count - at) / COPY || !row_check(body, entry, row, n, copies, at)) return 0;
        at += COPY * copies;
    }
    return at == entry->c.count && entry_check(check, entry->first, &entry->b, rows + entry->number);
}

static int pieces_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Entry *entry = check->table->entries + index;
    return entry_is_odd(check, entry->first, &entry->b, rows + entry->number);
}

static const Encoding PIECES_ENCODING = {
    .marked = 1, .encode_stored = pieces_encode, .count_stored = pieces_count, .split = pieces_split, .open = stored_open,
    .need = pieces_need, .decode = pieces_decode, .skip = pieces_skip, .check = pieces_check, .is_odd = pieces_is_odd,
};
