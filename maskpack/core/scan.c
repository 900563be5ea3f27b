/* A mask to its spans. */

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
   `scan->found` keeps a RowScan each. Returns whether all valid words are equal and all other bits 0. */
static int count_all(Scan *scan, i64 *splits, i64 *bounds, i64 threads) {
    run_tasks(count_spans, scan, (scan->rows + scan->rows_a_task - 1) / scan->rows_a_task, threads);
    u64 value = 0;
    i64 seen = 0, equal = 1;
    splits[0] = bounds[0] = 0;
    for (i64 row = 0; row < scan->rows; row++) {
        const RowScan *found = scan->found + row;
        splits[row + 1] = splits[row] + found->spans;
        bounds[row + 1] = bounds[row] + found->tokens;
        equal &= found->alike && (!found->spans || !seen || found->value == value);
        if (found->spans) {
            value = found->value;
            seen = 1;
        }
    }
    return equal && seen;
}
