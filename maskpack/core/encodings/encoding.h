/* Encodings: how the rows of a field become arrays in a body, and words again.

   A field is stored as an entry: its encoding, and where the arrays of the encoding lie in the body. Entries refer to
   entries before them. Rows of a layout have its tokens times `items` words; rows without a layout have `items` words.

   Each encoding has a file here: what its arrays mean, and the functions that the others know it by (Encoding). What a body
   says is never trusted: other processes may write to a file that is mapped, after it was checked. A number is cut to what
   there is, wherever it is used. */

enum { MARKED = 8 };                        /* rows from one mark to the next */
enum { FIT_ROWS = 64, FIT_WORDS = 1 << 10 }; /* rows, and words of each, that are looked at to fit an encoding */
static const i64 MANY = (i64)1 << 58; /* more words than memory holds */

/* ------------------------------------------------------------------ arrays */

static i64 bytes_of(const Entry *entry) {
    return entry->a.size * entry->a.count + entry->b.size * entry->b.count + entry->c.size * entry->c.count;
}

/* Number i of an array, or its last one, which may stand for all. */
static i64 number_at(const u8 *body, const Array *array, i64 i) {
    if ((u64)i >= (u64)array->count && (i = array->count - 1) < 0) return 0;
    return (i64)word_at(body + array->at + i * array->size, array->size);
}

static i64 signed_at(const u8 *body, const Array *array, i64 i) {
    return as_signed((u64)number_at(body, array, i), array->size);
}

static i64 cut_to(i64 number, i64 most) { return (u64)number > (u64)most ? most : number; }

static void put_word(u8 *to, i64 word, i64 size) { memcpy(to, &word, (size_t)size); }

/* Whether an array has `count` numbers, or one for all of them. */
static int of_each(const Array *array, i64 count) { return array->count == count || (array->count == 1 && count > 1); }

/* Whether an array lies in a body of so many bytes, from a multiple of `align` on; one without numbers lies anywhere. */
static int holds(const Array *array, i64 nbytes, i64 align) {
    int known = array->size == 1 || array->size == 2 || array->size == 4 || array->size == 8;
    return known && array->at >= 0 && array->at <= nbytes && array->count >= 0 && array->count <= (nbytes - array->at) / array->size &&
           (array->at % align == 0 || !array->count);
}

/* Cuts an array to some of its numbers. */
static void array_cut(Array *array, i64 from, i64 to) {
    to = to < array->count ? to : array->count;
    from = from < to ? from : to;
    array->at += from * array->size;
    array->count = to - from;
}

/* The same where one number may stand for all. */
static void array_cut_each(Array *array, i64 from, i64 to) {
    if (from == to) array->count = 0;
    else if (array->count > 1) array_cut(array, from, to);
}

/* ------------------------------------------------------------------ the table of encodings */

typedef struct Cursor Cursor;
typedef struct Part Part;
typedef struct Rows Rows;
typedef struct Out Out;
typedef struct Check Check;
typedef struct Stage Stage;
typedef struct Extent Extent;
typedef struct Placing Placing;
typedef struct Placed Placed;

/* How many numbers of the arrays of an entry belong to the rows before one. */
typedef struct {
    i64 row, a, b, c;
} Mark;

/* The functions of an encoding. */
typedef struct {
    int integers; /* whether it is for integers only */
    int marked;   /* whether marks say where rows begin; else this follows from their bounds */
    /* Which of the arrays a, b and c of an entry `encode` writes, in this order; those in which equal numbers are stored once;
       those of signed numbers. Of rows that are encoded slice by slice, these arrays are joined (slices.c). */
    const char *arrays, *once, *is_signed;
    /* The `number` for rows of packed values; NULL if there is nothing to find. */
    i64 (*fit)(const Rows *rows);
    /* Encodes rows in an entry, or `number` columns and theirs; `near` are rows of the field that it may refer to, or of the
       two that it does. NULL for an encoding that stores rows. */
    int (*encode)(const Rows *rows, const Rows *near, Out *out, Entry *entry);
    /* Of an encoding that stores rows (OF_ROWS): packed values as two entries, `again` in the form of the last time; how many
       rows an entry stores; the parts of a table's rows between `cuts`, of which part p goes to out[p * n]. NULL for others. */
    int (*encode_stored)(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again);
    i64 (*count_stored)(const Table *table, const Entry *entry);
    void (*split)(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n);
    /* Gets what a cursor needs to decode; false without memory. NULL if it needs no more than its parts. */
    int (*open)(Cursor *cursor);
    /* Of an encoding that stores rows: marks those that a row needs, in `own` from 1 on; rows come as they are decoded. */
    void (*need)(Cursor *cursor, i64 row);
    /* Decodes the row at the cursor, of n words; moves a, b and c over it, not `row`. */
    void (*decode)(Cursor *cursor, i64 n, u8 *out);
    /* Moves a, b and c over that row. NULL if there is nothing to move, or if only parts have arrays. */
    void (*skip)(Cursor *cursor, i64 n);
    /* Cuts an entry to the rows between two marks. NULL if only parts have arrays. */
    void (*cut)(Entry *own, const Mark *from, const Mark *to);
    /* Whether it can be decoded: every number is in its range, every array as long as its rows say. */
    int (*check)(Check *check, i64 index, const Array *lengths, i64 rows, i64 total);
    /* Whether bools have other bytes than 0 and 1; the entry was checked. */
    int (*is_odd)(Check *check, i64 index, const Array *lengths, i64 rows);
    /* Where the decode kernel finds the words (stage.c); false without memory. NULL if it does not read this encoding. */
    int (*stage)(Stage *stage, const Entry *entry, const Extent *extent, Source *source);
    /* Where the encode kernel writes its arrays (place.c); NULL if it does not write this encoding. */
    void (*place)(Placing *placing, Placed *placed, Entry *entry);
} Encoding;

#define NUMBER_OF(NAME, first, second) NAME,
enum { KINDS(NUMBER_OF) NUM_KINDS };

static int has_kind(i64 kind) { return kind >= 0 && kind < NUM_KINDS; }

#define REFERENCES_OF(NAME, first, second) {first, second},
static const i64 REFERENCES[NUM_KINDS][2] = {KINDS(REFERENCES_OF)};

static const Encoding *const ENCODINGS[NUM_KINDS]; /* core.c */

/* The numbers `first` and `second` of an entry that is made: parts of it are numbered from 0; these are the fields that its
   job names, until their entries are known. */
enum { OF_JOB_NEAR = -2, OF_JOB_HEAD = -3, OF_JOB_TAIL = -4 };

static Entry entry_of(i64 kind, i64 layout, i64 items, i64 size) {
    return (Entry){kind, layout, items, size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
}

/* Whether an encoding has one entry, but for a field that its words are near to. */
static int is_single(i64 kind) { return has_kind(kind) && REFERENCES[kind][0] == NONE; }

/* Whether an entry refers to no other. */
static int is_leaf(const Entry *entry) { return is_single(entry->kind) && entry->second < 0; }

/* The entries that one refers to: `count` from `first` on, and `second`; -1 for none. */
typedef struct {
    i64 first, count, second;
} References;

static References references_of(const Entry *entry) {
    i64 first = REFERENCES[entry->kind][0];
    return (References){entry->first, first == NONE ? 0 : first == OF_COLUMNS ? entry->number : 1, entry->second};
}

/* ------------------------------------------------------------------ decoding: rows of an entry, one after the other

   Layouts and tables are known to fit each other. Of the body only this is known: the arrays lie inside it. */

/* The rows of a table that are decoded, and which rows of the result they are: `count` of each, NULL for all in order. */
struct Part {
    Table table;
    const i64 *taken, *places;
    i64 count;
    const Target **done; /* for each entry, where it was decoded to before, or NULL; NULL where nobody asks */
    const Layout *out;   /* the layouts of the result */
    i64 now;             /* the row of the result that is decoded; known if `done` is */
};

/* A place among the rows of an entry: how many numbers of its arrays belong to the rows before. */
struct Cursor {
    const Table *table;
    const Part *part;
    const Entry *entry;
    const i64 *bounds; /* of the rows, in tokens; NULL for rows of `items` words */
    const i64 *marks;  /* a, b and c of each MARKED rows; NULL if they follow from the bounds, or are not known */
    i64 row, a, b, c;
    Cursor *parts; /* of the entries that this one refers to */
    i64 num_parts;
    u8 *rows;     /* the stored rows that are used, decoded, and the bounds of all, which are empty otherwise */
    i64 *own, stored;
    u8 *scratch; /* a row of a part */
    const BlockLoops *loops;
    const Target *done; /* where the rows were decoded to before, or NULL */
};

static i64 words_of(const Cursor *cursor, i64 row) {
    i64 items = cursor->entry->items;
    return cursor->bounds ? (cursor->bounds[row + 1] - cursor->bounds[row]) * items : items;
}

/* The row of a table that is row `i` of those that are decoded. */
static i64 taken_row(const Part *part, i64 i) { return part->taken ? part->taken[i] : i; }

/* The words of the longest row that is decoded. */
static i64 longest_row(const Cursor *cursor) {
    i64 most = 0;
    for (i64 i = 0; i < cursor->part->count; i++) {
        i64 words = words_of(cursor, taken_row(cursor->part, i));
        most = words > most ? words : most;
    }
    return most;
}

/* Room for the longest row in `scratch`. */
static int cursor_reserve(Cursor *cursor) {
    return (cursor->scratch = malloc((size_t)(longest_row(cursor) * cursor->entry->size + 8))) != NULL;
}

static void cursor_close(Cursor *cursor) {
    for (i64 part = 0; part < cursor->num_parts; part++) cursor_close(cursor->parts + part);
    free(cursor->parts);
    free(cursor->rows);
    free(cursor->own);
    free(cursor->scratch);
}

/* Where an entry was decoded to, if all its rows lie together there; else NULL. */
static const Target *done_before(const Part *part, i64 index) {
    const Target *done = part->done ? part->done[index] : NULL;
    if (!done || !done->padded) return done;
    const Layout *layout = part->out + done->field.layout;
    for (i64 i = 0; i < part->count; i++) {
        i64 row = part->places ? part->places[i] : i;
        if (layout->splits[row + 1] - layout->splits[row] > 1) return NULL;
    }
    return done->field.outer == 1 ? done : NULL;
}

/* The words of a row of the result in a packed field. */
static u8 *packed_row(const Part *part, const Field *field, i64 row) {
    return field->packed + (field->layout < 0 ? row : part->out[field->layout].bounds[row]) * field->items * field->size;
}

/* The words of the row that is decoded, in a field that was decoded before. */
static const u8 *row_before(const Cursor *cursor) {
    const Field *field = &cursor->done->field;
    i64 row = cursor->part->now;
    if (!cursor->done->padded) return packed_row(cursor->part, field, row);
    const Layout *layout = cursor->part->out + field->layout;
    i64 span = layout->splits[row], element = field->items * field->size;
    return field->padded + row * field->row_stride + (span < layout->splits[row + 1] ? layout->starts[span] * element : 0);
}

/* A cursor at row 0 that can skip rows; `stored` are the bounds of rows that do not lie in the layout of the entry. */
static Cursor cursor_of(const Table *table, i64 index, const i64 *stored) {
    const Entry *entry = table->entries + index;
    const i64 *bounds = stored || entry->layout < 0 ? stored : table->layouts[entry->layout].bounds;
    const i64 *marks = table->marks && table->marks[index] >= 0 ? table->marks + table->marks[index] : NULL;
    return (Cursor){.table = table, .entry = entry, .loops = block_loops(), .bounds = bounds, .marks = marks};
}

/* Moves over a row without decoding it, but not in the parts. */
static void row_skip(Cursor *cursor) {
    void (*skip)(Cursor *, i64) = cursor->done ? NULL : ENCODINGS[cursor->entry->kind]->skip;
    if (skip) skip(cursor, words_of(cursor, cursor->row));
    cursor->row++;
}

/* Moves to a row, in a table that has marks. */
static void row_seek(Cursor *cursor, i64 row) {
    if (cursor->marks && ENCODINGS[cursor->entry->kind]->marked) {
        if (row < cursor->row || row - cursor->row > MARKED) {
            const i64 *mark = cursor->marks + 3 * (row / MARKED);
            cursor->row = row / MARKED * MARKED;
            cursor->a = mark[0];
            cursor->b = mark[1];
            cursor->c = mark[2];
        }
        while (cursor->row < row) row_skip(cursor);
    } else cursor->a = (cursor->bounds ? cursor->bounds[row] : row) * cursor->entry->items;
    cursor->row = row;
    for (i64 part = 0; part < cursor->num_parts; part++) row_seek(cursor->parts + part, row);
}

static Mark mark_of(Cursor *cursor, i64 row) {
    row_seek(cursor, row);
    return (Mark){row, cursor->a, cursor->b, cursor->c};
}

/* Decodes the row at the cursor to `out`, and moves on. */
static void row_decode(Cursor *cursor, u8 *out) {
    i64 n = words_of(cursor, cursor->row);
    if (cursor->done) memcpy(out, row_before(cursor), (size_t)(n * cursor->entry->size));
    else ENCODINGS[cursor->entry->kind]->decode(cursor, n, out);
    cursor->row++;
}

/* Opens a cursor that can decode the rows of a part, too. False without memory; close it either way. */
static int cursor_open(Cursor *cursor, const Part *rows, i64 index) {
    const Entry *entry = rows->table.entries + index;
    const Encoding *encoding = ENCODINGS[entry->kind];
    *cursor = cursor_of(&rows->table, index, NULL);
    cursor->part = rows;
    if ((cursor->done = done_before(rows, index))) return 1;
    References to = references_of(entry);
    i64 firsts = REFERENCES[entry->kind][0] == OF_ROWS ? 0 : to.count, parts = firsts + (to.second >= 0);
    if (parts && !(cursor->parts = calloc((size_t)parts, sizeof(Cursor)))) return 0;
    while (cursor->num_parts < parts) {
        i64 part = cursor->num_parts++;
        if (!cursor_open(cursor->parts + part, rows, part < firsts ? to.first + part : to.second)) return 0;
    }
    return encoding->open ? encoding->open(cursor) : 1;
}

/* ------------------------------------------------------------------ encoding: rows of words to an entry */

/* Rows of words: of a padded field, whose pads are verified on the way; else of packed values. */
struct Rows {
    i64 rows, size, items;
    const i64 *bounds; /* of the rows of `values`, in elements; NULL for one element a row */
    const i64 *index;  /* which rows of `values`; NULL for all */
    const u8 *values;
    Field *field;
    const Layout *layout;
    u8 *scratch; /* room for the longest row */
    u64 *ends;   /* what `row_words` writes `ends_of` each row to; NULL if nobody asks */
    i64 first;   /* the number of row 0 */
};

static i64 row_length(const Rows *rows, i64 row) { /* words */
    i64 number = rows->first + row, at = rows->index ? rows->index[number] : number;
    i64 elements = rows->bounds ? rows->bounds[at + 1] - rows->bounds[at] : 1;
    return elements * rows->items;
}

static i64 total_words(const Rows *rows) {
    i64 total = 0;
    for (i64 row = 0; row < rows->rows; row++) total += row_length(rows, row);
    return total;
}

/* The length, the first and the last word of a row in one number that is not 0; 0 for no words. */
static u64 ends_of(const u8 *words, i64 n, i64 size) {
    if (!words || !n) return 0;
    u64 ends[3] = {(u64)n, word_at(words, size), word_at(words + (n - 1) * size, size)};
    return hash_words((const u8 *)ends, sizeof ends) | 1;
}

/* The words of a row; NULL if a pad of a padded field is not what it should be. */
static const u8 *row_words(const Rows *rows, i64 row) {
    i64 number = rows->first + row, at = rows->index ? rows->index[number] : number, element = rows->items * rows->size;
    const u8 *words;
    if (rows->field) {
        const Field *field = rows->field;
        const Layout *layout = rows->layout;
        i64 span = layout->splits[number];
        int lies = element && layout->splits[number + 1] - span == 1 && field->outer == 1 && !field->is_expanded;
        if (!read_row(rows->field, layout, number, lies ? NULL : rows->scratch)) return NULL;
        words = lies ? field->padded + number * field->row_stride + layout->starts[span] * element : rows->scratch;
    } else words = rows->values + (rows->bounds ? rows->bounds[at] : at) * element;
    if (rows->ends) rows->ends[number] = ends_of(words, row_length(rows, row), rows->size);
    return words;
}

/* Gets room for the longest row of a padded field; false without memory. */
static int rows_open(Rows *rows) {
    i64 most = 0;
    for (i64 row = 0; rows->field && row < rows->rows; row++)
        most = row_length(rows, row) > most ? row_length(rows, row) : most;
    return !rows->field || (rows->scratch = malloc((size_t)(most * rows->size + 8))) != NULL;
}

/* The same rows, whose pads were verified before. `field` is memory for a copy. */
static Rows rows_verified(const Rows *rows, Field *field) {
    Rows out = *rows;
    out.ends = NULL;
    if (!rows->field) return out;
    *field = *rows->field;
    field->mode = NO_PAD;
    out.field = field;
    return out;
}

/* A part of the body that begins at its byte `base`. What is between arrays is 0, so that equal batches have equal
   bytes. */
struct Out {
    u8 *memory;
    i64 base, used, room;
    int is_slice; /* of some rows of a field: equal numbers are not stored once */
};

/* Reserves an array; NULL if there is no room. */
static u8 *reserve(Out *out, Array *array, i64 size, i64 count) {
    i64 at = (out->used + 7) & ~(i64)7;
    if (at + size * count > out->room) return NULL;
    memset(out->memory + out->used, 0, (size_t)(at - out->used));
    *array = (Array){out->base + at, size, count};
    out->used = at + size * count;
    return out->memory + at;
}

/* Numbers that are collected before their size is known. */
typedef struct {
    i64 *numbers, count, room;
} List;

static int push(List *list, i64 number) {
    if (list->count == list->room) {
        i64 room = list->room ? 2 * list->room : 256;
        i64 *numbers = realloc(list->numbers, (size_t)room * sizeof(i64));
        if (!numbers) return 0;
        list->numbers = numbers;
        list->room = room;
    }
    list->numbers[list->count++] = number;
    return 1;
}

/* The bytes of a number that are enough for all between two, and for 0. */
static i64 bytes_between(i64 low, i64 high, int is_signed) {
    low = low < 0 ? low : 0;
    high = high > 0 ? high : 0;
    i64 size = 1;
    for (; size < 8; size *= 2) {
        i64 bits = 8 * size - is_signed;
        if (high < (i64)1 << bits && low >= (is_signed ? -((i64)1 << bits) : 0)) break;
    }
    return size;
}

/* Writes numbers in as few bytes as they need; equal ones once, if `once`. */
static int put_list(Out *out, Array *array, const List *list, int is_signed, int once) {
    i64 low = list->count ? list->numbers[0] : 0, high = low;
    for (i64 i = 0; i < list->count; i++) {
        low = list->numbers[i] < low ? list->numbers[i] : low;
        high = list->numbers[i] > high ? list->numbers[i] : high;
    }
    i64 count = once && !out->is_slice && list->count > 1 && low == high ? 1 : list->count, size = bytes_between(low, high, is_signed);
    u8 *to = reserve(out, array, size, count);
    if (!to) return 0;
    for (i64 i = 0; i < count; i++) put_word(to + i * size, list->numbers[i], size);
    return 1;
}

static int put_numbers(Out *out, Array *array, const List *list) { return put_list(out, array, list, 0, 1); }

static int put_signed(Out *out, Array *array, const List *list) { return put_list(out, array, list, 1, 1); }

/* ------------------------------------------------------------------ checks of entries from elsewhere, before they are used */

enum { INSIDE = 1, CHECKED = 2, COLUMN = 4 }; /* INSIDE: rows that another entry stores. CHECKED: for other bytes than 0 and 1 */

struct Check {
    const Table *table;
    i64 nbytes, num_layouts, dense_rows;
    i64 left;          /* bytes left for stored rows beyond those of their fields */
    u8 *marks, *steps; /* of each entry */
    i64 align;         /* of arrays; 1 for those of rows that were taken in place */
};

/* Elements of a row; `lengths` has those of stored rows. */
static i64 row_elements(const Table *table, const Entry *entry, const Array *lengths, i64 row) {
    if (lengths) return cut_to(number_at(table->body, lengths, row), MANY / (entry->items ? entry->items : 1));
    const i64 *bounds = entry->layout < 0 ? NULL : table->layouts[entry->layout].bounds;
    return bounds ? bounds[row + 1] - bounds[row] : 1;
}

/* Whether rows have one length. A few bytes may say any number of these, so they are not looked at one by one. */
static int alike(const Entry *entry, const Array *lengths) { return lengths ? lengths->count == 1 : entry->layout < 0; }

/* The pieces of up to `unit` words that some rows have; -1 if they have MANY words or more. */
static i64 count_pieces(const Table *table, const Entry *entry, const Array *lengths, i64 rows, i64 unit) {
    i64 some = rows && alike(entry, lengths) ? 1 : rows, times = some ? rows / some : 0, words = 0, pieces = 0;
    for (i64 row = 0; row < some; row++) {
        i64 elements = row_elements(table, entry, lengths, row);
        if (entry->items && elements > (MANY / times - words) / entry->items) return -1;
        words += elements * entry->items;
        pieces += (elements * entry->items + unit - 1) / unit;
    }
    return pieces * times;
}

static i64 rows_of(const Check *check, const Entry *entry) { return entry->layout < 0 ? check->dense_rows : check->table->rows; }

static int entry_check(Check *check, i64 index, const Array *lengths, i64 rows);

/* Whether a field of bytes, which was checked, has values other than 0 and 1; 0 if it was looked at before. */
static int entry_is_odd(Check *check, i64 index, const Array *lengths, i64 rows) {
    if (check->marks[index] & CHECKED) return 0; /* or it was refused */
    check->marks[index] |= CHECKED;
    return ENCODINGS[check->table->entries[index].kind]->is_odd(check, index, lengths, rows);
}

/* Whether bytes of an array are other than 0 and 1. */
static int array_is_odd(const u8 *body, const Array *array) { return are_odd(body + array->at, array->count); }

/* The rows that are worth a look: one, if all say the same. */
static i64 rows_that_differ(const Entry *entry, const Array *lengths, i64 rows) {
    return alike(entry, lengths) && entry->a.count <= 1 && entry->b.count <= 1 && entry->c.count <= 1 && rows > 1 ? 1 : rows;
}

/* ------------------------------------------------------------------ tables for the decode kernel (stage.c) */

/* The rows of an entry; their bounds are in tokens, NULL for one token each. `table` and `unit`: the bounds for the kernel. */
struct Extent {
    i64 rows;
    const i64 *bounds;
    i64 table, unit;
};

struct Stage {
    const Entry *entries;
    const u8 *body;
    i64 *tables, used, room;
    const i64 *wanted; /* entries */
    const Source *sources; /* those that are made already */
    i64 num_sources;
};

/* Adds a number to the tables; beyond their room it is only counted. */
static void add(Stage *stage, i64 number) {
    if (stage->used < stage->room) stage->tables[stage->used] = number;
    stage->used++;
}

static i64 words_in(const Extent *extent, const Entry *entry, i64 row) {
    return (extent->bounds ? extent->bounds[row + 1] - extent->bounds[row] : 1) * entry->items;
}

static int add_source(Stage *stage, i64 index, const Extent *extent, Source *source);
