/* Fields to padded or packed tensors. */

typedef struct {
    const Target *targets;
    Part *parts;
    i64 stream, failed;
} Decode;

/* Decodes the row at the cursor to row `to` of a padded field, with the pads of a record; `scratch` has room for it. */
static void decode_padded(Cursor *cursor, const Field *field, const Layout *layout, i64 to, const u8 *record, u8 *scratch, i64 stream) {
    i64 first = layout->splits[to], lies = field->outer == 1 && layout->splits[to + 1] - first == 1;
    u8 *out = lies ? field->padded + to * field->row_stride + layout->starts[first] * field->items * field->size : scratch;
    row_decode(cursor, out);
    write_row(field, layout, to, record, lies ? NULL : scratch, stream);
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
    int fine = cursor_open(&cursor, part, target->entry);
    if (fine && target->padded) fine = (scratch = malloc((size_t)(longest_row(&cursor) * entry->size + 8))) != NULL;
    for (i64 i = 0; fine && i < part->count; i++) {
        i64 to = part->places ? part->places[i] : i, from = part->taken ? part->taken[i] : i;
        if (part->taken) row_seek(&cursor, part->taken[i]);
        if (part->done) part->now = to;
        const u8 *record = field->pads + from * field->pads_step;
        if (target->padded) decode_padded(&cursor, field, part->out + field->layout, to, record, scratch, decode->stream);
        else row_decode(&cursor, packed_row(part, field, to));
    }
    cursor_close(&cursor);
    free(scratch);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    if (!fine) __atomic_store_n(&decode->failed, 1, __ATOMIC_RELAXED);
    else if (part->done) part->done[target->entry] = target;
}

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
