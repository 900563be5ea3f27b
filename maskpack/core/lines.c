/* The layouts of a nested batch: the lines of each row, three numbers of 4 bytes each, which move with the row.

       a layout       start, count, checksum                          a line for each span; -count if one more follows, 0
                                                                      without any span
                      -1, checksum, bits | bits | bits                the mask as bits, if that takes fewer lines
       behind them    -2 - field, checksum, bits | bits | bits        the signs of a field, if any is set in this row

   The lines of a row do not depend on other rows. Checksums depend on the layout or the field, too. */

enum { HEAD = 8, BITS = -1, SIGNS = -2 };

static i64 number_of(const u8 *at) {
    int32_t number;
    memcpy(&number, at, 4);
    return number;
}

static void put_number(u8 *at, i64 number) {
    int32_t own = (int32_t)number;
    memcpy(at, &own, 4);
}

static i64 lines_of_bits(i64 width) { return (HEAD + (width + 7) / 8 + LINE - 1) / LINE; }

/* A checksum of numbers: no two inputs that differ in one of them have the same. */
static i64 checksum(i64 seed, const u8 *numbers, i64 nbytes) {
    u32 sum = 2166136261u ^ (u32)seed;
    for (i64 at = 0; at < nbytes; at += 4) {
        sum = (sum ^ (u32)number_of(numbers + at)) * 16777619u;
        sum ^= sum >> 15;
    }
    return (int32_t)sum;
}

/* Completes lines of bits, of which the numbers from the third on are written. */
static void close_bits(u8 *line, i64 head, i64 seed, i64 lines) {
    put_number(line, head);
    put_number(line + 4, checksum(seed, line + HEAD, LINE * lines - HEAD));
}

static int intact_bits(const u8 *line, const u8 *end, i64 seed, i64 lines) {
    return end - line >= LINE * lines && number_of(line + 4) == checksum(seed, line + HEAD, LINE * lines - HEAD);
}

/* Writes the lines of rows of m layouts, and of k fields with signs. `ends` [rows + 1] are cumulated lines; without
   `lines` they are only counted. Returns the number of lines. */
API i64 maskpack_write_lines(const Layout *layouts, i64 m, const Signs *signs, i64 k, i64 rows, i64 *ends, u8 *lines) {
    i64 n = ends[0] = 0;
    for (i64 row = 0; row < rows; row++) {
        for (i64 at = 0; at < m; at++) {
            const i64 *splits = layouts[at].splits + row, *starts = layouts[at].starts, *counts = layouts[at].counts;
            i64 spans = splits[1] - splits[0], most = lines_of_bits(layouts[at].width);
            u8 *line = lines ? lines + LINE * n : NULL;
            n += spans > most ? most : spans ? spans : 1;
            if (!line) continue;
            if (spans > most) {
                memset(line, 0, (size_t)(LINE * most));
                for (i64 span = splits[0]; span < splits[1]; span++) set_bits(line + HEAD, starts[span], counts[span]);
                close_bits(line, BITS, at, most);
                continue;
            }
            for (i64 span = splits[0]; span < splits[1] || span == splits[0]; span++, line += LINE) {
                put_number(line, spans ? starts[span] : 0);
                put_number(line + 4, !spans ? 0 : span + 1 < splits[1] ? -counts[span] : counts[span]);
                put_number(line + 8, checksum(at, line, 8));
            }
        }
        for (i64 field = 0; field < k; field++) {
            if (!signs[field].bits) continue;
            i64 nbytes = (layouts[signs[field].layout].width + 7) / 8, most = lines_of_bits(8 * nbytes), any = 0;
            const u8 *bits = signs[field].bits + row * nbytes;
            for (i64 at = 0; at < nbytes && !any; at++) any = bits[at];
            if (!any) continue;
            if (lines) {
                memset(lines + LINE * n, 0, (size_t)(LINE * most));
                memcpy(lines + LINE * n + HEAD, bits, (size_t)nbytes);
                close_bits(lines + LINE * n, SIGNS - field, SIGNS - field, most);
            }
            n += most;
        }
        ends[row + 1] = n;
    }
    return n;
}

/* Reads the spans of layout `at` in a row, whose lines begin at *line; how many there are, or -1 if they were changed or
   there is no room for them. */
static i64 read_spans(const u8 **line, const u8 *end, i64 at, i64 width, i64 *starts, i64 *counts, i64 room) {
    if (end - *line >= LINE && number_of(*line) == BITS) {
        i64 most = lines_of_bits(width);
        const u8 *bits = *line + HEAD;
        if (!intact_bits(*line, end, at, most)) return -1;
        *line += LINE * most;
        return spans_of_bits(bits, width, starts, counts, room);
    }
    for (i64 n = 0, low = 0;; n++, *line += LINE) {
        if (end - *line < LINE || number_of(*line + 8) != checksum(at, *line, 8)) return -1;
        i64 start = number_of(*line), count = number_of(*line + 4), more = count < 0;
        count = more ? -count : count;
        if (start < low || start + count > width || (!count && (n || start))) return -1;
        if (starts && count) {
            if (n == room) return -1;
            starts[n] = start;
            counts[n] = count;
        }
        low = start + count + 1;
        if (more) continue;
        *line += LINE;
        return n + (count > 0);
    }
}

/* Reads what `maskpack_write_lines` wrote, `ends` [rows + 1] and `n` lines, in two steps: without `starts` lines are
   verified and spans counted. Of layout `at`, `axes` [m + 1, 2] has the width and, after the first step, the place of its
   spans in starts and counts, which end where those of the next one begin; splits [m, 2, rows + 1] are its splits and
   bounds. `signs` [k] are written, if any has bits, which are 0 before. Returns the number of spans, or -1 - the layout
   whose lines were changed. */
API i64 maskpack_read_lines(const u8 *lines, i64 n, const i64 *ends, i64 rows, i64 *axes, i64 m, const Signs *signs,
                            i64 k, i64 *splits, i64 *starts, i64 *counts) {
    i64 spans = 0, each = rows + 1;
    if (ends[0] || ends[rows] != n) return -1;
    for (i64 at = 0; at < m; at++) splits[2 * at * each] = splits[(2 * at + 1) * each] = 0;
    for (i64 row = 0; row < rows; row++) {
        if (ends[row + 1] < ends[row] || ends[row + 1] > n) return -1;
        const u8 *line = lines + LINE * ends[row], *end = lines + LINE * ends[row + 1];
        for (i64 at = 0; at < m; at++) {
            i64 *split = splits + 2 * at * each + row, first = starts ? axes[2 * at + 1] + *split : 0;
            i64 *own = starts ? starts + first : NULL, *counted = starts ? counts + first : NULL;
            i64 found = read_spans(&line, end, at, axes[2 * at], own, counted, axes[2 * at + 3] - first);
            if (found < 0) return -1 - at;
            split[1] = split[0] + found;
            split[each + 1] = split[each];
            for (i64 span = first; starts && span < first + found; span++) split[each + 1] += counts[span];
            spans += found;
        }
        while (line < end) {
            i64 field = SIGNS - number_of(line);
            if (field < 0 || field >= k || signs[field].layout < 0) return -1;
            i64 width = axes[2 * signs[field].layout], most = lines_of_bits(width), nbytes = (width + 7) / 8;
            if (!intact_bits(line, end, SIGNS - field, most)) return -1 - signs[field].layout;
            if (signs[field].bits) memcpy(signs[field].bits + row * nbytes, line + HEAD, (size_t)nbytes);
            line += LINE * most;
        }
    }
    for (i64 at = 0; at < m && !starts; at++) axes[2 * at + 3] = axes[2 * at + 1] + splits[2 * at * each + rows];
    return spans;
}
