/* The compiled core of maskpack: one pass over memory for each thing that is done to a batch.

   scan      a mask to its spans
   read      padded fields to packed values; every pad is verified on the way
   write     packed values to padded fields

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

API i64 maskpack_version(void) { return 1; } /* native.py expects this number */

/* ------------------------------------------------------------------ words */

enum { AHEAD = 3072, MOST_THREADS = 64 }; /* bytes to prefetch ahead of a read */

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

static u64 word_at(const u8 *p, i64 size) {
    u64 word = 0;
    memcpy(&word, p, size < 8 ? (size_t)size : 8);
    return word;
}

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

enum { NO_PAD, CONSTANT, EDGE, PER_ROW, SIGNED_ZERO }; /* NO_PAD: neither verified nor written */

/* The spans of rows: starts and counts of each, splits [rows + 1] into them, bounds [rows + 1] into packed tokens. */
typedef struct {
    i64 rows, width;
    const i64 *starts, *counts, *splits, *bounds;
} Layout;

/* A padded field and its packed values. `pad` is the word of a constant pad; `row_pads` has a word for each row, which
   `read` writes and `write` reads. `read` sets `stray` to 1 + the first row with another value under the mask; a value
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
    if (place < layout->width) memcpy(word, field->padded + row * field->row_stride + place * field->items * size, (size_t)size);
    if (field->mode == SIGNED_ZERO && (word_at(word, size) & ~(1ull << (8 * size - 1)))) memset(word, 0, 16);
    memcpy(field->row_pads + row * size, word, (size_t)size);
    return repeated(word, size);
}

/* Verifies the pads of a row and gathers its values to `values`, unless that is NULL; returns whether every masked-out
   element is its pad. */
static int read_row(Field *field, const Layout *layout, i64 row, u8 *values) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    Pattern pad = repeated((const u8 *)field->pad, size);
    if (field->mode >= PER_ROW) pad = pad_of_row(field, layout, row);
    for (i64 slice = 0; slice < field->outer; slice++) {
        const u8 *from = field->padded + row * field->row_stride + slice * field->outer_stride;
        u8 *to = values ? values + slice * element : NULL;
        const u8 *edge = first < last ? from + layout->starts[first] * element : NULL;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width, masked = (stop - at) * element;
            if (field->mode == EDGE && edge) {
                if (!equal_elements(from + at * element, stop - at, edge, items, size)) return 0;
            } else if (field->mode == EDGE) {
                if (equal_bytes(from + at * element, masked, ZEROS) < masked) return 0;
            } else if (field->mode && equal_bytes(from + at * element, masked, pad) < masked) return 0;
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

static void write_row(const Field *field, const Layout *layout, i64 row, i64 stream) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    Pattern pad = repeated(field->mode >= PER_ROW ? field->row_pads + row * size : (const u8 *)field->pad, size);
    for (i64 slice = 0; slice < field->outer; slice++) {
        u8 *to = field->padded + row * field->row_stride + slice * field->outer_stride;
        const u8 *from = field->packed + layout->bounds[row] * step + slice * element;
        const u8 *edge = first < last ? from : NULL;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width;
            if (field->mode == EDGE && edge && items > 1)
                for (; at < stop; at++) memcpy(to + at * element, edge, (size_t)element);
            else if (field->mode)
                fill(to + at * element, (stop - at) * element, field->mode != EDGE ? pad : edge ? repeated(edge, size) : ZEROS, stream);
            if (span == last) break;
            i64 n = layout->counts[span];
            copy_apart(to + stop * element, element, from, step, n, element);
            from += n * step;
            at = stop + n;
            edge = from - step;
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
    for (i64 row = rows[1]; row < rows[2]; row++) write_row(field, pass->layouts + field->layout, row, pass->stream);
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
