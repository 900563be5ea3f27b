/* Slices of the rows of a field: several threads encode them, each by itself, and what they make is joined. */

enum { SLICES = 16 }; /* of a batch, for each thread */

/* Rows that are encoded in one form to memory of their own: the entries, and what becomes of them. */
typedef struct {
    i64 first, rows;
    u8 *memory;
    Entry *entries;
    int done;
} Slice;

/* The slices of `rows` in a form, with the rows of `num_others` other fields; `num_entries` each. `entries` are those of all
   rows, and `body` is where their arrays are written to. */
typedef struct {
    const Rows *rows, *others;
    i64 num_others, kind, number, num_entries, count;
    Slice *each;
    Entry *entries;
    u8 *body;
} Slices;

static void encode_slice(void *context, i64 at) {
    const Slices *own = context;
    Slice *slice = own->each + at;
    Rows rows[3];
    int fine = 1;
    for (i64 i = 0; i <= own->num_others; i++) {
        rows[i] = i ? own->others[i - 1] : *own->rows;
        rows[i].first = slice->first;
        rows[i].rows = slice->rows;
        fine &= rows_open(rows + i);
    }
    i64 room = total_words(rows) * rows->size + 16 * slice->rows + 4096;
    Out out = {fine ? malloc((size_t)room) : NULL, 0, 0, room, 1};
    const Rows *others = own->num_others ? rows + 1 : NULL;
    slice->done = out.memory ? encode_as(own->kind, own->number, rows, others, &out, slice->entries) : NO_MEMORY;
    u8 *fitted = realloc(out.memory, (size_t)out.used + 1); /* the others can take the rest */
    slice->memory = fitted ? fitted : out.memory;
    for (i64 i = 0; i <= own->num_others; i++) free(rows[i].scratch);
}

static void free_slices(Slices *slices) {
    for (i64 at = 0; at < slices->count; at++) free(slices->each[at].memory);
    free(slices->each);
    slices->each = NULL;
    slices->count = 0;
}

/* Cuts rows into slices of so many bytes, or a row; false without memory. */
static int cut_slices(Slices *slices, i64 bytes, i64 slice_bytes, const Entry *entry) {
    const Rows *rows = slices->rows;
    i64 most = bytes / slice_bytes + 1, row = 0;
    Slice *each = slices->each = calloc((size_t)most, sizeof(Slice) + sizeof(Entry) * (size_t)slices->num_entries);
    if (!each) return 0;
    for (Entry *entries = (Entry *)(each + most); row < rows->rows; entries += slices->num_entries) {
        Slice *slice = each + slices->count++;
        *slice = (Slice){row, 0, NULL, entries, FITS};
        *entries = *entry;
        for (i64 left = slice_bytes; row < rows->rows && left > 0; row++, slice->rows++)
            left -= rows->size * (rows->field ? rows->layout->width * rows->items : row_length(rows, row));
    }
    return 1;
}

static Array *array_of(Entry *entry, char letter) { return &entry->a + (letter - 'a'); }

static int has_array(const char *letters, char letter) { return strchr(letters, letter) != NULL; }

/* Reserves an array for the numbers of all slices: equal ones once, if `once`. */
static int join_array(const Slices *slices, i64 number, char letter, int once, Out *out, Entry *to) {
    i64 size = 0, count = 0, equal = once, first = 0;
    const u8 *word = NULL;
    for (i64 at = 0; at < slices->count; at++) {
        const Slice *slice = slices->each + at;
        const Array *own = array_of(slice->entries + number, letter);
        const u8 *numbers = slice->memory + own->at;
        size = own->size > size ? own->size : size;
        count += own->count;
        if (!own->count || !equal) continue;
        if (!word) {
            word = numbers;
            first = own->size;
        }
        i64 nbytes = own->size * own->count;
        equal = own->size == first && equal_bytes(numbers, nbytes, repeated(word, first)) == nbytes;
    }
    return reserve(out, array_of(to, letter), size, equal && count > 1 ? 1 : count) != NULL;
}

/* Reserves the arrays of the entries of all slices, as if the rows were encoded as one; `write_slice` fills them. */
static int join_slices(const Slices *slices, Out *out, Entry *entries) {
    i64 numbers = 0;
    memcpy(entries, slices->each->entries, sizeof(Entry) * (size_t)slices->num_entries);
    for (i64 at = 0; at < slices->count; at++) {
        const Entry *own = slices->each[at].entries;
        if (own->second == OF_JOB_NEAR) entries->second = OF_JOB_NEAR;
        numbers += own->b.count + own->c.count;
    }
    if (has_array(ENCODINGS[entries->kind]->once, 'c') && out->used + numbers > out->room) return FULL;
    for (int rest = 0; rest < 2; rest++)
        for (i64 i = 0; i < slices->num_entries; i++) {
            const Encoding *encoding = ENCODINGS[entries[i].kind];
            for (const char *letter = encoding->arrays; *letter; letter++) {
                int once = has_array(encoding->once, *letter);
                if (rest == (*letter != 'a') && !join_array(slices, i, *letter, once, out, entries + i)) return FULL;
            }
        }
    return FITS;
}

/* Writes the arrays of a slice to their places in the body. */
static void write_slice(void *context, i64 at) {
    const Slices *own = context;
    for (i64 i = 0; i < own->num_entries; i++) {
        const Encoding *encoding = ENCODINGS[own->entries[i].kind];
        for (const char *letter = encoding->arrays; *letter; letter++) {
            const Array *part = array_of(own->each[at].entries + i, *letter), *all = array_of(own->entries + i, *letter);
            const u8 *from = own->each[at].memory + part->at;
            int is_signed = has_array(encoding->is_signed, *letter);
            i64 before = 0;
            for (i64 other = 0; other < at; other++) before += array_of(own->each[other].entries + i, *letter)->count;
            i64 n = part->count < all->count - before ? part->count : all->count - before; /* one may stand for all */
            u8 *to = own->body + all->at + before * all->size;
            if (part->size == all->size && n > 0) memcpy(to, from, (size_t)(n * all->size));
            else
                for (; n > 0; n--, from += part->size, to += all->size)
                    put_word(to, is_signed ? signed_word(from, part->size) : (i64)word_at(from, part->size), all->size);
        }
    }
}

/* Encodes rows in slices, for which `out` has room reserved then; or at once, if they are few, or if the slices take too much
   memory. */
static int encode_slices(Slices *slices, Crew *crew, i64 slice_bytes, Out *out, Entry *entries) {
    const Rows *rows = slices->rows;
    i64 words = rows->field ? rows->layout->width * rows->items * rows->rows : total_words(rows), start = out->used;
    int done = NO_MEMORY, cut = crew->started && words * rows->size >= 2 * slice_bytes;
    if (cut && cut_slices(slices, words * rows->size, slice_bytes, entries)) {
        share(crew, encode_slice, slices, slices->count);
        done = FITS;
        for (i64 at = 0; at < slices->count; at++) {
            int own = slices->each[at].done;
            if (own == STRAY || (own != FITS && done != STRAY)) done = own;
        }
        if (done == FITS) done = join_slices(slices, out, entries);
        if (done == FITS) return FITS;
        free_slices(slices);
        out->used = start;
    }
    if (done != FULL && done != NO_MEMORY) return done;
    return encode_as(slices->kind, slices->number, rows, slices->others, out, entries);
}
