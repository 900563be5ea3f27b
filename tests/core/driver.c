/* Random fields through the core: scan, store, encode, check, decode. The bytes that are made go to the standard output;
   they are the same on every machine. test_aarch64.py compares machines. Few cases do not have every encoding, which is
   an error.

       driver FIRST_SEED COUNT */

#include <stdio.h>

#include "core.c"

enum { MOST_FIELDS = 4, ROOM = 1 << 20 };

static u64 state, kinds; /* of the generator; the encodings that were taken, a bit each */

static i64 draw(i64 n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (i64)((state >> 33) % (u64)n);
}

static i64 noise(void) { return (i64)((u64)draw((i64)1 << 31) << 33 ^ (u64)draw((i64)1 << 31) << 8 ^ (u64)draw(256)); }

static void expect(int fine, const char *what) {
    if (fine) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void *room(i64 nbytes) {
    void *memory = calloc((size_t)nbytes + 64, 1);
    expect(memory != NULL, "no memory");
    return memory;
}

static void put(const void *memory, i64 nbytes) { fwrite(memory, 1, (size_t)nbytes, stdout); }

/* Words of a kind that an encoding is for; `before` is a field of as many words. */
static void make_words(u8 *values, const i64 *bounds, i64 rows, i64 items, i64 size, const u8 *before) {
    i64 kind = draw(before ? 14 : 11), base = noise(), step = draw(4), word = 0, lag = 0;
    for (i64 row = 0; row < rows; row++)
        for (i64 i = bounds[row] * items; i < bounds[row + 1] * items; i++) {
            i64 place = i - bounds[row] * items;
            if (kind == 0) word = noise();
            else if (kind == 1) word = (i64)((u64)base + (u64)draw(40));
            else if (kind == 2) word = 7 * draw(2);
            else if (kind == 3) word = draw(9) ? word : noise();
            else if (kind == 4) word = row + place * step;
            else if (kind == 5) word = draw(40) ? 0 : noise();
            else if (kind == 6) word = (i64)((u64)word + (u64)(draw(20) > 0));
            else if (kind == 7) word = place % 50 * (1 + row % 2);
            else if (kind == 8) word = (place % items + 1) * place * 1000;
            else if (kind == 9) {
                if (!lag || !draw(60)) lag = i < 100 ? 0 : 1 + draw(i);
                word = lag ? (i64)word_at(values + (i - lag) * size, size) : noise();
            } else if (kind == 10) word = draw((i64)1 << draw(18));
            else word = (i64)((u64)word_at(before + i * size, size) + (u64)draw(5) - 2);
            put_word(values + i * size, word, size);
        }
}

/* The padded form of values, position by position. */
static void pad_words(u8 *padded, const u8 *values, const u8 *mask, const i64 *bounds, i64 rows, i64 width, i64 element, i64 size,
                      i64 mode, u64 pad) {
    for (i64 row = 0; row < rows; row++) {
        i64 at = bounds[row];
        for (i64 column = 0; column < width; column++) {
            u8 *to = padded + (row * width + column) * element;
            i64 valid = mask[row * width + column], edge = at > bounds[row] ? at - 1 : at;
            if (valid) memcpy(to, values + at++ * element, (size_t)element);
            else if (mode == BY_EDGE && bounds[row] < bounds[row + 1]) memcpy(to, values + edge * element, (size_t)element);
            else if (mode == BY_SIGNS) put_word(to, (i64)((u64)draw(2) << (8 * size - 1)), size);
            else if (mode != BY_EDGE)
                for (i64 i = 0; i < element; i += size) put_word(to + i, mode == BY_ROW ? row : (i64)pad, size);
        }
    }
}

static void run(u64 seed) {
    static const i64 widths[] = {1, 5, 40, 300, 700}, sizes[] = {1, 2, 4, 8}, modes[] = {CONSTANT, BY_EDGE, BY_ROW, BY_SIGNS};
    state = seed;
    i64 rows = draw(9), width = widths[draw(5)], kind = draw(3), num_entries = 0, n = 1 + draw(MOST_FIELDS);
    u8 *mask = room(rows * width), *body = room(ROOM);
    for (i64 row = 0; row < rows; row++) {
        i64 stop = draw(width + 1);
        for (i64 column = 0; column < width; column++)
            mask[row * width + column] = kind == 0 ? 1 : kind == 1 ? column < stop : draw(10) < 8;
    }
    Origin origin = {.at = mask, .size = 1, .rows = rows, .width = width, .row_stride = width, .significant = 255, .way = OF_MASK};
    Cut whole = {0, -1, width};
    RowScan *found = room((rows + 1) * (i64)sizeof(RowScan) + 16 * (rows + 1));
    i64 numbers = 2 * rows + 2 + rows * (width + 1), *memory = room(8 * numbers);
    Layout layout, of_origin;
    maskpack_make_layouts(&origin, 1, &whole, 1, NULL, &of_origin, &layout, rows, found, memory, numbers, 2);
    const i64 *bounds = layout.bounds;

    Stored stored = {0};
    Job jobs[MOST_FIELDS] = {0};
    u8 *values[MOST_FIELDS], *padded[MOST_FIELDS];
    i64 fields[MOST_FIELDS], bools[MOST_FIELDS] = {0}, first = 0;
    for (i64 at = 0; at < n; at++) {
        Job *job = jobs + at;
        i64 near = at && draw(2), size = near ? jobs[at - 1].size : sizes[draw(4)];
        i64 items = near ? jobs[at - 1].items : 1 + draw(5) / 3, mode = modes[draw(items == 1 && size > 1 ? 4 : 3)];
        u64 pad = (u64)draw(5);
        values[at] = room(bounds[rows] * items * size);
        padded[at] = room(rows * width * items * size);
        make_words(values[at], bounds, rows, items, size, near ? values[at - 1] : NULL);
        pad_words(padded[at], values[at], mask, bounds, rows, width, items * size, size, mode, pad);
        job->field = (Field){.padded = padded[at], .row_stride = width * items * size, .outer = 1, .size = size, .items = items};
        job->padded = job->num_pads = job->integers = 1;
        job->items = items;
        job->size = size;
        job->rows = rows;
        job->hints = draw(2) ? (i64)1 << (draw(5) ? draw(DICTIONARY + 1) : PIECES) : 0;
        job->near = near ? at - 1 : -1;
        job->head = job->tail = job->form.kind = job->form.inner_kind = -1;
        job->columns = items > 1 ? items : 0;
        job->pads[0].mode = mode;
        job->pads[0].pad[0] = pad;
        job->first = first;
        first += job->columns + 3;
    }
    Entry *slots = room(first * (i64)sizeof(Entry)), *entries = room(first * (i64)sizeof(Entry));
    i64 threads = 1 + 2 * draw(2);
    i64 used = maskpack_encode(jobs, n, &layout, 1, &stored, slots, entries, &num_entries, fields, body, ROOM, threads);
    expect(used >= 0, "encode");
    put(&stored, sizeof stored);
    put(entries, num_entries * (i64)sizeof(Entry));
    for (i64 at = 0; at < num_entries; at++) kinds |= 1ull << entries[at].kind;
    put(fields, 8 * n);
    put(body, used);

    expect(!maskpack_check_layouts(&stored, 1, body, used, rows, layout.splits[rows]), "a layout");
    i64 bad = maskpack_check_fields(entries, num_entries, &layout, 1, body, used, rows, rows, ROOM, fields, n, bools);
    expect(!bad, "a field that cannot be decoded");
    Target targets[2 * MOST_FIELDS] = {0};
    for (i64 at = 0; at < n; at++) {
        Target *target = targets + 2 * at;
        target[0] = target[1] = (Target){jobs[at].field, 0, fields[at], 0};
        target[0].field.packed = room(bounds[rows] * jobs[at].items * jobs[at].size);
        target[1].field.padded = room(rows * width * jobs[at].items * jobs[at].size);
        target[1].padded = 1;
        target[1].field.pads = body + jobs[at].under_mask.at;
        target[1].field.pads_size = jobs[at].under_mask.size;
        target[1].field.pads_step = jobs[at].under_mask.count == 1 ? 0 : jobs[at].under_mask.size;
    }
    Given part = {{entries, &layout, body, rows, rows, NULL}, NULL, NULL, rows};
    expect(!maskpack_decode(targets, 2 * n, &part, 1, &layout, rows, draw(2), 1 + draw(2)), "decode");
    for (i64 at = 0; at < n; at++) {
        i64 element = jobs[at].items * jobs[at].size;
        expect(!memcmp(targets[2 * at].field.packed, values[at], (size_t)(bounds[rows] * element)), "packed values");
        expect(!memcmp(targets[2 * at + 1].field.padded, padded[at], (size_t)(rows * width * element)), "padded values");
    }
}

int main(int argc, char **argv) {
    expect(argc == 3, "driver FIRST_SEED COUNT");
    u64 first = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10);
    for (u64 seed = first; seed < first + count; seed++) run(seed);
    expect((kinds | 1ull << CONCAT) == (1ull << NUM_KINDS) - 1, "an encoding that no field took");
    return 0;
}
