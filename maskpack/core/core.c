/* The compiled core of maskpack: one pass over memory for each thing that is done to a batch.

   scan      a mask to its spans
   read      padded fields to packed values; every pad is verified on the way
   write     packed values to padded fields
   prefixes  the rows of token ids in the order of a trie
   palette   words as numbers of the distinct ones

   Functions take int64 numbers, addresses among them, and tables whose rows are jobs. They keep no state, call nothing
   back and hand out no memory. Python builds the tables (native.py), checks what it is given and writes the messages.

   A word has 1, 2, 4, 8 or 16 bytes. An element of a field has `items` words that lie together at each position, and
   `outer` of these groups that lie apart, where dims stand before the width: [B, outer, S, items]. Packed values are
   [T, outer, items]. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define API __attribute__((visibility("default")))

typedef int64_t i64;
typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

API i64 maskpack_version(void) { return 8; } /* native.py expects this number */

/* ------------------------------------------------------------------ words */

enum { AHEAD = 8192, MOST_THREADS = 64 }; /* bytes to prefetch ahead of a read */

/* A word, repeated over 16 bytes. */
typedef struct {
    u64 low, high;
} Pattern;

static const Pattern ZEROS = {0, 0};

static u64 load(const u8 *p) {
    u64 word;
    memcpy(&word, p, 8);
    return word;
}

/* A word of up to 8 bytes, or the first half of one of 16. */
static u64 word_at(const u8 *p, i64 size) {
    uint16_t two;
    u32 four;
    switch (size) {
    case 1: return *p;
    case 2: memcpy(&two, p, 2); return two;
    case 4: memcpy(&four, p, 4); return four;
    default: return load(p);
    }
}

/* The number that the lowest `size` bytes of a word are. */
static i64 as_signed(u64 word, i64 size) {
    i64 unused = size < 8 ? 64 - 8 * size : 0;
    return (i64)(word << unused) >> unused;
}

static i64 signed_word(const u8 *p, i64 size) { return as_signed(word_at(p, size), size); }

static Pattern repeated(const u8 *word, i64 size) {
    Pattern pattern;
    for (i64 i = 0; i < 16; i += size) memcpy((u8 *)&pattern + i, word, (size_t)size);
    return pattern;
}

/* The number of bytes at the begin of p[0:n] that repeat a pattern. */
static i64 equal_bytes(const u8 *p, i64 n, Pattern pattern) {
    i64 at = 0;
    for (; at + 512 <= n; at += 512) {
        u64 differing = 0;
        for (i64 line = 0; line < 512; line += 64) __builtin_prefetch(p + at + AHEAD + line);
        for (i64 i = 0; i < 512; i += 16)
            differing |= (load(p + at + i) ^ pattern.low) | (load(p + at + i + 8) ^ pattern.high);
        if (differing) break;
    }
    for (; at + 16 <= n; at += 16)
        if ((load(p + at) ^ pattern.low) | (load(p + at + 8) ^ pattern.high)) break;
    while (at < n && p[at] == ((const u8 *)&pattern)[at & 15]) at++;
    return at;
}

/* Repeats a pattern over p[0:n]. Past the cache, if `stream`: memory that is not read soon need not be loaded first. */
static void fill(u8 *p, i64 n, Pattern pattern, i64 stream) {
    i64 at = 0;
#if defined(__SSE2__)
    if (stream && n >= 4096) {
        at = -(intptr_t)p & 15;
        Pattern turned;
        for (i64 i = 0; i < 16; i++) ((u8 *)&turned)[i] = ((const u8 *)&pattern)[(at + i) & 15];
        memcpy(p, &pattern, 16);
        __m128i words = _mm_loadu_si128((const __m128i *)&turned);
        for (; at + 64 <= n; at += 64)
            for (i64 i = 0; i < 64; i += 16) _mm_stream_si128((__m128i *)(p + at + i), words);
        for (; at < n; at++) p[at] = ((const u8 *)&pattern)[at & 15];
        return;
    }
#endif
    (void)stream;
    for (; at + 16 <= n; at += 16) memcpy(p + at, &pattern, 16);
    memcpy(p + at, &pattern, (size_t)(n - at));
}

/* Copies n elements of `size` bytes that lie `from_step` and `to_step` bytes apart. */
static void copy_apart(u8 *to, i64 to_step, const u8 *from, i64 from_step, i64 n, i64 size) {
    if (to_step == size && from_step == size) memcpy(to, from, (size_t)(n * size));
    else if (size == 16) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 16);
    else if (size == 32) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 32);
    else if (size == 8) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 8);
    else if (size == 4) for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, 4);
    else for (i64 i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, (size_t)size);
}

/* ------------------------------------------------------------------ threads: tasks off a counter, joined before return */

typedef struct {
    void (*run)(void *, i64);
    void *context;
    i64 tasks;
    _Atomic i64 next;
} Crew;

static void *work(void *argument) {
    Crew *crew = argument;
    for (i64 task; (task = atomic_fetch_add(&crew->next, 1)) < crew->tasks;) crew->run(crew->context, task);
    return NULL;
}

static void run_tasks(void (*run)(void *, i64), void *context, i64 tasks, i64 threads) {
    Crew crew = {run, context, tasks, 0};
    pthread_t others[MOST_THREADS];
    i64 started = 0;
    if (threads > tasks) threads = tasks;
    while (started + 1 < threads && started < MOST_THREADS && !pthread_create(&others[started], NULL, work, &crew))
        started++;
    work(&crew);
    for (i64 i = 0; i < started; i++) pthread_join(others[i], NULL);
}

/* ------------------------------------------------------------------ scan: a mask to its spans */

enum { FEW_SPANS = 4 };

/* The scan of a row: its first spans, the word of its first valid token, and whether all its valid tokens are this word
   and all other bits are 0. */
typedef struct {
    i64 spans, tokens, alike;
    u64 value;
    i64 starts[FEW_SPANS], counts[FEW_SPANS];
} RowScan;

typedef struct {
    const u8 *mask;
    i64 size, rows, width, row_stride;
    u64 significant;
    RowScan *found;
    const i64 *splits;
    i64 *starts, *counts, rows_a_task;
} Scan;

/* Lists the spans of a row, at most `room` of them; a word is valid if it has one of the significant bits. */
static RowScan scan_row(const Scan *scan, i64 row, i64 *starts, i64 *counts, i64 room) {
    const u8 *words = scan->mask + row * scan->row_stride;
    i64 size = scan->size, width = scan->width, at = 0;
    RowScan found = {0, 0, 1, 0, {0}, {0}};
    while ((at += equal_bytes(words + at * size, (width - at) * size, ZEROS) / size) < width) {
        u64 word = word_at(words + at * size, size);
        i64 start = at;
        if (!(word & scan->significant)) { /* -0.0 */
            found.alike = 0;
            at++;
            continue;
        }
        if (!found.spans) found.value = word;
        for (; at < width && (word = word_at(words + at * size, size)) & scan->significant;) {
            found.alike &= word == found.value;
            at += equal_bytes(words + at * size, (width - at) * size, repeated((const u8 *)&word, size)) / size;
        }
        if (found.spans < room) {
            starts[found.spans] = start;
            counts[found.spans] = at - start;
        }
        found.spans++;
        found.tokens += at - start;
    }
    return found;
}

static i64 last_row(const Scan *scan, i64 task) {
    i64 end = (task + 1) * scan->rows_a_task;
    return end < scan->rows ? end : scan->rows;
}

static void count_spans(void *context, i64 task) {
    Scan *scan = context;
    for (i64 row = task * scan->rows_a_task; row < last_row(scan, task); row++) {
        i64 starts[FEW_SPANS] = {0}, counts[FEW_SPANS] = {0};
        RowScan found = scan_row(scan, row, starts, counts, FEW_SPANS);
        memcpy(found.starts, starts, sizeof starts);
        memcpy(found.counts, counts, sizeof counts);
        scan->found[row] = found;
    }
}

static void list_spans(void *context, i64 task) {
    Scan *scan = context;
    for (i64 row = task * scan->rows_a_task; row < last_row(scan, task); row++) {
        const RowScan *found = &scan->found[row];
        i64 *starts = scan->starts + scan->splits[row], *counts = scan->counts + scan->splits[row];
        if (found->spans > FEW_SPANS) scan_row(scan, row, starts, counts, found->spans);
        else
            for (i64 i = 0; i < found->spans; i++) {
                starts[i] = found->starts[i];
                counts[i] = found->counts[i];
            }
    }
}

/* Counts the spans of a mask [rows, width]: splits and bounds [rows + 1] are the cumulated spans and tokens of the rows,
   `found` keeps RowScan for `maskpack_list_spans`. `alike` [2]: whether all valid words are equal and all other bits 0,
   and that word. Returns the number of spans. */
API i64 maskpack_count_spans(const u8 *mask, i64 size, i64 rows, i64 width, i64 row_stride, u64 significant, RowScan *found,
                             i64 *splits, i64 *bounds, i64 *alike, i64 threads) {
    Scan scan = {mask, size, rows, width, row_stride, significant, found, NULL, NULL, NULL, rows / (4 * threads) + 1};
    run_tasks(count_spans, &scan, (rows + scan.rows_a_task - 1) / scan.rows_a_task, threads);
    u64 value = 0;
    i64 seen = 0, equal = 1;
    splits[0] = bounds[0] = 0;
    for (i64 row = 0; row < rows; row++) {
        splits[row + 1] = splits[row] + found[row].spans;
        bounds[row + 1] = bounds[row] + found[row].tokens;
        equal &= found[row].alike && (!found[row].spans || !seen || found[row].value == value);
        if (found[row].spans) {
            value = found[row].value;
            seen = 1;
        }
    }
    alike[0] = equal && seen;
    alike[1] = (i64)value;
    return splits[rows];
}

/* Lists the spans that `maskpack_count_spans` counted: starts and counts [splits[rows]]. */
API void maskpack_list_spans(const u8 *mask, i64 size, i64 rows, i64 width, i64 row_stride, u64 significant, RowScan *found,
                             const i64 *splits, i64 *starts, i64 *counts, i64 threads) {
    Scan scan = {mask, size, rows, width, row_stride, significant, found, splits, starts, counts, rows / (4 * threads) + 1};
    run_tasks(list_spans, &scan, (rows + scan.rows_a_task - 1) / scan.rows_a_task, threads);
}

/* ------------------------------------------------------------------ padded fields */

enum { NO_PAD, CONSTANT, EDGE, PER_ROW, SIGNED_ZERO, ANY_ZERO }; /* NO_PAD: neither verified nor written */
enum { TRUSTED = 8 };                                            /* with one of them: the pads of rows are read, but not verified */

/* The spans of rows: starts and counts of each, splits [rows + 1] into them, bounds [rows + 1] into packed tokens. */
typedef struct {
    i64 rows, width;
    const i64 *starts, *counts, *splits, *bounds;
} Layout;

/* A padded field and its packed values. `pad` is the word of a constant pad; `row_pads` has a word for each row, which
   `read` writes and `write` reads; of ANY_ZERO, whose words lie together, a bit for each word of the row: whether it is
   a masked-out -0.0, the first in the highest bit. `read` sets `stray` to 1 + the first row with another value under the mask; a value
   stays 0 if all is well. */
typedef struct {
    u8 *padded, *packed;
    i64 row_stride, outer, outer_stride, size, items, layout, mode;
    u64 pad[2];
    u8 *row_pads;
    i64 stray;
} Field;

typedef struct {
    Field *fields;
    const Layout *layouts;
    i64 *tasks; /* field, first row, row behind the last */
    i64 stream;
} Pass;

/* Whether n elements at p are equal to one element. */
static int equal_elements(const u8 *p, i64 n, const u8 *element, i64 items, i64 size) {
    if (items == 1) return equal_bytes(p, n * size, repeated(element, size)) == n * size;
    i64 bytes = items * size;
    for (i64 i = 0; i < n; i++)
        if (memcmp(p + i * bytes, element, (size_t)bytes)) return 0;
    return 1;
}

static Pattern pad_of_row(Field *field, const Layout *layout, i64 row) {
    i64 size = field->size, first = layout->splits[row], last = layout->splits[row + 1];
    i64 place = first == last || layout->starts[first] > 0 ? 0 : layout->counts[first];
    u8 word[16] = {0};
    if (place < layout->width && field->items && field->outer) memcpy(word, field->padded + row * field->row_stride + place * field->items * size, (size_t)size);
    if ((field->mode & ~TRUSTED) == SIGNED_ZERO && (word_at(word, size) & ~(1ull << (8 * size - 1)))) memset(word, 0, 16);
    memcpy(field->row_pads + row * size, word, (size_t)size);
    return repeated(word, size);
}

/* Bytes of the pads of a row. */
static i64 row_pad_size(const Field *field, const Layout *layout) {
    return (field->mode & ~TRUSTED) == ANY_ZERO ? (layout->width + 7) / 8 : field->size;
}

/* Reads the signs of masked-out words; returns whether all of them are zeros. */
static int read_signs(const u8 *words, i64 from, i64 to, i64 size, u8 *bits) {
    u64 minus = 1ull << (8 * size - 1), others = 0;
    for (i64 at = from; at < to; at++) {
        u64 word = word_at(words + at * size, size);
        others |= word & ~minus;
        bits[at >> 3] |= (u8)((word >> (8 * size - 1)) << (7 - (at & 7)));
    }
    return !others;
}

static void write_signs(u8 *words, i64 from, i64 to, i64 size, const u8 *bits) {
    for (i64 at = from; at < to; at++) words[(at + 1) * size - 1] |= (u8)(bits[at >> 3] << (at & 7) & 0x80);
}

/* Verifies the pads of a row and gathers its values to `values`, unless that is NULL; returns whether every masked-out
   element is its pad. */
static int read_row(Field *field, const Layout *layout, i64 row, u8 *values) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    Pattern pad = repeated((const u8 *)field->pad, size);
    i64 mode = field->mode & TRUSTED ? NO_PAD : field->mode;
    u8 *signs = (field->mode & ~TRUSTED) == ANY_ZERO ? field->row_pads + row * row_pad_size(field, layout) : NULL;
    if (signs) memset(signs, 0, (size_t)row_pad_size(field, layout));
    else if ((field->mode & ~TRUSTED) >= PER_ROW) pad = pad_of_row(field, layout, row);
    if (!element) return 1; /* there may be no memory to point to */
    for (i64 slice = 0; slice < field->outer; slice++) {
        const u8 *from = field->padded + row * field->row_stride + slice * field->outer_stride;
        u8 *to = values ? values + slice * element : NULL;
        const u8 *edge = first < last ? from + layout->starts[first] * element : NULL;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width, masked = (stop - at) * element;
            if (signs) {
                if (!read_signs(from, at, stop, size, signs) && mode) return 0;
            } else if (mode == EDGE && edge) {
                if (!equal_elements(from + at * element, stop - at, edge, items, size)) return 0;
            } else if (mode == EDGE) {
                if (equal_bytes(from + at * element, masked, ZEROS) < masked) return 0;
            } else if (mode && equal_bytes(from + at * element, masked, pad) < masked) return 0;
            if (span == last) break;
            i64 n = layout->counts[span];
            if (to) {
                copy_apart(to, step, from + stop * element, element, n, element);
                to += n * step;
            }
            at = stop + n;
            edge = from + (at - 1) * element;
        }
    }
    return 1;
}

/* Writes the pads of a row, and its values unless they lie there already (NULL; `outer` is 1 then). */
static void write_row(const Field *field, const Layout *layout, i64 row, const u8 *values, i64 stream) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    if (!element) return; /* there may be no memory to point to */
    const u8 *signs = field->mode == ANY_ZERO ? field->row_pads + row * row_pad_size(field, layout) : NULL;
    Pattern pad = repeated(!signs && field->mode >= PER_ROW ? field->row_pads + row * size : (const u8 *)field->pad, size);
    for (i64 slice = 0; slice < field->outer; slice++) {
        u8 *to = field->padded + row * field->row_stride + slice * field->outer_stride;
        const u8 *from = values ? values + slice * element : NULL, *edge = from;
        if (first == last) edge = NULL;
        else if (!values) edge = to + layout->starts[first] * element;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width;
            if (field->mode == EDGE && edge && items > 1)
                for (; at < stop; at++) memcpy(to + at * element, edge, (size_t)element);
            else if (field->mode)
                fill(to + at * element, (stop - at) * element, field->mode != EDGE ? pad : edge ? repeated(edge, size) : ZEROS, stream);
            if (signs) write_signs(to, at, stop, size, signs);
            if (span == last) break;
            i64 n = layout->counts[span];
            if (values) {
                copy_apart(to + stop * element, element, from, step, n, element);
                from += n * step;
            }
            at = stop + n;
            edge = to + (at - 1) * element;
        }
    }
}

static void read_task(void *context, i64 task) {
    Pass *pass = context;
    const i64 *rows = pass->tasks + 3 * task;
    Field *field = pass->fields + rows[0];
    const Layout *layout = pass->layouts + field->layout;
    i64 step = field->outer * field->items * field->size;
    for (i64 row = rows[1]; row < rows[2]; row++)
        if (!read_row(field, layout, row, field->packed ? field->packed + layout->bounds[row] * step : NULL)) {
            __atomic_store_n(&field->stray, row + 1, __ATOMIC_RELAXED);
            return;
        }
}

static void write_task(void *context, i64 task) {
    Pass *pass = context;
    const i64 *rows = pass->tasks + 3 * task;
    const Field *field = pass->fields + rows[0];
    const Layout *layout = pass->layouts + field->layout;
    i64 step = field->outer * field->items * field->size;
    for (i64 row = rows[1]; row < rows[2]; row++)
        write_row(field, layout, row, field->packed + layout->bounds[row] * step, pass->stream);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Divides the rows of all fields into tasks: one a field for one thread, four a thread for several. */
static i64 *divided(const Field *fields, i64 num_fields, const Layout *layouts, i64 threads, i64 *count) {
    i64 *tasks = NULL;
    for (int fill_in = 0; fill_in < 2; fill_in++) {
        *count = 0;
        for (i64 field = 0; field < num_fields; field++) {
            const Layout *layout = layouts + fields[field].layout;
            i64 block = threads == 1 ? layout->rows : layout->rows / (4 * threads) + 1;
            for (i64 row = 0; row < layout->rows; row += block, ++*count)
                if (fill_in) {
                    i64 *task = tasks + 3 * *count, end = row + block;
                    task[0] = field;
                    task[1] = row;
                    task[2] = end < layout->rows ? end : layout->rows;
                }
        }
        if (!fill_in && !(tasks = malloc(sizeof(i64) * 3 * (size_t)(*count + 1)))) return NULL;
    }
    return tasks;
}

/* Gathers the packed values of padded fields and verifies their pads; returns 0, or -1 without memory for its tasks. */
API i64 maskpack_read(Field *fields, i64 num_fields, const Layout *layouts, i64 threads) {
    i64 count;
    Pass pass = {fields, layouts, divided(fields, num_fields, layouts, threads, &count), 0};
    if (!pass.tasks) return -1;
    run_tasks(read_task, &pass, count, threads);
    free(pass.tasks);
    return 0;
}

/* The inverse of `maskpack_read`. `stream`: whether pads are written past the cache. */
API i64 maskpack_write(Field *fields, i64 num_fields, const Layout *layouts, i64 stream, i64 threads) {
    i64 count;
    Pass pass = {fields, layouts, divided(fields, num_fields, layouts, threads, &count), stream};
    if (!pass.tasks) return -1;
    run_tasks(write_task, &pass, count, threads);
    free(pass.tasks);
    return 0;
}

/* ------------------------------------------------------------------ packed batches: a table and a body

   A field is stored as an entry: its encoding, and where the arrays of the encoding lie in the body. An array that
   needs several equal numbers may be stored as one. Entries refer to entries before them.

     PLAIN    a: the words
     NARROW   a: words less `number`, in 1, 2 or 4 bytes
     BLOCKS   up to 256 words of a row: a: bits of each block, with NEAR if its words are distances to another field's;
              b: its least word; c: the bits
     BITMAP     a: one of two words, a bit each, every row from a new byte on; b: the two words
     RLE      a: stretches of equal words of each row; b: lengths of all but the last of a row; c: their words
     ARANGE   a: the first word of each row; each word is `number` above the one before
     DELTA    as RLE, of the first word and the differences behind it
     SPARSE   a: words of each row that are not 0; b: their places in the row; c: the words
     DICTIONARY     a: the row of entry `first` that each row equals, plus `number`; b: the elements of each of those rows
     COLUMNS  the words of an element in `second` columns of equally many: entries from `first` on
     CONCAT   the rows of entry `first`, each followed by the row of entry `second`

   Rows of a layout have its tokens times `items` words; rows without a layout have `items` words. */

enum { PLAIN, NARROW, BLOCKS, BITMAP, RLE, ARANGE, DELTA, SPARSE, DICTIONARY, COLUMNS, CONCAT, KINDS };
enum { BLOCK = 256, NEAR = 128, LANES = 8, EIGHT = 8, FEW_WORDS = 64 };
enum { MARKED = 8 }; /* rows from one mark to the next */
enum { FITS, MISFIT, STRAY, FULL, NO_MEMORY, ODD }; /* FULL: the form fits, but takes too many bytes; ODD: bools */

typedef struct {
    i64 at, size, count; /* bytes from the begin of the body; bytes of a number; numbers */
} Array;

typedef struct {
    i64 kind, layout, items, size, number, first, second;
    Array a, b, c;
} Entry;

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

/* Which of the stored rows of a dictionary a row is; negative if it is none. */
static i64 stored_row(const u8 *body, const Entry *entry, i64 row) {
    return (i64)((u64)number_at(body, &entry->a, row) - (u64)entry->number);
}

/* A number of a body, 0 to `most`. Other processes may write to a file that is mapped, after it was checked: what a body
   says is cut to what there is, wherever it is used. */
static i64 cut_to(i64 number, i64 most) { return (u64)number > (u64)most ? most : number; }

static void put_word(u8 *to, i64 word, i64 size) { memcpy(to, &word, (size_t)size); }

/* ------------------------------------------------------------------ blocks of words of a few bits

   A block has n words of `bits` bits. From FEW_WORDS words on, word i is in lane i % 8, at place i / 8 of it; each lane is
   a stream of bits in u32, and the lanes take turns. Fewer words are one stream. */

static i64 block_numbers(i64 n, i64 bits) { /* u32 numbers of a block */
    if (n < FEW_WORDS) return (n * bits + 31) / 32;
    return (((n + LANES - 1) / LANES) * bits + 31) / 32 * LANES;
}

/* Tokens whose words, `items` of each, fill whole blocks. */
static i64 tile_tokens(i64 items) {
    i64 tokens = BLOCK;
    for (; tokens > 1 && tokens / 2 * items % BLOCK == 0;) tokens /= 2;
    return tokens;
}

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS void pack_lanes(const u32 *words, u32 *out, const int bits) {
    u32 line[LANES] = {0};
    int used = 0;
#pragma GCC unroll 32
    for (int place = 0; place < BLOCK / LANES; place++) {
        for (int lane = 0; lane < LANES; lane++) line[lane] |= words[place * LANES + lane] << used;
        used += bits;
        if (used >= 32) {
            memcpy(out, line, sizeof line);
            out += LANES;
            used -= 32;
            for (int lane = 0; lane < LANES; lane++) line[lane] = used ? words[place * LANES + lane] >> (bits - used) : 0;
        }
    }
}

ALWAYS void unpack_lanes(const u32 *from, u32 *words, const int bits) {
    const u32 mask = bits == 32 ? 0xffffffffu : (1u << bits) - 1;
    int used = 0;
#pragma GCC unroll 32
    for (int place = 0; place < BLOCK / LANES; place++) {
        for (int lane = 0; lane < LANES; lane++) {
            u32 word = from[lane] >> used;
            if (used + bits > 32) word |= from[LANES + lane] << (32 - used);
            words[place * LANES + lane] = word & mask;
        }
        used += bits;
        if (used >= 32) {
            used -= 32;
            from += LANES;
        }
    }
}

#define EACH_WIDTH(X) \
    X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) \
    X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31) X(32)
#define PACK_CASE(bits) case bits: pack_lanes(words, out, bits); break;
#define UNPACK_CASE(bits) case bits: unpack_lanes(from, words, bits); break;

/* The loops over words of one size (S signed, T unsigned): words less the least of them; zigzag distances to others,
   which are small on either side; and back. The first two return the largest number, or one with its highest bit. `ends`
   are the least and the largest of n words `items` apart, for each of these; `range` is that of some of them. `less` and `more`
   are the first and its inverse for n tokens of EIGHT words each, `step` bytes apart: loops of known length are faster. */
#define WORD_LOOPS(isa, target, size, S, T)                                                                     \
    target static u64 above_least_##size##_##isa(const u8 *from, i64 n, i64 *least, u32 *out) {                 \
        S words[BLOCK], low, high;                                                                              \
        memcpy(words, from, (size_t)n * size);                                                                  \
        for (i64 i = n; i < BLOCK; i++) words[i] = words[0]; /* loops of known length are much faster */        \
        low = high = words[0];                                                                                  \
        for (i64 i = 0; i < BLOCK; i++) {                                                                       \
            low = words[i] < low ? words[i] : low;                                                              \
            high = words[i] > high ? words[i] : high;                                                           \
        }                                                                                                       \
        for (i64 i = 0; i < BLOCK; i++) out[i] = (u32)(T)((T)words[i] - (T)low);                                \
        for (i64 i = n; i < BLOCK; i++) out[i] = 0;                                                             \
        *least = low;                                                                                           \
        return (T)((T)high - (T)low);                                                                           \
    }                                                                                                           \
    target static void ends_##size##_##isa(const u8 *from, i64 n, i64 items, u8 *low, u8 *high) {           \
        S *restrict least = (S *)low, *restrict most = (S *)high;                                           \
        memcpy(low, from, (size_t)items * size);                                                            \
        memcpy(high, from, (size_t)items * size);                                                           \
        for (i64 at = 1; at < n; at++)                                                                      \
            for (i64 i = 0; i < items; i++) {                                                               \
                S word;                                                                                     \
                memcpy(&word, from + (at * items + i) * size, size);                                        \
                least[i] = word < least[i] ? word : least[i];                                               \
                most[i] = word > most[i] ? word : most[i];                                                  \
            }                                                                                               \
    }                                                                                                       \
    static u64 range_##size##_##isa(const u8 *low, const u8 *high, i64 n, i64 *least) {                     \
        const S *lows = (const S *)low, *highs = (const S *)high;                                           \
        S first = *lows, last = *highs;                                                                     \
        for (i64 i = 1; i < n; i++) {                                                                       \
            first = lows[i] < first ? lows[i] : first;                                                      \
            last = highs[i] > last ? highs[i] : last;                                                       \
        }                                                                                                   \
        *least = first;                                                                                     \
        return (T)((T)last - (T)first);                                                                     \
    }                                                                                                       \
    target static void less_##size##_##isa(const u8 *from, i64 step, i64 n, i64 least, u32 *out) {          \
        for (i64 at = 0; at < n; at++) {                                                                    \
            T words[EIGHT];                                                                                 \
            memcpy(words, from + at * step, sizeof words);                                                  \
            for (i64 i = 0; i < EIGHT; i++) out[at * EIGHT + i] = (u32)(T)(words[i] - (T)least);            \
        }                                                                                                   \
        for (i64 i = n * EIGHT; i < BLOCK; i++) out[i] = 0;                                                 \
    }                                                                                                       \
    target static void more_##size##_##isa(const u32 *numbers, i64 least, i64 n, u8 *to, i64 step) {        \
        for (i64 at = 0; at < n; at++) {                                                                    \
            T words[EIGHT];                                                                                 \
            for (i64 i = 0; i < EIGHT; i++) words[i] = (T)((T)numbers[at * EIGHT + i] + (T)least);          \
            memcpy(to + at * step, words, sizeof words);                                                    \
        }                                                                                                   \
    }                                                                                                       \
    target static u64 distances_##size##_##isa(const u8 *from, const u8 *near, i64 n, u32 *out) {               \
        T words[BLOCK], others[BLOCK], any = 0;                                                                 \
        memcpy(words, from, (size_t)n * size);                                                                  \
        memcpy(others, near, (size_t)n * size);                                                                 \
        for (i64 i = n; i < BLOCK; i++) words[i] = others[i] = 0;                                               \
        for (i64 i = 0; i < BLOCK; i++) {                                                                       \
            T distance = (T)(words[i] - others[i]), sign = (T)((S)distance >> (8 * size - 1));                  \
            T number = (T)((T)(distance << 1) ^ sign);                                                          \
            any |= number;                                                                                      \
            out[i] = (u32)number;                                                                               \
        }                                                                                                       \
        return any;                                                                                             \
    }                                                                                                           \
    target static void add_least_##size##_##isa(const u32 *numbers, i64 least, i64 n, u8 *to) {                 \
        T words[BLOCK];                                                                                         \
        for (i64 i = 0; i < n; i++) words[i] = (T)((T)numbers[i] + (T)least);                                   \
        memcpy(to, words, (size_t)n * size);                                                                    \
    }                                                                                                           \
    target static void add_distances_##size##_##isa(const u32 *numbers, const u8 *near, i64 n, u8 *to) {        \
        T words[BLOCK];                                                                                         \
        memcpy(words, near, (size_t)n * size);                                                                  \
        for (i64 i = 0; i < n; i++) {                                                                           \
            T number = (T)numbers[i];                                                                           \
            words[i] = (T)(words[i] + (T)((T)(number >> 1) ^ (T)(0 - (T)(number & 1))));                        \
        }                                                                                                       \
        memcpy(to, words, (size_t)n * size);                                                                    \
    }

#define BY_SIZE(name, isa, size, ...)                                                                           \
    ((size) == 1   ? name##_1_##isa(__VA_ARGS__)                                                                \
     : (size) == 2 ? name##_2_##isa(__VA_ARGS__)                                                                \
     : (size) == 4 ? name##_4_##isa(__VA_ARGS__)                                                                \
                   : name##_8_##isa(__VA_ARGS__))

typedef struct {
    void (*pack)(const u32 *, u32 *, i64), (*unpack)(const u32 *, u32 *, i64);
    u64 (*above_least)(i64, const u8 *, i64, i64 *, u32 *), (*distances)(i64, const u8 *, const u8 *, i64, u32 *);
    void (*ends)(i64, const u8 *, i64, i64, u8 *, u8 *);
    u64 (*range)(i64, const u8 *, const u8 *, i64, i64 *);
    void (*less)(i64, const u8 *, i64, i64, i64, u32 *), (*more)(i64, const u32 *, i64, i64, u8 *, i64);
    void (*add_least)(i64, const u32 *, i64, i64, u8 *), (*add_distances)(i64, const u32 *, const u8 *, i64, u8 *);
} BlockLoops;

#define BLOCK_LOOPS(isa, target)                                                                                \
    WORD_LOOPS(isa, target, 1, int8_t, uint8_t)                                                                 \
    WORD_LOOPS(isa, target, 2, int16_t, uint16_t)                                                               \
    WORD_LOOPS(isa, target, 4, int32_t, uint32_t)                                                               \
    WORD_LOOPS(isa, target, 8, int64_t, uint64_t)                                                               \
    target static void pack_##isa(const u32 *words, u32 *out, i64 bits) {                                       \
        switch (bits) { EACH_WIDTH(PACK_CASE) default: break; }                                                 \
    }                                                                                                           \
    target static void unpack_##isa(const u32 *from, u32 *words, i64 bits) {                                    \
        switch (bits) { EACH_WIDTH(UNPACK_CASE) default: memset(words, 0, 4 * BLOCK); }                         \
    }                                                                                                           \
    static u64 above_least_##isa(i64 size, const u8 *from, i64 n, i64 *least, u32 *out) {                       \
        return BY_SIZE(above_least, isa, size, from, n, least, out);                                            \
    }                                                                                                           \
    static void ends_##isa(i64 size, const u8 *from, i64 n, i64 items, u8 *low, u8 *high) {                 \
        BY_SIZE(ends, isa, size, from, n, items, low, high);                                                \
    }                                                                                                       \
    static u64 range_##isa(i64 size, const u8 *low, const u8 *high, i64 n, i64 *least) {                    \
        return BY_SIZE(range, isa, size, low, high, n, least);                                              \
    }                                                                                                       \
    static void less_##isa(i64 size, const u8 *from, i64 step, i64 n, i64 least, u32 *out) {                \
        BY_SIZE(less, isa, size, from, step, n, least, out);                                                \
    }                                                                                                       \
    static void more_##isa(i64 size, const u32 *numbers, i64 least, i64 n, u8 *to, i64 step) {              \
        BY_SIZE(more, isa, size, numbers, least, n, to, step);                                              \
    }                                                                                                       \
    static u64 distances_##isa(i64 size, const u8 *from, const u8 *near, i64 n, u32 *out) {                     \
        return BY_SIZE(distances, isa, size, from, near, n, out);                                               \
    }                                                                                                           \
    static void add_least_##isa(i64 size, const u32 *numbers, i64 least, i64 n, u8 *to) {                       \
        BY_SIZE(add_least, isa, size, numbers, least, n, to);                                                   \
    }                                                                                                           \
    static void add_distances_##isa(i64 size, const u32 *numbers, const u8 *near, i64 n, u8 *to) {              \
        BY_SIZE(add_distances, isa, size, numbers, near, n, to);                                                \
    }                                                                                                           \
    static const BlockLoops loops_##isa = {pack_##isa,      unpack_##isa,    above_least_##isa,                 \
                                           distances_##isa, ends_##isa, range_##isa, less_##isa, more_##isa, add_least_##isa, add_distances_##isa};

BLOCK_LOOPS(plain, )
#if defined(__x86_64__)
BLOCK_LOOPS(avx2, __attribute__((target("avx2"))))
#endif

/* The loops for this processor: AVX2 packs three to four times as fast as SSE2. */
static const BlockLoops *block_loops(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &loops_avx2;
#endif
    return &loops_plain;
}

/* Writes a block to `out`, which has room for 4 * (BLOCK + LANES) bytes; `words` has BLOCK of them, 0 from n on. */
static void pack_block(const BlockLoops *loops, const u32 *words, i64 n, i64 bits, u8 *out) {
    u32 numbers[BLOCK + LANES];
    if (n == BLOCK && (uintptr_t)out % 4 == 0) {
        loops->pack(words, (u32 *)out, bits);
        return;
    }
    if (n >= FEW_WORDS) loops->pack(words, numbers, bits);
    else {
        memset(numbers, 0, sizeof numbers);
        for (i64 i = 0, at = 0; i < n; i++, at += bits) {
            u64 word = (u64)words[i] << (at & 31);
            numbers[at >> 5] |= (u32)word;
            numbers[(at >> 5) + 1] |= (u32)(word >> 32);
        }
    }
    memcpy(out, numbers, 4 * (size_t)block_numbers(n, bits));
}

static void unpack_block(const BlockLoops *loops, const u8 *from, i64 n, i64 bits, u32 *words) {
    u32 numbers[BLOCK + LANES];
    if (n == BLOCK && (uintptr_t)from % 4 == 0) {
        loops->unpack((const u32 *)from, words, bits);
        return;
    }
    i64 count = block_numbers(n, bits);
    memcpy(numbers, from, 4 * (size_t)count);
    memset(numbers + count, 0, sizeof numbers - 4 * (size_t)count);
    if (n >= FEW_WORDS) loops->unpack(numbers, words, bits);
    else
        for (i64 i = 0, at = 0; i < n; i++, at += bits) {
            u64 pair = numbers[at >> 5] | (u64)numbers[(at >> 5) + 1] << 32;
            words[i] = (u32)(pair >> (at & 31) & ((1ull << bits) - 1));
        }
}

static i64 bits_for(u64 most) { return most ? 64 - __builtin_clzll(most) : 0; }

/* ------------------------------------------------------------------ decoding: the rows of an entry, one after the other

   Layouts and tables are known to fit each other. Of the body only this is known: the arrays lie inside it. */

static const i64 MANY = (i64)1 << 58; /* more words than memory holds */

/* A field to be decoded from one part: padded, or `packed` alone, whose rows lie as those of `field.layout`, -1 for rows of
   one element. */
typedef struct {
    Field field;
    i64 padded, entry, part;
} Target;

/* The rows of one body. `marks` says where they begin (maskpack_mark); without it, they are read one after the other. */
typedef struct {
    const Entry *entries;
    const Layout *layouts;
    const u8 *body;
    i64 rows, dense_rows;
    const i64 *marks;
} Table;

/* The rows of a table that are decoded, and which rows of the result they are: `count` of each, NULL for all in order. */
typedef struct {
    Table table;
    const i64 *taken, *places;
    i64 count;
    const Target **done; /* for each entry, where it was decoded to before, or NULL; NULL where nobody asks */
    const Layout *out;   /* the layouts of the result */
    i64 now;             /* the row of the result that is decoded; known if `done` is */
} Part;

/* A place among the rows of an entry: how many numbers of its arrays belong to the rows before. */
typedef struct Cursor {
    const Table *table;
    const Part *part;
    const Entry *entry;
    const i64 *bounds; /* of the rows, in tokens; NULL for rows of `items` words */
    const i64 *marks;  /* a, b and c of each MARKED rows; NULL if they follow from the bounds, or are not known */
    i64 row, a, b, c;
    struct Cursor *parts; /* of CONCAT and COLUMNS, and of the field that is near */
    i64 num_parts;
    u8 *rows;     /* of DICTIONARY: its stored rows that are used, decoded, and the bounds of all, which are empty otherwise */
    i64 *own, stored;
    u8 *scratch; /* a row of a part */
    const BlockLoops *loops;
    const Target *done; /* where the rows were decoded to before, or NULL */
} Cursor;

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

static void close_cursor(Cursor *cursor) {
    for (i64 part = 0; part < cursor->num_parts; part++) close_cursor(cursor->parts + part);
    free(cursor->parts);
    free(cursor->rows);
    free(cursor->own);
    free(cursor->scratch);
}

static void next_row(Cursor *cursor, u8 *out);

static void skip_own_row(Cursor *cursor);

static void skip_row(Cursor *cursor);

static int decode_dictionary(Cursor *cursor);

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

/* Moves to a row, in a table that has marks. */
static void seek_row(Cursor *cursor, i64 row) {
    if (cursor->marks && cursor->entry->kind != DICTIONARY) {
        if (row < cursor->row || row - cursor->row > MARKED) {
            const i64 *mark = cursor->marks + 3 * (row / MARKED);
            cursor->row = row / MARKED * MARKED;
            cursor->a = mark[0];
            cursor->b = mark[1];
            cursor->c = mark[2];
        }
        while (cursor->row < row) skip_own_row(cursor);
    } else cursor->a = (cursor->bounds ? cursor->bounds[row] : row) * cursor->entry->items;
    cursor->row = row;
    for (i64 part = 0; part < cursor->num_parts; part++) seek_row(cursor->parts + part, row);
}

/* Opens a cursor that can decode the rows of a part, too. False without memory; close it either way. */
static int open_cursor(Cursor *cursor, const Part *rows, i64 index) {
    const Table *table = &rows->table;
    const Entry *entry = table->entries + index;
    *cursor = cursor_of(table, index, NULL);
    cursor->part = rows;
    if ((cursor->done = done_before(rows, index))) return 1;
    int near = entry->kind == BLOCKS && entry->second >= 0;
    i64 parts = entry->kind == COLUMNS ? entry->second : entry->kind == CONCAT ? 2 : near ? 1 : 0;
    if (parts) {
        if (!(cursor->parts = calloc((size_t)parts, sizeof(Cursor)))) return 0;
        for (; cursor->num_parts < parts; cursor->num_parts++) {
            i64 part = entry->first + cursor->num_parts;
            if (near || (entry->kind == CONCAT && cursor->num_parts)) part = entry->second;
            if (!open_cursor(cursor->parts + cursor->num_parts, rows, part)) {
                cursor->num_parts++;
                return 0;
            }
        }
    }
    if ((near || entry->kind == COLUMNS) && !(cursor->scratch = malloc((size_t)(longest_row(cursor) * entry->size + 8)))) return 0;
    return entry->kind != DICTIONARY || decode_dictionary(cursor);
}

/* The most rows that a dictionary of `rows` rows stores. They differ: those that no row uses have a number each, at least. */
static i64 most_stored(const Entry *entries, const Entry *entry, i64 rows) {
    const Entry *inner = entries + entry->first;
    return rows + entry->b.count + inner->a.count + inner->b.count + inner->c.count;
}

/* The bounds of the stored rows of a dictionary; how many there are, or -1 without memory. */
static i64 stored_rows(const Entry *entries, const Entry *entry, const u8 *body, i64 rows, i64 **bounds) {
    i64 stored = 0, most = most_stored(entries, entry, rows) - 1, words = MANY / (entry->items ? entry->items : 1);
    for (i64 row = 0; row < rows; row++) {
        i64 index = cut_to(stored_row(body, entry, row), most);
        stored = index + 1 > stored ? index + 1 : stored;
    }
    if (!(*bounds = calloc((size_t)stored + 1, sizeof(i64)))) return -1;
    for (i64 i = 0; i < stored; i++) (*bounds)[i + 1] = (*bounds)[i] + cut_to(number_at(body, &entry->b, i), words - (*bounds)[i]);
    return stored;
}

/* Decodes the stored rows of a dictionary that rows use; others take no memory. */
static int decode_dictionary(Cursor *cursor) {
    const Table *table = cursor->table;
    const Entry *entry = cursor->entry;
    i64 *counted = NULL, element = entry->items * entry->size;
    i64 stored = cursor->stored = cursor->marks ? *cursor->marks : stored_rows(table->entries, entry, table->body, table->rows, &counted);
    const i64 *bounds = cursor->marks ? cursor->marks + 1 : counted;
    i64 *own = cursor->own = stored < 0 ? NULL : calloc((size_t)stored + 1, sizeof(i64));
    int fine = own != NULL;
    for (i64 i = 0; i < cursor->part->count && fine; i++)
        own[1 + cut_to(stored_row(table->body, entry, taken_row(cursor->part, i)), stored - 1)] = 1;
    for (i64 i = 0; i < stored && fine; i++) own[i + 1] = own[i] + (own[i + 1] ? bounds[i + 1] - bounds[i] : 0);
    fine = fine && (cursor->rows = malloc((size_t)(own[stored] * element + 8)));
    Cursor inner = cursor_of(table, entry->first, bounds); /* its rows are in arrays of its own */
    for (i64 i = 0; i < stored && fine; i++) {
        if (own[i + 1] == own[i] && table->marks) continue;
        if (table->marks) seek_row(&inner, i);
        if (own[i + 1] > own[i]) next_row(&inner, cursor->rows + own[i] * element);
        else skip_row(&inner);
    }
    free(counted);
    return fine;
}

static void fill_words(u8 *out, i64 n, i64 word, i64 size) {
    fill(out, n * size, repeated((const u8 *)&word, size), 0);
}

static void decode_narrow(const Entry *entry, const u8 *from, i64 n, u8 *out) {
#define WIDEN(low, F, wide, T)                                                       \
    if (entry->a.size == low && entry->size == wide)                                 \
        for (i64 i = 0; i < n; i++) {                                                \
            F number;                                                                \
            memcpy(&number, from + low * i, low);                                    \
            T word = (T)((T)number + (T)entry->number);                              \
            memcpy(out + wide * i, &word, wide);                                     \
        }
    WIDEN(1, u8, 2, uint16_t)
    WIDEN(1, u8, 4, u32)
    WIDEN(1, u8, 8, u64)
    WIDEN(2, uint16_t, 4, u32)
    WIDEN(2, uint16_t, 8, u64)
    WIDEN(4, u32, 8, u64)
}

/* PLAIN and NARROW. */
static void decode_words(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *from = cursor->table->body + entry->a.at + cursor->a * entry->a.size;
    if (n > entry->a.count - cursor->a) memset(out, 0, (size_t)(n * entry->size));
    else if (entry->kind == NARROW) decode_narrow(entry, from, n, out);
    else memcpy(out, from, (size_t)(n * entry->size));
    cursor->a += n;
}

typedef struct {
    const u8 *from;
    i64 bits, base, near; /* near: whether its words are distances */
} Block;

/* The next block, of n words; the cursor moves over it. */
static Block next_block(Cursor *cursor, i64 n) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 said = number_at(body, &entry->a, cursor->a), bits = said & ~NEAR, numbers = block_numbers(n, bits);
    if (bits > 32 || numbers > entry->c.count - cursor->c) bits = numbers = 0;
    Block block = {body + entry->c.at + 4 * cursor->c, bits, number_at(body, &entry->b, cursor->a++), said & NEAR && entry->second >= 0};
    cursor->c += numbers;
    return block;
}

static void decode_blocks(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *near = NULL;
    i64 size = entry->size;
    if (entry->second >= 0) {
        near = cursor->scratch;
        if (cursor->parts->done) {
            near = row_before(cursor->parts);
            cursor->parts->row++;
        } else next_row(cursor->parts, cursor->scratch);
    }
    for (i64 at = 0; at < n; at += BLOCK) {
        u32 words[BLOCK];
        i64 count = n - at < BLOCK ? n - at : BLOCK;
        Block block = next_block(cursor, count);
        unpack_block(cursor->loops, block.from, count, block.bits, words);
        if (block.near) cursor->loops->add_distances(size, words, near + at * size, count, out + at * size);
        else cursor->loops->add_least(size, words, block.base, count, out + at * size);
    }
}

/* Whether the words of a row can be decoded piece by piece. */
static int has_pieces(const Cursor *cursor) {
    const Entry *entry = cursor->entry;
    return !cursor->done && (entry->kind == PLAIN || entry->kind == NARROW || (entry->kind == BLOCKS && entry->second < 0));
}

/* Decodes the next n words of a row, which end at a block or with the row. */
static void next_piece(Cursor *cursor, i64 n, u8 *out) {
    if (cursor->entry->kind == BLOCKS) decode_blocks(cursor, n, out);
    else decode_words(cursor, n, out);
}

/* Prefetches part `part` of `parts` of the tile behind the one at p, which has so many bytes. */
static void prefetch(const u8 *p, i64 nbytes, i64 part, i64 parts) {
    for (i64 at = nbytes * part / parts; at < nbytes * (part + 1) / parts; at += 64) __builtin_prefetch(p + nbytes + at);
}

/* The block of the next n tokens, of EIGHT words each, which go `step` bytes apart. */
static void next_eights(Cursor *cursor, i64 n, u8 *out, i64 step) {
    u32 words[BLOCK];
    Block block = next_block(cursor, n * EIGHT);
    if (n * EIGHT == BLOCK) prefetch(block.from, BLOCK / 8 * block.bits, 0, 1); /* as the next one is likely as long */
    unpack_block(cursor->loops, block.from, n * EIGHT, block.bits, words);
    cursor->loops->more(cursor->entry->size, words, block.base, n, out, step);
}

/* Columns of many words are decoded some tokens at a time, so that what is written stays in the first cache. */
static void decode_columns(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    i64 columns = entry->second, items = entry->items / columns, size = entry->size, element = entry->items * size;
    i64 tokens = n / entry->items, tile = tokens, pieces = 1;
    for (i64 column = 0; column < columns && pieces; column++) pieces = has_pieces(cursor->parts + column);
    if (pieces) tile = tile_tokens(items);
    for (i64 at = 0; at < tokens; at += tile) {
        i64 count = tokens - at < tile ? tokens - at : tile;
        for (i64 column = 0; column < columns; column++) {
            Cursor *part = cursor->parts + column;
            if (pieces && items == EIGHT && part->entry->kind == BLOCKS) {
                if (tokens - at >= 2 * tile) prefetch(out + at * element, tile * element, column, columns);
                next_eights(part, count, out + at * element + column * items * size, element);
                continue;
            }
            if (pieces) next_piece(part, count * items, cursor->scratch);
            else next_row(part, cursor->scratch);
            copy_apart(out + at * element + column * items * size, element, cursor->scratch, items * size, count, items * size);
        }
    }
    for (i64 column = 0; column < columns && (pieces || !tokens); column++) cursor->parts[column].row++;
}

/* Stretches of the row at the cursor, which has n words. */
static i64 stretches_of(const Cursor *cursor, i64 n) {
    return cut_to(number_at(cursor->table->body, &cursor->entry->a, cursor->row), n);
}

static void decode_stretches(Cursor *cursor, i64 n, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 stretches = stretches_of(cursor, n), word = 0, size = entry->size;
    if (!stretches) memset(out, 0, (size_t)(n * size));
    for (i64 left = stretches; left > 0; left--) {
        i64 count = left > 1 ? cut_to(number_at(body, &entry->b, cursor->b++), n) : n;
        i64 value = signed_at(body, &entry->c, cursor->c++);
        if (entry->kind == RLE) fill_words(out, count, value, size);
        else
            for (i64 i = 0; i < count; i++) put_word(out + i * size, word = (i64)((u64)word + (u64)value), size);
        out += count * size;
        n -= count;
    }
}

static void decode_range(u8 *out, i64 n, i64 first, i64 step, i64 size) {
#define RANGE(bytes)                                                                 \
    case bytes:                                                                      \
        for (i64 i = 0; i < n; i++) {                                                \
            u64 word = (u64)first + (u64)i * (u64)step;                              \
            memcpy(out + bytes * i, &word, bytes);                                   \
        }                                                                            \
        break;
    switch (size) { RANGE(1) RANGE(2) RANGE(4) RANGE(8) }
}

/* Words of the row at a cursor of SPARSE that are stored. */
static i64 words_stored(const Cursor *cursor) {
    const Entry *entry = cursor->entry;
    return cut_to(number_at(cursor->table->body, &entry->a, cursor->row), entry->c.count - cursor->b);
}

/* Decodes the row at the cursor to `out`, and moves on. */
static void next_row(Cursor *cursor, u8 *out) {
    const Entry *entry = cursor->entry;
    const u8 *body = cursor->table->body;
    i64 n = words_of(cursor, cursor->row), size = entry->size;
    if (cursor->done) {
        memcpy(out, row_before(cursor), (size_t)(n * size));
        cursor->row++;
        return;
    }
    switch (entry->kind) {
    case PLAIN:
    case NARROW: decode_words(cursor, n, out); break;
    case BLOCKS: decode_blocks(cursor, n, out); break;
    case BITMAP: {
        const u8 *bits = body + entry->a.at + cursor->a;
        if ((n + 7) / 8 > entry->a.count - cursor->a) memset(out, 0, (size_t)(n * size));
        else for (i64 i = 0; i < n; i++)
            memcpy(out + i * size, body + entry->b.at + (bits[i >> 3] >> (i & 7) & 1) * size, (size_t)size);
        cursor->a += (n + 7) / 8;
        break;
    }
    case RLE:
    case DELTA: decode_stretches(cursor, n, out); break;
    case ARANGE: decode_range(out, n, signed_at(body, &entry->a, cursor->row), entry->number, size); break;
    case SPARSE: {
        memset(out, 0, (size_t)(n * size));
        for (i64 count = words_stored(cursor); count > 0; count--, cursor->b++) {
            i64 place = number_at(body, &entry->b, cursor->b);
            if (place >= 0 && place < n) memcpy(out + place * size, body + entry->c.at + cursor->b * size, (size_t)size);
        }
        break;
    }
    case DICTIONARY: {
        const i64 *own = cursor->own + cut_to(stored_row(body, entry, cursor->row), cursor->stored - 1);
        i64 element = entry->items * size, nbytes = cut_to((own[1] - own[0]) * element, n * size);
        memcpy(out, cursor->rows + own[0] * element, (size_t)nbytes);
        memset(out + nbytes, 0, (size_t)(n * size - nbytes));
        break;
    }
    case COLUMNS: decode_columns(cursor, n, out); break;
    case CONCAT: {
        i64 head = words_of(cursor->parts, cursor->row);
        if (head + words_of(cursor->parts + 1, cursor->row) > n) memset(out, 0, (size_t)(n * size));
        else {
            next_row(cursor->parts, out);
            next_row(cursor->parts + 1, out + head * size);
        }
        break;
    }
    default: break;
    }
    cursor->row++;
}

/* Moves over a row without decoding it, but not in the parts. */
static void skip_own_row(Cursor *cursor) {
    i64 n = words_of(cursor, cursor->row);
    switch (cursor->done ? KINDS : cursor->entry->kind) {
    case PLAIN:
    case NARROW: cursor->a += n; break;
    case BITMAP: cursor->a += (n + 7) / 8; break;
    case BLOCKS:
        for (i64 at = 0; at < n; at += BLOCK) next_block(cursor, n - at < BLOCK ? n - at : BLOCK);
        break;
    case RLE:
    case DELTA: {
        i64 stretches = stretches_of(cursor, n);
        cursor->b += stretches > 1 ? stretches - 1 : 0;
        cursor->c += stretches;
        break;
    }
    case SPARSE: cursor->b += words_stored(cursor); break;
    default: break;
    }
    cursor->row++;
}

static void skip_row(Cursor *cursor) {
    for (i64 part = 0; part < cursor->num_parts; part++) skip_row(cursor->parts + part);
    skip_own_row(cursor);
}

/* ------------------------------------------------------------------ encoding: rows of words to an entry */

/* Rows of words: of a padded field, whose pads are verified on the way; else of packed values. */
typedef struct {
    i64 rows, size, items;
    const i64 *bounds; /* of the rows of `values`, in elements; NULL for one element a row */
    const i64 *index;  /* which rows of `values`; NULL for all */
    const u8 *values;
    Field *field;
    const Layout *layout;
    u8 *scratch; /* room for the longest row */
    u64 *ends;   /* what `row_words` writes `ends_of` each row to; NULL if nobody asks */
} Rows;

static i64 row_length(const Rows *rows, i64 row) { /* words */
    i64 at = rows->index ? rows->index[row] : row;
    i64 elements = rows->bounds ? rows->bounds[at + 1] - rows->bounds[at] : 1;
    return elements * rows->items;
}

static i64 total_words(const Rows *rows) {
    i64 total = 0;
    for (i64 row = 0; row < rows->rows; row++) total += row_length(rows, row);
    return total;
}

static u64 hash_words(const u8 *p, i64 nbytes) {
    u64 hash = (u64)nbytes * 0x9E3779B97F4A7C15ull;
    for (; nbytes >= 8; p += 8, nbytes -= 8) hash = (hash ^ load(p)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    for (; nbytes > 0; p++, nbytes--) hash = (hash ^ *p) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
}

/* The length, the first and the last word of a row in one number that is not 0; 0 for no words. */
static u64 ends_of(const u8 *words, i64 n, i64 size) {
    if (!words || !n) return 0;
    u64 ends[3] = {(u64)n, word_at(words, size), word_at(words + (n - 1) * size, size)};
    return hash_words((const u8 *)ends, sizeof ends) | 1;
}

/* The words of a row; NULL if a pad of a padded field is not what it should be. */
static const u8 *row_words(const Rows *rows, i64 row) {
    i64 at = rows->index ? rows->index[row] : row, element = rows->items * rows->size;
    const u8 *words;
    if (rows->field) {
        const Layout *layout = rows->layout;
        i64 first = layout->splits[row];
        int lies = element && layout->splits[row + 1] - first == 1 && rows->field->outer == 1;
        if (!read_row(rows->field, layout, row, lies ? NULL : rows->scratch)) return NULL;
        words = lies ? rows->field->padded + row * rows->field->row_stride + layout->starts[first] * element : rows->scratch;
    } else words = rows->values + (rows->bounds ? rows->bounds[at] : at) * element;
    if (rows->ends) rows->ends[row] = ends_of(words, row_length(rows, row), rows->size);
    return words;
}

/* A part of the body that begins at its byte `base`. What is between arrays is 0, so that equal batches have equal
   bytes. */
typedef struct {
    u8 *memory;
    i64 base, used, room;
} Out;

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

/* Writes numbers in as few bytes as they need; equal ones once. Words are signed, and at most `size` bytes. */
static int put_numbers(Out *out, Array *array, const List *list, int is_signed) {
    i64 low = 0, high = 0, size = 1, count = list->count;
    for (i64 i = 0; i < count; i++) {
        low = list->numbers[i] < low ? list->numbers[i] : low;
        high = list->numbers[i] > high ? list->numbers[i] : high;
    }
    int equal = count > 1;
    for (i64 i = 1; i < count && equal; i++) equal = list->numbers[i] == list->numbers[0];
    if (equal) count = 1;
    for (; size < 8; size *= 2) {
        i64 bits = 8 * size - is_signed;
        if (high < (i64)1 << bits && low >= (is_signed ? -((i64)1 << bits) : 0)) break;
    }
    u8 *to = reserve(out, array, size, count);
    if (!to) return 0;
    for (i64 i = 0; i < count; i++) put_word(to + i * size, list->numbers[i], size);
    return 1;
}

static int encode_plain(const Rows *rows, Out *out, Entry *entry) {
    u8 *to = reserve(out, &entry->a, rows->size, total_words(rows));
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 nbytes = row_length(rows, row) * rows->size;
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        memcpy(to, words, (size_t)nbytes);
        to += nbytes;
    }
    return FITS;
}

/* Words less entry->number, in entry->a.size bytes. */
static int encode_narrow(const Rows *rows, Out *out, Entry *entry) {
    i64 narrow = entry->a.size, size = rows->size;
    u8 *to = reserve(out, &entry->a, narrow, total_words(rows));
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        u64 any = 0;
#define NARROWED(low, F, wide, T)                                                    \
    if (narrow == low && size == wide)                                               \
        for (i64 i = 0; i < n; i++) {                                                \
            T word;                                                                  \
            memcpy(&word, words + wide * i, wide);                                   \
            word = (T)(word - (T)entry->number);                                     \
            any |= word;                                                             \
            F number = (F)word;                                                      \
            memcpy(to + low * i, &number, low);                                      \
        }
        NARROWED(1, u8, 2, uint16_t)
        NARROWED(1, u8, 4, u32)
        NARROWED(1, u8, 8, u64)
        NARROWED(2, uint16_t, 4, u32)
        NARROWED(2, uint16_t, 8, u64)
        NARROWED(4, u32, 8, u64)
        if (any >> 8 * narrow) return MISFIT;
        to += n * narrow;
    }
    return FITS;
}

/* In blocks; `near` are the rows of another field with as many words, or NULL. */
static int encode_blocks(const Rows *rows, Out *out, Entry *entry, const Rows *near) {
    const BlockLoops *loops = block_loops();
    i64 size = rows->size, blocks = 0;
    for (i64 row = 0; row < rows->rows; row++) blocks += (row_length(rows, row) + BLOCK - 1) / BLOCK;
    u8 *widths = reserve(out, &entry->a, 1, blocks), *bases = widths ? reserve(out, &entry->b, size, blocks) : NULL;
    u8 *to = bases ? reserve(out, &entry->c, 4, 0) : NULL;
    if (!to) return FULL;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row), *others = near && words ? row_words(near, row) : NULL;
        if (!words) return STRAY;
        for (i64 at = 0; at < n; at += BLOCK, bases += size) {
            u32 numbers[BLOCK], apart[BLOCK];
            i64 count = n - at < BLOCK ? n - at : BLOCK, least;
            i64 bits = bits_for(loops->above_least(size, words + at * size, count, &least, numbers)), apart_bits = 65;
            if (others) apart_bits = bits_for(loops->distances(size, words + at * size, others + at * size, count, apart));
            int by_distance = apart_bits < bits;
            if (by_distance) {
                bits = apart_bits;
                least = 0;
                entry->second = 1; /* until the entry of the other field is known */
            }
            if (bits > 32) return MISFIT;
            i64 nbytes = 4 * block_numbers(count, bits);
            if (out->used + nbytes > out->room) return FULL;
            pack_block(loops, by_distance ? apart : numbers, count, bits, to);
            *widths++ = (u8)(bits | (by_distance ? NEAR : 0));
            put_word(bases, least, size);
            to += nbytes;
            out->used += nbytes;
            entry->c.count += nbytes / 4;
        }
    }
    return FITS;
}

/* The same rows, whose pads were verified before. `field` is memory for a copy. */
static Rows verified(const Rows *rows, Field *field) {
    Rows out = *rows;
    out.ends = NULL;
    if (!rows->field) return out;
    *field = *rows->field;
    field->mode = NO_PAD;
    out.field = field;
    return out;
}

/* The words of the blocks of one column in some tokens of a row: to `line`, one behind the other. */
static void column_words(u8 *line, const u8 *words, const Rows *rows, i64 columns, i64 column, i64 tokens) {
    i64 element = rows->items * rows->size, own = element / columns;
    copy_apart(line, own, words + column * own, element, tokens, own);
}

/* In `columns` columns of blocks each: columns + 1 entries. Rows are read twice, some tokens at a time, for the bits of all
   blocks and then for their words: what is packed goes to its place at once. */
static int encode_columns(const Rows *rows, i64 columns, Out *out, Entry *slots) {
    const BlockLoops *loops = block_loops();
    i64 size = rows->size, items = rows->items / columns, element = rows->items * size, tile = tile_tokens(items), blocks = 0;
    i64 layout = slots->layout, whole = BLOCK % items == 0; /* a tile is one block of each column */
    int done = FITS;
    for (i64 row = 0; row < rows->rows; row++) blocks += (row_length(rows, row) / columns + BLOCK - 1) / BLOCK;
    for (i64 column = 0; column <= columns; column++) {
        Entry *own = slots + column;
        *own = (Entry){BLOCKS, layout, items, size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 4, 0}};
        if (column == columns) *own = (Entry){COLUMNS, layout, rows->items, size, 0, 0, columns, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
        else if (!reserve(out, &own->a, 1, blocks) || !reserve(out, &own->b, size, blocks)) return FULL;
    }
    u8 *line = malloc((size_t)(tile * items * size + 2 * element)), *low = line + tile * items * size, *high = low + element;
    if (!line) return NO_MEMORY;
    Field field;
    Rows again = verified(rows, &field);
    for (int way = 0; way < 2 && done == FITS; way++) {
        for (i64 column = 0; column < columns && way && done == FITS; column++) {
            if (!reserve(out, &slots[column].c, 4, slots[column].c.count)) done = FULL;
            slots[column].c.count = 0; /* counted again, as it is written */
        }
        for (i64 row = 0, block = 0; row < rows->rows && done == FITS; row++) {
            i64 tokens = row_length(rows, row) / rows->items;
            const u8 *words = row_words(way ? &again : rows, row);
            if (!words) done = STRAY;
            for (i64 at = 0; at < tokens && done == FITS; at += tile) {
                i64 n = tokens - at < tile ? tokens - at : tile;
                const u8 *from = words + at * element;
                if (whole && !way) loops->ends(size, from, n, rows->items, low, high);
                for (i64 column = 0; column < columns; column++) {
                    Entry *own = slots + column;
                    i64 direct = whole && (!way || items == EIGHT), index = block + at * items / BLOCK;
                    if (way && tokens - at >= 2 * tile) prefetch(from, tile * element, column, columns);
                    if (!direct) column_words(line, from, rows, columns, column, n);
                    for (i64 word = 0; word < n * items; word += BLOCK, index++) {
                        i64 count = n * items - word < BLOCK ? n * items - word : BLOCK, least;
                        u8 *width = out->memory + (own->a.at - out->base) + index;
                        u8 *base = out->memory + (own->b.at - out->base) + index * size;
                        u32 numbers[BLOCK];
                        u64 most = 0;
                        if (!direct) most = loops->above_least(size, line + word * size, count, &least, numbers);
                        else if (way) loops->less(size, from + column * items * size, element, n, signed_word(base, size), numbers);
                        else most = loops->range(size, low + column * items * size, high + column * items * size, items, &least);
                        if (way) pack_block(loops, numbers, count, *width, out->memory + (own->c.at - out->base) + 4 * own->c.count);
                        else {
                            if (bits_for(most) > 32) done = MISFIT;
                            *width = (u8)bits_for(most);
                            put_word(base, least, size);
                        }
                        own->c.count += block_numbers(count, *width);
                    }
                }
            }
            block += (tokens * items + BLOCK - 1) / BLOCK;
        }
    }
    free(line);
    return done;
}

static int encode_bits(const Rows *rows, Out *out, Entry *entry) {
    i64 size = rows->size, nbytes = 0, known = 0;
    u64 pair[2] = {0, 0};
    for (i64 row = 0; row < rows->rows; row++) nbytes += (row_length(rows, row) + 7) / 8;
    u8 *bits = reserve(out, &entry->a, 1, nbytes), *words_to = bits ? reserve(out, &entry->b, size, 2) : NULL;
    if (!words_to) return FULL;
    memset(bits, 0, (size_t)nbytes);
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        for (i64 i = 0; i < n; i++) {
            u64 word = word_at(words + i * size, size);
            if (!known) pair[0] = pair[1] = word, known = 1;
            if (word != pair[0] && known == 1) pair[1] = word, known = 2;
            if (word != pair[0] && word != pair[1]) return MISFIT;
            bits[i >> 3] |= (u8)((word != pair[0]) << (i & 7));
        }
        bits += (n + 7) / 8;
    }
    put_word(words_to, (i64)pair[0], size);
    put_word(words_to + size, (i64)pair[1], size);
    return FITS;
}

/* RLE, and DELTA: the same of the first word of each row and of the differences behind it. */
static int encode_stretches(const Rows *rows, Out *out, Entry *entry) {
    i64 size = rows->size;
    List stretches = {0}, counts = {0}, values = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row), pieces = 0, before = 0;
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        for (i64 at = 0; at < n && done == FITS; pieces++) {
            i64 word = signed_word(words + at * size, size), end = at + 1, value = word;
            if (entry->kind == RLE) end = at + equal_bytes(words + at * size, (n - at) * size, repeated(words + at * size, size)) / size;
            else {
                value = as_signed((u64)word - (u64)before, size);
                for (i64 next; end < n; end++, word = next) {
                    next = signed_word(words + end * size, size);
                    if (as_signed((u64)next - (u64)word, size) != value) break;
                }
                before = word;
            }
            int kept = push(&values, value) && (end == n || push(&counts, end - at));
            done = !kept ? NO_MEMORY : out->used + values.count + counts.count > out->room ? FULL : FITS;
            at = end;
        }
        if (done == FITS && !push(&stretches, pieces)) done = NO_MEMORY;
    }
    if (done == FITS)
        done = put_numbers(out, &entry->a, &stretches, 0) && put_numbers(out, &entry->b, &counts, 0) &&
                       put_numbers(out, &entry->c, &values, 1) ? FITS : FULL;
    free(stretches.numbers);
    free(counts.numbers);
    free(values.numbers);
    return done;
}

static int rises(const u8 *words, i64 n, i64 first, i64 step, i64 size) {
    u64 any = 0;
#define RISES(wide, T)                                                               \
    case wide:                                                                       \
        for (i64 i = 0; i < n; i++) {                                                \
            T word;                                                                  \
            memcpy(&word, words + wide * i, wide);                                   \
            any |= (T)(word ^ (T)((T)first + (T)i * (T)step));                       \
        }                                                                            \
        break;
    switch (size) { RISES(1, u8) RISES(2, uint16_t) RISES(4, u32) RISES(8, u64) }
    return !any;
}

static int encode_range(const Rows *rows, Out *out, Entry *entry) {
    i64 size = rows->size, known = 0, real = -1;
    List firsts = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        else if (n) {
            i64 first = signed_word(words, size);
            if (n > 1 && !known) {
                known = 1;
                entry->number = as_signed((u64)signed_word(words + size, size) - (u64)first, size);
            }
            if (n > 1 && !rises(words, n, first, entry->number, size)) done = MISFIT;
            else if (!push(&firsts, first)) done = NO_MEMORY;
            if (real < 0) real = row;
        } else if (!push(&firsts, firsts.count ? firsts.numbers[firsts.count - 1] : 0)) done = NO_MEMORY;
    }
    if (done == FITS) {
        for (i64 row = 0; row < real; row++) firsts.numbers[row] = firsts.numbers[real]; /* of empty rows, any will do */
        done = !known ? MISFIT : put_numbers(out, &entry->a, &firsts, 1) ? FITS : FULL;
    }
    free(firsts.numbers);
    return done;
}

static int encode_sparse(const Rows *rows, Out *out, Entry *entry) {
    i64 size = rows->size;
    List each = {0}, places = {0}, values = {0};
    int done = FITS;
    for (i64 row = 0; row < rows->rows && done == FITS; row++) {
        i64 n = row_length(rows, row), before = places.count;
        const u8 *words = row_words(rows, row);
        if (!words) done = STRAY;
        for (i64 at = 0; at < n && done == FITS; at++) {
            at += equal_bytes(words + at * size, (n - at) * size, ZEROS) / size;
            if (at == n) break;
            if (!push(&places, at) || !push(&values, (i64)word_at(words + at * size, size))) done = NO_MEMORY;
            else if (out->used + places.count * (1 + size) > out->room) done = FULL;
        }
        if (done == FITS && !push(&each, places.count - before)) done = NO_MEMORY;
    }
    if (done == FITS) {
        int fits = put_numbers(out, &entry->a, &each, 0);
        if (fits && places.count) { /* a place for each word: equal ones are not stored once */
            i64 most = 0;
            for (i64 i = 0; i < places.count; i++) most = places.numbers[i] > most ? places.numbers[i] : most;
            i64 wide = most < 1 << 8 ? 1 : most < 1 << 16 ? 2 : most < (i64)1 << 32 ? 4 : 8;
            u8 *to = reserve(out, &entry->b, wide, places.count);
            for (i64 i = 0; to && i < places.count; i++) put_word(to + i * wide, places.numbers[i], wide);
            fits = to != NULL;
        }
        u8 *to = fits ? reserve(out, &entry->c, size, values.count) : NULL;
        for (i64 i = 0; to && i < values.count; i++) put_word(to + i * size, values.numbers[i], size);
        done = to ? FITS : FULL;
    }
    free(each.numbers);
    free(places.numbers);
    free(values.numbers);
    return done;
}

/* ------------------------------------------------------------------ the choice of an encoding */

enum { SAMPLE_ROWS = 64, SAMPLE_WORDS = 2048, GLANCE_WORDS = 512 }; /* a glance has less of more rows */

enum { NO_GAIN = -2 }; /* as `inner_kind`: rows look alike, but a dictionary takes no fewer bytes */

enum { FEW_COLUMNS = 16 }; /* more of them are stored in blocks, and looked at together */

enum { FEW_BYTES = 4096, SOME_BATCHES = 8 }; /* with fewer bytes, another form is looked for in one of some batches */

/* How a field was encoded: what to try first the next time. `cost` is bytes for COST_WORDS words, `age` how often it was used. */
typedef struct {
    i64 kind, number, bytes, inner_kind, inner_number, inner_bytes, cost, age;
} Form;

enum { COST_WORDS = 1 << 20 };

/* Whether so many bytes for so many words are 2 % more than when a form was chosen. */
static int is_larger(i64 bytes, const Form *form, i64 words) {
    return (bytes - 64) * COST_WORDS > form->cost * words + form->cost * words / 50;
}

/* The least number of bytes, of 1, 2, 4 or 8, for the words less a base; 0 words need one. */
static void find_narrow(const Rows *rows, i64 *base, i64 *bytes) {
    i64 size = rows->size, low = 0, high = 0, known = 0;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *words = row_words(rows, row);
        for (i64 i = 0; words && i < n; i++) {
            i64 word = signed_word(words + i * size, size);
            low = !known || word < low ? word : low;
            high = !known || word > high ? word : high;
            known = 1;
        }
    }
    u64 range = (u64)high - (u64)low;
    *bytes = range < 1 << 8 ? 1 : range < 1 << 16 ? 2 : range < (u64)1 << 32 ? 4 : 8;
    *base = low >= 0 && (u64)high < (*bytes == 8 ? ~0ull : 1ull << 8 * *bytes) ? 0 : low;
}

static int encode_as(i64 kind, i64 number, i64 bytes, const Rows *rows, const Rows *near, Out *out, Entry *entry) {
    *entry = (Entry){kind, entry->layout, entry->items, rows->size, number, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
    entry->a.size = bytes;
    switch (kind) {
    case PLAIN: return encode_plain(rows, out, entry);
    case NARROW: return bytes < rows->size && bytes != 8 ? encode_narrow(rows, out, entry) : MISFIT;
    case BLOCKS: return encode_blocks(rows, out, entry, near);
    case BITMAP: return encode_bits(rows, out, entry);
    case RLE:
    case DELTA: return encode_stretches(rows, out, entry);
    case ARANGE: return encode_range(rows, out, entry);
    case SPARSE: return encode_sparse(rows, out, entry);
    default: return MISFIT;
    }
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
        if (from) memcpy(words + bounds[i] * rows->size, from, (size_t)(n * rows->size));
        bounds[i + 1] = bounds[i] + (from ? n : 0);
    }
    return (Rows){count, rows->size, 1, bounds, NULL, words, NULL, NULL, NULL, NULL};
}

/* Bytes of a sample in each encoding; `most` if it does not fit. */
static void try_sample(const Rows *sample, const Rows *near, int integers, i64 *sizes, i64 most) {
    u8 memory[10 * SAMPLE_WORDS + 1024];
    for (i64 kind = PLAIN; kind < DICTIONARY; kind++) {
        Out out = {memory, 0, 0, sizeof memory};
        Entry entry = {0};
        i64 base = 0, bytes = 8;
        sizes[kind] = most;
        if (!integers && (kind == NARROW || kind == ARANGE || kind == DELTA)) continue;
        if (kind == NARROW) find_narrow(sample, &base, &bytes);
        if (encode_as(kind, base, bytes, sample, near, &out, &entry) == FITS) sizes[kind] = bytes_of(&entry);
    }
}

/* Encodes rows of packed values in the form that takes fewest bytes, as far as a sample can tell. */
static int choose(const Rows *rows, const Rows *near, i64 hints, int integers, Out *out, Entry *entry, Form *form) {
    u8 words[8 * SAMPLE_WORDS], others[8 * SAMPLE_WORDS];
    i64 bounds[SAMPLE_ROWS + 1], other_bounds[SAMPLE_ROWS + 1], sizes[KINDS], total = total_words(rows);
    i64 start = out->used, plain = total * rows->size, best = plain, most = (i64)1 << 62;
    Rows sample = sample_of(rows, SAMPLE_WORDS, BLOCK, words, bounds), beside;
    if (near) beside = sample_of(near, SAMPLE_WORDS, BLOCK, others, other_bounds);
    try_sample(&sample, near ? &beside : NULL, integers, sizes, most);
    i64 least = most, kept = PLAIN, number = 0, bytes = 0, room = plain + 8 * rows->rows + 4096;
    for (i64 kind = PLAIN; kind < DICTIONARY; kind++) least = sizes[kind] < least ? sizes[kind] : least;
    u8 *memory = NULL;
    Entry header = *entry;
    for (i64 kind = NARROW; kind < DICTIONARY && plain; kind++) {
        int likely = sizes[kind] < most && 2 * sizes[kind] <= 3 * least + 64;
        if (!likely && !(hints >> kind & 1)) continue;
        if (!memory && !(memory = malloc((size_t)room))) return NO_MEMORY;
        Out spare = {memory, out->base + ((start + 7) & ~(i64)7), 0, best < room ? best : room};
        Entry tried = header;
        i64 base = 0, wide = 8;
        if (kind == NARROW) find_narrow(rows, &base, &wide);
        int done = encode_as(kind, base, wide, rows, near, &spare, &tried);
        if (done == NO_MEMORY) {
            free(memory);
            return NO_MEMORY;
        }
        if (done != FITS || bytes_of(&tried) >= best || spare.base - out->base + spare.used > out->room) continue;
        memset(out->memory + start, 0, (size_t)(spare.base - out->base - start));
        memcpy(out->memory + (spare.base - out->base), memory, (size_t)spare.used);
        out->used = spare.base - out->base + spare.used;
        best = bytes_of(&tried);
        *entry = tried;
        kept = kind;
        number = tried.number;
        bytes = tried.a.size;
    }
    free(memory);
    *form = (Form){kept, number, bytes, -1, 0, 0, total ? best * COST_WORDS / total : 0, 0};
    if (kept != PLAIN) return FITS;
    out->used = start;
    return encode_as(PLAIN, 0, 0, rows, NULL, out, entry);
}

/* Whether another form of a sample is clearly smaller than the one in use; false if the sample does not fit that one. */
static int is_better(const Rows *rows, const Rows *near, int integers, i64 kind) {
    u8 words[8 * SAMPLE_WORDS], others[8 * SAMPLE_WORDS];
    i64 bounds[SAMPLE_ROWS + 1], other_bounds[SAMPLE_ROWS + 1], sizes[KINDS], most = (i64)1 << 62, least = most;
    Rows sample = sample_of(rows, GLANCE_WORDS, FEW_WORDS, words, bounds), beside;
    if (near) beside = sample_of(near, GLANCE_WORDS, FEW_WORDS, others, other_bounds);
    try_sample(&sample, near ? &beside : NULL, integers, sizes, most);
    for (i64 other = PLAIN; other < DICTIONARY; other++) least = sizes[other] < least ? sizes[other] : least;
    return sizes[kind] < most && 100 * least + 1600 < 97 * sizes[kind];
}

/* ------------------------------------------------------------------ rows that repeat */

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

/* Rows of packed values as a dictionary: two entries. MISFIT if every row differs. */
static int encode_dictionary(const Rows *rows, i64 hints, int integers, Out *out, Entry *entries, Form *form, int again) {
    List index = {0};
    i64 *firsts = malloc(sizeof(i64) * (size_t)(rows->rows + 1)), start = out->used;
    i64 found = firsts ? find_repeated(rows, &index, firsts) : -1;
    int done = found < 0 ? NO_MEMORY : found == rows->rows ? MISFIT : FITS;
    Rows stored = *rows;
    stored.index = firsts;
    stored.rows = found;
    Form inner = {form->inner_kind, form->inner_number, form->inner_bytes, -1, 0, 0, 0, 0};
    if (done == FITS) {
        done = again ? encode_as(inner.kind, inner.number, inner.bytes, &stored, NULL, out, entries) : MISFIT;
        if (done == MISFIT || done == FULL) {
            out->used = start;
            done = choose(&stored, NULL, hints, integers, out, entries, &inner);
        }
    }
    if (done == FITS) {
        entries[1] = (Entry){DICTIONARY, entries->layout, entries->items, rows->size, 0, 0, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
        done = put_numbers(out, &entries[1].a, &index, 0) ? FITS : FULL;
        index.count = 0;
        for (i64 i = 0; i < found; i++) push(&index, row_length(rows, firsts[i]) / rows->items); /* there is room */
        if (done == FITS && !put_numbers(out, &entries[1].b, &index, 0)) done = FULL;
        *form = (Form){DICTIONARY, 0, 0, inner.kind, inner.number, inner.bytes, 0, 0};
    }
    free(index.numbers);
    free(firsts);
    return done;
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

/* ------------------------------------------------------------------ jobs: the fields of a batch */

enum { MOST_PADS = 4 };
enum { FLOATS, INTEGERS, BOOLS };

/* A field to be encoded. Its result is FITS, STRAY if none of its pads is under its mask, ODD for bools of other bytes than
   0 and 1, or an error; `pad` is the pad that is, `count` entries from `first` on are its own, and the last of them is the
   field. `integers` is FLOATS, INTEGERS or BOOLS. */
typedef struct {
    Field field; /* a padded field; of packed values, `packed` alone */
    i64 padded, layout, items, size, rows;
    const i64 *bounds, *index; /* of packed values: the bounds of their rows, and which rows to encode */
    i64 integers, hints, near, head, tail, columns, num_pads;
    struct {
        i64 mode;
        u64 pad[2];
    } pads[MOST_PADS];
    Form form;
    i64 result, pad, first, count;
    Array row_pads;
} Job;

typedef struct {
    Job *jobs;
    const Layout *layouts;
    Entry *slots;
    Out *outs;
} Work;

/* Opens the rows of a job; `field` is a copy with the pad to verify. False without memory. */
static int open_rows(Rows *rows, const Job *job, const Layout *layouts, Field *field) {
    const Layout *layout = job->layout < 0 ? NULL : layouts + job->layout;
    const u8 *values = job->field.packed ? job->field.packed : (const u8 *)&ZEROS; /* no words are no NULL, which says STRAY */
    *rows = (Rows){job->rows, job->size, job->items, job->bounds, job->index, values, NULL, NULL, NULL, NULL};
    if (!job->padded) return 1;
    *field = job->field;
    field->mode = NO_PAD;
    rows->field = field;
    rows->layout = layout;
    rows->bounds = layout->bounds;
    i64 most = 0;
    for (i64 row = 0; row < job->rows; row++) most = row_length(rows, row) > most ? row_length(rows, row) : most;
    return (rows->scratch = malloc((size_t)(most * job->size + 8))) != NULL;
}

/* Whether each row is the row of one job and then that of another: FITS, MISFIT or STRAY. */
static int encode_concat(const Rows *rows, const Rows *head, const Rows *tail) {
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row), first = row_length(head, row);
        const u8 *words = row_words(rows, row);
        if (!words) return STRAY;
        if (n != first + row_length(tail, row)) return MISFIT;
        const u8 *begin = row_words(head, row), *end = row_words(tail, row);
        if (memcmp(words, begin, (size_t)(first * rows->size))) return MISFIT;
        if (memcmp(words + first * rows->size, end, (size_t)((n - first) * rows->size))) return MISFIT;
    }
    return FITS;
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

/* Encodes packed values anew: columns, a dictionary or a plain form, whichever takes fewest bytes. */
static int encode_anew(const Rows *rows, const Rows *near, const Job *job, Out *out, Entry *slots, i64 *count, Form *form) {
    i64 start = out->used, total = total_words(rows), plain = total * rows->size;
    *count = 1;
    int done = choose(rows, near, job->hints, (int)job->integers, out, slots, form);
    if (done != FITS) return done;
    i64 best = bytes_of(slots), room = plain + 8 * rows->rows + 4096;
    int columns = job->columns > 1 && total, repeats = job->hints >> DICTIONARY & 1 || (8 * best > plain && look_alike(rows, NULL));
    if (!columns && !repeats) return FITS;
    Entry *tried = calloc((size_t)(job->columns > 1 ? job->columns : 1) + 2, sizeof(Entry));
    int many = job->columns > FEW_COLUMNS;
    u8 *memory = malloc((size_t)room * (size_t)(columns && !many ? job->columns : 1));
    if (!tried || !memory) done = NO_MEMORY;
    for (int way = 0; way < 2 && done == FITS; way++) {
        if (way ? !repeats : !columns) continue;
        Out spare = {memory, out->base + ((start + 7) & ~(i64)7), 0, way || many ? room : room * job->columns};
        i64 bytes = 0, entries = way ? 2 : job->columns + 1, limit = best;
        Form found = {COLUMNS, 0, 0, -1, 0, 0, 0, 0};
        int fits = FITS;
        if (way) {
            tried[0] = tried[1] = (Entry){PLAIN, slots->layout, rows->items, rows->size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
            fits = encode_dictionary(rows, job->hints & ~((i64)1 << DICTIONARY), (int)job->integers, &spare, tried, &found, 0);
        } else if (many) { /* some more bytes pay: columns are taken without the others, and a codec makes fewer bytes of them */
            tried[0].layout = slots->layout;
            fits = encode_columns(rows, job->columns, &spare, tried);
            limit = best + best / 32 - (i64)sizeof(Entry) * entries;
        } else {
            u8 *column = malloc((size_t)(total / job->columns * rows->size + 8));
            if (!column) fits = NO_MEMORY;
            for (i64 i = 0; i < job->columns && fits == FITS; i++) {
                Rows one = *rows;
                column_words(column, rows->values, rows, job->columns, i, total / rows->items);
                one.values = column;
                one.items = rows->items / job->columns;
                Form unused;
                tried[i] = (Entry){PLAIN, slots->layout, one.items, rows->size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
                fits = choose(&one, NULL, 0, (int)job->integers, &spare, tried + i, &unused);
            }
            tried[job->columns] = (Entry){COLUMNS, slots->layout, rows->items, rows->size, 0, 0, job->columns, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
            free(column);
        }
        for (i64 i = 0; i < entries; i++) bytes += bytes_of(tried + i);
        if (fits == NO_MEMORY) done = fits;
        if (fits != FITS || bytes >= limit || adopt(out, start, &spare) != FITS) continue;
        memcpy(slots, tried, sizeof(Entry) * (size_t)entries);
        best = bytes;
        *count = entries;
        *form = found;
    }
    if (repeats && form->kind != DICTIONARY) form->inner_kind = NO_GAIN;
    form->cost = total ? best * COST_WORDS / total : 0;
    free(tried);
    free(memory);
    return done;
}

/* All values of a padded field, packed; NULL without memory or, with `*done` STRAY, for a pad that is none. */
static u8 *gathered(const Rows *rows, int *done) {
    u8 *values = malloc((size_t)(total_words(rows) * rows->size + 8)), *to = values;
    *done = values ? FITS : NO_MEMORY;
    for (i64 row = 0; row < rows->rows && *done == FITS; row++) {
        i64 nbytes = row_length(rows, row) * rows->size;
        const u8 *words = row_words(rows, row);
        if (words) memcpy(to, words, (size_t)nbytes);
        else *done = STRAY;
        to += nbytes;
    }
    return values;
}

static int encode_field(Job *jobs, i64 at, const Layout *layouts, Rows *rows, Out *out, Entry *slots, i64 *count) {
    Job *job = jobs + at;
    Form *form = &job->form;
    Rows near = {0}, head = {0}, tail = {0};
    Field fields[3];
    int has_near = job->near >= 0 && job->near < at, done = MISFIT;
    *slots = (Entry){PLAIN, job->layout, job->items, job->size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
    *count = 1;
    if (!total_words(rows)) return encode_as(PLAIN, 0, 0, rows, NULL, out, slots); /* the pads are verified all the same */
    if (job->head >= 0 && job->head < at && job->tail >= 0 && job->tail < at) {
        int opened = open_rows(&head, jobs + job->head, layouts, fields) & open_rows(&tail, jobs + job->tail, layouts, fields + 1);
        done = opened ? encode_concat(rows, &head, &tail) : NO_MEMORY;
        free(head.scratch);
        free(tail.scratch);
        if (done == FITS) *slots = (Entry){CONCAT, job->layout, job->items, job->size, 0, 0, 0, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
        if (done != MISFIT) return done;
    }
    if (has_near && !open_rows(&near, jobs + job->near, layouts, fields + 2)) return NO_MEMORY;
    i64 total = total_words(rows), start = out->used;
    int many = form->kind == COLUMNS && job->columns > FEW_COLUMNS;
    if (many || (form->kind >= PLAIN && form->kind < DICTIONARY)) {
        rows->ends = form->inner_kind == NO_GAIN ? NULL : calloc((size_t)rows->rows + 1, sizeof(u64));
        if (many) done = encode_columns(rows, job->columns, out, slots);
        else done = encode_as(form->kind, form->number, form->bytes, rows, has_near ? &near : NULL, out, slots);
        if (many) *count = job->columns + 1;
        u64 *ends = rows->ends;
        rows->ends = NULL;
        if (done == FITS) {
            Field unverified;
            Rows quick = verified(rows, &unverified);
            i64 bytes = 0, kind = many ? BLOCKS : form->kind;
            for (i64 i = 0; i < *count; i++) bytes += bytes_of(slots + i);
            int larger = is_larger(bytes, form, total), other = form->kind == PLAIN || 2 * bytes * COST_WORDS < form->cost * total;
            int looks = total * rows->size >= FEW_BYTES || other || ++form->age % SOME_BATCHES == 0;
            int repeats = looks && form->inner_kind != NO_GAIN && 8 * bytes > total * rows->size && look_alike(&quick, ends);
            if (larger || (looks && (repeats || is_better(&quick, has_near && !many ? &near : NULL, (int)job->integers, kind)))) done = MISFIT;
        }
        free(ends);
    }
    if (done == MISFIT || done == FULL) {
        Rows flat = *rows;
        i64 *bounds = NULL;
        u8 *values = NULL;
        out->used = start;
        done = FITS;
        if (rows->field || rows->index) {
            values = gathered(rows, &done);
            bounds = malloc(sizeof(i64) * (size_t)(rows->rows + 1));
            if (!bounds) done = NO_MEMORY;
            for (i64 row = 0, end = bounds ? (bounds[0] = 0) : 0; bounds && row < rows->rows; row++)
                bounds[row + 1] = end += row_length(rows, row) / rows->items;
            flat.values = values;
            flat.bounds = bounds;
            flat.index = NULL;
            flat.field = NULL;
        }
        if (done == FITS && form->kind == DICTIONARY) {
            done = encode_dictionary(&flat, job->hints & ~((i64)1 << DICTIONARY), (int)job->integers, out, slots, form, 1);
            *count = 2;
            if (done == FITS && is_larger(bytes_of(slots) + bytes_of(slots + 1), form, total)) done = MISFIT;
            if (done != FITS) out->used = start;
        } else if (done == FITS) done = MISFIT;
        if (done == MISFIT || done == FULL) {
            *slots = (Entry){PLAIN, job->layout, job->items, job->size, 0, -1, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
            done = encode_anew(&flat, has_near ? &near : NULL, job, out, slots, count, form);
        }
        free(bounds);
        free(values);
    }
    free(near.scratch);
    return done;
}

/* Whether rows of bools have a byte other than 0 and 1. */
static int has_odd_bools(const Rows *rows) {
    u8 all = 0;
    for (i64 row = 0; row < rows->rows; row++) {
        i64 n = row_length(rows, row);
        const u8 *bools = row_words(rows, row);
        for (i64 i = 0; i < n; i++) all |= bools[i];
    }
    return all > 1;
}

/* Encodes a job with the first of its pads that is under its mask. */
static void encode_job(void *context, i64 at) {
    Work *work = context;
    Job *job = work->jobs + at;
    Field field;
    Rows rows;
    i64 width = job->padded ? work->layouts[job->layout].width : 0;
    u8 *row_pads = malloc((size_t)((width / 8 + 16) * job->rows + 16));
    int done = row_pads && open_rows(&rows, job, work->layouts, &field) ? STRAY : NO_MEMORY;
    job->row_pads = (Array){0, 1, 0};
    for (job->pad = 0; done == STRAY && job->pad < (job->padded ? job->num_pads : 1); job->pad++) {
        work->outs[at].used = 0;
        field.mode = job->pads[job->pad].mode;
        memcpy(field.pad, job->pads[job->pad].pad, sizeof field.pad);
        field.row_pads = row_pads;
        done = encode_field(work->jobs, at, work->layouts, &rows, work->outs + at, work->slots + job->first, &job->count);
    }
    job->pad--;
    if (done == FITS && job->padded && (field.mode & ~TRUSTED) >= PER_ROW) {
        i64 size = row_pad_size(&field, work->layouts + job->layout), equal = 1;
        for (i64 row = 1; row < job->rows && equal; row++) equal = !memcmp(row_pads, row_pads + row * size, (size_t)size);
        u8 *to = reserve(work->outs + at, &job->row_pads, size, equal && job->rows ? 1 : job->rows);
        if (to) memcpy(to, row_pads, (size_t)(size * job->row_pads.count));
        else done = FULL;
        for (i64 row = 0; row < job->rows && job->integers == BOOLS; row++)
            if (row_pads[row] > 1) done = ODD;
    }
    if (done == FITS && job->integers == BOOLS) {
        field.mode = NO_PAD;
        if (has_odd_bools(&rows)) done = ODD;
    }
    if (row_pads) free(rows.scratch);
    free(row_pads);
    job->result = done;
}

static int same_bytes(const u8 *body, const Array *one, const Array *other) {
    return one->size == other->size && one->count == other->count &&
           !memcmp(body + one->at, body + other->at, (size_t)(one->size * one->count));
}

/* Whether two entries hold equal words in equal arrays. */
static int same_entry(const u8 *body, const Entry *one, const Entry *other) {
    return one->kind == other->kind && one->layout == other->layout && one->layout >= 0 && one->items == other->items &&
           one->size == other->size && one->number == other->number && one->first == other->first &&
           one->second == other->second && same_bytes(body, &one->a, &other->a) && same_bytes(body, &one->b, &other->b) &&
           same_bytes(body, &one->c, &other->c);
}

/* Whether the `count` entries of a field, of which the last is its own, hold what entry `other` holds. */
static int same_field(const u8 *body, const Entry *slots, i64 count, const Entry *entries, i64 other) {
    Entry own = slots[count - 1];
    const Entry *theirs = entries + other;
    if (own.kind != theirs->kind || (own.kind != DICTIONARY && own.kind != COLUMNS)) return count == 1 && same_entry(body, &own, theirs);
    own.first = theirs->first;
    if (!same_entry(body, &own, theirs)) return 0;
    for (i64 part = 0; part < count - 1; part++)
        if (!same_entry(body, slots + part, entries + theirs->first + part)) return 0;
    return 1;
}

/* Moves the entries of a job to the end of the table, and their arrays behind the others. A field that equals an earlier
   one takes its entry, unless that holds the stored rows of the dictionary behind it. Returns the entry of the field; `used` bytes of the body are in use. */
static i64 settle(Work *work, i64 at, u8 *body, Entry *entries, i64 *num_entries, const i64 *fields, i64 *used) {
    Job *job = work->jobs + at;
    Out *out = work->outs + at;
    Entry *slots = work->slots + job->first;
    i64 begin = (*used + 7) & ~(i64)7, moved = begin - out->base;
    for (i64 i = 0; i < job->count; i++) {
        Entry *entry = slots + i;
        Array *arrays[3] = {&entry->a, &entry->b, &entry->c};
        for (int k = 0; k < 3; k++) arrays[k]->at = arrays[k]->count ? arrays[k]->at + moved : 0;
        if (entry->kind == CONCAT) {
            entry->first = fields[job->head];
            entry->second = fields[job->tail];
        } else if (entry->kind == BLOCKS && entry->second >= 0) entry->second = fields[job->near];
        else if (entry->kind == DICTIONARY || entry->kind == COLUMNS) entry->first += *num_entries;
    }
    memset(body + *used, 0, (size_t)(begin - *used));
    memmove(body + begin, out->memory, (size_t)out->used);
    if (job->row_pads.count) job->row_pads.at += moved;
    for (i64 other = 0; other < *num_entries; other++) {
        int inside = other + 1 < *num_entries && entries[other + 1].kind == DICTIONARY;
        if (!inside && same_field(body, slots, job->count, entries, other)) {
            i64 nbytes = job->row_pads.size * job->row_pads.count;
            if (nbytes) {
                memmove(body + begin, body + job->row_pads.at, (size_t)nbytes);
                job->row_pads.at = begin;
                *used = begin + nbytes;
            }
            return other;
        }
    }
    memcpy(entries + *num_entries, slots, sizeof(Entry) * (size_t)job->count);
    *num_entries += job->count;
    if (out->used) *used = begin + out->used;
    return *num_entries - 1;
}

/* ------------------------------------------------------------------ encoding on a device: where its kernels write

   A unit is a field, or one of its columns, in a form that was chosen before. A kernel says what the form of each row of each
   unit takes; here is where the arrays go. Small arrays, of a few numbers a row, are written here, and the kernel writes the
   others. (encode_job.py) */

typedef struct {
    i64 kind, words, size, items, stride, offset, rows, bounds, row_stride, counts, low, width, number, second, bytes;
    i64 near, head, tail, bools, pad_mode, pad, b_size, c_size;
} Unit;

typedef struct {
    i64 flags, count, low, high, least, most, hash;
} Stat;

/* Where the parts of arrays a, b and c that belong to a row begin, and what becomes of the row. */
typedef struct {
    i64 at[3], way;
} Spot;

enum { WRITTEN = -1, LEFT_OUT = -2 };               /* ways; else the row equals that one, unit * rows + row */
enum { IS_MISFIT = 1, NEAR_USED = 4, IS_STRAY = 8 }; /* flags */

/* A field: `units` units from `first` on, and the fields that it refers to, which are before it, or -1. `entry` is its entry
   then, -1 if it does not fit. */
typedef struct {
    i64 kind, first, units, layout, items, size, near, head, tail, cost, entry;
} Settled;

/* An array that was written here: `nbytes` bytes from `from` on belong to the byte `at` of the body. */
typedef struct {
    i64 at, from, nbytes;
} Small;

typedef struct {
    Unit *units;
    const Stat *stats;
    Spot *spots;
    const i64 *const *bounds;
    i64 rows, used;
    u8 *memory;
    i64 memory_used;
    Small *small;
    i64 num_small;
    Entry *entries;
    i64 num_entries;
    i64 *numbers, *index, *firsts, *slots;
} Placing;

static i64 unit_words(const Placing *placing, i64 unit, i64 row) {
    const Unit *own = placing->units + unit;
    const i64 *bounds = own->bounds < 0 ? NULL : placing->bounds[own->bounds];
    return bounds ? (bounds[row + 1] - bounds[row]) * own->items : row < own->rows ? own->items : 0;
}

static void place_array(Placing *placing, Array *array, i64 size, i64 count) {
    i64 at = (placing->used + 7) & ~(i64)7;
    *array = (Array){at, size, count};
    placing->used = at + size * count;
}

/* Notes an array that is written here; its memory. */
static u8 *place_small(Placing *placing, Array *array, i64 size, i64 count) {
    place_array(placing, array, size, count);
    u8 *to = placing->memory + placing->memory_used;
    placing->small[placing->num_small++] = (Small){array->at, placing->memory_used, size * count};
    placing->memory_used += size * count;
    return to;
}

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

/* `put_numbers` of `placing->numbers`. */
static void place_numbers(Placing *placing, Array *array, i64 count, int is_signed) {
    const i64 *numbers = placing->numbers;
    i64 low = count ? numbers[0] : 0, high = low;
    for (i64 i = 0; i < count; i++) {
        low = numbers[i] < low ? numbers[i] : low;
        high = numbers[i] > high ? numbers[i] : high;
    }
    if (count > 1 && low == high) count = 1;
    i64 size = bytes_between(low, high, is_signed);
    u8 *to = place_small(placing, array, size, count);
    for (i64 i = 0; i < count; i++) put_word(to + i * size, numbers[i], size);
}

/* Places `total` numbers between two of them, equal ones once; the bytes of one if the kernel writes them, else 0. */
static i64 place_stretches(Placing *placing, Array *array, i64 total, i64 low, i64 high, int is_signed) {
    i64 size = bytes_between(low, high, is_signed);
    if (total > 1 && low != high) {
        place_array(placing, array, size, total);
        return size;
    }
    placing->numbers[0] = low;
    place_numbers(placing, array, total > 0, is_signed);
    return 0;
}

/* Places the arrays of a unit in `n` rows, `index` or all. */
static void place_unit(Placing *placing, i64 unit, const i64 *index, i64 n, Entry *entry) {
    Unit *own = placing->units + unit;
    const Stat *stats = placing->stats + unit * placing->rows;
    Spot *spots = placing->spots + unit * placing->rows;
    i64 size = own->size, way = WRITTEN, real = -1, sums[3] = {0, 0, 0}, each[3] = {0, 0, 0};
    i64 low = 0, high = 0, least = INT64_MAX, most = 0;
    for (i64 i = 0; i < n; i++) {
        i64 row = index ? index[i] : i, words = unit_words(placing, unit, row), count = stats[row].count;
        if (own->kind == BITMAP) words = (words + 7) / 8;
        if (own->kind == BLOCKS) words = (words + BLOCK - 1) / BLOCK;
        spots[row].at[0] = sums[0];
        spots[row].at[1] = own->kind == BLOCKS ? sums[0] : own->kind == SPARSE ? sums[2] : sums[1];
        spots[row].at[2] = sums[2];
        sums[0] += words;
        sums[1] += count > 1 ? count - 1 : 0;
        sums[2] += count;
        if (!words) continue;
        low = real < 0 || stats[row].low < low ? stats[row].low : low;
        high = real < 0 || stats[row].high > high ? stats[row].high : high;
        least = stats[row].least < least ? stats[row].least : least;
        most = stats[row].most > most ? stats[row].most : most;
        if (real < 0) real = row;
    }
    if (own->kind == BITMAP && real >= 0 && stats[real].low == own->second) { /* the first word of all is stored first */
        own->second = own->number;
        own->number = stats[real].low;
    }
    *entry = (Entry){own->kind, entry->layout, own->items, size, own->kind == BITMAP ? 0 : own->number, -1, -1,
                     {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
    switch (own->kind) {
    case PLAIN:
    case NARROW:
        each[0] = own->kind == PLAIN ? size : own->bytes;
        place_array(placing, &entry->a, each[0], sums[0]);
        break;
    case BLOCKS:
        each[0] = 1, each[1] = size, each[2] = 4;
        place_array(placing, &entry->a, 1, sums[0]);
        place_array(placing, &entry->b, size, sums[0]);
        place_array(placing, &entry->c, 4, sums[2]);
        break;
    case BITMAP: {
        each[0] = 1;
        place_array(placing, &entry->a, 1, sums[0]);
        u8 *pair = place_small(placing, &entry->b, size, 2);
        put_word(pair, own->number, size);
        put_word(pair + size, own->second, size);
        break;
    }
    case ARANGE: {
        i64 before = real < 0 ? 0 : stats[real].low; /* of empty rows, any will do */
        for (i64 i = 0; i < n; i++) {
            i64 row = index ? index[i] : i;
            if (unit_words(placing, unit, row)) before = stats[row].low;
            placing->numbers[i] = before;
        }
        place_numbers(placing, &entry->a, n, 1);
        way = LEFT_OUT;
        break;
    }
    default:
        for (i64 i = 0; i < n; i++) placing->numbers[i] = stats[index ? index[i] : i].count;
        place_numbers(placing, &entry->a, n, 0);
        if (own->kind == SPARSE) {
            each[1] = bytes_between(0, most, 0);
            each[2] = size;
            if (sums[2]) place_array(placing, &entry->b, each[1], sums[2]);
            place_array(placing, &entry->c, size, sums[2]);
        } else {
            each[1] = place_stretches(placing, &entry->b, sums[1], sums[1] ? least : 0, most, 0);
            each[2] = place_stretches(placing, &entry->c, sums[2], low, high, 1);
        }
        own->b_size = each[1];
        own->c_size = each[2];
        if (own->kind == SPARSE ? !sums[2] : !each[1] && !each[2]) way = LEFT_OUT;
    }
    const Array *arrays[3] = {&entry->a, &entry->b, &entry->c};
    for (i64 i = 0; i < n; i++) {
        Spot *spot = spots + (index ? index[i] : i);
        for (int k = 0; k < 3; k++) spot->at[k] = arrays[k]->at + spot->at[k] * each[k];
        spot->way = way;
    }
}

/* The first of each of the rows that differ, to `firsts`, and of each row its number among them, to `index`, as far as
   hashes say; how many there are. `slots` has room for four times the rows. */
static i64 find_alike(Placing *placing, i64 unit) {
    const Stat *stats = placing->stats + unit * placing->rows;
    i64 room = 16, found = 0;
    while (room < 2 * placing->rows) room *= 2;
    memset(placing->slots, 0, (size_t)room * sizeof(i64));
    for (i64 row = 0; row < placing->rows; row++) {
        u64 slot = (u64)stats[row].hash * 0x9E3779B97F4A7C15ull >> 20;
        i64 words = unit_words(placing, unit, row);
        for (;; slot++) {
            i64 *here = placing->slots + (slot & (u64)(room - 1));
            if (!*here) {
                *here = found + 1;
                placing->firsts[found++] = row;
            }
            i64 other = placing->firsts[*here - 1];
            if (stats[other].hash == stats[row].hash && unit_words(placing, unit, other) == words) {
                placing->index[row] = *here - 1;
                break;
            }
        }
    }
    return found;
}

/* An earlier field of one unit with the same words and form, as far as hashes say; -1 if there is none. */
static i64 same_before(const Placing *placing, const Settled *fields, i64 at) {
    const Settled *field = fields + at;
    const Unit *own = placing->units + field->first;
    if (field->kind == DICTIONARY || field->kind == COLUMNS || own->near >= 0 || field->layout < 0) return -1;
    for (i64 before = 0; before < at; before++) {
        const Settled *other = fields + before;
        const Unit *theirs = placing->units + other->first;
        if (other->entry < 0 || other->kind != field->kind || other->layout != field->layout || theirs->near >= 0) continue;
        if (theirs->items != own->items || theirs->size != own->size || theirs->number != own->number) continue;
        if (theirs->second != own->second || theirs->bytes != own->bytes) continue;
        i64 row = 0;
        const Stat *one = placing->stats + field->first * placing->rows, *two = placing->stats + other->first * placing->rows;
        while (row < placing->rows && one[row].hash == two[row].hash) row++;
        if (row == placing->rows) return before;
    }
    return -1;
}

/* Places a field; false if it does not fit its form. */
static int place_field(Placing *placing, Settled *fields, i64 at) {
    Settled *field = fields + at;
    i64 total = 0, rows = placing->rows, nbytes = 0, made = placing->num_entries;
    for (i64 unit = field->first; unit < field->first + field->units; unit++)
        for (i64 row = 0; row < rows; row++) {
            i64 words = unit_words(placing, unit, row);
            total += words;
            i64 flags = row < placing->units[unit].rows ? placing->stats[unit * rows + row].flags : 0;
            if (flags & IS_STRAY || (words && flags & IS_MISFIT)) return 0;
        }
    Entry whole = {field->kind, field->layout, field->items, field->size, 0, made, -1, {0, 1, 0}, {0, 1, 0}, {0, 1, 0}};
    if (!total) {
        whole.kind = PLAIN;
        whole.first = -1;
        place_array(placing, &whole.a, field->size, 0);
        placing->entries[placing->num_entries++] = whole;
        field->entry = made;
        return 1;
    }
    if (field->kind == CONCAT) {
        if (fields[field->head].entry < 0 || fields[field->tail].entry < 0) return 0;
        whole.first = fields[field->head].entry;
        whole.second = fields[field->tail].entry;
        placing->entries[placing->num_entries++] = whole;
        field->entry = made;
        return 1;
    }
    i64 before = same_before(placing, fields, at);
    if (before >= 0) {
        i64 unit = field->first, other = fields[before].first;
        for (i64 row = 0; row < rows; row++) placing->spots[unit * rows + row].way = other * rows + row;
        field->entry = fields[before].entry;
        return 1;
    }
    i64 stored = rows;
    if (field->kind == DICTIONARY) {
        stored = find_alike(placing, field->first);
        if (stored == rows) return 0;
        for (i64 row = 0; row < rows; row++)
            placing->spots[field->first * rows + row].way = field->first * rows + placing->firsts[placing->index[row]];
    }
    for (i64 unit = field->first; unit < field->first + field->units; unit++) {
        Entry *entry = placing->entries + placing->num_entries++;
        entry->layout = field->layout;
        if (field->kind == DICTIONARY) place_unit(placing, unit, placing->firsts, stored, entry);
        else place_unit(placing, unit, NULL, placing->units[unit].rows, entry);
        i64 used = 0;
        for (i64 row = 0; row < rows; row++) used |= placing->stats[unit * rows + row].flags & NEAR_USED;
        if (used) {
            if (fields[field->near].entry < 0) return 0;
            entry->second = fields[field->near].entry;
        }
        nbytes += bytes_of(entry);
    }
    if (field->kind == DICTIONARY) {
        memcpy(placing->numbers, placing->index, sizeof(i64) * (size_t)rows);
        place_numbers(placing, &whole.a, rows, 0);
        for (i64 i = 0; i < stored; i++)
            placing->numbers[i] = unit_words(placing, field->first, placing->firsts[i]) / field->items;
        place_numbers(placing, &whole.b, stored, 0);
        nbytes += bytes_of(&whole);
    } else whole.second = field->units;
    if (field->kind == DICTIONARY || field->kind == COLUMNS) placing->entries[placing->num_entries++] = whole;
    field->entry = placing->num_entries - 1;
    Form form = {0};
    form.cost = field->cost;
    return !is_larger(nbytes, &form, total);
}

/* Places the arrays of fields behind the first `used` bytes of a body, whose size it returns, or -1 without memory.
   `bounds` are those of the layouts. `entries` has room for two a field and one a unit, `small` for three a unit and two a
   field, `memory` for 24 bytes of each row of each of these. `made` are the numbers of entries and of small arrays. */
API i64 maskpack_place(Unit *units, i64 num_units, Settled *fields, i64 num_fields, const Stat *stats, i64 rows,
                       const i64 *const *bounds, i64 used, Spot *spots, Entry *entries, Small *small, u8 *memory, i64 *made) {
    i64 *scratch = malloc(sizeof(i64) * (size_t)(7 * rows + 64));
    if (!scratch) return -1;
    Placing placing = {units, stats, spots, bounds, rows, used, memory, 0, small, 0, entries, 0,
                       scratch, scratch + rows + 1, scratch + 2 * rows + 2, scratch + 3 * rows + 3};
    for (i64 spot = 0; spot < num_units * rows; spot++) spots[spot] = (Spot){{0, 0, 0}, LEFT_OUT};
    for (i64 at = 0; at < num_fields; at++) {
        Placing before = placing;
        fields[at].entry = -1;
        if (place_field(&placing, fields, at)) continue;
        placing.used = before.used;
        placing.memory_used = before.memory_used;
        placing.num_small = before.num_small;
        placing.num_entries = before.num_entries;
        fields[at].entry = -1;
        for (i64 spot = fields[at].first * rows; spot < (fields[at].first + fields[at].units) * rows; spot++)
            spots[spot].way = LEFT_OUT;
    }
    free(scratch);
    made[0] = placing.num_entries;
    made[1] = placing.num_small;
    return placing.used;
}

/* ------------------------------------------------------------------ decoding: fields to padded or packed tensors */

typedef struct {
    const Target *targets;
    Part *parts;
    i64 stream, failed;
} Decode;

/* Decodes the row at the cursor to row `to` of a padded field; `scratch` has room for it. */
static void decode_padded(Cursor *cursor, const Field *field, const Layout *layout, i64 to, u8 *scratch, i64 stream) {
    i64 first = layout->splits[to], lies = field->outer == 1 && layout->splits[to + 1] - first == 1;
    u8 *out = lies ? field->padded + to * field->row_stride + layout->starts[first] * field->items * field->size : scratch;
    next_row(cursor, out);
    write_row(field, layout, to, lies ? NULL : scratch, stream);
}

static void decode_field(void *context, i64 at) {
    Decode *decode = context;
    const Target *target = decode->targets + at;
    const Field *field = &target->field;
    Part *part = decode->parts + target->part;
    const Entry *entry = part->table.entries + target->entry;
    if (!(target->padded ? field->padded : field->packed)) return; /* no words: no memory to point to */
    Cursor cursor;
    u8 *scratch = NULL;
    int fine = open_cursor(&cursor, part, target->entry);
    if (fine && target->padded) fine = (scratch = malloc((size_t)(longest_row(&cursor) * entry->size + 8))) != NULL;
    for (i64 i = 0; fine && i < part->count; i++) {
        i64 to = part->places ? part->places[i] : i;
        if (part->taken) seek_row(&cursor, part->taken[i]);
        if (part->done) part->now = to;
        if (target->padded) decode_padded(&cursor, field, part->out + field->layout, to, scratch, decode->stream);
        else next_row(&cursor, packed_row(part, field, to));
    }
    close_cursor(&cursor);
    free(scratch);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    if (!fine) __atomic_store_n(&decode->failed, 1, __ATOMIC_RELAXED);
    else if (part->done) part->done[target->entry] = target;
}

/* ------------------------------------------------------------------ decoding on a device: what its kernel reads beside the body

   Tables of int64, one behind the other, that axes and sources name by their first number, -1 for none.
   (packed/cuda/job_table.py describes them; `Source` has the same numbers there) */

enum { BY_PLACE, BY_PIECE, BY_BIT, BY_SEARCH, BY_BLOCK }; /* job_table.py */

typedef struct {
    i64 tokens, longest, bounds, splits, starts, ends;
} Axis;

typedef struct {
    i64 kind, rows, begins, begin_unit, data, data_size, more, number, single, pieces, counts, sums, numbers, near;
} Source;

typedef struct {
    i64 entry, flat; /* whether its words are found without their row */
} Wanted;

/* The rows of an entry; their bounds are in tokens, NULL for one token each. `table` and `unit`: the bounds for the kernel. */
typedef struct {
    i64 rows;
    const i64 *bounds;
    i64 table, unit;
} Extent;

typedef struct {
    const Entry *entries;
    const u8 *body;
    i64 *tables, used, room;
    const Wanted *wanted;
    const Source *sources; /* those that are made already */
    i64 num_sources;
} Stage;

/* Adds a number to the tables; beyond their room it is only counted. */
static void add(Stage *stage, i64 number) {
    if (stage->used < stage->room) stage->tables[stage->used] = number;
    stage->used++;
}

static i64 words_in(const Extent *extent, const Entry *entry, i64 row) {
    return (extent->bounds ? extent->bounds[row + 1] - extent->bounds[row] : 1) * entry->items;
}

/* The table of the first block of each row; fields of a layout share it. */
static i64 block_begins(Stage *stage, const Entry *entry, const Extent *extent) {
    for (i64 at = 0; at < stage->num_sources; at++) {
        const Entry *other = stage->entries + stage->wanted[at].entry;
        if (other->kind == BLOCKS && other->layout == entry->layout && other->items == entry->items && extent->table >= 0)
            return stage->sources[at].begins;
    }
    i64 begins = stage->used, block = 0;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++) add(stage, block += (words_in(extent, entry, row) + BLOCK - 1) / BLOCK);
    return begins;
}

static int add_source(Stage *stage, i64 index, const Extent *extent, Source *source);

static int add_blocks(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    source->kind = BY_BLOCK;
    source->more = entry->b.at;
    source->numbers = entry->c.at;
    source->begins = block_begins(stage, entry, extent);
    source->pieces = stage->used;
    i64 block = 0, number = 0;
    for (i64 row = 0; row < extent->rows; row++)
        for (i64 left = words_in(extent, entry, row); left > 0; left -= BLOCK) {
            i64 n = left < BLOCK ? left : BLOCK;
            add(stage, 512 * number + n);
            number += block_numbers(n, number_at(stage->body, &entry->a, block++) & ~NEAR);
        }
    if (entry->second < 0) return 1;
    Source near;
    if (!add_source(stage, entry->second, extent, &near)) return 0;
    source->near = stage->used;
    for (size_t at = 0; at < sizeof near / sizeof(i64); at++) add(stage, ((const i64 *)&near)[at]);
    return 1;
}

/* RLE and DELTA: pieces of each row. A row has its pieces in `begins`, and all but the last of them in `pieces`. */
static void add_stretches(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    const u8 *body = stage->body;
    i64 inner = 0, at = 0, total = 0;
    for (i64 row = 0; row < extent->rows; row++) inner += number_at(body, &entry->a, row) > 1;
    source->kind = BY_PIECE;
    source->data = entry->c.at;
    source->data_size = entry->c.size;
    source->number = 0;
    source->single = entry->c.count == 1;
    source->sums = entry->kind == DELTA && !inner ? 0 : -1;
    if (inner || entry->c.count > 1) {
        source->begins = stage->used;
        add(stage, 0);
        for (i64 row = 0; row < extent->rows; row++) add(stage, at += number_at(body, &entry->a, row));
    }
    if (!inner) return;
    source->pieces = stage->used;
    add(stage, inner = 0);
    for (i64 row = 0; row < extent->rows; row++) {
        i64 pieces = number_at(body, &entry->a, row);
        add(stage, inner += pieces > 1 ? pieces - 1 : 0);
    }
    source->counts = stage->used;
    add(stage, 0);
    for (i64 piece = 0; piece < inner; piece++) add(stage, total += number_at(body, &entry->b, piece));
    if (entry->kind == RLE) return;
    source->sums = stage->used;
    u64 sum = 0;
    i64 value = 0, piece = 0;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++)
        for (i64 left = number_at(body, &entry->a, row); left > 0; left--, value++) {
            if (left == 1) continue;
            sum += (u64)signed_at(body, &entry->c, value) * (u64)number_at(body, &entry->b, piece++);
            add(stage, (i64)sum);
        }
}

static int add_dictionary(Stage *stage, const Entry *entry, const Extent *extent, Source *source) {
    i64 index = stage->used, stored = 0;
    for (i64 row = 0; row < extent->rows; row++) {
        i64 own = stored_row(stage->body, entry, row);
        stored = own + 1 > stored ? own + 1 : stored;
        add(stage, own);
    }
    i64 *bounds = calloc((size_t)stored + 1, sizeof(i64));
    if (!bounds) return 0;
    for (i64 i = 0; i < stored; i++) bounds[i + 1] = bounds[i] + number_at(stage->body, &entry->b, i);
    Extent rows = {stored, bounds, stage->used, entry->items};
    i64 kind = stage->entries[entry->first].kind;
    if (kind == PLAIN || kind == NARROW)
        for (i64 i = 0; i <= stored; i++) add(stage, bounds[i]);
    else rows.table = -1;
    int fine = add_source(stage, entry->first, &rows, source);
    free(bounds);
    source->rows = index;
    return fine;
}

/* Where the kernel finds the words of an entry; false without memory. */
static int add_source(Stage *stage, i64 index, const Extent *extent, Source *source) {
    const Entry *entry = stage->entries + index;
    i64 total = 0;
    *source = (Source){BY_PLACE, -1, extent->table, extent->unit, entry->a.at, entry->a.size, -1, entry->number, 0,
                       -1, -1, -1, -1, -1};
    if (entry->kind == PLAIN || entry->kind == NARROW) return 1;
    if (entry->kind == DICTIONARY) return add_dictionary(stage, entry, extent, source);
    source->begins = -1;
    source->begin_unit = 1;
    if (entry->kind == BLOCKS) return add_blocks(stage, entry, extent, source);
    if (entry->kind == BITMAP) {
        source->kind = BY_BIT;
        source->more = entry->b.at;
    } else if (entry->kind == SPARSE) {
        source->kind = BY_SEARCH;
        source->data = entry->b.at;
        source->data_size = entry->b.size;
        source->more = entry->c.at;
    } else if (entry->kind == ARANGE) {
        source->kind = BY_PIECE;
        source->single = entry->a.count == 1;
        return 1;
    } else {
        add_stretches(stage, entry, extent, source);
        return 1;
    }
    source->begins = stage->used;
    add(stage, 0);
    for (i64 row = 0; row < extent->rows; row++)
        add(stage, total += entry->kind == BITMAP ? (words_in(extent, entry, row) + 7) / 8 : number_at(stage->body, &entry->a, row));
    return 1;
}

/* Writes tables behind the first `used` numbers: the bounds of all layouts, their spans if `padded`, those of the wanted
   entries, and the pads of rows. `axes` [m + 1]: of the layouts, and of rows without one; `pad_places` [num_pads]. Returns
   the numbers in use, of which only `room` are written; -1 without memory. */
API i64 maskpack_stage(const Entry *entries, const Layout *layouts, i64 m, const u8 *body, i64 rows, i64 dense_rows, i64 padded,
                       const Wanted *wanted, i64 num_wanted, const Array *pads, i64 num_pads, i64 *tables, i64 used, i64 room,
                       Axis *axes, Source *sources, i64 *pad_places) {
    Stage stage = {entries, body, tables, used, room, wanted, sources, 0};
    for (i64 at = 0; at <= m; at++) axes[at] = (Axis){dense_rows, 1, -1, -1, -1, -1};
    for (i64 at = 0; at < m; at++) {
        const i64 *bounds = layouts[at].bounds;
        axes[at] = (Axis){bounds[rows], 0, stage.used, -1, -1, -1};
        add(&stage, 0);
        for (i64 row = 0; row < rows; row++) {
            i64 length = bounds[row + 1] - bounds[row];
            axes[at].longest = length > axes[at].longest ? length : axes[at].longest;
            add(&stage, bounds[row + 1]);
        }
    }
    for (i64 at = 0; at < m && padded; at++) {
        const Layout *layout = layouts + at;
        i64 spans = layout->splits[rows], tokens = 0;
        axes[at].splits = stage.used;
        for (i64 row = 0; row <= rows; row++) add(&stage, layout->splits[row]);
        axes[at].starts = stage.used;
        for (i64 span = 0; span < spans; span++) add(&stage, layout->starts[span]);
        axes[at].ends = stage.used;
        add(&stage, 0);
        for (i64 span = 0; span < spans; span++) add(&stage, tokens += layout->counts[span]);
    }
    for (; stage.num_sources < num_wanted; stage.num_sources++) {
        const Wanted *one = wanted + stage.num_sources;
        const Entry *entry = entries + one->entry;
        Extent extent = {dense_rows, NULL, -1, one->flat ? 0 : entry->items};
        if (entry->layout >= 0) {
            extent.rows = rows;
            extent.bounds = layouts[entry->layout].bounds;
            if (!one->flat) extent.table = axes[entry->layout].bounds;
        }
        if (!add_source(&stage, one->entry, &extent, sources + stage.num_sources)) return -1;
    }
    for (i64 at = 0; at < num_pads; at++) {
        i64 size = pads[at].size < 8 ? pads[at].size : 8, words = pads[at].size / size;
        pad_places[at] = stage.used;
        for (i64 word = 0; word < rows * words; word++)
            add(&stage, (i64)word_at(body + pads[at].at + (pads[at].count == 1 ? word % words : word) * size, size));
    }
    return stage.used;
}

/* ------------------------------------------------------------------ layouts of a table */

/* A layout as it is stored: `kind` SPANS (a: starts, b: counts, c: spans of each row), MASK (a: a bit a position, the lowest
   of a byte first, rows from a new byte on) or PART (columns `low` on of the layout `parent`, which is stored before). */
enum { SPANS, MASK, PART };

typedef struct {
    i64 width, anchor, kind, parent, low;
    Array a, b, c;
} Stored;

static i64 mask_bytes(const Stored *stored, i64 rows) { return rows * ((stored->width + 7) / 8); }

/* Stores layouts behind the first `used` bytes of a body; for PART the caller has set `kind`, `parent` and `low`. Returns
   the bytes in use, -1 if there is no room for them. */
API i64 maskpack_store_layouts(Stored *stored, i64 n, const Layout *layouts, u8 *body, i64 used, i64 room) {
    Out out = {body, 0, used, room};
    for (i64 at = 0; at < n; at++) {
        const Layout *layout = layouts + at;
        Stored *to = stored + at;
        to->width = layout->width;
        to->a = to->b = to->c = (Array){0, 1, 0};
        if (to->kind == PART) continue;
        i64 spans = layout->splits[layout->rows], before = out.used;
        List each = {0};
        int fits = 1;
        for (i64 row = 0; row < layout->rows && fits; row++) fits = push(&each, layout->splits[row + 1] - layout->splits[row]);
        List starts = {(i64 *)layout->starts, spans, spans}, counts = {(i64 *)layout->counts, spans, spans};
        to->kind = SPANS;
        fits = fits && put_numbers(&out, &to->a, &starts, 0) && put_numbers(&out, &to->b, &counts, 0) && put_numbers(&out, &to->c, &each, 0);
        free(each.numbers);
        if (!fits || out.used - before > mask_bytes(to, layout->rows) + 256) {
            out.used = before;
            to->kind = MASK;
            to->b = to->c = (Array){0, 1, 0};
            u8 *bits = reserve(&out, &to->a, 1, mask_bytes(to, layout->rows));
            if (!bits) return -1;
            memset(bits, 0, (size_t)to->a.count);
            for (i64 row = 0; row < layout->rows; row++, bits += (to->width + 7) / 8)
                for (i64 span = layout->splits[row]; span < layout->splits[row + 1]; span++)
                    for (i64 i = layout->starts[span]; i < layout->starts[span] + layout->counts[span]; i++)
                        bits[i >> 3] |= (u8)(1 << (i & 7));
        }
    }
    return out.used;
}

/* The spans of a row, at most `room` of them, that rise within the width; how many there are, or may be without `starts`. */
static i64 spans_of_row(const Stored *stored, const u8 *body, i64 row, i64 first, i64 *starts, i64 *counts, i64 room) {
    i64 n = 0;
    if (stored->kind == SPANS) { /* those of a row differ in their starts */
        i64 most = stored->a.count == 1 ? 1 : stored->a.count - first;
        if (stored->b.count != 1 && stored->b.count - first < most) most = stored->b.count - first;
        i64 there = most > 0 ? cut_to(number_at(body, &stored->c, row), most) : 0;
        if (!starts) return there;
        for (i64 low = 0; n < there && n < room && low < stored->width; n++) {
            i64 start = number_at(body, &stored->a, first + n), count = number_at(body, &stored->b, first + n);
            start = start < low ? low : cut_to(start, stored->width - 1);
            count = count < 1 ? 1 : cut_to(count, stored->width - start);
            starts[n] = start;
            counts[n] = count;
            low = start + count + 1;
        }
        return n;
    }
    const u8 *bits = body + stored->a.at + row * ((stored->width + 7) / 8);
    for (i64 at = 0; at < stored->width && (n < room || !starts);) {
        while (at < stored->width && !(bits[at >> 3] >> (at & 7) & 1)) at++;
        i64 start = at;
        while (at < stored->width && bits[at >> 3] >> (at & 7) & 1) at++;
        if (at > start && starts) {
            starts[n] = start;
            counts[n] = at - start;
        }
        n += at > start;
    }
    return n;
}

/* Cuts the columns from `low` on, `width` of them, out of a layout; how many spans are left. With no `starts` they are
   only counted, in splits and bounds [rows + 1]. */
API i64 maskpack_cut(const Layout *whole, i64 low, i64 width, i64 *splits, i64 *bounds, i64 *starts, i64 *counts) {
    i64 n = 0, tokens = 0;
    splits[0] = bounds[0] = 0;
    for (i64 row = 0; row < whole->rows; row++) {
        for (i64 span = whole->splits[row]; span < whole->splits[row + 1]; span++) {
            i64 begin = whole->starts[span] - low, end = begin + whole->counts[span];
            begin = begin < 0 ? 0 : begin;
            end = end > width ? width : end;
            if (begin >= end) continue;
            if (starts) {
                starts[n] = begin;
                counts[n] = end - begin;
            }
            n++;
            tokens += end - begin;
        }
        splits[row + 1] = n;
        bounds[row + 1] = tokens;
    }
    return n;
}

/* Reads a stored layout that is no PART, in the same two steps; the second may find fewer spans than the first. */
API i64 maskpack_read_layout(const Stored *stored, const u8 *body, i64 rows, i64 *splits, i64 *bounds, i64 *starts, i64 *counts) {
    i64 first = 0, n = 0;
    if (!starts) {
        splits[0] = 0;
        for (i64 row = 0; row < rows; row++) splits[row + 1] = splits[row] + spans_of_row(stored, body, row, splits[row], NULL, NULL, 0);
        return splits[rows];
    }
    bounds[0] = 0;
    for (i64 row = 0; row < rows; row++) {
        i64 next = splits[row + 1], end = n + spans_of_row(stored, body, row, first, starts + n, counts + n, next - first);
        bounds[row + 1] = bounds[row];
        for (; n < end; n++) bounds[row + 1] += counts[n];
        first = next;
        splits[row + 1] = n;
    }
    return n;
}

/* ------------------------------------------------------------------ a batch to a table and a body, and back */

/* A layout with arrays of its own, which `free_layout` frees; 0 without memory. */
static int new_layout(Layout *out, i64 rows, i64 width, i64 spans) {
    i64 *line = malloc(sizeof(i64) * (size_t)(2 * rows + 2 + 2 * spans));
    *out = (Layout){rows, width, line + 2 * rows + 2, line + 2 * rows + 2 + spans, line, line + rows + 1};
    return line != NULL;
}

static void free_layout(const Layout *layout) { free((void *)layout->splits); }

static int cut_layout(const Layout *whole, i64 low, i64 width, Layout *out) {
    if (!new_layout(out, whole->rows, width, whole->splits[whole->rows])) return 0;
    maskpack_cut(whole, low, width, (i64 *)out->splits, (i64 *)out->bounds, (i64 *)out->starts, (i64 *)out->counts);
    return 1;
}

/* The most bytes that a job takes in a body. */
static i64 room_of(const Job *job, const Layout *layouts) {
    const Layout *layout = layouts + job->layout;
    i64 elements = job->layout < 0 ? job->rows : layout->bounds[layout->rows], pads = 16;
    for (i64 pad = 0; job->padded && pad < job->num_pads; pad++)
        if ((job->pads[pad].mode & ~TRUSTED) == ANY_ZERO) pads = layout->width / 8 + 16;
    return (elements * job->items * job->size + pads * job->rows + 4103) & ~(i64)7;
}

/* The packed batch that is made: the table of entries, and a body of `room` bytes. `slots` and `entries` have room for all
   entries of all jobs, those of a job from its `first` on in `slots`; `fields` [n] are the entries of the fields. */
typedef struct {
    Entry *slots, *entries;
    i64 *num_entries, *fields;
    u8 *body;
    i64 room;
} Packed;

enum { FAILED = -1, NO_ROOM = -2 };

static i64 encode_batch(Job *jobs, i64 n, const Layout *layouts, i64 m, Stored *stored, Packed to, i64 threads) {
    i64 room = 64;
    for (i64 at = 0; at < m; at++) room += (24 * layouts[at].splits[layouts[at].rows] + 8 * layouts[at].rows + 64) & ~(i64)7;
    i64 end = room;
    for (i64 at = 0; at < n; at++) room += room_of(jobs + at, layouts);
    if (room > to.room && (threads > 1 || !to.room)) return NO_ROOM - room;
    i64 used = maskpack_store_layouts(stored, m, layouts, to.body, 0, to.room);
    Out *outs = calloc((size_t)n + 1, sizeof(Out));
    Work work = {jobs, layouts, to.slots, outs};
    int done = used < 0 ? FULL : outs ? FITS : NO_MEMORY;
    *to.num_entries = 0;
    if (threads > 1 && done == FITS) {
        for (i64 at = 0; at < n; at++) {
            i64 own = room_of(jobs + at, layouts);
            outs[at] = (Out){to.body + end, end, 0, own};
            end += own;
        }
        run_tasks(encode_job, &work, n, threads);
    }
    for (i64 at = 0; at < n && done == FITS; at++) {
        if (threads <= 1) {
            i64 base = (used + 7) & ~(i64)7;
            outs[at] = (Out){to.body + base, base, 0, to.room - base};
            encode_job(&work, at);
        }
        done = (int)jobs[at].result;
        if (done == FITS) to.fields[at] = settle(&work, at, to.body, to.entries, to.num_entries, to.fields, &used);
    }
    free(outs);
    return done == FITS ? used : done == FULL ? NO_ROOM - room : FAILED;
}

/* Encodes layouts, and fields of these layouts. A job must come after those that it refers to. Returns the bytes of the body
   in use; FAILED if a job failed, whose result tells how; or NO_ROOM less the bytes that are enough in any case. */
API i64 maskpack_encode(Job *jobs, i64 n, const Layout *layouts, i64 m, Stored *stored, Entry *slots, Entry *entries,
                        i64 *num_entries, i64 *fields, u8 *body, i64 room, i64 threads) {
    return encode_batch(jobs, n, layouts, m, stored, (Packed){slots, entries, num_entries, fields, body, room}, threads);
}

/* A mask; `uniform` if the batch does not fit where its valid words differ. */
typedef struct {
    const u8 *words;
    i64 size, rows, width, row_stride;
    u64 significant;
    i64 uniform;
} Mask;

/* A layout of a batch: the tokens of a mask, or those in some of its columns if `low` is not negative. */
typedef struct {
    i64 mask, low, width;
} Cut;

static int scan_mask(const Mask *mask, Layout *out, i64 *misfit, i64 threads) {
    i64 rows = mask->rows, alike[2];
    i64 *line = malloc(sizeof(i64) * (size_t)(2 * rows + 2));
    RowScan *found = malloc(sizeof(RowScan) * (size_t)(rows + 1));
    int fine = line && found;
    if (fine) {
        i64 *splits = line, *bounds = line + rows + 1;
        i64 spans = maskpack_count_spans(mask->words, mask->size, rows, mask->width, mask->row_stride, mask->significant, found,
                                         splits, bounds, alike, threads);
        *misfit |= mask->uniform && !alike[0];
        fine = new_layout(out, rows, mask->width, spans);
        if (fine) {
            memcpy((i64 *)out->splits, line, sizeof(i64) * (size_t)(2 * rows + 2));
            maskpack_list_spans(mask->words, mask->size, rows, mask->width, mask->row_stride, mask->significant, found, out->splits,
                                (i64 *)out->starts, (i64 *)out->counts, threads);
        }
    }
    free(line);
    free(found);
    return fine;
}

/* Scans masks, and encodes the layouts and the fields of a batch; returns what `maskpack_encode` does. */
API i64 maskpack_compress(const Mask *masks, i64 num_masks, const Cut *cuts, Stored *stored, i64 m, Job *jobs, i64 n,
                          Entry *slots, Entry *entries, i64 *num_entries, i64 *fields, u8 *body, i64 room, i64 threads) {
    Layout *whole = calloc((size_t)(num_masks + 2 * m) + 1, sizeof(Layout));
    i64 misfit = 0, used = FAILED;
    if (!whole) {
        if (n) jobs->result = NO_MEMORY;
        return FAILED;
    }
    Layout *own = whole + num_masks, *layouts = own + m;
    int fine = 1;
    for (i64 at = 0; at < num_masks && fine; at++) fine = scan_mask(masks + at, whole + at, &misfit, threads);
    for (i64 at = 0; at < m && fine; at++) {
        if (cuts[at].low >= 0) fine = cut_layout(whole + cuts[at].mask, cuts[at].low, cuts[at].width, own + at);
        layouts[at] = cuts[at].low < 0 ? whole[cuts[at].mask] : own[at];
    }
    if (!fine && n) jobs->result = NO_MEMORY;
    if (fine && !misfit) used = encode_batch(jobs, n, layouts, m, stored, (Packed){slots, entries, num_entries, fields, body, room}, threads);
    for (i64 at = 0; at < num_masks + m; at++) free_layout(whole + at);
    free(whole);
    return used;
}

/* What `maskpack_decode` is given for a part: its table, as `Table` has it, `taken`, `places` and `count`. */
typedef struct {
    Table table;
    const i64 *taken, *places;
    i64 count;
} Given;

/* Whether the rows that are taken are there. */
static int has_rows(const Given *part, i64 out_rows) {
    for (i64 i = 0; i < part->count; i++) {
        if (part->taken && (u64)part->taken[i] >= (u64)part->table.rows) return 0;
        if (part->places && (u64)part->places[i] >= (u64)out_rows) return 0;
    }
    const Table *table = &part->table;
    return part->taken ? table->marks != NULL : part->count <= table->rows || part->count <= table->dense_rows;
}

/* Decodes fields of rows that lie in one or more bodies. The layouts `out` of the result may be wider or narrower than those
   in the bodies, with the same tokens. Returns 0; -1 without memory; -2 for a row that is not there. */
API i64 maskpack_decode(const Target *targets, i64 n, const Given *given, i64 num_parts, const Layout *out, i64 rows, i64 stream,
                        i64 threads) {
    i64 most = 0;
    for (i64 at = 0; at < n; at++) most = targets[at].entry >= most ? targets[at].entry + 1 : most;
    Part *parts = calloc((size_t)num_parts + 1, sizeof(Part));
    const Target **done = threads == 1 ? calloc((size_t)(most * num_parts) + 1, sizeof(Target *)) : NULL; /* without it, all goes as well */
    Decode decode = {targets, parts, stream, parts == NULL};
    int there = 1;
    for (i64 at = 0; at < num_parts && parts && there; at++) {
        const Given *one = given + at;
        parts[at] = (Part){one->table, one->taken, one->places, one->count, done ? done + at * most : NULL, out, 0};
        there = has_rows(one, rows);
    }
    if (parts && there) run_tasks(decode_field, &decode, n, threads);
    free(done);
    free(parts);
    return there ? -decode.failed : -2;
}

/* The numbers that the marks of an entry take: of a dictionary the rows that it stores and their bounds, else a, b and c of
   every row that is MARKED; none where these follow from the bounds of the rows. */
static i64 count_marks(const Entry *entry, i64 rows) {
    int fixed = entry->kind == PLAIN || entry->kind == NARROW || entry->kind == ARANGE || entry->kind > DICTIONARY;
    return fixed ? 0 : entry->kind == DICTIONARY ? rows + 2 : 3 * (rows / MARKED + 1);
}

typedef struct {
    i64 *numbers, used, room;
} Marks;

/* Marks the rows of an entry; `stored` are the bounds of rows that a dictionary stores. */
static void mark_rows(Marks *marks, const Table *table, i64 index, const i64 *stored, i64 rows) {
    i64 own = marks->used, count = count_marks(table->entries + index, rows);
    marks->used += count;
    if (!count || marks->used > marks->room) return;
    marks->numbers[index] = own;
    Cursor cursor = cursor_of(table, index, stored);
    for (i64 *to = marks->numbers + own; cursor.row <= rows; skip_own_row(&cursor)) {
        if (cursor.row % MARKED == 0) {
            i64 mark[3] = {cursor.a, cursor.b, cursor.c};
            memcpy(to, mark, sizeof mark);
            to += 3;
        }
        if (cursor.row == rows) break;
    }
}

/* Marks a dictionary and the rows that it stores; false without memory. */
static int mark_dictionary(Marks *marks, const Table *table, i64 index) {
    const Entry *entry = table->entries + index;
    i64 *bounds = NULL, own = marks->used, stored = stored_rows(table->entries, entry, table->body, table->rows, &bounds);
    if (stored < 0) return 0;
    marks->used += count_marks(entry, stored);
    if (marks->used <= marks->room) {
        marks->numbers[index] = own;
        marks->numbers[own] = stored;
        memcpy(marks->numbers + own + 1, bounds, sizeof(i64) * (size_t)(stored + 1));
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
    for (i64 at = 0; at < n && fine; at++) inside[entries[at].kind == DICTIONARY ? entries[at].first : n] = 1;
    for (i64 at = 0; at < n && fine; at++) {
        if (entries[at].kind == DICTIONARY) fine = mark_dictionary(&marks, &table, at);
        else if (!inside[at]) mark_rows(&marks, &table, at, NULL, entries[at].layout < 0 ? dense_rows : rows);
    }
    free(inside);
    return fine ? marks.used : -1;
}

/* ------------------------------------------------------------------ rows of a table, without decoding them */

static void part_of(Array *array, i64 from, i64 to) {
    to = to < array->count ? to : array->count;
    from = from < to ? from : to;
    array->at += from * array->size;
    array->count = to - from;
}

static void part_of_several(Array *array, i64 from, i64 to) { /* equal numbers are stored once */
    if (from == to) array->count = 0;
    else if (array->count > 1) part_of(array, from, to);
}

/* How many numbers of the arrays of an entry belong to the rows before one. */
typedef struct {
    i64 row, a, b, c;
} Mark;

static Mark mark_of(Cursor *cursor, i64 row) {
    seek_row(cursor, row);
    return (Mark){row, cursor->a, cursor->b, cursor->c};
}

/* Cuts an entry, whose rows are in its own arrays, to those between two marks. */
static void cut_entry(Entry *own, const Mark *from, const Mark *to) {
    switch (own->kind) {
    case PLAIN:
    case NARROW:
    case BITMAP: part_of(&own->a, from->a, to->a); break;
    case BLOCKS:
        part_of(&own->a, from->a, to->a);
        part_of(&own->b, from->a, to->a);
        part_of(&own->c, from->c, to->c);
        break;
    case SPARSE:
        part_of(&own->b, from->b, to->b);
        part_of(&own->c, from->b, to->b);
        part_of_several(&own->a, from->row, to->row);
        break;
    default: /* RLE, DELTA, ARANGE */
        part_of_several(&own->a, from->row, to->row);
        part_of_several(&own->b, from->b, to->b);
        part_of_several(&own->c, from->c, to->c);
    }
}

/* Cuts a dictionary, and the rows that it stores to those from the first to the last that each part uses. */
static void split_dictionary(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    const Entry *entry = table->entries + index;
    const i64 *marks = table->marks + table->marks[index];
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
        cut_entry(out + entry->first, &from, &to);
        part_of_several(&out[index].a, cuts[part], cuts[part + 1]);
        part_of_several(&out[index].b, first, end);
        out[index].number = (i64)((u64)entry->number + (u64)first);
    }
}

/* The parts of an entry between the rows `cuts` [parts + 1], in the same arrays: part p goes to out[p * n]. */
static void split_entry(const Table *table, i64 index, const i64 *cuts, i64 parts, Entry *out, i64 n) {
    const Entry *entry = table->entries + index;
    if (entry->kind == COLUMNS || entry->kind == CONCAT) return;
    if (entry->kind == DICTIONARY) {
        split_dictionary(table, index, cuts, parts, out, n);
        return;
    }
    Cursor cursor = cursor_of(table, index, NULL);
    for (i64 part = 0; part < parts; part++, out += n) {
        Mark from = mark_of(&cursor, cuts[part]), to = mark_of(&cursor, cuts[part + 1]);
        cut_entry(out + index, &from, &to);
    }
}

/* The parts of the rows of a table, with its `marks`, between `cuts` [parts + 1], in the same body: their entries, n each,
   and layouts, m each. Returns 0, or -1 without memory. */
API i64 maskpack_split(const Entry *entries, i64 n, const Stored *stored, i64 m, const Layout *layouts, const u8 *body, i64 rows,
                       const i64 *marks, const i64 *cuts, i64 parts, Entry *out, Stored *out_stored) {
    Table table = {entries, layouts, body, rows, rows, marks};
    u8 *inside = calloc((size_t)n + 1, 1); /* stored rows of dictionaries, which are taken with these */
    if (!inside) return -1;
    for (i64 part = 0; part < parts; part++) {
        memcpy(out + part * n, entries, sizeof(Entry) * (size_t)n);
        memcpy(out_stored + part * m, stored, sizeof(Stored) * (size_t)m);
        for (i64 at = 0; at < m; at++) {
            Stored *own = out_stored + part * m + at;
            i64 begin = cuts[part], end = cuts[part + 1];
            if (own->kind == MASK) part_of(&own->a, mask_bytes(own, begin), mask_bytes(own, end));
            if (own->kind != SPANS) continue;
            part_of_several(&own->a, layouts[at].splits[begin], layouts[at].splits[end]);
            part_of_several(&own->b, layouts[at].splits[begin], layouts[at].splits[end]);
            part_of_several(&own->c, begin, end);
        }
    }
    for (i64 i = 0; i < n; i++) inside[entries[i].kind == DICTIONARY ? entries[i].first : n] = 1;
    for (i64 i = 0; i < n; i++)
        if (!inside[i]) split_entry(&table, i, cuts, parts, out, n);
    free(inside);
    return 0;
}

/* Copies the arrays of structs to another body, each behind the one before, and says in the structs where they are now.
   `lines` [n, 4]: the first struct, how many there are, the numbers of one, and how many arrays its last parts are. Returns
   the bytes in use; with no `to` it only counts them. */
API i64 maskpack_compact(const i64 *lines, i64 n, const u8 *body, u8 *to) {
    i64 used = 0;
    for (const i64 *line = lines; line < lines + 4 * n; line += 4)
        for (i64 i = 0; i < line[3] * line[1]; i++) {
            i64 place = i / line[1], end = (i % line[1] + 1) * line[2];
            Array *array = (Array *)((i64 *)line[0] + end) - (line[3] - place);
            i64 nbytes = array->size * array->count, begin = (used + 7) & ~(i64)7;
            if (nbytes) {
                if (to) memset(to + used, 0, (size_t)(begin - used));
                if (to) memcpy(to + begin, body + array->at, (size_t)nbytes);
                used = begin + nbytes;
            }
            if (to) array->at = nbytes ? begin : 0;
        }
    return used;
}

/* ------------------------------------------------------------------ checks of tables from elsewhere, before they are used */

/* Whether an array lies in a body of so many bytes, from a multiple of `align` on; one without numbers lies anywhere. */
static int holds(const Array *array, i64 nbytes, i64 align) {
    int known = array->size == 1 || array->size == 2 || array->size == 4 || array->size == 8;
    return known && array->at >= 0 && array->at <= nbytes && array->count >= 0 && array->count <= (nbytes - array->at) / array->size &&
           (array->at % align == 0 || !array->count);
}

static int of_each(const Array *array, i64 count) { return array->count == count || (array->count == 1 && count > 1); }

/* Whether a layout lies in its body and can be read: spans that rise without touching each other, within the width.
   `spans` [index + 1] are counted; a PART may have as many as its parent, and `most` in all are too many. */
static int check_layout(const Stored *all, i64 index, const u8 *body, i64 nbytes, i64 rows, i64 most, i64 *spans) {
    const Stored *stored = all + index;
    i64 first = 0, empty = !stored->b.count && !stored->c.count;
    if (stored->width < 0 || stored->width >= (i64)1 << 31 || stored->anchor < 0 || stored->anchor > stored->width) return 0;
    if (!holds(&stored->a, nbytes, 8) || !holds(&stored->b, nbytes, 8) || !holds(&stored->c, nbytes, 8)) return 0;
    if (stored->kind == PART) {
        if (stored->parent < 0 || stored->parent >= index || !empty || stored->a.count) return 0;
        spans[index] = spans[stored->parent];
        return spans[index] <= most && stored->low >= 0 && stored->low <= all[stored->parent].width - stored->width;
    }
    if (stored->parent || stored->low) return 0;
    if (stored->kind == MASK) {
        if (stored->a.size != 1 || stored->a.count != mask_bytes(stored, rows) || !empty) return 0;
        for (i64 row = 0; row < rows; row++) first += spans_of_row(stored, body, row, 0, NULL, NULL, 0);
        spans[index] = first;
        return first <= most;
    }
    if (stored->kind != SPANS || !of_each(&stored->c, rows)) return 0;
    for (i64 row = 0; row < rows; row++) {
        i64 n = number_at(body, &stored->c, row), end = -1;
        if (n < 0 || n > most - first) return 0;
        if ((stored->a.count != 1 && first + n > stored->a.count) || (stored->b.count != 1 && first + n > stored->b.count)) return 0;
        if (n && (!stored->a.count || !stored->b.count)) return 0;
        for (i64 i = first; i < first + n; i++) {
            i64 start = number_at(body, &stored->a, i), count = number_at(body, &stored->b, i);
            if (start <= end || start > stored->width || count < 1 || count > stored->width - start) return 0;
            end = start + count;
        }
        first += n;
    }
    spans[index] = first;
    return of_each(&stored->a, first) && of_each(&stored->b, first);
}

/* Checks layouts, of `most` spans at most. Returns 0, or 1 + the first one that cannot be read. */
API i64 maskpack_check_layouts(const Stored *stored, i64 m, const u8 *body, i64 nbytes, i64 rows, i64 most) {
    i64 *spans = calloc((size_t)m + 1, sizeof(i64)), bad = spans ? 0 : 1;
    for (i64 at = 0; at < m && !bad; at++) {
        if (!check_layout(stored, at, body, nbytes, rows, most, spans)) bad = at + 1;
        most -= spans[at];
    }
    free(spans);
    return bad;
}

enum { MOST_STEPS = 8 };                    /* from a field to fields that it is near to, or that it is put together from */
enum { INSIDE = 1, CHECKED = 2, COLUMN = 4 }; /* INSIDE: the stored rows of a dictionary. CHECKED: for bytes other than 0 and 1 */

typedef struct {
    const Table *table;
    i64 nbytes, num_layouts, dense_rows;
    i64 left;          /* bytes left for rows of dictionaries beyond those of their fields */
    u8 *marks, *steps; /* of each entry */
    i64 align;         /* of arrays; 1 for those of rows that were taken in place */
} Check;

/* Elements of a row; `lengths` has those of the stored rows of a dictionary. */
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

/* Counts the steps to an entry that another one refers to, which comes after it; false if it must not. */
static int refers(Check *check, i64 index, i64 other, i64 steps) {
    if (check->marks[other] & INSIDE || check->table->entries[other].kind == CONCAT || check->steps[other] + steps > MOST_STEPS) return 0;
    if (check->steps[other] + steps > check->steps[index]) check->steps[index] = (u8)(check->steps[other] + steps);
    return 1;
}

static int check_blocks(const Check *check, const Entry *entry, const Array *lengths, i64 rows) {
    const u8 *body = check->table->body;
    i64 block = 0, numbers = 0;
    if (!entry->items) rows = 0;
    for (i64 row = 0; row < rows; row++) {
        i64 n = row_elements(check->table, entry, lengths, row) * entry->items;
        for (i64 at = 0; at < n; at += BLOCK, block++) {
            i64 width = number_at(body, &entry->a, block);
            if ((width & ~NEAR) > 32 || (width & NEAR && entry->second < 0)) return 0;
            numbers += block_numbers(n - at < BLOCK ? n - at : BLOCK, width & ~NEAR);
        }
    }
    return numbers == entry->c.count;
}

static int check_stretches(const Check *check, const Entry *entry, const Array *lengths, i64 rows) {
    const u8 *body = check->table->body;
    i64 counts = 0, values = 0, times = 1;
    if (!of_each(&entry->a, rows) || entry->c.size > entry->size) return 0;
    if (rows > 1 && entry->a.count == 1 && entry->b.count <= 1 && alike(entry, lengths)) { /* all rows say the same */
        times = rows;
        rows = 1;
    }
    for (i64 row = 0; row < rows; row++) {
        i64 left = row_elements(check->table, entry, lengths, row) * entry->items, n = number_at(body, &entry->a, row);
        if (n < 0 || n > left || (left && !n)) return 0;
        if ((entry->b.count != 1 && n > 1 && counts + n - 1 > entry->b.count) || (n > 1 && !entry->b.count)) return 0;
        if (n > 1 && entry->b.count == 1) {
            i64 count = number_at(body, &entry->b, 0);
            if (count < 1 || count > (left - 1) / (n - 1)) return 0;
        } else
            for (i64 i = 0; i < n - 1; i++) {
                i64 count = number_at(body, &entry->b, counts + i);
                if (count < 1 || count >= left) return 0;
                left -= count;
            }
        counts += n > 1 ? n - 1 : 0;
        values += n;
    }
    return of_each(&entry->b, counts * times) && of_each(&entry->c, values * times);
}

static int check_sparse(const Check *check, const Entry *entry, const Array *lengths, i64 rows) {
    const u8 *body = check->table->body;
    i64 at = 0;
    if (!of_each(&entry->a, rows) || entry->c.size != entry->size || entry->b.count != entry->c.count) return 0;
    if (rows && entry->a.count == 1 && !number_at(body, &entry->a, 0)) return !entry->b.count;
    for (i64 row = 0; row < rows; row++) {
        i64 n = row_elements(check->table, entry, lengths, row) * entry->items, count = number_at(body, &entry->a, row), before = -1;
        if (count < 0 || count > entry->b.count - at) return 0;
        for (; count > 0; count--, at++) {
            i64 place = number_at(body, &entry->b, at);
            if (place <= before || place >= n) return 0;
            before = place;
        }
    }
    return at == entry->b.count;
}

static int check_entry(Check *check, i64 index, const Array *lengths, i64 rows);

/* The rows that a dictionary stores. */
static i64 count_stored(const u8 *body, const Entry *entry, i64 rows) {
    i64 stored = 0;
    for (i64 row = 0; row < rows && row < entry->a.count; row++) {
        i64 number = cut_to(stored_row(body, entry, row), MANY);
        stored = number + 1 > stored ? number + 1 : stored;
    }
    return stored;
}

static int check_dictionary(Check *check, i64 index, i64 rows) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *inner = table->entries + entry->first;
    const u8 *body = table->body;
    i64 element = entry->items ? entry->items * entry->size : 1, spare = 0, most = most_stored(table->entries, entry, rows);
    if (rows != table->rows || !of_each(&entry->a, rows) || entry->number < 0) return 0;
    for (i64 row = 0; row < rows && row < entry->a.count; row++) {
        i64 number = stored_row(body, entry, row);
        if (number_at(body, &entry->a, row) < entry->number || number >= (entry->a.count == 1 ? 1 : most)) return 0; /* or 2^63 and more */
    }
    most = count_stored(body, entry, rows);
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
    return check_entry(check, entry->first, &entry->b, most);
}

/* Whether each row of CONCAT has as many words as the two that it is put together from. */
static int check_sums(const Check *check, const Entry *entry, const Entry *a, const Entry *b, i64 rows) {
    const Table *table = check->table;
    if (rows_of(check, a) != rows || rows_of(check, b) != rows) return 0;
    if (alike(entry, NULL) && alike(a, NULL) && alike(b, NULL) && rows > 1) rows = 1;
    for (i64 row = 0; row < rows; row++) {
        i64 sum = row_elements(table, a, NULL, row) * a->items + row_elements(table, b, NULL, row) * b->items;
        if (sum != row_elements(table, entry, NULL, row) * entry->items) return 0;
    }
    return 1;
}

/* Whether an entry can be decoded: every number is in its range, every array as long as its rows say. `lengths` are those of
   stored rows of a dictionary. */
static int check_entry(Check *check, i64 index, const Array *lengths, i64 rows) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index, *entries = table->entries, *a = NULL, *b = NULL;
    i64 size = entry->size, total = 0, blocks = 0;
    int has_a = entry->a.count > 0, has_b = entry->b.count > 0, has_c = entry->c.count > 0;
    if (entry->items < 0 || entry->items > (i64)1 << 40 || (size != 1 && size != 2 && size != 4 && size != 8)) return 0;
    for (const Array *array = &entry->a; array <= &entry->c; array++)
        if (!holds(array, check->nbytes, check->align)) return 0;
    if ((total = count_pieces(table, entry, lengths, rows, 1)) < 0) return 0;
    switch (entry->kind) {
    case PLAIN: return entry->a.size == size && entry->a.count == total && !has_b && !has_c;
    case NARROW: return entry->a.size < size && entry->a.count == total && !has_b && !has_c;
    case BITMAP:
        if (entry->a.size != 1 || entry->a.count != count_pieces(table, entry, lengths, rows, 8)) return 0;
        return entry->b.size == size && entry->b.count == 2 && !has_c;
    case RLE:
    case DELTA: return check_stretches(check, entry, lengths, rows);
    case ARANGE: return entry->a.size <= size && of_each(&entry->a, rows) && !has_b && !has_c;
    case SPARSE: return check_sparse(check, entry, lengths, rows);
    case BLOCKS:
        blocks = count_pieces(table, entry, lengths, rows, BLOCK);
        if (entry->a.size != 1 || entry->a.count != blocks || entry->b.size != size || entry->b.count != blocks || entry->c.size != 4) return 0;
        if (entry->second >= 0) {
            if (!refers(check, index, entry->second, 1)) return 0;
            a = entries + entry->second;
            if (a->layout != entry->layout || a->items != entry->items || a->size != size) return 0;
        }
        return check_blocks(check, entry, lengths, rows);
    case DICTIONARY: return !has_c && check_dictionary(check, index, rows);
    case COLUMNS:
        if (has_a || has_b || has_c || !entry->items || entry->items % entry->second) return 0;
        for (i64 column = 0; column < entry->second; column++) {
            if (!refers(check, index, entry->first + column, 0)) return 0;
            a = entries + entry->first + column;
            if (a->layout != entry->layout || a->size != size || a->items != entry->items / entry->second) return 0;
            if (a->kind >= DICTIONARY || (a->kind == BLOCKS && a->second >= 0)) return 0;
        }
        return 1;
    case CONCAT:
        if (has_a || has_b || has_c || !refers(check, index, entry->first, 1) || !refers(check, index, entry->second, 1)) return 0;
        a = entries + entry->first;
        b = entries + entry->second;
        return a->size == size && b->size == size && check_sums(check, entry, a, b, rows);
    default: return 0;
    }
}

/* Whether an entry refers to entries before it as its kind does, and to no other. */
static int check_references(const Entry *entry, i64 index) {
    i64 first = entry->first, second = entry->second;
    switch (entry->kind) {
    case BLOCKS: return first == -1 && second >= -1 && second < index;
    case DICTIONARY: return first >= 0 && first < index && second == -1;
    case COLUMNS: return first >= 0 && second >= 1 && second <= index - first;
    case CONCAT: return first >= 0 && first < index && second >= 0 && second < index;
    default: return first == -1 && second == -1;
    }
}

/* Whether each entry is a field, or one that another refers to; `needed` are marks, 0 so far. */
static int all_needed(const Entry *entries, i64 n, const i64 *fields, i64 num_fields, u8 *needed) {
    for (i64 field = 0; field < num_fields; field++) needed[fields[field]] = 1;
    for (i64 at = n - 1; at >= 0; at--) {
        const Entry *entry = entries + at;
        if (!needed[at]) return 0;
        if (entry->kind == COLUMNS) memset(needed + entry->first, 1, (size_t)entry->second);
        else if (entry->first >= 0) needed[entry->first] = 1;
        if (entry->kind != COLUMNS && entry->second >= 0) needed[entry->second] = 1;
    }
    return 1;
}

/* Whether the references of all entries are as they should be; else the first that is not is `bad`. */
static int check_all_references(Check *check, i64 n, i64 *bad) {
    const Entry *entries = check->table->entries;
    for (*bad = 0; *bad < n; ++*bad) {
        const Entry *entry = entries + *bad;
        if (entry->layout < -1 || entry->layout >= check->num_layouts || !check_references(entry, *bad)) return 0;
        for (i64 i = 0; entry->kind == COLUMNS && i < entry->second; i++) { /* of one alone, or all may have all of them */
            if (check->marks[entry->first + i] & COLUMN) return 0;
            check->marks[entry->first + i] |= COLUMN;
        }
        if (entry->kind != DICTIONARY) continue;
        const Entry *inner = entries + entry->first;
        if (check->marks[entry->first] & INSIDE || inner->kind < 0 || inner->kind >= DICTIONARY) return 0;
        if (inner->kind == BLOCKS && inner->second >= 0) return 0;
        check->marks[entry->first] |= INSIDE;
    }
    return 1;
}

/* Whether all entries can be decoded; else the first that cannot is `bad`. */
static int check_entries(Check *check, i64 n, i64 *bad) {
    const Entry *entries = check->table->entries;
    for (*bad = 0; *bad < n; ++*bad)
        if (!(check->marks[*bad] & INSIDE) && !check_entry(check, *bad, NULL, rows_of(check, entries + *bad))) return 0;
    return 1;
}

/* Whether a field of bytes, which was checked, has values other than 0 and 1. What rises by equal steps leaves 0 and 1 within
   three words, so stretches are looked at where they begin. */
static int is_odd(const Check *check, i64 index, const Array *lengths, i64 rows) {
    const Table *table = check->table;
    const Entry *entry = table->entries + index;
    const u8 *body = table->body;
    u8 words[BLOCK], any = 0;
    if (check->marks[index] & CHECKED) return 0; /* or it was refused */
    check->marks[index] |= CHECKED;
    if (entry->kind == CONCAT) return is_odd(check, entry->first, NULL, rows) || is_odd(check, entry->second, NULL, rows);
    if (entry->kind == COLUMNS) {
        for (i64 column = 0; column < entry->second; column++)
            if (is_odd(check, entry->first + column, NULL, rows)) return 1;
        return 0;
    }
    if (entry->kind == DICTIONARY) return is_odd(check, entry->first, &entry->b, count_stored(body, entry, rows));
    const Array *array = entry->kind == BITMAP ? &entry->b : entry->kind == SPARSE || entry->kind == RLE ? &entry->c : &entry->a;
    if (entry->kind == PLAIN || entry->kind == BITMAP || entry->kind == SPARSE || entry->kind == RLE) {
        for (i64 i = 0; i < array->count; i++) any |= body[array->at + i];
        return any > 1;
    }
    if (entry->kind == BLOCKS && entry->second >= 0) return 1; /* distances between bools are not written */
    if (alike(entry, lengths) && entry->a.count <= 1 && entry->b.count <= 1 && entry->c.count <= 1 && rows > 1) rows = 1;
    i64 counts = 0, values = 0;
    Cursor blocks = cursor_of(table, index, NULL);
    for (i64 row = 0; row < rows; row++) {
        i64 n = row_elements(table, entry, lengths, row) * entry->items;
        if (entry->kind == ARANGE) {
            decode_range(words, n < 3 ? n : 3, signed_at(body, &entry->a, row), entry->number, 1);
            for (i64 i = 0; i < n && i < 3; i++) any |= words[i];
        } else if (entry->kind == DELTA) {
            u8 word = 0;
            for (i64 left = cut_to(number_at(body, &entry->a, row), n); left > 0; left--) {
                i64 count = left > 1 ? cut_to(number_at(body, &entry->b, counts++), n) : n, step = signed_at(body, &entry->c, values++);
                for (i64 i = 1; i <= count && i <= 3; i++) any |= (u8)(word + (u8)(i * step));
                word = (u8)(word + (u8)((u64)count * (u64)step));
                any |= word;
                n -= count;
            }
        } else
            for (i64 at = 0; at < n; at += BLOCK) {
                u32 unpacked[BLOCK];
                i64 count = n - at < BLOCK ? n - at : BLOCK;
                Block block = next_block(&blocks, count);
                unpack_block(blocks.loops, block.from, count, block.bits, unpacked);
                blocks.loops->add_least(1, unpacked, block.base, count, words);
                for (i64 i = 0; i < count; i++) any |= words[i];
            }
    }
    return any > 1;
}

/* Checks the fields of a table whose layouts were checked and read: `fields` are entries that are there, `bools` [num_fields]
   says which may hold only 0 and 1; NULL for rows that may be taken in place, of a table that was checked before. Rows of dictionaries
   may take `most` bytes more than the rows that they stand for. Returns 0, or 1 + the first field that cannot be decoded
   (1 + num_fields for an entry that no field needs), or -1 - the first one of other bytes. */
API i64 maskpack_check_fields(const Entry *entries, i64 n, const Layout *layouts, i64 m, const u8 *body, i64 nbytes, i64 rows,
                              i64 dense_rows, i64 most, const i64 *fields, i64 num_fields, const i64 *bools) {
    Table table = {entries, layouts, body, rows, dense_rows, NULL};
    u8 *marks = calloc((size_t)n + 1, 3);
    Check check = {&table, nbytes, m, dense_rows, most, marks, marks + n + 1, bools ? 8 : 1};
    i64 bad = 0, found = marks ? 0 : 1;
    int fine = !found && check_all_references(&check, n, &bad);
    /* before the rows of the entries are looked at: those of the fields are as many as the fields claim */
    if (fine && bools && !all_needed(entries, n, fields, num_fields, marks + 2 * (n + 1))) found = num_fields + 1;
    if (!found && !(fine && check_entries(&check, n, &bad))) {
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
        else if (bools && bools[field] && (entries[index].size != 1 || is_odd(&check, index, NULL, own))) found = -1 - field;
    }
    free(marks);
    return found;
}

/* ------------------------------------------------------------------ prefixes: rows in the order of a trie */

/* Rows [rows] of token ids, with `items` numbers beside each: tokens are equal if both are. */
typedef struct {
    const i64 *ids, *beside, *bounds;
    i64 items;
} Tokens;

typedef struct {
    i64 row, key; /* sorted by the key, then by the row */
} Ranked;

/* Rows [low, high) of the order, which share their first `depth` tokens. */
typedef struct {
    i64 low, high, depth;
} Bunch;

static i64 equal_numbers(const i64 *one, const i64 *other, i64 n) {
    i64 at = 0;
    for (; at + 32 <= n; at += 32) {
        i64 differing = 0;
        for (i64 i = at; i < at + 32; i++) differing |= one[i] ^ other[i];
        if (differing) break;
    }
    while (at < n && one[at] == other[at]) at++;
    return at;
}

static i64 tokens_of(const Tokens *tokens, i64 row) { return tokens->bounds[row + 1] - tokens->bounds[row]; }

/* A number that is the same for equal tokens. */
static i64 token_key(const Tokens *tokens, i64 token) {
    u64 key = (u64)tokens->ids[token];
    for (i64 i = 0; i < tokens->items; i++) key = key * 0x9E3779B97F4A7C15u + (u64)tokens->beside[token * tokens->items + i];
    return (i64)key;
}

/* The number of tokens that two rows share, from their first; `depth` are known to be equal. */
static i64 shared_tokens(const Tokens *tokens, i64 row, i64 other, i64 depth) {
    i64 a = tokens->bounds[row] + depth, b = tokens->bounds[other] + depth, items = tokens->items;
    i64 n = tokens_of(tokens, row) < tokens_of(tokens, other) ? tokens_of(tokens, row) : tokens_of(tokens, other);
    n = equal_numbers(tokens->ids + a, tokens->ids + b, n - depth);
    if (items) n = equal_numbers(tokens->beside + a * items, tokens->beside + b * items, n * items) / items;
    return depth + n;
}

static int compare_ranked(const void *one, const void *other) {
    const Ranked *a = one, *b = other;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

static void sort_ranked(Ranked *rows, i64 n) { qsort(rows, (size_t)n, sizeof *rows, compare_ranked); }

/* Orders rows whose first tokens after `depth` have one key: the first row, then those that share most with it, and so on.
   Those that share equally many are a bunch of their own. Returns the number of bunches. */
static i64 order_alike(const Tokens *tokens, Ranked *rows, i64 n, i64 depth, i64 low, i64 *shared, Bunch *bunches) {
    i64 count = 0;
    for (i64 i = 1; i < n; i++) rows[i].key = -shared_tokens(tokens, rows[i].row, rows[0].row, depth);
    sort_ranked(rows + 1, n - 1);
    for (i64 from = 1, to; from < n; from = to) {
        for (to = from + 1; to < n && rows[to].key == rows[from].key; to++) {}
        shared[from] = -rows[from].key;
        if (to > from + 1) bunches[count++] = (Bunch){low + from, low + to, shared[from]};
    }
    return count;
}

/* Orders a bunch: rows without further tokens, then those with one key of a token, one set after the other by their first rows.
   Writes how many tokens each shares with the row before. Returns the number of bunches that are left to be ordered. */
static i64 order_bunch(const Tokens *tokens, Ranked *rows, Bunch bunch, i64 *shared, Bunch *bunches) {
    i64 ended = 0, n = bunch.high - bunch.low, count = 0, depth = bunch.depth;
    Ranked *own = rows + bunch.low;
    shared += bunch.low;
    for (i64 i = 0; i < n; i++) own[i].key = tokens_of(tokens, own[i].row) > depth; /* rows without tokens first */
    sort_ranked(own, n);
    while (ended < n && !own[ended].key) ended++;
    for (i64 i = ended; i < n; i++) own[i].key = token_key(tokens, tokens->bounds[own[i].row] + depth);
    sort_ranked(own + ended, n - ended);
    for (i64 from = ended, to; from < n; from = to) {
        i64 key = own[from].key, first = own[from].row;
        for (to = from; to < n && own[to].key == key; to++) own[to].key = first;
    }
    sort_ranked(own + ended, n - ended);
    for (i64 i = 1; i < n; i++) shared[i] = depth;
    for (i64 from = ended, to; from < n; from = to) {
        i64 first = own[from].key;
        for (to = from + 1; to < n && own[to].key == first; to++) {}
        count += order_alike(tokens, own + from, to - from, depth, bunch.low + from, shared + from, bunches + count);
    }
    return count;
}

/* Orders rows so that those with a common prefix are next to each other, at every depth: `order` and `shared` [rows], the
   number of tokens that each shares with the row before. Returns -1 without memory. */
API i64 maskpack_order_prefixes(const i64 *ids, const i64 *beside, i64 items, const i64 *bounds, i64 rows, i64 *order, i64 *shared) {
    Tokens tokens = {ids, beside, bounds, items};
    Ranked *ranked = malloc((size_t)(rows + 1) * sizeof *ranked);
    Bunch *bunches = malloc((size_t)(rows + 1) * sizeof *bunches); /* each has two rows, so there are never more */
    i64 left = 0, fine = ranked && bunches;
    if (fine) {
        for (i64 row = 0; row < rows; row++) ranked[row].row = row;
        if (rows) shared[0] = 0;
        if (rows > 1) bunches[left++] = (Bunch){0, rows, 0};
        while (left) {
            Bunch bunch = bunches[--left];
            left += order_bunch(&tokens, ranked, bunch, shared, bunches + left);
        }
        for (i64 i = 0; i < rows; i++) order[i] = ranked[i].row;
    }
    free(ranked);
    free(bunches);
    return fine ? 0 : -1;
}

/* ------------------------------------------------------------------ palettes: words as numbers of the distinct ones */

enum { MOST_COLOURS = 1 << 16, SLOTS = 2 * MOST_COLOURS };

/* Writes the number of each word of 4 bytes among the distinct ones, which go to `palette` [MOST_COLOURS] in the order of
   their first appearance. Returns how many there are: -1 if more than fit into 2 bytes, -2 without memory. */
API i64 maskpack_palette(const u32 *words, i64 n, uint16_t *numbers, u32 *palette) {
    i64 count = 0;
    u32 *slots = calloc(SLOTS, sizeof *slots); /* 1 + the number of the word that lies there; 0 for none */
    if (!slots) return -2;
    for (i64 i = 0; i < n; i++) {
        if (i && words[i] == words[i - 1]) {
            numbers[i] = numbers[i - 1];
            continue;
        }
        u32 at = (words[i] * 2654435761u) >> 15; /* the highest bits of the product, as many as number the slots */
        while (slots[at] && palette[slots[at] - 1] != words[i]) at = (at + 1) & (SLOTS - 1);
        if (!slots[at]) {
            if (count == MOST_COLOURS) {
                free(slots);
                return -1;
            }
            palette[count++] = words[i];
            slots[at] = (u32)count;
        }
        numbers[i] = (uint16_t)(slots[at] - 1);
    }
    free(slots);
    return count;
}

/* ------------------------------------------------------------------ sizes, which native.py compares with its own */

API i64 maskpack_size(i64 number) {
    static const i64 sizes[] = {
        sizeof(Array), sizeof(Field), sizeof(Entry), sizeof(Target), sizeof(Form), sizeof(Job), sizeof(Settled),
        sizeof(Stored), sizeof(Layout), sizeof(Axis), sizeof(Source), sizeof(Mask), sizeof(Cut),
    };
    return sizes[number];
}
