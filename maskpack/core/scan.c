/* A mask to its spans. */

/* A mask that is scanned in `parts` tasks: what is found in each row, and its layout. */
typedef struct {
    const Origin *mask;
    RowScan *found;
    const Layout *layout;
    i64 parts;
} Scan;

/* Lists the spans of a row, at most `room` of them; a word is valid if it has one of the significant bits. */
static void scan_row(const Origin *mask, i64 row, RowScan *found, i64 *starts, i64 *counts, i64 room) {
    const u8 *words = (const u8 *)mask->at + row * mask->row_stride;
    i64 size = mask->size, width = mask->width, at = 0;
    *found = (RowScan){.alike = 1};
    while ((at += equal_bytes(words + at * size, (width - at) * size, ZEROS) / size) < width) {
        u64 word = word_at(words + at * size, size);
        i64 start = at;
        if (!(word & mask->significant)) { /* -0.0 */
            found->alike = 0;
            at++;
            continue;
        }
        if (!found->spans) found->value = word;
        for (; at < width && (word = word_at(words + at * size, size)) & mask->significant;) {
            found->alike &= word == found->value;
            at += equal_bytes(words + at * size, (width - at) * size, repeated((const u8 *)&word, size)) / size;
        }
        if (found->spans < room) {
            starts[found->spans] = start;
            counts[found->spans] = at - start;
        }
        found->spans++;
        found->tokens += at - start;
    }
}

static void count_spans(void *context, i64 part) {
    const Scan *scan = context;
    i64 rows = scan->mask->rows, end = first_row(rows, part + 1, scan->parts);
    for (i64 row = first_row(rows, part, scan->parts); row < end; row++) {
        RowScan *found = scan->found + row;
        scan_row(scan->mask, row, found, found->starts, found->counts, FEW_SPANS);
    }
}

static void list_spans(void *context, i64 part) {
    const Scan *scan = context;
    i64 rows = scan->mask->rows, end = first_row(rows, part + 1, scan->parts);
    for (i64 row = first_row(rows, part, scan->parts); row < end; row++) {
        const RowScan *found = scan->found + row;
        RowScan again;
        i64 first = scan->layout->splits[row];
        i64 *starts = (i64 *)scan->layout->starts + first, *counts = (i64 *)scan->layout->counts + first;
        if (found->spans > FEW_SPANS) scan_row(scan->mask, row, &again, starts, counts, found->spans);
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
    run_tasks(count_spans, scan, scan->parts, threads);
    const RowScan *first = NULL; /* with a valid word */
    int equal = 1;
    splits[0] = bounds[0] = 0;
    for (i64 row = 0; row < scan->mask->rows; row++) {
        const RowScan *found = scan->found + row;
        splits[row + 1] = splits[row] + found->spans;
        bounds[row + 1] = bounds[row] + found->tokens;
        if (found->spans && !first) first = found;
        equal &= found->alike && (!found->spans || found->value == first->value);
    }
    return equal && first;
}
