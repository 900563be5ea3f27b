/* Padded fields to packed values, and back. */

/* What padded fields are read to, with pad number `pad` of each that has so many; `parts` tasks a field. */
typedef struct {
    Job *jobs;
    const Layout *layouts;
    i64 pad, parts;
} Reading;

typedef struct {
    const Field *fields;
    const Layout *layouts;
    i64 stream, parts;
} Writing;

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
    i64 at = field->is_expanded ? 0 : place * field->items * size;
    u8 word[16] = {0};
    if (place < layout->width && field->items && field->outer) memcpy(word, field->padded + row * field->row_stride + at, (size_t)size);
    if ((field->mode & ~TRUSTED) == BY_SIGN && (word_at(word, size) & ~(1ull << (8 * size - 1)))) memset(word, 0, 16);
    memcpy(field->pads + row * field->pads_step + 1, word, (size_t)size);
    return repeated(word, size);
}

/* Reads the signs of masked-out words, `step` bytes apart; returns whether all of them are zeros. */
static int read_signs(const u8 *words, i64 step, i64 from, i64 to, i64 size, u8 *bits) {
    u64 minus = 1ull << (8 * size - 1), others = 0;
    for (i64 at = from; at < to; at++) {
        u64 word = word_at(words + at * step, size);
        others |= word & ~minus;
        bits[at >> 3] |= (u8)((word >> (8 * size - 1)) << (7 - (at & 7)));
    }
    return !others;
}

/* Writes -0.0 where one of `n` bits is set, which are those of the places from `shift` on. */
static void write_signs(u8 *words, i64 from, i64 to, i64 size, const u8 *bits, i64 n, i64 shift) {
    for (i64 at = from < shift ? shift : from; at < to && at - shift < n; at++) {
        if (!(bits[(at - shift) >> 3] << ((at - shift) & 7) & 0x80)) continue;
        memset(words + at * size, 0, (size_t)size);
        words[(at + 1) * size - 1] = 0x80;
    }
}

/* Verifies the pads of a row and gathers its values to `values`, unless that is NULL; returns whether every masked-out
   element is its pad. */
static int read_row(Field *field, const Layout *layout, i64 row, u8 *values) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 apart = field->is_expanded ? 0 : element; /* bytes from one position to the next */
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    Pattern pad = repeated((const u8 *)field->pad, size);
    i64 mode = field->mode & TRUSTED ? NO_PAD : field->mode;
    i64 by = field->mode & ~TRUSTED;
    u8 *record = by >= BY_ROW ? field->pads + row * field->pads_step : NULL, *signs = by == BY_SIGNS ? record + 1 + size : NULL;
    if (record) memset(record, 0, (size_t)field->pads_size);
    if (record && !signs) pad = pad_of_row(field, layout, row);
    if (!element) return 1; /* there may be no memory to point to */
    for (i64 slice = 0; slice < field->outer; slice++) {
        const u8 *from = field->padded + row * field->row_stride + slice * field->outer_stride;
        u8 *to = values ? values + slice * element : NULL;
        const u8 *edge = first < last ? from + layout->starts[first] * apart : NULL;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width, masked = apart ? stop - at : stop > at;
            const u8 *here = from + at * apart;
            if (signs) {
                if (!read_signs(from, apart, at, stop, size, signs) && mode) return 0;
            } else if (mode == BY_EDGE && edge) {
                if (!equal_elements(here, masked, edge, items, size)) return 0;
            } else if (mode && equal_bytes(here, masked * element, mode == BY_EDGE ? ZEROS : pad) < masked * element) return 0;
            if (span == last) break;
            i64 n = layout->counts[span];
            if (to) {
                copy_apart(to, step, from + stop * apart, apart, n, element);
                to += n * step;
            }
            at = stop + n;
            edge = from + (at - 1) * apart;
        }
    }
    return 1;
}

/* Writes what a record puts under the mask of a row, and its values unless they lie there already (NULL; `outer` is 1
   then). */
static void write_row(const Field *field, const Layout *layout, i64 row, const u8 *record, const u8 *values, i64 stream) {
    i64 size = field->size, items = field->items, element = items * size, step = field->outer * element;
    i64 first = layout->splits[row], last = layout->splits[row + 1];
    if (!element) return; /* there may be no memory to point to */
    i64 by_edge = record[0] == EDGE, signs = 8 * (field->pads_size - 1 - size);
    Pattern pad = by_edge ? ZEROS : repeated(record + 1, size);
    for (i64 slice = 0; slice < field->outer; slice++) {
        u8 *to = field->padded + row * field->row_stride + slice * field->outer_stride;
        const u8 *from = values ? values + slice * element : NULL, *edge = from;
        if (first == last) edge = NULL;
        else if (!values) edge = to + layout->starts[first] * element;
        i64 at = 0;
        for (i64 span = first; span <= last; span++) {
            i64 stop = span < last ? layout->starts[span] : layout->width;
            if (by_edge && edge && items > 1)
                for (; at < stop; at++) memcpy(to + at * element, edge, (size_t)element);
            else
                fill(to + at * element, (stop - at) * element, by_edge && edge ? repeated(edge, size) : pad, stream);
            if (signs > 0) write_signs(to, at, stop, size, record + 1 + size, signs, field->shift);
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

/* The pad that is looked for under a mask from now on. */
static void try_pad(Field *field, const Trial *pad, const Layout *layout) {
    field->mode = pad->mode;
    memcpy(field->pad, pad->pad, sizeof field->pad);
    field->pads_size = field->pads_step = 1 + field->size + ((pad->mode & ~TRUSTED) == BY_SIGNS ? (layout->width + 7) / 8 : 0);
}

static i64 elements_of(const Job *job, const Layout *layouts) {
    const Layout *layout = layouts + job->layout;
    return job->layout < 0 ? job->rows : layout->bounds[layout->rows];
}

static void read_task(void *context, i64 task) {
    const Reading *own = context;
    Job *job = own->jobs + task / own->parts;
    if (!job->padded || job->pad != own->pad) return;
    Field field = job->field;
    const Layout *layout = own->layouts + job->layout;
    i64 part = task % own->parts, end = first_row(layout->rows, part + 1, own->parts), step = field.outer * field.items * field.size;
    if (job->num_pads) try_pad(&field, job->pads + job->pad, layout);
    for (i64 row = first_row(layout->rows, part, own->parts); row < end; row++)
        if (!read_row(&field, layout, row, field.packed ? field.packed + layout->bounds[row] * step : NULL)) {
            __atomic_store_n(&job->result, STRAY, __ATOMIC_RELAXED);
            return;
        }
}

/* Gathers the packed values of padded fields and finds the first pad of each that is under its mask: `pad`, and `result` FITS
   or STRAY; without pads it is FITS. Bools, also packed ones, may be ODD. */
API void maskpack_read(Job *jobs, i64 n, const Layout *layouts, i64 threads) {
    Reading own = {jobs, layouts, 0, parts_for(threads)};
    for (i64 at = 0; at < n; at++) jobs[at].result = jobs[at].padded ? STRAY : FITS;
    for (i64 left = 1; left; own.pad++) {
        left = 0;
        for (i64 at = 0; at < n; at++) {
            Job *job = jobs + at;
            if (job->result != STRAY || (own.pad && own.pad >= job->num_pads)) continue;
            job->pad = own.pad;
            job->result = FITS;
            left++;
        }
        if (left) run_tasks(read_task, &own, n * own.parts, threads);
    }
    for (i64 at = 0; at < n; at++) {
        Job *job = jobs + at;
        if (job->result != FITS || !job->padded || !job->num_pads) job->pad = -1;
        if (job->result != FITS || job->integers != BOOLS || !job->field.packed) continue;
        if (are_odd(job->field.packed, job->items * elements_of(job, layouts))) job->result = ODD;
    }
}

static void write_task(void *context, i64 task) {
    const Writing *own = context;
    const Field *field = own->fields + task / own->parts;
    const Layout *layout = own->layouts + field->layout;
    i64 part = task % own->parts, end = first_row(layout->rows, part + 1, own->parts), step = field->outer * field->items * field->size;
    for (i64 row = first_row(layout->rows, part, own->parts); row < end; row++)
        write_row(field, layout, row, field->pads + row * field->pads_step, field->packed + layout->bounds[row] * step, own->stream);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* The inverse of `maskpack_read`. `stream`: whether pads are written past the cache. */
API void maskpack_write(const Field *fields, i64 num_fields, const Layout *layouts, i64 stream, i64 threads) {
    Writing own = {fields, layouts, stream, parts_for(threads)};
    run_tasks(write_task, &own, num_fields * own.parts, threads);
}
