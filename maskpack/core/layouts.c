/* The layouts of a table: stored, cut, read, checked. */

static i64 mask_bytes(const Stored *stored, i64 rows) { return rows * ((stored->width + 7) / 8); }

static void set_bits(u8 *bits, i64 start, i64 count) {
    i64 end = start + count;
    for (; start < end && start & 7; start++) bits[start >> 3] |= (u8)(1 << (start & 7));
    if (start < end) memset(bits + (start >> 3), 255, (size_t)((end - start) >> 3));
    for (start += (end - start) & ~(i64)7; start < end; start++) bits[start >> 3] |= (u8)(1 << (start & 7));
}

/* Writes the mask of a layout as bits, rows from a new byte on. */
API void maskpack_mask_bits(const Layout *layout, u8 *bits) {
    i64 nbytes = (layout->width + 7) / 8;
    memset(bits, 0, (size_t)(layout->rows * nbytes));
    for (i64 row = 0; row < layout->rows; row++)
        for (i64 span = layout->splits[row]; span < layout->splits[row + 1]; span++)
            set_bits(bits + row * nbytes, layout->starts[span], layout->counts[span]);
}

/* The first place from `at` on whose bit is set, or is not if `flip` is 255; the width if there is none. */
static i64 find_bit(const u8 *bits, i64 at, i64 width, u8 flip) {
    static const Pattern ONES = {~0ull, ~0ull};
    i64 byte = at >> 3, nbytes = (width + 7) / 8;
    if (at >= width) return width;
    u8 own = (u8)((bits[byte] ^ flip) >> (at & 7) << (at & 7));
    if (!own) {
        byte++;
        byte += equal_bytes(bits + byte, nbytes - byte, flip ? ONES : ZEROS);
        if (byte == nbytes) return width;
        own = bits[byte] ^ flip;
    }
    at = 8 * byte + __builtin_ctz(own);
    return at < width ? at : width;
}

/* The spans of a row of bits, at most `room` of them; how many there are. */
static i64 spans_of_bits(const u8 *bits, i64 width, i64 *starts, i64 *counts, i64 room) {
    i64 n = 0;
    for (i64 at = 0; n < room || !starts; n++) {
        i64 start = find_bit(bits, at, width, 0);
        if (start == width) break;
        at = find_bit(bits, start, width, 255);
        if (!starts) continue;
        starts[n] = start;
        counts[n] = at - start;
    }
    return n;
}

/* Stores layouts behind the first `used` bytes of a body; for AS_PART the caller has set `kind`, `parent` and `low`. Returns
   the bytes in use, -1 if there is no room for them. */
API i64 maskpack_store_layouts(Stored *stored, i64 n, const Layout *layouts, u8 *body, i64 used, i64 room) {
    Out out = {body, 0, used, room, 0};
    for (i64 at = 0; at < n; at++) {
        const Layout *layout = layouts + at;
        Stored *to = stored + at;
        to->width = layout->width;
        to->a = to->b = to->c = (Array){0, 1, 0};
        if (to->kind == AS_PART) continue;
        i64 spans = layout->splits[layout->rows], before = out.used;
        List each = {0};
        int fits = 1;
        for (i64 row = 0; row < layout->rows && fits; row++) fits = push(&each, layout->splits[row + 1] - layout->splits[row]);
        List starts = {(i64 *)layout->starts, spans, spans}, counts = {(i64 *)layout->counts, spans, spans};
        to->kind = AS_SPANS;
        fits = fits && put_numbers(&out, &to->a, &starts) && put_numbers(&out, &to->b, &counts) && put_numbers(&out, &to->c, &each);
        free(each.numbers);
        if (!fits || out.used - before > mask_bytes(to, layout->rows) + 256) {
            out.used = before;
            to->kind = AS_MASK;
            to->b = to->c = (Array){0, 1, 0};
            u8 *bits = reserve(&out, &to->a, 1, mask_bytes(to, layout->rows));
            if (!bits) return -1;
            maskpack_mask_bits(layout, bits);
        }
    }
    return out.used;
}

/* The spans of a row, at most `room` of them, that rise within the width; how many there are, or may be without `starts`. */
static i64 spans_of_row(const Stored *stored, const u8 *body, i64 row, i64 first, i64 *starts, i64 *counts, i64 room) {
    i64 n = 0;
    if (stored->kind == AS_SPANS) { /* those of a row differ in their starts */
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
    return spans_of_bits(body + stored->a.at + row * ((stored->width + 7) / 8), stored->width, starts, counts, room);
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

/* Reads a stored layout that is no AS_PART, in the same two steps; the second may find fewer spans than the first. */
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

/* ------------------------------------------------------------------ the layouts of a batch */

/* Memory of `room` numbers, of which `used` are taken, or would be if they were there. */
typedef struct {
    i64 *numbers, used, room;
} Arena;

/* A layout of rows with room for `spans` spans; false if there is none. */
static int new_layout(Arena *arena, Layout *out, i64 rows, i64 width, i64 spans) {
    i64 *line = arena->numbers + arena->used;
    *out = (Layout){rows, width, line, line + spans, line + 2 * spans, line + 2 * spans + rows + 1};
    arena->used += 2 * rows + 2 + 2 * spans;
    return arena->used <= arena->room;
}

/* The layout of a mask; the pads of a job that trusts it are verified unless its valid words are equal. */
static void scan_mask(Arena *arena, const Origin *mask, RowScan *found, Job *jobs, Layout *out, i64 threads) {
    i64 rows = mask->rows, *splits = (i64 *)(found + rows);
    Scan scan = {mask, found, out, parts_for(threads)};
    int alike = count_all(&scan, splits, splits + rows + 1, threads);
    for (i64 pad = 0; mask->trusts && !alike && pad < MOST_PADS; pad++) jobs[mask->trusts - 1].pads[pad].mode &= ~TRUSTED;
    if (!new_layout(arena, out, rows, mask->width, splits[rows])) return;
    memcpy((i64 *)out->splits, splits, sizeof(i64) * (size_t)(2 * rows + 2));
    run_tasks(list_spans, &scan, scan.parts, threads);
}

/* A layout of rows from position 0 on. `ends`: where each ends; or, if `offsets`, that of the rows before, too. */
static void lead_layout(Arena *arena, const i64 *ends, int offsets, i64 rows, i64 width, Layout *out) {
    if (!new_layout(arena, out, rows, width, rows)) return;
    i64 *splits = (i64 *)out->splits, *bounds = (i64 *)out->bounds;
    splits[0] = bounds[0] = 0;
    for (i64 row = 0; row < rows; row++) {
        i64 n = offsets ? ends[row + 1] - ends[row] : ends[row];
        ((i64 *)out->starts)[splits[row]] = 0;
        ((i64 *)out->counts)[splits[row]] = n;
        splits[row + 1] = splits[row] + (n > 0);
        bounds[row + 1] = bounds[row] + n;
        out->width = offsets && n > out->width ? n : out->width;
    }
}

/* Whether i64 [rows + 1] are the offsets of `limit` values or fewer. */
static int are_offsets(const i64 *offsets, i64 rows, i64 limit) {
    i64 fine = !offsets[0] && offsets[rows] <= limit;
    for (i64 row = 0; row < rows; row++) fine &= offsets[row] <= offsets[row + 1];
    return (int)fine;
}

/* Makes the layouts of a batch, [m]: those of its origins, and columns of them, in `memory` of `room` numbers. `found` is for
   the scan of a mask, sizeof(RowScan) a row and 2 * rows + 2 numbers. Returns the numbers in use; NO_ROOM less those that are
   needed; or FAILED for offsets that are none. */
API i64 maskpack_make_layouts(const Origin *origins, i64 num_origins, const Cut *cuts, i64 m, Job *jobs, Layout *whole, Layout *out,
                              i64 rows, RowScan *found, i64 *memory, i64 room, i64 threads) {
    Arena arena = {memory, 0, room};
    for (i64 at = 0; at < num_origins; at++) {
        const Origin *origin = origins + at;
        Layout *own = whole + at;
        if (origin->way == OF_LAYOUT) *own = *(const Layout *)origin->at;
        else if (origin->way == OF_OFFSETS) {
            if (!are_offsets(origin->at, rows, origin->limit)) return FAILED;
            lead_layout(&arena, origin->at, 1, rows, 0, own);
        } else scan_mask(&arena, origin, found, jobs, own, threads);
        if (origin->way != OF_PREFIX || arena.used > room) continue;
        i64 *ends = (i64 *)found;
        for (i64 row = 0; row < rows; row++) {
            i64 last = own->splits[row + 1] - 1;
            ends[row] = last < own->splits[row] ? 0 : own->starts[last] + own->counts[last];
        }
        lead_layout(&arena, ends, 0, rows, origin->width, own);
    }
    for (i64 at = 0; at < m; at++) {
        const Layout *of = whole + cuts[at].origin;
        if (cuts[at].low < 0) out[at] = *of;
        else if (arena.used > room) arena.used += 2 * rows + 2; /* and spans that are not known yet */
        else if (new_layout(&arena, out + at, rows, cuts[at].width, of->splits[rows]))
            maskpack_cut(of, cuts[at].low, cuts[at].width, (i64 *)out[at].splits, (i64 *)out[at].bounds, (i64 *)out[at].starts, (i64 *)out[at].counts);
    }
    return arena.used <= room ? arena.used : NO_ROOM - arena.used;
}

/* ------------------------------------------------------------------ layouts from elsewhere */

/* Whether a layout lies in its body and can be read: spans that rise without touching each other, within the width.
   `spans` [index + 1] are counted; a AS_PART may have as many as its parent, and `most` in all are too many. */
static int check_layout(const Stored *all, i64 index, const u8 *body, i64 nbytes, i64 rows, i64 most, i64 *spans) {
    const Stored *stored = all + index;
    i64 first = 0, empty = !stored->b.count && !stored->c.count;
    if (stored->width < 0 || stored->width >= (i64)1 << 31 || stored->anchor < 0 || stored->anchor > stored->width) return 0;
    if (!holds(&stored->a, nbytes, 8) || !holds(&stored->b, nbytes, 8) || !holds(&stored->c, nbytes, 8)) return 0;
    if (stored->kind == AS_PART) {
        if (stored->parent < 0 || stored->parent >= index || !empty || stored->a.count) return 0;
        spans[index] = spans[stored->parent];
        return spans[index] <= most && stored->low >= 0 && stored->low <= all[stored->parent].width - stored->width;
    }
    if (stored->parent || stored->low) return 0;
    if (stored->kind == AS_MASK) {
        if (stored->a.size != 1 || stored->a.count != mask_bytes(stored, rows) || !empty) return 0;
        for (i64 row = 0; row < rows; row++) first += spans_of_row(stored, body, row, 0, NULL, NULL, 0);
        spans[index] = first;
        return first <= most;
    }
    if (stored->kind != AS_SPANS || !of_each(&stored->c, rows)) return 0;
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
