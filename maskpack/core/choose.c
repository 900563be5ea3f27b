/* The choice of an encoding: the one that takes fewest bytes, as far as a sample can tell. */

enum { SAMPLE_ROWS = 64, SAMPLE_WORDS = 2048, GLANCE_WORDS = 512 }; /* a glance has less of more rows */
static const i64 MOST = (i64)1 << 62; /* bytes of what does not fit */

/* Whether so many bytes for so many words are 2 % more than when a form was chosen. */
static int is_larger(i64 bytes, const Form *form, i64 words) {
    return (bytes - 64) * COST_WORDS > form->cost * words + form->cost * words / 50;
}

static int encode_as(i64 kind, i64 number, const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    *entry = entry_of(kind, entry->layout, entry->items, rows->size);
    entry->number = number;
    return has_kind(kind) && ENCODINGS[kind]->encode ? ENCODINGS[kind]->encode(rows, near, out, entry) : MISFIT;
}

/* Some rows, at most `longest` words of each: `words` and `bounds` have room for SAMPLE_WORDS and SAMPLE_ROWS + 1. */
static Rows sample_of(const Rows *rows, i64 most, i64 longest, u8 *words, i64 *bounds) {
    i64 usual = rows->rows ? total_words(rows) / rows->rows + 1 : 1, count = most / (usual < longest ? usual : longest);
    count = count < 1 ? 1 : count > SAMPLE_ROWS ? SAMPLE_ROWS : count;
    count = count < rows->rows ? count : rows->rows;
    i64 each = count ? most / count : 0;
    each = each < longest ? each : longest;
    bounds[0] = 0;
    for (i64 i = 0; i < count; i++) {
        i64 row = i * rows->rows / count, n = row_length(rows, row);
        n = n < each ? n : each;
        const u8 *from = row_words(rows, row);
        i64 first = (row_length(rows, row) - n) / 2 * (i % 3); /* the begin, the middle and the end of rows by turns */
        if (from) memcpy(words + bounds[i] * rows->size, from + first * rows->size, (size_t)(n * rows->size));
        bounds[i + 1] = bounds[i] + (from ? n : 0);
    }
    return (Rows){count, rows->size, 1, bounds, NULL, words, NULL, NULL, NULL, NULL, 0};
}

/* Bytes of a sample of rows in each encoding, MOST if it does not fit, to sizes [NUM_KINDS]; the least of them. `sampled` words
   are looked at; the number of `form` is known. */
static i64 try_sample(const Rows *rows, const Rows *near, int integers, const Form *form, i64 *sizes, i64 *sampled, i64 most,
                      i64 longest) {
    u8 words[8 * SAMPLE_WORDS], others[8 * SAMPLE_WORDS], memory[10 * SAMPLE_WORDS + 1024];
    i64 bounds[SAMPLE_ROWS + 1], other_bounds[SAMPLE_ROWS + 1], least = MOST;
    Rows sample = sample_of(rows, most, longest, words, bounds), beside;
    if (near) beside = sample_of(near, most, longest, others, other_bounds);
    *sampled = total_words(&sample);
    for (i64 kind = 0; kind < NUM_KINDS; kind++) {
        Out out = {memory, 0, 0, sizeof memory, 0};
        Entry entry = {0};
        sizes[kind] = MOST;
        if (!is_single(kind) || (!integers && ENCODINGS[kind]->integers)) continue;
        i64 number = kind == form->kind ? form->number : 0; /* to fit one takes longer than a sample may */
        if (encode_as(kind, number, &sample, near ? &beside : NULL, &out, &entry) == FITS) sizes[kind] = bytes_of(&entry);
        least = sizes[kind] < least ? sizes[kind] : least;
    }
    return least;
}

/* Takes over what was encoded in memory of its own, behind the first `start` bytes. */
static int adopt(Out *out, i64 start, const Out *spare) {
    i64 at = spare->base - out->base;
    if (at + spare->used > out->room) return FULL;
    memset(out->memory + start, 0, (size_t)(at - start));
    memcpy(out->memory + at, spare->memory, (size_t)spare->used);
    out->used = at + spare->used;
    return FITS;
}

/* Encodes rows of packed values in one entry. */
static int choose(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entry, Form *form) {
    i64 sizes[NUM_KINDS], sampled, total = total_words(rows), start = out->used, plain = total * rows->size, best = plain;
    *form = (Form){PLAIN, 0, -1, 0, 0, 0};
    i64 least = try_sample(rows, near, integers, form, sizes, &sampled, SAMPLE_WORDS, BLOCK), room = plain + 8 * rows->rows + 4096;
    u8 *memory = NULL;
    Entry header = *entry;
    for (i64 kind = PLAIN + 1; kind < NUM_KINDS && plain; kind++) {
        int likely = sizes[kind] < MOST && 2 * sizes[kind] <= 3 * least + 64;
        if (!is_single(kind) || (!likely && !(hints >> kind & 1))) continue;
        if (!memory && !(memory = malloc((size_t)room))) return NO_MEMORY;
        Out spare = {memory, out->base + ((start + 7) & ~(i64)7), 0, best < room ? best : room, 0};
        Entry tried = header;
        int done = encode_as(kind, ENCODINGS[kind]->fit ? ENCODINGS[kind]->fit(rows) : 0, rows, near, &spare, &tried);
        if (done == NO_MEMORY) {
            free(memory);
            return NO_MEMORY;
        }
        if (done != FITS || bytes_of(&tried) >= best || adopt(out, start, &spare) != FITS) continue;
        best = bytes_of(&tried);
        *entry = tried;
        *form = (Form){kind, tried.number, -1, 0, 0, 0};
    }
    free(memory);
    form->cost = total ? best * COST_WORDS / total : 0;
    if (form->kind != PLAIN) return FITS;
    out->used = start;
    return encode_as(PLAIN, 0, rows, NULL, out, entry);
}

/* Whether one entry of another form is clearly smaller than the form in use, which takes so many bytes for so many words; as
   far as a sample can tell, which may not fit that form. */
static int is_better(const Rows *rows, const Rows *near, int integers, const Form *form, i64 bytes, i64 words) {
    i64 sizes[NUM_KINDS], kind = form->kind == COLUMNS ? BLOCKS : form->kind, sampled;
    i64 least = try_sample(rows, near, integers, form, sizes, &sampled, GLANCE_WORDS, FEW_WORDS);
    i64 own = !is_single(kind) && words ? bytes * sampled / words : sizes[kind];
    return own < MOST && 100 * least + 1600 < 97 * own;
}

/* Whether rows look alike at their ends, so that a dictionary may pay; `ends` are those of each, NULL if they are not known. */
static int look_alike(const Rows *rows, const u64 *ends) {
    if (rows->rows < 2 || total_words(rows) < 4 * rows->rows) return 0;
    i64 room = 16, different = 0, real = 0;
    while (room < 2 * rows->rows) room *= 2;
    u64 *slots = calloc((size_t)room, sizeof(u64));
    for (i64 row = 0; slots && row < rows->rows; row++) {
        u64 hash = ends ? ends[row] : ends_of(row_words(rows, row), row_length(rows, row), rows->size), slot = hash >> 7;
        if (!hash) continue;
        while (slots[slot & (u64)(room - 1)] && slots[slot & (u64)(room - 1)] != hash) slot++;
        different += !slots[slot & (u64)(room - 1)];
        slots[slot & (u64)(room - 1)] = hash;
        real++;
    }
    int counted = slots != NULL;
    free(slots);
    return counted && 4 * different <= 3 * real;
}
